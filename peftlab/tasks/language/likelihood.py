"""The negative log-likelihood of marked tokens, without ever holding logits of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from peftlab.methods.modes import eval_mode
from peftlab.tasks.batches import eval_batches
from peftlab.tasks.tokens import Row
from peftlab.untyped import AutogradContext, Unwrapped

_CHUNK = 256  # tokens whose logits live at a time
_READS_HEAD: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def nll(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return Σ -log p(token | tokens before it) over the trained tokens of a batch, in fp32.

    Args:
        model: a causal language model, wrapped by accelerate or not.
        inputs: ``input_ids``, ``attention_mask`` or ``position_ids``, and ``trained``, [b, n], padded on the right.
    """
    given = {key: value for key, value in inputs.items() if key != "trained"}
    ids, kept = inputs["input_ids"], inputs["trained"][:, 1:]
    targets = ids[:, 1:][kept]  # [T]
    bare: Unwrapped = getattr(model, "module", model)
    if not reads_head(bare):
        logits = model(**given, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1][kept].float(), targets, reduction="sum")
    with _last_states(bare) as states:
        model(**given, use_cache=False, logits_to_keep=1)
    parameters = [p for p in bare.get_output_embeddings().parameters() if p.requires_grad]
    hidden = states[0][:, :-1][kept]  # [T, H]
    return _ChunkedNLL.apply(hidden, targets, bare, torch.is_grad_enabled(), *parameters)


def head_logits(model: Unwrapped, hidden: Tensor) -> Tensor:
    """Return the logits [t, V] of states [t, H] after the final norm: the LM head, and what its class does after it."""
    config = model.config.get_text_config(decoder=True)
    logits = model.get_output_embeddings()(hidden).float()
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None) is not None:  # Granite
        logits = logits / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
def reads_head(model: Unwrapped) -> bool:
    """Whether ``head_logits`` of the last states is what the model computes; tried once per model, then remembered."""
    if model not in _READS_HEAD:
        _READS_HEAD[model] = _tried(model)
    return _READS_HEAD[model]


def _tried(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    if head is None or any(type(p.data) is not Tensor for p in head.parameters()):
        return False
    size = min(16, model.get_input_embeddings().get_parameter("weight").shape[0])
    ids = torch.arange(size, device=model.device)[None]
    with eval_mode(model), _last_states(model) as states:
        try:
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
        except TypeError:  # a model that does not take logits_to_keep
            return False
        if not states:
            return False
        own = head_logits(model, states[0][0])
    return bool((own - logits).abs().max() <= 1e-3 * logits.abs().max().clamp_min(1e-6))


@contextmanager
def _last_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Yield a list that receives the states [b, n, H] that each forward pass gives to the LM head."""
    states: list[Tensor] = []

    def keep(module: nn.Module, arguments: object, output: Unwrapped) -> None:
        states.append(output[0])

    handle = model.get_decoder().register_forward_hook(keep)
    try:
        yield states
    finally:
        handle.remove()


class _ChunkedNLL(torch.autograd.Function):
    """Sum of the NLL; the forward pass takes the gradients that the backward pass returns."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: Tensor,
        targets: Tensor,
        model: nn.Module,
        with_gradient: bool,
        *parameters: Tensor,
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        d_hidden = torch.zeros_like(hidden) if with_gradient and hidden.requires_grad else None
        # A half-precision sum over many chunks would lose the small ones.
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters] if with_gradient else []
        for rows in torch.arange(len(hidden), device=hidden.device).split(_CHUNK):
            with torch.set_grad_enabled(with_gradient):
                part = hidden[rows].detach().requires_grad_(d_hidden is not None)
                loss = F.cross_entropy(head_logits(model, part), targets[rows], reduction="sum")
            total += loss.detach()
            wanted = [*([part] if d_hidden is not None else []), *(parameters if sums else ())]
            if not wanted:
                continue
            gradients = list(torch.autograd.grad(loss, wanted))
            if d_hidden is not None:
                d_hidden[rows] = gradients.pop(0)
            for own, gradient in zip(sums, gradients, strict=True):
                own += gradient
        ctx.save_for_backward(d_hidden, *(own.to(p.dtype) for own, p in zip(sums, parameters, strict=False)))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, d_total: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, *others = (None if d is None else d * d_total.to(d.dtype) for d in ctx.saved_tensors)
        return d_hidden, None, None, None, *others


@dataclass(frozen=True)
class LanguageEvaluation:
    """Held-out splits and how a language model is scored on them.

    Attributes:
        splits: tokenised examples by split name. collate: rows to one batch.
        batch_size: examples per batch and process.
    """

    splits: Mapping[str, Dataset]
    collate: Callable[[Sequence[Row]], dict[str, Tensor]]
    batch_size: int

    def score(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Return per split ``loss`` (nats per trained token), ``perplexity`` and ``bits_per_byte`` of the trained text.

        Every process must call it, and each gets the same result.
        """
        scores = {}
        for split, data in self.splits.items():
            total = math.fsum(self.totals(model, data))
            loss = total / sum(data["trained_tokens"])
            size = max(1, sum(data["trained_bytes"]))
            scores[split] = {
                "loss": loss,
                "perplexity": math.exp(min(loss, 700)),
                "bits_per_byte": total / math.log(2) / size,
            }
        return scores

    @torch.no_grad()
    def totals(self, model: nn.Module, data: Dataset) -> list[float]:
        """Return the summed NLL of each batch; the processes take turns, see ``scoring.Evaluation.predict``."""
        state = PartialState()
        batches = eval_batches(data["length"], self.batch_size)
        found: list[float] = []
        for turn in range(-(-len(batches) // state.num_processes)):
            place = turn * state.num_processes + state.process_index
            mine = place < len(batches)
            inputs = self.collate(data.__getitems__(batches[place if mine else 0]))
            value = float(nll(model, {key: tensor.to(state.device) for key, tensor in inputs.items()}))
            found += [value] if mine else []
        return gather_object(found)
