"""Two processes with half of each batch give what one gives with all of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from peftlab.training.trackers import flat

LAUNCHED = Path(__file__).with_name("launched.py")
# 31 examples in batches of 6: the last one has one example, and three of its four parts have none. Nine
# examples in evaluation batches of 4: the second process has one batch less.
UNEVEN = {
    "batch_size": 6, "gradient_accumulation_steps": 2, "eval_batch_size": 4, "eps": 1e-4, "lr": 3e-3,
    "max_grad_norm": 0.05,
}  # fmt: skip
SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


def launch(*arguments, **environment):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # --multi_gpu makes accelerate start processes itself; with --cpu it leaves that to mpirun.
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    more = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    done = subprocess.run(
        [sys.executable, *launcher, *more, "--main_process_port", str(port), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**tiny.environment(), **environment},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def recipes(still, rows, tmp_path, methods, monkeypatch):
    monkeypatch.setitem(tiny.METHODS, "lora", {**tiny.METHODS["lora"], "lora_dropout": 0.0})
    return {
        method: tiny.write_recipe(
            tiny.recipe(still, rows, tmp_path / f"two-{method}", method, **UNEVEN), tmp_path / f"{method}.yaml"
        )
        for method in methods
    }


def assert_equals_one_process(still, rows, tmp_path, methods):
    for method in methods:
        one, two = tmp_path / f"one-{method}", tmp_path / f"two-{method}"
        assert json.loads((two / "provenance.json").read_text())["processes"] == 2
        results = tiny.run(tiny.recipe(still, rows, one, method, **UNEVEN))
        found = json.loads((two / "results.json").read_text())
        for name in ("score", "steps", "best_step", "trainable_parameters"):
            assert found[name] == results[name], (method, name)
        tensors = [load_file(run / "adapter" / "adapter_model.safetensors") for run in (one, two)]
        assert tensors[0].keys() == tensors[1].keys()
        for name in tensors[0]:
            torch.testing.assert_close(tensors[0][name], tensors[1][name], rtol=0, atol=1e-5, msg=name)
        assert_same_end(one, two)
        lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, two)]
        assert len(lines[0]) == len(lines[1])
        for line, other in zip(*lines, strict=True):
            assert flat(line) == pytest.approx(flat(other), abs=1e-5)
        configs = [json.loads((run / "adapter" / "adapter_config.json").read_text()) for run in (one, two)]
        assert configs[0] == configs[1]


def assert_same_end(one, two):
    files = [max((run / "checkpoints").glob("*.pt")) for run in (one, two)]
    assert files[0].name == files[1].name
    left, right = (torch.load(file, weights_only=True)["adapter"] for file in files)
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
def test_two_processes_equal_one(still, rows, tmp_path, monkeypatch):
    files = recipes(still, rows, tmp_path, ("bitfit", "houlsby", "full"), monkeypatch)
    launch(LAUNCHED, *files.values())
    assert_equals_one_process(still, rows, tmp_path, files)


@pytest.mark.slow
def test_the_command_line_in_two_processes(still, rows, tmp_path, monkeypatch):
    files = recipes(still, rows, tmp_path, ("lora",), monkeypatch)
    said = launch("-m", "peftlab", "run", files["lora"])
    assert_equals_one_process(still, rows, tmp_path, files)
    assert said.count("step 12/12") == 1


@pytest.mark.slow
def test_sharded_parameters(still, rows, tmp_path, monkeypatch):
    """The last run is one of five steps that goes on to nine."""
    files = recipes(still, rows, tmp_path, ("lora", "houlsby", "full"), monkeypatch)
    parts = []
    for steps in (5, 9):
        options = {**UNEVEN, "scheduler": "constant", "max_steps": steps}
        values = tiny.recipe(still, rows, tmp_path / "two-parts", "lora", **options)
        parts.append(tiny.write_recipe(values, tmp_path / f"{steps}.yaml"))
    launch(LAUNCHED, *files.values(), parts[0], f"resume:{parts[1]}", **SHARDED)
    assert_equals_one_process(still, rows, tmp_path, files)
    tiny.run({**values, "output_dir": str(tmp_path / "one-parts")})
    assert_same_end(tmp_path / "one-parts", tmp_path / "two-parts")
