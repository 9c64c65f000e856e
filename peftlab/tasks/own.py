"""One's own task: a table of texts and labels becomes examples, classes and a held-out split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.references import locate
from peftlab.tasks.batches import seeded_order
from peftlab.tasks.examples import Examples
from peftlab.tasks.labels import bin_classes, class_names, numbers
from peftlab.tasks.readers import Table, read_table, table_suffix
from peftlab.tasks.table import Task

_SPLIT_STEMS = {"train": "train", "validation": "validation", "dev": "validation", "test": "test"}


class DataSection(Protocol):
    """What the loaders read of a recipe's ``data`` section; its fields are described there."""

    @property
    def path(self) -> str | None: ...
    @property
    def text(self) -> Sequence[str] | None: ...
    @property
    def label(self) -> str | None: ...
    @property
    def bins(self) -> Mapping[str, tuple[float | None, float | None]] | None: ...
    @property
    def validation(self) -> int | float | None: ...
    @property
    def split_seed(self) -> int: ...
    @property
    def max_train_examples(self) -> int | None: ...


def load_own(task: Task, data: DataSection) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read ``text/classification`` or ``text/regression`` from the user's files.

    ``data.path`` is a file or a directory with ``train.*`` and ``validation.*`` (or ``dev.*``), and perhaps
    ``test.*``, whose label column may be absent. Where no validation file is, ``data.validation`` examples
    are drawn with ``data.split_seed``, stratified by class. Class names are the strings or integers of the
    training file's label column (the single file's, before splitting), surrounding blanks removed, sorted
    (numbers by value), or ``data.bins`` in the order given.

    Returns:
        The task with its ``labels`` and ``text`` filled in, the splits, and the rows left out by reason.

    Raises:
        PeftlabError: a file, column, row, label, bin or split size that cannot be used, named.
    """
    text, label = tuple(data.text or ()), data.label
    if data.path is None or not text or label is None:
        raise PeftlabError(f"task {task.name} needs data.path, data.text and data.label")
    if label in text:
        raise PeftlabError(f"data.label {label!r} is also in data.text; a model would read the answer")
    tables = _tables(data.path, data.validation)
    texts = {split: [_texts(table, name) for name in text] for split, table in tables.items()}
    labelled = {split: table for split, table in tables.items() if split != "test" or label in table.columns}
    labels, classes = _labels(task, data, label, labelled)
    splits = {split: _examples(columns, labels.get(split)) for split, columns in texts.items()}
    for split, examples in splits.items():
        if len(examples) == 0:
            raise PeftlabError(f"{tables[split].path}: no examples; every {label!r} is outside data.bins")
    outside = sum(map(len, tables.values())) - sum(map(len, splits.values()))
    if data.validation is not None:
        splits = _hold_out(splits, data.validation, data.split_seed, len(classes))
    left_out = {"outside every bin": outside} if outside else {}
    return replace(task, labels=classes, text=text), splits, left_out


def _tables(path: str, validation: float | None) -> dict[str, Table]:
    """Read the split files; validation comes from one of them or from ``data.validation``, not from both."""
    tables = {split: read_table(file) for split, file in _files(path).items()}
    if "validation" in tables and validation is not None:
        file = tables["validation"].path
        raise PeftlabError(f"data.validation is set, but {file} is the validation split already")
    if "validation" not in tables and validation is None:
        raise PeftlabError(f"{tables['train'].path}: data.validation must say how many examples to hold out")
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


def _labels(
    task: Task, data: DataSection, column: str, tables: Mapping[str, Table]
) -> tuple[Mapping[str, Sequence[float | None]], tuple[str, ...]]:
    """Return each labelled split's labels (None: outside every bin), and the class names."""
    if task.regression:
        return {split: numbers(table, column) for split, table in tables.items()}, ()
    if data.bins is not None:
        binned = {split: bin_classes(numbers(table, column), data.bins) for split, table in tables.items()}
        for place, name in enumerate(data.bins):
            if place not in binned["train"]:
                raise PeftlabError(f"data.bins: no training example of {tables['train'].path} is in bin {name!r}")
        return binned, tuple(data.bins)
    classes, columns = class_names(tables, column)
    index = {name: place for place, name in enumerate(classes)}
    return {split: [index[name] for name in names] for split, names in columns.items()}, classes


def _texts(table: Table, name: str) -> list[str]:
    values = table.column(name, "data.text")
    table.refuse(name, "is missing", [row for row, value in enumerate(values) if value is None])
    table.refuse(name, "is not text", [row for row, value in enumerate(values) if not isinstance(value, str)])
    texts = [str(value) for value in values]
    table.refuse(name, "is blank", [row for row, value in enumerate(texts) if not value.strip()])
    return texts


def _files(reference: str) -> dict[str, Path]:
    """Return the file of each split; a single file is the training split."""
    path = locate(reference, "data.path")
    if not isinstance(path, Path):
        folder = Path(path).parent
        siblings = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        raise PeftlabError(f"data.path {path!r}: no such file or directory{did_you_mean(Path(path).name, siblings)}")
    if path.is_file():
        return {"train": path}
    files: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        suffix = table_suffix(file)
        split = _SPLIT_STEMS.get(file.name[: -len(suffix)].lower()) if suffix else None
        if split is None:
            continue
        if split in files:
            raise PeftlabError(f"{path}: both {files[split].name} and {file.name} could be the {split} split")
        files[split] = file
    if "train" not in files:
        names = ", ".join(sorted(entry.name for entry in path.iterdir())) or "nothing"
        raise PeftlabError(f"{path}: no train.* file (csv, tsv, jsonl, json, parquet) in it, but {names}")
    return files


def _hold_out(splits: dict[str, Examples], validation: int | float, seed: int, n_classes: int) -> dict[str, Examples]:
    """Split the training examples into ``train`` and ``validation``."""
    everything = splits["train"]
    n = len(everything)
    if isinstance(validation, float) and validation >= 1:
        raise PeftlabError(f"data.validation {validation}: give a share below 1, or a whole number of examples")
    size = validation if isinstance(validation, int) else round(validation * n)
    if not 0 < size <= n - max(n_classes, 1):
        enough = f"one for training in each of {n_classes} classes" if n_classes else "one for training"
        raise PeftlabError(
            f"data.validation {validation}: holds out {size} of {n} examples, not at least one and {enough}"
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
