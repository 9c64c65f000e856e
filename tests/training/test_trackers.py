from __future__ import annotations

import json

import pytest

from peftlab.errors import PeftlabError
from peftlab.training.trackers import JsonlTracker, check_trackers, flat


def test_lines_and_positions(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log({"loss": 0.5}, 1)
    first = tracker.position()
    tracker.log({"split": "dev", "eval": {"accuracy": 1.0}}, 1)
    assert tracker.position() == path.stat().st_size > first
    tracker.finish()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 0.5},
        {"step": 1, "split": "dev", "eval": {"accuracy": 1.0}},
    ]


def test_a_resumed_file_is_cut_to_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log({"loss": 0.5}, 1)
    kept = tracker.position()
    tracker.log({"loss": 9.0}, 2)
    tracker.finish()
    again = JsonlTracker(path, kept)
    again.log({"loss": 0.25}, 2)
    again.finish()
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [0.5, 0.25]
    JsonlTracker(path).finish()
    assert path.read_bytes() == b""


def test_numbers_that_json_does_not_have(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log({"grad_norm": float("inf"), "eval": {"loss": float("nan"), "accuracy": 0.5}}, 1)
    tracker.finish()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line == {"step": 1, "grad_norm": None, "eval": {"loss": None, "accuracy": 0.5}}


def test_flat_names():
    assert flat({"eval": {"accuracy": 1.0}, "split": "dev", "loss": 2}) == {"eval/accuracy": 1.0, "loss": 2}


def test_a_tracker_that_is_not_installed():
    check_trackers([])
    with pytest.raises(PeftlabError, match=r"pip install 'peftlab\[no_such_tracker\]'"):
        check_trackers(["no_such_tracker"])
