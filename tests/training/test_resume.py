"""N steps, a kill, a resume and M steps are N + M steps, bit for bit."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

from tests.forked import python

KILLED = Path(__file__).with_name("killed.py")


@pytest.mark.slow
def test_killed_and_resumed_for_every_method(model, rows, tmp_path):
    """Killed in step 8 of 12, in the second of three parts of its batch; epochs end at 4, 8 and 12."""
    options = {"epochs": 3, "gradient_accumulation_steps": 3, "save_every": 3}
    files = []
    for method in tiny.METHODS:
        (tmp_path / method).mkdir()
        values = tiny.recipe(model, rows, tmp_path / method / "run", method, **options)
        files.append(tiny.write_recipe(values, tmp_path / method / "recipe.yaml"))
    done = python(KILLED, *files, seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for method in tiny.METHODS:
        tiny.run(tiny.recipe(model, rows, tmp_path / method / "whole", method, **options))
        tiny.assert_same_run(tmp_path / method / "run", tmp_path / method / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop(number, model, rows, tmp_path):
    options = {"max_steps": 600, "eval_every": 100}
    file = tiny.write_recipe(tiny.recipe(model, rows, tmp_path / "run", **options), tmp_path / "recipe.yaml")
    process = subprocess.Popen(
        [sys.executable, "-m", "peftlab", "run", file],
        env=tiny.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    assert max((tmp_path / "run" / "checkpoints").glob("*.pt")).name < "step-00000600.pt"
    letters = "".join(said.replace("│", "").split())  # the message as it is, however it was wrapped
    assert f"stoppedby{number.name}afterstep" in letters
    assert f"continuewith`peftlabresume{tmp_path}/run`" in letters
    if number == signal.SIGINT:
        return
    done = python("-m", "peftlab", "resume", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    tiny.run(tiny.recipe(model, rows, tmp_path / "whole", **options))
    tiny.assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_finished_run_resumes_to_itself(model, rows, tmp_path):
    values = tiny.recipe(model, rows, tmp_path / "run")
    first = tiny.run(values)
    before = {
        name: (tmp_path / "run" / name).read_bytes() for name in ("metrics.jsonl", "adapter/adapter_model.safetensors")
    }
    again = tiny.run(values, resume=True)
    assert again["metrics"] == first["metrics"] and again["steps"] == first["steps"]
    for name, content in before.items():
        assert (tmp_path / "run" / name).read_bytes() == content
