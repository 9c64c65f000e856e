"""Streaming and thinning of metrics.jsonl."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peftlab.errors import PeftlabError
from peftlab.reporting.pages import MAX_POINTS, Curve, Line, line_plot, read_history

VALUES = st.floats(-1e6, 1e6, allow_nan=False)


@settings(max_examples=30)  # each of thousands of points
@given(st.integers(1, 12 * MAX_POINTS), st.randoms(use_true_random=False))
def test_thinning_keeps_the_sum_the_range_and_the_order(length: int, random) -> None:
    values = [random.uniform(-5, 5) for _ in range(length)]
    curve = Curve()
    for step, value in enumerate(values):
        curve.add(step, value)
    buckets = curve.buckets
    assert len(buckets) <= MAX_POINTS
    assert sum(bucket.count for bucket in buckets) == length
    assert math.isclose(sum(bucket.y_sum for bucket in buckets), sum(values), abs_tol=1e-6)
    start = 0
    for bucket in buckets:
        inside = values[start : start + bucket.count]
        assert (bucket.low, bucket.high) == (min(inside), max(inside))
        start += bucket.count
    assert curve.x == sorted(set(curve.x))
    assert {bucket.count for bucket in buckets[:-1]} <= {curve.per_bucket}


@given(st.lists(VALUES, min_size=1, max_size=MAX_POINTS))
def test_a_short_curve_is_kept_exactly(values: list[float]) -> None:
    curve = Curve()
    for step, value in enumerate(values):
        curve.add(step, value)
    assert (curve.x, curve.y) == (list(range(len(values))), values)


def test_a_resumed_run_replaces_the_steps_it_repeats() -> None:
    curve = Curve()
    for step in (10, 20, 30, 40):
        curve.add(step, 1.0)
    for step in (30, 40, 50):
        curve.add(step, 2.0)
    assert curve.x == [10, 20, 30, 40, 50]
    assert curve.y == [1, 1, 2, 2, 2]


def test_lines_are_sorted_into_training_and_evaluation(tmp_path: Path) -> None:
    lines = [
        {"step": 10, "epoch": 0.5, "loss": 0.6, "lr": 1e-4, "grad_norm": 1.0},
        {"step": 20, "epoch": 1.0, "split": "validation_matched", "eval": {"accuracy": 0.7, "loss": 0.5}},
        {"step": 20, "epoch": 1.0, "split": "validation_mismatched", "eval": {"accuracy": 0.6, "loss": None}},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    history = read_history(path)
    assert history.train["loss"].y == [0.6]
    assert history.train["lr"].y == [1e-4]
    assert {key: curve.y for key, curve in history.evaluation.items()} == {
        ("validation_matched", "accuracy"): [0.7],
        ("validation_matched", "loss"): [0.5],
        ("validation_mismatched", "accuracy"): [0.6],
        ("validation_mismatched", "loss"): [],
    }
    assert (history.lines, history.damaged, history.non_finite) == (3, 0, 0)


@pytest.mark.parametrize(
    "bad",
    [
        b'{"step": 20, "loss": 0.',
        b"\x00\x00\x00\x00",
        b'{"step": 20, "loss": 0.5\xff\xfe',
        b"[1, 2]",
        b'{"loss": 0.5}',
        b'{"step": 20, "loss": "x"}',
        b'{"step": "20", "loss": 0.5}',
        b'{"step": 20, "eval": 3}',
        b"null",
    ],
)
def test_damaged_lines_are_counted_and_leave_the_rest_alone(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 10, "loss": 0.5}\n' + bad + b'\n{"step": 30, "loss": 0.25}\n')
    history = read_history(path)
    assert (history.lines, history.damaged) == (3, 1)
    assert history.train["loss"].y == [0.5, 0.25]


def test_non_finite_values_are_counted_and_in_no_curve(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": NaN, "lr": 0.1}\n{"step": 2, "loss": Infinity, "lr": 0.2}\n')
    history = read_history(path)
    assert (history.non_finite, history.damaged) == (2, 0)
    assert history.train["loss"].y == []
    assert history.train["lr"].y == [0.1, 0.2]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeftlabError, match=r"metrics\.jsonl: no such file"):
        read_history(tmp_path / "metrics.jsonl")


def test_a_curve_of_one_point_has_one_tick() -> None:
    pytest.importorskip("matplotlib")
    curve = Curve()
    curve.add(7, 0.5)
    (plot,) = line_plot("Evaluation", [Line("accuracy", curve)], salt="one")
    svg = plot.svg
    assert svg.count(">7<") == 1 and ">6<" not in svg
