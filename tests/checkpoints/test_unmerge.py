"""Unmerging gives W0 back bit for bit, in memory a hundred times over and on disk."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from models import adapt, build, load, save_base, weight_files

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint, unmerge_checkpoint
from peftlab.errors import PeftlabError


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "mixtral"])
def test_a_hundred_cycles_in_bf16(tmp_path: Path, family: str) -> None:
    base = save_base(build(family).to(torch.bfloat16), tmp_path / "base")
    model = load(type(build(family)), base, torch.bfloat16)
    fields = {"target_parameters": ["experts.down_proj"]} if family == "mixtral" else {}
    if family == "llama":
        fields = {"target_modules": ["embed_tokens", "q_proj"]}
    adapt(model, tmp_path / "adapter", **fields)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = list(peftlab.trainable_parameters(model))
    tied = model.config.tie_word_embeddings
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        answer = model(ids).logits
        for _ in range(100):
            peftlab.merge(model, keep=True)
            assert not any("lora" in name for name in model.state_dict())
            peftlab.unmerge(model)
        assert torch.equal(model(ids).logits, answer)
        merged = peftlab.merge(model, keep=True)(ids).logits
    torch.testing.assert_close(merged, answer, rtol=0.1, atol=0.1)
    peftlab.unmerge(model)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert list(peftlab.trainable_parameters(model)) == trained
    assert model.config.tie_word_embeddings == tied


def test_unmerging_what_was_not_kept() -> None:
    model = build("bert")
    with pytest.raises(PeftlabError, match="nothing to unmerge"):
        peftlab.unmerge(model)
    peftlab.inject_lora(model)
    peftlab.merge(model)
    with pytest.raises(PeftlabError, match="nothing to unmerge"):
        peftlab.unmerge(model)


def test_on_disk(tmp_path: Path) -> None:
    base = save_base(build("llama").to(torch.bfloat16), tmp_path / "base", max_shard_size="20KB")
    model = load(type(build("llama")), base, torch.bfloat16)
    merge_checkpoint(adapt(model, tmp_path / "adapter"), base, tmp_path / "merged")
    assert weight_files(tmp_path / "merged") != weight_files(base)
    unmerge_checkpoint(tmp_path / "merged", tmp_path / "back")
    assert weight_files(tmp_path / "back") == weight_files(base)
    other = save_base(build("llama", hidden_size=16).to(torch.bfloat16), tmp_path / "other")
    with pytest.raises(PeftlabError, match="was not made of"):
        unmerge_checkpoint(tmp_path / "merged", tmp_path / "no", base=other)
    assert not (tmp_path / "no").exists()
    with pytest.raises(PeftlabError, match=r"merge\.json"):
        unmerge_checkpoint(base, tmp_path / "no")


def test_a_full_disk_and_a_base_with_files_of_its_owners(tmp_path: Path) -> None:
    """The error names the output; a file of a name that peftlab never writes is copied, and never removed again."""
    base = save_base(build("llama").to(torch.bfloat16), tmp_path / "base")
    (base / "thesis.tex").write_text("x" * 100_000)
    model = load(type(build("llama")), base, torch.bfloat16)
    merge_checkpoint(adapt(model, tmp_path / "adapter"), base, tmp_path / "merged")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, limits[1]))
    try:
        with pytest.raises(PeftlabError, match=r"back: cannot be written \(File too large\); nothing was left behind"):
            unmerge_checkpoint(tmp_path / "merged", tmp_path / "back")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    unmerge_checkpoint(tmp_path / "merged", tmp_path / "back")
    assert (tmp_path / "back" / "thesis.tex").exists()
    with pytest.raises(PeftlabError, match=r"contains thesis\.tex, which peftlab did not write"):
        unmerge_checkpoint(tmp_path / "merged", tmp_path / "back", overwrite=True)
