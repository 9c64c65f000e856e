"""Labelled examples in memory: from the columns of the user's files, or GLUE's, to texts, classes and splits."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError
from peftlab.registry import resolve
from peftlab.tasks.batches import seeded_order, seeded_subset
from peftlab.tasks.data import (
    Columns,
    Fault,
    Table,
    bin_classes,
    class_names_in_data,
    is_missing,
    is_unicode,
    items,
    label_indices,
    listed,
    names,
    numbers,
    quoted,
    refuse,
    split_files,
    split_tables,
)
from peftlab.tasks.table import DataConfig, Task, find_task

if TYPE_CHECKING:
    from datasets import Dataset, List, Value


MISSING = "text or label missing"  # reasons for leaving rows out
OUTSIDE = "outside every bin"
BEYOND = "beyond data.max_train_examples"
ABSENT = "is missing"


@dataclass(frozen=True)
class Examples:
    """One split.

    Attributes:
        text: the sentence, or the first of a pair; the words of a sentence whose words have tags; what comes before
            choices; the path of an image.
        text_pair: the second of a pair; a row's choices; None where the task has single sentences.
        label: what the model is to answer: the class index, the number, the indices of a row's classes or of its
            words' tags, or the place of the right choice; None where the split is unlabelled.
    """

    text: Sequence[str] | Sequence[list[str]]
    text_pair: Sequence[str] | Sequence[list[str]] | None
    label: Sequence[float] | Sequence[list[int]] | None

    def __len__(self) -> int:
        return len(self.text)

    def take(self, rows: Iterable[int]) -> Examples:
        """Return the examples at ``rows``, in that order."""
        rows = list(rows)
        columns = {name: values and [values[row] for row in rows] for name, values in vars(self).items()}
        return type(self)(**columns)

    def contents(self) -> Iterable[tuple[object, ...]]:
        """Yield what each row contains, equal on every machine: texts and label."""
        pairs = repeat(None) if self.text_pair is None else self.text_pair
        labels = repeat(None) if self.label is None else self.label
        return zip(self.text, pairs, labels, strict=False)

    def dataset(self) -> Dataset:
        """Return the examples as an in-memory dataset: ``text``, ``text_pair`` and ``label`` where they exist."""
        from datasets import Dataset, Features

        columns = {"text": self.text, "text_pair": self.text_pair, "label": self.label}
        there = {name: values for name, values in columns.items() if values is not None}
        return Dataset.from_dict(
            there, features=Features({name: _column_type(values) for name, values in there.items()})
        )


def _column_type(values: Sequence[object]) -> Value | List:
    """Return the type of a column by its values: texts, whole numbers (64 bits) or numbers, or lists of one of them."""
    from datasets import List, Value

    lists = [value for value in values if isinstance(value, list)]
    if lists:
        return List(_column_type([item for value in lists for item in value[:1]]))
    kinds = {str: "string", float: "float64"}
    return Value(next((kinds[type(value)] for value in values if type(value) in kinds), "int64"))


def fingerprint(task: Task, splits: Mapping[str, Examples]) -> str:
    """Return the SHA-256 (hexadecimal) of a task's name, its classes and every row in order.

    It depends on the content alone, so the same rows give the same value on every machine and from every file
    format.

    Args:
        task: its name and classes are read.
        splits: examples by split.
    """
    digest = hashlib.sha256(json.dumps([task.name, task.labels]).encode())
    for name in sorted(splits):
        digest.update(json.dumps([name, len(splits[name])]).encode())
        for row in splits[name].contents():
            digest.update(json.dumps(row).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class TaskData:
    """A task and its examples.

    Attributes:
        task: the table's row; for a ``text/`` task with ``labels`` and ``text`` filled in.
        splits: split name (``train``, ``task.evaluation``, ``test...``) to examples with the columns
            ``text``, for pairs ``text_pair``, and ``label`` (see ``Examples``). An
            unlabelled split has no ``label`` column; a split that the source lacks is absent.
        fingerprint: SHA-256 of the rows used, equal on every machine.
        left_out: reason to the number of rows of the source that are in no split.
    """

    task: Task
    splits: dict[str, Dataset]
    fingerprint: str
    left_out: dict[str, int]


def load_task_data(name: str, data: DataConfig, classes: Sequence[str] | None = None) -> TaskData:
    """Load the examples of a task.

    GLUE comes from the hub, or from ``data.path`` in the benchmark's TSV layout; a ``text/`` task from the
    files at ``data.path`` (formats: ``peftlab.tasks.data``). With ``data.max_train_examples`` that many
    training rows are drawn with ``data.split_seed``, in file order; the classes stay those of all rows.

    Args:
        name: the task, as in ``peftlab.tasks.table``.
        data: the recipe's data section.
        classes: a trained model's class names in label order: labels are read as these. None: the task's own, or
            those of the training file.

    Raises:
        PeftlabError: an unknown task, labels that are none of ``classes``, or anything wrong with the data, named by
            file and line, row or column.
    """
    task = find_task(name)
    task, splits, left_out = resolve(task.load)(task, data, classes)
    chosen = seeded_subset(len(splits.get("train", ())), data.max_train_examples, data.split_seed)
    if chosen is not None:
        left_out = {**left_out, BEYOND: len(splits["train"]) - len(chosen)}
        splits["train"] = splits["train"].take(chosen)
    datasets = {split: examples.dataset() for split, examples in splits.items()}
    return TaskData(task, datasets, fingerprint(task, splits), left_out)


# --- ``text/classification``, ``text/regression``, and what all tasks on the user's files have in common.
def load_text_task(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read ``text/classification`` or ``text/regression`` from the user's files, as ``load_own`` does.

    Class names are the strings or integers of the training file's label column (the single file's, before splitting),
    surrounding blanks removed, sorted (numbers by value), or ``data.bins`` in the order given. Held-out examples are
    stratified by class.

    Args:
        task: the table's row.
        data: the recipe's data section.
        classes: a trained model's class names in label order; the files may lack some of them but contain no others.
    """

    def read(
        tables: Mapping[str, Table], columns: Columns, faults: list[Fault]
    ) -> tuple[dict[str, Examples], Sequence[str]]:
        (label,) = columns.labels
        splits = _unlabelled_examples(tables, list(columns.inputs), faults)
        labelled = {split: table for split, table in tables.items() if label in table.columns}
        labels, class_names = _read_labels(task, data, label, labelled, classes, faults)
        for split, found in labels.items():
            kept = splits[split].take(row for row, value in enumerate(found) if value is not None)
            if len(kept) == 0:
                raise PeftlabError(f"{tables[split].path}: no examples; every {label!r} is outside data.bins")
            splits[split] = replace(kept, label=[value for value in found if value is not None])
        return splits, class_names

    return load_own(task, data, read)


Read = Callable[[Mapping[str, Table], Columns, list[Fault]], tuple[dict[str, Examples], Sequence[str]]]
"""A function of the needed columns of each split, what they are called, and the faults found so far to the splits'
examples and the class names. It adds the faults that it finds itself, and raises ``PeftlabError`` if there are any."""


def load_own(task: Task, data: DataConfig, read: Read) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read a labelled task from the user's files.

    ``data.path`` is a file or a directory with ``train.*`` and ``validation.*`` (``val.*``, ``dev.*``), and perhaps
    ``test.*``, whose label column may be absent. Without a validation file, ``data.validation`` examples are drawn
    with ``data.split_seed``, or all are the validation split.

    Args:
        task: the table's row.
        data: the recipe's data section.
        read: function from the tables by split, their columns, and a list that receives faults, to the examples by
            split and the class names.

    Returns:
        The task with its ``labels`` and ``text`` filled in, the splits, and the rows left out by reason.

    Raises:
        PeftlabError: a file, column, row, label, bin or split size that cannot be used; all bad rows are listed
            together.
    """
    if data.path is None:
        raise PeftlabError(f"task {task.name} needs data.path")
    files = split_files(data.path, images=task.image)
    whole = split_tables(files, data.validation, files)
    columns: Columns = resolve(task.columns)(data, whole["train"].columns)
    needed = {split: columns.needed(split, table) for split, table in whole.items()}
    faults: list[Fault] = []
    tables, dropped = _drop_missing(whole, needed, data.drop_missing, faults)
    splits, classes = read(tables, columns, faults)
    outside = sum(map(len, tables.values())) - sum(map(len, splits.values()))
    if data.validation == "all":
        splits["validation"] = splits.pop("train")
    elif data.validation is not None:
        splits = _hold_out(splits, data.validation, data.split_seed, next(iter(columns.labels)))
    left_out = {MISSING: dropped, OUTSIDE: outside}
    task = replace(task, labels=tuple(classes), text=tuple(columns.inputs), found=columns.found)
    return task, splits, {why: n for why, n in left_out.items() if n}


def _drop_missing(
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
            faults += [] if drop else table.fault(name, ABSENT, missing)
        rows = [row for row in range(len(table)) if not drop or row not in bad]
        if not rows:
            raise PeftlabError(f"{table.path}: no examples; every row lacks a text or label")
        kept[split] = table.take(list(needed[split]), rows)
    return kept, sum(map(len, tables.values())) - sum(map(len, kept.values()))


def _read_labels(
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
        refuse_faulty_rows(faults)
        return (values, ()) if data.bins is None else _bin_indices(values, data.bins, tables, known)
    spelled = {split: names(table, column, faults) for split, table in tables.items()}
    refuse_faulty_rows(faults)
    sets = {split: [[name] for name in found] for split, found in spelled.items()}
    placed, classes = label_indices(tables, column, sets, known)
    return {split: [places[0] for places in rows] for split, rows in placed.items()}, classes


def refuse_faulty_rows(faults: Sequence[Fault]) -> None:
    """Raise ``PeftlabError`` with every fault, if there is any."""
    absent = any(fault.problem == ABSENT for fault in faults)
    refuse(faults, "data.drop_missing: true leaves out the rows without a text or label" if absent else "")


def _bin_indices(
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


def _unlabelled_examples(tables: Mapping[str, Table], names: Sequence[str], faults: list[Fault]) -> dict[str, Examples]:
    """Return each split's texts, or pairs of texts, from the columns ``names``."""
    columns = {split: [texts(table, name, faults) for name in names] for split, table in tables.items()}
    return {s: Examples(found[0], found[1] if len(found) == 2 else None, None) for s, found in columns.items()}


def texts(table: Table, name: str, faults: list[Fault]) -> list[str]:
    """Return a column of texts; values that are no text are added to ``faults``.

    Args:
        table: the file.
        name: the column.
        faults: receives what is wrong.
    """
    values = table.column(name, "data.text")
    bad = [row for row, value in enumerate(values) if not isinstance(value, str) and not is_missing(value)]
    faults += table.fault(name, "is not text", bad)
    broken = [row for row, value in enumerate(values) if isinstance(value, str) and not is_unicode(value)]
    faults += table.fault(name, "is not valid Unicode (half a surrogate pair)", broken)
    return [str(value) for value in values]


def _hold_out(splits: dict[str, Examples], validation: int | float, seed: int, label: str) -> dict[str, Examples]:
    """Split the training examples into ``train`` and ``validation``, stratified where each has one class.

    Args:
        splits: with a ``train`` split.
        validation: ``data.validation``, a number or a share.
        seed: ``data.split_seed``.
        label: the column of the labels, for messages.
    """
    everything = splits["train"]
    n, labels = len(everything), everything.label or ()
    strata = [label if isinstance(label, int) else 0 for label in labels] or [0] * n
    n_classes = len(set(strata))
    size = validation if isinstance(validation, int) else round(validation * n)
    if not 0 < size <= n - n_classes:
        if size == 0:
            fault = f"none of {n} examples"
        elif size >= n:
            fault = f"{size} of {n} examples, and leaves none to train on; for peftlab eval of a whole file, set all"
        else:
            fault = (
                f"{size} of {n} examples; the {n - size} others are fewer than the {n_classes} classes: is {label!r} "
                "the column of the classes (data.label)?"
            )
        raise PeftlabError(f"data.validation {validation}: holds out {fault}")
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
    while missing:  # several passes, where small classes are capped at all rows but one
        for c in by_remainder:
            if missing and quota[c] < len(members[c]) - 1:
                quota[c] += 1
                missing -= 1
    return [row for c in sorted(members) for row in members[c][: quota[c]]]


# --- ``text/multilabel``: texts with any number of classes each.
_BINARY = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


def load_label_sets(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read ``text/multilabel`` from the user's files, as ``load_own`` does.

    The labels of a row are a list, or a text with ``data.separator`` between them, in the column ``data.label``; or
    those of the columns ``data.labels`` that say 1, where 0 in all of them is a row without a label.

    Args:
        task: the table's row.
        data: the recipe's data section.
        classes: a trained model's class names in label order; the files may lack some of them but contain no others.
    """

    def read(
        tables: Mapping[str, Table], columns: Columns, faults: list[Fault]
    ) -> tuple[dict[str, Examples], Sequence[str]]:
        splits = _unlabelled_examples(tables, list(columns.inputs), faults)
        if data.labels is not None:
            labels, names = _labels_of_columns(tables, data.labels, classes, faults)
        else:
            (label,) = columns.labels
            labels, names = _labels_of_lists(tables, label, data.separator, classes, faults)
        return {split: replace(found, label=labels.get(split)) for split, found in splits.items()}, names

    return load_own(task, data, read)


def _labels_of_lists(
    tables: Mapping[str, Table], column: str, separator: str | None, known: Sequence[str] | None, faults: list[Fault]
) -> tuple[dict[str, list[list[int]]], Sequence[str]]:
    """Return the indices of each row's classes, and the class names, from one column."""
    labelled = {split: table for split, table in tables.items() if column in table.columns}
    spelled = {split: _label_lists(table, column, separator, faults) for split, table in labelled.items()}
    refuse_faulty_rows(faults)
    found, classes = label_indices(labelled, column, spelled, known)
    return {split: [sorted(set(places)) for places in rows] for split, rows in found.items()}, classes


def _label_lists(table: Table, column: str, separator: str | None, faults: list[Fault]) -> list[list[str]]:
    """Return a column's lists of labels; other values, and empty lists, are added to ``faults``."""
    values = table.column(column, "data.label")
    texts = [row for row, value in enumerate(values) if isinstance(value, str) and not value.lstrip().startswith("[")]
    if separator is None and texts:
        problem = f"contains texts, {quoted(values[texts[0]])}; data.separator says what separates the labels; they are"
        faults += table.fault(column, problem, [row for row in texts if not is_missing(values[row])])
        return []
    found = [None if is_missing(value) else items(value, separator) for value in values]
    bad = [row for row, labels in enumerate(found) if labels is None and not is_missing(values[row])]
    faults += table.fault(column, f"is no list of labels ({quoted(values[bad[0]])})" if bad else "", bad)
    none = [row for row, labels in enumerate(found) if labels == []]
    faults += table.fault(column, "is an empty list of labels (say so by columns of 0 and 1, data.labels)", none)
    return [labels or [] for labels in found]


def _labels_of_columns(
    tables: Mapping[str, Table], columns: Sequence[str], known: Sequence[str] | None, faults: list[Fault]
) -> tuple[dict[str, list[list[int]]], Sequence[str]]:
    """Return the indices of each row's classes, and the class names, from a column of 0 and 1 for each class."""
    classes = tuple(columns if known is None else class_names_in_data(known, columns))
    if set(classes) != set(columns):
        raise PeftlabError(f"data.labels are {listed(columns, 50)}; the model's classes are {listed(classes, 50)}")
    labelled = {split: table for split, table in tables.items() if columns[0] in table.columns}
    said = {split: [_binary_labels(table, name, faults) for name in columns] for split, table in labelled.items()}
    refuse_faulty_rows(faults)
    places = [classes.index(name) for name in columns]
    found = {}
    for split, by_column in said.items():
        rows = zip(*by_column, strict=True)
        found[split] = [sorted(place for place, yes in zip(places, row, strict=True) if yes) for row in rows]
    return found, classes


def _binary_labels(table: Table, column: str, faults: list[Fault]) -> list[bool]:
    """Return for each row of a column whether it contains 1; values other than 1 and 0 are added to ``faults``."""
    values = table.column(column, "data.labels")
    found = [_BINARY.get(str(value).strip().lower()) for value in values]
    bad = [row for row, yes in enumerate(found) if yes is None and not is_missing(values[row])]
    faults += table.fault(column, f"is neither 0 nor 1 but {quoted(values[bad[0]])}" if bad else "", bad)
    return [bool(yes) for yes in found]


# --- ``text/tokens``: sentences in words, each with a tag.
def load_tagged_words(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read ``text/tokens`` from the user's files, as ``load_own`` does.

    Words and tags are lists, of equal length in each row; a text is split at blanks. Tags like ``B-PER`` and ``O`` are
    those of entities (see ``entities``); others, such as parts of speech, are scored by accuracy.

    Args:
        task: the table's row.
        data: the recipe's data section.
        classes: a trained model's tags in label order; the files may lack some of them but contain no others.
    """

    def read(
        tables: Mapping[str, Table], columns: Columns, faults: list[Fault]
    ) -> tuple[dict[str, Examples], Sequence[str]]:
        (words_in,), (tags_in,) = columns.inputs, columns.labels
        words = {split: _list_column(table, words_in, "words", faults) for split, table in tables.items()}
        labelled = {split: table for split, table in tables.items() if tags_in in table.columns}
        spelled = {split: _list_column(table, tags_in, "tags", faults) for split, table in labelled.items()}
        scheme = is_entity_scheme(set(chain.from_iterable(chain.from_iterable(spelled.values()))))
        for split, table in labelled.items():
            rows = list(zip(words[split], spelled[split], strict=True))
            # A row without words or tags ([], or [""] where the value is missing) is at fault already.
            readable = [([] not in pair and [""] not in pair) for pair in rows]
            bad = [i for i, (one, other) in enumerate(rows) if readable[i] and len(one) != len(other)]
            if bad:
                first = f"{len(rows[bad[0]][1])} tags for {len(rows[bad[0]][0])} words"
                faults += table.fault(tags_in, f"has not one tag for each word ({first})", bad)
            odd = {i: tag for i, (_, tags) in enumerate(rows) for tag in reversed(tags) if tag and not entity_tag(tag)}
            if scheme and odd:
                problem = f"has the tag {quoted(next(iter(odd.values())))}, which is neither O nor like B-PER,"
                faults += table.fault(tags_in, problem, list(odd))
        refuse_faulty_rows(faults)
        found, tags = label_indices(labelled, tags_in, spelled, classes)
        return {split: Examples(words[split], None, found.get(split)) for split in tables}, tags

    task, splits, left_out = load_own(task, data, read)
    return with_tag_metrics(task), splits, left_out


def with_tag_metrics(task: Task) -> Task:
    """Return the task with the metrics that its tags have: those of entities, or accuracy alone."""
    return task if is_entity_scheme(task.labels) else replace(task, metrics=("accuracy",))


def _list_column(table: Table, column: str, what: str, faults: list[Fault]) -> list[list[str]]:
    """Return a column's lists; other values, and empty lists, are added to ``faults``."""
    values = table.column(column, "data.text")
    found = [[""] if is_missing(value) else items(value) for value in values]
    bad = [row for row, texts in enumerate(found) if not texts]
    faults += table.fault(column, f"is no list of {what} ({quoted(values[bad[0]])})" if bad else "", bad)
    return [texts or [] for texts in found]


# --- Entities in a sequence of tags, as conlleval and seqeval count them.
# A tag is O (outside) or a prefix and a type: B-PER, I-PER. One rule reads all the usual schemes (IOB1, IOB2, IOE,
# IOBES, BILOU): a word continues the entity of the word before it if its prefix is I or E (L), that of the word before
# it is B or I, and both have one type; any other tag but O begins an entity.
NO_ENTITY = "O"
Entity = tuple[str, int, int]
"""Type, first and last word."""
_TAG = re.compile(r"([BIESLU])(?:-(.*))?", re.DOTALL)
_SAME = {"L": "E", "U": "S"}  # BILOU's letters, and IOBES's


def entity_tag(tag: str) -> bool:
    """Return whether a tag is ``O`` or like ``B-PER`` (or ``B``, where there is one type)."""
    return tag == NO_ENTITY or _TAG.fullmatch(tag) is not None


def is_entity_scheme(tags: Collection[str]) -> bool:
    """Return whether a set of tags is one of entities: it contains ``O``, and one like ``B-PER`` or no other kind."""
    return NO_ENTITY in tags and (any("-" in tag and entity_tag(tag) for tag in tags) or all(map(entity_tag, tags)))


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence whose words have ``tags``, in order."""
    found: list[Entity] = []
    before = ("", "")
    for place, tag in enumerate(tags):
        prefix, kind = now = _split_tag(tag)
        if prefix in "IE" and before[0] in ("B", "I") and before[1] == kind:
            found[-1] = (kind, found[-1][1], place)
        elif tag != NO_ENTITY:
            found.append((kind, place, place))
        before = now
    return found


def _split_tag(tag: str) -> tuple[str, str]:
    matched = _TAG.fullmatch(tag)
    if matched is None:
        return NO_ENTITY, ""
    return _SAME.get(matched[1], matched[1]), matched[2] or "_"


# --- ``text/choice``: rows with choices of their own, one of which is right.
CHOICES = "choices"
MIN_CHOICES = 2


def load_choices(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read ``text/choice`` from the user's files, as ``load_own`` does.

    The choices of a row are a list in one column (in csv its JSON text, or lines), or one in each of several columns.
    The label is the right one's place, from 0, or its text. Texts before the choices are joined by a blank.

    Args:
        task: the table's row.
        data: the recipe's data section.
        classes: not used; a row has choices of its own.
    """

    def read(
        tables: Mapping[str, Table], columns: Columns, faults: list[Fault]
    ) -> tuple[dict[str, Examples], Sequence[str]]:
        (label,) = columns.labels
        splits = {}
        for split, table in tables.items():
            choices = row_choices(table, data.choices, faults)
            before = [name for name in table.columns if name not in (label, *(data.choices or [CHOICES]))]
            places = _label_places(table, label, choices, faults) if label in table.columns else None
            splits[split] = Examples(context_texts(table, before, faults), choices, places)
        refuse_faulty_rows(faults)
        return splits, ()

    return load_own(task, data, read)


def context_texts(table: Table, names: Sequence[str], faults: list[Fault]) -> list[str]:
    """Return each row's text before its choices: the columns' texts joined by a blank; empty without a column.

    Args:
        table: the file.
        names: the columns.
        faults: receives what is wrong.
    """
    columns = [texts(table, name, faults) for name in names]
    return [" ".join(row) for row in zip(*columns, strict=True)] if columns else [""] * len(table)


def row_choices(table: Table, names: Sequence[str] | None, faults: list[Fault]) -> list[list[str]]:
    """Return each row's choices, at least two; rows without are added to ``faults``.

    Args:
        table: the file.
        names: one column of lists, or the columns of a choice each; None: ``choices``.
        faults: receives what is wrong.
    """
    names = names or [CHOICES]
    columns = [table.column(name, "data.choices") for name in names]
    if len(columns) == 1:
        found = [[] if is_missing(value) else items(value, "\n") for value in columns[0]]
    else:
        found = [items(row) for row in zip(*columns, strict=True)]
    first = columns[0]
    missing = {row for values in columns for row, value in enumerate(values) if is_missing(value)}
    bad = [row for row, choices in enumerate(found) if choices is None and row not in missing]
    faults += table.fault(names[0], f"is no list of texts ({quoted(first[bad[0]])})" if bad else "", bad)
    few = [row for row, each in enumerate(found) if each is not None and len(each) < MIN_CHOICES and row not in missing]
    faults += table.fault(names[0], "has fewer than two choices", few)
    return [choices or [] for choices in found]


def _label_places(table: Table, column: str, choices: list[list[str]], faults: list[Fault]) -> list[int]:
    """Return the place of each row's right choice: labels are places if all are whole numbers, else texts.

    Texts that are numbers are read as what they can be, and refused where they can be both.
    """
    values = table.column(column, "data.label")
    numbers = [_whole_number(value) for value in values]
    places = [n if n is not None and 0 <= n < len(row) else None for n, row in zip(numbers, choices, strict=True)]
    texts = [row.index(str(value)) if str(value) in row else None for value, row in zip(values, choices, strict=True)]
    given = [row for row, value in enumerate(values) if choices[row] and not is_missing(value)]
    all_numbers = all(n is not None or is_missing(value) for n, value in zip(numbers, values, strict=True))
    if all_numbers and all(isinstance(values[row], str) and texts[row] is not None for row in given):
        both = [row for row in given if places[row] is not None and places[row] != texts[row]]
        if both and all(places[row] is not None for row in given):
            why = f"is {quoted(values[both[0]])}, the place of one choice and the text of another"
            faults += table.fault(column, f"{why} (write places from 0 as numbers in jsonl, or other texts)", both)
        all_numbers = False
    found = places if all_numbers else texts
    bad = [r for r, place in enumerate(found) if place is None and choices[r] and not is_missing(values[r])]
    if bad:
        n, value = len(choices[bad[0]]), quoted(values[bad[0]])
        problem = f"is {value}, neither the place (0 to {n - 1}) nor the text of one of the row's {n} choices,"
        faults += table.fault(column, problem, bad)
    return [place or 0 for place in found]


def _whole_number(value: object) -> int | None:
    try:
        return None if isinstance(value, bool) else int(str(value).strip().removesuffix(".0"))
    except ValueError:
        return None
