"""Commands that are killed at random moments leave nothing torn, and their reruns equal a run that was not killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tiny

from tests.forked import python

PROGRAM = Path(__file__).with_name("kills.py")


def glue(directory: Path) -> Path:
    """Write CoLA in GLUE's TSV layout, 24 rows to learn and 12 to score."""
    draw = random.Random(0)
    (directory / "CoLA").mkdir(parents=True)
    for name, n in (("train", 24), ("dev", 12)):
        rows = [f"x\t{i % 2}\t\t{' '.join(draw.choices(tiny.WORDS, k=5))}" for i in range(n)]
        (directory / "CoLA" / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("run", 2),
        ("resume", 3),
        *(pytest.param(kind, 30, marks=pytest.mark.long) for kind in ("run", "resume", "table")),
    ],
)
def test_killed_at_random(kind, kills, model, rows, tmp_path):
    values = tiny.recipe(model, rows, tmp_path / "out", save_every=2)
    values["merge"] = True
    if kind == "table":
        values = {key: values[key] for key in ("model", "train", "merge", "output_dir")} | {
            "kind": "table",
            "data": {"path": str(glue(tmp_path / "glue"))},
            "tasks": ["glue/cola"],
            "rows": {name: {"method": tiny.METHODS[name]} for name in ("lora", "bitfit")},
        }
        del values["train"]["seed"]
    seed = random.SystemRandom().randrange(10**6)
    file = tiny.write_recipe(values, tmp_path / "recipe.yaml")
    done = python(PROGRAM, kind, kills, seed, file, seconds=7200)
    print(f"seed {seed}\n{done.stdout}")
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
