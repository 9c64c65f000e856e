"""What of DeepSpeed is refused; test_processes.py trains with it."""

from __future__ import annotations

import pytest
import tiny

from peftlab.errors import PeftlabError
from peftlab.training.config import TrainConfig
from peftlab.training.distributed import zero_plugin


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
