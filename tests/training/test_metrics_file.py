from __future__ import annotations

import json

import pytest

from peftlab.errors import PeftlabError
from peftlab.training.distributed import check_trackers
from peftlab.training.state import MetricsFile, flat


def test_lines_and_positions(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1, "loss": 0.5})
    first = file.position()
    file.write({"step": 1, "split": "dev", "eval": {"accuracy": 1.0}})
    assert file.position() == path.stat().st_size > first
    file.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 0.5},
        {"step": 1, "split": "dev", "eval": {"accuracy": 1.0}},
    ]


def test_a_resumed_file_is_cut_to_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1, "loss": 0.5})
    kept = file.position()
    file.write({"step": 2, "loss": 9.0})
    file.close()
    again = MetricsFile(path, kept)
    again.write({"step": 2, "loss": 0.25})
    again.close()
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [0.5, 0.25]
    MetricsFile(path).close()
    assert path.read_bytes() == b""


def test_numbers_that_json_does_not_have(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "grad_norm": float("inf"), "eval": {"loss": float("nan"), "accuracy": 0.5}})
    file.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line == {"step": 1, "grad_norm": None, "eval": {"loss": None, "accuracy": 0.5}}


def test_flat_names():
    assert flat({"eval": {"accuracy": 1.0}, "split": "dev", "loss": 2}) == {"eval/accuracy": 1.0, "loss": 2}


def test_a_tracker_that_is_not_installed():
    check_trackers([])
    with pytest.raises(PeftlabError, match=r"pip install 'peftlab\[no_such_tracker\]'"):
        check_trackers(["no_such_tracker"])
