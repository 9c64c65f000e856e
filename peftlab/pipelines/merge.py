"""Merging an adapter on disk, and checking the result on real inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from peftlab.checkpoints.adapter import Adapter, read_adapter
from peftlab.checkpoints.combine import combine
from peftlab.checkpoints.merge.options import MergeOptions
from peftlab.checkpoints.merge.report import MergeReport
from peftlab.checkpoints.merge.run import merge_checkpoint
from peftlab.checkpoints.merge.verify import MergeCheck, verify_merge
from peftlab.errors import PeftlabError
from peftlab.files import read_text
from peftlab.models.pretrained import load_tokenizer
from peftlab.pipelines.finetune import VERIFY_EXAMPLES, load_task, make_evaluation, sample_inputs
from peftlab.recipe.loading import load_recipe
from peftlab.recipe.schema import FinetuneRecipe

# The inputs of the comparison where no recipe names data.
SAMPLES = (
    "The quick brown fox jumps over the lazy dog.",
    "A model that has been merged must answer exactly as it did before.",
    "In 1969 two people walked on the Moon while a third stayed in orbit.",
    "Prices rose by 3.5 % in March, less than most analysts had expected.",
)


def run_merge(
    adapter: Path | Adapter, base: str | None, out: Path, options: MergeOptions, *, verify: bool | None = None
) -> tuple[MergeReport, MergeCheck | None]:
    """Merge ``adapter`` into ``base`` and compare; return the merge's report and the comparison, if there was one.

    The inputs compared on are the run's own evaluation examples where a recipe is beside the adapter, else four
    sentences.

    Args:
        verify: compare, for which three models are loaded; None: where a recipe is beside the adapter.
    """
    recipe = None if isinstance(adapter, Adapter) else _recipe_near(adapter)
    if recipe is not None and options.recipe is None:
        options = replace(options, recipe=read_text(recipe))
    report = merge_checkpoint(adapter, base, out, options)
    if not (verify if verify is not None else recipe is not None):
        return report, None
    return report, verify_merge(adapter, report.base, out, _inputs(recipe, report.base), lora_alpha=options.lora_alpha)


def combined(texts: Sequence[str], method: str, rank: int | None, density: float) -> Adapter:
    """Return the adapter that ``DIR:WEIGHT`` texts name, combined by ``method``; the default weight is 1."""
    adapters, weights = [], []
    for text in texts:
        place, colon, weight = text.rpartition(":")
        try:
            weights.append(float(weight) if colon else 1.0)
        except ValueError:
            raise PeftlabError(f"--adapter {text!r}: write DIR:WEIGHT; {weight!r} is not a number") from None
        adapters.append(read_adapter(place if colon else text))
    return combine(adapters, weights, method, rank=rank, density=density)  # type: ignore[arg-type]


def _recipe_near(adapter: Path) -> Path | None:
    places = (adapter / "recipe.yaml", adapter.parent / "recipe.yaml")
    return next((place for place in places if place.exists()), None)


def _inputs(recipe: Path | None, base: str) -> list[dict[str, Tensor]]:
    if recipe is not None:
        loaded = load_recipe(recipe)
        if isinstance(loaded, FinetuneRecipe):
            return sample_inputs(make_evaluation(loaded, load_task(loaded)), VERIFY_EXAMPLES)
    tokenizer = load_tokenizer(base)
    return [dict(tokenizer(text, return_tensors="pt")) for text in SAMPLES]
