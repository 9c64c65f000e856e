from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

import pytest

from peftlab.decoding.theory import pearl_speedup, pearl_tokens_per_phase, speedup
from peftlab.errors import PeftlabError


def pearl_schedule(accepted: Iterable[bool], gamma: int) -> Iterator[tuple[str, int]]:
    """Yield ("pre" | "post", tokens emitted) for each phase, until ``accepted`` runs out.

    Args:
        accepted: whether each verified token is accepted, in the order of verification.
        gamma: tokens drafted per phase, at least 1.
    """
    coins = iter(accepted)
    mode = "pre"
    while True:
        window = 1 if mode == "pre" else gamma
        accepted_now = 0
        for coin in coins:
            if not coin:
                break
            accepted_now += 1
            if accepted_now == window:
                break
        else:
            return
        all_accepted = accepted_now == window
        yield mode, accepted_now if all_accepted else accepted_now + 1
        mode = "post" if all_accepted else "pre"


def test_the_schedule_step_by_step():
    # one coin in pre, one in pre, three in post (γ = 3), two in post, one in pre
    coins = [0, 1, 1, 1, 1, 1, 0, 1]
    phases = [("pre", 1), ("pre", 1), ("post", 3), ("post", 2), ("pre", 1)]
    assert list(pearl_schedule(map(bool, coins), 3)) == phases


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.8, 0.95])
def test_the_closed_form_is_the_mean_of_the_schedule(alpha, gamma):
    rng = random.Random(0)
    phases = list(pearl_schedule((rng.random() < alpha for _ in range(200_000)), gamma))
    mean = sum(tokens for _, tokens in phases) / len(phases)
    assert mean == pytest.approx(pearl_tokens_per_phase(alpha, gamma), rel=0.01)


def test_a_perfect_draft_gains_the_ratio_of_the_speeds():
    assert pearl_speedup(1.0, 4, 0.25) == 4
    assert pearl_speedup(1.0, 8, 0.25) == 4
    assert pearl_speedup(1.0, 2, 0.25) == 2
    assert {t for _, t in itertools.islice(pearl_schedule(itertools.repeat(True), 4), 1, 9)} == {4}


def test_a_useless_draft_costs_nothing_while_it_fits_in_a_target_step():
    assert pearl_speedup(0.0, 4, 0.25) == 1
    assert pearl_speedup(0.0, 8, 0.25) == 0.5


def test_overlap_beats_taking_turns_when_drafting_fills_the_target_step():
    for alpha in (0.5, 0.7, 0.9):
        assert pearl_speedup(alpha, 5, 0.2) > speedup(alpha, 5, 0.2)


def test_impossible_values_are_told():
    with pytest.raises(PeftlabError, match="gamma"):
        pearl_tokens_per_phase(0.5, 0)
    with pytest.raises(PeftlabError, match="c:"):
        pearl_speedup(0.5, 2, -1)
