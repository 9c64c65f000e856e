"""AdapterHub's and loralib's files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import peftlab
from peftlab.checkpoints.adapter import read_adapter

IDS = torch.arange(20).view(2, 10)


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=50)
    return BertForSequenceClassification(config).eval()


def hub_directory(place: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a directory in AdapterHub's layout."""
    place.mkdir()
    raw = {
        "config": settings,
        "hidden_size": 64,
        "model_type": "bert",
        "name": "task",
        "version": "adapters.1.3.0",
    }
    (place / "adapter_config.json").write_text(json.dumps(raw))
    head = {key: value for key, value in tensors.items() if key.startswith("classifier")}
    torch.save({key: value for key, value in tensors.items() if key not in head}, place / "pytorch_adapter.bin")
    torch.save(head, place / "pytorch_model_head.bin")
    return place


BOTTLENECK = {
    "mh_adapter": True, "output_adapter": True, "non_linearity": "swish", "reduction_factor": 8,
    "original_ln_before": False, "original_ln_after": True, "residual_before_ln": True, "scaling": 1.0,
}  # fmt: skip


def bottleneck_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "adapter_down.0.weight": (8, 64),
        "adapter_down.0.bias": (8,),
        "adapter_up.weight": (64, 8),
        "adapter_up.bias": (64,),
    }
    tensors = {
        f"bert.encoder.layer.{i}.{block}.adapters.task.{key}": torch.randn(shape, generator=generator) * 0.1
        for i in range(2)
        for block in ("attention.output", "output")
        for key, shape in shapes.items()
    }
    return tensors | {
        "classifier.weight": torch.randn(2, 64, generator=generator),
        "classifier.bias": torch.zeros(2),
    }


def test_adapterhub_bottleneck_computes_the_papers_equations(tmp_path: Path) -> None:
    tensors = bottleneck_tensors()
    reference = bert()
    with torch.no_grad():
        reference.classifier.weight.copy_(tensors["classifier.weight"])
        reference.classifier.bias.copy_(tensors["classifier.bias"])
    for i, layer in enumerate(reference.bert.encoder.layer):
        for name, block in (("attention.output", layer.attention.output), ("output", layer.output)):
            prefix = f"bert.encoder.layer.{i}.{name}.adapters.task"

            def hook(module: nn.Module, inputs: Any, h: Tensor, prefix: str = prefix) -> Tensor:
                low = F.silu(
                    F.linear(
                        h,
                        tensors[f"{prefix}.adapter_down.0.weight"],
                        tensors[f"{prefix}.adapter_down.0.bias"],
                    )
                )
                return h + F.linear(low, tensors[f"{prefix}.adapter_up.weight"], tensors[f"{prefix}.adapter_up.bias"])

            block.dropout.register_forward_hook(hook)
    ours = peftlab.load_adapter(bert(), hub_directory(tmp_path / "hub", BOTTLENECK, tensors))
    assert torch.allclose(ours(IDS).logits, reference(IDS).logits, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "value"),
    [("original_ln_before", True), ("is_parallel", True), ("phm_layer", True), ("inv_adapter", "nice")],
)
def test_another_bottleneck_is_refused_by_its_key(tmp_path: Path, key: str, value: Any) -> None:
    place = hub_directory(tmp_path / "hub", {**BOTTLENECK, key: value}, bottleneck_tensors())
    with pytest.raises(peftlab.PeftlabError, match=key):
        peftlab.load_adapter(bert(), place)


def test_adapterhub_lora(tmp_path: Path) -> None:
    source = peftlab.inject_lora(bert(), r=4, lora_alpha=16, target_modules=["query", "value"])
    with torch.no_grad():
        for parameter in peftlab.trainable_parameters(source).values():
            parameter.normal_(std=0.1)
    tensors = {
        key.replace(".lora_", ".loras.task.lora_"): value.detach().clone()
        for key, value in peftlab.trainable_parameters(source).items()
    }
    settings = {
        "architecture": "lora",
        "r": 4,
        "alpha": 16,
        "attn_matrices": ["q", "v"],
        "selfattn_lora": True,
    }
    ours = peftlab.load_adapter(bert(), hub_directory(tmp_path / "hub", settings, tensors))
    assert torch.equal(ours(IDS).logits, source(IDS).logits)
    bert().save_pretrained(tmp_path / "base")
    file = tmp_path / "hub" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_name": str(tmp_path / "base")}))
    assert read_adapter(tmp_path / "hub").base_reference == peftlab.check_adapter(tmp_path / "hub").base


def test_the_papers_own_adapter_loads(shared: Path) -> None:
    path = shared / "data" / "weights" / "roberta_base_lora_mnli.bin"
    with torch.device("meta"):
        model = RobertaForSequenceClassification(
            RobertaConfig(vocab_size=50265, num_labels=3, max_position_embeddings=514)
        )
    with pytest.raises(peftlab.PeftlabError, match="lora_alpha"):
        peftlab.load_adapter(model, path)
    adapter = read_adapter(path, lora_alpha=16)
    assert adapter.config.r == 8 and adapter.config.scale("roberta.encoder.layer.0.attention.self.query") == 2
    peftlab.inject(model, adapter.config)
    assert set(peftlab.trainable_parameters(model)) == set(adapter.tensors)
    assert sum(t.numel() for name, t in adapter.tensors.items() if "lora" in name) == 294_912


def test_a_pickle_with_code_in_it_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "evil.bin").write_bytes(pickle.dumps({"a.lora_A": Evil()}))
    with pytest.raises(peftlab.PeftlabError, match=r"evil\.bin"):
        peftlab.load_adapter(bert(), tmp_path / "evil.bin", lora_alpha=1)
    assert not (tmp_path / "ran").exists()
