"""The negative log-likelihood of marked tokens, without ever holding logits of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from peftlab.methods.modes import eval_mode
from peftlab.models.chunked_sum import chunked_sum
from peftlab.tasks.batches import eval_batches
from peftlab.tasks.evaluation_turns import over_processes
from peftlab.tasks.tokens import Row
from peftlab.untyped import Attributes, Unwrapped

_CHUNK = 256  # tokens whose logits live at a time
_READS_HEAD: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def nll(model: nn.Module, inputs: Mapping[str, Tensor], *, label_smoothing: float = 0.0) -> Tensor:
    """Return Σ -log p(token | tokens before it) over the trained tokens of a batch, in fp32.

    Args:
        model: a causal language model, wrapped by accelerate or not.
        inputs: ``input_ids``, ``attention_mask`` or ``position_ids``, and ``trained``, [b, n], padded on the right.
        label_smoothing: share s of each token's loss that is the mean over the vocabulary instead: p(token) becomes
            the geometric mean p(token)^(1-s) · Π p(any)^(s/V).
    """
    loss = partial(F.cross_entropy, reduction="sum", label_smoothing=label_smoothing)
    bare: Unwrapped = getattr(model, "module", model)
    if not reads_head(bare):
        return loss(*_trained_logits(model, inputs))
    hidden, targets = _trained_states(model, inputs)

    def chunk_loss(rows: Tensor, part: Tensor) -> Tensor:
        return loss(head_logits(bare, part), targets[rows])

    rows = torch.arange(len(hidden), device=hidden.device)
    return chunked_sum(chunk_loss, hidden, rows, _CHUNK, list(bare.get_output_embeddings().parameters()))


def token_nll(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return -log p(token | tokens before it) of each trained token, [T], row by row; arguments as for ``nll``.

    For losses that are no sum over tokens: which gradient a token's logits receive is known in the backward pass only,
    which computes each chunk's logits again.
    """
    loss = partial(F.cross_entropy, reduction="none")
    bare: Unwrapped = getattr(model, "module", model)
    if not reads_head(bare):
        return loss(*_trained_logits(model, inputs))
    hidden, targets = _trained_states(model, inputs)

    def chunk_loss(part: Tensor, ids: Tensor) -> Tensor:
        return loss(head_logits(bare, part), ids)

    parts = zip(hidden.split(_CHUNK), targets.split(_CHUNK), strict=True)
    return torch.cat([checkpoint(chunk_loss, *part, use_reentrant=False) for part in parts])


def _trained_states(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the states [T, H] that the LM head predicts the trained tokens from, and these tokens' ids [T]."""
    given, kept = _given(inputs), inputs["trained"][:, 1:]
    bare: Unwrapped = getattr(model, "module", model)
    with _last_states(bare) as states:
        model(**given, logits_to_keep=1)
    return states[0][:, :-1][kept], inputs["input_ids"][:, 1:][kept]


def _trained_logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits [T, V] of the trained tokens, in fp32, and these tokens' ids [T]."""
    kept = inputs["trained"][:, 1:]
    logits = model(**_given(inputs)).logits
    return logits[:, :-1][kept].float(), inputs["input_ids"][:, 1:][kept]


def _given(inputs: Mapping[str, Tensor]) -> Attributes:
    """Return what a model takes of a batch."""
    return {"use_cache": False} | {key: value for key, value in inputs.items() if key != "trained"}


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

    def totals(self, model: nn.Module, data: Dataset) -> list[float]:
        """Return the summed NLL of each batch, in the order of ``eval_batches``."""
        batches = eval_batches(data["length"], self.batch_size)
        return over_processes(data, batches, self.collate, lambda inputs: float(nll(model, inputs)))
