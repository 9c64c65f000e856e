"""Runs that torchrun starts again after one of their processes has died."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny

import peftlab
from peftlab.errors import PeftlabError
from peftlab.pipelines.provenance import launch
from tests.forked import two

KILLED_AT = Path(__file__).with_name("killed_at.py")
SETTINGS = {"save_every": 2, "eval_every": 6, "max_steps": 6}


@pytest.fixture
def files(model, rows, tmp_path):
    """The recipes of the same run in two directories."""
    return [
        tiny.write_recipe(tiny.recipe(model, rows, tmp_path / name, **SETTINGS), tmp_path / f"{name}.yaml")
        for name in ("whole", "again")
    ]


def test_a_restarted_run_continues(files, tmp_path):
    """torchrun's variables, but not torchrun: two processes, of which one is killed after four steps of six."""
    whole, again = files
    assert [each.returncode for each in two("-m", "peftlab", "run", whole)] == [0, 0]
    job = {"KILLED": "saved 4", "TORCHELASTIC_RUN_ID": "job-7"}
    killed = two(KILLED_AT, "run", again, **job, TORCHELASTIC_RESTART_COUNT="0")
    assert killed[1].returncode == -9, killed[1].stderr[-3000:]
    assert not (tmp_path / "again" / "results.json").exists()
    ended = two(KILLED_AT, "run", again, **job, TORCHELASTIC_RESTART_COUNT="1")
    assert [each.returncode for each in ended] == [0, 0], ended[0].stderr[-3000:] + ended[1].stderr[-3000:]
    tiny.assert_same_run(tmp_path / "again", tmp_path / "whole")


@pytest.mark.long
def test_torchrun_restarts_a_run(files, tmp_path, monkeypatch):
    whole, again = files
    assert [each.returncode for each in two("-m", "peftlab", "run", whole)] == [0, 0]
    monkeypatch.setenv("KILLED", "saved 4")
    options = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    ended = tiny.command(*options, KILLED_AT, "run", again, timeout=600)
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert ended.stdout.count("trainable params") == 2  # it was started twice
    tiny.assert_same_run(tmp_path / "again", tmp_path / "whole")


def test_only_the_same_launch_continues(files, monkeypatch, tmp_path):
    """A run of another launch, or of none, is refused, restarted or not; without checkpoints it starts again."""
    _, file = files
    with tiny.stopped_after(3):
        peftlab.run(file)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    with pytest.raises(PeftlabError, match="again exists already"):
        peftlab.run(file)
    with tiny.stopped_after(3):
        peftlab.run(file, overwrite=True)
    shutil.rmtree(tmp_path / "again" / "checkpoints")
    with tiny.stopped_after(2):
        peftlab.run(file)
    assert peftlab.run(file).steps == 6
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-8")
    with pytest.raises(PeftlabError, match="again exists already"):
        peftlab.run(file)


def test_a_launch_without_a_name_is_known_by_its_logs(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for attempt in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/logs/torchelastic_ab/none_cd/attempt_{attempt}/3/error.json")
        assert launch() == "none_cd"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    assert launch() is None
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert launch() is None
