"""``peftlab adapter extract`` beside mergekit-extract-lora and a script that loads both models.

    MERGEKIT=.../bin/mergekit-extract-lora python -m tests.benchmarks.bench_extract [--large] [--rank N]

mergekit pins other versions, so it is run from an environment of its own, which the variable names; without it, it is
left out. Each side is a process of its own: seconds of wall and processor time, and the peak of resident memory, the
interpreter's and its libraries' included (the last row: a process that imports torch and transformers and ends).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_merge import MIB, ROOT, make_adapter, make_llama, make_smollm2

SCRIPT = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
tuned, base, out, rank = sys.argv[1:5]
a, b = (AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16) for place in (tuned, base))
factors = {}
for name, module in a.named_modules():
    if isinstance(module, torch.nn.Linear) and name != "lm_head":
        delta = module.weight.detach().float() - b.get_submodule(name).weight.detach().float()
        u, s, vh = torch.linalg.svd(delta, full_matrices=False)
        k = int(rank)
        factors[f"base_model.model.{name}.lora_A.weight"] = vh[:k].contiguous()
        factors[f"base_model.model.{name}.lora_B.weight"] = (u[:, :k] * s[:k]).contiguous()
save_file(factors, out)
"""


def make_finetuned(base: Path, work: Path) -> Path:
    """Write a finetuned model: the base with a merged LoRA of rank 16, rounded to its dtype."""
    from peftlab.checkpoints.merge.run import merge_checkpoint

    out = work / f"{base.name}-tuned"
    make_adapter(base, work / "adapter")
    merge_checkpoint(work / "adapter", base, out)
    return out


def measure(*command: object) -> dict[str, float]:
    """Run a program; return its wall and processor seconds and its peak of resident memory."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    process = subprocess.Popen([str(part) for part in command], env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[0]} failed")
    return {
        "seconds": time.perf_counter() - started,
        "processor": usage.ru_utime + usage.ru_stime,
        "peak": usage.ru_maxrss / 1024,
    }


def report(name: str, base: Path, work: Path, rank: int, *, alone: bool) -> None:
    """Measure one base and print the rows."""
    from peftlab.checkpoints.io.shards import open_shards

    tuned = make_finetuned(base, work)
    python, json_ = sys.executable, work / "out.json"
    rows: dict[str, dict[str, Any]] = {}
    options = ["--rank", rank, "--json", json_, "--quiet", "--overwrite"]
    rows["peftlab"] = measure(
        python, "-m", "peftlab", "adapter", "extract", tuned, "--base", base, "-o", work / "ours", *options
    )
    if not alone:
        rows["script"] = measure(python, "-c", SCRIPT, tuned, base, work / "script.safetensors", rank)
        if mergekit := os.environ.get("MERGEKIT"):
            rows["mergekit"] = measure(
                mergekit, "--model", tuned, "--base-model", base, "--out-path", work / "theirs", "--max-rank", rank
            )
    rows["imports"] = measure(python, "-c", "import torch, transformers.models.llama.modeling_llama")
    largest = max(entry.nbytes for shard in open_shards(base) for entry in shard.entries.values()) / MIB
    adapter = (work / "ours" / "adapter_model.safetensors").stat().st_size / MIB
    print(f"\n{name}, rank {rank}; largest tensor {largest:.0f} MiB, adapter {adapter:.0f} MiB")
    for side, row in rows.items():
        print(
            f"  {side:10} {row['seconds']:8.1f} s   {row['processor']:8.1f} s of processor   peak {row['peak']:7.0f} MiB"
        )
    done = json.loads(json_.read_text())
    exact = sum(row["exact"] for row in done["modules"])
    print(
        f"  error of all differences together {done['error']:.3g}; {exact} of {len(done['modules'])} factored exactly"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--large", action="store_true", help="also 1.1 billion weights, peftlab alone")
    args, _ = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        sides = {"SmolLM2-135M": make_smollm2} | ({"Llama-1.1B": make_llama} if args.large else {})
        for name, make in sides.items():
            place = work / name
            place.mkdir()
            make(place / "base")
            report(name, place / "base", place, args.rank, alone=make is make_llama)


if __name__ == "__main__":
    main()
