"""Target and draft as a user names them, loaded and checked against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.checkpoints.base import load_base, load_tokenizer
from peftlab.decoding.drafters import Drafter, ModelDrafter
from peftlab.decoding.engine import Engine, build_engine
from peftlab.decoding.free import NGram, PromptLookup, Recycling
from peftlab.errors import PeftlabError, did_you_mean

FREE: dict[str, Callable[[], Drafter]] = {"lookup": PromptLookup, "recycling": Recycling, "ngram": NGram}
"""Name -> drafter that needs no model."""


@dataclass
class Pair:
    """A target with its tokenizer, and a draft if there is one.

    Attributes:
        warnings: what a user should know before he goes on.
    """

    target: Engine
    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]
    draft: Engine | None = None
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
        target, draft: references as ``checkpoints.base.load_base`` takes them.
        dtype: of the target.
        draft_dtype: of the draft, default the target's. A draft may be rounded at will: that costs acceptance,
            never exactness.
        pack: see ``engine.build_engine``.

    Raises:
        PeftlabError: something cannot be loaded, or the two do not speak the same tokens.
    """
    model, _ = load_base(target, "AutoModelForCausalLM", dtype=dtype)
    tokenizer = load_tokenizer(target)
    eos = eos_ids(model)
    size = model.num_parameters()
    if draft is None:
        return Pair(build_engine(model, pack=pack), tokenizer, eos, target_parameters=size)
    small, _ = load_base(draft, "AutoModelForCausalLM", dtype=draft_dtype or dtype)
    vocabulary = common_vocabulary(model, small, tokenizer, _tokenizer_of(draft))
    return Pair(
        target=build_engine(model, vocabulary=vocabulary, pack=pack),
        tokenizer=tokenizer,
        eos=eos,
        draft=build_engine(small, vocabulary=vocabulary, pack=pack),
        target_parameters=size,
        draft_parameters=small.num_parameters(),
        warnings=_size_warning(size, small.num_parameters()),
    )


def common_vocabulary(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    target_tokenizer: PreTrainedTokenizerBase,
    draft_tokenizer: PreTrainedTokenizerBase | None,
) -> int:
    """Return how many logits target and draft share: all, or what is left without one's padding.

    Raises:
        PeftlabError: the tokenizers differ in a token, or the LM heads in size with no tokenizer to explain it.
    """
    sizes = [m.get_output_embeddings().weight.shape[0] for m in (target, draft)]
    if draft_tokenizer is None:
        if sizes[0] != sizes[1]:
            raise PeftlabError(
                f"draft: vocabulary of {sizes[1]}, but the target's has {sizes[0]}, and the draft has no tokenizer"
            )
        return sizes[0]
    ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if ours != theirs:
        apart = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda item: item[1])
        token = apart[0][0]
        raise PeftlabError(
            f"draft: its tokenizer is not the target's; {len(apart)} entries differ, the first is {token!r} "
            f"(id {ours.get(token, 'none')} in the target's, {theirs.get(token, 'none')} in the draft's)"
        )
    if min(sizes) < len(target_tokenizer) and sizes[0] != sizes[1]:
        raise PeftlabError(
            f"draft: LM heads of {sizes[0]} (target) and {sizes[1]} (draft) rows, fewer than "
            f"the {len(target_tokenizer)} tokens of their tokenizer"
        )
    return min(sizes)


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the token ids that end the model's outputs."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def make_drafter(name: str, pair: Pair) -> Drafter:
    """Return a new drafter: ``"draft"`` is the pair's model, the others are ``FREE``.

    Raises:
        PeftlabError: no such drafter, or no draft model in the pair.
    """
    if name in FREE:
        return FREE[name]()
    if name != "draft":
        raise PeftlabError(f"drafter {name!r}: none of {', '.join(FREE)}{did_you_mean(name, FREE)}")
    if pair.draft is None:
        raise PeftlabError("drafter 'draft': no draft model given")
    return ModelDrafter(pair.draft)


def _tokenizer_of(reference: str) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(reference)
    except PeftlabError:
        return None  # a draft may be saved without one; then only the sizes can be compared


def _size_warning(target: int, draft: int) -> tuple[str, ...]:
    if draft < target:
        return ()
    return (f"the draft ({draft:,} parameters) is no smaller than the target ({target:,})",)
