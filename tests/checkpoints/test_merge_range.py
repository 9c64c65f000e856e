"""What a merge's report counts, and weights that the stored dtype has no room for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import adapt, build, load, reference, save_base, weight_files
from safetensors.torch import load_file, save_file

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.checkpoints.merge_steps import TensorReport
from peftlab.errors import PeftlabError

UP, EMBEDDING = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"
WIDE = {"hidden_size": 128, "intermediate_size": 3000, "num_hidden_layers": 1}  # 384,000 weights, several blocks


def merged_row(
    tmp_path: Path, dtype: torch.dtype, change: object, update: object, stored: torch.dtype | None = None
) -> TensorReport:
    """Merge a LoRA of one matrix, W0 changed by ``change`` and B by ``update``; check its figures by hand."""
    model = build("llama", **WIDE)
    with torch.no_grad():
        change(model.get_parameter(UP))  # type: ignore[operator]
    base = save_base(model.to(dtype), tmp_path / "base")
    model = load(type(model), base, dtype)
    peftlab.inject_lora(model, target_modules=["up_proj"], r=4, lora_alpha=4)
    up = model.get_submodule(UP.removesuffix(".weight"))
    with torch.no_grad():
        up.lora_A.normal_(std=0.05)  # type: ignore[union-attr]
        up.lora_B.normal_(std=0.05)  # type: ignore[union-attr]
        update(up.lora_B)  # type: ignore[operator]
    peftlab.save_adapter(model, tmp_path / "adapter")
    report = merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged", MergeOptions(dtype=stored))
    (row,) = report.tensors
    before, after = (load_file(tmp_path / d / "model.safetensors")[UP] for d in ("base", "merged"))
    delta = up.lora_B.double() @ up.lora_A.double()  # type: ignore[union-attr, operator]
    moved = after.double() - before.to(after.dtype).double()
    torch.testing.assert_close(row.changed, (moved != 0).double().mean().item(), rtol=1e-3, atol=1e-6)
    survived = max(0.0, 1 - ((moved - delta).norm() / delta.norm()).item() ** 2)
    torch.testing.assert_close(row.survived, survived, rtol=0, atol=1e-3)
    torch.testing.assert_close(row.ratio, (delta.norm() / before.double().norm()).item(), rtol=1e-3, atol=0)
    assert bool(report.warnings) == (row.survived < 0.9)
    return row


def nothing(tensor: torch.Tensor) -> None:
    """Leave a tensor as it is."""


def last_tenth(b: torch.Tensor) -> None:
    b[: len(b) * 9 // 10] = 0


def every_tenth(b: torch.Tensor) -> None:
    b[torch.arange(len(b)) % 10 != 7] = 0


def a_quarter_times_1000(weight: torch.Tensor) -> None:
    weight[len(weight) * 3 // 4 :] *= 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("update", [last_tenth, every_tenth])
def test_an_update_in_a_tenth_of_the_rows(tmp_path: Path, dtype: torch.dtype, update: object) -> None:
    row = merged_row(tmp_path, dtype, nothing, update)
    assert 0.05 < row.changed < 0.1001 and row.survived > 0.9


@pytest.mark.parametrize("stored", [None, torch.bfloat16], ids=["bf16", "fp32 to bf16"])
def test_rows_too_large_for_their_update(tmp_path: Path, stored: torch.dtype | None) -> None:
    """Rounding eats the update of a quarter of the rows: of W0 a thousand times as large."""
    dtype = torch.bfloat16 if stored is None else torch.float32
    row = merged_row(tmp_path, dtype, a_quarter_times_1000, nothing, stored)
    assert row.survived < 0.8


def spoilt(tmp_path: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    """Return a base whose embedding holds numbers that fp16 has no room for, and an adapter of other tensors."""
    model = build("llama")
    with torch.no_grad():
        model.get_parameter(EMBEDDING)[0, :3] = torch.tensor([1e5, -1e5, 7e4])
        model.get_parameter(EMBEDDING)[1, :2] = torch.tensor([1e-9, -1e-9])
        model.get_parameter("model.layers.0.self_attn.q_proj.weight")[:] = 0
        model.get_parameter("model.layers.0.self_attn.q_proj.weight")[0] = 1e-9
    base = save_base(model.to(dtype), tmp_path / "base")
    model = load(type(model), base, dtype)
    peftlab.inject_lora(model, target_modules=["q_proj"])
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.lora_B[1:] = 1
    return base, peftlab.save_adapter(model, tmp_path / "adapter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=lambda d: str(d)[6:])
def test_what_fp16_has_no_room_for(tmp_path: Path, dtype: torch.dtype) -> None:
    base, adapter = spoilt(tmp_path, dtype)
    with pytest.raises(PeftlabError, match=r"model\.embed_tokens\.weight: 3 weights are too large for F16.*--allow"):
        merge_checkpoint(adapter, base, tmp_path / "merged", MergeOptions(dtype=torch.float16))
    assert not (tmp_path / "merged").exists()
    report = merge_checkpoint(
        adapter, base, tmp_path / "merged", MergeOptions(dtype=torch.float16, allow_nonfinite=True)
    )
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.isinf(tensors[EMBEDDING]).sum() == 3 and not tensors[EMBEDDING][1, :2].any()
    lost = {EMBEDDING: 2, "model.layers.0.self_attn.q_proj.weight": 32}
    assert {name: count for name, count in report.underflow.items() if name in lost} == lost
    assert report.overflow == {EMBEDDING: 3}
    assert any("became 0" in note for note in report.notes)
    assert any("3 weights in 1 tensors" in warning and "became infinite" in warning for warning in report.warnings)
    assert json.loads((tmp_path / "merged" / "merge.json").read_text())["overflow"] == {EMBEDDING: 3}


def test_infinity_in_the_base_is_no_overflow(tmp_path: Path) -> None:
    """The base's own infinity stays what it is in tensors that the adapter does not change."""
    model = build("llama")
    with torch.no_grad():
        model.get_parameter(EMBEDDING)[0, 0] = float("inf")
    base = save_base(model, tmp_path / "base")
    adapter = adapt(load(type(model), base), tmp_path / "adapter", target_modules=["q_proj"])
    report = merge_checkpoint(adapter, base, tmp_path / "merged", MergeOptions(dtype=torch.bfloat16))
    assert not report.overflow and not report.warnings


def test_fp64_base(tmp_path: Path) -> None:
    """An fp64 base is summed in fp64, in memory and on disk, and keeps its dtype."""
    base = save_base(build("llama").double(), tmp_path / "base")
    model = load(type(build("llama")), base, torch.float64)
    for method in ({"target_modules": "all-linear"}, {"target_modules": "all-linear", "use_dora": True}):
        out = tmp_path / str(len(method))
        adapter = adapt(load(type(model), base, torch.float64), out / "adapter", **method)
        report = merge_checkpoint(adapter, base, out / "merged")
        held = peftlab.load_adapter(load(type(model), base, torch.float64), adapter)
        assert weight_files(out / "merged") == weight_files(reference(held, out / "expected"))
        assert {row.dtype for row in report.tensors} == {"float64"}
    merge_checkpoint(adapter, base, tmp_path / "half", MergeOptions(dtype=torch.bfloat16))


@pytest.mark.parametrize("codes", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=lambda d: str(d)[6:])
def test_weights_that_are_codes(tmp_path: Path, codes: torch.dtype) -> None:
    """Weights in eight bits without a word on their quantisation are refused where the adapter changes them."""
    model = build("llama")
    base = save_base(model, tmp_path / "base")
    lora = adapt(load(type(model), base), tmp_path / "lora", target_modules=["q_proj"])
    whole = adapt(load(type(model), base), tmp_path / "whole", modules_to_save=["q_proj"], target_modules=["v_proj"])
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file(tensors | {name: tensors[name].to(codes)}, base / "model.safetensors", metadata={"format": "pt"})
    for adapter in (lora, whole):
        with pytest.raises(PeftlabError, match=r"layers\.1\.self_attn\.q_proj\.weight' is stored as (I8|U8|F8_E4M3)"):
            merge_checkpoint(adapter, base, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
