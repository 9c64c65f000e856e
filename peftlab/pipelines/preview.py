"""Shows the data and the parameters that a recipe would train, before it runs: ``validate --deep`` and ``--show``.

Labels are read, the method's targets are found on the meta device, and examples are tokenised; no weights are loaded.
What stops a run before its first step is refused by the functions that the run calls.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

from datasets import Dataset
from torch import Tensor

from peftlab.errors import PeftlabError
from peftlab.files import is_url
from peftlab.models.load import empty_model, language_model_class, load_config
from peftlab.pipelines.inspect import Inspection, inspect_model
from peftlab.recipe.load import runs_of
from peftlab.recipe.schema import FinetuneRecipe, Recipe, injected_method
from peftlab.registry import resolve
from peftlab.remote import local_place
from peftlab.reporting.facts import data_lines
from peftlab.tasks.batches import SplitRows, model_inputs, split_rows
from peftlab.tasks.data import tables_read
from peftlab.tasks.images import collate_chat
from peftlab.tasks.labelled import Answers, class_counts, repeated_rows
from peftlab.tasks.labelled_rows import load_task_data
from peftlab.tasks.language import evaluation_splits, load_rows, processor_for
from peftlab.tasks.language_examples import Source, Tokens, collate, tokenizer_of
from peftlab.tasks.problem import ModelSource, refuse_no_training
from peftlab.tasks.table import find_task
from peftlab.untyped import Processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FLOAT = 4  # bytes of a number in fp32
_MOMENTS = 2  # numbers that AdamW stores for each trained parameter


@dataclass(frozen=True)
class CheckedData:
    """The data of a task, after all rows were read.

    Attributes:
        columns: those that a row is read from, as the task or the recipe names them; empty where they are recognised
            row by row.
        rows: split name to its number of rows.
        classes: class name to its number of rows by split; empty without classes.
        left_out: reason to the number of rows that are in no split.
        splits: labelled tasks: split to its rows that ``max_length`` truncates; empty for others.
        max_length: ``train.max_length``.
        repeated: evaluation split to the number of its rows whose text a training row has too, where there are any.
    """

    task: str
    columns: list[str]
    rows: dict[str, int]
    classes: dict[str, dict[str, int]]
    left_out: dict[str, int]
    repeated: dict[str, int]
    splits: dict[str, SplitRows]
    max_length: int


@dataclass(frozen=True)
class CheckedMethod:
    """The parameters that a method trains in the model of a task."""

    task: str
    method: str
    found: Inspection


@dataclass(frozen=True)
class DeepCheck:
    """The result of ``peftlab validate --deep`` for a recipe, or for all cells of a table.

    Attributes:
        data, methods: one entry for each that differs.
        directory: where the checkpoints, adapters and merged models of all runs are written.
        needed_bytes: the space that these take on the disk.
        free_bytes: the space that is free there.
    """

    data: list[CheckedData]
    methods: list[CheckedMethod]
    directory: str
    needed_bytes: int
    free_bytes: int


def deep_check(recipe: Recipe) -> DeepCheck:
    """Read all labels, find the method's targets on the meta device, and compare the space of the disk.

    Raises:
        PeftlabError: anything that would stop the run; or the recipe is of drafts.
    """
    runs = [run for run in runs_of(recipe) if isinstance(run, FinetuneRecipe)]
    if not runs:
        raise PeftlabError(f"--deep: a recipe of kind {recipe.kind} has no labels or targets to check; others have")
    data = {_data_key(each): each for each in runs}
    methods = {(each.task, repr(each.method)): each for each in runs}
    read = {key: _read_data(each) for key, each in data.items()}
    for each in {(each.task, each.train.max_length): each for each in runs}.values():
        _refuse_too_long(each, read[_data_key(each)])
    found = {key: _inspect_method(each, read[_data_key(each)]) for key, each in methods.items()}
    needed = sum(_needed_bytes(each, found[each.task, repr(each.method)]) for each in runs)
    checked = DeepCheck(
        data=list(read.values()),
        methods=[CheckedMethod(each.task, each.method.name, found[key]) for key, each in methods.items()],
        directory=recipe.output_dir,
        needed_bytes=needed,
        free_bytes=_free_bytes(recipe.output_dir),
    )
    if needed > checked.free_bytes:
        raise PeftlabError(f"output_dir: {_space_line(checked)}")
    return checked


def _data_key(recipe: FinetuneRecipe) -> tuple[object, ...]:
    """Return what the counts of a run's rows depend on."""
    return recipe.task, repr(recipe.data), recipe.model, recipe.revision, recipe.train.max_length


def deep_lines(checked: DeepCheck) -> list[str]:
    """Return the lines that are printed of a check: data, methods, disk space."""
    lines = [line for data in checked.data for line in _data_lines(data)]
    return [*lines, *(_target_line(each) for each in checked.methods), _space_line(checked)]


def _read_data(recipe: FinetuneRecipe) -> CheckedData:
    task = find_task(recipe.task)
    columns = [*task.text, *(["label"] if task.labelled else [])]
    if not task.glue and recipe.data.path is not None:
        tables = tables_read(task, recipe.data)
        columns = list(tables["train"][1]) if "train" in tables else []
    if not task.labelled:
        rows: dict[str, list[object]]
        _, rows, left_out = load_rows(task, recipe.data)
        refuse_no_training(task.name, len(rows.get("train", ())), recipe.data.validation)
        evaluation_splits(task, rows)
        _first_sequences(recipe, rows, "train", 1)  # the tokenizer has a chat template, if one is needed
        sizes, longest = {split: len(each) for split, each in rows.items()}, recipe.train.max_length
        return CheckedData(task.name, columns, sizes, {}, left_out, {}, {}, longest)
    data, longest = load_task_data(recipe.task, recipe.data), recipe.train.max_length
    refuse_no_training(task.name, len(data.splits.get("train", ())), recipe.data.validation)
    answers: Answers = resolve(task.answers)(data.task)
    processor = answers.processor(_source(recipe))
    used = {split: rows for split, rows in data.splits.items() if split == "train" or "label" in rows.column_names}
    return CheckedData(
        task=task.name,
        columns=columns,
        rows={split: len(rows) for split, rows in data.splits.items()},
        classes=class_counts(answers, data.splits),
        left_out=data.left_out,
        repeated=repeated_rows(data.task, data.splits),
        splits={split: split_rows(answers.tokens(rows, processor, longest), longest) for split, rows in used.items()},
        max_length=longest,
    )


def _refuse_too_long(recipe: FinetuneRecipe, data: CheckedData) -> None:
    """Raise ``PeftlabError`` if the model has positions for fewer than ``train.max_length`` tokens."""
    task, source = find_task(recipe.task), replace(_source(recipe), load=_load_empty)
    if task.labelled:
        answers: Answers = resolve(task.answers)(replace(task, labels=tuple(data.classes)))
        source.model(answers.auto_class, recipe.train.max_length, answers.head())
    else:
        config = load_config(recipe.model, revision=recipe.revision, trust_remote_code=recipe.trust_remote_code)
        source.model(language_model_class(config), recipe.train.max_length)


def _load_empty(
    reference: str, auto_class: str, *, revision: str | None, trust_remote_code: bool, **options: object
) -> tuple[PreTrainedModel, list[str]]:
    """Return what ``load_base`` does, on the meta device."""
    config = load_config(reference, revision=revision, trust_remote_code=trust_remote_code)
    return empty_model(auto_class, config, trust_remote_code=trust_remote_code), []


def _inspect_method(recipe: FinetuneRecipe, data: CheckedData) -> Inspection:
    """Return what the method trains in the model with the head that the data's classes need."""
    task, method = find_task(recipe.task), injected_method(recipe.method, recipe.train)
    fields = method.model_dump(exclude={"name"})
    if not task.labelled:
        return inspect_model(recipe.model, method.name, fields)
    answers: Answers = resolve(task.answers)(replace(task, labels=tuple(data.classes)))
    return inspect_model(recipe.model, method.name, fields, answers.auto_class, head=answers.head())


def _free_bytes(directory: str) -> int:
    """Return the bytes that are free where a directory is or would be made."""
    own = (local_place(directory, "runs") if is_url(directory) else Path(directory)).absolute()
    place = next(p for p in (own, *own.parents) if os.path.isdir(p))
    return shutil.disk_usage(place).free


def _data_lines(data: CheckedData) -> list[str]:
    """Return the sizes of the splits, and the lines on the data that a run prints before it trains."""
    listed = ", ".join(f"{split} {size:,}" for split, size in data.rows.items())
    columns = f" (columns: {', '.join(data.columns)})" if data.columns else ""
    about = data_lines(data.classes, data.left_out, data.repeated, data.splits, data.max_length)
    return [f"data of {data.task}: {listed}{columns}", *about]


def _target_line(checked: CheckedMethod) -> str:
    found = checked.found
    targets = ", ".join(
        f"{pattern} ({count})" for pattern, count in {**found.matches, **found.trained_in_place}.items()
    )
    parameters = f"{found.trainable:,} of {found.total:,} parameters"
    return f"method {checked.method} trains {parameters} of {found.architecture}: {targets or 'the task head'}"


def _space_line(checked: DeepCheck) -> str:
    needed, free = f"{checked.needed_bytes / 2**20:,.1f} MB", f"{checked.free_bytes / 2**20:,.0f} MB"
    return f"checkpoints and models need {needed} in {checked.directory}; {free} are free"


def _needed_bytes(recipe: FinetuneRecipe, found: Inspection) -> int:
    """Return the bytes of a run: checkpoints kept, the best and one being written; adapter; merged model."""
    checkpoints = recipe.train.keep_checkpoints + 2
    trained = found.trainable * _FLOAT * (checkpoints * (1 + _MOMENTS) + 1)
    return trained + (found.total * _FLOAT if found.folds and recipe.merge is not False else 0)


Sequences = list[tuple[str, Tokens]]
"""A language task's example: sequences with their titles."""


@dataclass(frozen=True)
class Part:
    """A part of an example: its text, special tokens included, and whether it is trained."""

    text: str
    trained: bool


@dataclass(frozen=True)
class ShownSequence:
    """A sequence of tokens: a title, and the sequence in parts."""

    title: str
    parts: list[Part]


def show_examples(recipe: Recipe, count: int) -> list[ShownSequence]:
    """Return the sequences of the first ``count`` training examples; a label is a trained part after the text.

    Args:
        recipe: of kind finetune.
        count: rows to show.

    Raises:
        PeftlabError: data or tokenizer cannot be used, or the recipe is not of kind finetune.
    """
    if not isinstance(recipe, FinetuneRecipe):
        raise PeftlabError(f"--show: a recipe of kind {recipe.kind} has no examples of a task; finetune recipes have")
    if find_task(recipe.task).labelled:
        answers, processor, rows = _labelled(recipe, count, evaluated=False)
        labels = rows["label"] if "label" in rows.column_names else [None] * len(rows)
        return [
            ShownSequence(f"example {number}", [Part(*part) for part in answers.shown(row, label, processor)])
            for number, (row, label) in enumerate(zip(rows, labels, strict=True), start=1)
        ]
    processor, found = _language(recipe, count, evaluated=False)
    return [
        ShownSequence(", ".join(filter(None, (f"example {number}", title))), _parts(tokens, tokenizer_of(processor)))
        for number, sequences in enumerate(found, start=1)
        for title, tokens in sequences
    ]


def example_inputs(recipe: FinetuneRecipe, count: int) -> dict[str, Tensor]:
    """Return the first ``count`` examples of the first evaluation split as one batch without labels.

    Args:
        recipe: the task, its data and the tokenizer's model.
        count: rows at most.

    Raises:
        PeftlabError: data or tokenizer cannot be used.
    """
    if find_task(recipe.task).labelled:
        answers, processor, rows = _labelled(recipe, count, evaluated=True)
        return model_inputs(answers.collate(processor)(list(rows)))
    longest = recipe.train.max_length
    processor, found = _language(recipe, count, evaluated=True)
    sequences = chain.from_iterable(found)
    if any(tokens.images for example in found for _, tokens in example):
        fitting = [vars(tokens) for _, tokens in sequences if len(tokens.input_ids) <= longest]
        return model_inputs(collate_chat(processor, fitting[:count]))
    tokenizer = tokenizer_of(processor)
    cut = [{"input_ids": t.input_ids[:longest], "trained": t.trained[:longest]} for _, t in sequences]
    return model_inputs(collate(cut[:count], pad=tokenizer.pad_token_id or 0))


def _source(recipe: FinetuneRecipe) -> ModelSource:
    return ModelSource(recipe.model, recipe.revision, recipe.trust_remote_code)


def _labelled(recipe: FinetuneRecipe, count: int, *, evaluated: bool) -> tuple[Answers, Processor, Dataset]:
    """Return the answers of a labelled task, the tokenizer or image processor, and the first rows' tokens: to train
    on, or to evaluate on."""
    data = load_task_data(recipe.task, recipe.data)
    answers: Answers = resolve(data.task.answers)(data.task)
    rows = data.splits[_split(list(data.splits), data.task.evaluation if evaluated else ())]
    rows = rows.select(range(min(count, len(rows))))
    processor = answers.processor(_source(recipe))
    return answers, processor, answers.tokens(rows, processor, recipe.train.max_length)


def _language(recipe: FinetuneRecipe, count: int, *, evaluated: bool) -> tuple[Processor, list[Sequences]]:
    """Return the tokenizer or processor, and the first examples of a task without labels: to train on, or to evaluate
    on."""
    splits: dict[str, list[Source]]
    _, splits, _ = load_rows(find_task(recipe.task), recipe.data)
    return _first_sequences(recipe, splits, _split(list(splits), ("validation", "test") if evaluated else ()), count)


def _first_sequences(
    recipe: FinetuneRecipe, splits: Mapping[str, Sequence[object]], split: str, count: int
) -> tuple[Processor, list[Sequences]]:
    """Return the tokenizer or processor, and the first examples of a split.

    Args:
        recipe: of a task without labels.
        splits: its rows.
        split: the one to read.
        count: examples at most.
    """
    task = find_task(recipe.task)
    examples = resolve(task.examples)
    processor, _ = processor_for(_source(recipe), splits)
    found = (examples(task, recipe.data, row, processor, recipe.train.max_length) for row in splits[split])
    return processor, list(islice(chain.from_iterable(found), count))


def _split(there: Sequence[str], wanted: Sequence[str]) -> str:
    """Return the first split that is wanted, or else that there is."""
    return next((split for split in wanted if split in there), there[0])


def _parts(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> list[Part]:
    image = {place: label for first, end, label in tokens.filled for place in range(first, end)}
    places = groupby(range(len(tokens.input_ids)), key=lambda place: (image.get(place), tokens.trained[place]))
    return [
        Part(label or str(tokenizer.decode([tokens.input_ids[place] for place in group])), trained)
        for (label, trained), group in places
    ]
