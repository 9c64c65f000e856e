"""Generated answers to held-out prompts, and their scores: exact match, GSM8K, BLEU, NIST, ROUGE-L and CIDEr-D."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from importlib.util import find_spec
from statistics import fmean
from typing import cast

from peftlab.errors import PeftlabError
from peftlab.registry import resolve
from peftlab.tasks.batches import seeded_subset
from peftlab.tasks.conversations import Conversation
from peftlab.tasks.language_examples import (
    Encoding,
    Source,
    bos_ids,
    encode,
    prompt_of,
    tokenizer_of,
    with_image_tokens,
)
from peftlab.tasks.table import GENERATION_METRICS, HIGH, LOW
from peftlab.untyped import Processor


@dataclass(frozen=True)
class Context:
    """A prompt as text and as token ids, every answer to it that the data has, and the paths of its images."""

    prompt: str
    ids: tuple[int, ...]
    references: tuple[str, ...]
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A generated answer to a context, without special tokens."""

    text: str
    prompt: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Contexts:
    """The prompts to answer.

    Attributes:
        ends: the special tokens that answers end with in the data.
        too_long: how many contexts were left out because their prompt exceeds ``train.max_length``.
    """

    items: list[Context]
    ends: frozenset[int]
    too_long: int = 0


def make_contexts(
    rows: Sequence[Source], tokenizer: Processor, how: Encoding, seed: int, examples: int | None
) -> Contexts:
    """Return the contexts of held-out rows: rows with one prompt are one context with several references.

    Of a conversation the last answer is the reference, and all before it the prompt.

    Args:
        rows: the held-out rows.
        tokenizer: the model's tokenizer, or its processor where rows have images.
        how: how rows become tokens.
        seed: of the draw of ``examples``.
        examples: draw at most so many contexts; None for all.

    Raises:
        PeftlabError: every prompt is longer than ``how.max_length``.
    """
    together: dict[tuple[object, ...], tuple[Context, Source]] = {}
    for row in rows:
        prompt, reference = prompt_text(row, tokenizer), _reference(row)
        pictures = row.pictures if isinstance(row, Conversation) else ()
        ids = tuple(prompt_ids(row, prompt, tokenizer))
        key = (ids, *(picture.digest for picture in pictures))
        before, first = together.get(key, (None, row))
        references = (*before.references, reference) if before is not None else (reference,)
        together[key] = Context(prompt, ids, references, tuple(picture.path for picture in pictures)), first
    items = [pair for pair in together.values() if len(pair[0].ids) <= how.max_length]
    if not items:
        raise PeftlabError(f"generate: every held-out prompt is longer than train.max_length, {how.max_length} tokens")
    too_long = len(together) - len(items)
    chosen = seeded_subset(len(items), examples, seed)
    items = items if chosen is None else [items[i] for i in chosen]
    ends = _end_tokens([row for _, row in items], tokenizer, how)
    return Contexts([context for context, _ in items], ends, too_long)


def prompt_text(row: Source, tokenizer: Processor) -> str:
    """Return the text before a row's last answer, with the template's prompt for it.

    Args:
        row: a conversation or a completion.
        tokenizer: the one whose chat template writes conversations.
    """
    return prompt_of(row, tokenizer) if isinstance(row, Conversation) else row.prompt


def _reference(row: Source) -> str:
    text = row.messages[_last_answer_index(row)]["content"] if isinstance(row, Conversation) else row.completion
    return text.strip()


def _last_answer_index(row: Conversation) -> int:
    return max(i for i, message in enumerate(row.messages) if message["role"] == "assistant")


def prompt_ids(row: Source, prompt: str, processor: Processor) -> list[int]:
    """Return the token ids of a row's prompt, begun as its training example begins.

    Args:
        row: a conversation or a completion.
        prompt: its ``prompt_text``.
        processor: the model's tokenizer, or its processor where the row has images.
    """
    tokenizer = tokenizer_of(processor)
    if isinstance(row, Conversation) and row.pictures:
        prompt, _ = with_image_tokens(processor, prompt, row.pictures[: prompt.count(processor.image_token)])
    ids = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    ids = ids if isinstance(row, Conversation) else [*bos_ids(tokenizer), *ids]
    if not ids:
        raise PeftlabError(f"{row.where}: an empty prompt, and the tokenizer has no BOS token to begin with")
    return ids


def _end_tokens(rows: Sequence[Source], processor: Processor, how: Encoding) -> frozenset[int]:
    """Return the last trained special token of each row."""
    tokenizer = tokenizer_of(processor)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
    found = set()
    for row in rows:
        tokens = encode(row, processor, how)[-1]
        trained = [i for i, marked in zip(tokens.input_ids, tokens.trained, strict=True) if marked and i in special]
        found |= {*trained[-1:]}
    return frozenset(found)


# --- Scores.
def check_packages(names: Iterable[str]) -> None:
    """Raise ``PeftlabError`` for a metric whose packages are not installed."""
    for name in names:
        missing = [package for package in GENERATION_METRICS.find(name).packages if find_spec(package) is None]
        if missing:
            raise PeftlabError(
                f"generate.metrics: {name} needs {' and '.join(missing)}: pip install 'peftlab[metrics]'"
            )


def score(names: Iterable[str], answers: Sequence[Answer]) -> dict[str, float]:
    """Return the value of each metric; a mean over answers has its 95 % interval as ``NAME_low`` and ``NAME_high``.

    Args:
        names: of the metrics, as in ``generate.metrics``.
        answers: generated answers, each with its context.

    Raises:
        PeftlabError: no answer, or a reference that a metric cannot use.
    """
    if not answers:
        raise PeftlabError("generate: no answer to score")
    values: dict[str, float] = {}
    for name in names:
        metric = GENERATION_METRICS.find(name)
        found = resolve(metric.score)(answers)
        values[name] = fmean(found) if metric.mean else float(found)
        if metric.mean and len(found) > 1:
            values[name + LOW], values[name + HIGH] = interval(found)
    return values


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of a mean: percentiles of 9,999 bootstrap samples, seeded."""
    import numpy as np
    from scipy.stats import bootstrap

    found = bootstrap((np.asarray(values),), np.mean, method="percentile", batch=1000, rng=np.random.default_rng(0))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


# --- Exact match: of whole answers, and of the final number of an answer to a question of GSM8K.
_FINAL = "#### "
# In peft's order: the first of these that the text contains decides, wherever it is.
_PHRASES = ("The answer is: ", "The answer is ", "The final answer is: ", "The final answer is ", _FINAL)
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)")


def exact_match(answers: Sequence[Answer]) -> list[float]:
    """Return 1 for each answer that equals a reference, white space at both ends aside; else 0."""
    return [float(answer.text.strip() in {text.strip() for text in answer.references}) for answer in answers]


def gsm8k(answers: Sequence[Answer]) -> list[float]:
    """Return 1 for each answer whose final number, as ``final_number`` reads it, is the reference's; else 0."""
    return _agreement([answer.text for answer in answers], answers, final_number)


def gsm8k_peft(answers: Sequence[Answer]) -> list[float]:
    """Return 1 for each answer that peft's method_comparison would count as right; else 0.

    As there, the prompt is searched too (``peft_answer``).
    """
    return _agreement([answer.prompt + answer.text for answer in answers], answers, peft_answer)


def final_number(text: str) -> Decimal | None:
    """Return the number after the last ``#### `` of a text, without commas and ``$``; None where there is none."""
    _, found, rest = text.rpartition(_FINAL)
    number = _NUMBER.match(rest.strip().removeprefix("$").replace(",", "")) if found else None
    return None if number is None else Decimal(number[0])


def peft_answer(text: str) -> float | str | None:
    """Return what peft's method_comparison (MetaMathQA) reads as the answer; None where there is none.

    The first of its five phrases that the text contains decides, and the answer is the line after that phrase's last
    occurrence. Its commas stay: ``1,000`` is a text, which no number equals.
    """
    text = text.strip().rstrip(".!?")
    phrase = next((phrase for phrase in _PHRASES if phrase in text), None)
    if phrase is None:
        return None
    answer = text.rpartition(phrase)[2].strip().split("\n", 1)[0].strip(" .!?$%")
    parts = answer.split("/")
    try:
        numbers = [Decimal(part.strip()) for part in parts]
        if len(parts) <= 2:
            return float(numbers[0] / numbers[1] if len(parts) == 2 else numbers[0])
    except DecimalException:
        pass
    return answer


def _agreement(texts: Sequence[str], answers: Sequence[Answer], read: Callable[[str], object]) -> list[float]:
    """Return 1 for each text in which ``read`` finds what it finds in one of the answer's references, else 0."""
    golden = [{read(reference) for reference in answer.references} - {None} for answer in answers]
    for gold, answer in zip(golden, answers, strict=True):
        if not gold:
            raise PeftlabError(
                f"generate.metrics: the reference {answer.references[0][-40:]!r} does not end with {_FINAL!r} and a "
                "number, as GSM8K's answers do"
            )
    return [float(read(text) in gold) for text, gold in zip(texts, golden, strict=True)]


# --- BLEU, NIST and ROUGE-L by the packages of the extra ``metrics``, of lower-case words as in E2E's own script.
def bleu(answers: Sequence[Answer]) -> float:
    """Return BLEU of all answers against all references, 0 to 100: sacrebleu, mteval-13a words."""
    import sacrebleu

    most = max(len(answer.references) for answer in answers)
    # sacrebleu takes the n-th reference of every answer together; None where there are fewer, as "" would be one.
    streams = [
        [answer.references[n] if n < len(answer.references) else None for answer in answers] for n in range(most)
    ]
    return float(
        sacrebleu.corpus_bleu([answer.text for answer in answers], cast(list[list[str]], streams), lowercase=True).score
    )


def nist(answers: Sequence[Answer]) -> float:
    """Return NIST of all answers against all references, n-grams up to 5: nltk, mteval-13a words."""
    from nltk.translate.nist_score import corpus_nist
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokenizer = Tokenizer13a()

    def words(text: str) -> list[str]:
        return str(tokenizer(text.lower())).split()

    written = [words(answer.text) for answer in answers]
    longest = max(map(len, written))
    if longest == 0:
        return 0.0
    # nltk divides by the number of n-grams; where there are none they add nothing to the sum.
    return float(corpus_nist([[*map(words, answer.references)] for answer in answers], written, n=min(5, longest)))


def rouge_l(answers: Sequence[Answer]) -> list[float]:
    """Return the F-measure of each answer's longest common subsequence with its best reference: rouge-score."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    return [float(scorer.score_multi(list(a.references), a.text)["rougeL"].fmeasure) for a in answers]


# --- CIDEr-D (Vedantam et al. 2015, section 5), which coco-caption and the scripts of E2E call CIDEr.
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
        scores.append(10 * fmean(found))  # ``_similarity`` is averaged over n: the formula's 1/4
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
