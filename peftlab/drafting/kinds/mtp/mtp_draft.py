"""A FastMTP layer as a draft: put on the target, trained with it frozen, read back for decoding."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.decoding.flat import structure_of
from peftlab.decoding.state_drafters import FeatureDrafter
from peftlab.drafting.base import DraftJob, Loss, Opened, Opening, Saved, Served, check_start, found_in, newest_in
from peftlab.drafting.config import MtpDraft
from peftlab.drafting.kinds.eagle3 import state_draft
from peftlab.drafting.kinds.eagle3.state_draft import StateDraft, check_stored, load_network, storing
from peftlab.drafting.mtp import Mtp, MtpLayer, MtpStep, is_mtp, read_mtp, write_mtp
from peftlab.drafting.objectives import make_objective
from peftlab.drafting.state_network import FeatureLoss, shape_for
from peftlab.drafting.states import head_weight, input_embedding
from peftlab.errors import PeftlabError

FOLDER = "mtp"  # of a run
prepare, score, calibrate = state_draft.prepare, state_draft.score, state_draft.calibrate
find = partial(found_in, folder=FOLDER, known=is_mtp)


def check(job: DraftJob[MtpDraft], target: PretrainedConfig) -> None:
    """Refuse a draft to continue from that is none."""
    check_start(job.config.from_, find, "is no mtp draft (config.json, speculators_model_type mtp)")


def load(job: DraftJob[MtpDraft], target: PreTrainedModel) -> StateDraft:
    """Return the target with a new layer, or the one to continue from, see ``load_network``."""
    return load_network(job, target, find, partial(new_network, target), partial(_stored, target))


def _stored(target: PreTrainedModel, directory: str | Path) -> Mtp:
    return read_mtp(directory, input_embedding(target), head_weight(target))


def new_network(target: PreTrainedModel) -> Mtp:
    """Return an untrained layer, which gives the target's own next token: it repeats the state that it reads."""
    last = target.config.get_text_config(decoder=True).num_hidden_layers
    network = Mtp(shape_for(target.config, (last,)), input_embedding(target), head_weight(target))
    structure, layer = structure_of(target), network.mtp_layers[0]
    assert isinstance(layer, MtpLayer)
    if structure is not None and not structure.norm.centred:  # of the size of the target's states, else one
        nn.init.constant_(layer.final_layernorm.weight, float(structure.norm.weight.float().square().mean().sqrt()))
    return network


def loss(job: DraftJob[MtpDraft], draft: StateDraft) -> Loss:
    """Return the weighted sum of the steps' losses."""
    return FeatureLoss(make_objective(job.objective), job.config.steps, job.config.decay, known=draft.stored)


def save(job: DraftJob[MtpDraft], draft: StateDraft, directory: Path, train: Dataset) -> Tensor | None:
    """Write the layer to ``mtp/``, an adapter folded into it, with the identity of its target."""
    with storing(job, draft, directory) as staging:
        network, name = draft.model.network, type(draft.target).__name__
        assert isinstance(network, Mtp)
        write_mtp(network, staging, target=job.target, architecture=name, tokens=job.config.steps)
    return network.tokens


def drafter(draft: StateDraft, saved: Saved | None) -> Served | None:
    """Return the target with the layer read from disk; an untrained one drafts nothing."""
    if saved is None:
        return None
    network = _on(saved.directory / draft.folder, draft.target, draft.computing)
    return Served(draft.target, partial(FeatureDrafter, MtpStep(network)), network.features)


def _on(directory: Path, target: PreTrainedModel, dtype: torch.dtype) -> Mtp:
    """Return the layer in a directory, in this dtype, on the target's device and with its rows of the LM head."""
    network = _stored(target, directory).to(target.device)
    network.parts_to(dtype)
    return network


def open(reference: str, opening: Opening) -> Opened:
    """Read the layer and check it against the target: other tokens are refused, other weights a warning."""
    warnings, target = check_stored(reference, opening), opening.target
    network = _on(Path(reference), target, opening.draft_dtype)
    last = target.config.get_text_config(decoder=True).num_hidden_layers
    if network.features != (last,):
        raise PeftlabError(f"{reference}: for a target of {network.features[0]} layers; this one has {last}")
    size = sum(parameter.numel() for parameter in network.parameters())
    return Opened(size, network=MtpStep(network, opening.pack), features=network.features, warnings=warnings)


def export(place: str, consumer: str) -> Path:
    """Refuse: engines serve this method for families that come with such layers."""
    raise PeftlabError(
        f"--for {consumer}: {place} is an mtp draft; engines serve such layers only for targets that come with them "
        "(DeepSeek-V3, Qwen3-Next, MiMo and others). For this target train draft: {kind: eagle3}, which vllm and "
        "sglang load"
    )


def update(config: MtpDraft, newest: Path, log: Path) -> MtpDraft:
    """Return the section that continues from the draft of ``newest``."""
    return config.model_copy(update={"from_": newest_in(newest, FOLDER, is_mtp)})
