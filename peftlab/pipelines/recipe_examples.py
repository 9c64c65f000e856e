"""Examples of a recipe's task, for people and as a model's inputs, without loading the model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING

from datasets import Dataset
from torch import Tensor

from peftlab.errors import PeftlabError
from peftlab.models.pretrained import load_tokenizer
from peftlab.recipe.schema import FinetuneRecipe, Recipe
from peftlab.registry import resolve
from peftlab.tasks.answers import Answers
from peftlab.tasks.labelled_rows import load_task_data
from peftlab.tasks.language_examples import Tokens, collate
from peftlab.tasks.table import find_task
from peftlab.tasks.tokens import model_inputs, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Sequences = list[tuple[str, Tokens]]
"""A language task's example: sequences with their titles."""


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
    tokenizer = _tokenizer(recipe)
    if find_task(recipe.task).labelled:
        answers, rows = _labelled(recipe, tokenizer, count, evaluated=False)
        labels = rows["label"] if "label" in rows.column_names else [None] * len(rows)
        return [
            Shown(f"example {number}", [Part(*part) for part in answers.shown(row, label, tokenizer)])
            for number, (row, label) in enumerate(zip(rows, labels, strict=True), start=1)
        ]
    return [
        Shown(", ".join(filter(None, (f"example {number}", title))), _parts(tokens, tokenizer))
        for number, sequences in enumerate(_language(recipe, tokenizer, count, evaluated=False), start=1)
        for title, tokens in sequences
    ]


def example_inputs(recipe: FinetuneRecipe, count: int) -> dict[str, Tensor]:
    """Return the first ``count`` examples of the first evaluation split as one batch without labels.

    Raises:
        PeftlabError: data or tokenizer cannot be used.
    """
    tokenizer = _tokenizer(recipe)
    if find_task(recipe.task).labelled:
        answers, rows = _labelled(recipe, tokenizer, count, evaluated=True)
        return model_inputs(answers.collate(tokenizer)(list(rows)))
    longest = recipe.train.max_length
    sequences = chain.from_iterable(_language(recipe, tokenizer, count, evaluated=True))
    cut = [{"input_ids": t.input_ids[:longest], "trained": t.trained[:longest]} for _, t in sequences]
    return model_inputs(collate(cut[:count], pad=tokenizer.pad_token_id or 0))


def _tokenizer(recipe: FinetuneRecipe) -> PreTrainedTokenizerBase:
    return load_tokenizer(recipe.model, revision=recipe.revision, trust_remote_code=recipe.trust_remote_code)


def _labelled(
    recipe: FinetuneRecipe, tokenizer: PreTrainedTokenizerBase, count: int, *, evaluated: bool
) -> tuple[Answers, Dataset]:
    """Return the answers of a labelled task, and its first rows tokenised: to train on, or to evaluate on."""
    data = load_task_data(recipe.task, recipe.data)
    answers: Answers = resolve(data.task.answers)(data.task)
    rows = data.splits[_split(list(data.splits), data.task.evaluation if evaluated else ())]
    rows = rows.select(range(min(count, len(rows))))
    return answers, tokenise(rows, tokenizer, recipe.train.max_length, answers.encode)


def _language(
    recipe: FinetuneRecipe, tokenizer: PreTrainedTokenizerBase, count: int, *, evaluated: bool
) -> list[Sequences]:
    """Return the first examples of a task without labels: to train on, or to evaluate on."""
    task = find_task(recipe.task)
    _, splits, _ = resolve(task.load)(task, recipe.data)
    rows = splits[_split(list(splits), ("validation", "test") if evaluated else ())]
    examples = resolve(task.examples)
    found = (examples(task, recipe.data, row, tokenizer, recipe.train.max_length) for row in rows)
    return list(islice(chain.from_iterable(found), count))


def _split(there: Sequence[str], wanted: Sequence[str]) -> str:
    """Return the first split that is wanted, or else that there is."""
    return next((split for split in wanted if split in there), there[0])


def _parts(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> list[Part]:
    pairs = zip(tokens.input_ids, tokens.trained, strict=True)
    return [
        Part(str(tokenizer.decode([token for token, _ in group])), trained)
        for trained, group in groupby(pairs, key=lambda pair: pair[1])
    ]
