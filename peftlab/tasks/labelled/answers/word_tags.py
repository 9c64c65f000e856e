"""A tag for each word of a sentence: ``text/tokens``."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import cast

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from peftlab.errors import PeftlabError
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labelled.analysis import (
    Analysis,
    ClassScores,
    class_scores,
    confusion_of,
    hard_example,
    largest,
    scores_by_class,
    softmax,
)
from peftlab.tasks.labelled.answers.base import Answers, Array, Predictions
from peftlab.tasks.labelled_texts import Examples
from peftlab.tasks.labels import items
from peftlab.tasks.own.schemes import OUTSIDE, entities, of_entities
from peftlab.tasks.reading.bad_rows import refuse
from peftlab.tasks.reading.readers import Table
from peftlab.tasks.tokens import Batch, Collate, Row

Tags = Sequence[Sequence[int]]
_NO_TOKEN, _NO_WORD = -1, -2  # in ``first``: a word that was cut off or has no token; padding
_IGNORED = -100


def encode_words(batch: Batch, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list[object]]:
    """Return the tokens of sentences, their words joined by blanks, and ``first``: each word's first token.

    A word that was cut off at ``max_length``, or of which the tokenizer makes no token, has -1.
    """
    if not tokenizer.is_fast:
        raise PeftlabError(f"text/tokens: {type(tokenizer).__name__} does not say which token belongs to which word")
    sentences = cast(list[list[str]], batch["text"])
    texts = [" ".join(words) for words in sentences]
    tokens = tokenizer(
        texts, truncation=True, max_length=max_length, return_attention_mask=False, return_offsets_mapping=True
    )
    offsets = tokens.pop("offset_mapping")
    first = [_first_tokens(*row) for row in zip(sentences, texts, offsets, strict=True)]
    return {**tokens, "length": [len(ids) for ids in tokens["input_ids"]], "first": first}


def _first_tokens(words: list[str], text: str, offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return the place of each word's first token; ``offsets`` are the characters of ``text`` that each token has."""
    starts = [0, *accumulate(len(word) + 1 for word in words[:-1])]
    found = [_NO_TOKEN] * len(words)
    for place, (begin, end) in enumerate(offsets):
        begin += len(text[begin:end]) - len(text[begin:end].lstrip())  # some tokens include the blank before a word
        if begin < end:
            word = bisect_right(starts, begin) - 1
            found[word] = place if found[word] == _NO_TOKEN else found[word]
    return found


class WordTags(Answers):
    """The tag of a word by the logits at its first token; the loss is cross-entropy, divided by the words of a batch.

    Words without a token are answered ``O`` (the first tag, where there is none) and count in every score.
    """

    auto_class = "AutoModelForTokenClassification"
    pipeline = "token-classification"

    def encode(self, batch: Batch, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list[object]]:
        """Return ``encode_words``."""
        return encode_words(batch, tokenizer, max_length)

    def collate(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Row]], dict[str, Tensor]]:
        """Return ``Collate`` with ``first`` and ``labels`` of shape [rows, words]."""
        pad = Collate(tokenizer, regression=False)

        def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
            batch = pad.padded(rows)
            longest = batch["input_ids"].shape[1]
            shifts = [longest - len(_ints(row["input_ids"])) if pad.left else 0 for row in rows]
            firsts = [
                [place + shift if place >= 0 else place for place in _ints(row["first"])]
                for row, shift in zip(rows, shifts, strict=True)
            ]
            batch["first"] = _padded(firsts, _NO_WORD)
            if "label" in rows[0]:
                batch["labels"] = _padded([_ints(row["label"]) for row in rows], _IGNORED)
                batch["labels"][batch["first"] < 0] = _IGNORED
            return batch

        return collate

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits at the words' first tokens: [rows, words, tags]."""
        found = super().logits(model, batch)
        places = batch["first"].clamp(min=0).unsqueeze(-1).expand(-1, -1, found.shape[-1])
        return found.gather(1, places)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the sum of the words' cross-entropies."""
        logits = self.logits(model, batch).flatten(0, 1)
        weights = None if weights is None else weights.to(logits.device)
        return F.cross_entropy(logits, batch["labels"].flatten(), weights, ignore_index=_IGNORED, reduction="sum")

    def denominator(self, train: Dataset) -> Callable[[list[int]], float]:
        """Return the words with a token of a global batch."""
        counts = [sum(place >= 0 for place in first) for first in train["first"]]
        return lambda batch: float(max(1, sum(counts[i] for i in batch)))

    def outputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Sequence[Array]:
        """Return each sentence's logits, [words, tags]; NaN for a word without a token."""
        logits = self.logits(model, batch).masked_fill((batch["first"] < 0).unsqueeze(-1), float("nan"))
        words = (batch["first"] > _NO_WORD).sum(-1).tolist()
        return [row[:n] for row, n in zip(logits.cpu().numpy(), words, strict=True)]

    def score(self, outputs: Sequence[Array], labels: Sequence[object]) -> dict[str, float]:
        """Return the metrics of entities, the words' accuracy, and their mean loss."""
        losses = np.concatenate(self._losses(outputs, labels))
        metrics = self._metrics([self._tags(each) for each in outputs], _tags(labels))
        return metrics | {"loss": float(np.nanmean(losses))}

    def baseline(self, train: Sequence[object], labels: Sequence[object]) -> dict[str, float]:
        """Return the metrics of the most frequent tag (the lower index where equal) for every word."""
        counts = self.count(train)
        answer = min(counts, key=lambda tag: (-counts[tag], tag))
        return self._metrics([[answer] * len(tags) for tags in _tags(labels)], _tags(labels))

    def analyse(self, outputs: Sequence[Array], examples: Dataset) -> Analysis:
        """Return the scores of each type of entity, and the sentences with the largest mean loss.

        Tags that are not of entities have scores each, and a confusion matrix of words.
        """
        answers, truth = [self._tags(each) for each in outputs], _tags(examples["label"])
        by_word = self._losses(outputs, truth)
        losses = np.array([float(np.nanmean(each)) if np.isfinite(each).any() else 0.0 for each in by_word])
        hardest = [
            hard_example(examples, row, self.name(truth[row]), self.name(answers[row]), None, float(losses[row]))
            for row in largest(losses)
        ]
        if of_entities(self.task.labels):
            return Analysis(by_class=self._by_type(answers, truth), hardest=hardest)
        confusion = confusion_of(len(self.task.labels), *(list(chain.from_iterable(each)) for each in (truth, answers)))
        return Analysis(scores_by_class(self.task.labels, confusion), confusion.tolist(), hardest=hardest)

    def confidence(self, outputs: Sequence[Array]) -> list[float]:
        """Return the mean over the words that have a token of the probability of the tag; 1 for a sentence without."""
        known = [each[np.isfinite(each).all(-1)] for each in outputs]
        return [float(softmax(each).max(-1).mean()) if len(each) else 1.0 for each in known]

    def predictions(self, outputs: Sequence[Array]) -> Predictions:
        """Return the tags of each sentence's words."""
        return Predictions([[self.task.labels[tag] for tag in self._tags(each)] for each in outputs])

    def count(self, labels: Sequence[object]) -> Counter[int]:
        """Return the number of words that have each tag."""
        return Counter(chain.from_iterable(_tags(labels)))

    def name(self, label: object) -> str:
        """Return a sentence's tags."""
        return " ".join(self.task.labels[tag] for tag in _ints(label))

    def shown(self, row: Row, label: object, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
        """Return a sentence with each word's tag after the word's first token."""
        ids, tags = _ints(row["input_ids"]), {} if label is None else dict(enumerate(_ints(label)))
        ends = [(place + 1, tags.get(word)) for word, place in enumerate(_ints(row["first"])) if place >= 0]
        parts, begin = [], 0
        for end, tag in ends:
            parts.append((str(tokenizer.decode(ids[begin:end])), False))
            parts += [] if tag is None else [(f" {self.task.labels[tag]} ", True)]
            begin = end
        return [*parts, (str(tokenizer.decode(ids[begin:])), False)]

    def read(self, table: Table, names: Sequence[str], data: DataConfig) -> list[object]:
        """Return the words of a file's rows."""
        column = (names or ["tokens"])[0]
        found = [items(value) for value in table.column(column, "the words")]
        refuse(table.fault(column, "is no list of words", [row for row, words in enumerate(found) if not words]))
        return list(found)

    def rows(self, given: Sequence[object]) -> Examples:
        """Return sentences, each a list of words or a text that is split at blanks, as a split without labels."""
        found = [items(row) or [] for row in given]
        if not all(found):
            raise PeftlabError(f"row {found.index([])}: is no list of words")
        return Examples(found, None, None)

    def _tags(self, logits: Array) -> list[int]:
        """Return the words' most likely tags."""
        outside = self.task.labels.index(OUTSIDE) if OUTSIDE in self.task.labels else 0
        known = np.isfinite(logits).all(-1)
        return np.where(known, np.nan_to_num(logits).argmax(-1), outside).tolist()

    def _losses(self, outputs: Sequence[Array], labels: Sequence[object]) -> list[NDArray[np.float64]]:
        """Return the cross-entropy of each sentence's words; NaN for words without a token."""
        tiny = np.finfo(np.float64).tiny
        pairs = zip(outputs, _tags(labels), strict=True)
        return [-np.log(np.maximum(softmax(logits)[np.arange(len(tags)), tags], tiny)) for logits, tags in pairs]

    def _metrics(self, answers: Tags, truth: Tags) -> dict[str, float]:
        right = sum(a == b for pair in zip(answers, truth, strict=True) for a, b in zip(*pair, strict=True))
        accuracy = right / max(1, sum(map(len, truth)))
        if self.task.metrics == ("accuracy",):
            return {"accuracy": accuracy}
        scores = list(self._by_type(answers, truth, together=True).values())
        one = scores[0] if scores else ClassScores(0.0, 0.0, 0.0, 0)
        return {
            "entity_f1": one.f1,
            "entity_precision": one.precision,
            "entity_recall": one.recall,
            "accuracy": accuracy,
        }

    def _by_type(self, answers: Tags, truth: Tags, *, together: bool = False) -> dict[str, ClassScores]:
        """Return the scores of the entities by their type, or of all ``together``."""
        said, true, hits = (Counter[str]() for _ in range(3))
        for pair in zip(answers, truth, strict=True):
            found, wanted = (set(entities([self.task.labels[tag] for tag in tags])) for tags in pair)
            for counts, those in ((said, found), (true, wanted), (hits, found & wanted)):
                counts.update("" if together else kind for kind, _, _ in those)
        return {kind: class_scores(hits[kind], said[kind], true[kind]) for kind in sorted({*said, *true})}


def _ints(value: object) -> list[int]:
    return cast(list[int], value)


def _tags(labels: Sequence[object]) -> Tags:
    return cast(Tags, labels)


def _padded(rows: Sequence[list[int]], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], dtype=torch.int64)
