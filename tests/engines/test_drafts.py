"""Drafts trained here, exported and served: what ``draft bench --engine`` measures in vLLM and in llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peftlab.errors import PeftlabError
from tests.command_line import invoke
from tests.engines.conftest import PYTHON
from tests.engines.models import DRAFTS

pytestmark = pytest.mark.engines


UNREAD = {"vllm": ("early_exit", "dspark"), "llama.cpp": ("early_exit", "pard")}


@pytest.mark.parametrize(
    ("engine", "kind"), [(engine, kind) for engine, unread in UNREAD.items() for kind in DRAFTS if kind not in unread]
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


@pytest.mark.shows(
    "vllm", "draft: dspark", "refused on a CPU: its Model Runner V2 alone serves DSpark, and needs Triton"
)
def test_vllm_has_no_dspark_on_a_cpu(
    target: Path, texts: Path, draft: Any, tmp_path: Path, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is accepted; the runner that a CPU has is not for it, and what vLLM says is said."""
    monkeypatch.setenv("PEFTLAB_ENGINES", str(PYTHON))
    out = tmp_path / "bench.json"
    place = ["--target", target, "--draft", draft("dspark"), "--engine", "vllm", "--json", out]
    with pytest.raises(PeftlabError, match="Model Runner V1 does not support: dspark speculative decoding"):
        invoke("draft", "bench", *place, "--prompts", texts / "held_out.txt", "--gamma", 3, "--max-new-tokens", 4)
    assert not out.exists()


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_a_plan_by_the_steps_of_llama_cpp(
    kind: str, target: Path, draft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each draft length is a server of its own; a gain is tau by what its steps cost there."""
    monkeypatch.setenv("PEFTLAB_ENGINES", str(PYTHON))
    where = ["--target", target, "--draft", draft(kind), "--engine", "llama.cpp"]
    how = ["--max-gamma", 2, "--repeats", 2, "--context", 32]
    done = invoke("draft", "plan", *where, *how, "--json", tmp_path / "plan.json", "--html", tmp_path / "plan.html")
    assert done.exit_code == 0 and "drafting included" in done.output, done.output
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["engine"].startswith("llama.cpp (xllamacpp") and found["context"] == 32
    assert len(found["target_seconds"]) == len(found["verification"]) == 3
    assert all(0 < low <= high for low, high in found["target_range"])
    assert [row["cap"] for row in found["gammas"]] == [(1 + i) / found["verification"][i] for i in (1, 2)]
    assert "perfect draft" in found["verdict"]
