"""What the pipeline and a kind of draft hand each other, while training and when a draft is opened for decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.checkpoints.folded import load_model
from peftlab.decoding.drafter import Drafter
from peftlab.decoding.engine import Engine
from peftlab.decoding.parallel_drafters import Masks
from peftlab.decoding.sampled_trees import GrowthFactory
from peftlab.decoding.state_drafters import FeatureNetwork, Heads
from peftlab.drafting.config import DraftConfig, DraftData, DraftObjective
from peftlab.errors import PeftlabError
from peftlab.files import Json, read_object
from peftlab.methods.config import MethodConfig
from peftlab.models.pretrained import language_model_class, load_config

ConfigT = TypeVar("ConfigT", bound=DraftConfig, covariant=True)

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]
"""(the model in training, a batch) -> the sum of the loss over tokens."""


@runtime_checkable
class ScheduledLoss(Protocol):
    """A loss that changes from step to step."""

    def at_step(self, step: int, steps: int) -> str:
        """Prepare for a step; see ``tasks.problem.TrainingProblem.at_step``."""
        ...


@dataclass(frozen=True)
class DraftJob(Generic[ConfigT]):
    """What a draft recipe asks for.

    Attributes:
        config: the recipe's ``draft`` section.
        target: reference of the target. tokenizer: the target's.
        method: what is injected and trained; None: the draft's own modules alone train.
        folds: whether the run writes ``merged/``.
        longest: tokens of the longest example.
        directory: of the run. device: where it trains. seed, batch_size: of training.
        revision, trust_remote_code: of the target.
    """

    config: ConfigT
    target: str
    tokenizer: PreTrainedTokenizerBase
    method: MethodConfig | None
    objective: DraftObjective
    data: DraftData
    folds: bool
    longest: int
    directory: Path
    device: torch.device
    seed: int
    batch_size: int
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def cache(self) -> Path:
        """Directory of what the target has computed: text, probabilities, states."""
        return Path(self.data.cache or self.directory.parent / "draft-data")


@dataclass
class Draft:
    """A draft as it trains.

    Attributes:
        model: the module that trains: its parameters with ``requires_grad`` are checkpointed.
        adapted: the language model in it; the method is injected into it, or into what ``injected`` returns.
        target: the model to be served.
        base: reference of ``injected`` without its adapter.
        eos: ids that end an output.
        base_model: makes the model to be written to ``base``; None where ``base`` exists already.
        chosen: how its parts were chosen, for results.json; None where nothing was.
        others: further models to be served with it (``data.targets``), in order.
    """

    model: nn.Module
    adapted: PreTrainedModel
    target: PreTrainedModel
    base: str
    eos: frozenset[int]
    base_model: Callable[[], PreTrainedModel] | None = field(default=None, kw_only=True)
    chosen: Mapping[str, Json] | None = field(default=None, kw_only=True)
    others: Sequence[PreTrainedModel] = field(default=(), kw_only=True)

    @property
    def injected(self) -> nn.Module:
        """Return the module into which the method is injected."""
        return self.adapted

    @property
    def separate(self) -> bool:
        """Whether the draft is a language model of its own; if not, it is trained in or on the target."""
        return self.adapted is not self.target


@dataclass(frozen=True)
class Saved:
    """What a run has written.

    Attributes:
        directory: of the run. merged: the model read from ``merged/``; None if there is none.
        tokens: the reduced vocabulary [V_d]; None for the whole one.
    """

    directory: Path
    merged: PreTrainedModel | None
    tokens: Tensor | None


@dataclass(frozen=True)
class Served:
    """What decodes.

    Attributes:
        model: whose output it is. drafter: makes its drafter.
        features: layers whose entering states the drafter reads (``decoding.engines.build_engine``).
    """

    model: PreTrainedModel
    drafter: Callable[[], Drafter]
    features: tuple[int, ...] = ()


class Exporting(Protocol):
    """How a draft that is no plain model is written for a consumer and served by it."""

    def write(self, target: str, directory: Path, gamma: int) -> float:
        """Write it into an existing directory, load it back, and return the largest difference of a logit.

        Args:
            target: reference of the model that it drafts for. gamma: drafted tokens per step.

        Raises:
            PeftlabError: it is not for this target, or what was written differs.
        """
        ...

    def command(self, target: str, directory: str, gamma: int) -> str:
        """Return the command that serves ``target`` with the draft in ``directory``."""
        ...


class Opening:
    """The target that a stored draft is opened for; its weights are read when first asked for.

    Args:
        target: reference. tokenizer: the target's. dtype: of the target. draft_dtype: of the draft.
        device: where both run. pack: see ``decoding.engines.build_engine``.
    """

    def __init__(
        self,
        target: str,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype,
        draft_dtype: torch.dtype,
        device: torch.device,
        pack: bool,
    ) -> None:
        self.reference, self.tokenizer, self.dtype = target, tokenizer, dtype
        self.draft_dtype, self.device, self.pack = draft_dtype, device, pack

    @cached_property
    def target(self) -> PreTrainedModel:
        """The target, loaded."""
        return self.load(self.reference, self.dtype)

    def load(self, reference: str, dtype: torch.dtype) -> PreTrainedModel:
        """Load a language model onto the device."""
        model = load_model(reference, language_model_class(load_config(reference)), dtype=dtype)[0]
        nn.Module.to(model, self.device)
        return model


@dataclass(frozen=True)
class OwnLayers:
    """Some of the target's own layers as a draft in the target's cache.

    Attributes:
        engine: that runs them. drafter: (this engine, or one around it) -> a new drafter of chains.
        trees: (the same, what they grow by) -> a new drafter of trees; the name of a draft that has none. Not asked
            where the draft is a model of its own, too.
        one_pass: (width) -> a new drafter whose masks the target reads while it verifies; None: there is none.
    """

    engine: Engine
    drafter: Callable[[Engine], Drafter]
    trees: Callable[[Engine, GrowthFactory], Drafter] | str = ""
    one_pass: Callable[[int], Drafter] | None = None


@dataclass(frozen=True)
class Opened:
    """A stored draft, ready to decode with: an engine, an exit, heads, or a network that reads the target's states.

    Attributes:
        parameters: how many it has.
        engine: the draft as a model of its own.
        own: (the target's engine) -> some of the target's own layers, which draft in the same cache; None: not there.
        vocabulary: how many logits target and draft share, where one LM head is padded; None for all.
        masks: of an engine that writes several tokens in one pass; None: it writes one.
        features: layers whose entering states ``network`` or ``own`` reads. warnings: what to show the user.
    """

    parameters: int
    engine: Engine | None = None
    own: Callable[[Engine], OwnLayers | None] | None = None
    heads: Heads | None = None
    vocabulary: int | None = None
    network: FeatureNetwork | None = None
    masks: Masks | None = None
    features: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


def says(directory: str | Path, key: str, value: str | Sequence[str]) -> bool:
    """Whether ``config.json`` in a directory has this value of ``key``."""
    file = Path(directory) / "config.json"
    return file.is_file() and read_object(file).get(key) == value


def found_in(reference: str, folder: str, known: Callable[[Path], bool]) -> str | None:
    """Return the directory of a draft that ``reference`` is, or that it has as a run in ``folder``; None: neither.

    Args:
        known: whether a directory contains such a draft.
    """
    return next((str(place) for place in (Path(reference) / folder, Path(reference)) if known(place)), None)


def check_start(start: str | None, find: Callable[[str], str | None], why: str) -> None:
    """Refuse a draft to continue from that ``find`` does not know; None is a new one. ``why``: for the message."""
    if start is not None and find(start) is None:
        raise PeftlabError(f"draft.from: {start} {why}")


def newest_in(run: Path, folder: str, known: Callable[[Path], bool]) -> str:
    """Return the directory of the draft that a run has written to ``folder``; ``PeftlabError`` if there is none."""
    if not known(run / folder):
        raise PeftlabError(f"{run}: contains no {folder}/ to continue from; did the run end?")
    return str(run / folder)
