"""Examples of a recipe's task as the model reads them, without loading the model's weights."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError
from peftlab.models.pretrained import load_tokenizer
from peftlab.recipe.schema import FinetuneRecipe, Recipe
from peftlab.rows import resolve
from peftlab.tasks.labelled.answers.base import Answers
from peftlab.tasks.labelled.data import load_task_data
from peftlab.tasks.language.examples import Tokens
from peftlab.tasks.table import find_task
from peftlab.tasks.tokens import tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Part:
    """A part of an example: its text, special tokens included, and whether it is trained."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Shown:
    """A sequence of tokens: a title, and the sequence in parts."""

    title: str
    parts: list[Part]


def show_examples(recipe: Recipe, count: int) -> list[Shown]:
    """Return the sequences of the first ``count`` training examples; a label is a trained part after the text.

    Raises:
        PeftlabError: data or tokenizer cannot be used, or the recipe is not of kind finetune.
    """
    if not isinstance(recipe, FinetuneRecipe):
        raise PeftlabError(f"--show: a recipe of kind {recipe.kind} has no examples of a task; finetune recipes have")
    tokenizer = load_tokenizer(recipe.model, revision=recipe.revision, trust_remote_code=recipe.trust_remote_code)
    task = find_task(recipe.task)
    if task.labelled:
        return _labelled(recipe, tokenizer, count)
    _, splits, _ = resolve(task.load)(task, recipe.data)
    rows = next(iter(splits.values()))[:count]
    examples = resolve(task.examples)
    found: list[list[tuple[str, Tokens]]] = [
        each for row in rows for each in examples(task, recipe.data, row, tokenizer, recipe.train.max_length)
    ]
    return [
        Shown(", ".join(filter(None, (f"example {number}", title))), _parts(tokens, tokenizer))
        for number, sequences in enumerate(found[:count], start=1)
        for title, tokens in sequences
    ]


def _parts(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> list[Part]:
    pairs = zip(tokens.input_ids, tokens.trained, strict=True)
    return [
        Part(str(tokenizer.decode([token for token, _ in group])), trained)
        for trained, group in groupby(pairs, key=lambda pair: pair[1])
    ]


def _labelled(recipe: FinetuneRecipe, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Shown]:
    data = load_task_data(recipe.task, recipe.data)
    answers: Answers = resolve(data.task.answers)(data.task)
    rows = next(iter(data.splits.values()))
    rows = rows.select(range(min(count, len(rows))))
    labels = rows["label"] if "label" in rows.column_names else [None] * len(rows)
    tokenised = zip(tokenise(rows, tokenizer, recipe.train.max_length, answers.encode), labels, strict=True)
    return [
        Shown(f"example {number}", [Part(*part) for part in answers.shown(row, label, tokenizer)])
        for number, (row, label) in enumerate(tokenised, start=1)
    ]
