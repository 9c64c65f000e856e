"""A method and a task that another distribution adds, each by one folder and one row."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import peftlab
from peftlab.methods.config import METHODS
from peftlab.tasks.table import TASKS
from tests.distribution import write_distribution
from tests.forked import Ended, python
from tests.training.tiny import save_model

FILES = {
    # A method: every LayerNorm is replaced by one whose output is scaled by a trained gain.
    "toy_gain/__init__.py": """
from peftlab.methods.config import Method

ROW = Method(config="toy_gain.config:GainConfig", plan="toy_gain.plan:plan", lr_ratio="toy_gain.plan:lr_ratio")
""",
    "toy_gain/config.py": """
from typing import Literal

from pydantic import Field

from peftlab.methods.config import MethodConfig


class GainConfig(MethodConfig):
    '''A trained gain on every LayerNorm.'''

    name: Literal["gain"] = "gain"
    start: float = Field(1.0, gt=0, description="Initial gain.")
""",
    "toy_gain/plan.py": """
from functools import partial

import torch
from torch import nn

from peftlab.methods.base import FOLDING, Adapted, recast
from peftlab.methods.base import Plan
from peftlab.methods.base import parameters_under, fully_trained


class GainNorm(Adapted, nn.LayerNorm):
    base_class = nn.LayerNorm
    added = ("gain",)

    def forward(self, x):
        y = self.base_class.forward(self, x)
        return y * self.gain if self.enabled else y

    def fold(self, how=FOLDING):
        folded = {}
        for key in ("weight", "bias"):
            if how.only in (None, key):
                before = getattr(self, key).detach().to(how.precision)
                after = before * self.gain.detach().to(how.precision)
                folded[key] = after.to(how.stored or getattr(self, key).dtype)
                if how.watch is not None:
                    how.watch(before, after - before, after, folded[key])
        return folded


def plan(model, config):
    norms = [name for name, module in model.named_modules() if type(module) is nn.LayerNorm]
    whole = fully_trained(model, config.modules_to_save)
    return Plan({name: partial(adapt, config=config) for name in norms}, parameters_under(model, whole))


def adapt(leaf, config):
    new = recast(GainNorm, leaf)
    new.gain = nn.Parameter(torch.full_like(leaf.weight, config.start))
    return new


def lr_ratio(config):
    return {"gain": 2.0}
""",
    # A task: is the number of words even? Its rows are made up, not read.
    "toy_parity/__init__.py": """
from peftlab.tasks.table import Task

ROW = Task("toy/parity", ("even", "odd"), ("text",), load="toy_parity.load:load", check="toy_parity.check:check")
""",
    "toy_parity/check.py": """
def check(task, data):
    return [(("data", "path"), "data.path: task toy/parity makes its own rows")] if data.path else []
""",
    "toy_parity/load.py": """
from peftlab.tasks.labelled_rows import Examples

WORDS = ["good", "bad", "film", "plot", "dull"]


def load(task, data, classes):
    lengths = [1 + (7 * i) % 9 for i in range(40)]
    texts = [" ".join(WORDS[(i + k) % 5] for k in range(n)) for i, n in enumerate(lengths)]
    rows = Examples(texts, None, [n % 2 for n in lengths])
    return task, {"train": rows.take(range(30)), "validation": rows.take(range(30, 40))}, {}
""",
}
POINTS = {"peftlab.methods": {"gain": "toy_gain:ROW"}, "peftlab.tasks": {"toy/parity": "toy_parity:ROW"}}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_distribution(tmp_path_factory.mktemp("toys"), "toys", FILES, POINTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "bert")


@pytest.fixture
def installed(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees the toys, whose tables are read anew."""
    monkeypatch.syspath_prepend(str(toys))
    importlib.invalidate_caches()
    for rows in (METHODS, TASKS):
        monkeypatch.delitem(vars(rows), "_rows", raising=False)


def _command(toys: Path, *arguments: object) -> Ended:
    return python("-m", "peftlab", *arguments, path=[toys], HF_HUB_OFFLINE="1", COLUMNS="200")


def _recipe(model: Path, directory: Path) -> Path:
    file = directory / "recipe.yaml"
    train = {"epochs": 2, "batch_size": 8, "max_length": 16, "lr": 1e-2, "warmup": 0.0}
    values = {
        "model": str(model),
        "task": "toy/parity",
        "method": {"name": "gain", "start": 1.5},
        "train": train,
        "output_dir": str(directory / "run"),
    }
    file.write_text(json.dumps(values))
    return file


@pytest.mark.slow
def test_a_toy_method_and_a_toy_task_run_from_the_command_line(
    toys: Path, model: Path, tmp_path: Path, installed: None
) -> None:
    recipe, run = _recipe(model, tmp_path), tmp_path / "run"
    assert '"gain"' in _command(toys, "schema").stdout
    done = _command(toys, "run", recipe)
    assert done.returncode == 0, done.stderr
    results = json.loads((run / "results.json").read_text())
    assert (results["task"], results["method"], results["metric"]) == ("toy/parity", "gain", "accuracy")
    tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    gains = {name: tensor for name, tensor in tensors.items() if name.endswith(".gain")}
    assert len(gains) == 5
    assert all((gain != 1.5).any() for gain in gains.values())

    # Report.
    assert "toy/parity" in (run / "report.html").read_text()
    assert "gain" in (run / "adapter" / "README.md").read_text()

    # Load into a fresh base; the merged model computes the same.
    torch.manual_seed(0)
    loaded = peftlab.load_adapter(
        AutoModelForSequenceClassification.from_pretrained(model, num_labels=2), run / "adapter"
    ).eval()
    merged = AutoModelForSequenceClassification.from_pretrained(run / "merged").eval()
    ids = torch.arange(5, 15)[None]
    torch.testing.assert_close(merged(ids).logits, loaded(ids).logits)

    # Scored again from its directory.
    scored = _command(toys, "eval", run)
    assert scored.returncode == 0, scored.stderr


@pytest.mark.slow
def test_a_stopped_toy_run_resumes_bit_for_bit(toys: Path, model: Path, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    assert _command(toys, "run", _recipe(model, whole)).returncode == 0
    shutil.copytree(whole, stopped)
    # As a run that was killed after its first evaluation leaves its directory.
    run = stopped / "run"
    newest = max((run / "checkpoints").glob("*.pt"), key=lambda file: file.stat().st_mtime)
    newest.unlink()
    for name in ("results.json", "adapter/adapter_model.safetensors"):
        (run / name).unlink()
    done = _command(toys, "resume", run)
    assert done.returncode == 0, done.stderr
    name = "run/adapter/adapter_model.safetensors"
    assert (stopped / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("method.start=0", "method.start: expected number above 0"),
        ("method.begin=1", "method.begin: unknown key"),
        ("method=gian", r"did you mean 'gain'?"),
        ("task=toy/party", r"did you mean 'toy/parity'?"),
        ("data.path=x.csv", "data.path: task toy/parity makes its own rows"),
    ],
)
def test_a_mistake_in_a_toys_section_is_told_like_any_other(
    toys: Path, model: Path, tmp_path: Path, override: str, reason: str
) -> None:
    done = _command(toys, "validate", _recipe(model, tmp_path), override)
    assert done.returncode == 2
    assert reason in done.stderr.replace("\n", " "), done.stderr
