"""Early exits: the final modules are found by what the model computes, not by what they are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from draft_models import requests, tiny
from torch import nn

from peftlab.drafting.acceptance import measure
from peftlab.drafting.early_exit import EarlyExitLoss, find_exit, measure_exits
from peftlab.drafting.objectives import Objective
from peftlab.drafting.target import truncate
from peftlab.drafting.text import Collate, make_dataset
from peftlab.errors import PeftlabError
from peftlab.methods.inject import inject, make_config, trainable_parameters
from peftlab.pipelines.recipes import run_recipe
from peftlab.recipe.load import load_recipe

NORMED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "gpt2": ("GPT2", {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 128}, ("transformer.ln_f",)),
    "opt": (
        "OPT",
        {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 32, "word_embed_proj_dim": 16},
        ("model.decoder.final_layer_norm",),
    ),
    "opt, projected": (  # as OPT-350M: no final norm, a projection to narrower embeddings
        "OPT",
        {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 32, "word_embed_proj_dim": 8,
         "do_layer_norm_before": False},
        ("model.decoder.project_out",),
    ),
    "gpt_neox": (
        "GPTNeoX",
        {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32},
        ("gpt_neox.final_layer_norm",),
    ),
    "bloom": ("Bloom", {"hidden_size": 16, "n_layer": 3, "n_head": 2}, ("transformer.ln_f",)),
    "mpt": ("Mpt", {"d_model": 16, "n_layers": 3, "n_heads": 2}, ("transformer.norm_f",)),
    "llama": (
        "Llama",
        {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32},
        ("model.norm",),
    ),
}  # fmt: skip


def make(name: str, vocab: int = 40) -> Any:
    """Return a random model whose norms do something, in eval mode."""
    family, sizes, _ = NORMED[name]
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "vocab_size": vocab}
    model = getattr(transformers, f"{family}ForCausalLM" if family != "GPT2" else "GPT2LMHeadModel")(
        getattr(transformers, f"{family}Config")(**sizes, **ids)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("name", NORMED)
def test_an_exit_is_the_model_cut_there(name: str) -> None:
    model, rows = make(name), make_dataset(requests())
    found = find_exit(model, 2)
    assert found.final == NORMED[name][2]
    expected = measure(model, truncate(model, [0, 1]), rows).rates()
    inject(model, make_config("lora", r=2, target_modules="all-linear"))
    early, whole = measure_exits(
        model.train(), [found], rows
    )  # with dropout on in GPT-2, were it not read in eval mode
    assert early.rates() == pytest.approx(expected, abs=1e-5)
    assert whole.rates()["acceptance"] == pytest.approx(1, abs=1e-6)
    assert model.training
    batch = Collate(pad=2)([rows[i] for i in range(len(rows))])
    EarlyExitLoss(Objective("kl"), [found], [1.0, 1.0])(model, batch).backward()
    assert any(p.grad is not None and p.grad.any() for p in trainable_parameters(model).values())


def test_what_is_no_exit_is_refused() -> None:
    with pytest.raises(PeftlabError, match="runs all 3 layers of LlamaForCausalLM"):
        find_exit(make("llama"), 3)

    class Scaled(transformers.LlamaForCausalLM):
        """Scales the states outside any module, as MiniCPM does."""

        def forward(self, input_ids: Any = None, **options: Any) -> Any:
            options.pop("logits_to_keep", None)
            answer = self.model(input_ids=input_ids, **options)
            answer.logits = self.lm_head(answer.last_hidden_state / 2)
            return answer

    with pytest.raises(PeftlabError, match="computes something outside its modules"):
        find_exit(Scaled(tiny(0, layers=3).config).eval(), 2)


def test_a_wrapped_final_norm_is_one_module() -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(hidden)

    model = make("llama")
    model.model.norm = Doubled(model.model.norm)
    assert find_exit(model, 1).final == ("model.norm",)


Go = Callable[..., dict[str, Any]]


@pytest.fixture
def go(stories: Path, tmp_path: Path) -> Go:
    """Run the shipped recipe as an early exit of a random model with the stories' tokenizer."""

    def run(model: Any, *overrides: str) -> dict[str, Any]:
        model.save_pretrained(tmp_path / "target")
        transformers.AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "target")
        small = ["data.samples=2", "data.max_new_tokens=8", "train.max_steps=4", "train.eval_every=4"]
        out = [f"target={tmp_path / 'target'}", f"output_dir={tmp_path / 'out'}"]
        return run_recipe(load_recipe("draft/ci", [*out, "draft={kind: early_exit, exits: [2]}", *small, *overrides]))

    return run


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox"])
def test_a_run_trains_an_exit(name: str, go: Go) -> None:
    results = go(make(name, vocab=512), "train.lr=1e-2")
    assert results.score > results.baseline_score
    assert results.decoding.after.lossless is True


def test_a_model_without_an_exit_leaves_nothing_behind(go: Go, tmp_path: Path) -> None:
    with pytest.raises(PeftlabError, match="the target has 3 layers"):
        go(make("gpt2", vocab=512), "draft={kind: early_exit, exits: [3]}")
    assert {path.name for path in tmp_path.iterdir()} == {"target"}, "neither a run directory nor text by the target"
