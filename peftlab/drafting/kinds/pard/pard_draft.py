"""A draft model that writes several tokens in one pass: trained beside its target, read back for decoding."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.decoding.parallel_drafters import Masks, ParallelDrafter
from peftlab.drafting.acceptance import by_depth
from peftlab.drafting.base import DraftJob, Loss, Opened, Opening, Saved, Served, found_in, newest_in
from peftlab.drafting.config import PardDraft, Truncation, eighth
from peftlab.drafting.kinds.model import pair
from peftlab.drafting.kinds.model.pair import PairDraft, draft_engine
from peftlab.drafting.model import OnPolicy
from peftlab.drafting.objectives import make_objective
from peftlab.drafting.pard import (
    PardExport,
    PardLoss,
    check_parallel,
    is_pard,
    measure_depths,
    read_masks,
    unused_token,
    write_masks,
)
from peftlab.drafting.states import head_weight
from peftlab.errors import PeftlabError

find = partial(found_in, folder="merged", known=is_pard)


@dataclass
class ParallelDraft(PairDraft):
    """A draft beside its target, and what it reads in the place of tokens to be written."""

    masks: Masks = field(kw_only=True)


def check(job: DraftJob[PardDraft], target: PretrainedConfig) -> None:
    """Refuse what ``pair.check`` refuses, a mask that is no token, and a method without a fold."""
    if not job.folds:
        raise PeftlabError("draft.kind pard: is stored as merged weights, and the method has no linear fold")
    size, mask = target.get_text_config(decoder=True).vocab_size, job.config.mask_token
    if mask is not None and mask >= size:
        raise PeftlabError(f"draft.mask_token: {mask} is no token; the target has 0 to {size - 1}")
    pair.check(_whole(job, target), target)


def _whole(job: DraftJob[PardDraft], target: PretrainedConfig) -> DraftJob[PardDraft]:
    """Return the job with a start: the first layers of the target where the recipe names none."""
    config = job.config
    if config.starts:
        return job
    layers = list(range(eighth(target.get_text_config(decoder=True).num_hidden_layers)))
    return replace(job, config=config.model_copy(update={"truncate": Truncation(layers=layers)}))


def load(job: DraftJob[PardDraft], target: PreTrainedModel) -> ParallelDraft:
    """Return the draft, cut from the target or loaded, and checked against it.

    Raises:
        PeftlabError: as ``pair.load``, or the model does not read rows of masks.
    """
    found, config = pair.load(_whole(job, target.config), target), job.config
    check_parallel(found.adapted)
    token = config.mask_token
    if token is None and config.from_ is not None:
        token = getattr(found.adapted.config, "pard_token", None)
    masks = Masks(token if isinstance(token, int) else -1, config.tokens)
    return ParallelDraft(
        found.model, found.adapted, target, found.base, found.eos, base_model=found.base_model, masks=masks
    )


def prepare(job: DraftJob[PardDraft], draft: ParallelDraft, train: Dataset) -> None:
    """Find the draft where it is searched for, and choose the mask."""
    pair.prepare(job, draft, train)
    choose_mask(draft, train)


def choose_mask(draft: ParallelDraft, train: Dataset) -> None:
    """Take as mask, where none is named, the highest token id that the training text does not contain."""
    if draft.masks.token < 0:
        token = unused_token(len(head_weight(draft.target)), train["input_ids"])
        draft.masks = replace(draft.masks, token=token)


def loss(job: DraftJob[PardDraft], draft: ParallelDraft) -> Loss:
    """Return the objective between target and draft on the text and on rows of masks."""
    config, data = job.config, job.data
    rewrite = OnPolicy(data.on_policy, data.temperature, draft.eos) if data.on_policy else None
    settings = (config.tokens, config.retain, config.retain_least)
    return PardLoss(make_objective(job.objective), draft.target, *settings, lambda: draft.masks.token, rewrite)


def score(draft: ParallelDraft, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
    """Return the mean acceptance over the K tokens of a pass, and each one's own."""
    measured = measure_depths(draft.target, model, data, draft.masks.length, draft.masks.token, batch_size)
    return by_depth(measured)


def save(job: DraftJob[PardDraft], draft: ParallelDraft, directory: Path, train: Dataset) -> Tensor | None:
    """Name the mask in the merged draft's configuration, and which tokens it is restricted to, if it is."""
    write_masks(directory / "merged", draft.masks)
    return pair.save(job, draft, directory, train)


def drafter(draft: ParallelDraft, saved: Saved | None) -> Served | None:
    """Return the target with the merged draft; an untrained one, whose mask is not chosen yet, drafts nothing."""
    if saved is None:
        return None
    assert saved.merged is not None
    return Served(draft.target, partial(ParallelDrafter, draft_engine(saved.merged, tokens=saved.tokens), draft.masks))


def open(reference: str, opening: Opening) -> Opened:
    """Load the draft as a draft model is loaded, and its mask."""
    masks = read_masks(reference)
    return replace(pair.open_model(reference, opening, beside=False), masks=masks)


def export(place: str, consumer: str) -> PardExport:
    """Return what writes the draft for vLLM; others would draft with it token by token."""
    if consumer != "vllm":
        raise PeftlabError(
            f"--for {consumer}: {place} writes several tokens in one pass (pard), which vllm alone drafts with"
        )
    return PardExport(Path(place))


def update(config: PardDraft, newest: Path, log: Path) -> PardDraft:
    """Return the section that continues from the merged draft of ``newest``, with its mask."""
    newest_in(newest, "merged", is_pard)
    continued = pair.update(config, newest, log)
    assert isinstance(continued, PardDraft)
    return continued
