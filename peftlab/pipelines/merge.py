"""Merging what lies on disk, and checking the result on real inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from peftlab.checkpoints.adapter import Adapter, read_adapter
from peftlab.checkpoints.combine import combine
from peftlab.checkpoints.merge.run import merge_checkpoint, verify_merge
from peftlab.errors import PeftlabError
from peftlab.files import read_text
from peftlab.models.pretrained import load_tokenizer
from peftlab.pipelines.finetune import VERIFY_EXAMPLES, load_task, make_evaluation, sample_inputs
from peftlab.recipe.loading import load_recipe
from peftlab.recipe.schema import FinetuneRecipe

# What merged and unmerged are compared on where no recipe names data.
SAMPLES = (
    "The quick brown fox jumps over the lazy dog.",
    "A model that has been merged must answer exactly as it did before.",
    "In 1969 two people walked on the Moon while a third stayed in orbit.",
    "Prices rose by 3.5 % in March, less than most analysts had expected.",
)


def run_merge(
    adapter: Path | Adapter,
    base: str | None,
    out: Path,
    *,
    verify: bool | None = None,
    lora_alpha: float | None = None,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Merge ``adapter`` into ``base`` and compare; return the merge's report and the comparison.

    The inputs compared on are the run's own evaluation examples where a recipe lies beside the adapter, else
    four sentences.

    Args:
        verify: compare, for which both models are loaded; None: where a recipe lies beside the adapter.
        lora_alpha, options: passed to ``merge_checkpoint``.
    """
    recipe = None if isinstance(adapter, Adapter) else _recipe_near(adapter)
    text = read_text(recipe) if recipe else None
    report = merge_checkpoint(adapter, base, out, recipe=text, lora_alpha=lora_alpha, **options)
    if not (verify if verify is not None else recipe is not None):
        return report.to_dict(), {}
    checked = verify_merge(adapter, report.base, out, _inputs(recipe, report.base), lora_alpha=lora_alpha)
    return report.to_dict(), checked


def combined(texts: Sequence[str], method: str, rank: int | None, density: float) -> Adapter:
    """Return the adapter that ``DIR:WEIGHT`` texts name, combined by ``method``; a weight left out is 1."""
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
