"""Target and draft as a user names them, loaded and checked against each other."""

from __future__ import annotations

from dataclasses import replace

import torch

from peftlab.decoding.decode import Drafter
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import with_copies
from peftlab.decoding.parallel_drafters import ParallelDrafter, PearlDrafter
from peftlab.decoding.sampled_trees import DrawnTrees, GrowthFactory
from peftlab.decoding.state_drafters import FeatureDrafter, HeadsDrafter
from peftlab.decoding.table import MODEL_FREE, Window, model_free
from peftlab.decoding.theory import DraftCost, TargetWeights
from peftlab.drafting.base import DraftKind, Pair, TargetLoader
from peftlab.drafting.config import DraftConfig
from peftlab.drafting.table import DRAFTS, find_draft
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.hardware import resolve_device
from peftlab.models.pretrained import load_tokenizer
from peftlab.registry import resolve

SUFFIX, SUFFIX_AND_DRAFT, PEARL, ONE_PASS = "suffix", "suffix+draft", "pearl", "one_pass"


def load_pair(
    target: str,
    draft: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    draft_dtype: torch.dtype | None = None,
    device: str = "auto",
    pack: bool = True,
) -> Pair:
    """Load a target and, if named, its draft.

    Args:
        target: reference as ``models.finetuned.find_model`` takes it.
        draft: reference as ``find_draft`` takes it.
        dtype: of the target.
        draft_dtype: of the draft, default the target's. A draft may be rounded at will: that costs acceptance,
            never exactness.
        device: where both run: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        pack: see ``decoding.engines.build_engine``.

    Raises:
        PeftlabError: something cannot be loaded, there is no such device, or the two do not have the same tokens.
    """
    place = resolve_device(device)  # first: that a device is missing is told before anything is read
    loader = TargetLoader(target, load_tokenizer(target), dtype, draft_dtype or dtype, place, pack)
    if draft is None:
        return loader.pair()
    row, stored = find_draft(draft)
    kind: type[DraftKind[DraftConfig]] = resolve(row.kind)
    return kind.open(stored, loader)


def draft_costs(target: TargetWeights) -> list[DraftCost]:
    """Return the cost of drafting for a target with each kind, in the order of the table."""
    return [cost for kind in DRAFTS.values() for cost in resolve(kind.config).costs(target)]


def make_drafter(name: str, pair: Pair, width: int | None = None, grow: GrowthFactory | None = None) -> Drafter:
    """Return a new drafter by its name.

    ``"draft"`` is the pair's model or heads; ``SUFFIX_AND_DRAFT`` copies what followed a long repeated suffix, and
    elsewhere joins copy and draft in one tree; ``PEARL`` is the pair's model at work beside the target; ``ONE_PASS`` is
    a gated LoRA whose masks the target reads while it verifies; the others are ``decoding.table.MODEL_FREE``.

    Args:
        width: choices of each Medusa head or place of a pard draft or gated LoRA, or children of an eagle3 layer's
            node, that a tree may use; 1 is a chain, None the default.
        grow: makes what trees drawn from a draft model grow by; None: it drafts chains.

    Raises:
        PeftlabError: no such drafter, no draft in the pair, or a tree that the draft does not make.
    """
    own_trees = pair.drafts and (pair.draft is None or pair.masks is not None)
    check_tree(width, grow is not None, drafted=pair.drafts, heads=own_trees)
    if name.partition(":")[0] in MODEL_FREE:
        free = model_free(name)
        return resolve(free.row.make)(pair.corpus, free.value)
    if name == SUFFIX_AND_DRAFT:
        return with_copies(make_drafter("draft", pair, width, grow), pair.corpus)
    if name == PEARL:
        if pair.whole is None or grow is not None or width not in (None, 1):
            raise PeftlabError(f"drafter {PEARL}: chains of a draft model alone, which works beside the target")
        return with_window(PearlDrafter(pair.whole), pair.window)
    if name == ONE_PASS:
        if pair.own is None or pair.own.one_pass is None:
            raise PeftlabError(f"drafter {ONE_PASS}: of a gated_lora draft, which the target reads as it verifies")
        return with_window(pair.own.one_pass(width or 1), pair.window)
    if name != "draft":
        names = ("draft", SUFFIX_AND_DRAFT, PEARL, ONE_PASS, *MODEL_FREE)
        raise PeftlabError(f"drafter {name!r}: none of {', '.join(names)}{did_you_mean(name, names)}")
    return with_window(_draft_of_pair(pair, width, grow), pair.window)


def needs_draft(name: str, draft: str | None) -> None:
    """Raise ``PeftlabError`` for a drafter that is a way to use a draft, where none is given.

    Args:
        name: of the drafter. draft: reference of the draft; None: none is given.
    """
    needed = {PEARL: "a draft model, which works beside the target", ONE_PASS: "a gated_lora draft"}
    if draft is None and name in needed:
        raise PeftlabError(f"drafter {name}: needs {needed[name]}; give a draft")


def _draft_of_pair(pair: Pair, width: int | None, grow: GrowthFactory | None) -> Drafter:
    """Return a new drafter from the pair's draft: heads, network, masks, model or the target's own layers."""
    if pair.heads is not None:
        return HeadsDrafter(pair.heads, width)
    if pair.network is not None:
        return FeatureDrafter(pair.network, width or 1)
    if pair.draft is None:
        raise PeftlabError("drafter 'draft': no draft model given")
    if pair.masks is not None:
        return ParallelDrafter(pair.draft, pair.masks, width or 1, shares_cache=pair.own is not None)
    if pair.whole is not None and (pair.own is None or grow is not None or pair.window is not None):
        return ModelDrafter(pair.whole) if grow is None else DrawnTrees(pair.whole, grow=grow)
    assert pair.own is not None
    if grow is None:
        return pair.own.drafter(pair.draft)
    if isinstance(pair.own.trees, str):
        raise PeftlabError(f"draft {pair.own.trees} drafts chains, no trees")
    return pair.own.trees(pair.draft, grow)


def with_window(drafter: Drafter, window: Window | None) -> Drafter:
    """Return a drafter that sees only the first and the last tokens of a text.

    Args:
        drafter: any drafter. window: how many tokens of each end; None returns ``drafter`` as it is.

    Raises:
        PeftlabError: it is no chain from a draft with a cache of its own.
    """
    if window is None:
        return drafter
    chain = type(drafter) in (ModelDrafter, PearlDrafter)
    if chain and isinstance(drafter, ModelDrafter) and not drafter.shares_cache:
        return replace(drafter, window=window)
    if isinstance(drafter, FeatureDrafter) and drafter.width == 1:
        return replace(drafter, window=window)
    raise PeftlabError("draft_window: for chains (width 1) from a draft model or an eagle3 layer; leave it out")


def check_tree(width: int | None, tree: bool, *, drafted: bool, heads: bool) -> None:
    """Raise ``PeftlabError`` for a tree of no width, without a draft to fill it, or of another kind of draft.

    Args:
        tree: whether one is drawn from a draft model. drafted: whether there is a draft. heads: whether it is one of
            heads, eagle3, mtp, pard and gated_lora (``DraftRow.heads``).
    """
    if width is not None and (width < 1 or (width > 1 and not drafted)):
        raise PeftlabError(f"width {width}: 1, or more with a draft, whose trees it limits")
    if width is not None and width > 1 and not heads:
        raise PeftlabError(
            f"width {width}: of heads, eagle3, mtp, pard and gated_lora; a draft model's trees have names, as tree "
            f"rsd_c:{width}"
        )
    if tree and not drafted:
        raise PeftlabError("tree: is drawn from a draft model; give one as draft")
    if tree and heads:
        raise PeftlabError(
            "tree: is drawn from a draft model; heads, eagle3, mtp, pard and gated_lora have trees of their own, see "
            "width"
        )
