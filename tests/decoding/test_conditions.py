"""Figures from a busy machine: what is noticed, and how it is said."""

from __future__ import annotations

import time

import numpy
import pytest
import torch

from peftlab.decoding.planning import plan_from_repeats
from peftlab.decoding.statistics import RateIntervals, Timings, rate_intervals, verdict
from peftlab.decoding.timing import Conditions, Watch, spread, step_seconds, uncertain
from peftlab.errors import PeftlabError

QUIET = Conditions(load=1.9, cores=2, running=0.99, spread=0.03)
BUSY = Conditions(load=8.1, cores=2, running=0.4, spread=0.6)


def test_doubts_name_what_was_seen():
    assert QUIET.doubts() == []
    assert Conditions(None, 2, None, None).doubts() == []
    assert BUSY.doubts() == [
        "load average 8.1 on 2 cores",
        "waiting for a core 60 % of the time",
        "repeats of the same work differ by 60 %",
    ]
    assert Conditions(8.1, 16, 0.99, 0.03).doubts() == [], "as many cores as are asked for"
    assert BUSY.as_json()["doubts"] == BUSY.doubts() and BUSY.as_json()["load"] == 8.1


def test_spread_is_that_of_the_same_work():
    assert spread([[1.0, 1.0, 1.0], [5.0, 5.0, 5.0]]) == 0
    assert spread([[1.0, 2.0, 3.0]]) == pytest.approx(0.5)  # quartiles 1.5 and 2.5, median 2
    assert spread([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [7.0, 7.0, 7.0]]) == 0
    assert spread([[1.0], [2.0]]) is None


def test_a_thread_that_does_not_run_is_seen():
    """Asleep it waits as it would for a core."""
    with Watch(torch.device("cpu")) as watch:
        time.sleep(0.2)
    found = watch.conditions([[1.0, 1.0]])
    assert found.running is not None and found.running < 0.5
    assert found.spread == 0 and found.cores >= 1
    with Watch(torch.device("meta")) as watch:
        time.sleep(0.01)
    assert watch.conditions([]).running is None, "elsewhere the thread waits for the device"


def plan_of(target, draft, conditions=QUIET):
    return plan_from_repeats(target, draft, conditions)


class TestPlan:
    """A plan has intervals."""

    def test_quiet_repeats_are_the_plan_of_their_medians(self):
        result = plan_of([[1.0, 1.01, 0.99], [1.02, 1.0, 1.01], [1.0, 1.0, 1.1]], [0.2, 0.2, 0.21])
        assert result.c == pytest.approx(0.2) and result.target_seconds == [1.0, 1.01, 1.0]
        low, high = result.c_interval
        assert low <= 0.2 <= high < 0.22
        assert result.target_range[0] == (0.99, 1.01) and result.draft_range == (0.2, 0.21)
        assert result.verdict.startswith("pays from an acceptance of")
        assert result.conditions.doubts() == []

    def test_a_busy_machine_concludes_nothing(self):
        """Target and draft are the same model; another process ran during the draft's steps."""
        same = [1.0, 1.1, 0.9, 1.0, 21.0]
        hit = [22.0, 1.0, 21.9, 25.0, 1.1]
        result = plan_of([same] * 3, hit, BUSY)
        low, high = result.c_interval
        assert low <= 1.1 and high > 20, "the interval contains c = 1"
        assert result.verdict.startswith("uncertain, the machine was busy (load average 8.1 on 2 cores; ")
        assert "by these times cannot pay here" in result.verdict

    def test_repeats_that_disagree_are_uncertain_on_a_quiet_machine_too(self):
        result = plan_of([[1.0] * 6, [1.2, 2.8] * 3], [0.1] * 6)
        low, high = result.cap_interval
        assert low <= 1 < high
        assert result.verdict.startswith("uncertain, as by some repeats a perfect draft reaches")

    def test_a_single_repeat_has_no_interval(self):
        result = plan_of([[1.0], [1.1]], [0.1], Conditions(0.1, 2, 0.99, None))
        assert result.c_interval is None and result.cap_interval is None

    def test_no_repeat_is_refused(self):
        with pytest.raises(PeftlabError, match="repeats: 0 measures nothing"):
            step_seconds({}, repeats=0)


class TestIntervals:
    """Prompts and repeats are both drawn anew."""

    def test_one_prompt_has_no_interval(self):
        one, other = Timings([10], [[1.0, 1.1, 0.9]]), Timings([10], [[2.0, 2.1, 1.9]])
        assert rate_intervals(one, other) == RateIntervals(rate=None, baseline=None, speedup=None)
        said = verdict(2.0, None)
        assert said == "2.00x plain decoding on a single batch, too few for an interval"

    def test_repeats_that_differ_widen_it(self):
        plain = Timings([10] * 4, [[2.0] * 5] * 4)
        still = rate_intervals(Timings([10] * 4, [[1.0] * 5] * 4), plain).speedup
        assert still == (2.0, 2.0)
        low, high = rate_intervals(Timings([10] * 4, [[0.5, 0.5, 1.0, 3.0, 3.0]] * 4), plain).speedup
        assert low < 1.5 and high > 2.2

    def test_prompts_that_differ_widen_it(self):
        plain = Timings([10] * 20, [[1.0]] * 20)
        low, high = rate_intervals(Timings([10] * 20, [[0.5], [3.0]] * 10), plain).speedup
        assert low < 2 / 3.5 < high

    def test_slow_moments_that_hit_both_cancel(self):
        """Both took turns, so that repeat i of one belongs to repeat i of the other."""
        noise = numpy.random.default_rng(1).uniform(1, 5, (6, 3))
        pair = [Timings([10] * 6, (scale * noise).tolist()) for scale in (1.0, 2.0)]
        found = rate_intervals(*pair)
        assert found.speedup == pytest.approx((2.0, 2.0))
        assert found.rate[1] > 1.2 * found.rate[0]

    def test_the_interval_covers_the_truth_as_often_as_it_says(self):
        """Prompts with noisy repeats, 200 times over: 95 % intervals of 12 prompts contain the true ratio in most."""
        dice = numpy.random.default_rng(0)
        hits = 0
        for _ in range(200):
            seconds = dice.lognormal(0, 0.3, (12, 1)) * dice.lognormal(0, 0.1, (12, 3))
            plain = 2 * dice.lognormal(0, 0.1, (12, 3)) * seconds.mean(1, keepdims=True)
            found = rate_intervals(Timings([10] * 12, seconds.tolist()), Timings([10] * 12, plain.tolist()), draws=300)
            low, high = found.speedup
            hits += low <= 2.0 <= high
        assert hits >= 170


def test_verdicts():
    assert verdict(2.0, (1.5, 2.5)).startswith("faster than plain")
    assert verdict(0.8, (0.7, 0.9)).startswith("slower than plain")
    assert verdict(1.1, (0.9, 1.2)).startswith("no clear difference")
    said = verdict(2.0, (1.5, 2.5), BUSY.doubts())
    assert said.startswith("uncertain, the machine was busy (load") and "by these times faster than plain" in said
    assert uncertain([], "faster") == "faster"
