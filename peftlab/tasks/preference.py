"""``text/preference``: direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290).

The reward of an answer is β (log π − log ρ), with π the model and ρ the reference; with z the reward of the chosen less
that of the rejected answer, the loss of a pair is −log σ(z). Log-probabilities are summed over an answer's tokens.

ρ never changes, so its log-probabilities are computed once, before the first step, by the model as it is then: the base
model with a fresh adapter, or the state that ``init_from`` put there. There is never a second model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from peftlab.errors import PeftlabError
from peftlab.models.load import eval_mode
from peftlab.tasks.batches import Row, SplitRows, eval_batches, padding_or_end
from peftlab.tasks.conversations import (
    VARIABLES,
    Completion,
    Conversation,
    Message,
    as_conversation,
    question_and_answer,
    read_turns,
)
from peftlab.tasks.data import Table, is_missing, quoted
from peftlab.tasks.language import encode_splits, evaluation_splits, load_rows, read_splits, sample, token_nll
from peftlab.tasks.language_examples import (
    Encoding,
    Source,
    Tokens,
    collate,
    count_rows,
    encode,
    fingerprint,
    fit_length,
)
from peftlab.tasks.problem import ModelSource, TaskOptions, TaskProblem, mean_loss, score_batches
from peftlab.tasks.table import DataConfig, Task


def load_preferences(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, list[Preference]], dict[str, int]]:
    """Read ``text/preference`` from the user's files; see ``language.load_language``.

    Args:
        task: the table's row.
        data: the recipe's data section.
        classes: not used; the task has no classes.
    """
    splits, left_out = read_splits(task, data, read_preference, lambda table, row: _columns(table, row, data))
    return task, splits, left_out


def prepare(task: Task, data: DataConfig, source: ModelSource, options: TaskOptions) -> TaskProblem:
    """Read the pairs, load the model, and return both with the functions that train and score it.

    Args:
        task: the table's row.
        data: the recipe's data section.
        source: where the model comes from.
        options: what else the recipe says, ``options.objective`` among it.
    """
    assert options.objective is not None
    splits: dict[str, list[Preference]]
    task, splits, left_out = load_rows(task, data)
    held, tokenizer, how = evaluation_splits(task, splits), source.tokenizer(), encoding(task, data, options.max_length)
    used = {"train": splits["train"], **held} if options.train and "train" in splits else held
    encoder = partial(encode_preferences, tokenizer=tokenizer, how=how)
    train, held_out, counted = encode_splits(encoder, used, left_out)
    model, fresh = source.model("AutoModelForCausalLM", options.max_length)
    pad = padding_or_end(tokenizer) or 0
    together = partial(collate_pairs, pad=pad)
    loss = partial(preference_loss, beta=options.objective.beta)
    evaluation = PreferenceEvaluation(held_out, pad, options.batch_size, options.objective.beta)
    answers = [(name, [s for row in rows for s in (row.chosen, row.rejected)]) for name, rows in sorted(splits.items())]
    return TaskProblem(
        task=task,
        processor=tokenizer,
        model=model,
        fresh=fresh,
        train=train,
        held_out=held_out,
        collate=together,
        loss=loss,
        mean_loss=partial(mean_loss, loss, together, lambda _: len),
        denominator=len,
        score=evaluation.score,
        refer=evaluation.refer,
        deciding="loss",
        higher_is_better=False,
        left_out=left_out,
        splits=counted,
        fingerprint=fingerprint(task.name, answers),
        auto_class="AutoModelForCausalLM",
        pipeline="text-generation",
        sample=partial(sample, tokenizer, as_chat(next(iter(held.values()))[0].chosen, tokenizer), options.max_length),
    )


def encoding(task: Task, data: DataConfig, max_length: int) -> Encoding:
    """Return how a pair becomes tokens: the last answer of each side is trained.

    Args:
        task: the table's row.
        data: the recipe's data section.
        max_length: tokens of the longest example.
    """
    return Encoding(max_length, data.too_long or "drop", "last")


def examples(
    task: Task, data: DataConfig, row: Preference, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[list[tuple[str, Tokens]]]:
    """Return a row as one example of two sequences, to be shown to people; none where it is too long.

    Args:
        task: the table's row.
        data: the recipe's data section.
        row: the pair.
        tokenizer: the model's tokenizer.
        max_length: tokens of the longest example.
    """
    how = encoding(task, data, max_length)
    pair = [fit_length(tokens, row.where, how) for tokens in encode_preference(row, tokenizer, how)]
    return [[(side, tokens) for side, (tokens,) in zip(SIDES, pair, strict=True)]] if all(pair) else []


# --- Rows: a prompt with a better and a worse answer.
SIDES = ("chosen", "rejected")
_PROMPTS = ("prompt", "messages", "conversations")


def _columns(table: Table, row: int, data: DataConfig) -> tuple[str, ...]:
    """Return the columns without whose value a row is left out: whole chats contain their prompt."""
    whole = any(isinstance(table.columns[side][row], list) for side in SIDES if side in table.columns)
    return SIDES if whole else (data.prompt or "prompt", *SIDES)


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, each with the prompt before it. ``where``: file and line."""

    chosen: Source
    rejected: Source
    where: str


def read_preference(table: Table, row: int, data: DataConfig) -> Preference:
    """Return a row of ``prompt``, ``chosen`` and ``rejected``.

    An answer is a text, a turn, or a list of turns; a list that does not begin with an answer contains the whole
    conversation, and needs no prompt. ``prompt`` is a text or a list of turns, in the column that ``data.prompt``
    names, else in ``prompt``, ``messages`` or ``conversations``.

    Args:
        table: the file.
        row: index of the row, from 0.
        data: the recipe's data section.

    Raises:
        PeftlabError: a column or an answer is missing, a turn is not one, or the two answers are not to one prompt.
    """
    where, values = table.where(row), {name: column[row] for name, column in table.columns.items()}
    named = data.prompt or next((name for name in _PROMPTS if not is_missing(values.get(name))), None)
    prompt = None if named is None else table.column(named, "data.prompt")[row]
    found = {side: table.column(side, "task text/preference")[row] for side in SIDES}
    for side, answer in found.items():
        if is_missing(answer) or answer == []:
            raise PeftlabError(f"{where}: no {side} answer")
    alone = all(is_missing(values.get(name)) for name in ("system", "tools", VARIABLES))
    texts = isinstance(prompt, str) and prompt.strip() and all(isinstance(answer, str) for answer in found.values())
    if alone and texts:
        chosen, rejected = (Completion(str(prompt), str(answer), where) for answer in found.values())
        return Preference(chosen, rejected, where)
    better, worse = (_messages(prompt, answer, side, where) for side, answer in found.items())
    if better[:-1] != worse[:-1]:
        raise PeftlabError(f"{where}: chosen and rejected differ before their last answer; they need one prompt")
    return Preference(as_conversation(better, values, where), as_conversation(worse, values, where), where)


def _messages(prompt: object, answer: object, side: str, where: str) -> list[Message]:
    """Return the conversation that ends with an answer."""
    given = [answer] if isinstance(answer, Mapping) else answer
    if not isinstance(given, str | list):
        raise PeftlabError(f"{where}: {side} is neither a text nor turns, but {quoted(answer)}")
    written = read_turns(given, where) if isinstance(given, list) else []
    if written and written[-1]["role"] != "assistant":
        raise PeftlabError(f"{where}: {side} does not end with an answer, but with a turn of {written[-1]['role']}")
    if not written or written[0]["role"] == "assistant":
        if is_missing(prompt) or prompt == []:
            raise PeftlabError(f"{where}: no prompt, and {side} does not contain it")
        return question_and_answer(prompt, given, where)
    prompt_turns = read_turns(prompt, where) if isinstance(prompt, list) and prompt else []
    elsewhere = isinstance(prompt, str) and prompt.strip() not in [turn["content"].strip() for turn in written[:-1]]
    if elsewhere or written[: len(prompt_turns)] != prompt_turns:
        raise PeftlabError(f"{where}: {side} contains a whole conversation, and prompt is not a part of it")
    return written


def encode_preference(row: Preference, tokenizer: PreTrainedTokenizerBase, how: Encoding) -> list[Tokens]:
    """Return the chosen and the rejected example, whose last answers are trained.

    Texts are turns of a chat where the model has a chat template, else a text and what follows it.

    Args:
        row: the pair.
        tokenizer: the model's tokenizer.
        how: how rows become tokens.

    Raises:
        PeftlabError: the two are equal, or one of them cannot be formatted.
    """
    found = [encode(as_chat(answer, tokenizer), tokenizer, how)[0] for answer in (row.chosen, row.rejected)]
    if found[0].input_ids == found[1].input_ids:
        raise PeftlabError(f"{row.where}: chosen and rejected are the same answer")
    return found


def as_chat(source: Source, tokenizer: PreTrainedTokenizerBase) -> Source:
    """Return a text and its answer as a chat, where the tokenizer has a template for one.

    Args:
        source: a conversation or a completion.
        tokenizer: the model's tokenizer.
    """
    if isinstance(source, Conversation) or not getattr(tokenizer, "chat_template", None):
        return source
    return Conversation(question_and_answer(source.prompt, source.completion, source.where), source.where)


def encode_preferences(
    rows: Sequence[Preference], tokenizer: PreTrainedTokenizerBase, how: Encoding
) -> tuple[Dataset, SplitRows]:
    """Return the examples of ``rows``, and how many there are, were left out (a side is too long) and truncated.

    Args:
        rows: the pairs.
        tokenizer: the model's tokenizer.
        how: how rows become tokens.

    Returns:
        For each side columns ``SIDE_ids`` and ``SIDE_trained`` (one per token); ``tokens``, those of both sides, and
        ``length``, those with both sides padded to the longer one.

    Raises:
        PeftlabError: as ``encode_preference``, or every row is too long; file and line are named.
    """
    from datasets import Dataset

    kept: list[list[Tokens]] = []
    whole: list[int] = []
    for row in rows:
        pair = encode_preference(row, tokenizer, how)
        whole.append(max(len(tokens.input_ids) for tokens in pair))
        sides = [fit_length(tokens, row.where, how) for tokens in pair]
        if all(sides):
            kept.append([tokens for (tokens,) in sides])
    counted = count_rows(len(kept), len(rows) - len(kept), whole, how)
    counts = [[len(tokens.input_ids) for tokens in sides] for sides in kept]
    columns: dict[str, list[object]] = {
        "tokens": [sum(each) for each in counts],
        "length": [len(each) * max(each) for each in counts],
    }
    for place, side in enumerate(SIDES):
        columns[f"{side}_ids"] = [sides[place].input_ids for sides in kept]
        columns[f"{side}_trained"] = [sides[place].trained for sides in kept]
    return Dataset.from_dict(columns), counted


# --- The loss and the scores.
REFERENCE = "reference"
"""The column with the reference's log-probabilities of the chosen and the rejected answer."""


def collate_pairs(rows: Sequence[Row], *, pad: int) -> dict[str, Tensor]:
    """Return b pairs as one batch of 2b sequences: all that were chosen, then all that were rejected.

    ``reference`` [2b] is absent as long as the rows do not have it.

    Args:
        rows: tokenised pairs.
        pad: the id that fills the batch.
    """
    sides = [{"input_ids": row[f"{s}_ids"], "trained": row[f"{s}_trained"]} for s in SIDES for row in rows]
    inputs = collate(sides, pad=pad)
    if REFERENCE in rows[0]:
        inputs[REFERENCE] = torch.tensor([row[REFERENCE] for row in rows]).T.flatten()
    return inputs


def answer_log_probs(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return log p(answer | what comes before it) of each sequence, [2b], in fp32: the sum over its trained tokens.

    Args:
        model: a causal language model, wrapped by accelerate or not.
        inputs: a batch of ``collate_pairs``, [2b, longest].
    """
    counts = inputs["trained"][:, 1:].sum(1).tolist()
    inputs = {key: value for key, value in inputs.items() if key != REFERENCE}
    return -torch.stack([part.sum() for part in token_nll(model, inputs).split(counts)])


def preference_loss(model: nn.Module, inputs: Mapping[str, Tensor], *, beta: float) -> Tensor:
    """Return Σ −log σ(z) over the pairs of a batch of ``collate_pairs``.

    Args:
        model: the model that is trained.
        inputs: a batch of ``collate_pairs`` with ``reference``.
        beta: how strongly the reward weighs the distance to the reference.
    """
    rewards = beta * (answer_log_probs(model, inputs) - inputs[REFERENCE])
    chosen, rejected = rewards.chunk(2)
    return -F.logsigmoid(chosen - rejected).sum()


@dataclass(frozen=True)
class PreferenceEvaluation:
    """The held-out pairs, and how a model is scored on them.

    Attributes:
        splits: tokenised pairs by split name; they are scored once they have a column ``reference``.
        pad: the id that fills batches.
        batch_size: pairs per batch and process.
    """

    splits: Mapping[str, Dataset]
    pad: int
    batch_size: int
    beta: float

    def score(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Return by split the mean ``loss``, and the accuracy, margin and mean of each side of the rewards.

        Accuracy is the share of pairs with z > 0, margin the mean of z. Every process must call it, and each gets
        the same result.
        """
        scores = {}
        for split, data in self.splits.items():
            reference = torch.tensor(list(data[REFERENCE]), dtype=torch.float64)
            chosen, rejected = (self.beta * (self.log_probs(model, data) - reference)).unbind(1)
            margin = chosen - rejected
            means = {
                "loss": -F.logsigmoid(margin), "reward_accuracy": (margin > 0).double(), "reward_margin": margin,
                "chosen_reward": chosen, "rejected_reward": rejected,
            }  # fmt: skip
            scores[split] = {name: float(values.mean()) for name, values in means.items()}
        return scores

    def refer(self, model: nn.Module, data: Dataset) -> Dataset:
        """Return pairs with the log-probabilities of ``model`` as ``reference``; every process must call it.

        Args:
            model: the reference model.
            data: tokenised pairs.
        """
        with eval_mode(model):
            return data.add_column(REFERENCE, self.log_probs(model, data).tolist())

    def log_probs(self, model: nn.Module, data: Dataset) -> Tensor:
        """Return the log-probabilities of both answers, [n, 2] in fp64, in the order of ``data``.

        Args:
            model: a causal language model.
            data: tokenised pairs.
        """
        batches = eval_batches(data["length"], self.batch_size)
        together = partial(collate_pairs, pad=self.pad)
        found = score_batches(data, batches, together, lambda inputs: answer_log_probs(model, inputs).tolist())
        result = torch.empty(len(data), 2, dtype=torch.float64)
        for batch, values in zip(batches, found, strict=True):
            result[batch] = torch.tensor(values, dtype=torch.float64).view(2, -1).T
        return result
