"""Exact match: of whole answers, and of the final number of an answer to a question of GSM8K."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal, DecimalException

from peftlab.errors import PeftlabError
from peftlab.tasks.generated.contexts import Answer

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
    """Return 1 where what is read in a text is what is read in a reference."""
    golden = [{read(reference) for reference in answer.references} - {None} for answer in answers]
    for gold, answer in zip(golden, answers, strict=True):
        if not gold:
            raise PeftlabError(
                f"generate.metrics: the reference {answer.references[0][-40:]!r} does not end with {_FINAL!r} and a "
                "number, as GSM8K's answers do"
            )
    return [float(read(text) in gold) for text, gold in zip(texts, golden, strict=True)]
