"""GLUE (Wang et al. 2018), from the hub or from a directory in the benchmark's own TSV layout."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.references import locate, unreachable
from peftlab.tasks.data import Table, quoted, read_tsv, refuse_unreadable_rows
from peftlab.tasks.labelled_rows import Examples
from peftlab.tasks.table import DataConfig, Task

_HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class _Layout:
    """The layout of one task's TSV files: text columns, label column, spelling of the labels, files of the splits.

    ``words``: labels are the class names, else their indices. ``broken_lines``: the published files hold a
    few lines with a wrong number of fields, which the hub's copy leaves out as well.
    """

    text: tuple[str, ...]
    label: str
    words: bool = False
    broken_lines: bool = False
    files: tuple[tuple[str, str], ...] = (("train", "train"), ("validation", "dev"), ("test", "test"))


_PAIR = ("sentence1", "sentence2")
_MNLI_FILES = (
    ("train", "train"),
    ("validation_matched", "dev_matched"),
    ("validation_mismatched", "dev_mismatched"),
    ("test_matched", "test_matched"),
    ("test_mismatched", "test_mismatched"),
)
_LAYOUTS = {
    "glue/cola": _Layout(("sentence",), "label"),
    "glue/sst2": _Layout(("sentence",), "label"),
    "glue/mrpc": _Layout(("#1 String", "#2 String"), "Quality"),
    "glue/stsb": _Layout(_PAIR, "score"),
    "glue/qqp": _Layout(("question1", "question2"), "is_duplicate", broken_lines=True),
    "glue/mnli": _Layout(_PAIR, "gold_label", words=True, files=_MNLI_FILES),
    "glue/qnli": _Layout(("question", "sentence"), "label", words=True),
    "glue/rte": _Layout(_PAIR, "label", words=True),
    "glue/wnli": _Layout(_PAIR, "label"),
    "glue/ax": _Layout(_PAIR, "gold_label", words=True, files=(("test", "AX"),)),
}
# CoLA's labelled files have no header; its test file has one.
_COLA_HEADER = ("source", "label", "mark", "sentence")


def load_glue(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read a GLUE task.

    Args:
        task: a ``glue/`` row of the table.
        data: its ``path`` is None for the hub, or a directory: the task's own (``CoLA``) or the one that contains it.
        classes: a trained model's class names in label order, which must be the task's.

    Returns:
        The task, the splits that are there (a directory may lack some), and the number of rows left out by reason:
        only QQP's published files contain lines that are not rows.

    Raises:
        PeftlabError: the hub cannot be reached, the directory contains none of the task's files, a line is
            malformed (named ``file:line``), or ``classes`` are others.
    """
    if classes is not None:
        _same_classes(task, classes)
    path = data.path
    if path is None:
        return task, _from_hub(task), {}
    layout = _LAYOUTS[task.name]
    directory = glue_directory(task, path)
    splits: dict[str, Examples] = {}
    broken: list[int] = []
    for split, stem in layout.files:
        file = directory / f"{stem}.tsv"
        if not file.is_file():
            continue
        header = _COLA_HEADER if task.name == "glue/cola" and split != "test" else None
        table = read_tsv(file, header, broken if layout.broken_lines else None)
        if len(table) == 0:
            raise PeftlabError(f"{file}: no examples")
        splits[split] = _examples(table, task, layout, labelled=not split.startswith("test"))
    return task, splits, {"lines with a wrong number of columns": len(broken)} if broken else {}


def _same_classes(task: Task, classes: Sequence[str]) -> None:
    """Refuse a model whose classes are not the task's in the task's order, whatever their case and spaces; numbers
    name no class."""
    plain = [re.sub(r"[\W_]+|^LABEL_(?=\d)", "", name).lower() for name in classes]
    numbered = [str(place) for place in range(len(task.labels))]
    if plain not in (numbered, [re.sub(r"[\W_]+", "", name).lower() for name in task.labels]):
        raise PeftlabError(
            f"task {task.name}: the model's classes are {', '.join(classes) or 'none'}; "
            f"the task's are {', '.join(task.labels) or 'none (a number)'}, in this order"
        )


def glue_directory(task: Task, path: str) -> Path:
    """Return the directory with a task's TSV files: ``path``, or the task's folder in it.

    Args:
        task: a ``glue/`` row of the table.
        path: the task's own directory, or the one that contains it.
    """
    root = locate(path, "data.path")
    if not isinstance(root, Path) or not root.is_dir():
        raise PeftlabError(f"data.path {path!r}: no such directory; GLUE is read from a directory of TSV files")
    files = [f"{stem}.tsv" for _, stem in _LAYOUTS[task.name].files]
    candidates = [root / task.folder, root]
    # The task's folder has precedence over a stray train.tsv in its parent directory.
    for directory in candidates:
        if any((directory / file).is_file() for file in files):
            return directory
    folders = [entry.name for entry in root.iterdir() if entry.is_dir()]
    hint = did_you_mean(task.folder, folders)
    raise PeftlabError(
        f"data.path {path!r}: contains neither a folder {task.folder!r}{hint} nor any of {', '.join(files)}"
    )


def _examples(table: Table, task: Task, layout: _Layout, labelled: bool) -> Examples:
    texts = [[str(value) for value in table.column(name, f"a text of {task.name}")] for name in layout.text]
    label: Sequence[float] | None = None
    if labelled or layout.label in table.columns:
        values = [str(value) for value in table.column(layout.label, f"the label of {task.name}")]
        label = _scores(table, values) if task.regression else _classes(table, values, task, layout.words)
    return Examples(texts[0], texts[1] if len(texts) == 2 else None, label)


def _classes(table: Table, values: list[str], task: Task, words: bool) -> list[int]:
    index = {name if words else str(place): place for place, name in enumerate(task.labels)}
    problems: list[tuple[int, str]] = []
    for row, value in enumerate(values):
        if value not in index:
            hint = did_you_mean(value, index) if not problems else ""
            known = f"unknown label {quoted(value)}{hint}; one of {', '.join(index)}"
            problems.append((table.positions[row], known))
    refuse_unreadable_rows(table.path, table.unit, problems)
    return [index[value] for value in values]


def _scores(table: Table, values: list[str]) -> list[float]:
    scores, problems = [], []
    for row, value in enumerate(values):
        try:
            score = float(value)
        except ValueError:
            score = math.nan
        scores.append(score)
        if not 0 <= score <= 5:
            problems.append((table.positions[row], f"score {quoted(value)} is not a number from 0 to 5"))
    refuse_unreadable_rows(table.path, table.unit, problems)
    return scores


def _from_hub(task: Task) -> dict[str, Examples]:
    import datasets

    if unreachable():
        datasets.config.HF_HUB_OFFLINE = True  # use only the cache, without waiting for the hub
    try:
        hub = datasets.load_dataset(_HUB, task.name.removeprefix("glue/"))
    except Exception as error:  # the hub's client raises a different type for each way of not reaching it
        raise PeftlabError(
            f"task {task.name}: {_HUB} could not be loaded from the hub ({type(error).__name__}: {error}); "
            f"set data.path to a directory in GLUE's TSV layout (one that holds {task.folder}/)"
        ) from error
    splits = {}
    for name, rows in hub.items():
        names = getattr(rows.features["label"], "names", None)
        if not task.regression and names != list(task.labels):
            raise PeftlabError(f"{_HUB} {name}: classes {names} where {list(task.labels)} are expected")
        texts = [list(rows[column]) for column in task.text]
        label = list(rows["label"])
        unlabelled = all(value == -1 for value in label)
        splits[name] = Examples(texts[0], texts[1] if len(texts) == 2 else None, None if unlabelled else label)
    return splits
