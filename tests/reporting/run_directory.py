"""A run directory as a finetuning run leaves it, written from plain values: input of the reporting tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

RECIPE = """\
kind: finetune
model: FacebookAI/roberta-base
revision: null
task: glue/mrpc
data:
  path: null
method:
  name: lora
  r: 8
  alpha: 16
  target_modules: [query, value]
train:
  epochs: 6
  batch_size: 32
  lr: 4e-4
  seed: 17
output_dir: runs/mrpc-lora
"""

PROVENANCE = {
    "git": {"sha": "8d0f3b1c5a7e42f09b6d1e3c7a5f2b4d6e8c0a1f", "dirty": False},
    "versions": {"python": "3.11.9", "peftlab": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
    "device": "NVIDIA H200",
    "seed": 17,
    "data": {"source": "https://huggingface.co/datasets/nyu-mll/glue", "fingerprint": "c1a5d0b29f3e7746"},
    "command": ["peftlab", "finetune", "recipes/glue/mrpc.yaml"],
}


def results(**changes: Any) -> dict[str, Any]:
    """The contents of ``results.json``, with ``changes``."""
    values = {
        "task": "glue/mrpc",
        "method": "lora",
        "metric": "accuracy",
        "score": 0.8872549,
        "metrics": {"accuracy": 0.8872549, "f1": 0.9181495, "loss": 0.4127},
        "baseline_score": 0.6838235,
        "trainable_parameters": 887_042,
        "total_parameters": 125_534_212,
        "train_seconds": 194.27,
        "examples_per_second": 113.3,
        "tokens_per_second": 6042.8,
        "padding_share": 0.0312,
        "peak_rss_mb": 2318.4,
        "seed": 17,
        "best_step": 575,
        "left_out": {"train": 3, "validation": 0},
        "merge": {"max_logit_difference": 2.9e-06, "latency_ratio": 0.871, "predictions_equal": True},
    }
    return values | changes


def metric_lines(steps: int, every: int = 5, eval_every: int = 115) -> list[str]:
    """Lines of ``metrics.jsonl``: falling noisy loss, linear learning rate, an evaluation now and then."""
    lines = []
    for step in range(every, steps + 1, every):
        epoch = round(step / eval_every, 3)
        loss = 0.25 + 0.45 * math.exp(-3 * step / steps) + 0.05 * math.sin(step * 1.7)
        lr = 4e-4 * min(step / (0.06 * steps), (steps - step) / (0.94 * steps))
        lines.append(json.dumps({"step": step, "epoch": epoch, "loss": loss, "lr": lr, "grad_norm": 1 + loss}))
        if step % eval_every == 0:
            accuracy = 0.89 - 0.2 * math.exp(-4 * step / steps)
            scores = {
                "accuracy": accuracy,
                "f1": accuracy + 0.03,
                "loss": 0.35 + 0.3 * math.exp(-4 * step / steps),
            }
            lines.append(json.dumps({"step": step, "epoch": epoch, "split": "validation", "eval": scores}))
    return lines


def write_run(directory: Path, *, recipe: str = RECIPE, lines: list[str] | None = None, **changes: Any) -> Path:
    """Write a run directory; ``changes`` are made to its results."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "recipe.yaml").write_text(recipe, encoding="utf-8")
    (directory / "provenance.json").write_text(json.dumps(PROVENANCE, indent=2), encoding="utf-8")
    (directory / "results.json").write_text(json.dumps(results(**changes), indent=2), encoding="utf-8")
    text = "\n".join(metric_lines(690) if lines is None else lines) + "\n"
    (directory / "metrics.jsonl").write_text(text, encoding="utf-8")
    return directory
