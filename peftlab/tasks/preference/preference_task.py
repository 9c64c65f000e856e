"""text/preference: its rows, read and held out, and what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from peftlab.rows import resolve
from peftlab.tasks.config import DataConfig
from peftlab.tasks.language.examples import Encoding, Tokens, fingerprint
from peftlab.tasks.language.language_task import held_rows, limited, read_splits, sample
from peftlab.tasks.preference.config import PreferenceObjective
from peftlab.tasks.preference.dpo import PreferenceEvaluation, collate_pairs, preference_loss
from peftlab.tasks.preference.pairs import (
    SIDES,
    Preference,
    encode_preference,
    encode_preferences,
    read_preference,
    spoken,
)
from peftlab.tasks.prepared import ModelSource, Prepared
from peftlab.tasks.table import Task
from peftlab.tasks.tokens import padding_or_end


def load_preferences(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, list[Preference]], dict[str, int]]:
    """Read ``text/preference`` from the user's files; see ``language_task.load_language``."""
    named = (data.prompt or "prompt", *SIDES)
    splits, left_out = read_splits(task, data, read_preference, lambda table, row: named)
    return task, splits, left_out


def prepare(
    task: Task,
    data: DataConfig,
    source: ModelSource,
    *,
    max_length: int,
    batch_size: int,
    objective: PreferenceObjective,
    classes: Sequence[str] | None = None,
) -> Prepared:
    """Return the task with its model; arguments as for ``labelled.prepare``, without ``classes``.

    Args:
        objective: the recipe's.
    """
    task, splits, left_out = resolve(task.load)(task, data)
    splits, left_out = limited(splits, data, left_out)
    held, tokenizer, how = held_rows(task, splits), source.tokenizer(), encoding(task, data, max_length)

    def encoded(rows: Sequence[Preference]) -> Dataset:
        found, long = encode_preferences(rows, tokenizer, how)
        for why, count in long.items():
            left_out[why] = left_out.get(why, 0) + count
        return found

    held_out: dict[str, Dataset] = {name: encoded(rows) for name, rows in held.items()}
    model, fresh = source.model("AutoModelForCausalLM", max_length)
    pad = padding_or_end(tokenizer) or 0
    evaluation = PreferenceEvaluation(held_out, pad, batch_size, objective.beta)
    answers = [(name, [s for row in rows for s in (row.chosen, row.rejected)]) for name, rows in sorted(splits.items())]
    return Prepared(
        task=task,
        tokenizer=tokenizer,
        model=model,
        fresh=fresh,
        train=partial(encoded, splits["train"]) if "train" in splits else None,
        held_out=held_out,
        collate=partial(collate_pairs, pad=pad),
        loss=partial(preference_loss, beta=objective.beta),
        denominator=lambda _: len,
        score=evaluation.score,
        refer=evaluation.refer,
        deciding="loss",
        higher_is_better=False,
        baseline=None,
        left_out=left_out,
        fingerprint=fingerprint(task.name, answers),
        auto_class="AutoModelForCausalLM",
        pipeline="text-generation",
        sample=partial(sample, tokenizer, spoken(next(iter(held.values()))[0].chosen, tokenizer)),
    )


def encoding(task: Task, data: DataConfig, max_length: int) -> Encoding:
    """Return how a pair becomes tokens: the last answer of each side is trained."""
    return Encoding(max_length, data.too_long or "drop", "last")


def examples(
    task: Task, data: DataConfig, row: Preference, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[list[tuple[str, Tokens]]]:
    """Return a row as one example of two sequences, to be shown to people."""
    pair = encode_preference(row, tokenizer, encoding(task, data, max_length))
    return [list(zip(SIDES, pair, strict=True))]
