"""Heads trained by two processes (DDP) are the heads that one process trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.forked import python, two


def launched(*arguments: str, processes: int) -> None:
    """Run ``peftlab`` in this many gloo processes."""
    program = ("-m", "peftlab", *arguments)
    if processes == 2:
        ended = two(*program, CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")
    else:
        ended = [python(*program, CUDA_VISIBLE_DEVICES="")]
    assert not any(each.returncode for each in ended), "\n".join(each.stdout + each.stderr for each in ended)


@pytest.mark.parametrize(
    "method",
    ["null", pytest.param("{name: lora, r: 2}", marks=pytest.mark.long)],
    ids=["frozen target", "trained target"],
)
def test_heads(stories: Path, tmp_path: Path, method: str) -> None:
    small = [
        "data.samples=4",
        "data.max_new_tokens=16",
        "train.max_length=64",
        "train.max_steps=4",
        "train.lr=1e-3",
        "train.eps=1e-4",
    ]
    recipe = ["draft/ci", f"target={stories}", f"method={method}", "draft={kind: medusa, heads: 2}", *small]
    found = {}
    for processes in (1, 2):
        out = tmp_path / str(processes)
        launched("run", *recipe, "train.eval_every=4", "merge=false", f"output_dir={out}", processes=processes)
        found[processes] = load_file(out / "heads" / "model.safetensors")
        assert json.loads((out / "provenance.json").read_text())["processes"] == processes
    assert found[1].keys() == found[2].keys()
    for name, tensor in found[1].items():
        torch.testing.assert_close(found[2][name], tensor, rtol=1e-3, atol=2e-4)
    assert all(block.any() for name, block in found[1].items() if name.startswith("blocks.")), "the heads moved"
