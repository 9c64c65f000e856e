"""Target and draft as a user names them, loaded and checked against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.decoding.drafters.base import Drafter
from peftlab.decoding.drafters.head_drafter import Heads, MedusaDrafter, is_medusa, read_medusa
from peftlab.decoding.drafters.model_drafter import ModelDrafter
from peftlab.decoding.drafters.model_free import LookupOrDraft, NGram, PromptLookup, Recycling
from peftlab.decoding.engines.base import Engine
from peftlab.decoding.engines.build import build_engine
from peftlab.decoding.engines.reduced_vocabulary import ReducedVocabulary, read_tokens
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import read_object
from peftlab.models.pretrained import load_base, load_config, load_tokenizer

BOTH = "lookup+draft"
FREE: dict[str, Callable[[], Drafter]] = {"lookup": PromptLookup, "recycling": Recycling, "ngram": NGram}
"""Name -> drafter that needs no model."""


@dataclass
class Pair:
    """A target with its tokenizer, and a draft model or Medusa heads if there are any.

    Attributes:
        warnings: what a user should know before he goes on.
    """

    target: Engine
    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]
    draft: Engine | None = None
    heads: Heads | None = None
    target_parameters: int = 0
    draft_parameters: int = 0
    warnings: tuple[str, ...] = ()


def load_pair(
    target: str,
    draft: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    draft_dtype: torch.dtype | None = None,
    pack: bool = True,
) -> Pair:
    """Load a target and, if named, its draft.

    Args:
        target, draft: references as ``checkpoints.base.load_base`` takes them; a draft may also be a directory
            of Medusa heads.
        dtype: of the target.
        draft_dtype: of the draft, default the target's. A draft may be rounded at will: that costs acceptance,
            never exactness.
        pack: see ``engine.build_engine``.

    Raises:
        PeftlabError: something cannot be loaded, or the two do not speak the same tokens.
    """
    tokenizer = load_tokenizer(target)
    heads_given = draft is not None and is_medusa(draft)
    draft_tokenizer = None
    if draft is not None and not heads_given:
        load_config(draft)  # a wrong name is found before any weights are read
        draft_tokenizer = _tokenizer_of(draft)
        check_tokens(tokenizer, draft_tokenizer)
    model, _ = load_base(target, "AutoModelForCausalLM", dtype=dtype)
    eos = eos_ids(model)
    size = model.num_parameters()
    if draft is None:
        return Pair(build_engine(model, pack=pack), tokenizer, eos, target_parameters=size)
    if heads_given:
        _check_heads(draft, model)
        heads = read_medusa(draft).to(draft_dtype or dtype)
        return Pair(
            target=build_engine(model, pack=pack),
            tokenizer=tokenizer,
            eos=eos,
            heads=heads,
            target_parameters=size,
            draft_parameters=sum(parameter.numel() for parameter in heads.parameters()),
        )
    small, _ = load_base(draft, "AutoModelForCausalLM", dtype=draft_dtype or dtype)
    vocabulary = common_vocabulary(model, small, draft_tokenizer)
    return Pair(
        target=build_engine(model, vocabulary=vocabulary, pack=pack),
        tokenizer=tokenizer,
        eos=eos,
        draft=draft_engine(small, vocabulary, read_tokens(draft), pack=pack),
        target_parameters=size,
        draft_parameters=small.num_parameters(),
        warnings=_size_warning(size, small.num_parameters()),
    )


def draft_engine(
    draft: PreTrainedModel, vocabulary: int | None = None, tokens: Tensor | None = None, *, pack: bool = True
) -> Engine:
    """Return a draft's engine, confined to ``tokens`` if they are given (see ``confined.ReducedVocabulary``)."""
    if tokens is None:
        return build_engine(draft, vocabulary=vocabulary, pack=pack)
    return ReducedVocabulary(draft, tokens, vocabulary or draft.get_output_embeddings().weight.shape[0], pack=pack)


def _check_heads(directory: str, target: PreTrainedModel) -> None:
    config, (rows, width) = read_object(Path(directory) / "config.json"), target.get_output_embeddings().weight.shape
    tokens, states = config.get("vocab_size"), config.get("hidden_size")
    if (tokens, states) != (rows, width):
        raise PeftlabError(
            f"{directory}: heads for states of {states} and {tokens} tokens, but the target has {width} and {rows}"
        )


def check_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase | None) -> None:
    """Refuse a draft whose tokenizer gives a token another id; a draft saved without a tokenizer passes.

    Raises:
        PeftlabError: naming the first token that differs.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab() if draft is not None else None
    if theirs is not None and ours != theirs:
        apart = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda item: item[1])
        token = apart[0][0]
        raise PeftlabError(
            f"draft: its tokenizer is not the target's; {len(apart)} entries differ, the first is {token!r} "
            f"(id {ours.get(token, 'none')} in the target's, {theirs.get(token, 'none')} in the draft's)"
        )


def common_vocabulary(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> int:
    """Return how many logits target and draft share: all, or what is left without one's padding.

    Args:
        tokenizer: of both; None where the draft has none.

    Raises:
        PeftlabError: the LM heads differ in size with no tokenizer to explain it.
    """
    sizes = [m.get_output_embeddings().weight.shape[0] for m in (target, draft)]
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


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the token ids that end the model's outputs."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def make_drafter(name: str, pair: Pair, width: int = 1) -> Drafter:
    """Return a new drafter: ``"draft"`` is the pair's model or heads, the others are ``FREE``, and ``BOTH`` copies
    what stood after two or three equal tokens before, and drafts elsewhere.

    Args:
        width: choices of each Medusa head that a tree may use; 1 is a chain.

    Raises:
        PeftlabError: no such drafter, no draft in the pair, or a tree asked of what has no heads.
    """
    check_width(width, heads=pair.heads is not None)
    if name in FREE:
        return FREE[name]()
    if name == BOTH:
        return LookupOrDraft(PromptLookup(shortest=2), make_drafter("draft", pair, width))
    if name != "draft":
        names = ("draft", BOTH, *FREE)
        raise PeftlabError(f"drafter {name!r}: none of {', '.join(names)}{did_you_mean(name, names)}")
    if pair.heads is not None:
        return MedusaDrafter(pair.heads, width)
    if pair.draft is None:
        raise PeftlabError("drafter 'draft': no draft model given")
    return ModelDrafter(pair.draft)


def check_width(width: int, *, heads: bool) -> None:
    """Raise ``PeftlabError`` for a tree of no width, or one asked of what has no heads."""
    if width < 1 or (width > 1 and not heads):
        raise PeftlabError(f"width {width}: 1, or more where the draft is a directory of Medusa heads")


def _tokenizer_of(reference: str) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(reference)
    except PeftlabError:
        return None  # a draft may be saved without one; then only the sizes can be compared


def _size_warning(target: int, draft: int) -> tuple[str, ...]:
    if draft < target:
        return ()
    return (f"the draft ({draft:,} parameters) is no smaller than the target ({target:,})",)
