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
        last = [torch.load(max((run / "checkpoints").glob("*.pt")), weights_only=True) for run in (one, two)]
        for left, right in (tensors, [state["adapter"] for state in last]):
            for name in left:
                torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-5, msg=f"{method} {name}")
        lines = [
            [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            for run in (one, two)
        ]
        assert len(lines[0]) == len(lines[1])
        for line, other in zip(*lines, strict=True):
            assert tiny_flat(line) == pytest.approx(tiny_flat(other), abs=1e-5)
        configs = [json.loads((run / "adapter" / "adapter_config.json").read_text()) for run in (one, two)]
        assert configs[0] == configs[1]


def tiny_flat(line):
    from peftlab.training.trackers import flat

    return flat(line)


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
    files = recipes(still, rows, tmp_path, ("lora", "houlsby", "full"), monkeypatch)
    launch(LAUNCHED, *files.values(), **SHARDED)
    assert_equals_one_process(still, rows, tmp_path, files)


