"""Tasks over the user's files: a table of texts and labels becomes examples, classes and a held-out split."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.references import locate
from peftlab.tasks.batches import seeded_order
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labelled_texts import Examples
from peftlab.tasks.labels import (
    as_written,
    bin_classes,
    class_indices,
    is_missing,
    names,
    numbers,
    sorted_classes,
)
from peftlab.tasks.reading.bad_rows import Fault, listed, refuse
from peftlab.tasks.reading.content import is_unicode
from peftlab.tasks.reading.readers import Table, read_table, table_suffix
from peftlab.tasks.table import Task

MISSING = "text or label missing"  # reasons for leaving rows out
OUTSIDE = "outside every bin"
BEYOND = "beyond data.max_train_examples"
_ABSENT = "is missing"
_SPLIT_STEMS = {
    "train": "train", "validation": "validation", "valid": "validation", "dev": "validation", "test": "test",
}  # fmt: skip


def load_text_task(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read ``text/classification`` or ``text/regression`` from the user's files.

    ``data.path`` is a file or a directory with ``train.*`` and ``validation.*`` (``valid.*``, ``dev.*``), and perhaps
    ``test.*``, whose label column may be absent. Without a validation file, ``data.validation`` examples are drawn
    with ``data.split_seed``, stratified by class, or all are the validation split. Class names are the strings or
    integers of the training file's label column (the single file's, before splitting), surrounding blanks removed,
    sorted (numbers by value), or ``data.bins`` in the order given.

    Args:
        task: the table's row.
        data: the recipe's data section.
        classes: a trained model's class names in label order; the files may lack some of them but contain no others.

    Returns:
        The task with its ``labels`` and ``text`` filled in, the splits, and the rows left out by reason.

    Raises:
        PeftlabError: a file, column, row, label, bin or split size that cannot be used; all bad rows are listed
            together.
    """
    text, label = tuple(data.text or ()), data.label
    if data.path is None or not text or label is None:
        raise PeftlabError(f"task {task.name} needs data.path, data.text and data.label")
    if label in text:
        raise PeftlabError(f"data.label {label!r} is also in data.text; a model would read the answer")
    files = split_files(data.path)
    tables = split_tables(files, data.validation, files)
    needed = {
        split: dict.fromkeys(text, "data.text")
        | ({label: "data.label"} if split != "test" or label in table.columns else {})
        for split, table in tables.items()
    }
    faults: list[Fault] = []
    tables, dropped = _without_missing(tables, needed, data.drop_missing, faults)
    texts = {split: [_texts(table, name, faults) for name in text] for split, table in tables.items()}
    labelled = {split: table for split, table in tables.items() if label in needed[split]}
    labels, classes = _labels(task, data, label, labelled, classes, faults)
    splits = {split: _examples(columns, labels.get(split)) for split, columns in texts.items()}
    for split, examples in splits.items():
        if len(examples) == 0:
            raise PeftlabError(f"{tables[split].path}: no examples; every {label!r} is outside data.bins")
    outside = sum(map(len, tables.values())) - sum(map(len, splits.values()))
    if data.validation == "all":
        splits["validation"] = splits.pop("train")
    elif data.validation is not None:
        splits = _hold_out(splits, data.validation, data.split_seed, len(classes))
    left_out = {MISSING: dropped, OUTSIDE: outside}
    return replace(task, labels=tuple(classes), text=text), splits, {why: n for why, n in left_out.items() if n}


def split_tables(
    files: Mapping[str, Path], validation: float | str | None, all_files: Mapping[str, Path]
) -> dict[str, Table]:
    """Read the split files; validation comes from one of ``all_files`` or from ``data.validation``, not from both."""
    if "validation" in all_files and validation is not None:
        raise PeftlabError(f"data.validation is set, but {all_files['validation']} is the validation split already")
    if "validation" not in all_files and validation is None:
        raise PeftlabError(f"{all_files['train']}: data.validation must say how many examples to hold out, or all")
    tables = {split: read_table(file) for split, file in files.items()}
    for table in tables.values():
        if len(table) == 0:
            raise PeftlabError(f"{table.path}: no examples")
    return tables


def _examples(texts: list[list[str]], labels: Sequence[float | None] | None) -> Examples:
    """Put columns together, without the rows whose label is None."""
    examples = Examples(texts[0], texts[1] if len(texts) == 2 else None, None)
    if labels is None:
        return examples
    kept = examples.take(row for row, label in enumerate(labels) if label is not None)
    return replace(kept, label=[label for label in labels if label is not None])


def _without_missing(
    tables: Mapping[str, Table], needed: Mapping[str, Mapping[str, str]], drop: bool, faults: list[Fault]
) -> tuple[dict[str, Table], int]:
    """Return the needed columns, and how many rows without a text or label were left out of them.

    Args:
        needed: of each split, its columns and the recipe key that names them.
        drop: leave such rows out; else they are added to ``faults`` and stay.
    """
    kept: dict[str, Table] = {}
    for split, table in tables.items():
        bad: set[int] = set()
        for name, key in needed[split].items():
            missing = [row for row, value in enumerate(table.column(name, key)) if is_missing(value)]
            bad.update(missing)
            faults += [] if drop else table.fault(name, _ABSENT, missing)
        rows = [row for row in range(len(table)) if not drop or row not in bad]
        if not rows:
            raise PeftlabError(f"{table.path}: no examples; every row lacks a text or label")
        kept[split] = table.take(list(needed[split]), rows)
    return kept, sum(map(len, tables.values())) - sum(map(len, kept.values()))


def _labels(
    task: Task,
    data: DataConfig,
    column: str,
    tables: Mapping[str, Table],
    known: Sequence[str] | None,
    faults: list[Fault],
) -> tuple[Mapping[str, Sequence[float | None]], Sequence[str]]:
    """Return each labelled split's labels (None: outside every bin), and the class names; first refuse ``faults``."""
    if task.regression or data.bins is not None:
        values = {split: numbers(table, column, faults) for split, table in tables.items()}
        _refuse(faults)
        return (values, ()) if data.bins is None else _binned(values, data.bins, tables, known)
    spelled = {split: names(table, column, faults) for split, table in tables.items()}
    _refuse(faults)
    if known is None:
        classes = sorted_classes(tables["train"], column, spelled["train"])
        return class_indices(tables, column, spelled, classes, "the training data"), classes
    classes = as_written(known, chain.from_iterable(spelled.values()))
    return class_indices(tables, column, spelled, classes, "the model"), classes


def _refuse(faults: Sequence[Fault]) -> None:
    absent = any(fault.problem == _ABSENT for fault in faults)
    refuse(faults, "data.drop_missing: true leaves out the rows without a text or label" if absent else "")


def _binned(
    values: Mapping[str, Sequence[float]],
    bins: Mapping[str, tuple[float | None, float | None]],
    tables: Mapping[str, Table],
    known: Sequence[str] | None,
) -> tuple[dict[str, list[int | None]], Sequence[str]]:
    """Return each split's places in ``known``, or in ``bins`` where no model has named its classes yet."""
    if known is not None and set(known) != set(bins):
        raise PeftlabError(f"data.bins makes the classes {listed(bins, 50)}; the model's are {listed(known, 50)}")
    binned = {split: bin_classes(numbers, bins) for split, numbers in values.items()}
    if known is not None:
        places = [known.index(name) for name in bins]
        return {s: [None if p is None else places[p] for p in found] for s, found in binned.items()}, known
    for place, name in enumerate(bins):
        if place not in binned["train"]:
            raise PeftlabError(f"data.bins: no training example of {tables['train'].path} is in bin {name!r}")
    return binned, tuple(bins)


def _texts(table: Table, name: str, faults: list[Fault]) -> list[str]:
    """Return a column of texts; what is there and no text is added to ``faults``."""
    values = table.column(name, "data.text")
    bad = [row for row, value in enumerate(values) if not isinstance(value, str) and not is_missing(value)]
    faults += table.fault(name, "is not text", bad)
    broken = [row for row, value in enumerate(values) if isinstance(value, str) and not is_unicode(value)]
    faults += table.fault(name, "is not valid Unicode (half a surrogate pair)", broken)
    return [str(value) for value in values]


def split_files(reference: str, more: tuple[str, ...] = ()) -> dict[str, Path]:
    """Return the file of each split; a single file is the training split.

    Args:
        more: suffixes beside those of tables.
    """
    path = locate(reference, "data.path")
    if not isinstance(path, Path):
        folder = Path(path).parent
        siblings = [entry.name for entry in _entries(folder)] if os.path.isdir(folder) else []
        raise PeftlabError(f"data.path {path!r}: no such file or directory{did_you_mean(Path(path).name, siblings)}")
    if not path.is_dir():
        return {"train": path}
    files: dict[str, Path] = {}
    for file in _entries(path):
        suffix = table_suffix(file) or next((s for s in more if file.name.endswith(s)), None)
        split = _SPLIT_STEMS.get(file.name[: -len(suffix)].lower()) if suffix else None
        if split is None:
            continue
        if split in files:
            raise PeftlabError(f"{path}: both {files[split].name} and {file.name} could be the {split} split")
        files[split] = file
    if "train" not in files:
        there = listed(entry.name for entry in _entries(path)) if _entries(path) else "nothing"
        raise PeftlabError(f"{path}: no train.* file (csv, tsv, jsonl, json, parquet) in it, but {there}")
    return files


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        raise PeftlabError(f"{directory}: cannot be read ({error})") from None


def _hold_out(splits: dict[str, Examples], validation: int | float, seed: int, n_classes: int) -> dict[str, Examples]:
    """Split the training examples into ``train`` and ``validation``."""
    everything = splits["train"]
    n = len(everything)
    size = validation if isinstance(validation, int) else round(validation * n)
    if not 0 < size <= n - max(n_classes, 1):
        enough = f"one for training in each of {n_classes} classes" if n_classes else "one for training"
        raise PeftlabError(
            f"data.validation {validation}: holds out {size} of {n} examples, not at least one and {enough}; "
            "to score a whole file, set data.validation=all"
        )
    strata = [0] * n if not n_classes else [int(value) for value in everything.label or ()]
    chosen = set(stratified(strata, size, seed))
    train = everything.take(row for row in range(n) if row not in chosen)
    return {**splits, "train": train, "validation": everything.take(sorted(chosen))}


def stratified(classes: Sequence[int], size: int, seed: int) -> list[int]:
    """Draw exactly ``size`` rows so that each class has its share, never all rows of a class.

    Class ``c`` of ``n_c`` of ``n`` rows gets ``size * n_c / n`` of them, rounded down; what is left over goes
    to the largest remainders (the lower class where equal).

    Args:
        classes: class of each row.
        size: rows to draw, at most ``n`` less the number of classes.
        seed: the draw depends on it, ``classes`` and ``size`` alone.
    """
    members: dict[int, list[int]] = {}
    for row in seeded_order(len(classes), seed, 1):
        members.setdefault(classes[row], []).append(row)
    quota = {c: size * len(rows) // len(classes) for c, rows in members.items()}
    by_remainder = sorted(members, key=lambda c: (-(size * len(members[c]) % len(classes)), c))
    missing = size - sum(quota.values())
    while missing:
        for c in by_remainder:
            if missing and quota[c] < len(members[c]) - 1:
                quota[c] += 1
                missing -= 1
    return [row for c in sorted(members) for row in members[c][: quota[c]]]
