"""Tables of a tiny model: what is run, gone on with, kept, refused, and what becomes of failures and signals."""

from __future__ import annotations

import csv
import io
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from peftlab.checkpoints.adapter import read_adapter
from peftlab.errors import PeftlabError
from peftlab.files import claimed, locked, read_json, write_mark
from peftlab.pipelines.directory import RUN, TABLE
from peftlab.pipelines.recipes import run_recipe
from peftlab.pipelines.table import CellsFailed, Shard, Stopped, TableResults, run_table
from peftlab.recipe.load import load_recipe, table_cells
from peftlab.recipe.schema import TableRecipe
from tests.training.tiny import command, save_model


def table(values: dict[str, Any], **changes: Any) -> TableRecipe:
    return TableRecipe.model_validate({**values, **changes})


def finished(values: dict[str, Any]) -> dict[str, int]:
    """Cell to the time its result was written."""
    paths = Path(values["output_dir"], "cells").glob("*/results.json")
    return {path.parent.name: path.stat().st_mtime_ns for path in paths}


def soon(condition: Callable[[], Any], action: Callable[[], Any]) -> None:
    """Do something from another thread as soon as a condition holds."""

    def watch() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not condition():
            time.sleep(0.01)
        action()

    threading.Thread(target=watch, daemon=True).start()


@dataclass
class EightCells:
    """A table of four cells that was run, then again with a second seed; CoLA's cells start from MRPC's.

    Attributes:
        before: the first cells. result, printed: of the second run.
    """

    values: dict[str, Any]
    before: dict[str, int]
    result: TableResults
    printed: str


@pytest.fixture(scope="module")
def eight(table_values: Callable[[Path], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> EightCells:
    values = table_values(tmp_path_factory.mktemp("eight") / "table")
    values["init"] = {"glue/cola": "glue/mrpc"}
    run_recipe(table(values))
    before = finished(values)
    assert not list(Path(values["output_dir"]).glob("cells/*/checkpoints")), "a finished cell needs no checkpoints"
    with redirect_stdout(io.StringIO()) as printed:
        result = run_table(load_recipe(Path(values["output_dir"]) / "recipe.yaml", ["seeds=[0,1]"]), resume=True)
    return EightCells(values, before, result, printed.getvalue())


def test_a_table_runs_then_only_what_is_missing(eight: EightCells) -> None:
    values, before, result, printed = eight.values, eight.before, eight.result, eight.printed
    assert set(before) == {"cola-lora-seed0", "cola-head-seed0", "mrpc-lora-seed0", "mrpc-head-seed0"}
    directory = Path(values["output_dir"])
    assert "trainable params" in (directory / "cells" / "cola-lora-seed0.log").read_text()
    assert printed.startswith("8 cells, 4 with results; 1 at a time\n[1/4] mrpc-lora-seed1: accuracy ")
    assert "[3/4] cola-lora-seed1: matthews_correlation " in printed
    after = finished(values)
    assert len(after) == result.cells == 8
    assert all(after[name] == when for name, when in before.items())

    cells = {name: read_json(directory / "cells" / name / "results.json") for name in after}
    with (directory / "table.csv").open() as file:
        (line,) = [row for row in csv.DictReader(file) if (row["task"], row["row"]) == ("glue/mrpc", "lora")]
    assert line["lr"] == "0.05"
    scores = [cells[f"mrpc-lora-seed{seed}"]["score"] for seed in (0, 1)]
    assert (line["seeds"], line["n"]) == ("0 1", "2")
    assert float(line["best_mean"]) == pytest.approx(50 * sum(scores), abs=1e-3)
    last = [cells[f"mrpc-lora-seed{seed}"]["last_metrics"]["validation"]["accuracy"] for seed in (0, 1)]
    assert float(line["last_median"]) == pytest.approx(50 * sum(last), abs=1e-3)
    assert {cell["lr"] for cell in cells.values()} == {0.05}
    assert "learning rate: 0.05" in (directory / "cells" / "cola-head-seed0.log").read_text()
    # Each cell's memory is its own: the smaller method's is not the larger one's high-water mark.
    assert len({cell["peak_rss_mb"] for cell in cells.values()}) > 1
    assert "MRPC" in (directory / "table.html").read_text() and "MRPC" in (directory / "table.tex").read_text()


@pytest.mark.long  # a process that imports all libraries, of which one may print
@pytest.mark.parametrize("kind", ["finetune", "draft"])
def test_the_processes_of_cells_print_no_warnings_of_libraries(tmp_path: Path, kind: str) -> None:
    """transformers imports torchao into the server that the processes are forked from."""
    pytest.importorskip("torchao")
    program = tmp_path / "program.py"
    program.write_text(
        "from peftlab.pipelines.cells import _context\n"
        "if __name__ == '__main__':\n"
        f"    process = _context({kind!r}).Process(target=print, args=('started',))\n"
        "    process.start()\n    process.join()\n"
    )
    done = command(program)
    assert done.returncode == 0 and "started" in done.stdout
    assert "torchao" not in done.stderr and "_pytree" not in done.stderr, done.stderr


def test_a_changed_cell_is_refused_and_run_anew_on_request(values: dict[str, Any], tmp_path: Path) -> None:
    start = {"init": {"glue/cola": "glue/mrpc"}, "rows": {"lora": values["rows"]["lora"]}}
    run_table(table(values, **start))
    before = finished(values)
    cells = Path(values["output_dir"]) / "cells"
    first = load_recipe(cells / "cola-lora-seed0" / "recipe.yaml")
    assert first.init_from == str(cells / "mrpc-lora-seed0")  # type: ignore[union-attr]

    changed = table(values, **start, per_task={"glue/mrpc": {"train": {"lr": 0.01}}})
    with pytest.raises(PeftlabError, match=r"mrpc-lora-seed0 was run by another recipe: train.lr 0.05, now 0.01\n"):
        run_table(changed)
    assert finished(values) == before
    notes = cells / "mrpc-lora-seed0" / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(PeftlabError, match=r"mrpc-lora-seed0 contains notes\.txt, which peftlab did not write"):
        run_table(changed, overwrite=True)
    notes.unlink()
    run_table(changed, overwrite=True)
    after = finished(values)
    assert all(after[name] > before[name] for name in before), "what starts from a changed cell is run anew too"

    moved = {**values, "output_dir": str(tmp_path / "moved")}
    Path(values["output_dir"]).rename(moved["output_dir"])
    run_table(table(moved, **start, per_task={"glue/mrpc": {"train": {"lr": 0.01}}}))
    assert finished(moved) == after, "a table may be moved"


def test_two_at_a_time_and_what_starts_from_another_waits(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("peftlab.pipelines.cells.cores", lambda: 2)
    values = {**values, "init": {"glue/cola": "glue/mrpc"}, "train": {**values["train"], "lr": 1e-9}}
    with pytest.raises(PeftlabError, match=r"--cpus 3: this machine has 2 CPU cores"):
        run_table(table(values), cpus=3)
    run_table(table(values), cpus=1)
    assert "0 with results; 2 at a time" in capsys.readouterr().out
    when = finished(values)
    for row in ("lora", "head"):
        assert when[f"mrpc-{row}-seed0"] < when[f"cola-{row}-seed0"]
    cells = Path(values["output_dir"]) / "cells"
    there, here = (read_adapter(cells / f"{task}-lora-seed0").tensors for task in ("mrpc", "cola"))
    name = next(name for name in here if name.endswith("query.lora_A"))
    assert (there[name] - here[name]).abs().max() < 1e-6, "steps of 1e-9 leave it where it started"


def test_a_failing_cell_is_noted_and_the_others_go_on(values: dict[str, Any], glue: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "train.tsv").write_text("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\nmaybe\t1\t2\tgood\tbad\n")
    values = {**values, "per_task": {"glue/mrpc": {"data": {"path": str(broken)}}}}
    values["rows"] = {"lora": values["rows"]["lora"]}
    with pytest.raises(CellsFailed) as caught:
        run_table(table(values))
    assert caught.value.status == 1
    lines = str(caught.value).splitlines()
    assert lines[0] == "1 of 2 cells failed; running the table again tries them again"
    assert lines[1].startswith("mrpc-lora-seed0: ") and "unknown label 'maybe'" in lines[1]
    before = finished(values)
    assert set(before) == {"cola-lora-seed0"}
    page = (Path(values["output_dir"]) / "table.html").read_text()
    assert "Failed: mrpc-lora-seed0: " in page

    for file in (glue / "MRPC").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    run_table(table(values))
    assert len(finished(values)) == 2 and before.items() <= finished(values).items()


def test_a_killed_cell_fails_alone_and_goes_on_from_its_checkpoint(values: dict[str, Any]) -> None:
    values = {**values, "tasks": ["glue/cola"], "train": {**values["train"], "max_steps": 150, "eval_every": 150}}
    values["train"]["save_every"] = 5
    checkpoints = Path(values["output_dir"], "cells", "cola-lora-seed0", "checkpoints")
    soon(
        lambda: list(checkpoints.glob("step-*.pt")),
        lambda: [process.kill() for process in multiprocessing.active_children()],
    )
    with pytest.raises(CellsFailed, match="cola-lora-seed0: its process ended by SIGKILL; see "):
        run_table(table(values))
    assert set(finished(values)) == {"cola-head-seed0"}
    assert list(checkpoints.glob("step-*.pt"))
    run_table(table(values))
    metrics = (checkpoints.parent / "metrics.jsonl").read_text().splitlines()
    assert len([line for line in metrics if '"loss"' in line and '"lr"' in line]) == 150, "each step once"


def test_a_signal_stops_the_table_with_checkpoints(values: dict[str, Any]) -> None:
    values = {**values, "train": {**values["train"], "max_steps": 4000, "eval_every": 4000, "save_every": 5}}
    cells = Path(values["output_dir"], "cells")
    before = signal.getsignal(signal.SIGINT)
    soon(lambda: list(cells.glob("*/checkpoints/step-*.pt")), lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Stopped, match=r"stopped by SIGINT; continue with `peftlab resume ") as caught:
        run_table(table(values))
    assert caught.value.status == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopped by SIGINT after step" in (cells / "cola-lora-seed0.log").read_text()
    assert not (cells / "cola-head-seed0").exists()
    assert (cells.parent / "table.csv").exists()


def test_directories_of_others_are_left_alone(values: dict[str, Any]) -> None:
    directory = Path(values["output_dir"])
    directory.mkdir()
    (directory / "thesis.tex").write_text("")
    with pytest.raises(PeftlabError, match=r"was not written by peftlab \(it has no peftlab.json\)"):
        run_table(table(values))
    write_mark(directory, RUN)
    with pytest.raises(PeftlabError, match="is a run, not a table"):
        run_table(table(values), overwrite=True)
    assert (directory / "thesis.tex").exists()


def test_a_second_process_is_refused(values: dict[str, Any]) -> None:
    directory = Path(values["output_dir"])
    with claimed(directory, TABLE) as claim:
        claim.begin()
        for options in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(PeftlabError, match="table: another process is writing it"):
                run_table(table(values), **options)  # type: ignore[arg-type]
    assert [path.name for path in directory.iterdir()] == ["peftlab.json"]


def test_many_processes_are_refused(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PeftlabError, match="without accelerate launch"):
        run_table(table(values))


def test_parts_that_run_at_the_same_time_give_the_table_of_one_run(eight: EightCells, tmp_path: Path) -> None:
    """Of one of its rows; the third part has no cells."""
    values = {**eight.values, "seeds": [0, 1]}
    parts = {**values, "rows": {"lora": values["rows"]["lora"]}, "output_dir": str(tmp_path / "parts")}
    threads = [threading.Thread(target=run_recipe, args=(table(parts),), kwargs={"shard": f"{i}/3"}) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(finished(parts)) == {f"{task}-lora-seed{seed}" for task in ("mrpc", "cola") for seed in (0, 1)}
    for name in finished(parts):
        whole, part = (Path(each["output_dir"], "cells", name, "adapter") for each in (values, parts))
        assert (whole / "adapter_model.safetensors").read_bytes() == (part / "adapter_model.safetensors").read_bytes()
    scores = []
    for each in (values, parts):
        lines = csv.DictReader(Path(each["output_dir"], "table.csv").read_text().splitlines())
        scores.append([(line["task"], line["best_mean"]) for line in lines if line["row"] == "lora"])
    assert scores[0] == scores[1]


def test_a_part_runs_its_own_cells_and_those_that_start_from_them_once(values: dict[str, Any]) -> None:
    values = {**values, "init": {"glue/cola": "glue/mrpc"}}
    assert run_recipe(table(values), shard="1/2").cells == 2
    assert set(finished(values)) == {"mrpc-head-seed0", "cola-head-seed0"}
    before = finished(values)
    directory = Path(values["output_dir"])
    with (
        locked(directory / Shard(1, 2).lock, directory),
        pytest.raises(PeftlabError, match="shard 1/2: another process is writing it"),
    ):
        run_recipe(table(values), shard="1/2")
    run_recipe(table(values))
    assert len(finished(values)) == 4 and before.items() <= finished(values).items()


@pytest.mark.parametrize("shard", ["2/2", "1", "a/b", "-1/2", "0/0"])
def test_what_is_no_part_is_refused(values: dict[str, Any], shard: str) -> None:
    with pytest.raises(PeftlabError, match="write I/N, part I of N"):
        run_recipe(table(values), shard=shard)
    with pytest.raises(PeftlabError, match="only tables and sweeps have cells"):
        run_recipe(table_cells(table(values))[0].recipe, shard="0/2")
    assert not Path(values["output_dir"]).exists()


def test_a_part_that_starts_just_after_another_one_has_begun_is_not_refused(tmp_path: Path) -> None:
    """It has seen no table yet when it claims the directory, and finds one there."""
    directory = tmp_path / "table"
    with claimed(directory, TABLE, shared=True) as first:
        first.begin()
    with claimed(directory, TABLE, shared=True):
        pass
    with pytest.raises(PeftlabError, match="exists already"), claimed(directory, TABLE):
        pass
    write_mark(directory, RUN)
    with pytest.raises(PeftlabError, match="is a run, not a table"), claimed(directory, TABLE, shared=True):
        pass


def test_the_table_of_efficiency(glue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three of its rows on a tiny model: the control costs what choosing examples costs; parts and a rest of it run."""
    model = save_model(tmp_path / "bert", layers=2)
    rows = ("full", "confident", "random-longer")
    others = [f"~rows.{row}" for row in load_recipe("efficiency/table").rows if row not in rows]  # type: ignore[union-attr]
    options = [
        "tasks=[glue/mrpc]",
        "seeds=[0]",
        "costs.controls={confident: random-longer}",
        f"output_dir={tmp_path / 't'}",
    ]
    recipe = load_recipe(
        "efficiency/table",
        [f"model={model}", f"data.path={glue}", "train.max_length=16", "train.batch_size=2", *options, *others],
    )
    run_recipe(recipe, shard="0/2")
    assert "0/1" in capsys.readouterr().out
    run_recipe(recipe)
    printed = capsys.readouterr().out
    assert "3 cells, 2 with results" in printed and "costs, FLOPs of full" in printed
    lines = {line["row"]: line for line in csv.DictReader((tmp_path / "t" / "table.csv").read_text().splitlines())}
    assert lines["full"]["flops_share"] == "1.00" and lines["confident"]["control"] == "random-longer"
    chosen, control = (float(lines[row]["flops"]) for row in ("confident", "random-longer"))
    assert control == pytest.approx(chosen, rel=0.1) and chosen < float(lines["full"]["flops"])
    cost = read_json(tmp_path / "t" / "cells" / "mrpc-full-seed0" / "results.json")["cost"]  # type: ignore[index,call-overload]
    assert float(lines["full"]["flops"]) == cost["forward_flops"] + cost["backward_flops"]  # type: ignore[index,call-overload,operator]
    assert "its score" in (tmp_path / "t" / "table.html").read_text()


def test_costs_name_rows(values: dict[str, Any]) -> None:
    for costs, said in (
        ({"of": "ful"}, r"costs\.of: no row 'ful'"),
        ({"of": "lora", "controls": {"head": "lor"}}, r"costs\.controls\.head: no row 'lor' \(did you mean 'lora'"),
    ):
        with pytest.raises(PeftlabError, match=said):
            table_cells(table(values, costs=costs))
