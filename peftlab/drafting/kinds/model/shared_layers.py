"""Drafts that begin as their target does: what the two have in common runs once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from peftlab.decoding.engine import Engine
from peftlab.decoding.flat import FlatEngine
from peftlab.decoding.own_layers import AdaptedExit, AdaptedExitDrafter, Exit
from peftlab.drafting.kinds.base import Opened, OwnLayers
from peftlab.drafting.truncation import layer_stack

# What may differ between two configurations of which one has fewer layers.
_APART = {"num_hidden_layers", "n_layer", "layer_types", "max_window_layers", "dtype", "architectures", "use_cache"}
_APART |= {"transformers_version", "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"}


def shared_layers(target: PreTrainedModel, draft: PreTrainedModel) -> int:
    """Return how many first layers a draft has in common with its target, number for number; at most all but its last.

    0 where the two embed tokens differently, have another dtype, or differ in their configurations otherwise.
    """
    ours, theirs = target.config.to_dict(), draft.config.to_dict()
    differing = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    if type(target) is not type(draft) or target.dtype != draft.dtype or differing - _APART:
        return 0
    if not _same(target.get_input_embeddings(), draft.get_input_embeddings()):
        return 0
    kinds = ours.get("layer_types") or [], theirs.get("layer_types") or []
    pairs = [*zip(layer_stack(target), layer_stack(draft), strict=False)][: len(layer_stack(draft)) - 1]
    apart = (i for i, pair in enumerate(pairs) if kinds[0][i : i + 1] != kinds[1][i : i + 1] or not _same(*pair))
    return next(apart, len(pairs))


def opened_beside(opened: Opened, first: int) -> Opened:
    """Return a draft model, opened as a model of its own, as one that shares its first layers with a flat target."""
    draft = opened.engine
    if not first or not isinstance(draft, FlatEngine):
        return opened
    return replace(opened, own=partial(_adapted, draft, first), features=(first,))


def _adapted(draft: FlatEngine, first: int, target: Engine) -> OwnLayers | None:
    if not isinstance(target, FlatEngine):
        return None
    adapted = AdaptedExit(Exit(target, first), draft)
    return OwnLayers(adapted, partial(AdaptedExitDrafter, adapted=adapted))


def _same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
