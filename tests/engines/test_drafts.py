"""Drafts trained here, exported and served: what ``draft bench --engine`` measures in vLLM and in llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import invoke
from tests.engines.conftest import PYTHON

pytestmark = pytest.mark.engines
RECIPE = """kind: draft
target: {target}
draft: {draft}
method: {method}
data: {{prompts: {prompts}, max_prompts: 128, held_out: 8, max_new_tokens: 24, batch_size: 16}}
train: {{max_steps: 60, batch_size: 8, max_length: 96, lr: 3e-3}}
gamma: 3
"""
DRAFTS = {
    "eagle3": ("{kind: eagle3, steps: 2}", "null"),
    "eagle3 of few tokens": ("{kind: eagle3, steps: 2, vocabulary: 256}", "null"),
    "model": ("{kind: model, truncate: {layers: [0, 5]}}", "{name: full}"),
    "pard": ("{kind: pard}", "{name: full}"),
}


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    """A directory with prompts to train on and others to measure with."""
    place = tmp_path_factory.mktemp("texts")
    lines = [
        line for line in (shared / "data" / "lm" / "tinyshakespeare.txt").read_text().splitlines() if len(line) > 20
    ]
    for name, chosen in (("train", lines[:160]), ("held_out", lines[5000:5024])):
        (place / f"{name}.txt").write_text("\n".join(chosen) + "\n")
    return place


@pytest.fixture(scope="session")
def draft(target: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains a draft by its name in ``DRAFTS``, once."""
    runs: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name not in runs:
            place = tmp_path_factory.mktemp("draft")
            section, method = DRAFTS[name]
            values = {"target": target, "draft": section, "method": method, "prompts": texts / "train.txt"}
            (place / "draft.yaml").write_text(RECIPE.format(**values))
            assert invoke("run", place / "draft.yaml", f"output_dir={place / 'run'}").exit_code == 0
            runs[name] = place / "run"
        return runs[name]

    return train


@pytest.mark.parametrize(
    ("engine", "kind"),
    [*(("vllm", kind) for kind in DRAFTS), *(("llama.cpp", kind) for kind in DRAFTS if kind != "pard")],
)
def test_a_draft(
    engine: str,
    kind: str,
    target: Path,
    texts: Path,
    draft: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """The engine's outputs are its own plain ones and peftlab's; its acceptance is within the interval of ours."""
    monkeypatch.setenv("PEFTLAB_ENGINES", str(PYTHON))
    out = tmp_path / "bench.json"
    options = ["--prompts", texts / "held_out.txt", "--max-new-tokens", 32, "--gamma", 3, "--repeats", 1]
    place = ["--target", target, "--draft", draft(kind), "--engine", engine]
    done = invoke("draft", "bench", *place, *options, "--json", out)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    low, high = found["drafters"]["draft"]["accepted_share_interval"]
    there = found["engine"]
    assert there["name"] == engine and there["drafted"] > 100
    assert there["lossless"] and all(of["near_tie"] for of in there["divergences"])
    assert low <= there["accepted_share"] <= high
    share = f"{there['accepted_share']:.2f} of the drafted tokens accepted, {low:.2f} to {high:.2f} in peftlab"
    record_property("shows", [engine, f"draft: {kind}", f"{share}; the outputs are peftlab's"])
