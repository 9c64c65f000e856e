"""The LoRA row of ``glue/table-minilm`` with peft's LoRA in place of ours: same data, loop, settings and seeds.

    python -m tests.benchmarks.glue_peft RUN [TASK ...]

RUN is the directory of a finished (or unfinished) table; prints both sides' best scores, mean ± standard deviation
over the seeds that RUN has, and keeps peft's scores in ``RUN/peft.json``, from where a second call continues.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import peft
from accelerate import Accelerator
from accelerate.utils import set_seed

from peftlab.files import write_json
from peftlab.methods.inject import inject
from peftlab.pipelines.finetune import load_task
from peftlab.recipe.load import Cell, load_recipe, table_cells
from peftlab.training.loop import train


def train_peft(cell: Cell) -> float:
    """Train one cell with peft's layers in the very modules that ours would take; return its best score."""
    recipe: Any = cell.recipe
    set_seed(cell.seed)
    held = load_task(recipe)
    twin = inject(copy.deepcopy(held.model), recipe.method)
    names = [name for name, module in twin.named_modules() if hasattr(module, "lora_A")]
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=recipe.method.r, lora_alpha=recipe.method.lora_alpha, target_modules=names
    )
    peft.get_peft_model(held.model, config)  # its layers are put into held.model, which stays the model
    with tempfile.TemporaryDirectory() as out:
        progress = train(held, recipe.train, Accelerator(cpu=True), Path(out))
    assert progress.best_score is not None
    return progress.best_score


def main() -> None:
    """Train what is missing and print the comparison."""
    run, tasks = Path(sys.argv[1]), sys.argv[2:]
    recipe: Any = load_recipe(run / "recipe.yaml")
    kept = run / "peft.json"
    theirs: dict[str, float] = json.loads(kept.read_text()) if kept.exists() else {}
    ours: dict[str, float] = {}
    for cell in table_cells(recipe):
        result = cell.directory / "results.json"
        if cell.row != "lora" or (tasks and cell.task not in tasks) or not result.exists():
            continue
        key = f"{cell.task} {cell.seed}"
        ours[key] = json.loads(result.read_text())["score"]
        if key not in theirs:
            theirs[key] = train_peft(cell)
            write_json(kept, theirs)
        print(f"{key}: peftlab {ours[key]:.4f}, peft {theirs[key]:.4f}", flush=True)
    print("\n| task | seeds | peftlab's LoRA | peft's LoRA |\n| --- | --- | --- | --- |")
    for task in dict.fromkeys(key.split()[0] for key in ours):
        keys = [key for key in ours if key.split()[0] == task]
        cells = []
        for side in (ours, theirs):
            scores = [100 * side[key] for key in keys]
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            cells.append(f"{statistics.mean(scores):.1f} ± {spread:.1f}")
        print(f"| {task} | {len(keys)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
