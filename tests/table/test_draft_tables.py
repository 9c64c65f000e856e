"""Tables and sweeps of drafts: what the cells are, what they share, what the table says, and what is refused."""

from __future__ import annotations

import csv
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import peftlab
from peftlab.cli.app import app
from peftlab.drafting.text import write_missing
from peftlab.errors import PeftlabError
from peftlab.pipelines.table import missing_cells
from peftlab.recipe.load import dump_recipe, load_recipe, table_cells
from peftlab.recipe.schema import DraftRecipe, DraftTableRecipe

SWEEP = ["sweep.objective.name=[kl, tvd]", "sweep.seed=[0, 1]"]
SMALL = [
    "data.samples=1",
    "data.held_out=4",
    "data.max_new_tokens=8",
    "train.max_steps=2",
    "train.eval_every=2",
    "train.max_length=64",
]
TABLE = """kind: draft_table
target: T
draft: {kind: model, truncate: {layers: [0, 1]}}
method: {name: lora, r: 2}
objective: {name: kl}
rows:
  kl: {}
  tvd: {objective: {name: tvd}, data: {on_policy: 0.5}}
  heads: {draft: {kind: medusa, heads: 2}, method: {name: full}, train: {lr: 1e-4}}
seeds: [3, 4]
data: {prompts: [a, b, c], held_out: 1}
gamma: 3
output_dir: runs/t
"""


def run(stories: Path, out: Path, *arguments: str) -> str:
    """Run the sweep through the command line and return what it prints."""
    overrides = [f"target={stories}", *SMALL, f"output_dir={out}", *arguments]
    done = CliRunner().invoke(app, ["run", "draft/ci", *overrides, "--cpus", "1"])
    assert done.exit_code == 0, done.output
    return done.output


def scores(table: Path) -> dict[str, dict[str, Any]]:
    """Return the results of the cells that have some."""
    return {path.parent.name: json.loads(path.read_text()) for path in table.glob("cells/*/results.json")}


def complaint(file: str, *overrides: str) -> list[str]:
    with pytest.raises(PeftlabError) as caught:
        load_recipe(file, overrides)
    return str(caught.value).splitlines()


@pytest.fixture(scope="module")
def table(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("drafts") / "ci"
    run(stories, out, *SWEEP)
    return out.with_name("ci-sweep")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("t.yaml").write_text(TABLE)
    return tmp_path


class TestRun:
    """What a sweep of drafts writes."""

    def test_cells_are_draft_runs_that_share_the_text(self, table: Path) -> None:
        names = [f"objective={name}-seed{seed}" for name in ("kl", "tvd") for seed in (0, 1)]
        assert sorted(scores(table)) == sorted(names)
        (text,) = (table / "cells" / "draft-data").iterdir()
        assert len([*text.glob("part-*")]) == 1, "no cell has written it again under another name"
        cell = load_recipe(table / "cells" / names[3] / "recipe.yaml")
        assert isinstance(cell, DraftRecipe) and (cell.objective.name, cell.train.seed) == ("tvd", 1)
        assert not [*table.glob("cells/*/checkpoints")]
        assert scores(table)[names[0]]["peak_rss_mb"] > 10

    def test_the_table_has_means_speeds_and_gains(self, table: Path) -> None:
        with (table / "table.csv").open() as file:
            kl, tvd = csv.DictReader(file)
        found = scores(table)
        for row, name in ((kl, "kl"), (tvd, "tvd")):
            cells = [found[f"objective={name}-seed{seed}"] for seed in (0, 1)]
            assert (row["row"], row["task"], row["seeds"], row["metric"]) == (
                f"objective={name}",
                "draft",
                "0 1",
                "acceptance",
            )
            assert float(row["best_mean"]) == pytest.approx(50 * sum(cell["score"] for cell in cells), abs=1e-3)
            after = [cell["decoding"]["after"] for cell in cells]
            for key in ("block_efficiency", "speed_up"):
                assert float(row[f"{key}_mean"]) == pytest.approx(sum(each[key] for each in after) / 2, abs=1e-3)
            assert int(row["trainable_parameters"]) == cells[0]["trainable_parameters"]
        page, latex = (table / "table.html").read_text(), (table / "table.tex").read_text()
        assert all(
            "tokens/step" in text and "in pairs on the same 4 held-out texts, means of 2" in text
            for text in (page, latex)
        )
        assert not kl["gain"]
        low, gain, high = (float(tvd[name]) for name in ("gain_low", "gain", "gain_high"))
        assert low <= gain <= high

    def test_gains_are_those_of_the_report_on_the_cells(self, table: Path, stories: Path, tmp_path: Path) -> None:
        each = []
        for seed in (0, 1):
            pair = [table / "cells" / f"objective={name}-seed{seed}" for name in ("kl", "tvd")]
            found = peftlab.report(pair, tmp_path / "page.html").comparison
            assert found is not None
            (line,) = [note for note in found.notes if note.startswith("Acceptance of")]
            each.append(line)
        # One seed: the report's own sentence but for the names. Two: the mean of its gains.
        copied = tmp_path / "ci-sweep"
        shutil.copytree(table, copied)
        printed = run(stories, tmp_path / "ci", SWEEP[0], "sweep.seed=[0]")
        assert printed.startswith("2 cells, 2 with results")
        own = next(line for line in (copied / "table.tex").read_text().splitlines() if "in pairs" in line)
        assert own == f"% {each[0].replace('-seed0', '')}"
        with (table / "table.csv").open() as file:
            gain = float([*csv.DictReader(file)][1]["gain"])
        assert gain == pytest.approx(sum(float(line.split(": ")[1].split(" ")[0]) for line in each) / 2, abs=2e-3)

    def test_only_what_is_missing_runs_again(self, table: Path, stories: Path) -> None:
        before = scores(table)
        (table / "cells" / "objective=tvd-seed0" / "results.json").unlink()
        printed = run(stories, table.with_name("ci"), *SWEEP)
        assert printed.startswith("4 cells, 3 with results") and "[1/1] objective=tvd-seed0: acceptance" in printed
        after = scores(table)
        assert {name: found["score"] for name, found in after.items()} == {
            n: found["score"] for n, found in before.items()
        }

    @pytest.mark.long
    def test_two_parts_have_the_scores_of_one(self, table: Path, stories: Path, tmp_path: Path) -> None:
        for part in ("0/2", "1/2"):
            printed = run(stories, tmp_path / "ci", SWEEP[0], "--shard", part)
            assert printed.startswith(f"1 cells in part {part}, 0 with results")
        parts, whole = scores(tmp_path / "ci-sweep"), scores(table)
        assert len(parts) == 2
        for name, found in parts.items():
            assert (found["score"], found["held_out"]) == (whole[name]["score"], whole[name]["held_out"])


def test_rows_change_the_tables_keys_and_other_kinds_replace_them(written: Path) -> None:
    recipe = load_recipe("t.yaml")
    assert isinstance(recipe, DraftTableRecipe)
    cells = table_cells(recipe)
    assert [cell.directory.name for cell in cells][:4] == ["kl-seed3", "tvd-seed3", "heads-seed3", "kl-seed4"]
    kl, tvd, heads = (cell.recipe for cell in cells[:3])
    assert isinstance(kl, DraftRecipe) and isinstance(tvd, DraftRecipe) and isinstance(heads, DraftRecipe)
    alone = TABLE.replace("draft_table", "draft").replace("seeds: [3, 4]\n", "")
    rows = alone.index("rows:"), alone.rindex("data:")
    Path("one.yaml").write_text(alone[: rows[0]] + alone[rows[1] :])
    assert kl == load_recipe("one.yaml", ["train.seed=3", "output_dir=runs/t/cells/kl-seed3"])
    assert (tvd.objective.name, tvd.data.on_policy, tvd.draft, tvd.gamma) == ("tvd", 0.5, kl.draft, 3)
    assert heads.draft.kind == "medusa" and heads.method is not None and heads.method.name == "full"
    Path("again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe("again.yaml") == recipe


def test_a_sweep_of_a_reference_keeps_it(written: Path) -> None:
    Path("one.yaml").write_text("kind: draft\ntarget: T\ndraft: some/draft\ndata: {prompts: [a, b]}\noutput_dir: r\n")
    cells = table_cells(load_recipe("one.yaml", ["sweep.draft.dtype=[bf16, fp16]", "sweep.gamma=[2, 5]"]))  # type: ignore[arg-type]
    found = [(cell.row, cell.recipe.draft.from_, cell.recipe.draft.dtype, cell.recipe.gamma) for cell in cells]  # type: ignore[union-attr]
    assert found[:2] == [
        ("dtype=bf16 gamma=2", "some/draft", "bf16", 2),
        ("dtype=bf16 gamma=5", "some/draft", "bf16", 5),
    ]
    (line,) = complaint("one.yaml", "sweep.seed=[1]", "sweep.task=[glue/cola]")
    assert line.startswith("override 'sweep.task=[glue/cola]': task: unknown key")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("costs={of: kl}", "costs: unknown key"),
        ("tasks=[glue/cola]", "tasks: unknown key"),
        ("rows.kl.init_from=runs/a", "init_from: unknown key"),
        ("rows.kl.task=glue/cola", "task: unknown key"),
        ("rows.kl.output_dir=a", "rows.kl.output_dir: the table sets it for all cells"),
        ("rows.kl.train.seed=1", "rows.kl.train.seed: a table's seeds are listed under seeds"),
        ("rows.kl.objective.nam=kl", "objective.nam: unknown key (did you mean 'name'?)"),
        ("objective.name=kk", "objective.name: expected ce, kl, "),
        ("draft.layers=3", "draft.layers: unknown key"),
        ("~draft", "draft: missing"),
        ("rows.tvd.objective.name=ce", "data.on_policy: text of the draft's own needs the target's logits"),
        ("seeds=[1, 1]", "seeds: 1 occurs twice"),
        ("output_dir=s3://bucket/t", "output_dir: s3://bucket/t: the cells of a table or sweep share a directory"),
        ("sweep.seed=[1, 2]", "only recipes of kind finetune and draft are swept, this is a draft_table"),
    ],
)
def test_mistakes_are_told_where_they_were_written(written: Path, override: str, message: str) -> None:
    line = complaint("t.yaml", override)[0]
    assert message in line and line.startswith((f"override {override!r}", "t.yaml:"))


def test_a_cell_has_ended_when_it_is_measured(written: Path) -> None:
    """A run writes a first results.json before it measures its draft; the endpoint's model id is written by the run."""
    recipe = load_recipe("t.yaml", ["data.endpoint=http://localhost:8000/v1"])
    assert isinstance(recipe, DraftTableRecipe)
    first, other, *_ = cells = table_cells(recipe)
    for cell in (first, other):
        assert isinstance(cell.recipe, DraftRecipe)
        data = cell.recipe.data.model_copy(update={"endpoint_model": "served"})
        (cell.directory / "checkpoints").mkdir(parents=True)
        (cell.directory / "results.json").write_text("{}")
        (cell.directory / "recipe.yaml").write_text(dump_recipe(cell.recipe.model_copy(update={"data": data})))
    (other.directory / "checkpoints" / "step-2.pt").write_bytes(b"")
    assert missing_cells(cells, overwrite=False) == cells[1:]


def test_processes_that_start_together_write_a_file_once(tmp_path: Path) -> None:
    files = [tmp_path / "data" / name for name in ("a", "b")]
    wrote: list[str] = []

    def write() -> None:
        for file in [file for file in files if not file.exists()]:
            time.sleep(0.1)
            file.write_text("x")
            wrote.append(file.name)

    threads = [threading.Thread(target=write_missing, args=(files, write)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrote == ["a", "b"] and sorted(path.name for path in (tmp_path / "data").iterdir()) == ["a", "b"]
    files[0].parent.chmod(0o500)  # what is there is read where nothing can be written
    write_missing(files, write)
    files[0].parent.chmod(0o700)
