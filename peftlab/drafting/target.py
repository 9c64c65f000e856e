"""What drafts read of language models, the checks that a draft fits its target, and the target's identity."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from peftlab.errors import PeftlabError
from peftlab.files import read_object, typed_value, write_json
from peftlab.methods.config import MethodConfig
from peftlab.methods.inject import plan_injection
from peftlab.models.architectures import embeddings_of
from peftlab.models.chunked_sum import last_position
from peftlab.models.load import eval_mode
from peftlab.untyped import Unwrapped


def forward_hidden(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | dict[str, Tensor | None] | None,
    positions: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the hidden states [b, n, H] of every layer; the last one is after the final norm.

    The LM head runs on a row's last position only. ``check_head`` verifies that the last state times the
    LM head is what the model computes.

    Args:
        model: a causal language model, wrapped by accelerate or not.
        input_ids: [b, n], padded on the right. attention_mask: [b, n], or any form that the model takes.
        positions: [b, n]; None: in order.
    """
    output = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        logits_to_keep=last_position(input_ids),
        output_hidden_states=True,
        use_cache=False,
        **({} if positions is None else {"position_ids": positions}),
    )
    return output.hidden_states


def last_hidden(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the states [b, n, H] that the LM head reads, after the final norm; see ``forward_hidden``.

    Args:
        model, input_ids, attention_mask: as for ``forward_hidden``; both tensors [b, n].
    """
    return forward_hidden(model, input_ids, attention_mask)[-1]


def unwrapped(model: nn.Module) -> Unwrapped:
    """Return the module inside the one that accelerate wraps it in, or ``model`` itself."""
    return getattr(model, "module", model)


def logits_of(states: Tensor, head: Tensor) -> Tensor:
    """Return the product of states [..., H] and a head [V, H] in the head's dtype: [..., V].

    In mixed precision accelerate gives the states of a 16-bit model in fp32, and blocks that train in fp32 on such a
    model may share its LM head.

    Args:
        states: [..., H]. head: [V, H].
    """
    return F.linear(states.to(head.dtype), head)


def head_weight(model: nn.Module) -> Tensor:
    """Return the LM head's weight [V, H].

    Raises:
        PeftlabError: the head has a bias, or there is none.
    """
    bare = unwrapped(model)
    head = bare.get_output_embeddings()
    name = type(bare).__name__
    if head is None:
        raise PeftlabError(f"{name} has no LM head; load a causal language model")
    if getattr(head, "bias", None) is not None:
        raise PeftlabError(f"{name}: its LM head has a bias, which draft training does not support")
    return head.weight


def input_embedding(model: PreTrainedModel) -> Tensor:
    """Return the embeddings of a model's tokens, [V, D]."""
    module = model.get_input_embeddings()
    assert isinstance(module, nn.Module)
    return module.get_parameter("weight")


@torch.no_grad()
def frozen_hidden(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return ``last_hidden`` [b, n, H] without a graph, in eval mode; the model's mode is restored afterwards.

    Args:
        model, input_ids, attention_mask: as for ``forward_hidden``; both tensors [b, n].
    """
    with eval_mode(model):
        return last_hidden(model, input_ids, attention_mask)


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the token ids that end the model's outputs."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def end_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the token ids that end the target's outputs; its tokenizer's where the model names none.

    Args:
        target: whose generation or model configuration names them. tokenizer: the target's.
    """
    own = tokenizer.eos_token_id
    return eos_ids(target) or frozenset([] if own is None else [own])


M = TypeVar("M", bound=PreTrainedModel)


def truncate(model: M, layers: Sequence[int], *, share: bool = False) -> M:
    """Return a model of the same class with only these layers, and the embeddings, norm and head of ``model``.

    Args:
        model: a language model with one stack of layers.
        layers: which of its layers to keep, by number from 0, in rising order.
        share: use the parameters of ``model`` themselves instead of copies (self-speculation).

    Raises:
        PeftlabError: no layer at all, a layer that is not there, one named twice or out of order, or a model
            without one stack of layers.
    """
    stack = layer_stack(model)
    count = len(stack)
    if not layers:
        raise PeftlabError("layers: none named; a draft needs at least one")
    missing = [i for i in layers if not 0 <= i < count]
    if missing:
        raise PeftlabError(f"layers: no layer {missing[0]}; {type(model).__name__} has 0 to {count - 1}")
    if list(layers) != sorted(set(layers)):
        raise PeftlabError(f"layers: {list(layers)} is not a rising list of distinct layers")
    memo: dict[int, object] = {id(p): p for p in model.parameters()} if share else {}
    # The copy finds the stack made already, so that the layers left out are never copied.
    memo[id(stack)] = nn.ModuleList(copy.deepcopy(stack[i], memo) for i in layers)
    draft = copy.deepcopy(model, memo)
    _renumber(draft, layers)
    return draft


def layer_stack(model: PreTrainedModel) -> nn.ModuleList:
    """Return the one list of layers of a language model.

    Raises:
        PeftlabError: there is none with as many layers as the configuration says, or more than one.
    """
    if model.config.is_encoder_decoder:
        raise PeftlabError(f"{type(model).__name__} is an encoder-decoder model: it is not cut to some of its layers")
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(stacks) != 1:
        raise PeftlabError(f"{type(model).__name__}: found {len(stacks)} stacks of {count} layers instead of one")
    return stacks[0]


def _renumber(draft: PreTrainedModel, layers: Sequence[int]) -> None:
    config = draft.config.get_text_config(decoder=True)
    count, config.num_hidden_layers = config.num_hidden_layers, len(layers)
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list) and len(value) == count:  # one entry for each layer
            setattr(config, name, [value[i] for i in layers])
    if getattr(config, "attention_types", None):  # GPT-Neo's short form of one of these lists
        config.attention_types = [[[kind], 1] for kind in config.attention_layers]
    for number, layer in enumerate(layer_stack(draft)):
        for module in layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = number


def check_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase | None) -> None:
    """Refuse a draft whose tokenizer gives a token a different id; a draft saved without a tokenizer passes.

    Args:
        target, draft: tokenizers; None for a draft that has none.

    Raises:
        PeftlabError: naming the first token that differs and the way out.
    """
    if draft is not None and (differing := _token_difference(target, draft, "draft")):
        raise PeftlabError(
            f"draft: its tokenizer is not the target's: {differing}. A draft must have been trained "
            "with the target's token ids; use one of the same family, or draft: {kind: model, truncate: {layers: "
            "[...]}}"
        )


def check_tokenizers(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, *, chat: bool) -> None:
    """Refuse tokenizers that give a token a different id, special ids that differ, and, for chat, different templates.

    Args:
        target, draft: tokenizers. chat: whether the chat templates must be the same, too.

    Raises:
        PeftlabError: naming the first difference and the way out.
    """
    check_tokens(target, draft)
    for name, own, its in _special_differences(target, draft):
        raise PeftlabError(
            f"draft: {name} is {its}, the target's is {own}; copy the target's tokenizer files into the draft's "
            "directory"
        )
    templates = [getattr(tokenizer, "chat_template", None) for tokenizer in (target, draft)]
    if chat and templates[0] != templates[1]:
        raise PeftlabError(
            "draft: its chat template is not the target's, so it would read served chats in another format; copy "
            "the target's tokenizer files (chat_template.jinja) into the draft's directory"
        )


def check_targets(target: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, reference: str) -> None:
    """Refuse a further target of one draft that gives a token another id, or ends its text with another one.

    Args:
        target, other: tokenizers of the first and of a further target. reference: of the latter, for messages.

    Raises:
        PeftlabError: naming it and the first difference.
    """
    if differing := _token_difference(target, other, "there"):
        raise PeftlabError(
            f"data.targets: the tokenizer of {reference} is not the target's: {differing}. One draft "
            "serves targets of one tokenizer; train another draft for it"
        )
    for name, own, its in _special_differences(target, other):
        raise PeftlabError(f"data.targets: {name} of {reference} is {its}, the target's is {own}")


def _token_difference(target: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, where: str) -> str:
    """Return in words how many entries of two vocabularies differ, and the first; "" where none does."""
    own, theirs = target.get_vocab(), other.get_vocab()
    differ = sorted(set(own.items()) ^ set(theirs.items()), key=lambda item: (item[1], item[0]))
    if not differ:
        return ""
    token = differ[0][0]
    ids = f"target {own.get(token)}, {where} {theirs.get(token)}"
    return f"{len(differ)} entries differ, the first is {token!r} ({ids})"


def _special_differences(
    target: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase
) -> Iterator[tuple[str, int | None, int | None]]:
    """Yield the name, the target's id and the other's of each special token whose ids differ."""
    for name in ("bos_token_id", "eos_token_id"):
        own, its = getattr(target, name), getattr(other, name)
        if own != its:
            yield name, own, its


def check_models(target: PreTrainedModel, draft: PreTrainedModel, length: int) -> None:
    """Refuse vocabularies of different size and a draft context below ``length``.

    Args:
        target, draft: causal language models. length: tokens of the longest example.

    Raises:
        PeftlabError: naming both values and the way out.
    """
    rows = [len(head_weight(model)) for model in (target, draft)]
    if rows[0] != rows[1]:
        raise PeftlabError(
            f"draft: its LM head has {rows[1]} rows, the target's has {rows[0]} (one is padded): "
            f"model.resize_token_embeddings({rows[0]}) and save_pretrained make the draft fit"
        )
    limit = getattr(draft.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit and limit < length:
        raise PeftlabError(
            f"draft: its context is {limit} tokens, the data's longest example has {length}; shorten "
            "data.max_new_tokens or train.max_length, or take a draft with more positions"
        )


def check_dtypes(target: PretrainedConfig, draft: PretrainedConfig) -> None:
    """Refuse two different half precisions on disk.

    Args:
        target, draft: configurations, which say the dtype that is stored.

    Raises:
        PeftlabError: one is stored in float16, the other in bfloat16.
    """
    own, other = (str(getattr(config, "dtype", None)).removeprefix("torch.") for config in (target, draft))
    if {own, other} == {"float16", "bfloat16"}:
        raise PeftlabError(
            f"draft: stored in {other}, the target in {own}; servers load both in one of them, which rounds the "
            f"draft a second time: load it with dtype={own} and save it again"
        )


def check_method(model: nn.Module, config: MethodConfig) -> None:
    """Refuse a method that does not fit the model, or that exchanges its LM head; nothing is changed.

    Args:
        model: the module into which the method would be injected. config: of the method.

    Raises:
        PeftlabError: as injecting would; or the head would get an addition that the loss does not see.
    """
    head = embeddings_of(model)[1]
    for name in plan_injection(model, config).replace:
        if model.get_submodule(name) is head:
            raise PeftlabError(
                f"method {config.name}: an addition on {name}, the LM head, cannot be trained as part of a draft; take "
                f"it out of target_modules, or train the head whole (modules_to_save: [{name}])"
            )


@torch.no_grad()
def check_head(model: PreTrainedModel, what: str, tolerance: float = 1e-4) -> None:
    """Refuse a model whose logits are not its last hidden state times its LM head.

    So the states that training uses are those after the final norm, and nothing (a soft cap, a scale) comes
    after the head.

    Args:
        what: ``target`` or ``draft``, for the message.
        tolerance: allowed difference, relative to the largest logit.
    """
    size = min(16, len(head_weight(model)))
    ids = torch.arange(size, device=head_weight(model).device)[None]
    with eval_mode(model):
        logits = model(input_ids=ids, use_cache=False).logits.float()
        own = nn.functional.linear(last_hidden(model, ids, torch.ones_like(ids)), head_weight(model)).float()
    gap = float((own - logits).abs().max() / logits.abs().max().clamp_min(1e-6))
    if gap > tolerance:
        raise PeftlabError(
            f"{what}: {type(model).__name__} computes other logits than its final hidden state times its LM head "
            f"(off by {gap:.1e} of the largest): it caps or scales them, or its last state lacks the final norm. "
            "Drafts cannot be trained for such models"
        )


def common_vocabulary(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> int:
    """Return how many logits target and draft share: all, or those left when one's padding is cut off.

    Args:
        tokenizer: of both; None where the draft has none.

    Raises:
        PeftlabError: the LM heads differ in size with no tokenizer to explain it.
    """
    sizes = [head_weight(model).shape[0] for model in (target, draft)]
    if sizes[0] != sizes[1] and tokenizer is None:
        raise PeftlabError(
            f"draft: vocabulary of {sizes[1]}, but the target's has {sizes[0]}, and the draft has no tokenizer"
        )
    if sizes[0] != sizes[1] and tokenizer is not None and min(sizes) < len(tokenizer):
        raise PeftlabError(
            f"draft: LM heads of {sizes[0]} (target) and {sizes[1]} (draft) rows, fewer than "
            f"the {len(tokenizer)} tokens of their tokenizer"
        )
    return min(sizes)


IDENTITY_FILE = "target.json"

_SAMPLED = 4  # numbers of each tensor


@dataclass(frozen=True)
class TargetIdentity:
    """A target's identity: a digest of its tokens and a few numbers of each of its tensors.

    Attributes:
        reference: as the recipe names it. tokenizer: digest of its tokens and their ids.
        weights: name of a parameter -> evenly spaced elements of it, in float32. Stored as numbers and not as a digest:
            the same target loaded in another precision has these numbers, rounded.
    """

    reference: str
    tokenizer: str
    weights: dict[str, list[float]]

    def write(self, directory: Path) -> None:
        """Write the identity to a file beside the draft."""
        write_json(directory / IDENTITY_FILE, asdict(self))


def identify(reference: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TargetIdentity:
    """Return the identity of a target.

    Args:
        reference: as the recipe names the target. target: the model. tokenizer: the target's.
    """
    samples = {name: some.float().tolist() for name, some in _samples(target).items()}
    return TargetIdentity(reference, _token_digest(tokenizer), samples)


def read_identity(directory: Path) -> TargetIdentity | None:
    """Return the identity of the target that the draft in a directory was trained for; None where none is stored."""
    file = directory / IDENTITY_FILE
    if not file.exists():
        return None
    values = read_object(file)
    weights = typed_value(values, "weights", dict, file)
    if not all(isinstance(v, list) and all(isinstance(x, float | int) for x in v) for v in weights.values()):
        raise PeftlabError(f"{file}: weights must be lists of numbers by name")
    return TargetIdentity(
        typed_value(values, "reference", str, file), typed_value(values, "tokenizer", str, file), weights
    )


def check_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerBase) -> TargetIdentity | None:
    """Return the identity of the target that is stored beside a draft, after comparing the tokens.

    Args:
        directory: of the draft. tokenizer: of the target that is to be served.

    Raises:
        PeftlabError: the target has other tokens.
    """
    known = read_identity(directory)
    if known is not None and _token_digest(tokenizer) != known.tokenizer:
        raise PeftlabError(
            f"{directory}: trained for {known.reference}, whose tokenizer is not this target's: the ids of its tokens "
            f"differ ({len(tokenizer)} tokens here); train a draft for this target"
        )
    return known


def check_target(directory: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return warnings for a target whose weights are not those that the draft in a directory was trained for.

    Args:
        directory: of the draft. target: to be served. tokenizer: the target's.

    Raises:
        PeftlabError: the target has other tokens.
    """
    known = check_tokenizer(directory, tokenizer)
    if known is None:
        return ()
    samples = _samples(target)
    shared = samples.keys() & known.weights.keys()
    differing = []
    for name in shared:
        then = torch.tensor(known.weights[name]).to(samples[name].dtype)
        if then.shape != samples[name].shape or not torch.equal(then, samples[name]):
            differing.append(name)
    count = len(differing) + len(samples.keys() ^ known.weights.keys())
    if not count:
        return ()
    first = min(differing or samples.keys() ^ known.weights.keys())
    return (
        f"the draft was trained for {known.reference}, and this target's weights differ from it in {count} of "
        f"{len(samples.keys() | known.weights.keys())} tensors ({first}, ...): the output is the target's all the "
        "same, but less is accepted; train the draft for this target (draft: {kind: eagle3, from: ...})",
    )


def _token_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _samples(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        flat = {name: parameter.detach().reshape(-1) for name, parameter in target.named_parameters()}
        return {n: x[:: max(1, x.numel() // _SAMPLED)][:_SAMPLED].cpu() for n, x in flat.items() if x.numel()}
