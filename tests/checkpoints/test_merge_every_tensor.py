"""Every tensor of the base's files is in the merged ones, changed or as it was, or is named with the reason."""

from __future__ import annotations

import json
import os
import random
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from merge_cases import draw, judge
from models import adapt, build, load, save_base, stir
from safetensors.torch import load_file, save_file

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint, unmerge_checkpoint
from peftlab.errors import PeftlabError

IDS = torch.arange(3, 33).view(2, 15)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def add(directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add tensors to the (last) file of a checkpoint, and to its index."""
    file = sorted(directory.glob("*.safetensors"))[-1]
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    index = directory / "model.safetensors.index.json"
    if index.exists():
        value = json.loads(index.read_text())
        value["weight_map"] |= dict.fromkeys(tensors, file.name)
        index.write_text(json.dumps(value))
    return tensors


def everything(directory: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in directory.glob("*.safetensors") for key, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("shards", [False, True])
def test_tensors_that_the_class_does_not_read_are_copied(
    tmp_path: Path, shards: bool, dtype: torch.dtype | None
) -> None:
    """A layer for further tokens, a vision tower, stray buffers, as DeepSeek-V3's and Qwen3-Next's files have them."""
    base = save_base(build("llama"), tmp_path / "base", **({"max_shard_size": "20KB"} if shards else {}))
    extra = add(
        base,
        {
            "mtp.fc.weight": torch.randn(4, 8),
            "model.layers.61.eh_proj.weight": torch.randn(8, 4).bfloat16(),
            "model.visual.patch_embed.proj.weight": torch.randn(2, 3).half(),
            "mtp.counter": torch.arange(5),
        },
    )
    adapter = adapt(build("llama"), tmp_path / "adapter")
    options = peftlab.MergeOptions(dtype=dtype)
    report = merge_checkpoint(adapter, base, tmp_path / "merged", options)
    merged = everything(tmp_path / "merged")
    for key, tensor in extra.items():
        kept = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
        assert merged[key].dtype == kept.dtype and torch.equal(merged[key], kept)
    assert report.ignored == list(extra) or set(report.ignored) == set(extra)
    assert any("4 tensors of the base" in note and "mtp.fc" in note for note in report.notes)
    count = len(everything(base))
    assert report.accounts.line().startswith(f"{count} of {count} base tensors accounted for: ")
    opened = len(os.listdir("/proc/self/fd"))
    unmerged = unmerge_checkpoint(tmp_path / "merged", tmp_path / "unmerged", base=base)
    assert len(os.listdir("/proc/self/fd")) == opened
    assert everything(unmerged).keys() == everything(base).keys()


def test_a_base_that_is_an_adapter_keeps_what_its_class_does_not_read(tmp_path: Path) -> None:
    base = save_base(build("llama"), tmp_path / "base")
    extra = add(base, {"mtp.fc.weight": torch.randn(4, 8)})
    first = adapt(load_with_extra(base), tmp_path / "first")
    second = load_with_extra(base)
    second = peftlab.inject_lora(peftlab.merge(peftlab.load_adapter(second, first)), target_modules=["v_proj"])
    stir(second)
    peftlab.save_adapter(second, tmp_path / "second", base=str(first))
    merge_checkpoint(tmp_path / "second", None, tmp_path / "merged")
    assert torch.equal(everything(tmp_path / "merged")["mtp.fc.weight"], extra["mtp.fc.weight"])
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(second), rtol=1e-5, atol=1e-6)


def load_with_extra(directory: Path) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM.from_pretrained(directory)


def test_two_keys_of_one_parameter_are_refused(tmp_path: Path) -> None:
    """A checkpoint with the body's names with and without its prefix: which one counts is not for a merge to say."""
    base = save_base(build("llama"), tmp_path / "base")
    add(base, {"norm.weight": torch.zeros(32)})
    adapter = adapt(build("llama"), tmp_path / "adapter")
    with pytest.raises(PeftlabError, match=r"'norm\.weight'.*both model\.norm\.weight") as told:
        merge_checkpoint(adapter, base, tmp_path / "merged")
    assert "remove one" in str(told.value) and not (tmp_path / "merged").exists()


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"], ["q_proj", "embed_tokens"]])
def test_two_matrices_in_the_file_though_the_configuration_ties_them(tmp_path: Path, targets: list[str]) -> None:
    base = save_base(build("llama"), tmp_path / "base")
    head = torch.randn(96, 32)
    add(base, {"lm_head.weight": head})
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    assert torch.equal(model.lm_head.weight, head)
    peftlab.inject_lora(model, target_modules=targets)
    stir(model, 0.1)
    expected = logits(model)
    peftlab.save_adapter(model, tmp_path / "adapter", base=str(base))
    report = merge_checkpoint(tmp_path / "adapter", None, tmp_path / "merged")
    merged = load(transformers.LlamaForCausalLM, tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)
    assert any("different values" in note for note in report.notes)
    in_memory = logits(peftlab.merge(model))
    torch.testing.assert_close(in_memory, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("whole", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_a_grown_vocabulary_whose_embedding_alone_is_trained(tmp_path: Path, whole: list[str]) -> None:
    """peft's file: the trained embedding, and the head as it was when both grew."""
    import peft

    base = save_base(build("llama"), tmp_path / "base")

    def grown() -> transformers.PreTrainedModel:
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(99, mean_resizing=False)
        return model.eval()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(grown(), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=whole))
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if "lora_" in name or "modules_to_save" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        theirs.save_pretrained(tmp_path / "adapter")
        model = peftlab.load_adapter(grown(), tmp_path / "adapter")
        merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    expected = logits(theirs)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    merged = load(transformers.LlamaForCausalLM, tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


def test_rows_of_a_table_that_encoder_decoder_and_head_share(tmp_path: Path) -> None:
    from merge_cases import DECODER

    def marian() -> transformers.PreTrainedModel:
        torch.manual_seed(0)
        return transformers.MarianMTModel(transformers.MarianConfig(**DECODER)).eval()

    base = save_base(marian(), tmp_path / "base")
    model = transformers.MarianMTModel.from_pretrained(base)
    peftlab.inject_lora(model, target_modules=["q_proj"], trainable_token_indices=[1, 5])
    stir(model, 0.1)
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
        peftlab.save_adapter(model, tmp_path / "adapter", base=str(base))
        report = merge_checkpoint(tmp_path / "adapter", None, tmp_path / "merged")
        merged = transformers.MarianMTModel.from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(merged(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
    table = next(row for row in report.tensors if row.name == "model.shared.weight")
    assert 0 < table.changed < 0.1


@pytest.mark.parametrize("seed", range(40))
def test_random_checkpoints(seed: int, tmp_path: Path) -> None:
    """Disk, memory and peft agree, and what the report does not name is the base's, byte for byte."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = judge(draw(seed), tmp_path)
    assert outcome == "pass" or outcome.startswith(("peft fails", "refused")), (draw(seed), outcome)


@pytest.mark.long
def test_two_thousand_random_checkpoints(tmp_path: Path) -> None:
    start = int(os.environ.get("PEFTLAB_SEED", random.randrange(1 << 30)))
    for seed in range(start, start + 2000):
        (place := tmp_path / str(seed)).mkdir()
        test_random_checkpoints(seed, place)
        for file in place.rglob("*.safetensors"):
            file.unlink()
