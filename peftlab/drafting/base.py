"""The class of a kind of draft: what each must do from recipe to export; target and draft loaded as a pair to decode.

``load_pair`` reads both as a user names them, and ``make_drafter`` makes the drafter that a user names of them.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from peftlab.checkpoints.adapter import load_model
from peftlab.decoding.cache import Engine
from peftlab.decoding.decode import Drafter
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import SuffixAutomaton, with_copies
from peftlab.decoding.parallel_drafters import Masks, ParallelDrafter, PearlDrafter
from peftlab.decoding.sampled_trees import DrawnTrees, GrowthFactory
from peftlab.decoding.state_drafters import (
    BlockNetwork,
    FeatureDrafter,
    FeatureNetwork,
    Heads,
    HeadsDrafter,
    state_drafter,
)
from peftlab.decoding.table import MODEL_FREE, Window, model_free
from peftlab.decoding.theory import DraftCost, TargetWeights
from peftlab.drafting.acceptance import Reliability
from peftlab.drafting.config import DraftConfig, DraftData, DraftObjective
from peftlab.drafting.table import DRAFTS, DraftRow, find_draft
from peftlab.drafting.target import end_ids, head_weight
from peftlab.environment import resolve_device
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json
from peftlab.methods.config import METHODS, MethodConfig
from peftlab.models.load import language_model_class, load_config, load_tokenizer, sees_images
from peftlab.registry import resolve
from peftlab.tasks.image_prompts import ImagePrompts
from peftlab.training.config import TrainConfig
from peftlab.untyped import Unwrapped

ConfigT = TypeVar("ConfigT", bound=DraftConfig)
SectionT_co = TypeVar("SectionT_co", bound=DraftConfig, covariant=True)

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]
"""(the model in training, a batch) -> the sum of the loss over tokens."""


def in_mixed_precision(loss: Loss, settings: TrainConfig) -> Loss:
    """Return a loss that computes with modules of its own in bf16 where ``train.precision`` is bf16.

    accelerate's autocast covers the forward pass of the model alone. fp16 is not for losses: their gradients are taken
    a chunk at a time before anything scales them, and are too small for its range.

    Args:
        loss: computes on the device of its ``input_ids``. settings: the recipe's ``train`` section.
    """

    def computed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        with torch.autocast(inputs["input_ids"].device.type, torch.bfloat16):
            return loss(model, inputs)

    return computed if settings.precision == "bf16" else loss


@runtime_checkable
class ScheduledLoss(Protocol):
    """A loss that changes from step to step implements this protocol."""

    def at_step(self, step: int, steps: int) -> str:
        """Prepare the loss for a step; return what it does in it where that changes its cost, else "".

        Args:
            step: number of the step, from 0. steps: how many there will be.
        """
        ...


class Recipe(Protocol[SectionT_co]):
    """A draft recipe as a kind reads it (``recipe.schema.DraftRecipe``)."""

    @property
    def draft(self) -> SectionT_co: ...
    @property
    def target(self) -> str: ...
    @property
    def method(self) -> MethodConfig | None: ...
    @property
    def objective(self) -> DraftObjective: ...
    @property
    def data(self) -> DraftData: ...
    @property
    def train(self) -> TrainConfig: ...
    @property
    def merge(self) -> object: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def trust_remote_code(self) -> bool: ...


@dataclass(frozen=True)
class SavedDraft:
    """A draft as a run has written it.

    Attributes:
        directory: of the run. merged: the model as read back from ``merged/``; None if there is none.
        tokens: the reduced vocabulary [V_d]; None for the whole one.
    """

    directory: Path
    merged: PreTrainedModel | None
    tokens: Tensor | None


@dataclass(frozen=True)
class ServedDraft:
    """A target and what makes the drafter that decodes with it.

    Attributes:
        model: the target, whose output it is. drafter: makes a new drafter.
        features: layers whose entering states the drafter reads (``decoding.engines.build_engine``).
    """

    model: PreTrainedModel
    drafter: Callable[[], Drafter]
    features: tuple[int, ...] = ()


class DraftExporter(Protocol):
    """A writer of drafts that are no plain model, for a consumer that serves them."""

    def write(self, target: str, directory: Path, gamma: int) -> float:
        """Write the draft into an existing directory, load it back, and return the largest difference of a logit.

        Args:
            target: reference of the model that it drafts for. gamma: drafted tokens per step.

        Raises:
            PeftlabError: it is not for this target, or what was written differs.
        """
        ...

    def command(self, target: str, directory: str, gamma: int) -> str:
        """Return the command that serves ``target`` with the draft in ``directory``.

        Args:
            target: reference of the model that is served. directory: of the written draft.
            gamma: drafted tokens per step.
        """
        ...


def llama_command(target: str, draft: str, kind: str, gamma: int) -> str:
    """Return the command by which llama.cpp serves a target with a draft.

    Args:
        target, draft: GGUF files. kind: of the draft, as llama.cpp calls it. gamma: drafted tokens per step.
    """
    files = f"-m {shlex.quote(target)} --spec-draft-model {shlex.quote(draft)}"
    return f"llama-server {files} --spec-type {kind} --spec-draft-n-max {gamma}"


def speculators_command(draft: str) -> str:
    """Return Python lines by which speculators loads the draft in a directory."""
    return f"from speculators import SpeculatorModel\nmodel = SpeculatorModel.from_pretrained({draft!r})"


@dataclass(frozen=True)
class OwnLayers:
    """Some of the target's own layers serve as a draft in the target's cache.

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


@dataclass
class Pair:
    """A target with its tokenizer, and its draft if there is one: an engine, heads, or a network on its states.

    Attributes:
        weights: what a step of the target reads. embedding: the target's token embeddings [V, H].
        whole: the draft as a model of its own; None where it is none.
        own: the draft, where it is or begins with some of the target's own layers.
        masks: of a draft that writes several tokens in one pass; None: it writes one.
        corpus: text to copy from; None: only the sequence itself.
        window: what the draft sees of a text; None: all of it.
        warnings: what to show the user.
        images: what encodes prompts with images; None: the target reads text alone.
        draft: the engine of ``own``, else ``whole``.
    """

    target: Engine
    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]
    weights: TargetWeights
    embedding: Tensor | None = None
    draft: Engine | None = None
    own: OwnLayers | None = None
    whole: Engine | None = None
    heads: Heads | None = None
    network: FeatureNetwork | BlockNetwork | None = None
    masks: Masks | None = None
    corpus: SuffixAutomaton | None = None
    window: Window | None = None
    warnings: tuple[str, ...] = ()
    images: ImagePrompts | None = None

    @property
    def drafts(self) -> bool:
        """Whether there is a draft."""
        return any(part is not None for part in (self.heads, self.network, self.draft))


class TargetLoader:
    """A target that is loaded when it is first asked for, and paired with a stored draft.

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
        """The target, loaded when this is first read."""
        model = self.load(self.reference, self.dtype)
        if self.images is not None:
            self.images.attach(model)
        return model

    @cached_property
    def images(self) -> ImagePrompts | None:
        """What encodes prompts with images; None: the target reads text alone."""
        return ImagePrompts(self.reference) if sees_images(load_config(self.reference)) else None

    def load(self, reference: str, dtype: torch.dtype) -> PreTrainedModel:
        """Load a language model onto the device.

        Args:
            reference: as ``models.config.find_model`` takes it. dtype: of the weights.
        """
        model = load_model(reference, language_model_class(load_config(reference)), dtype=dtype)[0]
        nn.Module.to(model, self.device)
        return model

    def pair(
        self,
        parameters: int = 0,
        *,
        whole: Engine | None = None,
        own: Callable[[Engine], OwnLayers | None] | None = None,
        heads: Heads | None = None,
        network: FeatureNetwork | BlockNetwork | None = None,
        masks: Masks | None = None,
        vocabulary: int | None = None,
        features: tuple[int, ...] = (),
        warnings: tuple[str, ...] = (),
    ) -> Pair:
        """Return the target paired with a draft of these parts, or alone if no part is given.

        Args:
            parameters: how many the draft has.
            own: (the target's engine) -> some of the target's own layers, which draft in the same cache, or None.
            vocabulary: how many logits target and draft share, where one LM head is padded; None for all.
            features: layers whose entering states ``network`` or ``own`` reads.
            whole, heads, network, masks, warnings: as the attributes of ``Pair``.
        """
        model = self.target
        size, weights = model.num_parameters(), target_weights(model)
        engine = build_engine(model, vocabulary=vocabulary, pack=self.pack, features=features)
        if whole is not None and parameters >= size:
            warnings += (f"the draft ({parameters:,} parameters) is no smaller than the target ({size:,})",)
        layers = own(engine) if own is not None else None
        embedding = model.get_input_embeddings().get_parameter("weight").detach()[: engine.vocab_size]
        return Pair(
            engine, self.tokenizer, end_ids(model, self.tokenizer), weights, embedding,
            draft=layers.engine if layers is not None else whole, own=layers, whole=whole, heads=heads, network=network,
            masks=masks, warnings=warnings, images=self.images,
        )  # fmt: skip


def target_weights(model: PreTrainedModel) -> TargetWeights:
    """Return how many weights a step of the model reads: all experts count, an encoder does not."""
    head = head_weight(model)
    outside = {id(head), id(model.get_input_embeddings().get_parameter("weight"))}
    if model.config.is_encoder_decoder:
        library: Unwrapped = model
        outside |= {id(parameter) for parameter in library.get_encoder().parameters()}
    body = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in outside)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return TargetWeights(body / layers, layers, *head.shape)


class DraftKind(ABC, Generic[ConfigT]):
    """A kind of draft; an object is one draft of it, from its recipe to what serves it.

    Training calls ``check``, ``load``, ``prepare``, ``loss``, ``score``, ``save``, ``calibrate`` and ``drafter`` in
    this order. ``open``, ``export`` and ``update`` belong to the class: they read a stored draft.

    Args:
        recipe: what is asked for. tokenizer: the target's. directory: of the run. device: where the draft trains.
        longest: tokens of the longest example.

    Attributes:
        name: the name of the kind's row.
        own_modules: whether the loss computes with modules outside the forward pass of ``model``.
        config: the recipe's ``draft`` section.
        model: the module that trains: its parameters with ``requires_grad`` are checkpointed. It and those below are
            set by ``load``.
        adapted: the language model in it; the method is injected into it, or into ``injected``.
        target: the model to be served.
        base: reference of ``injected`` without its adapter.
        base_model: makes the model to be written to ``base``; None where ``base`` exists already.
        chosen: how the draft's parts were chosen, for results.json; None where nothing was.
        others: further models to be served with it (``data.targets``), in order.
    """

    name: ClassVar[str]
    own_modules: ClassVar[bool] = False
    model: nn.Module
    adapted: PreTrainedModel
    target: PreTrainedModel
    base: str
    base_model: Callable[[], PreTrainedModel] | None = None
    chosen: Mapping[str, Json] | None = None
    others: Sequence[PreTrainedModel] = ()

    def __init__(
        self,
        recipe: Recipe[ConfigT],
        tokenizer: PreTrainedTokenizerBase,
        directory: Path,
        device: torch.device,
        longest: int,
    ) -> None:
        self.recipe, self.tokenizer, self.directory = recipe, tokenizer, directory
        self.device, self.longest = device, longest
        self.config: ConfigT = recipe.draft

    # What training calls

    @abstractmethod
    def check(self, target: PretrainedConfig) -> None:
        """Refuse a target configuration that the draft cannot work with, before any weights are read."""

    @abstractmethod
    def load(self, target: PreTrainedModel) -> None:
        """Set ``model`` and the other attributes that training needs, before the method is injected."""

    def prepare(self, train: Dataset) -> None:
        """Take what the draft needs, such as a mask token, from the training text; by default nothing."""

    @abstractmethod
    def loss(self) -> Loss:
        """Return the loss; training calls this once, after the method has been injected."""

    @abstractmethod
    def score(self, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
        """Return the metrics of a held-out split; ``acceptance`` among them selects the best checkpoint.

        Args:
            model: ``self.model`` as it trains, or the merged draft.
            data: the split, rows as ``text.make_dataset`` makes them. batch_size: rows read together.
        """

    @abstractmethod
    def save(self, train: Dataset) -> Tensor | None:
        """Write the draft's own files; adapter and merged model are in ``directory`` already.

        Args:
            train: the training text.

        Returns:
            The reduced vocabulary [V_d]; None for all.
        """

    def calibrate(self, held_out: Dataset, batch_size: int) -> None:
        """Measure on held-out text the rates that trees are planned from, and store them; by default nothing.

        Args:
            held_out: rows as ``text.make_dataset`` makes them. batch_size: rows read together.
        """

    def reliability(self, held_out: Dataset, batch_size: int) -> Reliability | None:
        """Return how right the draft's estimates of acceptance are on held-out text; None: it makes none.

        Args:
            held_out: rows as ``text.make_dataset`` makes them. batch_size: rows read together.
        """
        return None

    @abstractmethod
    def drafter(self, saved: SavedDraft | None) -> ServedDraft | None:
        """Return what decodes with the saved draft, or with the untrained one for None; None if it cannot draft yet."""

    # What reads a stored draft

    @classmethod
    @abstractmethod
    def open(cls, place: str, loader: TargetLoader) -> Pair:
        """Return the target paired with a stored draft, as decoding takes them.

        Args:
            place: what ``DraftRow.find`` returned, a directory or a name. loader: loads the target.
        """

    @classmethod
    @abstractmethod
    def export(cls, place: str, consumer: str) -> Path | DraftExporter:
        """Return the plain model directory that a consumer loads, or an exporter for it, or refuse.

        Args:
            place: what ``DraftRow.find`` returned. consumer: name of the engine, as ``draft export --for`` takes it.
        """

    @classmethod
    @abstractmethod
    def update(cls, config: ConfigT, newest: Path, log: Path) -> ConfigT:
        """Return the section that continues from the draft of a run.

        Args:
            config: of the run's recipe. newest: the run's directory. log: the requests, for messages.
        """

    # What all kinds share

    @classmethod
    def row(cls) -> DraftRow:
        """Return the row of the kind in the table of draft kinds."""
        return DRAFTS[cls.name]

    def check_start(self, start: str | None, why: str) -> None:
        """Refuse to continue from a stored draft that is of another kind.

        Args:
            start: ``draft.from``; None for a new draft, which passes. why: end of the message, what ``start`` is not.
        """
        if start is not None and self.row().find(start) is None:
            raise PeftlabError(f"draft.from: {start} {why}")

    @property
    def injected(self) -> nn.Module:
        """The module into which the method is injected."""
        return self.adapted

    @property
    def separate(self) -> bool:
        """Whether the draft is a language model of its own; if not, it is trained in or on the target."""
        return self.adapted is not self.target

    @property
    def eos(self) -> frozenset[int]:
        """The ids that end the target's output."""
        return end_ids(self.target, self.tokenizer)

    @property
    def has_fold(self) -> bool:
        """Whether the recipe's method has a linear fold."""
        return self.recipe.method is not None and METHODS[self.recipe.method.name].folds

    @property
    def folds(self) -> bool:
        """Whether the run writes ``merged/``."""
        return self.recipe.merge is not False and self.has_fold and self.config.language_model

    @property
    def stored(self) -> Path:
        """The folder of the run that contains the draft."""
        return self.directory / self.row().folder

    @property
    def cache(self) -> Path:
        """Directory of the target's stored outputs: text, probabilities, states."""
        return Path(self.recipe.data.cache or self.directory.parent / "draft-data")


SUFFIX, SUFFIX_AND_DRAFT, PEARL, ONE_PASS = "suffix", "suffix+draft", "pearl", "one_pass"


def load_pair(
    target: str,
    draft: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    draft_dtype: torch.dtype | None = None,
    device: str = "auto",
    pack: bool = True,
) -> Pair:
    """Load a target and, if named, its draft.

    Args:
        target: reference as ``models.config.find_model`` takes it.
        draft: reference as ``find_draft`` takes it.
        dtype: of the target.
        draft_dtype: of the draft, default the target's. A draft may be rounded at will: that costs acceptance,
            never exactness.
        device: where both run: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        pack: see ``decoding.engines.build_engine``.

    Raises:
        PeftlabError: something cannot be loaded, there is no such device, or the two do not have the same tokens.
    """
    place = resolve_device(device)  # first: that a device is missing is told before anything is read
    loader = TargetLoader(target, load_tokenizer(target), dtype, draft_dtype or dtype, place, pack)
    if draft is None:
        return loader.pair()
    row, stored = find_draft(draft)
    kind: type[DraftKind[DraftConfig]] = resolve(row.kind)
    return kind.open(stored, loader)


def draft_costs(target: TargetWeights) -> list[DraftCost]:
    """Return the cost of drafting for a target with each kind, in the order of the table."""
    return [cost for kind in DRAFTS.values() for cost in resolve(kind.config).costs(target)]


def make_drafter(name: str, pair: Pair, width: int | None = None, grow: GrowthFactory | None = None) -> Drafter:
    """Return a new drafter by its name.

    ``"draft"`` is the pair's model or heads; ``SUFFIX_AND_DRAFT`` copies what followed a long repeated suffix, and
    elsewhere joins copy and draft in one tree; ``PEARL`` is the pair's model at work beside the target; ``ONE_PASS`` is
    a gated LoRA whose masks the target reads while it verifies; the others are ``decoding.table.MODEL_FREE``.

    Args:
        width: choices of each Medusa head or place of a pard draft or gated LoRA, or children of an eagle3 layer's
            node, that a tree may use; 1 is a chain, None the default.
        grow: makes what trees drawn from a draft model grow by; None: it drafts chains.

    Raises:
        PeftlabError: no such drafter, no draft in the pair, or a tree that the draft does not make.
    """
    own_trees = pair.drafts and (pair.draft is None or pair.masks is not None)
    check_tree(width, grow is not None, drafted=pair.drafts, heads=own_trees)
    if name.partition(":")[0] in MODEL_FREE:
        free = model_free(name)
        return resolve(free.row.make)(pair.corpus, free.value)
    if name == SUFFIX_AND_DRAFT:
        return with_copies(make_drafter("draft", pair, width, grow), pair.corpus)
    if name == PEARL:
        if pair.whole is None or grow is not None or width not in (None, 1):
            raise PeftlabError(f"drafter {PEARL}: chains of a draft model alone, which works beside the target")
        return with_window(PearlDrafter(pair.whole), pair.window)
    if name == ONE_PASS:
        if pair.own is None or pair.own.one_pass is None:
            raise PeftlabError(f"drafter {ONE_PASS}: of a gated_lora draft, which the target reads as it verifies")
        return with_window(pair.own.one_pass(width or 1), pair.window)
    if name != "draft":
        names = ("draft", SUFFIX_AND_DRAFT, PEARL, ONE_PASS, *MODEL_FREE)
        raise PeftlabError(f"drafter {name!r}: none of {', '.join(names)}{did_you_mean(name, names)}")
    return with_window(_draft_of_pair(pair, width, grow), pair.window)


def needs_draft(name: str, draft: str | None) -> None:
    """Raise ``PeftlabError`` for a drafter that is a way to use a draft, where none is given.

    Args:
        name: of the drafter. draft: reference of the draft; None: none is given.
    """
    needed = {PEARL: "a draft model, which works beside the target", ONE_PASS: "a gated_lora draft"}
    if draft is None and name in needed:
        raise PeftlabError(f"drafter {name}: needs {needed[name]}; give a draft")


def _draft_of_pair(pair: Pair, width: int | None, grow: GrowthFactory | None) -> Drafter:
    """Return a new drafter from the pair's draft: heads, network, masks, model or the target's own layers."""
    if pair.heads is not None:
        return HeadsDrafter(pair.heads, width)
    if pair.network is not None:
        return state_drafter(pair.network, width or 1)
    if pair.draft is None:
        raise PeftlabError("drafter 'draft': no draft model given")
    if pair.masks is not None:
        return ParallelDrafter(pair.draft, pair.masks, width or 1, shares_cache=pair.own is not None)
    if pair.whole is not None and (pair.own is None or grow is not None or pair.window is not None):
        return ModelDrafter(pair.whole) if grow is None else DrawnTrees(pair.whole, grow=grow)
    assert pair.own is not None
    if grow is None:
        return pair.own.drafter(pair.draft)
    if isinstance(pair.own.trees, str):
        raise PeftlabError(f"draft {pair.own.trees} drafts chains, no trees")
    return pair.own.trees(pair.draft, grow)


def with_window(drafter: Drafter, window: Window | None) -> Drafter:
    """Return a drafter that sees only the first and the last tokens of a text.

    Args:
        drafter: any drafter. window: how many tokens of each end; None returns ``drafter`` as it is.

    Raises:
        PeftlabError: it is no chain from a draft with a cache of its own.
    """
    if window is None:
        return drafter
    chain = type(drafter) in (ModelDrafter, PearlDrafter)
    if chain and isinstance(drafter, ModelDrafter) and not drafter.shares_cache:
        return replace(drafter, window=window)
    if isinstance(drafter, FeatureDrafter) and drafter.width == 1:
        return replace(drafter, window=window)
    raise PeftlabError("draft_window: for chains (width 1) from a draft model or an eagle3 or mtp layer; leave it out")


def check_tree(width: int | None, tree: bool, *, drafted: bool, heads: bool) -> None:
    """Raise ``PeftlabError`` for a tree of no width, without a draft to fill it, or of another kind of draft.

    Args:
        tree: whether one is drawn from a draft model. drafted: whether there is a draft. heads: whether it is one of
            heads, eagle3, mtp, dflash, pard and gated_lora (``DraftRow.heads``).
    """
    if width is not None and (width < 1 or (width > 1 and not drafted)):
        raise PeftlabError(f"width {width}: 1, or more with a draft, whose trees it limits")
    if width is not None and width > 1 and not heads:
        raise PeftlabError(
            f"width {width}: of heads, eagle3, mtp, dflash, pard and gated_lora; a draft model's trees have names, as "
            f"tree rsd_c:{width}"
        )
    if tree and not drafted:
        raise PeftlabError("tree: is drawn from a draft model; give one as draft")
    if tree and heads:
        raise PeftlabError(
            "tree: is drawn from a draft model; heads, eagle3, mtp, dflash, pard and gated_lora have trees of their "
            "own, see width"
        )
