"""Merging what lies on disk, and checking the result on real inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from peftlab.checkpoints.adapter import read_adapter
from peftlab.checkpoints.base import load_tokenizer
from peftlab.checkpoints.merge import merge_checkpoint, verify_merge
from peftlab.pipelines.finetune import VERIFY_EXAMPLES, load_task, make_work, sample_inputs
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
    adapter: Path, base: str | None, out: Path, *, verify: bool = True, **options: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """Merge ``adapter`` into ``base`` and compare; return the merge's report and the comparison.

    The inputs compared on are the run's own evaluation examples where a recipe lies beside the adapter, else
    four sentences.

    Args:
        options: passed to ``merge_checkpoint``.
    """
    recipe = next(
        (place / "recipe.yaml" for place in (adapter, adapter.parent) if (place / "recipe.yaml").exists()),
        None,
    )
    text = recipe.read_text(encoding="utf-8") if recipe else None
    report = merge_checkpoint(adapter, base, out, recipe=text, **options)
    if not verify:
        return report.to_dict(), {}
    reference = base or read_adapter(adapter).base_reference or ""
    return report.to_dict(), verify_merge(adapter, reference, out, _inputs(recipe, reference))


def _inputs(recipe: Path | None, base: str) -> list[dict[str, Tensor]]:
    if recipe is not None:
        loaded = load_recipe(recipe)
        if isinstance(loaded, FinetuneRecipe):
            return sample_inputs(make_work(loaded, load_task(loaded), splits_only=True), VERIFY_EXAMPLES)
    tokenizer = load_tokenizer(base)
    return [dict(tokenizer(text, return_tensors="pt")) for text in SAMPLES]
