"""Every part of ``measure.sh`` runs: on tiny models, on the CPU where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from peftlab.environment import resolve_device
from tests.gpu.__main__ import PARTS, ROOT, main
from tests.gpu.steps import SIDES

DEVICE = resolve_device("auto").type


def figures(part: str, out: Path) -> dict[str, Any]:
    """Return what a part writes."""
    found = json.loads((out / f"{part}.json").read_text())
    assert found["part"] == part and found["tiny"] and found["versions"]["torch"]
    return found["figures"]


@pytest.mark.slow
def test_steps_of_every_side(tmp_path):
    """Without a compiler where the device is the CPU; the whole script, below, has one."""
    # not torch._dynamo.config.disable, after which the process never compiles again
    with torch.compiler.set_stance("force_eager" if DEVICE == "cpu" else "default"):
        main(["steps-roberta", str(tmp_path), "--device", DEVICE, "--tiny"])
    found = figures("steps-roberta", tmp_path)
    assert not found["failed"] and found["sides"].keys() == SIDES.keys() and found["flops"] > 1e6
    assert all(ratio > 0 for ratio in found["faster_by"].values())


def test_decoding_is_that_of_generate(tmp_path):
    main(["decoding-llama-1b", str(tmp_path), "--device", DEVICE, "--tiny"])
    found = figures("decoding-llama-1b", tmp_path)["float32"]
    assert all(way["same_output"] for way in found["ways"].values())
    assert len(found["step_seconds"]) == 16


@pytest.mark.long
def test_the_script_runs_every_part(shared, tmp_path):
    options = {"OPTIONS": f"--device {DEVICE} --tiny", "OMP_NUM_THREADS": "1"}
    script = [ROOT / "tests" / "gpu" / "measure.sh", tmp_path]
    done = subprocess.run(script, env={**os.environ, **options}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert sorted(file.stem for file in tmp_path.glob("*.json") if file.stem in PARTS) == sorted(PARTS)
    assert figures("tests", tmp_path)["failures"] == 0
    assert figures("glue-rte", tmp_path)["cells"][0]["steps"] == 2
    assert figures("plan", tmp_path).keys() == {"fp32", "bf16"}
    assert len(figures("drafts", tmp_path)) == 2
    assert figures("merge", tmp_path)["sides"].keys() == {"ours", "ours, again", "peft", "cp + fsync"}
