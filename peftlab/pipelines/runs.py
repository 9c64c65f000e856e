"""The runs below a directory, as their files show them: how far each is, its newest loss and score, whether it runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from peftlab.errors import PeftlabError
from peftlab.files import MARK, Json, is_locked, parse_json, read_mark, read_object
from peftlab.progress import duration
from peftlab.reporting.console import LongName, fold_name
from peftlab.reporting.facts import label, number, plain_table, stored_recipe

_TAIL = 1 << 16  # bytes at the end of metrics.jsonl that are read: the newest steps and evaluation
_WIDE, _KIND = 100, 16  # columns of a terminal with room for a kind on one line; those of a kind in a narrower one


@dataclass(frozen=True)
class RunState:
    """A run as its files show it.

    Attributes:
        run: its directory.
        kind: of its recipe, with the method or the kind of draft.
        state: ``running`` while a process holds the directory's lock, ``finished`` with results, else ``stopped``.
        step: optimiser steps done. loss: the newest step's.
        metric, score: of the best evaluation; of a run without results, of the newest.
        age: seconds since its files changed.
    """

    run: str
    kind: str
    state: Literal["running", "finished", "stopped"]
    step: int | None
    loss: float | None
    metric: str | None
    score: float | None
    age: float


def list_runs(directory: str | Path) -> list[RunState]:
    """Return the runs in a directory and below it, the one that changed last first.

    Raises:
        PeftlabError: there is no such directory.
    """
    if not Path(directory).is_dir():
        raise PeftlabError(f"{directory}: no such directory")
    marked = [mark.parent for mark in Path(directory).rglob(MARK)]
    found = [_state(place) for place in marked if (mark := read_mark(place)) is not None and mark.kind == "run"]
    return sorted(found, key=lambda run: (run.age, run.run))


def runs_table(runs: Sequence[RunState], directory: str | Path) -> Table:
    """Return a list of runs, in their order.

    Args:
        runs: what ``list_runs`` returned.
        directory: to which the names of the runs are relative.
    """
    table = plain_table(title=f"runs in {directory}")
    for name in ("run", "kind", "step", "loss", "score", "age", "state"):
        figure = name in ("step", "loss", "age")
        justify: Literal["left", "right"] = "right" if figure else "left"
        table.add_column(name, justify=justify, no_wrap=figure or name in ("kind", "state"), overflow="fold")
    room = _KIND if Console().width < _WIDE else _WIDE  # rich would break the longest column in the middle of a word
    for run in runs:
        place = LongName(os.path.relpath(run.run, directory))
        figures = ["" if value is None else number(value) for value in (run.step, run.loss)]
        score = "" if run.score is None else f"{label(str(run.metric))} {number(run.score)}"
        table.add_row(place, "\n".join(fold_name(run.kind, room)), *figures, score, duration(run.age), run.state)
    return table


def _state(place: Path) -> RunState:
    """Return what the files of a run show; a file that is missing or damaged shows nothing."""
    stream = place / "stream.json"  # what an update by a stream ends with, in place of results
    files = [*(place / name for name in (MARK, "metrics.jsonl", "results.json")), stream]
    changed = max(file.stat().st_mtime for file in files if file.exists())
    metrics = [*_newest_lines(place / "metrics.jsonl")]
    steps = [row for row in metrics if "loss" in row]
    evaluated = [row for row in metrics if isinstance(row.get("eval"), dict)]
    newest = next((row["eval"] for row in evaluated if row["step"] == evaluated[-1]["step"]), {})
    metric, score = next(iter(newest.items()), (None, None)) if isinstance(newest, dict) else (None, None)
    running = is_locked(place)
    try:
        results: Mapping[str, Json] = {} if running else read_object(place / "results.json")
        metric, score = str(results["metric"]), results["score"]
    except (PeftlabError, KeyError):
        results = {}
    step, loss = (metrics[-1]["step"], steps[-1]["loss"] if steps else None) if metrics else (None, None)
    return RunState(
        run=str(place),
        kind=_kind(place),
        state="running" if running else "finished" if results or stream.exists() else "stopped",
        step=step if isinstance(step, int) else None,
        loss=loss if isinstance(loss, float) else None,
        metric=metric,
        score=score if isinstance(score, int | float) else None,
        age=max(0.0, time.time() - changed),
    )


def _newest_lines(file: Path) -> Iterator[dict[str, Json]]:
    """Yield the objects in the last lines of ``metrics.jsonl``; none of a line that is cut or damaged."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - _TAIL))
            lines = opened.read().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = parse_json(line.decode())
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row


def _kind(run: Path) -> str:
    """Return the task and the method of a run, or ``draft`` and its kind; ``unknown`` where no recipe can be read."""
    try:
        _, values = stored_recipe(run)
    except PeftlabError:
        return "unknown"
    draft, method = values.get("draft"), values.get("method")
    parts = ["draft", draft.get("kind")] if isinstance(draft, dict) else [values.get("task")]
    parts += [method.get("name")] if isinstance(method, dict) else []
    return ", ".join(str(part) for part in parts if part)
