"""The streaming merge writes the very bytes that merging in memory and ``save_pretrained`` write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from models import adapt, build, load, reference, save_base, weight_files

from peftlab.checkpoints.merge import merge_checkpoint

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
METHODS = {
    "lora": {"method": "lora", "target_modules": "all-linear"},
    "rslora": {"method": "lora", "use_rslora": True, "r": 4, "lora_alpha": 3, "target_modules": "all-linear"},
    "dora": {"method": "lora", "use_dora": True, "target_modules": "all-linear"},
    "pissa": {"method": "lora", "init_lora_weights": "pissa", "r": 3},
    "biases": {"method": "lora", "bias": "all"},
    "full": {"method": "full"},
    "bitfit": {"method": "bitfit"},
}


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "llama", "phi3", "mixtral"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_same_bytes_as_in_memory(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    kind = type(build(family))
    base = save_base(build(family).to(dtype), tmp_path / "base")
    methods = dict(METHODS)
    if family in ("llama", "phi3", "mixtral"):  # they have no biases
        del methods["bitfit"]
    if family == "mixtral":
        methods["experts"] = {
            "method": "lora",
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        }
        methods["one"] = {
            "method": "lora",
            "target_parameters": ["experts.down_proj"],
            "target_modules": ["q_proj"],
        }
    if family == "phi3":
        methods["parts"] = {
            "method": "lora",
            "target_modules": ["qkv_proj.q", "qkv_proj.v", "gate_up_proj.up"],
        }
    for name, how in methods.items():
        model = load(kind, base, dtype)
        adapter = adapt(model, tmp_path / name / "adapter", **how)
        report = merge_checkpoint(adapter, base, tmp_path / name / "merged")
        expected = reference(model, tmp_path / name / "expected")
        assert weight_files(tmp_path / name / "merged") == weight_files(expected), name
        load(kind, tmp_path / name / "merged", dtype)
        assert report.tensors, name


def test_systems_without_positioned_reads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no ``copy_file_range`` and no ``fdatasync``; Windows lacks the others as well."""
    kind = type(build("bert"))
    base = save_base(build("bert"), tmp_path / "base")
    model = load(kind, base, torch.float32)
    adapter = adapt(model, tmp_path / "adapter", method="lora")
    merge_checkpoint(adapter, base, tmp_path / "here")
    for name in ("copy_file_range", "fdatasync"):
        monkeypatch.delattr(os, name)
    merge_checkpoint(adapter, base, tmp_path / "macos")
    for name in ("preadv", "pread", "pwrite", "O_NONBLOCK"):
        monkeypatch.delattr(os, name)
    merge_checkpoint(adapter, base, tmp_path / "windows")
    assert weight_files(tmp_path / "here") == weight_files(tmp_path / "macos") == weight_files(tmp_path / "windows")
