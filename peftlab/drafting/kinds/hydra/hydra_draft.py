"""Hydra heads as a draft: put on the target, trained with it frozen or with a method in it, read back for decoding."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from datasets import Dataset
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.decoding.packed import pack_linears
from peftlab.decoding.state_drafters import HeadsDrafter
from peftlab.drafting.acceptance import response_tokens
from peftlab.drafting.base import DraftJob, Opened, Opening, Saved, Served, check_start, found_in, says
from peftlab.drafting.checks import end_ids
from peftlab.drafting.config import HydraDraft
from peftlab.drafting.heads import (
    HeadedModel,
    HydraHeads,
    ReducedHeads,
    check_heads,
    measure_ranks,
    read_hydra,
    write_hydra,
    write_ranks,
)
from peftlab.drafting.kinds.medusa import head_draft
from peftlab.drafting.kinds.medusa.head_draft import HeadDraft, check_trunk, continue_from, continuing, first_rows
from peftlab.drafting.states import input_embedding
from peftlab.errors import PeftlabError

FOLDER = "heads"  # of a run
loss, score = head_draft.loss, head_draft.score
_is_hydra = partial(says, key="model_type", value="hydra")
find = partial(found_in, folder=FOLDER, known=_is_hydra)


def check(job: DraftJob[HydraDraft], target: PretrainedConfig) -> None:
    """Refuse heads to continue from that are none."""
    check_start(job.config.from_, find, "contains no Hydra heads (config.json, model_type hydra)")


def load(job: DraftJob[HydraDraft], target: PreTrainedModel) -> HeadDraft:
    """Return the target with new heads, or those to continue from.

    Raises:
        PeftlabError: the method would train the LM head, or the heads to continue from are for another target or of
            other settings.
    """
    if job.method is not None:
        check_trunk(target, job.method)
    model = put_heads(target, job.config)
    return HeadDraft(model, target, target, job.target, end_ids(target, job.tokenizer))


def put_heads(target: PreTrainedModel, config: HydraDraft) -> HeadedModel:
    """Return ``target`` with heads on it, which train in fp32 where it is in half precision; the target is frozen.

    Raises:
        PeftlabError: see ``load``, or the target has no linear LM head.
    """
    own, dtype = first_rows(target, config)
    heads = HydraHeads(own, config.heads, input_embedding(target), config.shared_head)
    heads.blocks.to(own.device, dtype)
    continue_from(heads, target, config, find, partial(read_hydra, embedding=input_embedding(target)))
    return HeadedModel(target, heads)


def save(job: DraftJob[HydraDraft], draft: HeadDraft, directory: Path, train: Dataset) -> Tensor | None:
    """Write the heads to ``heads/``, with the rows of the reduced vocabulary where the recipe asks for one."""
    tokens, heads = response_tokens(train, job.config.vocabulary, draft.target), draft.model.heads
    assert isinstance(heads, HydraHeads)
    write_hydra(heads, directory / FOLDER, tokens=tokens, overwrite=True)
    return tokens


def calibrate(draft: HeadDraft, directory: Path, held_out: Dataset, batch_size: int) -> None:
    """Measure on held-out text how often each choice of the written heads is right, and store it with them."""
    heads = read_hydra(directory / FOLDER, input_embedding(draft.target)).to(draft.target.device)
    write_ranks(directory / FOLDER, measure_ranks(draft.model, heads, held_out, batch_size))


def drafter(draft: HeadDraft, saved: Saved | None) -> Served | None:
    """Return the target, as trained, with the heads read from disk; untrained heads draft nothing."""
    if saved is None:
        return None
    served = saved.merged if saved.merged is not None else draft.adapted
    heads = read_hydra(saved.directory / FOLDER, input_embedding(served)).to(draft.target.device, served.dtype)
    pack_linears(heads)
    return Served(served, partial(HeadsDrafter, heads))


def open(reference: str, opening: Opening) -> Opened:
    """Read the heads and check them against the target, whose embeddings they read as they are."""
    check_heads(reference, opening.target)
    heads = read_hydra(reference, input_embedding(opening.target))
    inner = heads.heads if isinstance(heads, ReducedHeads) else heads
    for part in (inner.blocks, inner.lm_heads):
        part.to(opening.draft_dtype)
    heads.to(opening.device)
    if opening.pack:
        pack_linears(heads)
    return Opened(sum(parameter.numel() for parameter in heads.parameters()), heads=heads)


def export(place: str, consumer: str) -> Path:
    """Refuse: no released engine loads them."""
    raise PeftlabError(
        f"--for {consumer}: {place} contains Hydra heads, which no released engine loads; peftlab generate and peftlab "
        "draft bench do"
    )


def update(config: HydraDraft, newest: Path, log: Path) -> HydraDraft:
    """See ``medusa.head_draft.continuing``."""
    return continuing(config, newest, log, _is_hydra)
