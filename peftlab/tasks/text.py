"""Tasks over the user's files: a table of texts and labels becomes examples, classes and a held-out split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from peftlab.errors import PeftlabError
from peftlab.rows import resolve
from peftlab.tasks.batches import seeded_order
from peftlab.tasks.columns import Columns
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labelled_texts import Examples
from peftlab.tasks.labels import (
    bin_classes,
    is_missing,
    names,
    numbers,
    placed_sets,
)
from peftlab.tasks.reading.bad_rows import Fault, listed, refuse
from peftlab.tasks.reading.content import is_unicode
from peftlab.tasks.reading.readers import Table
from peftlab.tasks.reading.splits import split_files, split_tables
from peftlab.tasks.table import Task

MISSING = "text or label missing"  # reasons for leaving rows out
OUTSIDE = "outside every bin"
BEYOND = "beyond data.max_train_examples"
_ABSENT = "is missing"


def load_text_task(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read ``text/classification`` or ``text/regression`` from the user's files, as ``load_own`` does.

    Class names are the strings or integers of the training file's label column (the single file's, before splitting),
    surrounding blanks removed, sorted (numbers by value), or ``data.bins`` in the order given. Held-out examples are
    stratified by class.

    Args:
        task, data: as for ``load_own``.
        classes: a trained model's class names in label order; the files may lack some of them but contain no others.
    """
    text, label = tuple(data.text or ()), data.label
    if not text or label is None:
        raise PeftlabError(f"task {task.name} needs data.text and data.label")

    def read(tables: Mapping[str, Table], faults: list[Fault]) -> tuple[dict[str, Examples], Sequence[str]]:
        columns = {split: [texts(table, name, faults) for name in text] for split, table in tables.items()}
        labelled = {split: table for split, table in tables.items() if label in table.columns}
        labels, class_names = _labels(task, data, label, labelled, classes, faults)
        splits = {split: _examples(found, labels.get(split)) for split, found in columns.items()}
        for split, examples in splits.items():
            if len(examples) == 0:
                raise PeftlabError(f"{tables[split].path}: no examples; every {label!r} is outside data.bins")
        return splits, class_names

    return load_own(task, data, read)


Read = Callable[[Mapping[str, Table], list[Fault]], tuple[dict[str, Examples], Sequence[str]]]
"""The needed columns of each split, and what is wrong so far, to the splits' examples and the class names; it raises
what is wrong, with what it finds itself."""


def load_own(task: Task, data: DataConfig, read: Read) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read a labelled task from the user's files.

    ``data.path`` is a file or a directory with ``train.*`` and ``validation.*`` (``valid.*``, ``dev.*``), and perhaps
    ``test.*``, whose label column may be absent. Without a validation file, ``data.validation`` examples are drawn
    with ``data.split_seed``, or all are the validation split.

    Args:
        task: the table's row. data: the recipe's data section.

    Returns:
        The task with its ``labels`` and ``text`` filled in, the splits, and the rows left out by reason.

    Raises:
        PeftlabError: a file, column, row, label, bin or split size that cannot be used; all bad rows are listed
            together.
    """
    if data.path is None:
        raise PeftlabError(f"task {task.name} needs data.path")
    files = split_files(data.path)
    whole = split_tables(files, data.validation, files)
    columns: Columns = resolve(task.columns)(data, whole["train"].columns)
    needed = {split: columns.needed(split, table) for split, table in whole.items()}
    faults: list[Fault] = []
    tables, dropped = _without_missing(whole, needed, data.drop_missing, faults)
    splits, classes = read(tables, faults)
    outside = sum(map(len, tables.values())) - sum(map(len, splits.values()))
    if data.validation == "all":
        splits["validation"] = splits.pop("train")
    elif data.validation is not None:
        splits = _hold_out(splits, data.validation, data.split_seed)
    left_out = {MISSING: dropped, OUTSIDE: outside}
    task = replace(task, labels=tuple(classes), text=tuple(columns.inputs))
    return task, splits, {why: n for why, n in left_out.items() if n}


def _examples(columns: list[list[str]], labels: Sequence[float | None] | None) -> Examples:
    """Put columns together, without the rows whose label is None."""
    examples = Examples(columns[0], columns[1] if len(columns) == 2 else None, None)
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
        refuse_all(faults)
        return (values, ()) if data.bins is None else _binned(values, data.bins, tables, known)
    spelled = {split: names(table, column, faults) for split, table in tables.items()}
    refuse_all(faults)
    sets = {split: [[name] for name in found] for split, found in spelled.items()}
    placed, classes = placed_sets(tables, column, sets, known)
    return {split: [places[0] for places in rows] for split, rows in placed.items()}, classes


def refuse_all(faults: Sequence[Fault]) -> None:
    """Raise ``PeftlabError`` with every fault, if there is any."""
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


def texts(table: Table, name: str, faults: list[Fault]) -> list[str]:
    """Return a column of texts; what is there and no text is added to ``faults``."""
    values = table.column(name, "data.text")
    bad = [row for row, value in enumerate(values) if not isinstance(value, str) and not is_missing(value)]
    faults += table.fault(name, "is not text", bad)
    broken = [row for row, value in enumerate(values) if isinstance(value, str) and not is_unicode(value)]
    faults += table.fault(name, "is not valid Unicode (half a surrogate pair)", broken)
    return [str(value) for value in values]


def _hold_out(splits: dict[str, Examples], validation: int | float, seed: int) -> dict[str, Examples]:
    """Split the training examples into ``train`` and ``validation``, stratified where each has one class."""
    everything = splits["train"]
    n, labels = len(everything), everything.label or ()
    strata = [label if isinstance(label, int) else 0 for label in labels] or [0] * n
    n_classes = len(set(strata))
    size = validation if isinstance(validation, int) else round(validation * n)
    if not 0 < size <= n - n_classes:
        enough = f"one for training in each of {n_classes} classes" if n_classes > 1 else "one for training"
        raise PeftlabError(
            f"data.validation {validation}: holds out {size} of {n} examples, not at least one and {enough}; "
            "to score a whole file, set data.validation=all"
        )
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
