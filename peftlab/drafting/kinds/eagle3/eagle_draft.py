"""An EAGLE-3 layer as a draft: put on the target, trained with it frozen, read back for decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.decoding.flat import structure_of
from peftlab.decoding.state_drafters import FeatureDrafter
from peftlab.drafting.base import DraftJob, Loss, Opened, Opening, Saved, Served, check_start, found_in, newest_in
from peftlab.drafting.config import Eagle3Draft
from peftlab.drafting.eagle import Eagle3, EagleExport, EagleStep, is_eagle, read_eagle, write_eagle
from peftlab.drafting.kinds.eagle3 import state_draft
from peftlab.drafting.kinds.eagle3.state_draft import StateDraft, check_stored, load_network, storing
from peftlab.drafting.objectives import make_objective
from peftlab.drafting.state_network import FeatureLoss, shape_for
from peftlab.drafting.states import head_weight, input_embedding
from peftlab.errors import PeftlabError

FOLDER = "eagle3"  # of a run
prepare, score, calibrate = state_draft.prepare, state_draft.score, state_draft.calibrate
find = partial(found_in, folder=FOLDER, known=is_eagle)


def check(job: DraftJob[Eagle3Draft], target: PretrainedConfig) -> None:
    """Refuse layers that the target does not have, and a draft to continue from that is none."""
    config, text = job.config, target.get_text_config(decoder=True)
    count = text.num_hidden_layers
    if config.features is not None and config.features[-1] > count:
        raise PeftlabError(
            f"draft.features: no layer {config.features[-1]}; the target has 0 to {count - 1}, and {count} is the "
            "state that its LM head reads"
        )
    check_start(config.from_, find, "is no eagle3 draft (config.json, speculators_model_type eagle3)")


def load(job: DraftJob[Eagle3Draft], target: PreTrainedModel) -> StateDraft:
    """Return the target with a new layer, or the one to continue from, see ``load_network``.

    Raises:
        PeftlabError: as that, or the draft to continue from reads other layers than the recipe names.
    """
    layers = None if job.config.features is None else tuple(job.config.features)

    def read(place: str) -> Eagle3:
        network = read_eagle(place, input_embedding(target))
        if layers not in (None, network.features):
            raise PeftlabError(
                f"draft.features: {job.config.features}, but {job.config.from_} reads {[*network.features]}"
            )
        network.shape = replace(network.shape, window=None)  # from here on it trains on all tokens
        return network

    return load_network(job, target, find, partial(_new_network, target, layers), read)


def _new_network(target: PreTrainedModel, features: tuple[int, ...] | None) -> Eagle3:
    network = Eagle3(shape_for(target.config, features), input_embedding(target), head_weight(target))
    structure = structure_of(target)
    if structure is not None and not structure.norm.centred:  # else the weights start at one
        network.norm.weight = nn.Parameter(structure.norm.weight.detach().clone())
    return network


def loss(job: DraftJob[Eagle3Draft], draft: StateDraft) -> Loss:
    """Return the weighted sum of the steps' losses."""
    config = job.config
    return FeatureLoss(make_objective(job.objective), config.steps, config.decay, config.regression, draft.stored)


def save(job: DraftJob[Eagle3Draft], draft: StateDraft, directory: Path, train: Dataset) -> Tensor | None:
    """Write the layer to ``eagle3/``, an adapter folded into it, with the identity of its target."""
    with storing(job, draft, directory) as staging:
        network, name = draft.model.network, type(draft.target).__name__
        assert isinstance(network, Eagle3)
        write_eagle(network, staging, target=job.target, architecture=name, tokens=job.config.steps)
    return network.tokens


def drafter(draft: StateDraft, saved: Saved | None) -> Served | None:
    """Return the target with the layer read from disk; an untrained one drafts nothing."""
    if saved is None:
        return None
    network = read_eagle(saved.directory / draft.folder, input_embedding(draft.target)).to(draft.target.device)
    network.parts_to(draft.computing)
    return Served(draft.target, partial(FeatureDrafter, EagleStep(network)), network.features)


def open(reference: str, opening: Opening) -> Opened:
    """Read the layer and check it against the target: other tokens are refused, other weights a warning."""
    warnings, target = check_stored(reference, opening), opening.target
    network = read_eagle(reference, input_embedding(target)).to(target.device)
    network.parts_to(opening.draft_dtype)
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    if max(network.features) > count:
        raise PeftlabError(
            f"{reference}: reads the state entering layer {max(network.features)}; the target has {count}"
        )
    if network.shape.window is not None:
        warnings += (f"{reference}: trained to see the last {network.shape.window} tokens; here the layer sees all",)
    size = sum(parameter.numel() for parameter in network.parameters())
    return Opened(size, network=EagleStep(network, opening.pack), features=network.features, warnings=warnings)


def export(place: str, consumer: str) -> EagleExport:
    """Return what writes the draft for vLLM or SGLang."""
    if consumer not in ("vllm", "sglang"):
        raise PeftlabError(f"--for {consumer}: {place} is an eagle3 draft, which vllm and sglang load")
    return EagleExport(Path(place), consumer)


def update(config: Eagle3Draft, newest: Path, log: Path) -> Eagle3Draft:
    """Return the section that continues from the draft of ``newest``."""
    return config.model_copy(update={"from_": newest_in(newest, FOLDER, is_eagle)})
