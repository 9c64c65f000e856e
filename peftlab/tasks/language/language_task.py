"""Language tasks: their rows, read and held out, and what is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from peftlab.errors import PeftlabError
from peftlab.methods.modes import eval_mode
from peftlab.rows import resolve
from peftlab.tasks.batches import seeded_order, seeded_subset
from peftlab.tasks.config import DataConfig
from peftlab.tasks.generated.contexts import make_contexts, prompt_ids, prompt_text
from peftlab.tasks.labels import bin_classes, is_missing, numbers
from peftlab.tasks.language.conversations import (
    Conversation,
    chat_columns,
    completion_columns,
    plain_columns,
    read_completion,
    read_conversation,
    read_plain,
)
from peftlab.tasks.language.examples import (
    Encoding,
    Source,
    Tokens,
    collate,
    encode,
    encode_rows,
    fingerprint,
)
from peftlab.tasks.language.likelihood import LanguageEvaluation, nll
from peftlab.tasks.language.packed import pack, packing_fault
from peftlab.tasks.prepared import Loss, ModelSource, Prepared, RowSharing
from peftlab.tasks.reading.bad_rows import Fault, refuse
from peftlab.tasks.reading.content import read_text, text_lines
from peftlab.tasks.reading.readers import Table
from peftlab.tasks.reading.splits import split_files, split_tables
from peftlab.tasks.table import Task
from peftlab.tasks.text import BEYOND, MISSING, OUTSIDE
from peftlab.tasks.tokens import padding_or_end
from peftlab.untyped import Unwrapped

_READERS: dict[str, Callable[[Table, int, DataConfig], Source]] = {
    "text/chat": read_conversation, "text/completion": read_completion, "text/plain": read_plain,
}  # fmt: skip
_COLUMNS: dict[str, Callable[[Table, int, DataConfig], tuple[str, ...] | None]] = {
    "text/chat": chat_columns, "text/completion": completion_columns, "text/plain": plain_columns,
}  # fmt: skip
RowT = TypeVar("RowT")
Named = Callable[[Table, int], Sequence[str] | None]
_ANSWER = 48  # tokens of a sample


def load_language(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, list[Source]], dict[str, int]]:
    """Read ``text/chat``, ``text/completion`` or ``text/plain`` from the user's files.

    ``data.path`` is a file or a directory as for ``text/classification``; for plain text also a ``.txt`` file, whose
    paragraphs are rows, and for completions one whose lines are ``prompt||completion``, as E2E's files are.
    ``data.validation`` rows are drawn with ``data.split_seed`` where no file has them.

    Returns:
        The task, the rows of each split, and the rows left out by reason.

    Raises:
        PeftlabError: a file, column or row that cannot be used.
    """
    named = _COLUMNS[task.name]
    splits, left_out = read_splits(task, data, _READERS[task.name], lambda table, row: named(table, row, data))
    return task, splits, left_out


def read_splits(
    task: Task, data: DataConfig, read: Callable[[Table, int, DataConfig], RowT], columns: Named
) -> tuple[dict[str, list[RowT]], dict[str, int]]:
    """Return the rows of each split as ``read`` makes them, and the number of rows left out by reason.

    Args:
        columns: table and row to the columns without whose value the row is left out, where ``data.drop_missing`` says
            so; None: it is left out in any case.
    """
    if data.path is None:
        raise PeftlabError(f"task {task.name} needs data.path")
    left_out = {MISSING: 0, OUTSIDE: 0}
    splits: dict[str, list[RowT]] = {}
    for split, table in _tables(task, data).items():
        table, dropped = _worded(table, data, columns)
        left_out = {why: left_out[why] + dropped[why] for why in left_out}
        splits[split] = [read(table, row, data) for row in range(len(table))]
    if data.validation == "all":
        splits["validation"] = splits.pop("train")
    elif data.validation is not None:
        splits = _hold_out(splits, data.validation, data.split_seed)
    return splits, {why: count for why, count in left_out.items() if count}


def prepare(
    task: Task,
    data: DataConfig,
    source: ModelSource,
    *,
    max_length: int,
    batch_size: int,
    classes: Sequence[str] | None = None,
) -> Prepared:
    """Return a language task with its model; arguments as for ``labelled.prepare``, without ``classes``."""
    task, splits, left_out = resolve(task.load)(task, data)
    splits, left_out = limited(splits, data, left_out)
    held, tokenizer, how = held_rows(task, splits), source.tokenizer(), encoding(task, data, max_length)
    held_out: dict[str, Dataset] = {}
    for name, rows in held.items():
        held_out[name], long = encode_rows(rows, tokenizer, how)
        left_out = {why: left_out.get(why, 0) + long.get(why, 0) for why in left_out | long}
    model, fresh = source.model("AutoModelForCausalLM", max_length)
    pad = padding_or_end(tokenizer) or 0
    together = partial(collate, pad=pad)
    asked = held.get("test", held.get("validation", []))  # no checkpoint is chosen by its answers
    prepared = Prepared(
        task=task,
        tokenizer=tokenizer,
        model=model,
        fresh=fresh,
        train=None,
        held_out=held_out,
        collate=together,
        loss=nll,
        denominator=_trained_tokens,
        score=LanguageEvaluation(held_out, together, batch_size).score,
        deciding="loss",
        higher_is_better=False,
        baseline=None,
        left_out=left_out,
        fingerprint=fingerprint(task.name, sorted(splits.items())),
        auto_class="AutoModelForCausalLM",
        pipeline="text-generation",
        smoothed=_smoothed,
        sharing=RowSharing(partial(pack, pad=pad), packing_fault),
        sample=partial(sample, tokenizer, next(iter(held.values()))[0]),
        contexts=partial(make_contexts, asked, tokenizer, how, data.split_seed) if task.prompted else None,
    )
    if "train" in splits:
        prepared.train = partial(_train, splits["train"], prepared, how)
    return prepared


def held_rows(task: Task, splits: Mapping[str, list[RowT]]) -> dict[str, list[RowT]]:
    """Return the splits that a model is evaluated on.

    Raises:
        PeftlabError: there is none.
    """
    held = {name: splits[name] for name in ("validation", "test") if name in splits}
    if not held:
        raise PeftlabError(f"task {task.name}: no validation split; set data.validation")
    return held


def limited(
    splits: dict[str, list[RowT]], data: DataConfig, left_out: dict[str, int]
) -> tuple[dict[str, list[RowT]], dict[str, int]]:
    """Return the splits with ``data.max_train_examples`` rows to train on, and the rows left out by reason."""
    chosen = seeded_subset(len(splits.get("train", ())), data.max_train_examples, data.split_seed)
    if chosen is None:
        return splits, left_out
    rows = splits["train"]
    return {**splits, "train": [rows[i] for i in chosen]}, {**left_out, BEYOND: len(rows) - len(chosen)}


def examples(
    task: Task, data: DataConfig, row: Source, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[list[tuple[str, Tokens]]]:
    """Return a row's examples, each as its sequences with their titles: one sequence without a title."""
    return [[("", tokens)] for tokens in encode(row, tokenizer, encoding(task, data, max_length))]


def encoding(task: Task, data: DataConfig, max_length: int) -> Encoding:
    """Return how a task's rows become tokens."""
    return Encoding(max_length, data.too_long or "drop", data.train_on or "assistant", split=task.name == "text/plain")


def _train(rows: Sequence[Source], prepared: Prepared, how: Encoding) -> Dataset:
    data, long = encode_rows(rows, prepared.tokenizer, how)
    for why, count in long.items():
        prepared.left_out[why] = prepared.left_out.get(why, 0) + count
    return data


def _smoothed(share: float) -> Loss:
    return partial(nll, label_smoothing=share)


def _trained_tokens(data: Dataset) -> Callable[[list[int]], float]:
    """Return the number of trained tokens of a global batch: what its loss is divided by, however it is split."""
    counts = list(data["trained_tokens"])
    return lambda batch: float(sum(counts[i] for i in batch))


def _tables(task: Task, data: DataConfig) -> Mapping[str, Table]:
    files = split_files(str(data.path), () if task.name == "text/chat" else (".txt",))
    documents = {split: file for split, file in files.items() if file.suffix == ".txt"}
    tables = split_tables(
        {split: file for split, file in files.items() if split not in documents}, data.validation, files
    )
    read = partial(_pairs, data=data) if task.prompted else partial(_document, data=data)
    return {**tables, **{name: read(file) for name, file in documents.items()}}


def _pairs(file: Path, data: DataConfig) -> Table:
    """Return a text file as rows: its lines, of a prompt, ``||`` and a completion."""
    pairs = [(number, *line.partition("||")) for number, line in text_lines(file) if line.strip()]
    for number, _, found, _ in pairs:
        if not found:
            raise PeftlabError(f"{file}:{number}: a line of a prompt, || and a completion has no ||")
    if not pairs:
        raise PeftlabError(f"{file}: no line in it")
    columns: dict[str, list[object]] = {
        data.prompt or "prompt": [prompt.strip() for _, prompt, _, _ in pairs],
        data.completion or "completion": [completion.strip() for *_, completion in pairs],
    }
    return Table(file, columns, [number for number, *_ in pairs])


def _document(file: Path, data: DataConfig) -> Table:
    """Return a text file as rows: its paragraphs, which are separated by empty lines."""
    name = data.text[0] if data.text else "text"
    paragraphs, line = [], 1
    for block in read_text(file).split("\n\n"):
        if block.strip():
            paragraphs.append((line, block.strip("\n")))
        line += block.count("\n") + 2
    if not paragraphs:
        raise PeftlabError(f"{file}: no text in it")
    return Table(file, {name: [text for _, text in paragraphs]}, [line for line, _ in paragraphs])


def _worded(table: Table, data: DataConfig, named: Named) -> tuple[Table, dict[str, int]]:
    """Return the rows with a word of ``data.bins`` for the number in ``data.completion``, without those in no bin.

    Rows that lack a value are left out where ``data.drop_missing`` says so.
    """
    kept, column = list(range(len(table))), data.completion
    columns = dict(table.columns)
    if data.bins is not None and column is not None:
        faults: list[Fault] = []
        values = numbers(table, column, faults)
        refuse(faults)
        places, words = bin_classes(values, data.bins), list(data.bins)
        columns[column] = [None if place is None else words[place] for place in places]
        kept = [row for row, place in enumerate(places) if place is not None]
    inside = len(kept)
    if data.drop_missing:
        worded = replace(table, columns=columns)
        found = {row: named(worded, row) for row in kept}
        kept = [
            row for row, names in found.items()
            if names is not None and not any(is_missing(columns[name][row]) for name in names if name in columns)
        ]  # fmt: skip
    if not kept:
        raise PeftlabError(f"{table.path}: no examples; every row is left out")
    left_out = {OUTSIDE: len(table) - inside, MISSING: inside - len(kept)}
    return replace(table, columns=columns).take(list(columns), kept), left_out


def _hold_out(splits: dict[str, list[RowT]], validation: int | float, seed: int) -> dict[str, list[RowT]]:
    rows = splits["train"]
    size = validation if isinstance(validation, int) else round(validation * len(rows))
    if not 0 < size < len(rows):
        raise PeftlabError(
            f"data.validation {validation}: holds out {size} of {len(rows)} examples, and leaves none to train on"
            if size
            else f"data.validation {validation}: holds out none of {len(rows)} examples"
        )
    chosen = set(seeded_order(len(rows), seed, 1)[:size])
    return {
        **splits,
        "train": [row for i, row in enumerate(rows) if i not in chosen],
        "validation": [row for i, row in enumerate(rows) if i in chosen],
    }


@torch.no_grad()
def sample(tokenizer: PreTrainedTokenizerBase, row: Source, model: nn.Module) -> str:
    """Return what a model answers, greedily, to a held-out row."""
    bare: Unwrapped = getattr(model, "module", model)
    text = prompt_text(row, tokenizer) if isinstance(row, Conversation) else row.prompt or row.completion[:40]
    ids = torch.tensor([prompt_ids(row, text, tokenizer)], device=bare.device)
    with eval_mode(bare):
        output = bare.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=_ANSWER,
            pad_token_id=padding_or_end(tokenizer),
        )  # fmt: skip
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()
