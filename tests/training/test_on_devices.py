"""Training on the accelerator, where there is one, beside the same run on the CPU in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import BertForSequenceClassification

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.environment import resolve_device
from peftlab.models.load import load_base
from peftlab.pipelines.recipes import resume

pytestmark = pytest.mark.device
DEVICE = resolve_device("auto")
STEPS = 8
# How far a step's loss may be from that in fp32 on a CPU: the losses of a run are 0.04 to 0.3 apart.
CLOSE = {"fp32": 1e-3, "bf16": 1.5e-2, "fp16": 5e-3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random BERT without dropout, whose large weights make texts differ."""
    place = tiny.save_model(tmp_path_factory.mktemp("model") / "bert", dropout=0.0)
    bert = BertForSequenceClassification.from_pretrained(place)
    for parameter in bert.parameters():
        if parameter.ndim == 2:
            parameter.data *= 10
    bert.save_pretrained(place)
    return place


def recipe(model: Path, rows: Path, run: Path, method: str = "lora", **train: Any) -> dict[str, Any]:
    """Return a short run without dropout, whose random numbers depend on the device."""
    values = tiny.recipe(model, rows, run, method, **{"max_steps": STEPS, "eps": 1e-4, "save_every": 3, **train})
    return {**values, "method": {key: value for key, value in values["method"].items() if key != "lora_dropout"}}


def losses(run: Path) -> list[float]:
    """Return the training loss of each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def assert_follows(run: Path, other: Path, close: float) -> None:
    """Assert that two runs have as many steps, of nearly the same losses."""
    assert len(losses(other)) == STEPS and max(losses(other)) - min(losses(other)) > 0.04
    assert losses(run) == pytest.approx(losses(other), abs=close)


@pytest.fixture(scope="module")
def on_cpu(model, rows, tmp_path_factory):
    """Each method's run on the CPU in fp32."""
    place = tmp_path_factory.mktemp("cpu")
    for method in tiny.METHODS:
        tiny.run(recipe(model, rows, place / method, method), device="cpu")
    return place


@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize("method", tiny.METHODS)
def test_every_method_in_every_precision(model, rows, on_cpu, tmp_path, method, precision):
    if precision == "fp16" and DEVICE.type == "cpu":
        pytest.skip("a CPU has no fp16 with scaling")
    tiny.run(recipe(model, rows, tmp_path / "run", method, precision=precision))
    assert_follows(tmp_path / "run", on_cpu / method, CLOSE[precision])
    if method != "full":
        adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}


@pytest.mark.parametrize(
    "train", [{"gradient_checkpointing": True}, {"gradient_accumulation_steps": 3}, {"compile": True}], ids=str
)
def test_what_leaves_the_losses_as_they_are(model, rows, on_cpu, tmp_path, capsys, train):
    if "compile" in train and DEVICE.type == "cpu":
        pytest.skip("test_faults.py compiles on the CPU")
    torch._dynamo.reset()
    tiny.run(recipe(model, rows, tmp_path / "run", **train))
    if "continuing without it" in capsys.readouterr().out:
        pytest.skip("no compiler here")
    assert_follows(tmp_path / "run", on_cpu / "lora", CLOSE["fp32"])


@pytest.mark.parametrize("dtype", ["bf16", "nf4", "int8"])
def test_a_base_in_few_bits(model, rows, tmp_path, dtype):
    pytest.importorskip("bitsandbytes")
    for device in {DEVICE.type, "cpu"}:
        tiny.run({**recipe(model, rows, tmp_path / device), "base": {"dtype": dtype}}, device=device)
    assert_follows(tmp_path / DEVICE.type, tmp_path / "cpu", CLOSE["bf16"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_continues_on_the_device(model, rows, tmp_path, precision):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    tiny.run(recipe(model, rows, whole, precision=precision))
    with tiny.stopped_after(5):
        tiny.run(recipe(model, rows, stopped, precision=precision))
    resume(stopped)
    assert_follows(stopped, whole, CLOSE["fp32"])


def test_another_device_finishes_a_run(model, rows, on_cpu, tmp_path):
    with tiny.stopped_after(5):
        tiny.run(recipe(model, rows, tmp_path / "run"))
    resume(tmp_path / "run", device="cpu")
    assert_follows(tmp_path / "run", on_cpu / "lora", CLOSE["fp32"])


@pytest.mark.parametrize("method", ["lora", "bitfit"])
def test_the_merged_model_computes_what_was_trained(model, rows, tmp_path, method):
    tiny.run(recipe(model, rows, tmp_path / "run", method))
    merge_checkpoint(tmp_path / "run" / "adapter", str(model), tmp_path / "merged")
    plain, merged, trained = (load_base(str(place), num_labels=2)[0] for place in (model, tmp_path / "merged", model))
    peftlab.load_adapter(trained, tmp_path / "run" / "adapter")
    ids = torch.arange(5, 17, device=DEVICE)[None]
    with torch.no_grad():
        before, after, expected = (m.to(DEVICE).eval()(input_ids=ids).logits for m in (plain, merged, trained))
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=0)
    assert (before - expected).abs().max() > 1e-2
