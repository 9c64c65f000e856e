"""Several processes: the same run as in one, FSDP2's shards, DeepSpeed's settings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
import torch
from launching import LAUNCHED, ended, free_port, launch, run_in_two, start
from safetensors.torch import load_file

from peftlab.errors import PeftlabError
from peftlab.training.config import TrainConfig
from peftlab.training.distributed import zero_plugin
from peftlab.training.state import flat

# --- Two processes with half of each batch give what one gives with all of it.
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


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "guide" / "training.md"


def documented(kind, tmp_path, **changes):
    """Write the accelerate configuration that the documentation shows for ``kind``, and return the option."""
    blocks = [block.split("```")[0] for block in DOCUMENT.read_text().split("```yaml\n")[1:]]
    (text,) = (block for block in blocks if f"distributed_type: {kind}\n" in block)
    for key, value in changes.items():
        text, found = re.subn(rf"(?m)^( *{key}:).*$", rf"\1 {value}", text)
        assert found == 1, key
    file = tmp_path / f"{kind}.yaml"
    file.write_text(text)
    return "--config_file", str(file)


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
    run_in_two(*files.values())
    assert_equals_one_process(still, rows, tmp_path, files)


@pytest.mark.slow
def test_the_command_line_in_two_processes(still, rows, tmp_path, monkeypatch):
    files = recipes(still, rows, tmp_path, ("lora",), monkeypatch)
    said = launch("-m", "peftlab", "run", files["lora"])
    assert_equals_one_process(still, rows, tmp_path, files)
    assert said.count("step 12/12") == 1


@pytest.mark.slow
def test_sharded_parameters(still, rows, tmp_path, monkeypatch):
    """The last run is one of five steps that continues to nine."""
    assert_equal_in_one_go_and_in_two(still, rows, tmp_path, monkeypatch, **SHARDED)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_zero(stage, still, rows, tmp_path, monkeypatch):
    """The last run is one of five steps that continues to nine."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    options = documented("DEEPSPEED", tmp_path, zero_stage=stage)
    assert_equal_in_one_go_and_in_two(still, rows, tmp_path, monkeypatch, options=options)


@pytest.mark.long
def test_two_machines(still, rows, tmp_path, monkeypatch):
    files = recipes(still, rows, tmp_path, ("lora",), monkeypatch)
    options = documented("MULTI_GPU", tmp_path, num_processes=2, main_process_ip="127.0.0.1")
    port = free_port()
    machines = [
        start("-m", "peftlab", "run", files["lora"], options=(*options, "--machine_rank", rank), port=port)
        for rank in "01"
    ]
    said = [ended(machine) for machine in machines]
    assert [text.count("step 12/12") for text in said] == [1, 1]
    assert_equals_one_process(still, rows, tmp_path, files)


def assert_equal_in_one_go_and_in_two(still, rows, tmp_path, monkeypatch, options=None, **environment):
    files = recipes(still, rows, tmp_path, ("lora", "houlsby", "full"), monkeypatch)
    parts = []
    for steps in (5, 9):
        settings = {**UNEVEN, "scheduler": "constant", "max_steps": steps}
        values = tiny.recipe(still, rows, tmp_path / "two-parts", "lora", **settings)
        parts.append(tiny.write_recipe(values, tmp_path / f"{steps}.yaml"))
    runs = (*files.values(), parts[0], f"resume:{parts[1]}")
    if options is None:
        run_in_two(*runs, **environment)
    else:
        launch(LAUNCHED, *runs, options=options)
    assert_equals_one_process(still, rows, tmp_path, files)
    tiny.run({**values, "output_dir": str(tmp_path / "one-parts")})
    assert_same_end(tmp_path / "one-parts", tmp_path / "two-parts")


# --- The settings of DeepSpeed that are refused.
@pytest.fixture
def asked(monkeypatch):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

    def ask(**environment):
        for name, value in {"USE_DEEPSPEED": "true", **environment}.items():
            monkeypatch.setenv(f"ACCELERATE_{name}", value)

    return ask


def test_nobody_asks():
    assert zero_plugin(TrainConfig()) is None


@pytest.mark.parametrize(
    ("environment", "settings", "words"),
    [
        ({"DEEPSPEED_ZERO_STAGE": "3"}, {}, "ZeRO 3, which shards the parameters; for that use FSDP"),
        ({"DEEPSPEED_ZERO_STAGE": "0"}, {}, "ZeRO 0; set zero_stage to 1 or 2"),
        ({"DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, {}, "offload_optimizer_device"),
        ({}, {"precision": "fp16"}, "train.precision=fp16"),
        ({}, {"compile": True}, "train.compile"),
    ],
)
def test_what_is_refused(asked, environment, settings, words):
    asked(**environment)
    with pytest.raises(PeftlabError, match=words):
        zero_plugin(TrainConfig(**settings))


def test_a_schedule_of_its_own_is_refused(asked, tmp_path):
    file = tiny.write_recipe({"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR"}}, tmp_path / "ds")
    asked(DEEPSPEED_CONFIG_FILE=str(file))
    with pytest.raises(PeftlabError, match="its own scheduler"):
        zero_plugin(TrainConfig())
