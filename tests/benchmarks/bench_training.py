"""Training throughput beside peft's: one epoch of LoRA on the same examples, batch size and learning rate.

Run alone on the machine: ``python -m tests.benchmarks training``. Needs GLUE's TSVs in ../shared/data/glue.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.figures import Figure

GLUE = Path(__file__).resolve().parents[3] / "shared" / "data" / "glue"
TASKS = {"cola": "CoLA", "stsb": "STS-B"}
EXAMPLES, BATCH, LR, REPEATS = 2560, 32, 1e-3, 3
TITLE = "Training a classifier"
CONDITIONS = (
    f"MiniLM-L6, LoRA r=8 on query and value, {EXAMPLES:,} examples in one epoch, batch {BATCH}; a process for each "
    "measurement."
)
CONTESTANTS = ("peftlab", "peft, dynamic padding", "peft, padded to 128")


def recipe(task: str, out: str) -> Any:
    """Return the recipe of one run: MiniLM, LoRA r=8 on query and value."""
    from peftlab.recipe.load import load_recipe
    from tests.packages import MINILM

    return load_recipe(
        f"glue/{task}-lora",
        [
            f"model={MINILM}", f"data.path={GLUE / TASKS[task]}", f"data.max_train_examples={EXAMPLES}",
            f"train.batch_size={BATCH}", f"train.lr={LR}", "train.epochs=1", "train.max_length=128",
            "method={name: lora, r: 8, lora_alpha: 16}", f"output_dir={out}",
        ],
    )  # fmt: skip


def ours(task: str) -> tuple[float, dict[str, float]]:
    """Train one epoch with peftlab's loop; return examples a second and the scores."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    from peftlab.methods.inject import inject
    from peftlab.pipelines.finetune import load_task
    from peftlab.training.loop import train

    with tempfile.TemporaryDirectory() as out:
        loaded = recipe(task, out)
        set_seed(0)
        held = load_task(loaded)
        inject(held.model, loaded.method)
        progress = train(held, loaded.train, Accelerator(cpu=True), Path(out))
    return progress.examples / progress.seconds, next(iter(progress.last_metrics.values()))


def theirs(task: str, padded: bool) -> tuple[float, dict[str, float]]:
    """Train one epoch with peft in the usual loop, batches in random order."""
    import peft
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    from peftlab.pipelines.finetune import load_task
    from peftlab.training.loop import lr_factor

    with tempfile.TemporaryDirectory() as out:
        loaded = recipe(task, out)
        set_seed(0)
        held = load_task(loaded)
        model: Any = peft.get_peft_model(
            held.model, peft.LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
        )
        columns = [name for name in ("input_ids", "token_type_ids", "label") if name in held.train.column_names]
        rows = [{name: held.train[i][name] for name in columns} for i in range(len(held.train))]
        pad = {"padding": "max_length", "max_length": 128} if padded else {"padding": True}

        def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            features = [{key: value for key, value in row.items() if key != "label"} for row in batch]
            inputs = dict(held.tokenizer.pad(features, return_tensors="pt", **pad))
            return inputs | {"labels": torch.tensor([row["label"] for row in batch])}

        loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
        optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda step: lr_factor(step, len(loader), loaded.train.warmup, "linear")
        )
        model.train()
        started = time.perf_counter()
        for batch in loader:
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
        seconds = time.perf_counter() - started
        Accelerator(cpu=True)  # the process state that scoring asks for the device
        scores = held.evaluate(model)
    return len(rows) / seconds, next(iter(scores.values()))


def child(task: str, name: str) -> None:
    """Run one contestant in this process and print its figures."""
    speed, scores = ours(task) if name == "peftlab" else theirs(task, padded=name.endswith("128"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("RESULT", speed, scores["loss"], peak)


def main() -> list[Figure]:
    """Print the table, medians of fresh processes that take turns, and return the ratios."""
    if not GLUE.is_dir():
        print("skipped: there is no ../shared/data/glue")
        return []
    figures = []
    print(f"MiniLM-L6, LoRA r=8 on query and value, {EXAMPLES} examples, batch {BATCH}, one epoch\n")
    print("| task | | examples/s | peftlab is faster by | dev loss | peak MB |\n| --- | --- | --- | --- | --- | --- |")
    for task, title in TASKS.items():
        found: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS}
        for _ in range(REPEATS):
            for name in CONTESTANTS:
                command = [sys.executable, "-m", "tests.benchmarks.bench_training", task, name]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
                if line is None:
                    raise SystemExit(done.stdout + done.stderr)
                found[name].append([float(value) for value in line.split()[1:]])
        medians = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
        }
        for name, (speed, loss, peak) in medians.items():
            print(
                f"| {task} | {name} | {speed:.0f} | {medians['peftlab'][0] / speed:.2f} × | {loss:.4f} | {peak:.0f} |",
                flush=True,
            )
        (ours_speed, _, memory), dynamic, padded = medians.values()
        work, longest = f"an epoch of LoRA training, {title}", "peft, padding to the longest of a batch"
        figures += [
            Figure(work, longest, ours_speed / dynamic[0]),
            Figure(work, longest, memory / dynamic[2], "memory"),
            Figure(work, "peft, padding to 128", ours_speed / padded[0]),
        ]
    return figures


if __name__ == "__main__":
    child(*sys.argv[1:]) if len(sys.argv) == 3 else main()
