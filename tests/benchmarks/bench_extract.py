"""``peftlab adapter extract`` beside mergekit-extract-lora and a script that loads both models.

    MERGEKIT_PYTHON=.../bin/python python -m tests.benchmarks.bench_extract [--large] [--rank N]

mergekit needs other versions of its libraries, so it runs in an environment of its own, whose Python the variable names;
without it, it is left out. Each side is a process of its own: wall and processor time, and the peak of resident memory
above what the interpreter and the imported libraries hold before the work begins.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.bench_merge import MIB, ROOT, make_adapter, make_llama, make_smollm2
from tests.benchmarks.figures import Figure

# Each side is imported first; then the peak of resident memory starts again from what is resident.
START = """
import json, os, resource, sys, time
from pathlib import Path
def resident(field):
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field)).split()[1])
def start():
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmHWM"), time.perf_counter(), time.process_time()
def stop(started):
    before, wall, processor = started
    found = {"seconds": time.perf_counter() - wall, "processor": time.process_time() - processor}
    print(json.dumps(found | {"peak": (resident("VmHWM") - before) / 1024}))
tuned, base, out, rank = sys.argv[1:5]
"""
OURS = """
import transformers.models.llama.modeling_llama
from peftlab.checkpoints.extract import extract_adapter
from peftlab.files import to_json
started = start()
done = extract_adapter(tuned, base, out, rank=int(rank))
stop(started)
Path(out + ".json").write_text(json.dumps(to_json(done)))
"""
SCRIPT = """
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
import transformers.models.llama.modeling_llama
started = start()
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
stop(started)
"""
MERGEKIT = """
import transformers.models.llama.modeling_llama
from mergekit.scripts.extract_lora import main
started = start()
options = ["--model", tuned, "--base-model", base, "--out-path", out, "--max-rank", rank, "--quiet"]
main([*options, "--lazy-unpickle", "--exclude-regex", "embed_tokens|lm_head|norm"], standalone_mode=False)
stop(started)
"""


TITLE = "An adapter from two checkpoints"
CONDITIONS = (
    "SmolLM2-135M in bf16 and the same with a merged LoRA, `--rank 16`; the script loads both models and takes "
    "`torch.linalg.svd` of each difference."
)


def make_finetuned(base: Path, work: Path) -> Path:
    """Write a finetuned model: the base with a merged LoRA of rank 16, rounded to its dtype."""
    from peftlab.checkpoints.merge import merge_checkpoint

    out = work / f"{base.name}-tuned"
    make_adapter(base, work / "adapter")
    merge_checkpoint(work / "adapter", base, out)
    return out


def measure(python: str, code: str, *arguments: object) -> dict[str, float]:
    """Run one side in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [python, "-c", START + code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{python} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(name: str, base: Path, work: Path, rank: int, *, alone: bool) -> list[Figure]:
    """Measure one base, print the rows and return the ratios."""
    from peftlab.checkpoints.tensors import open_shards

    tuned = make_finetuned(base, work)
    rows = {"peftlab": measure(sys.executable, OURS, tuned, base, work / "ours", rank)}
    if not alone:
        rows["script"] = measure(sys.executable, SCRIPT, tuned, base, work / "script.safetensors", rank)
        if python := os.environ.get("MERGEKIT_PYTHON"):
            rows["mergekit"] = measure(python, MERGEKIT, tuned, base, work / "theirs", rank)
    largest = max(entry.nbytes for shard in open_shards(base) for entry in shard.entries.values()) / MIB
    adapter = (work / "ours" / "adapter_model.safetensors").stat().st_size / MIB
    print(f"\n{name}, rank {rank}; largest tensor {largest:.0f} MiB, adapter {adapter:.0f} MiB")
    for side, row in rows.items():
        times = f"{row['seconds']:8.1f} s   {row['processor']:8.1f} s of processor"
        print(f"  {side:10} {times}   peak {row['peak']:7.0f} MiB")
    print(f"  peak / (adapter + 3 largest) {rows['peftlab']['peak'] / (adapter + 3 * largest):.2f}")
    done = json.loads((work / "ours.json").read_text())
    exact = sum(row["exact"] for row in done["modules"])
    print(
        f"  error of all differences together {done['error']:.3g}; {exact} of {len(done['modules'])} factored exactly"
    )
    ours, work_done = rows["peftlab"], "extracting an adapter"
    peers = {"mergekit": "mergekit-extract-lora", "script": "a script with both models"}
    return [
        figure
        for side, peer in peers.items()
        if (row := rows.get(side)) is not None
        for figure in (
            Figure(work_done, peer, row["seconds"] / ours["seconds"]),
            Figure(work_done, peer, ours["peak"] / row["peak"], "memory"),
        )
    ]


def main() -> list[Figure]:
    """Run the benchmark."""
    found = []
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
            found += report(name, place / "base", place, args.rank, alone=make is make_llama)
    return found


if __name__ == "__main__":
    main()
