"""A FastMTP layer as a draft: put on the target, trained with it frozen, read back for decoding."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.decoding.drafters.feature_drafter import FeatureDrafter
from peftlab.decoding.engines.structure import structure_of
from peftlab.drafting.checks import end_ids
from peftlab.drafting.hidden_states import head_weight, input_embedding
from peftlab.drafting.kinds.base import DraftJob, Loss, Opened, Opening, Saved, Served
from peftlab.drafting.kinds.eagle3 import eagle_draft
from peftlab.drafting.kinds.eagle3.eagle_draft import EagleDraft, check_widths
from peftlab.drafting.kinds.eagle3.eagle_network import shape_for
from peftlab.drafting.kinds.eagle3.feature_loss import EagleModel, FeatureLoss
from peftlab.drafting.kinds.eagle3.target_identity import check_target, check_tokenizer, identify, write_ranks
from peftlab.drafting.kinds.eagle3.tree_rates import measure_ranks
from peftlab.drafting.kinds.mtp.config import MtpDraft
from peftlab.drafting.kinds.mtp.mtp_files import is_mtp, read_mtp, write_mtp
from peftlab.drafting.kinds.mtp.mtp_network import Mtp, MtpLayer, MtpStep
from peftlab.drafting.objectives import make_objective
from peftlab.errors import PeftlabError
from peftlab.methods.injection import is_injected
from peftlab.methods.leaf import trainable_dtype
from peftlab.methods.merging import merge
from peftlab.outputs import staged_directory

FOLDER = "mtp"  # of a run


def check(job: DraftJob[MtpDraft], target: PretrainedConfig) -> None:
    """Refuse a draft to continue from that is none."""
    start = job.config.from_
    if start is not None and find(start) is None:
        raise PeftlabError(f"draft.from: {start} is no mtp draft (config.json, speculators_model_type mtp)")


def load(job: DraftJob[MtpDraft], target: PreTrainedModel) -> EagleDraft:
    """Return the target with a new layer, or the one to continue from; the target's parameters are frozen.

    Raises:
        PeftlabError: the embeddings are not as wide as the states, or the draft to continue from is for another target.
    """
    config = job.config
    check_widths(config.kind, target)
    target.requires_grad_(False)
    embedding, head = input_embedding(target), head_weight(target)
    dtype = trainable_dtype(head)
    if config.from_ is None:
        network = new_network(target)
    else:
        place = find(config.from_)
        assert place is not None
        for warning in check_target(Path(place), target, job.tokenizer):
            print(warning)
        network = read_mtp(place, embedding, head)
    network.mtp_layers.to(head.device, dtype)
    network.train().draft_only(head.to(dtype), None)
    base = job.target if job.method is None else str(find(str(config.from_)))
    eos = end_ids(target, job.tokenizer)
    return EagleDraft(EagleModel(target, network), target, target, base, eos, steps=config.steps)


def new_network(target: PreTrainedModel) -> Mtp:
    """Return an untrained layer, which gives the target's own next token: it repeats the state that it reads."""
    last = target.config.get_text_config(decoder=True).num_hidden_layers
    network = Mtp(shape_for(target.config, (last,)), input_embedding(target), head_weight(target))
    structure, layer = structure_of(target), network.mtp_layers[0]
    assert isinstance(layer, MtpLayer)
    if structure is not None and not structure.norm.centred:  # of the size of the target's states, else one
        nn.init.constant_(layer.final_layernorm.weight, float(structure.norm.weight.float().square().mean().sqrt()))
    return network


def prepare(job: DraftJob[MtpDraft], draft: EagleDraft, train: Dataset) -> None:
    """Store the target's states if the recipe asks for it; draft only the tokens that the training text uses most."""
    eagle_draft.prepare(job, draft, train)


def loss(job: DraftJob[MtpDraft], draft: EagleDraft) -> Loss:
    """Return the weighted sum of the steps' losses."""
    return FeatureLoss(make_objective(job.objective), job.config.steps, job.config.decay, known=draft.stored)


def score(draft: EagleDraft, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
    """Return the mean acceptance over the steps, and each step's own."""
    return eagle_draft.score(draft, model, data, batch_size)


def save(job: DraftJob[MtpDraft], draft: EagleDraft, directory: Path, train: Dataset) -> Tensor | None:
    """Write the layer to ``mtp/``, an adapter folded into it, with the identity of its target."""
    network, name = draft.model.network, type(draft.target).__name__
    assert isinstance(network, Mtp)
    if is_injected(network):
        merge(network)
    with staged_directory(directory / FOLDER, "model", overwrite=True) as staging:
        write_mtp(network, staging, target=job.target, architecture=name, tokens=job.config.steps)
        identify(job.target, draft.target, job.tokenizer).write(staging)
    return network.tokens


def calibrate(draft: EagleDraft, directory: Path, held_out: Dataset, batch_size: int) -> None:
    """Measure on held-out text how often each choice of the layer is right, and store it with the layer."""
    write_ranks(directory / FOLDER, measure_ranks(draft.model, held_out, batch_size, FeatureDrafter.depth))


def drafter(draft: EagleDraft, saved: Saved | None) -> Served | None:
    """Return the target with the layer read from disk; an untrained one drafts nothing."""
    if saved is None:
        return None
    network = _on(saved.directory / FOLDER, draft.target)
    return Served(draft.target, partial(FeatureDrafter, MtpStep(network)), network.features)


def _on(directory: Path, target: PreTrainedModel, dtype: torch.dtype | None = None) -> Mtp:
    """Return the layer in a directory, in this dtype, on the target's device and with its rows of the LM head."""
    network = read_mtp(directory, input_embedding(target), head_weight(target)).to(target.device)
    dtype = dtype or network.mtp_layers[0].get_parameter("input_proj.weight").dtype
    for part in (network.mtp_layers, network.lm_head):
        part.to(dtype)
    return network


def find(reference: str) -> str | None:
    """Return the directory of an mtp draft that ``reference`` is, or that it has as a run."""
    return next((str(place) for place in (Path(reference) / FOLDER, Path(reference)) if is_mtp(place)), None)


def open(reference: str, opening: Opening) -> Opened:
    """Read the layer and check it against the target: other tokens are refused, other weights a warning."""
    check_tokenizer(Path(reference), opening.tokenizer)  # before any weights are read
    target = opening.target
    warnings = check_target(Path(reference), target, opening.tokenizer)
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
    if not is_mtp(newest / FOLDER):
        raise PeftlabError(f"{newest}: contains no {FOLDER}/ to continue from; did the run end?")
    return config.model_copy(update={"from_": str(newest / FOLDER)})
