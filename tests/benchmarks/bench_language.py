"""Finetuning a language model beside TRL's SFTTrainer with peft: real tokens a second, peak memory and final loss.

    python -m tests.benchmarks.bench_language [--rows N] [--held-out N] [--rounds N] [--data gsm8k] [--sides peftlab ...]

SmolLM2-135M in fp32, LoRA r=16 on all linear maps, batch 8, 512 tokens at most, no accumulation, and checkpointing only in
the sides named selective. Every side trains the same token ids with the same tokens marked, one epoch, in a process of its own; the sides take turns.
Loading and tokenising are not timed. The loss compared is that of held-out rows after training, by peftlab's own scoring.
Run alone on the machine; needs TRL, and GSM8K and alpaca in ../shared/data/lm.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import Figure, ranged

LM = Path(__file__).resolve().parents[3] / "shared" / "data" / "lm"
ROOT = Path(__file__).resolve().parents[2]
BATCH, LENGTH, LR = 8, 512, 1e-3
TITLE = "Training a language model"
CONDITIONS = (
    f"SmolLM2-135M in fp32, LoRA r=16 on all linear maps, batch {BATCH} of at most {LENGTH} tokens; TRL with peft on the same "
    "token ids; median and range over GSM8K and alpaca, trained on all tokens and on the answers."
)
TRAIN_ON = {"all": "all", "answers": "assistant"}
Figures = dict[str, float]


def make_base(directory: Path) -> None:
    """Write SmolLM2-135M and its tokenizer as fp32 safetensors, from the GGUF that travels as a package."""
    from peftlab.models.load import load_base, load_tokenizer
    from tests.packages import SMOLLM2

    load_base(SMOLLM2, "AutoModelForCausalLM")[0].save_pretrained(directory)
    load_tokenizer(SMOLLM2).save_pretrained(directory)


def make_rows(name: str, directory: Path, rows: int, held_out: int) -> None:
    """Write the first rows of a set to train on, and as many more as are held out, as prompt and completion."""
    if name == "gsm8k":
        read = [json.loads(line) for line in (LM / "gsm8k_train.jsonl").read_text().splitlines()]
        pairs = [(row["question"], row["answer"]) for row in read]
    else:
        read = json.loads((LM / "alpaca_en_demo_1000.json").read_text())
        pairs = [("\n".join(filter(None, (row["instruction"], row["input"]))), row["output"]) for row in read]
    chosen = [{"prompt": asked, "completion": answer} for asked, answer in pairs if answer.strip()][: rows + held_out]
    directory.mkdir(exist_ok=True)
    for split, part in (("train", chosen[:rows]), ("validation", chosen[rows:])):
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def recipe(base: Path, data: Path, train_on: str, packing: bool, out: Path, checkpointing: bool | str = False) -> Any:
    """Return peftlab's recipe of the run."""
    from peftlab.recipe.schema import FinetuneRecipe

    return FinetuneRecipe.model_validate(
        {
            "model": str(base),
            "task": "text/chat",
            "data": {"path": str(data), "train_on": TRAIN_ON[train_on]},
            "method": {"name": "lora", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
            "train": {
                "epochs": 1, "batch_size": BATCH, "eval_batch_size": 4, "max_length": LENGTH, "lr": LR, "warmup": 0,
                "scheduler": "constant", "packing": packing, "gradient_checkpointing": checkpointing,
            },
            "output_dir": str(out),
        }
    )  # fmt: skip


def loaded(
    base: Path, data: Path, train_on: str, packing: bool, out: Path, checkpointing: bool | str = False
) -> tuple[Any, Any]:
    """Return the recipe, and the task with its model, seeded."""
    from accelerate.utils import set_seed

    from peftlab.pipelines.finetune import load_task

    checked = recipe(base, data, train_on, packing, out, checkpointing)
    set_seed(0)
    task = load_task(checked)
    return checked, task


def ours(
    base: Path, data: Path, train_on: str, out: Path, *, packing: bool, checkpointing: bool | str = False
) -> Figures:
    """Train with peftlab's loop."""
    from accelerate import Accelerator

    from peftlab.methods.inject import inject
    from peftlab.pipelines.finetune import share_rows
    from peftlab.training.loop import train
    from peftlab.training.recomputation import recompute_activations

    checked, task = loaded(base, data, train_on, packing, out, checkpointing)
    inject(task.model, checked.method)
    if checkpointing:
        recompute_activations(task.model, selective=checkpointing == "selective")
    accelerator = Accelerator(cpu=True)
    share_rows(task, checked.train, accelerator)
    progress = train(task, checked.train, accelerator, out)
    return {
        "tokens": progress.tokens, "trained": sum(task.train["trained_tokens"]), "seconds": progress.seconds,
        "steps": progress.step, "loss": progress.last_metrics["validation"]["loss"], "peak": peak(),
    }  # fmt: skip


def theirs(
    base: Path, data: Path, train_on: str, out: Path, *, packing: bool = False, sampling: str = "random"
) -> Figures:
    """Train with TRL's SFTTrainer and peft, from the same ids; packed rows take as many examples a step on average."""
    import peft
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    _, task = loaded(base, data, train_on, False, out)
    columns = {
        "input_ids": list(task.train["input_ids"]),
        "labels": [
            [token if kept else -100 for token, kept in zip(ids, marks, strict=True)]
            for ids, marks in zip(task.train["input_ids"], task.train["trained"], strict=True)
        ],
    }
    mean = statistics.mean(task.train["length"])
    trainer = SFTTrainer(
        model=task.model,
        processing_class=task.processor,
        train_dataset=Dataset.from_dict(columns),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
        args=SFTConfig(
            output_dir=str(out), num_train_epochs=1, max_length=LENGTH, learning_rate=LR, lr_scheduler_type="constant",
            per_device_train_batch_size=max(1, round(BATCH * mean / LENGTH)) if packing else BATCH, packing=packing,
            train_sampling_strategy=sampling, gradient_checkpointing=False, bf16=False, use_cpu=True, seed=0,
            report_to="none", save_strategy="no", disable_tqdm=True,
        ),
    )  # fmt: skip
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *given: Any, **options: Any) -> None:
            marks.append(time.perf_counter())

        def on_train_end(self, *given: Any, **options: Any) -> None:
            marks.append(time.perf_counter())

    trainer.add_callback(Clock())
    trainer.train()
    highest = peak()
    trainer.model.eval()
    with torch.no_grad():
        loss = task.score(trainer.model.base_model.model)["validation"]["loss"]
    return {
        "tokens": sum(task.train["length"]), "trained": sum(task.train["trained_tokens"]),
        "seconds": marks[1] - marks[0], "steps": trainer.state.global_step, "loss": loss, "peak": highest,
    }  # fmt: skip


def peak() -> float:
    """Return the largest resident memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


SIDES: dict[str, Callable[..., Figures]] = {
    "peftlab": lambda *given: ours(*given, packing=False),
    "peftlab, selective": lambda *given: ours(*given, packing=False, checkpointing="selective"),
    "peftlab, packed": lambda *given: ours(*given, packing=True),
    "peftlab, packed, selective": lambda *given: ours(*given, packing=True, checkpointing="selective"),
    "TRL as run": theirs,
    "TRL, grouped by length": lambda *given: theirs(*given, sampling="group_by_length"),
    "TRL, packed": lambda *given: theirs(*given, packing=True),
}


def measure(side: str, base: Path, data: Path, train_on: str) -> Figures:
    """Take one measurement in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "tests.benchmarks.bench_language", "--side", side, base, data, train_on, out]
        done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"{side} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return dict(json.loads(line.removeprefix("RESULT ")))


def table(found: dict[str, list[Figures]]) -> list[str]:
    """Return a line per side, compared with the first one: medians, and the highest peak."""
    first, lines = next(iter(found)), []
    speed = {side: statistics.median(f["tokens"] / f["seconds"] for f in runs) for side, runs in found.items()}
    memory = {side: max(f["peak"] for f in runs) for side, runs in found.items()}
    loss = {side: statistics.median(f["loss"] for f in runs) for side, runs in found.items()}
    for side, runs in found.items():
        assert {f["trained"] for f in runs} == {found[first][0]["trained"]}, "not the same trained tokens"
        lines.append(
            f"| {side} | {speed[side]:.0f} | {speed[first] / speed[side]:.2f} × | {memory[side]:.0f} | "
            f"{memory[first] / memory[side]:.2f} | {runs[0]['steps']:.0f} | {loss[side]:.4f} | "
            f"{loss[side] / loss[first] - 1:+.1%} |"
        )
    return lines


def ratios(sets: list[dict[str, list[Figures]]]) -> list[Figure]:
    """Return how many times as fast, and with what share of the memory, we train beside TRL, over all sets."""
    work, figures = "finetuning a language model", []
    for ours, theirs in (
        ("", " as run"), (", selective", " as run"), ("", ", grouped by length"), (", packed", ", packed"),
        (", packed, selective", ", packed"),
    ):  # fmt: skip
        pairs = [(found[f"peftlab{ours}"], found[f"TRL{theirs}"]) for found in sets]
        speeds = [
            statistics.median(r["seconds"] for r in peer) / statistics.median(r["seconds"] for r in own)
            for own, peer in pairs
        ]
        peaks = [max(run["peak"] for run in own) / max(run["peak"] for run in peer) for own, peer in pairs]
        figures += [
            ranged(f"{work}{ours}", f"TRL{theirs}", speeds),
            ranged(f"{work}{ours}", f"TRL{theirs}", peaks, "memory"),
        ]
    return figures


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Print a table for each set and each choice of trained tokens, or take one measurement for the parent process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=64, help="rows to train on; about a minute a side at 32")
    parser.add_argument("--held-out", type=int, default=16, help="rows to compare the loss on")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--data", nargs="+", choices=["gsm8k", "alpaca"], default=["gsm8k", "alpaca"])
    parser.add_argument("--train-on", nargs="+", choices=list(TRAIN_ON), default=list(TRAIN_ON))
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--side", choices=list(SIDES))
    parser.add_argument("given", nargs="*")
    args = parser.parse_args(arguments)
    if args.side:
        base, data, train_on, out = args.given
        print("RESULT", json.dumps(SIDES[args.side](Path(base), Path(data), train_on, Path(out))))
        return []
    if not LM.is_dir():
        print("skipped: there is no ../shared/data/lm")
        return []
    sets = []
    print(f"SmolLM2-135M, fp32, LoRA r=16 on all linear maps, batch {BATCH}, {LENGTH} tokens, {args.rows} rows\n")
    print(
        "| | real tokens/s | peftlab is faster by | peak MB | peftlab's share | steps | held-out loss | to peftlab's |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as directory:
        base, data = Path(directory) / "base", Path(directory) / "rows"
        make_base(base)
        for name in args.data:
            make_rows(name, data, args.rows, args.held_out)
            for train_on in args.train_on:
                found: dict[str, list[Figures]] = {side: [] for side in args.sides}
                for _ in range(args.rounds):
                    for side in args.sides:
                        found[side].append(measure(side, base, data, train_on))
                        print(name, train_on, side, found[side][-1], file=sys.stderr, flush=True)
                print(f"| **{name}, trained: {train_on}** | | | | | | | |", *table(found), sep="\n", flush=True)
                sets.append(found)
    return ratios(sets) if len(args.sides) == len(SIDES) else []


if __name__ == "__main__":
    main()
