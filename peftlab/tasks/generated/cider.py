"""CIDEr-D (Vedantam et al. 2015, section 5), which coco-caption and the scripts of E2E call CIDEr."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from peftlab.tasks.generated.contexts import Answer

_ORDERS, _SIGMA = 4, 6.0
_WORD = re.compile(r"\w+(?:[-'.,]\w+)*")
Grams = Counter[tuple[str, ...]]


def cider(answers: Sequence[Answer]) -> float:
    """Return the mean CIDEr-D of the answers, from 0 to 10, over lower-case words without punctuation."""
    return fmean(cider_scores([(words(answer.text), [*map(words, answer.references)]) for answer in answers]))


def words(text: str) -> list[str]:
    """Return the lower-case words of a text, without punctuation."""
    return _WORD.findall(text.lower())


def cider_scores(pairs: Sequence[tuple[list[str], list[list[str]]]]) -> list[float]:
    """Return the CIDEr-D of each pair of a candidate's words and its references'.

    With g_n(s) the vector of the n-grams of s, each its count times log(contexts / contexts with a reference that has
    it), the score of c against the reference s is

        10/4 Σ_n exp(-(l_c - l_s)² / 2σ²) · min(g_n(c), g_n(s)) · g_n(s) / (|g_n(c)| |g_n(s)|),

    σ = 6, n from 1 to 4; against several references it is the mean. One context alone scores 0: every log is.
    """
    seen: Grams = Counter()
    for _, references in pairs:
        seen.update({gram for reference in references for gram in _grams(reference)})
    rarity = {gram: math.log(len(pairs) / count) for gram, count in seen.items()}
    rarest = math.log(len(pairs))  # of an n-gram that no reference has
    scores = []
    for candidate, references in pairs:
        own = _weighted(candidate, rarity, rarest)
        found = []
        for reference in references:
            penalty = math.exp(-((len(candidate) - len(reference)) ** 2) / (2 * _SIGMA**2))
            found.append(penalty * fmean(map(_similarity, own, _weighted(reference, rarity, rarest))))
        scores.append(10 * fmean(found))
    return scores


def _grams(text: Sequence[str]) -> Grams:
    return Counter(tuple(text[i : i + n]) for n in range(1, _ORDERS + 1) for i in range(len(text) - n + 1))


def _weighted(
    text: Sequence[str], rarity: Mapping[tuple[str, ...], float], rarest: float
) -> list[dict[tuple[str, ...], float]]:
    """Return the vectors of a text's n-grams, one for each n."""
    vectors: list[dict[tuple[str, ...], float]] = [{} for _ in range(_ORDERS)]
    for gram, count in _grams(text).items():
        vectors[len(gram) - 1][gram] = count * rarity.get(gram, rarest)
    return vectors


def _similarity(one: Mapping[tuple[str, ...], float], other: Mapping[tuple[str, ...], float]) -> float:
    """Return the cosine of two vectors, the first clipped to the second."""
    shared = math.fsum(min(value, other.get(gram, 0.0)) * other.get(gram, 0.0) for gram, value in one.items())
    norms = math.hypot(*one.values()) * math.hypot(*other.values())
    return shared / norms if norms else 0.0
