"""docs/from_scratch.py runs, asserts that nothing is lost, and names files that exist."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.byte_tokens import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "from_scratch.py"


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the script in this process and return what it prints."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with torch.random.fork_rng():
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return capsys.readouterr().out


def test_the_script_runs_on_a_model_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_tokenizer(None, [], bos="<s>", eos="</s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=len(tokenizer),
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    said = run(monkeypatch, capsys, str(tmp_path / "model"), "--steps", "8", "--out", str(tmp_path / "merged"))
    assert "the same tokens" in said and "a plain LlamaForCausalLM" in said
    passes = {name: float(rate) for name, rate in re.findall(r"(plain|speculative).*: ([\d.]+) tokens a pass", said)}
    assert passes["plain"] == 1 and passes["speculative"] >= 1
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    moved = {name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, base.state_dict()[name])}
    assert moved == {f"model.layers.{i}.self_attn.{name}_proj.weight" for i in (0, 1) for name in "qv"}


@pytest.mark.long
def test_the_script_teaches_the_packaged_model(
    smollm2: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run(monkeypatch, capsys)
    assert '{"country": "Norway", "capital": "Oslo"}' in said
    assert float(re.findall(r"speculative.*: ([\d.]+) tokens a pass", said)[0]) > 1.5


def test_sampled_tokens_have_the_models_distribution() -> None:
    """The law that the script checks by adding up all ways to a token, with other numbers."""
    names = runpy.run_path(str(SCRIPT))
    for seed in range(20):
        torch.manual_seed(seed)
        names["check_that_it_is_lossless"](seed + 2)
    p = torch.tensor([0.5, 0.5, 0.0])
    assert torch.equal(names["residual"](p, p), p) and torch.equal(names["acceptance"](p, p)[:2], torch.ones(2))


def test_it_needs_torch_and_transformers_alone_and_names_files_that_exist() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    imports = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    imports |= {name.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for name in node.names}
    packages = {name.partition(".")[0] for name in imports}
    assert packages - set(sys.stdlib_module_names) == {"torch", "transformers"}
    named = set(re.findall(r"peftlab/[\w/]+(?:\.py)?", text))
    assert len(named) >= 9 and not {path for path in named if not (ROOT / path).exists()}
