"""Drafts that are some of the target's own layers: ``exit:K``, ``del`` and ``swift``; nothing is trained for them."""

from __future__ import annotations

import re
from functools import partial

from transformers import PreTrainedModel

from peftlab.decoding.engine import Engine
from peftlab.decoding.engines import build_engine
from peftlab.decoding.flat import FlatEngine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.own_layers import ChosenExit, Exit, ExitChoice, Skipping, SkipSearch, Swift
from peftlab.decoding.sampled_trees import DrawnTrees, GrowTree
from peftlab.drafting.hidden_states import head_weight
from peftlab.drafting.kinds.base import Opened, OwnLayers
from peftlab.drafting.truncation import layer_stack, truncate
from peftlab.errors import PeftlabError

_EXIT = re.compile(r"exit:([1-9]\d{0,3})")
_CHOICES = 8  # exits that ``del`` chooses from, at most: each costs rows of the LM head in every step


def names_own_layers(reference: str) -> bool:
    """Whether a draft's reference is ``exit:K``, ``del`` or ``swift``."""
    return reference in ("del", "swift") or _EXIT.fullmatch(reference) is not None


def open_own_layers(reference: str, model: PreTrainedModel, *, pack: bool) -> Opened:
    """Return the draft that a reference names, as decoding takes it; it has no weights of its own.

    Raises:
        PeftlabError: the target has too few layers.
    """
    count, size = len(layer_stack(model)), model.num_parameters()
    if reference == "swift":
        if count < 3:
            raise PeftlabError(f"draft swift: keeps the first and the last layer, and the target has {count} in all")
        return Opened(size, own=partial(_swift, SkipSearch(count)))
    if reference == "del":
        if count < 2:
            raise PeftlabError("draft del: chooses an exit before the last layer, and the target has one in all")
        choice = ExitChoice(possible_exits(count), count, _head_cost(model))
        return Opened(size, own=partial(_del, choice), features=tuple(choice.exits))
    layers = int(reference.removeprefix("exit:"))
    if layers >= count:
        raise PeftlabError(f"draft exit:{layers}: the target has {count} layers; leave out at least the last one")
    smaller = truncate(model, range(layers), share=True).num_parameters()
    return Opened(smaller, own=partial(_exit, model, layers, pack))


def possible_exits(layers: int) -> list[int]:
    """Return the exits of a model that ``del`` chooses from: at most 8 before the last layer, evenly spread."""
    count = min(_CHOICES, layers - 1)
    return [round((i + 1) * layers / (count + 1)) for i in range(count)]


def exit_engine(model: PreTrainedModel, layers: int, target: Engine, *, pack: bool = True) -> Engine:
    """Return the first layers of a model as a draft in the cache of the model's own engine, ``target``.

    A flattened step continues from the states of the tokens that its first layers have read. Any other engine reads
    drafted tokens from the embeddings on.
    """
    if isinstance(target, FlatEngine):
        return Exit(target, layers)
    return build_engine(truncate(model, range(layers), share=True), vocabulary=target.vocab_size, pack=pack)


def flat(draft: str, target: Engine) -> FlatEngine:
    """Return ``target``, which must be a flattened step.

    Raises:
        PeftlabError: it is another one.
    """
    if isinstance(target, FlatEngine):
        return target
    raise PeftlabError(
        f"draft {draft}: needs the flattened step, and this target's kernel is {target.kind}; use --draft exit:K"
    )


def _exit(model: PreTrainedModel, layers: int, pack: bool, target: Engine) -> OwnLayers:
    engine = exit_engine(model, layers, target, pack=pack)

    def trees(engine: Engine, grow: GrowTree) -> DrawnTrees:
        return DrawnTrees(engine, shares_cache=True, grow=grow)

    return OwnLayers(engine, partial(ModelDrafter, shares_cache=True), trees)


def _swift(search: SkipSearch, target: Engine) -> OwnLayers:
    skipping = Skipping(flat("swift", target))
    return OwnLayers(skipping, partial(Swift, layers=skipping, search=search), "swift")


def _del(choice: ExitChoice, target: Engine) -> OwnLayers:
    exit_ = Exit(flat("del", target), choice.exits[0])
    return OwnLayers(exit_, partial(ChosenExit, exit=exit_, choice=choice), "del")


def _head_cost(model: PreTrainedModel) -> float:
    """What a step of the LM head reads, in layers."""
    stack = layer_stack(model)
    return head_weight(model).numel() / (sum(p.numel() for p in stack.parameters()) / len(stack))
