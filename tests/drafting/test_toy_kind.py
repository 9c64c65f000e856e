"""A kind of draft added by another distribution: a section, a class and a row, from recipe to report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distribution import write_distribution
from tests.forked import python

CONFIG = '''
from typing import ClassVar, Literal
from pydantic import Field
from peftlab.drafting.config import DraftConfig

class AheadDraft(DraftConfig):
    """One linear map from the target's last hidden state to the token after the next."""

    kind: Literal["ahead"] = "ahead"
    usual_method: ClassVar[str | None] = None
    scale: float = Field(default=1.0, gt=0, description="Of the logits.")

    def problems(self, recipe):
        if recipe.method is not None:
            yield "method", "the target stays as it is; write method: null"
'''
ROW = """
from peftlab.drafting.table import DraftRow

AHEAD = DraftRow(config="toy.config:AheadDraft", kind="toy.ahead:AheadKind", folder="heads", file="ahead.safetensors")
"""
CODE = """
from functools import partial
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from peftlab.decoding.state_drafters import HeadsDrafter, tree_tokens
from peftlab.drafting.base import DraftKind, ServedDraft
from peftlab.drafting.target import frozen_hidden, last_hidden
from peftlab.drafting.text import Collate
from peftlab.errors import PeftlabError

class Ahead(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.map = nn.Linear(*reversed(weight.shape), bias=False)
        self.map.weight = nn.Parameter(weight.detach().clone())
        self.vocab_size, self.depth, self.ranks = len(weight), 1, None
    def tokens(self, hidden, last, tree):
        return tree_tokens(self.map(hidden)[None], last, tree)

class Trained(nn.Module):
    def __init__(self, target, head):
        super().__init__()
        self.target, self.head = target, head
    def forward(self, **inputs):
        return self.target(**inputs)

def pairs(hidden, ids, weights):
    kept = weights[:, 1:-1] > 0
    return hidden[:, :-2][kept], ids[:, 2:][kept]

class AheadKind(DraftKind):
    name = "ahead"

    def check(self, target): pass

    def load(self, target):
        self.model = Trained(target, Ahead(target.get_output_embeddings().weight))
        self.adapted, self.target, self.base = target, target, self.recipe.target

    def loss(self):
        def summed(model, inputs):
            hidden = last_hidden(model, inputs["input_ids"], inputs["attention_mask"]).detach()
            states, tokens = pairs(hidden, inputs["input_ids"], inputs["weights"])
            return F.cross_entropy(self.config.scale * self.model.head.map(states), tokens, reduction="sum")
        return summed

    @torch.no_grad()
    def score(self, model, data, batch_size):
        batch = Collate()([data[i] for i in range(len(data))])
        hidden = frozen_hidden(model, batch["input_ids"], batch["attention_mask"])
        states, tokens = pairs(hidden, batch["input_ids"], batch["weights"])
        return {"acceptance": (model.head.map(states).argmax(-1) == tokens).double().mean().item()}

    def save(self, train):
        self.stored.mkdir(exist_ok=True)
        save_file({"weight": self.model.head.map.weight.detach()}, self.stored / "ahead.safetensors")

    def drafter(self, saved):
        return None if saved is None else ServedDraft(self.target, partial(HeadsDrafter, self.model.head.eval()))

    @classmethod
    def open(cls, place, loader):
        head = Ahead(load_file(Path(place) / "ahead.safetensors")["weight"])
        return loader.pair(head.map.weight.numel(), heads=head)

    @classmethod
    def export(cls, place, consumer):
        raise PeftlabError(f"{place}: for {consumer} there is no such draft")

    @classmethod
    def update(cls, config, newest, log):
        raise PeftlabError(f"{newest}: not updated")
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {"toy/__init__.py": "", "toy/config.py": CONFIG, "toy/row.py": ROW, "toy/ahead.py": CODE}
    root = tmp_path_factory.mktemp("distribution")
    return write_distribution(root, "toy", files, {"peftlab.drafts": {"ahead": "toy.row:AHEAD"}})


def peftlab(toy: Path, *arguments: object, status: int = 0) -> str:
    """Run the command line as a process that has the distribution installed, and return what it said."""
    done = python("-m", "peftlab", *arguments, path=[toy])
    assert done.returncode == status, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def test_from_recipe_to_report(toy: Path, stories: Path, tmp_path: Path) -> None:
    small = ["data.samples=4", "data.max_new_tokens=24", "train.max_length=64", "train.epochs=8", "train.lr=2e-2"]
    recipe = ["draft/ci", f"target={stories}", "~method", "draft={kind: ahead}", *small]
    said = peftlab(toy, "validate", *recipe[:3], "draft={kind: ahed}", status=2)
    assert (
        "unknown draft 'ahed' (did you mean 'ahead'?); one of model, early_exit, medusa, pard, gated_lora, hydra, mtp, eagle3, dflash, ahead"
        in said
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    peftlab(toy, "run", *recipe, f"output_dir={whole}")
    results = json.loads((whole / "results.json").read_text())
    assert (results["draft"], results["method"]) == ("ahead", None)
    assert results["score"] > results["baseline_score"]
    assert results["decoding"]["after"]["lossless"] is True
    assert not (whole / "adapter").exists() and not (whole / "merged").exists()

    shutil.copytree(whole, cut)
    sorted((cut / "checkpoints").glob("step-*.pt"))[-1].unlink()
    for name in ("results.json", "heads/ahead.safetensors"):
        (cut / name).unlink()
    peftlab(toy, "resume", cut)
    one, other = (load_file(run / "heads" / "ahead.safetensors")["weight"] for run in (whole, cut))
    assert one.equal(other), "resumed equals uninterrupted"

    assert "acceptance" in (cut / "report.html").read_text()
    plain = peftlab(toy, "generate", "--target", stories, "--prompt", "Once upon", "--max-new-tokens", 20)
    drafted = peftlab(
        toy, "generate", "--target", stories, "--draft", cut, "--prompt", "Once upon", "--max-new-tokens", 20
    )
    assert plain.split(" [")[0] == drafted.split(" [")[0]
    refused = peftlab(
        toy, "draft", "export", cut, "--for", "vllm", "--out", tmp_path / "x", "--target", stories, status=2
    )
    assert "there is no such draft" in refused
    assert "not updated" in peftlab(toy, "draft", "update", cut, "--requests", tmp_path / "log.jsonl", status=2)
