"""What a phase writes where stderr is no terminal; ``tests/training/test_terminal.py`` looks at bars."""

from __future__ import annotations

import re
import time

import pytest

from peftlab import progress
from peftlab.progress import Phase, counted, duration


@pytest.fixture
def fast(monkeypatch):
    """Lines after hundredths of a second, where they usually come after seconds."""
    monkeypatch.setattr(progress, "EVERY", 0.2)
    monkeypatch.setattr(progress, "APART", 0.0)
    monkeypatch.setattr(progress, "LONG", 0.1)


def test_counted_work_is_a_line_at_each_twentieth(fast, capsys):
    phase = Phase("training", 200, "step", done=100)
    with phase:
        for _ in range(100):
            phase.advance(1, "loss 0.5000, 12 tokens/s")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training ..."
    assert [re.match(r"training: step (\d+)/200 ", line)[1] for line in lines[1:]] == [
        str(step) for step in range(110, 201, 10)
    ]
    assert re.fullmatch(r"training: step 150/200 \(75 %\), loss 0.5000, 12 tokens/s, \S+ s left", lines[5])


def test_two_lines_of_counted_work_are_seconds_apart(capsys):
    list(counted(range(1000), "reading", 1000, "row"))
    assert capsys.readouterr().err == "reading ...\n"


def test_nothing_is_silent_for_long_whatever_it_does(fast, capsys):
    with Phase("comparing"):
        time.sleep(0.7)
    first, *between, last = capsys.readouterr().err.splitlines()
    assert first == "comparing ..." and re.fullmatch(r"comparing: took 0\.\d s", last)
    assert 2 <= len(between) <= 3 and all(re.fullmatch(r"comparing: 0\.\d s so far", line) for line in between)


def test_a_phase_in_another_is_named_by_the_lines_that_follow(fast, capsys):
    with Phase("training", 4, "step") as training:
        training.advance()
        with Phase("evaluating"):
            time.sleep(0.3)
        training.advance()
    lines = capsys.readouterr().err.splitlines()
    assert [re.split(r"[:(] ?", line)[0] for line in lines] == [
        "training ...", "training", "evaluating", "training", "training",
    ]  # fmt: skip
    assert "so far" in lines[2] and "step 2/4" in lines[3] and "took" in lines[4]


def test_an_error_ends_a_phase_without_a_word(fast, capsys):
    with pytest.raises(ValueError), Phase("merging"):
        time.sleep(0.12)
        raise ValueError
    assert capsys.readouterr().err == "merging ...\n"
    assert not progress._open


def test_other_processes_of_a_run_are_silent(fast, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert list(counted(iter("abc"), "reading", 3, "row")) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (4.21, "4.2 s"), (59.97, "1 min 0 s"), (134, "2 min 14 s"), (11_100, "3 h 5 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
