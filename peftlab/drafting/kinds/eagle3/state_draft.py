"""A network on the target's states as a draft: put on the target, trained with it frozen, measured, and stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel

from peftlab.decoding.state_drafters import FeatureDrafter
from peftlab.drafting.acceptance import by_depth, response_tokens
from peftlab.drafting.base import Draft, DraftJob, Opening
from peftlab.drafting.checks import check_target, check_tokenizer, end_ids, identify, write_ranks
from peftlab.drafting.config import StateConfig
from peftlab.drafting.state_network import (
    EagleModel,
    StateNetwork,
    StoredStates,
    measure_features,
    measure_ranks,
    store_states,
)
from peftlab.drafting.states import head_weight, input_embedding
from peftlab.errors import PeftlabError
from peftlab.files import staged_directory
from peftlab.methods.injection import is_injected
from peftlab.methods.leaf import trainable_dtype
from peftlab.methods.merging import merge


@dataclass
class StateDraft(Draft):
    """A target and the network on it, trained for ``steps`` tokens ahead.

    Attributes:
        folder: of a run, where the network is stored. stored: states of the training text.
    """

    model: EagleModel
    steps: int = 3
    stored: StoredStates | None = None
    folder: str = field(kw_only=True)

    @property
    def injected(self) -> StateNetwork:
        return self.model.network

    @property
    def computing(self) -> torch.dtype:
        """The dtype in which the network trains and is measured; it is stored in bfloat16."""
        return trainable_dtype(head_weight(self.target))


def load_network(
    job: DraftJob[StateConfig],
    target: PreTrainedModel,
    find: Callable[[str], str | None],
    new: Callable[[], StateNetwork],
    read: Callable[[str], StateNetwork],
) -> StateDraft:
    """Return the target with a new network, or the one to continue from; the target's parameters are frozen.

    Args:
        find: of the kind. new: returns an untrained network. read: returns the one in a directory.

    Raises:
        PeftlabError: the embeddings are not as wide as the states, or the draft to continue from is for another target.
    """
    config, embedding, head = job.config, input_embedding(target), head_weight(target)
    if embedding.shape != head.shape:
        raise PeftlabError(
            f"draft.kind {config.kind}: the embeddings of {type(target).__name__} are {tuple(embedding.shape)} and its "
            f"LM head {tuple(head.shape)}; the layer needs both for the same tokens and states"
        )
    target.requires_grad_(False)
    start = None if config.from_ is None else find(config.from_)
    if start is None:
        network = new()
    else:
        for warning in check_target(Path(start), target, job.tokenizer):
            print(warning)
        network = read(start)
    dtype = trainable_dtype(head)
    network.parts_to(dtype, head.device)
    network.train().draft_only(head.to(dtype), None)
    base = job.target if job.method is None else str(start)
    eos = end_ids(target, job.tokenizer)
    model = EagleModel(target, network)
    return StateDraft(model, target, target, base, eos, steps=config.steps, folder=config.kind)


def prepare(job: DraftJob[StateConfig], draft: StateDraft, train: Dataset) -> None:
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


def score(draft: StateDraft, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
    """Return the mean acceptance over the steps, and each step's own."""
    assert isinstance(model, EagleModel)
    return by_depth(measure_features(model, data, draft.steps, batch_size))


@contextmanager
def storing(job: DraftJob[StateConfig], draft: StateDraft, directory: Path) -> Iterator[Path]:
    """Fold an adapter into the network and round it; yield where the block writes it, beside its target's identity."""
    network = draft.model.network
    if is_injected(network):
        merge(network)
    network.round()
    with staged_directory(directory / draft.folder, "model", overwrite=True) as staging:
        yield staging
        identify(job.target, draft.target, job.tokenizer).write(staging)
    network.parts_to(draft.computing)


def calibrate(draft: StateDraft, directory: Path, held_out: Dataset, batch_size: int) -> None:
    """Measure on held-out text how often each choice of the layer is right, and store it with the layer."""
    write_ranks(directory / draft.folder, measure_ranks(draft.model, held_out, batch_size, FeatureDrafter.depth))


def check_stored(reference: str, opening: Opening) -> tuple[str, ...]:
    """Check a stored network against the target: other tokens are refused, other weights are warnings."""
    check_tokenizer(Path(reference), opening.tokenizer)  # before any weights are read
    return check_target(Path(reference), opening.target, opening.tokenizer)
