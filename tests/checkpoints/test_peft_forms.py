"""Forms of peft's files and fields that say the same in another way."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, load, save_base
from peft_round_trip import equal, of, saved_by_peft
from safetensors.torch import load_file

import peftlab
from peftlab.checkpoints.merge.run import merge_checkpoint
from peftlab.errors import PeftlabError

IDS = torch.arange(3, 33).view(2, 15)
logits = of({"input_ids": IDS})


def as_pickle(directory: Path) -> Path:
    """Write an adapter's tensors as peft did before safetensors; return the file."""
    torch.save(load_file(directory / "adapter_model.safetensors"), directory / "adapter_model.bin")
    (directory / "adapter_model.safetensors").unlink()
    return directory / "adapter_model.bin"


def test_a_pickled_adapter(tmp_path: Path) -> None:
    base = save_base(build("llama"), tmp_path / "base")
    expected = saved_by_peft(build("llama"), tmp_path / "adapter", logits, target_modules=["q_proj"], r=4)
    as_pickle(tmp_path / "adapter")
    equal(logits(peftlab.load_adapter(build("llama"), tmp_path / "adapter")), expected)
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    equal(logits(load(type(build("llama")), tmp_path / "merged")), expected)


class Code:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_a_pickled_adapter_with_code_is_refused(tmp_path: Path) -> None:
    saved_by_peft(build("llama"), tmp_path, logits, target_modules=["q_proj"], r=4)
    file = as_pickle(tmp_path)
    file.write_bytes(pickle.dumps({"base_model.model.lm_head.weight": Code(tmp_path / "ran")}, protocol=2))
    with pytest.raises(PeftlabError, match=r"adapter_model\.bin: cannot be read as tensors alone"):
        peftlab.load_adapter(build("llama"), tmp_path)
    assert not (tmp_path / "ran").exists()


def test_safetensors_are_read_before_a_pickle(tmp_path: Path) -> None:
    expected = saved_by_peft(build("llama"), tmp_path, logits, target_modules=["q_proj"], r=4)
    (tmp_path / "adapter_model.bin").write_bytes(b"no pickle")
    equal(logits(peftlab.load_adapter(build("llama"), tmp_path)), expected)
