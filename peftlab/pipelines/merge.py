"""Merging an adapter on disk, and checking the result on real inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peftlab.checkpoints.adapter import Adapter, read_adapter
from peftlab.checkpoints.combine import combine
from peftlab.checkpoints.merge.config import MergeOptions
from peftlab.checkpoints.merge.run import merge_checkpoint
from peftlab.checkpoints.merge.steps import MergeReport
from peftlab.errors import PeftlabError
from peftlab.files import read_mark, read_text
from peftlab.hardware import resolve_device
from peftlab.references import is_url
from peftlab.remote import local_copy

if TYPE_CHECKING:
    from peftlab.checkpoints.merge.verify import MergeCheck

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

    method: str = "linear"
    rank: int | None = None
    density: float = 0.5


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
        base: reference of the base model; None: the one that the adapter names. out: directory to write.
        options, combining: None for the defaults.
        verify: compare, for which two models are loaded; None: where a recipe is beside the adapter and the
            packages that the models need are installed.
        device: where they run to be compared, as for ``peftlab.run``; merging itself computes on the CPU.
    """
    place, options, combining = resolve_device(device), options or MergeOptions(), combining or Combining()
    weighted = [_split_weight(str(each)) for each in ([adapters] if isinstance(adapters, str | Path) else adapters)]
    weighted = [(local_copy(place), weight) for place, weight in weighted]
    adapter: Path | Adapter = Path(weighted[0][0])
    if len(weighted) > 1 or weighted[0][1] is not None:
        read = [read_adapter(directory) for directory, _ in weighted]
        weights = [1.0 if weight is None else weight for _, weight in weighted]
        adapter = combine(read, weights, combining.method, rank=combining.rank, density=combining.density)
    recipe = None if isinstance(adapter, Adapter) else _recipe_near(adapter)
    if recipe is not None and options.recipe is None:
        options = replace(options, recipe=read_text(recipe))
    report = merge_checkpoint(adapter, base, out, options)
    if not (verify if verify is not None else recipe is not None and _can_compare(report, options)):
        return MergeResult(report, None)
    from peftlab.checkpoints.merge.verify import verify_merge

    inputs = _comparison_inputs(recipe, report.base)
    check = verify_merge(adapter, report.base, out, inputs, lora_alpha=options.lora_alpha, device=place)
    return MergeResult(report, check)


def _can_compare(report: MergeReport, options: MergeOptions) -> bool:
    """Return whether the merged model can run here: packages that only some models need may be absent."""
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


def _comparison_inputs(recipe: Path | None, base: str) -> list[dict[str, Tensor]]:
    from peftlab.checkpoints.merge.verify import EXAMPLES
    from peftlab.models.pretrained import load_tokenizer
    from peftlab.recipe.load import load_recipe
    from peftlab.recipe.schema import FinetuneRecipe

    loaded = None if recipe is None else load_recipe(recipe)
    if isinstance(loaded, FinetuneRecipe):
        from peftlab.pipelines.preview import example_inputs

        return [example_inputs(loaded, EXAMPLES)]
    tokenizer = load_tokenizer(base)
    return [dict(tokenizer(text, return_tensors="pt")) for text in SAMPLES]
