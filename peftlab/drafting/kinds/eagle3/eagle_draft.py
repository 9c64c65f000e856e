"""An EAGLE-3 layer as a draft: put on the target, trained with it frozen, read back for decoding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.decoding.drafters.feature_drafter import FeatureDrafter
from peftlab.decoding.engines.structure import structure_of
from peftlab.drafting.checks import end_ids
from peftlab.drafting.hidden_states import head_weight, input_embedding
from peftlab.drafting.kinds.base import Draft, DraftJob, Loss, Opened, Opening, Saved, Served
from peftlab.drafting.kinds.eagle3.config import Eagle3Draft, StateConfig
from peftlab.drafting.kinds.eagle3.eagle_export import EagleExport
from peftlab.drafting.kinds.eagle3.eagle_files import is_eagle, read_eagle, write_eagle
from peftlab.drafting.kinds.eagle3.eagle_network import Eagle3, StateNetwork, shape_for
from peftlab.drafting.kinds.eagle3.eagle_step import EagleStep
from peftlab.drafting.kinds.eagle3.feature_loss import EagleModel, FeatureLoss, measure_features
from peftlab.drafting.kinds.eagle3.stored_states import StoredStates, store_states
from peftlab.drafting.kinds.eagle3.target_identity import check_target, check_tokenizer, identify, write_ranks
from peftlab.drafting.kinds.eagle3.tree_rates import measure_ranks
from peftlab.drafting.objectives import make_objective
from peftlab.drafting.vocabulary import response_tokens
from peftlab.errors import PeftlabError
from peftlab.methods.injection import is_injected
from peftlab.methods.leaf import trainable_dtype
from peftlab.methods.merging import merge
from peftlab.outputs import staged_directory

FOLDER = "eagle3"  # of a run


@dataclass
class EagleDraft(Draft):
    """A target and the layer on it, trained for ``steps`` tokens ahead; ``stored``: states of the training text."""

    model: EagleModel
    steps: int = 3
    stored: StoredStates | None = None

    @property
    def injected(self) -> StateNetwork:
        return self.model.network


def check(job: DraftJob[Eagle3Draft], target: PretrainedConfig) -> None:
    """Refuse layers that the target does not have, and a draft to continue from that is none."""
    config, text = job.config, target.get_text_config(decoder=True)
    count = text.num_hidden_layers
    if config.features is not None and config.features[-1] > count:
        raise PeftlabError(
            f"draft.features: no layer {config.features[-1]}; the target has 0 to {count - 1}, and {count} is the "
            "state that its LM head reads"
        )
    if config.from_ is not None and find(config.from_) is None:
        raise PeftlabError(
            f"draft.from: {config.from_} is no eagle3 draft (config.json, speculators_model_type eagle3)"
        )


def load(job: DraftJob[Eagle3Draft], target: PreTrainedModel) -> EagleDraft:
    """Return the target with a new layer, or the one to continue from; the target's parameters are frozen.

    Raises:
        PeftlabError: the embeddings are not as wide as the states, or the draft to continue from is for another target.
    """
    config = job.config
    check_widths(config.kind, target)
    embedding, head = input_embedding(target), head_weight(target)
    target.requires_grad_(False)
    dtype = trainable_dtype(head)
    if config.from_ is None:
        features = None if config.features is None else tuple(config.features)
        network = Eagle3(shape_for(target.config, features), embedding, head)
        structure = structure_of(target)
        if structure is not None and not structure.norm.centred:  # else the weights start at one
            network.norm.weight = nn.Parameter(structure.norm.weight.detach().clone())
    else:
        place = find(config.from_)
        assert place is not None
        for warning in check_target(Path(place), target, job.tokenizer):
            print(warning)
        network = read_eagle(place, embedding)
        if config.features is not None and tuple(config.features) != network.features:
            raise PeftlabError(f"draft.features: {config.features}, but {config.from_} reads {[*network.features]}")
    network.fc.to(head.device, dtype)
    network.layers.to(head.device, dtype)
    network.norm.to(head.device, dtype)
    network.train().draft_only(head.to(dtype), None)
    base = job.target if job.method is None else str(find(str(config.from_)))
    eos = end_ids(target, job.tokenizer)
    return EagleDraft(EagleModel(target, network), target, target, base, eos, steps=config.steps)


def check_widths(kind: str, target: PreTrainedModel) -> None:
    """Raise ``PeftlabError`` for a target whose embeddings and LM head differ in tokens or width."""
    embedding, head = input_embedding(target), head_weight(target)
    if embedding.shape != head.shape:
        raise PeftlabError(
            f"draft.kind {kind}: the embeddings of {type(target).__name__} are {tuple(embedding.shape)} and its LM "
            f"head {tuple(head.shape)}; the layer needs both for the same tokens and states"
        )


def prepare(job: DraftJob[StateConfig], draft: EagleDraft, train: Dataset) -> None:
    """Store the target's states if the recipe asks for it; draft only the tokens that the training text uses most."""
    if job.config.store_gb is not None:
        with PartialState().main_process_first():
            draft.stored = store_states(draft.model, train["input_ids"], job.cache, job.config.store_gb)
    head = head_weight(draft.target)
    size = job.config.vocabulary
    if size is None or size >= len(head):
        return
    tokens = response_tokens(train, size, draft.target)
    assert tokens is not None
    tokens = tokens.to(head.device)
    draft.model.network.draft_only(head[tokens].to(trainable_dtype(head)), tokens)


def loss(job: DraftJob[Eagle3Draft], draft: EagleDraft) -> Loss:
    """Return the weighted sum of the steps' losses."""
    config = job.config
    return FeatureLoss(make_objective(job.objective), config.steps, config.decay, config.regression, draft.stored)


def score(draft: EagleDraft, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
    """Return the mean acceptance over the steps, and each step's own."""
    assert isinstance(model, EagleModel)
    steps = [each.rates() for each in measure_features(model, data, draft.steps, batch_size)]
    each = {f"{key}_{k + 1}": rates[key] for k, rates in enumerate(steps) for key in ("acceptance", "agreement")}
    return {"acceptance": sum(rates["acceptance"] for rates in steps) / len(steps), **each}


def save(job: DraftJob[Eagle3Draft], draft: EagleDraft, directory: Path, train: Dataset) -> Tensor | None:
    """Write the layer to ``eagle3/``, an adapter folded into it, with the identity of its target."""
    network, name = draft.model.network, type(draft.target).__name__
    if is_injected(network):
        merge(network)
    assert isinstance(network, Eagle3)
    with staged_directory(directory / FOLDER, "model", overwrite=True) as staging:
        write_eagle(network, staging, target=job.target, architecture=name, tokens=job.config.steps)
        identify(job.target, draft.target, job.tokenizer).write(staging)
    return network.tokens


def calibrate(draft: EagleDraft, directory: Path, held_out: Dataset, batch_size: int) -> None:
    """Measure on held-out text how often each choice of the layer is right, and store it with the layer."""
    write_ranks(directory / FOLDER, measure_ranks(draft.model, held_out, batch_size, FeatureDrafter.depth))


def drafter(draft: EagleDraft, saved: Saved | None) -> Served | None:
    """Return the target with the layer read from disk; an untrained one drafts nothing."""
    if saved is None:
        return None
    network = read_eagle(saved.directory / FOLDER, input_embedding(draft.target)).to(draft.target.device)
    return Served(draft.target, partial(FeatureDrafter, EagleStep(network)), network.features)


def find(reference: str) -> str | None:
    """Return the directory of an eagle3 draft that ``reference`` is, or that it has as a run."""
    return next((str(place) for place in (Path(reference) / FOLDER, Path(reference)) if is_eagle(place)), None)


def open(reference: str, opening: Opening) -> Opened:
    """Read the layer and check it against the target: other tokens are refused, other weights a warning."""
    check_tokenizer(Path(reference), opening.tokenizer)  # before any weights are read
    target = opening.target
    warnings = check_target(Path(reference), target, opening.tokenizer)
    network = read_eagle(reference, input_embedding(target)).to(target.device)
    for part in (network.fc, network.layers, network.norm, network.lm_head):
        part.to(opening.draft_dtype)
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    if max(network.features) > count:
        raise PeftlabError(
            f"{reference}: reads the state entering layer {max(network.features)}; the target has {count}"
        )
    size = sum(parameter.numel() for parameter in network.parameters())
    return Opened(size, network=EagleStep(network, opening.pack), features=network.features, warnings=warnings)


def export(place: str, consumer: str) -> EagleExport:
    """Return what writes the draft for vLLM or SGLang."""
    if consumer not in ("vllm", "sglang"):
        raise PeftlabError(f"--for {consumer}: {place} is an eagle3 draft, which vllm and sglang load")
    return EagleExport(Path(place), consumer)


def update(config: Eagle3Draft, newest: Path, log: Path) -> Eagle3Draft:
    """Return the section that continues from the draft of ``newest``."""
    place = newest / FOLDER
    if not is_eagle(place):
        raise PeftlabError(f"{newest}: contains no {FOLDER}/ to continue from; did the run end?")
    return config.model_copy(update={"from_": str(place)})
