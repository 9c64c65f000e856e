"""Target and draft as a user names them, loaded and checked against each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.decoding.advice import DraftCost, TargetWeights
from peftlab.decoding.drafter import Drafter
from peftlab.decoding.engine import Engine
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import SuffixAutomaton, with_copies
from peftlab.decoding.parallel_drafters import Masks, ParallelDrafter, PearlDrafter
from peftlab.decoding.sampled_trees import DrawnTrees, GrowthFactory
from peftlab.decoding.state_drafters import FeatureDrafter, FeatureNetwork, Heads, HeadsDrafter
from peftlab.decoding.table import MODEL_FREE, Window, model_free
from peftlab.drafting.base import Opened, Opening, OwnLayers
from peftlab.drafting.checks import eos_ids
from peftlab.drafting.states import head_weight
from peftlab.drafting.table import DRAFTS, DraftKind
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.hardware import resolve_device
from peftlab.models.pretrained import load_tokenizer
from peftlab.registry import resolve
from peftlab.untyped import Unwrapped

SUFFIX, SUFFIX_AND_DRAFT, PEARL, ONE_PASS = "suffix", "suffix+draft", "pearl", "one_pass"


@dataclass
class Pair:
    """A target with its tokenizer, and its draft if there is one: an engine, heads, or a network on its states.

    Attributes:
        weights: what a step of the target reads.
        own: the draft, where it is or begins with some of the target's own layers.
        whole: the draft as a model of its own; None where it is none.
        masks: of a draft that writes several tokens in one pass; None: it writes one.
        corpus: text to copy from; None: only the sequence itself.
        window: what the draft sees of a text; None: all of it.
        warnings: what to show the user.
    """

    target: Engine
    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]
    weights: TargetWeights
    draft: Engine | None = None
    own: OwnLayers | None = None
    whole: Engine | None = None
    heads: Heads | None = None
    network: FeatureNetwork | None = None
    masks: Masks | None = None
    corpus: SuffixAutomaton | None = None
    window: Window | None = None
    target_parameters: int = 0
    draft_parameters: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def drafts(self) -> bool:
        """Whether there is a draft."""
        return any(part is not None for part in (self.heads, self.network, self.draft))


def find_draft(reference: str) -> tuple[DraftKind, str]:
    """Return the kind of the draft that a reference names, and the reference of the draft itself.

    Args:
        reference: as ``models.finetuned.find_model`` takes it; a run directory of a draft recipe; a directory of
            heads; ``exit:K``, the target's first K layers; ``del``, as many of them as pay; or ``swift``, the target
            without some sublayers.
    """
    for kind in reversed([*DRAFTS.values()]):  # the first row takes any reference
        place = resolve(kind.find)(reference)
        if place is not None:
            return kind, place
    raise PeftlabError(f"{reference}: no draft of any kind")


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
        pack: see ``engines.build.build_engine``.

    Raises:
        PeftlabError: something cannot be loaded, there is no such device, or the two do not have the same tokens.
    """
    place = resolve_device(device)
    opening = Opening(target, load_tokenizer(target), dtype, draft_dtype or dtype, place, pack)
    opened: Opened | None = None
    if draft is not None:
        kind, stored = find_draft(draft)
        opened = resolve(kind.open)(stored, opening)
    model = opening.target
    size = model.num_parameters()
    vocabulary, features = (opened.vocabulary, opened.features) if opened else (None, ())
    engine = build_engine(model, vocabulary=vocabulary, pack=pack, features=features)
    pair = Pair(engine, opening.tokenizer, eos_ids(model), target_weights(model), target_parameters=size)
    if opened is not None:
        pair.whole, pair.heads, pair.network, pair.masks = opened.engine, opened.heads, opened.network, opened.masks
        pair.own = opened.own(engine) if opened.own is not None else None
        pair.draft = pair.own.engine if pair.own is not None else pair.whole
        pair.draft_parameters, pair.warnings = opened.parameters, opened.warnings
        if pair.whole is not None:
            pair.warnings += _size_warning(size, opened.parameters)
    return pair


def target_weights(model: PreTrainedModel) -> TargetWeights:
    """Return how many numbers a step of the model reads; of a mixture of experts all of them, of an encoder none."""
    head = head_weight(model)
    outside = {id(head), id(model.get_input_embeddings().get_parameter("weight"))}
    if model.config.is_encoder_decoder:
        library: Unwrapped = model
        outside |= {id(parameter) for parameter in library.get_encoder().parameters()}
    body = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in outside)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return TargetWeights(body / layers, layers, *head.shape)


def draft_costs(target: TargetWeights) -> list[DraftCost]:
    """Return what drafting for a target costs with each kind, in the order of the table."""
    return [cost for kind in DRAFTS.values() for cost in resolve(kind.config).costs(target)]


def make_drafter(name: str, pair: Pair, width: int | None = None, grow: GrowthFactory | None = None) -> Drafter:
    """Return a new drafter.

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
    return with_window(_of_pair(pair, width, grow), pair.window)


def needs_draft(name: str, draft: str | None) -> None:
    """Raise ``PeftlabError`` for a drafter that is a way to use a draft, where none is given."""
    needed = {PEARL: "a draft model, which works beside the target", ONE_PASS: "a gated_lora draft"}
    if draft is None and name in needed:
        raise PeftlabError(f"drafter {name}: needs {needed[name]}; give a draft")


def _of_pair(pair: Pair, width: int | None, grow: GrowthFactory | None) -> Drafter:
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
    """Return a drafter that sees the first and the last tokens of a text only; None: as it is.

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


def drafts_with_heads(draft: str | None) -> bool:
    """Whether a reference, as ``find_draft`` takes it, names a kind with ``DraftKind.heads``; nothing is loaded."""
    return draft is not None and find_draft(draft)[0].heads


def check_tree(width: int | None, tree: bool, *, drafted: bool, heads: bool) -> None:
    """Raise ``PeftlabError`` for a tree of no width, without a draft to fill it, or of another kind of draft.

    Args:
        tree: whether one is drawn from a draft model. drafted: whether there is a draft. heads: whether it is one of
            heads, eagle3, mtp, pard and gated_lora (``DraftKind.heads``).
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


def _size_warning(target: int, draft: int) -> tuple[str, ...]:
    if draft < target:
        return ()
    return (f"the draft ({draft:,} parameters) is no smaller than the target ({target:,})",)
