"""``peftlab runs``: what the files of running, finished and stopped runs show."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from peftlab.cli.app import app
from peftlab.errors import PeftlabError
from peftlab.files import LOCK, MARK, locked
from peftlab.pipelines.runs import RunState, list_runs, runs_table
from tests.reporting.run_directory import metric_lines, write_run


def marked(directory: Path, **changes: object) -> Path:
    """Write a run directory with its mark, an hour old."""
    write_run(directory, **changes)  # type: ignore[arg-type]
    (directory / MARK).write_text(json.dumps({"written_by": "peftlab", "kind": "run", "files": []}))
    for file in directory.iterdir():
        os.utime(file, (time.time() - 3600,) * 2)
    return directory


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A finished run, and two without results, of which one was killed while it wrote a line."""
    marked(tmp_path / "a" / "finished")
    for name, rest in (("running", []), ("killed", ['{"step": 7'])):
        (marked(tmp_path / name, lines=[*metric_lines(230), *rest]) / "results.json").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / MARK).write_text('{"kind": "model", "files": []}')
    return tmp_path


def test_running_finished_and_stopped_runs_are_told_apart(place: Path) -> None:
    os.utime(place / "running" / "metrics.jsonl")
    with locked(place / "running" / LOCK, place / "running"):
        found = {Path(run.run).name: run for run in list_runs(place)}
    assert next(iter(found)) == "running"  # it changed last
    assert {name: run.state for name, run in found.items()} == {
        "running": "running", "finished": "finished", "killed": "stopped",
    }  # fmt: skip
    assert found["running"].age < 60 < 3599 < found["killed"].age < 3700
    finished, killed = found["finished"], found["killed"]
    assert (finished.kind, finished.metric, finished.score) == ("glue/mrpc, lora", "accuracy", 0.8872549)
    last = [json.loads(line) for line in metric_lines(230)]
    assert (killed.step, killed.loss) == (230, last[-2]["loss"])
    assert (killed.metric, killed.score) == ("accuracy", last[-1]["eval"]["accuracy"])


def test_a_stream_that_has_ended_is_finished(place: Path) -> None:
    (place / "killed" / "stream.json").write_text("{}")
    assert {run.state for run in list_runs(place) if Path(run.run).name == "killed"} == {"finished"}


def test_the_command_lists_them(place: Path) -> None:
    done = CliRunner().invoke(app, ["runs", str(place), "--json", str(place / "found.json")])
    assert done.exit_code == 0, done.output
    listed = [line.split()[-1] for line in done.stdout.splitlines() if "1 h 0 min" in line]
    assert sorted(listed) == ["finished", "stopped", "stopped"]
    rows = json.loads((place / "found.json").read_text())["runs"]
    assert [row["state"] for row in rows].count("stopped") == 2 and rows[0].keys() >= {"step", "loss", "score", "age"}
    empty = CliRunner().invoke(app, ["runs", str(place / "other")])
    assert empty.stdout.splitlines() == [f"{place / 'other'}: no runs"]
    with pytest.raises(PeftlabError, match="nowhere: no such directory"):
        list_runs(place / "nowhere")


@pytest.mark.parametrize("width", [80, 200])
def test_no_word_of_a_kind_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    run = RunState("runs/quickstart", "text/classification, lora", "finished", 1250, 0.4, "accuracy", 0.9012, 100.0)
    console = Console(width=width, file=io.StringIO())
    console.print(runs_table([run], "."))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width and any(" classification, " in line for line in lines) == (width == 80)
    assert any(" text/classification, lora " in line for line in lines) == (width == 200)
