"""Merging an adapter on disk, and checking the result on real inputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from peftlab.checkpoints.adapter import Adapter, load_adapter, load_model, read_adapter
from peftlab.checkpoints.combine import combine
from peftlab.checkpoints.gguf import load_values
from peftlab.checkpoints.merge import merge_checkpoint, quantisation
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.checkpoints.merge_steps import MergeReport
from peftlab.checkpoints.tensors import read_tensors
from peftlab.environment import resolve_device, wait_for
from peftlab.errors import PeftlabError
from peftlab.files import MERGE_INPUTS, is_url, read_mark, read_object, read_text
from peftlab.models.config import BaseConfig
from peftlab.models.load import load_config
from peftlab.models.quantised import DTYPES, BaseFormat
from peftlab.progress import Phase
from peftlab.references import local_copy
from peftlab.untyped import Attributes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CPU = torch.device("cpu")
EXAMPLES = 16  # examples on which merged and unmerged model are compared
COMPARING = "comparing merged and unmerged model"
ROUNDS = 5  # timed passes over the inputs, for each model
TIMING = "timing base, merged and unmerged"

# The inputs of the comparison where no recipe names data.
SAMPLES = (
    "The quick brown fox jumps over the lazy dog.",
    "A model that has been merged must answer exactly as it did before.",
    "In 1969 two people walked on the Moon while a third stayed in orbit.",
    "Prices rose by 3.5 % in March, less than most analysts had expected.",
)


@dataclass(frozen=True)
class Combining:
    """The arguments of ``peftlab.checkpoints.combine.combine``, by which several adapters become one."""

    method: str = "cat"
    rank: int | None = None
    density: float = 0.5


@dataclass(frozen=True)
class MergeCheck:
    """How base + adapter and the merged model compare on the same inputs.

    Attributes:
        max_logit_difference: over all inputs, padding left out.
        argmax_agreement: share of predictions that agree. examples: how many there were.
    """

    max_logit_difference: float
    argmax_agreement: float
    examples: int


@dataclass(frozen=True)
class Latency:
    """Time of a forward pass of the merged model, and of base + adapter, relative to the base model's.

    Medians of ``ROUNDS`` passes over the same inputs, which the models take in turn.
    """

    merged: float
    unmerged: float


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge.

    Attributes:
        report: the tensors that were changed.
        check: how the merged model compares with base and adapter; None where they were not compared.
    """

    report: MergeReport
    check: MergeCheck | None


def run_merge(
    adapters: str | Path | Sequence[str | Path],
    base: str | None = None,
    out: str | Path = "merged",
    options: MergeOptions | None = None,
    combining: Combining | None = None,
    *,
    verify: bool | None = None,
    device: str = "auto",
) -> MergeResult:
    """Merge adapters on disk into ``base`` and compare merged with unmerged.

    The inputs compared on are the run's own evaluation examples where a recipe is beside the adapter, else four
    sentences.

    Args:
        adapters: one (or a run, or its URL), or a list of several as ``DIR`` or ``DIR:WEIGHT``, which are combined as
            ``combining`` says.
        base: reference of the base model; None: the one that the adapter names. out: directory to write,
            or a file whose name ends in .gguf.
        options, combining: None for the defaults.
        verify: compare, for which two models are loaded, one after the other; None: where a recipe is beside the
            adapter and the packages that the models need are installed.
        device: where they run to be compared, as for ``peftlab.run``; merging itself computes on the CPU.
    """
    place, options, combining = resolve_device(device), options or MergeOptions(), combining or Combining()
    weighted = [_split_weight(str(each)) for each in ([adapters] if isinstance(adapters, str | Path) else adapters)]
    weighted = [(local_copy(place), weight) for place, weight in weighted]
    adapter: Path | Adapter = Path(weighted[0][0])
    if len(weighted) > 1 or weighted[0][1] is not None:
        read = [
            read_adapter(directory, lora_alpha=options.lora_alpha, allow_nonfinite=options.allow_nonfinite)
            for directory, _ in weighted
        ]
        weights = [1.0 if weight is None else weight for _, weight in weighted]
        adapter = combine(read, weights, combining.method, rank=combining.rank, density=combining.density)
    elif combining != Combining():
        raise PeftlabError("method, rank and density say how several adapters become one; this is a single one")
    recipe = None if isinstance(adapter, Adapter) else _recipe_near(adapter)
    if recipe is not None and options.recipe is None:
        options = replace(options, recipe=read_text(recipe))
    with Phase("merging"):
        report = merge_checkpoint(adapter, base, out, options, combined=[Path(directory) for directory, _ in weighted])
    if not (verify if verify is not None else recipe is not None and _can_compare(report, options)):
        return MergeResult(report, None)
    inputs = _comparison_inputs(recipe, report, options.trust_remote_code)
    trusted: Attributes = {"lora_alpha": options.lora_alpha, "trust_remote_code": options.trust_remote_code}
    with Phase(COMPARING, note="loads both; --no-verify skips it"):
        check = verify_merge(adapter, report.base, out, inputs, **trusted, device=place)
    return MergeResult(report, check)


def _can_compare(report: MergeReport, options: MergeOptions) -> bool:
    """Return whether the merged model can be expected to run here, with finite logits: packages may be absent."""
    if options.allow_nonfinite:
        return False
    needs = {"bitsandbytes": report.into is not None, "compressed_tensors": options.dtype == torch.float8_e4m3fn}
    return all(find_spec(name) is not None for name, needed in needs.items() if needed)


def _split_weight(text: str) -> tuple[str, float | None]:
    """Return the directory and the weight that ``DIR`` or ``DIR:WEIGHT`` names; a directory may contain colons."""
    place, colon, weight = text.rpartition(":")
    if not colon or (is_url(text) and "/" in weight) or Path(text).exists():
        return text, None
    try:
        return place, float(weight)
    except ValueError:
        raise PeftlabError(f"{text}: no such adapter, and {weight!r} is not a weight (DIR:WEIGHT)") from None


def _recipe_near(adapter: Path) -> Path | None:
    """Return the recipe in a run or beside an adapter's files, or that of the run whose ``adapter/`` it is.

    A recipe in another directory above may be that of anything.
    """
    above = read_mark(adapter.parent)
    places = (adapter, adapter.parent) if above is not None and above.kind == "run" else (adapter,)
    return next((place / "recipe.yaml" for place in places if (place / "recipe.yaml").exists()), None)


def _comparison_inputs(recipe: Path | None, report: MergeReport, trust_remote_code: bool) -> list[dict[str, Tensor]]:
    """Return what a run has stored for this, the first evaluation examples of a recipe's data, or four sentences."""
    from peftlab.models.load import load_tokenizer
    from peftlab.recipe.load import load_recipe
    from peftlab.recipe.schema import FinetuneRecipe

    if recipe is not None and (stored := recipe.with_name(MERGE_INPUTS)).is_file():
        return [read_tensors(stored)[0]]
    loaded = None if recipe is None else load_recipe(recipe)
    if isinstance(loaded, FinetuneRecipe):
        from peftlab.pipelines.preview import example_inputs

        return [example_inputs(loaded, EXAMPLES)]
    options: Attributes = {"revision": report.revision, "trust_remote_code": trust_remote_code}
    tokenizer, config = load_tokenizer(report.base, **options), load_config(report.base, **options)
    batches = [dict(tokenizer(text, return_tensors="pt")) for text in SAMPLES]
    if config.is_encoder_decoder and "Conditional" in report.architecture:  # whose decoder has inputs of its own
        batches = [{**batch, "decoder_input_ids": batch["input_ids"]} for batch in batches]
    return batches


def verify_merge(
    adapter: str | Path | Adapter,
    base: str,
    merged: str | Path,
    batches: Sequence[dict[str, Tensor]],
    *,
    lora_alpha: float | None = None,
    trust_remote_code: bool = False,
    device: torch.device = _CPU,
) -> MergeCheck:
    """Compare the logits of base + adapter with those of the merged model.

    One of the two models is in memory at a time, beside the logits of all inputs. A base that was quantised in training
    is loaded so again, which needs bitsandbytes.

    Args:
        adapter, lora_alpha: as for ``load_adapter``. base: reference of the base model. merged: the merged directory or
            GGUF file.
        batches: model inputs (``input_ids``, ``attention_mask``, ...), without labels. device: where the models run.
        trust_remote_code: run the model code in base and merged directory.
    """
    models = _Models(_read(adapter, lora_alpha), base, str(merged), trust_remote_code)
    moved = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
    # The merged model first: an adapted one is in a reference cycle and stays in memory until those are collected.
    whole, unmerged = (_all_logits(load, moved, device) for load in (models.merged, models.unmerged))
    worst, agreed, predictions = 0.0, 0, 0
    for here, there in zip(unmerged, whole, strict=True):
        difference = (here.float() - there.float()).abs().masked_fill(here == there, 0)  # of equal infinities, too
        if difference.isnan().any():
            which = "base + adapter" if here.isnan().any() else "the merged model"
            raise PeftlabError(f"{merged}: {which} gives logits that are NaN, so that nothing can be compared")
        worst = max(worst, float(difference.max()))
        agreed += int((here.argmax(-1) == there.argmax(-1)).sum())
        predictions += here.shape[:-1].numel()
    return MergeCheck(worst, agreed / predictions, sum(len(next(iter(batch.values()))) for batch in moved))


def merge_latency(
    adapter: str | Path | Adapter,
    base: str,
    merged: str | Path,
    batches: Sequence[dict[str, Tensor]],
    *,
    trust_remote_code: bool = False,
    device: torch.device = _CPU,
) -> Latency:
    """Time base, base + adapter and merged model on a device; arguments as for ``verify_merge``.

    Base and base + adapter share the base's weights, so that two models are in memory.
    """
    loads = _Models(_read(adapter, None), base, str(merged), trust_remote_code)
    plain, whole = (nn.Module.to(load(), device) for load in (loads.base, loads.merged))
    shared = {id(tensor): tensor for tensor in (*plain.parameters(), *plain.buffers())}
    models = {"base": plain, "merged": whole, "unmerged": load_adapter(deepcopy(plain, shared), loads.adapter)}
    times = _times(models, batches, device)
    return Latency(merged=times["merged"] / times["base"], unmerged=times["unmerged"] / times["base"])


def timed_weights(adapter: str | Path | Adapter, merged: str | Path) -> dict[str, str]:
    """Return how ``merge_latency`` stores weights: those of the ``base``, with and without adapter, and ``merged``."""
    dtype, read = _dtype(load_config(str(merged))), _read(adapter, None)
    raw = read.base.get("format")
    plain = next(name for name, known in DTYPES.items() if known == dtype)
    base = str(BaseFormat.from_dict(raw, "the adapter")) if isinstance(raw, dict) else plain
    return {"base": base, "merged": plain}


def _dtype(config: PretrainedConfig) -> torch.dtype:
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def _read(adapter: str | Path | Adapter, lora_alpha: float | None) -> Adapter:
    return adapter if isinstance(adapter, Adapter) else read_adapter(adapter, lora_alpha=lora_alpha)


class _Models:
    """Loads what is compared, each when it is asked for.

    Args:
        reference: of the base model. directory: of the merged model, whose configuration names class and labels, and
            whose report the base's revision. trust_remote_code: run their model code.
    """

    def __init__(self, adapter: Adapter, reference: str, directory: str, trust_remote_code: bool) -> None:
        self.adapter, self.reference, self.directory = adapter, reference, directory
        self.options: Attributes = {"trust_remote_code": True} if trust_remote_code else {}
        self.to_file = directory.endswith(".gguf")
        self.config = load_config(reference if self.to_file else directory, **self.options)
        file = Path(directory, "merge.json")
        report = read_object(file) if file.is_file() else {}
        named = report.get("architecture") or (self.to_file and adapter.base.get("architecture"))
        self.architecture = str(named or (self.config.architectures or ["AutoModel"])[0])
        self.revision = str(report["revision"]) if report.get("revision") else None
        if self.to_file:
            trained = adapter.base.get("config")
            tokens = trained.get("vocab_size") if isinstance(trained, dict) else None
            if isinstance(tokens, int):  # it may have grown in training
                self.config.get_text_config().vocab_size = tokens
            self.revision = adapter.revision if reference == adapter.base_reference else None
        self.config = _for_class(self.architecture, self.config)
        self.dtype = torch.float32 if self.to_file else _dtype(self.config)
        self.stored = load_config(reference, revision=self.revision, **self.options)

    def base(self) -> nn.Module:
        options = self.options | _storage(self.adapter, self.dtype) | {"config": self._of_base()}
        if quantisation(self.stored):  # its weights are codes already
            options.pop("quantised", None)
        return load_model(self.reference, self.architecture, revision=self.revision, **options)[0]

    def unmerged(self) -> nn.Module:
        return load_adapter(self.base(), self.adapter)

    def merged(self) -> nn.Module:
        if self.to_file:
            options = self.options | {"dtype": self.dtype, "config": self._of_base()}
            model = load_model(self.reference, self.architecture, revision=self.revision, **options)[0]
            load_values(model, Path(self.directory))
            return model
        return load_model(self.directory, self.architecture, dtype=self.dtype, **self.options)[0]

    def _of_base(self) -> PretrainedConfig:
        """Return the merged model's configuration, with how the base stores its weights; or a GGUF base's own."""
        if self.reference.endswith(".gguf"):
            return deepcopy(self.stored)
        own = deepcopy(self.config)  # loading writes into it
        if hasattr(own, "quantization_config"):  # how the merged weights are stored, in fp8
            del own.quantization_config
        if quantisation(self.stored):
            own.quantization_config = deepcopy(self.stored.quantization_config)
        return own


def _for_class(architecture: str, config: PretrainedConfig) -> PretrainedConfig:
    """Return the part of a composite configuration that a class takes: a text model's; else the configuration."""
    import transformers

    wanted = getattr(getattr(transformers, architecture, None), "config_class", None)
    parts = [getattr(config, name) for name, part in config.sub_configs.items() if part is wanted]
    return parts[0] if parts else config


def _storage(adapter: Adapter, dtype: torch.dtype) -> Attributes:
    """Return what ``load_base`` takes for the base that an adapter was trained beside; ``dtype`` for plain weights."""
    raw = adapter.base.get("format")
    if not isinstance(raw, dict):
        return {"dtype": dtype}
    how = BaseFormat.from_dict(raw, "the adapter")
    base = BaseConfig(dtype="int8" if how.dtype == "int8" else "nf4", double_quant=how.double_quant)
    return {"dtype": DTYPES[how.compute], "quantised": base}


def _all_logits(
    load: Callable[[], nn.Module], batches: Sequence[dict[str, Tensor]], device: torch.device
) -> list[Tensor]:
    """Return a model's logits on each batch; the model is in memory no longer than that takes."""
    model = nn.Module.to(load(), device)
    with torch.inference_mode():
        return [_logits(model, batch) for batch in batches]


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    logits = output.logits if "logits" in output else output[0]
    mask = batch.get("attention_mask")
    return logits[mask.bool()] if mask is not None and logits.shape[:-1] == mask.shape else logits


def _times(
    models: dict[str, nn.Module], batches: Sequence[dict[str, Tensor]], device: torch.device
) -> dict[str, float]:
    """Return the median seconds of a pass over all batches, after one in which a GPU chooses kernels."""
    spent: dict[str, list[float]] = {name: [] for name in models}
    moved = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
    with torch.inference_mode():
        for round_ in range(ROUNDS + 1):
            for name, model in models.items():
                wait_for(device)
                started = time.perf_counter()
                for batch in moved:
                    model(**batch)
                wait_for(device)
                if round_ > 0:
                    spent[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in spent.items()}
