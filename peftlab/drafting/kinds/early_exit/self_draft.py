"""The target's first layers as its draft: trained in the target, read from it when decoding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from datasets import Dataset
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.drafting.base import Draft, DraftJob, Loss, Opened, Opening, Saved, Served
from peftlab.drafting.checks import end_ids
from peftlab.drafting.config import EarlyExitDraft
from peftlab.drafting.early_exit import (
    EarlyExitLoss,
    Exit,
    LayerDropout,
    exit_engine,
    exit_weights,
    find_exit,
    measure_exits,
    names_own_layers,
    open_own_layers,
)
from peftlab.drafting.objectives import make_objective
from peftlab.drafting.states import layer_stack
from peftlab.errors import PeftlabError


@dataclass
class ExitDraft(Draft):
    """A target that trains exits of its own.

    Attributes:
        exits: the first one drafts. dropout: of the layers while it trains; None for none.
    """

    exits: list[Exit]
    dropout: LayerDropout | None = None


def check(job: DraftJob[EarlyExitDraft], target: PretrainedConfig) -> None:
    """Refuse an exit after the last layer, or beyond it."""
    count = target.get_text_config(decoder=True).num_hidden_layers
    if job.config.exits[-1] >= count:
        raise PeftlabError(f"draft.exits: {job.config.exits[-1]} is past the last exit; the target has {count} layers")


def load(job: DraftJob[EarlyExitDraft], target: PreTrainedModel) -> ExitDraft:
    """Return the target with its exits, each compared with the target cut to its layers."""
    exits = [find_exit(target, layers) for layers in job.config.exits]
    return ExitDraft(target, target, target, job.target, end_ids(target, job.tokenizer), exits)


def loss(job: DraftJob[EarlyExitDraft], draft: ExitDraft) -> Loss:
    """Return LayerSkip's loss on the exits."""
    config = job.config
    if config.dropout:
        draft.dropout = LayerDropout(draft.adapted, config.dropout)
    return EarlyExitLoss(
        make_objective(job.objective),
        draft.exits,
        exit_weights(config.exits, len(layer_stack(draft.adapted)), config.scale),
        config.curriculum,
        config.every,
        draft.dropout,
        config.dropout_schedule,
    )


def score(draft: ExitDraft, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
    """Return the acceptance of the first exit and of each other one, and how much of the whole model is preserved."""
    first, *later, whole = measure_exits(model, draft.exits, data, batch_size)
    others = zip(draft.exits[1:], later, strict=True)
    each = {f"acceptance_exit_{exit_.layers}": found.rates()["acceptance"] for exit_, found in others}
    return first.rates() | each | {"preserved": whole.rates()["acceptance"]}


def save(job: DraftJob[EarlyExitDraft], draft: ExitDraft, directory: Path, train: Dataset) -> None:
    """Write nothing: the adapter, or the merged model, is target and draft. No layer is left out from here on."""
    if draft.dropout is not None:
        draft.dropout.remove()


def drafter(draft: ExitDraft, saved: Saved | None) -> Served:
    """Return the model as trained, drafting with its first layers."""
    model = draft.adapted if saved is None or saved.merged is None else saved.merged
    engine = exit_engine(model, draft.exits[0].layers, build_engine(model))
    return Served(model, partial(ModelDrafter, engine, shares_cache=True))


def find(reference: str) -> str | None:
    """Return the names of drafts that are some of the target's layers as they are: ``exit:K``, ``del``, ``swift``."""
    return reference if names_own_layers(reference) else None


def open(reference: str, opening: Opening) -> Opened:
    """Return some of the target's layers, which share its parameters and its cache."""
    return open_own_layers(reference, opening.target, pack=opening.pack)


def export(place: str, consumer: str) -> Path:
    """Refuse: an exit is part of its target."""
    raise PeftlabError(f"--for {consumer}: {place} is part of the target; no released engine takes it as a draft")


def update(config: EarlyExitDraft, newest: Path, log: Path) -> EarlyExitDraft:
    """Refuse: an exit is part of its target, which must not change between requests."""
    raise PeftlabError(f"{newest}: an early exit is part of the target; train it anew with data.replay={log}")
