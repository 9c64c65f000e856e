"""``python -m tests.gpu PART OUT [--device DEVICE] [--tiny]``: measure one part and write OUT/PART.json.

``measure.sh`` runs every part. With ``--tiny`` models are tiny and repeats few: that shows that a part runs, on a CPU
too, and measures nothing.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from peftlab.environment import describe_environment, git_state, resolve_device
from peftlab.files import write_json
from tests.packages import SMOLLM2

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
TASKS = ("cola", "mrpc", "rte", "sst2")


@dataclass(frozen=True)
class Run:
    """How a part is measured: its name, where it writes, the device, and whether models are tiny."""

    part: str
    out: Path
    device: torch.device
    tiny: bool


def tests(run: Run) -> dict[str, Any]:
    """Run the tests that take the accelerator."""
    os.environ["PEFTLAB_TEST_GPU"] = "1"
    report, chosen = run.out / "tests.xml", ["-k", "plain_decoding"] if run.tiny else []
    where = "tests/decoding/test_lossless_gate.py" if run.tiny else "tests"
    call(
        ["-m", "pytest", where, "-m", "device", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen], (0, 1)
    )
    suite = next(xml.parse(report).getroot().iter("testsuite"))
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None or case.find("error") is not None]  # fmt: skip
    return {**{key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}, "failed": failed}


def glue(run: Run) -> dict[str, Any]:
    """Train LoRA on one task, three seeds; continues what an earlier call has left."""
    task = run.part.removeprefix("glue-")
    data = os.environ.get("PEFTLAB_GLUE", SHARED / "glue")
    table = run.out / run.part
    few = ["seeds=[0]", "train.max_steps=2", "data.max_train_examples=64"]
    call(
        ["-m", "peftlab", "run", ROOT / "tests/gpu/glue.yaml", f"tasks=[glue/{task}]", f"data.path={data}",
         f"output_dir={table}", "--device", run.device.type, *(few if run.tiny else [])]
    )  # fmt: skip
    cells = [json.loads(file.read_text()) for file in sorted(table.glob("cells/*/results.json"))]
    keys = ("score", "metrics", "steps", "train_seconds", "peak_gpu_mb", "peak_rss_mb")
    with (table / "table.csv").open() as lines:
        return {"table": list(csv.DictReader(lines)), "cells": [{key: cell.get(key) for key in keys} for cell in cells]}


def steps(run: Run) -> dict[str, Any]:
    """Time a training step beside peft's and unsloth's."""
    from tests.gpu.shapes import TINY, WORKS
    from tests.gpu.steps import measure

    name = run.part.removeprefix("steps-")
    if run.tiny:
        return measure(TINY[name.replace("8b", "1b")], run.device, rounds=1, repeats=2, size=64)
    return measure(WORKS[name], run.device, rounds=2, repeats=10)


def decoding(run: Run) -> dict[str, Any]:
    """Time greedy decoding beside ``transformers.generate``, in fp32 and in bf16."""
    from tests.gpu.decoding import measure, model_of
    from tests.gpu.shapes import TINY, WORKS

    place: Any = SMOLLM2 if run.part.endswith("smollm2") else WORKS["llama-1b"]
    new, repeats = (8, 2) if run.tiny else (128, 5)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(TINY["llama-1b"] if run.tiny else place, run.device, dtype)
        found[str(dtype).removeprefix("torch.")] = measure(model, run.device, new=new, repeats=repeats)
    return found


def plan(run: Run) -> dict[str, Any]:
    """Cost of each kind of draft, and the best length of each batch size."""
    found = {}
    target = SHARED / "weights" / "stories260K-hf" if run.tiny else SMOLLM2
    few = ["--context", "16", "--repeats", "2", "--max-gamma", "3"] if run.tiny else ["--batch", "1,4,16"]
    for dtype in ("fp32", "bf16"):
        file = run.out / f"plan-{dtype}.json"
        call(["-m", "peftlab", "draft", "plan", "--target", target, "--dtype", dtype, "--device", run.device.type,
              "--quiet", "--json", file, *few])  # fmt: skip
        found[dtype] = json.loads(file.read_text())
    return found


def drafts(run: Run) -> dict[str, Any]:
    """Speed-up of the trained drafts that PEFTLAB_DRAFTS lists (separated by ``:``), each for PEFTLAB_TARGET."""
    found = {}
    prompts = os.environ.get("PEFTLAB_PROMPTS", str(SHARED / "lm" / "spec_bench_question.jsonl"))
    few = ["--max-prompts", "2", "--max-new-tokens", "8", "--repeats", "1"] if run.tiny else ["--max-prompts", "20"]
    stories = SHARED / "weights" / "stories260K-hf"
    given = str(stories) if run.tiny else os.environ.get("PEFTLAB_DRAFTS", "")
    target = str(stories) if run.tiny else os.environ.get("PEFTLAB_TARGET", SMOLLM2)
    for draft in filter(None, given.split(":")):
        for dtype in ("fp32", "bf16"):
            file = run.out / f"draft-{Path(draft).name}-{dtype}.json"
            call(["-m", "peftlab", "draft", "bench", "--target", target, "--draft", draft, "--prompts", prompts,
                  "--dtype", dtype, "--device", run.device.type, "--quiet", "--json", file, *few])  # fmt: skip
            found[f"{draft}, {dtype}"] = json.loads(file.read_text())
    return found


def merge(run: Run) -> dict[str, Any]:
    """Merge a checkpoint of 15 GiB beside peft and ``cp``, on the disk of OUT."""
    import shutil

    from tests.benchmarks.bench_merge import make_adapter, measure
    from tests.gpu.shapes import TINY, WORKS

    base, adapter, out = (run.out / f"merge-{name}" for name in ("base", "adapter", "out"))
    for place in (base, adapter, out):
        shutil.rmtree(place, ignore_errors=True)
    work = TINY["llama-1b"] if run.tiny else WORKS["llama-8b"]
    work.model(run.device).save_pretrained(base, max_shard_size="4GB")
    make_adapter(base, adapter)
    sides = ("ours", "ours, again", "peft", "cp + fsync")
    found = {side: [measure(side, base, adapter, out) for _ in range(1 if run.tiny else 2)] for side in sides}
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    for place in (base, adapter, out):
        shutil.rmtree(place)
    return {"bytes": size, "sides": found}


PARTS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "tests": tests,
    **{f"glue-{task}": glue for task in TASKS},
    **{f"steps-{name}": steps for name in ("roberta", "llama-1b", "llama-8b", "llama-1b-nf4", "llama-8b-nf4")},
    "decoding-smollm2": decoding,
    "decoding-llama-1b": decoding,
    "plan": plan,
    "drafts": drafts,
    "merge": merge,
}


def call(arguments: list[Any], fine: tuple[int, ...] = (0,)) -> None:
    """Run Python in a process of its own, from the root of the repository."""
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, check=False)
    if done.returncode not in fine:
        raise SystemExit(f"{' '.join(map(str, arguments))}: exit code {done.returncode}")


def main(arguments: list[str] | None = None) -> None:
    """Measure a part and write what was found, with what it ran on."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    device = resolve_device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    figures = PARTS[args.part](Run(args.part, args.out.resolve(), device, args.tiny))
    memory = torch.cuda.get_device_properties(0).total_memory if device.type == "cuda" else None
    write_json(
        args.out / f"{args.part}.json",
        {
            "part": args.part, "date": str(datetime.date.today()), "tiny": args.tiny, **git_state(),
            **describe_environment(device), "device_memory": memory, "seconds": time.perf_counter() - started, "figures": figures,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
