"""How much of the held-out text is repetition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peftlab.drafting.text import make_dataset, repetition
from peftlab.tasks.prompts import Request

answers = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=14), min_size=1, max_size=4)


def found(train, held_out):
    return repetition(*(make_dataset([Request([9], answer) for answer in part]) for part in (train, held_out)))


@given(answers, answers)
def test_shares_are_those_of_counting_every_place(train, held_out):
    eights = [(answer[i : i + 8]) for answer in held_out for i in range(len(answer) - 7)]
    seen = [any(gram == own[j : j + 8] for own in train for j in range(len(own) - 7)) for gram in eights]
    repeated = [
        any(answer[i : i + 4] == answer[j : j + 4] for j in range(i))
        for answer in held_out
        for i in range(len(answer) - 3)
    ]
    of = found(train, held_out)
    assert of.seen == (round(sum(seen) / len(seen), 4) if seen else None)
    assert of.repeated == (round(sum(repeated) / len(repeated), 4) if repeated else None)


def test_the_prompt_does_not_count():
    prompts = [Request([*range(8)], [1, 2]), Request([5], [*range(8)])]
    assert repetition(make_dataset(prompts[:1]), make_dataset(prompts[1:])).seen == 0.0
