"""What peft does to the base when it starts a LoRA (``init_lora_weights``), from files that peft saved."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from models import build, load, save_base, stir
from torch import nn

import peftlab
from peftlab.checkpoints.adapter import read_adapter
from peftlab.checkpoints.combine import combine
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.errors import PeftlabError
from peftlab.methods.inject import trainable_parameters

IDS = torch.arange(3, 33).view(2, 15)
GPT2 = ["attn.c_attn", "attn.c_proj", "mlp.c_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pissa": ("llama", {"init_lora_weights": "pissa"}),
    "pissa, rslora, dora": ("llama", {"init_lora_weights": "pissa", "use_rslora": True, "use_dora": True}),
    "pissa, patterns": (
        "llama",
        {
            "init_lora_weights": "pissa",
            "rank_pattern": {"model.layers.0.self_attn.q_proj": 2},
            "alpha_pattern": {"down_proj": 3},
        },
    ),
    "pissa, embedding": ("llama", {"init_lora_weights": "pissa", "target_modules": ["q_proj", "embed_tokens"]}),
    "pissa, stored transposed": ("gpt2", {"init_lora_weights": "pissa", "target_modules": GPT2}),
    "olora": ("llama", {"init_lora_weights": "OLoRA"}),
    "olora, stored transposed": ("gpt2", {"init_lora_weights": "olora", "target_modules": ["attn.c_proj"]}),
    "gaussian": ("llama", {"init_lora_weights": "gaussian"}),
    "false": ("llama", {"init_lora_weights": False}),
    "orthogonal": ("llama", {"init_lora_weights": "orthogonal"}),
    "mica": ("llama", {"init_lora_weights": "mica"}),
    "eva": ("llama", {"init_lora_weights": "eva", "eva_config": peft.EvaConfig()}),
}


def saved_by_peft(model: nn.Module, directory: Path, **fields: Any) -> torch.Tensor:
    """Adapt with peft, stir, save as peft does by default, and return the logits that peft gives once reloaded."""
    torch.manual_seed(2)
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], **fields}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
        stir(wrapped, 0.1)
        wrapped.save_pretrained(directory)
    return logits(wrapped)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_pefts_in_memory_and_on_disk(tmp_path: Path, case: str) -> None:
    family, fields = CASES[case]
    base = save_base(build(family), tmp_path / "base")
    kind = type(build(family))
    trained = saved_by_peft(load(kind, base), tmp_path / "adapter", **fields)
    expected = logits(peft.PeftModel.from_pretrained(load(kind, base), str(tmp_path / "adapter")))
    torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)
    plain = logits(load(kind, base))
    assert (expected - plain).abs().max() > 1e-2
    model = peftlab.load_adapter(load(kind, base), tmp_path / "adapter")
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    torch.testing.assert_close(logits(load(kind, tmp_path / "merged")), expected, rtol=1e-4, atol=1e-5)
    peftlab.save_adapter(model, tmp_path / "ours")  # as plain LoRA: the base need not be decomposed again
    again = peft.PeftModel.from_pretrained(load(kind, base), str(tmp_path / "ours"))
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(peftlab.merge(model)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_memory_and_disk_agree_to_the_bit(tmp_path: Path, family: str) -> None:
    base = save_base(build(family), tmp_path / "base")
    kind = type(build(family))
    targets = GPT2 if family == "gpt2" else "all-linear"
    saved_by_peft(load(kind, base), tmp_path / "adapter", init_lora_weights="pissa", target_modules=targets)
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    model = peftlab.merge(peftlab.load_adapter(load(kind, base), tmp_path / "adapter"))
    merged = load(kind, tmp_path / "merged")
    for (name, here), there in zip(model.named_parameters(), merged.parameters(), strict=True):
        assert torch.equal(here, there), name


def test_the_base_comes_back(tmp_path: Path) -> None:
    saved_by_peft(build("llama"), tmp_path, init_lora_weights="pissa")
    model = peftlab.load_adapter(build("llama"), tmp_path)
    with peftlab.disabled(model):
        assert torch.equal(logits(model), logits(build("llama")))
    assert torch.equal(logits(peftlab.remove(model)), logits(build("llama")))


def steep(model: nn.Module) -> nn.Module:
    """Give the matrices singular values that fall fast, as a randomised SVD needs them to be exact."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                u, s, vh = torch.linalg.svd(module.weight, full_matrices=False)
                module.weight.copy_(u * (s[0] * 0.3 ** torch.arange(len(s))) @ vh)
    return model


def test_a_randomised_svd_is_taken_to_be_exact_and_that_is_said(tmp_path: Path) -> None:
    base = save_base(steep(build("llama")), tmp_path / "base")
    kind = transformers.LlamaForCausalLM
    saved_by_peft(load(kind, base), tmp_path / "adapter", init_lora_weights="pissa_niter_8")
    expected = logits(peft.PeftModel.from_pretrained(load(kind, base), str(tmp_path / "adapter")))
    with pytest.warns(UserWarning, match="pissa_niter_8 .* randomised SVD"):
        model = peftlab.load_adapter(load(kind, base), tmp_path / "adapter")
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-4)
    report = merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    torch.testing.assert_close(logits(load(kind, tmp_path / "merged")), expected, rtol=1e-3, atol=1e-4)
    assert any("pissa_niter_8" in note for note in report.notes)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_what_peft_converted_is_plain_lora(tmp_path: Path, start: str) -> None:
    """``path_initial_model_for_weight_conversion``: rank doubled, start subtracted, ``init_lora_weights`` true."""
    model = build("llama")
    fields = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": start}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **fields))
    wrapped.peft_config["default"].init_lora_weights = True
    wrapped.save_pretrained(tmp_path / "start")
    wrapped.peft_config["default"].init_lora_weights = start
    stir(wrapped, 0.1)
    expected = logits(wrapped)
    wrapped.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    ours = peftlab.load_adapter(build("llama"), tmp_path / "plain")
    torch.testing.assert_close(logits(ours), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("corda", "covariances"),
        ("loftq", "quantised"),
        ("lora_ga", "gradients"),
        ("pissa_niter_x", "not known"),
        ("gausian", "did you mean 'gaussian'"),
        (1, "not known"),
        (["pissa"], "not known"),
    ],
)
def test_a_start_that_the_file_does_not_hold_is_refused_by_name(tmp_path: Path, value: Any, named: str) -> None:
    base = save_base(build("llama"), tmp_path / "base")
    saved_by_peft(build("llama"), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": value}))
    with pytest.raises(PeftlabError, match=rf"adapter_config\.json: init_lora_weights=.*{named}"):
        peftlab.load_adapter(build("llama"), tmp_path / "adapter")
    with pytest.raises(PeftlabError, match=named):
        merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_without_the_base_such_an_adapter_is_neither_combined_nor_exported(tmp_path: Path) -> None:
    saved_by_peft(build("llama"), tmp_path / "adapter", init_lora_weights="pissa")
    adapter = read_adapter(tmp_path / "adapter")
    for call in (
        lambda: combine([adapter, adapter], [1, 1]),
        lambda: peftlab.convert_adapter(tmp_path / "adapter", tmp_path / "out", "vllm"),
    ):
        with pytest.raises(PeftlabError, match=r"pissa.*load_adapter.*save_adapter"):
            call()
    model = peftlab.load_adapter(build("llama"), tmp_path / "adapter")
    peftlab.save_adapter(model, tmp_path / "plain")
    peftlab.convert_adapter(tmp_path / "plain", tmp_path / "out", "vllm")
    theirs = peft.PeftModel.from_pretrained(build("llama"), str(tmp_path / "out"))
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-5)


def test_lora_alpha_left_out_is_pefts_default(tmp_path: Path) -> None:
    expected = saved_by_peft(build("llama"), tmp_path, lora_alpha=8)
    path = tmp_path / "adapter_config.json"
    raw = json.loads(path.read_text())
    del raw["lora_alpha"]
    path.write_text(json.dumps(raw))
    model = peftlab.load_adapter(build("llama"), tmp_path)
    assert trainable_parameters(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
