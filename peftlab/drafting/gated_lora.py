"""A LoRA on the frozen target that acts on masks alone (Uno, arXiv 2609.04010)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.checkpoints.adapter import WEIGHTS_FILE, fill, load_adapter, read_adapter, save_adapter
from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.decoding.cache import Engine
from peftlab.decoding.engines import build_engine
from peftlab.decoding.parallel_drafters import MaskedPassEngine, Masks, OnePassDrafter, ParallelDrafter
from peftlab.decoding.recurrent import MIXERS
from peftlab.drafting.acceptance import Acceptance, add_rates, batches, rates_by_depth
from peftlab.drafting.base import DraftExporter, DraftKind, Loss, OwnLayers, Pair, SavedDraft, ServedDraft, TargetLoader
from peftlab.drafting.config import GatedLoraDraft
from peftlab.drafting.objectives import Objective, chunked_loss, following, make_objective
from peftlab.drafting.pard import MaskRows, check_parallel, parallel_states, with_token
from peftlab.drafting.target import TargetIdentity, check_target, check_tokenizer, head_weight, identify
from peftlab.errors import PeftlabError
from peftlab.files import read_object, staged_directory, typed_value, write_json
from peftlab.methods.config import LoraConfig, MethodConfig
from peftlab.methods.inject import injection_of, plan_injection
from peftlab.methods.lora.layers import Gate, LoraConv1D, LoraLinear, set_gate, unregister_factors
from peftlab.methods.lora.plan import leaf_kind
from peftlab.models.config import CONFIG_FILE, GATED_FILE
from peftlab.models.load import eval_mode, load_config


def block_rows(weights: Tensor, length: int, offsets: Sequence[int]) -> MaskRows:
    """Return blocks of masks, one behind the other, over the places of texts whose predictions count.

    A block begins with a token of the text, its anchor, and has ``length`` - 1 masks at the places after it. No place
    has two masks, so that a text has fewer masks than tokens.

    Args:
        weights: [b, n], above 0 where a prediction counts: one run of places in each text.
        offsets: the first anchor of each text, counted from its first such place.
    """
    depths, places = [], []
    for line, offset in zip(weights.cpu() > 0, offsets, strict=True):
        inside = torch.arange(int(line.sum()))
        depth = (inside - offset) % length  # 0 is the anchor, a token of the text
        masked = (depth > 0) & (inside > offset)
        depths.append(depth[masked])
        places.append(int(line.int().argmax()) + inside[masked])
    depth, place = (nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (depths, places))
    return MaskRows(depth.to(weights.device), place.to(weights.device))


@dataclass
class GatedLoss:
    """Computes the objective of masks against the target's own rows at their places, in one pass of both.

    The rows of the text get no addition: they are the frozen target's, and its predictions are the teacher (Uno, arXiv
    2609.04010). All masks count alike.

    Attributes:
        objective: what is minimised. gate: of the target's LoRA. masks: what they read, known as the training text is.
        blocks: numbers of tokens of a block, each for an equal share of the steps.
    """

    objective: Objective
    gate: Gate
    masks: Callable[[], Masks]
    blocks: Sequence[int]
    _length: int = field(init=False)

    def __post_init__(self) -> None:
        self._length = self.blocks[0]

    def at_step(self, step: int, steps: int) -> str:
        """Choose the length of the blocks of a step; return it where there are several.

        Args:
            step: its number, from 0. steps: of the training.
        """
        self._length = self.blocks[min(step * len(self.blocks) // max(steps, 1), len(self.blocks) - 1)]
        return f" blocks of {self._length}" if len(self.blocks) > 1 else ""

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the mean over masks times the tokens of the continuations."""
        ids, weights = inputs["input_ids"], inputs["weights"]
        counts = (weights > 0).sum(1).tolist()
        # A text of two tokens or more has a mask, wherever its blocks begin.
        offsets = [int(torch.randint(max(1, min(self._length, count - 1)), ())) for count in counts]
        rows, masks = block_rows(weights, self._length, offsets), self.masks()
        read = torch.randint_like(rows.depth, masks.token) if masks.noise else masks.token
        # Not only within this call: with gradient checkpointing backward computes layers again.
        self.gate.show(_gated(ids, rows))
        states = parallel_states(model, ids, rows, read)
        which, place = _texts(rows)
        head = head_weight(model).detach()
        own = states[:, : ids.shape[1]].detach()[which, place]
        target, target_head = (following(ids)[which, place], None) if self.objective.name == "ce" else (own, head)
        mine, name = states[:, ids.shape[1] :][rows.depth > 0], self.objective.name
        return chunked_loss(mine, head, target, target_head, name, settings=self.objective.settings) * weights.sum()


def _gated(ids: Tensor, rows: MaskRows) -> Tensor:
    """Return which of n tokens and R rows get the LoRA's addition, [b, n + R]: the masks alone."""
    return torch.cat((torch.zeros_like(ids, dtype=torch.bool), rows.depth > 0), 1)


def _texts(rows: MaskRows) -> tuple[Tensor, Tensor]:
    """Return the text and the place of each mask, [M] each, in the order of ``depth > 0``."""
    masked = rows.depth > 0
    which = torch.arange(len(masked), device=masked.device)[:, None].expand_as(masked)
    return which[masked], rows.place[masked]


@torch.no_grad()
def measure_masks(model: nn.Module, gate: Gate, data: Dataset, masks: Masks, batch_size: int = 16) -> list[Acceptance]:
    """Return the acceptance of the first, second, ... mask of a block on the continuations of ``data``.

    Every place that counts is an anchor once.

    Args:
        model: the target with its LoRA. gate: of the LoRA. data: rows as ``text.make_dataset`` makes them.
        masks: what they read, and K. batch_size: rows read together.
    """
    sums = torch.zeros(masks.length - 1, 4, len(data), dtype=torch.float64)
    head, ids_of = head_weight(model), torch.tensor([0, *masks.ids(masks.length - 1)])
    for numbers, places, ids, _ in batches(data, batch_size, head.device):
        for offset in range(masks.length):
            rows = block_rows(places.float(), masks.length, [offset] * len(ids))
            with eval_mode(model), gate.over(_gated(ids, rows)):
                states = parallel_states(model, ids, rows, ids_of.to(ids.device)[rows.depth])
            which, place = _texts(rows)
            own, mine = states[which, place], states[:, ids.shape[1] :][rows.depth > 0]
            depth = rows.depth[rows.depth > 0]
            for i, total in enumerate(sums, start=1):
                here = depth == i
                add_rates(total, numbers[which[here].cpu()], own[here], mine[here], head, head)
    return [Acceptance(*total) for total in sums]


_PROJECTIONS = re.compile(
    r"base_model\.model\.model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.lora_[AB]\.weight"
)


def write_masks_of_gate(directory: Path, masks: Masks) -> None:
    """Write beside an adapter what its masks read.

    Args:
        directory: of the adapter. masks: with the token, K and whether they read noise.
    """
    write_json(directory / GATED_FILE, {"mask_token": masks.token, "length": masks.length, "noise": masks.noise})


def read_masks_of_gate(directory: str | Path, vocabulary: int | None = None) -> Masks:
    """Return the masks that ``write_masks_of_gate`` has written.

    Args:
        vocabulary: of the target; None: not compared.

    Raises:
        PeftlabError: a value is missing, or is none that masks can have.
    """
    file = Path(directory) / GATED_FILE
    values = read_object(file)
    token, length = typed_value(values, "mask_token", int, file), typed_value(values, "length", int, file)
    noise = typed_value(values, "noise", bool, file)
    most = token if vocabulary is None else vocabulary - (not noise)
    if not 0 <= token <= most or length < 2:
        raise PeftlabError(f"{file}: mask_token {token} and length {length} are not those of {vocabulary} tokens")
    return Masks(token, length, noise)


@dataclass(frozen=True)
class UnoExport:
    """A gated LoRA in the layout of Uno (arXiv 2609.04010), which SGLang reads; see ``base.DraftExporter``.

    Attributes:
        place: the adapter's directory.
    """

    place: Path

    def write(self, target: str, directory: Path, gamma: int) -> float:
        """Write the adapter in Uno's layout; refuse one that SGLang would read otherwise."""
        masks = read_masks_of_gate(self.place)
        if not masks.noise:
            raise PeftlabError(
                f"--for sglang: {self.place} was trained with a mask token, and SGLang's masks read tokens drawn at "
                "random; train it with draft: {kind: gated_lora, noise: true}"
            )
        masks.check_gamma(gamma)
        self._check(target)
        tensors, header = read_tensors(self.place / WEIGHTS_FILE)
        odd = next((name for name in tensors if not _PROJECTIONS.fullmatch(name)), None)
        if odd is not None:
            raise PeftlabError(
                f"--for sglang: {odd} is no factor of a Llama's q, k, v, o, gate, up or down projection, which alone "
                "SGLang reads"
            )
        write_tensors(directory / WEIGHTS_FILE, tensors, header)
        write_json(directory / CONFIG_FILE, read_object(self.place / CONFIG_FILE) | {"base_model_name_or_path": target})
        mine, back = (read_adapter(place).tensors for place in (self.place, directory))
        return max(float((tensor - back[name]).abs().max()) for name, tensor in mine.items())

    def _check(self, target: str) -> None:
        """Refuse additions that Uno does not have, and a target of other sizes than the trained one."""
        adapter = read_adapter(self.place)
        config = adapter.config
        assert isinstance(config, LoraConfig)
        if config.use_dora or config.lora_bias or config.start is not None:
            raise PeftlabError(f"--for sglang: {self.place} has use_dora, lora_bias or a start of W, which Uno has not")
        theirs = load_config(target)
        known = typed_value(adapter.base, "config", dict, self.place) if adapter.base else {}
        for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
            here = getattr(theirs, key, None)
            if key in known and known[key] != here:
                raise PeftlabError(f"{self.place}: trained for a target with {key} {known[key]}; {target} has {here}")

    def command(self, target: str, directory: str, gamma: int) -> str:
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm UNO "
            f"--uno-lora-path {shlex.quote(directory)} --speculative-num-draft-tokens {gamma}"
        )


class GatedLoraKind(DraftKind[GatedLoraDraft]):
    """The target with a LoRA for masks as its own draft.

    Attributes:
        gate: on which rows the LoRA acts. masks: what they read; their id is -1 until the training text is known.
        identity: of the target as it is without LoRA.
    """

    name = "gated_lora"
    gate: Gate
    masks: Masks
    identity: TargetIdentity

    def check(self, target: PretrainedConfig) -> None:
        """Refuse a mask that is no token, and to continue from a draft of another kind."""
        size, mask = target.get_text_config(decoder=True).vocab_size, self.config.mask_token
        if mask is not None and mask >= size:
            raise PeftlabError(f"draft.mask_token: {mask} is no token; the target has 0 to {size - 1}")
        self.check_start(self.config.from_, "is no gated LoRA (gated_lora.json)")

    def load(self, target: PreTrainedModel) -> None:
        """Take the target, checked for masks beside a text and for additions on some rows alone.

        Raises:
            PeftlabError: it cannot have them, or the method changes what the text is read with.
        """
        refuse_states(target)
        check_parallel(target, self.name)
        assert self.recipe.method is not None
        check_lora_targets(target, self.recipe.method)
        config, size = self.config, len(head_weight(target))
        token = size if config.noise else -1 if config.mask_token is None else config.mask_token
        masks = Masks(token, 1, config.noise)
        if config.from_ is not None and config.mask_token is None and not config.noise:
            masks = read_masks_of_gate(str(self.row().find(config.from_)), size)
        self.masks, self.gate = replace(masks, length=config.blocks[-1]), Gate()
        self.identity = identify(self.recipe.target, target, self.tokenizer)
        self.model = self.adapted = self.target = target
        self.base = self.recipe.target

    def prepare(self, train: Dataset) -> None:
        """Choose the mask, where none is named."""
        self.masks = with_token(self.masks, len(head_weight(self.target)), train["input_ids"])

    def loss(self) -> Loss:
        """Return the objective between masks and the text's own rows; the injected LoRA continues where it is to."""
        set_gate(self.adapted, self.gate)
        if self.config.from_ is not None:
            continue_from(self.adapted, str(self.row().find(self.config.from_)))
        return GatedLoss(make_objective(self.recipe.objective), self.gate, lambda: self.masks, self.config.blocks)

    def score(self, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
        """Return the mean acceptance over the masks of a block, and each one's own."""
        return rates_by_depth(measure_masks(model, self.gate, data, self.masks, batch_size))

    def save(self, train: Dataset) -> None:
        """Write the LoRA once more, with what its masks read and the identity of its target beside it."""
        self.gate.show(None)
        with staged_directory(self.stored, "adapter", overwrite=True) as staging:
            save_adapter(self.adapted, staging, base=self.base)
            write_masks_of_gate(staging, self.masks)
            self.identity.write(staging)

    def drafter(self, saved: SavedDraft | None) -> ServedDraft | None:
        """Return the target with its LoRA, which drafts in two passes; an untrained one drafts nothing."""
        if saved is None:
            return None
        own = own_layers(self.gate, self.masks, build_engine(self.adapted))
        return ServedDraft(self.adapted, partial(own.drafter, own.engine))

    @classmethod
    def open(cls, place: str, loader: TargetLoader) -> Pair:
        """Load the LoRA into the target, which stays as it is but for masks.

        A target with other tokens is refused, for one with other weights there is a warning.
        """
        check_tokenizer(Path(place), loader.tokenizer)  # before any weights are read
        target = loader.target
        warnings = check_target(Path(place), target, loader.tokenizer)
        masks, gate = read_masks_of_gate(place, len(head_weight(target))), Gate()
        load_adapter(target, place)
        set_gate(target, gate)
        size = unregister_factors(target)
        return loader.pair(size, own=partial(own_layers, gate, masks), masks=masks, warnings=warnings)

    @classmethod
    def export(cls, place: str, consumer: str) -> Path | DraftExporter:
        """Return what writes the LoRA for SGLang, which alone serves such drafts."""
        if consumer != "sglang":
            raise PeftlabError(
                f"--for {consumer}: {place} is a LoRA that acts on masks alone (gated_lora), which sglang alone serves"
            )
        return UnoExport(Path(place))

    @classmethod
    def update(cls, config: GatedLoraDraft, newest: Path, log: Path) -> GatedLoraDraft:
        """Return the section that continues from the LoRA of ``newest``, with its mask."""
        return config.model_copy(update={"from_": cls.row().newest(newest)})


def refuse_states(target: PreTrainedModel) -> None:
    """Refuse a state-space model."""
    if type(target).__name__ in MIXERS:
        raise PeftlabError(
            f"draft.kind gated_lora: {type(target).__name__} keeps a state that each token changes, so that masks "
            "cannot be read beside a text; train draft: {kind: model} for it"
        )


def check_lora_targets(target: nn.Module, method: MethodConfig) -> None:
    """Refuse targets that do not see one row per token, and trained parameters that all rows read.

    Args:
        target: the model. method: that the recipe injects into it.
    """
    planned = plan_injection(target, method)
    for name in planned.replace:
        if leaf_kind(target.get_submodule(name)) not in (LoraLinear, LoraConv1D) or ".experts." in name:
            raise PeftlabError(
                f"draft.kind gated_lora: {name} ({type(target.get_submodule(name)).__name__}) cannot take an addition "
                "on some rows of a batch alone, as linear maps on all tokens can; take it out of the method's targets"
            )
    if planned.train:
        raise PeftlabError(
            f"draft.kind gated_lora: method {method.name} would train {planned.train[0]} itself, which the text is "
            "read with; only additions can act on masks alone"
        )


def continue_from(model: nn.Module, place: str) -> None:
    """Copy the values of a stored LoRA of the same method into an injected model.

    Args:
        model: with the method injected. place: directory of the stored LoRA.
    """
    adapter, config = read_adapter(place), injection_of(model).config
    for key in ("lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights"):
        here, there = getattr(config, key, None), getattr(adapter.config, key, None)
        if here != there:
            raise PeftlabError(f"draft.from {place}: its method has {key} {there}, this run's {here}")
    fill(model, adapter.tensors, source=f"draft.from {place}")


def own_layers(gate: Gate, masks: Masks, engine: Engine) -> OwnLayers:
    """Return the target's engine, with its LoRA for masks, as a draft in the target's cache.

    Args:
        gate: of the LoRA. masks: what they read. engine: the target's.
    """
    if not engine.positioned:
        raise PeftlabError(
            f"draft gated_lora: reads masks beside the tokens of a text, and this target's kernel is {engine.kind}"
        )
    two = partial(ParallelDrafter, masks=masks, shares_cache=True)
    return OwnLayers(MaskedPassEngine(engine, gate), two, one_pass=partial(OnePassDrafter, engine, masks, gate=gate))
