"""Medusa heads as a draft: put on the target, trained with it frozen or with a method in it, read back for decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.decoding.packed import pack_linears
from peftlab.decoding.state_drafters import HeadsDrafter
from peftlab.drafting.acceptance import by_depth, response_tokens
from peftlab.drafting.base import (
    Draft,
    DraftJob,
    Loss,
    Opened,
    Opening,
    Saved,
    Served,
    check_start,
    found_in,
    newest_in,
    says,
)
from peftlab.drafting.checks import end_ids
from peftlab.drafting.config import HeadsConfig, MedusaDraft
from peftlab.drafting.heads import (
    HeadedModel,
    HeadsLoss,
    HeadStack,
    MedusaHeads,
    ReducedHeads,
    check_heads,
    measure_heads,
    measure_ranks,
    read_medusa,
    write_medusa,
    write_ranks,
)
from peftlab.drafting.objectives import make_objective
from peftlab.errors import PeftlabError
from peftlab.methods.config import MethodConfig
from peftlab.methods.leaf import trainable_dtype
from peftlab.methods.table import plan

FOLDER = "heads"  # of a run
_is_medusa = partial(says, key="model_type", value="medusa")
find = partial(found_in, folder=FOLDER, known=_is_medusa)
HeadsT = TypeVar("HeadsT", bound=HeadsConfig)
_CONSUMERS = "Medusa heads, which no released engine loads; peftlab generate and peftlab draft bench do"


@dataclass
class HeadDraft(Draft):
    """A target and the heads on it."""

    model: HeadedModel


def put_heads(target: PreTrainedModel, config: MedusaDraft) -> HeadedModel:
    """Return ``target`` with new heads on it; the target's parameters stop requiring a gradient.

    The blocks train in fp32 where the target is in half precision. W2 stays where the LM head is, or is it.

    Raises:
        PeftlabError: the target has no linear LM head, or the heads to continue from are for another target or of other
            settings.
    """
    own, dtype = first_rows(target, config)
    heads = MedusaHeads(own, config.heads, config.bias, config.shared_head, config.markov)
    for new in (heads.blocks, heads.markov_head):
        if new is not None:
            new.to(own.device, dtype)
    continue_from(heads, target, config, find, read_medusa)
    return HeadedModel(target, heads)


@torch.no_grad()
def continue_from(
    heads: HeadStack,
    target: PreTrainedModel,
    config: HeadsConfig,
    find: Callable[[str], str | None],
    read: Callable[[str], HeadStack | ReducedHeads],
) -> None:
    """Give ``heads`` the weights of those in ``config.from_``, if any; rows that those were written without stay.

    Args:
        find, read: of the kind.

    Raises:
        PeftlabError: the stored heads are for another target, or not as ``config`` asks for.
    """
    place = None if config.from_ is None else find(config.from_)
    if place is None:
        return
    check_heads(place, target)
    stored = read(place)
    inner = stored.heads if isinstance(stored, ReducedHeads) else stored
    if (theirs := _settings(inner)) != (ours := _settings(heads)):
        raise PeftlabError(f"draft.from: {config.from_} has {theirs}; the recipe asks for {ours}")
    mine = heads.state_dict()
    for name, weight in inner.state_dict().items():
        if name.startswith("lm_heads.") and config.shared_head:
            continue  # the target's own
        rows = stored.kept if isinstance(stored, ReducedHeads) and len(weight) < len(mine[name]) else slice(None)
        mine[name][rows] = weight.to(mine[name])


def _settings(heads: HeadStack) -> str:
    """Return what stored heads must have in common with those that continue from them, in words."""
    names = heads.state_dict()
    parts = [f"{heads.depth} heads with {len(heads.lm_heads)} LM heads (draft.heads, draft.shared_head)"]
    parts += ["biases (draft.bias)"] if any(name.endswith(".bias") for name in names) else []
    markov = names.get("markov_head.markov_w1.weight")
    parts += [] if markov is None else [f"a Markov bias of rank {markov.shape[1]} (draft.markov)"]
    return ", ".join(parts)


def first_rows(target: PreTrainedModel, config: HeadsConfig) -> tuple[Tensor, torch.dtype]:
    """Freeze the target; return what each W2 starts with, or is, and the dtype in which heads train.

    Raises:
        PeftlabError: the target has no linear LM head.
    """
    head = target.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise PeftlabError(
            f"draft.kind {config.kind}: {type(target).__name__} has no linear LM head; the heads need a causal "
            "language model"
        )
    target.requires_grad_(False)
    weight, dtype = head.weight, trainable_dtype(head.weight)
    return weight if config.shared_head else weight.to(dtype), dtype


def check(job: DraftJob[MedusaDraft], target: PretrainedConfig) -> None:
    """Refuse heads to continue from that are none."""
    check_start(job.config.from_, find, "contains no Medusa heads (config.json, model_type medusa)")


def load(job: DraftJob[MedusaDraft], target: PreTrainedModel) -> HeadDraft:
    """Return the target with new heads, or those to continue from.

    Raises:
        PeftlabError: the method would train the LM head, whose distribution the heads learn; or see ``put_heads``.
    """
    if job.method is not None:
        check_trunk(target, job.method)
    return HeadDraft(put_heads(target, job.config), target, target, job.target, end_ids(target, job.tokenizer))


def check_trunk(target: PreTrainedModel, method: MethodConfig) -> None:
    """Refuse a method that trains the LM head's weight, whose distribution the heads learn."""
    head = target.get_output_embeddings()
    assert head is not None
    trained = next((name for name in plan(target, method).train if target.get_parameter(name) is head.weight), None)
    if trained is not None:
        raise PeftlabError(
            f"method {method.name} trains {trained}, the LM head's weight, from which the heads learn; take it out"
        )


def loss(job: DraftJob[HeadsConfig], draft: HeadDraft) -> Loss:
    """Return the weighted sum of the heads' losses."""
    return HeadsLoss(make_objective(job.objective), job.config.decay, job.config.preserve)


def score(draft: HeadDraft, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
    """Return the mean acceptance of the heads, each head's own, and how much of the target is preserved."""
    assert isinstance(model, HeadedModel)
    measured, trunk = measure_heads(model, data, batch_size)
    return {**by_depth(measured), "preserved": trunk.rates()["acceptance"]}


def save(job: DraftJob[MedusaDraft], draft: HeadDraft, directory: Path, train: Dataset) -> Tensor | None:
    """Write the heads to ``heads/``, with the rows of the reduced vocabulary where the recipe asks for one."""
    tokens = response_tokens(train, job.config.vocabulary, draft.target)
    write_medusa(draft.model.heads, directory / FOLDER, tokens=tokens, overwrite=True)
    return tokens


def calibrate(draft: HeadDraft, directory: Path, held_out: Dataset, batch_size: int) -> None:
    """Measure on held-out text how often each choice of the written heads is right, and store it with them."""
    heads = read_medusa(directory / FOLDER).to(draft.target.device)
    write_ranks(directory / FOLDER, measure_ranks(draft.model, heads, held_out, batch_size))


def drafter(draft: HeadDraft, saved: Saved | None) -> Served | None:
    """Return the target, as trained, with the heads read from disk; untrained heads draft nothing."""
    if saved is None:
        return None
    served = saved.merged if saved.merged is not None else draft.adapted
    heads = read_medusa(saved.directory / FOLDER).to(draft.target.device, served.dtype)
    pack_linears(heads)
    return Served(served, partial(HeadsDrafter, heads))


def open(reference: str, opening: Opening) -> Opened:
    """Read the heads and check them against the target."""
    check_heads(reference, opening.target)
    heads = read_medusa(reference).to(opening.device, opening.draft_dtype)
    if opening.pack:
        pack_linears(heads)
    return Opened(sum(parameter.numel() for parameter in heads.parameters()), heads=heads)


def export(place: str, consumer: str) -> Path:
    """Refuse: no released engine loads them."""
    raise PeftlabError(f"--for {consumer}: {place} contains {_CONSUMERS}")


def update(config: MedusaDraft, newest: Path, log: Path) -> MedusaDraft:
    """See ``continuing``."""
    return continuing(config, newest, log, _is_medusa)


def continuing(config: HeadsT, newest: Path, log: Path, known: Callable[[Path], bool]) -> HeadsT:
    """Return the section that continues from the heads of ``newest``; heads of a target that trains, too, are refused.

    The served target must not change between requests.

    Args:
        log: the requests. known: whether a directory contains heads of this kind.
    """
    stored = newest_in(newest, FOLDER, known)
    if any((newest / trained).exists() for trained in ("adapter", "merged")):
        raise PeftlabError(
            f"{newest}: its method trains the target, which must not change between requests; train heads on its "
            f"merged/ with method: null and data.replay={log}"
        )
    return config.model_copy(update={"from_": stored})
