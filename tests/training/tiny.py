"""A tiny BERT and a few rows of text on the disk, recipes over them, and how their results are compared."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

WORDS = ["good", "bad", "film", "plot", "dull", "fine", "the", "a", "was", "very", "and", "not"]
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"name": "lora", "r": 2, "lora_alpha": 4, "lora_dropout": 0.2},
    "houlsby": {"name": "houlsby", "bottleneck": 4},
    "bitfit": {"name": "bitfit"},
    "full": {"name": "full"},
    "head": {"name": "head"},
}


def save_model(directory: Path, dropout: float = 0.1, layers: int = 2) -> Path:
    """Write a random BERT of ``layers`` layers, with its tokenizer, and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (directory / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab=str(directory / "vocab.txt")).save_pretrained(directory)
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    BertForSequenceClassification(config).save_pretrained(directory)
    return directory


def save_rows(file: Path, n: int = 40, labels: tuple[str, ...] = ("neg", "pos")) -> Path:
    """Write ``n`` rows of text of various lengths and return the file."""
    generator = torch.Generator().manual_seed(7)
    lines = ["text,label"]
    for i in range(n):
        length = int(torch.randint(1, 14, (), generator=generator))
        words = [WORDS[int(k)] for k in torch.randint(0, len(WORDS), (length,), generator=generator)]
        lines.append(f"{' '.join(words)},{labels[i % len(labels)]}")
    file.write_text("\n".join(lines) + "\n")
    return file


def recipe(model: Path, rows: Path, run: Path, method: str = "lora", **train: Any) -> dict[str, Any]:
    """Return a recipe as the YAML has it: 31 examples to learn, 9 held out, no merge."""
    settings = {"epochs": 2, "batch_size": 8, "max_length": 16, "lr": 1e-2, "warmup": 0.0, "seed": 3}
    return {
        "model": str(model),
        "task": "text/classification",
        "data": {"path": str(rows), "text": ["text"], "label": "label", "validation": 9},
        "method": METHODS[method],
        "train": {**settings, **train},
        "merge": False,
        "output_dir": str(run),
    }


def run(values: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Run a recipe in this process and return what results.json contains."""
    from peftlab.pipelines.recipes import run_recipe
    from peftlab.recipe.schema import FinetuneRecipe

    return run_recipe(FinetuneRecipe.model_validate(values), **options).as_json()


@contextmanager
def stopped_after(steps: int) -> Iterator[None]:
    """A block in which a run gets SIGTERM after so many steps, and must end there with a checkpoint."""
    from peftlab.training.loop import Interrupted, StopSignals

    left = itertools.count(1 - steps)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted, match=f"after step {steps}"):
        patch.setattr(StopSignals, "received", lambda signals: 15 if next(left) == 0 else 0)
        yield


def write_recipe(values: dict[str, Any], file: Path) -> Path:
    """Write a recipe file: JSON, which is YAML, and return it."""
    file.write_text(json.dumps(values))
    return file


def command(*arguments: Any, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments and return what it said; no hub."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
        check=False,
    )


def environment() -> dict[str, str]:
    """Return the environment of a subprocess: this one, with the same package."""
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}


def assert_same(one: Any, other: Any, at: str = "") -> None:
    """Assert that nested values are equal, tensors bit for bit; measured seconds may differ."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for key in one.keys() - {"seconds", "earlier_seconds"}:
            assert_same(one[key], other[key], f"{at}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), at
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{at}/{i}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), at
    else:
        assert one == other, at


def assert_same_run(one: Path, other: Path) -> None:
    """Assert that two run directories hold the same metrics, adapter and checkpoints, bit for bit."""
    for name in ("metrics.jsonl", "adapter/adapter_model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    names = sorted(path.name for path in (one / "checkpoints").glob("*.pt"))
    assert names == sorted(path.name for path in (other / "checkpoints").glob("*.pt"))
    for name in names:
        states = [torch.load(run / "checkpoints" / name, weights_only=True) for run in (one, other)]
        assert_same(*states, at=name)


def prepare(values: dict[str, Any]) -> tuple[Any, Any]:
    """Return a recipe's ``train`` section and training problem, seeded and injected as a run does it."""
    from accelerate.utils import set_seed

    from peftlab.methods.inject import inject
    from peftlab.pipelines.finetune import load_task
    from peftlab.recipe.schema import FinetuneRecipe, injected_method

    checked = FinetuneRecipe.model_validate(values)
    set_seed(checked.train.seed)
    task = load_task(checked)
    inject(task.model, injected_method(checked.method, checked.train))
    return checked.train, task


def fit(values: dict[str, Any], directory: Path, change: Any = None, **options: Any) -> tuple[Any, Any]:
    """Train in this process; return the progress and the problem. ``change`` is called with the problem before."""
    from peftlab.files import write_mark
    from peftlab.pipelines.directory import RUN
    from peftlab.training.distributed import make_accelerator
    from peftlab.training.loop import train

    settings, problem = prepare(values)
    if change is not None:
        change(problem)
    directory.mkdir(exist_ok=True)
    write_mark(directory, RUN)
    return train(problem, settings, make_accelerator(settings, directory, "auto"), directory, **options), problem
