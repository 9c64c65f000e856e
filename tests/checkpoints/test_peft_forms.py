"""Forms of peft's files and fields that say the same in another way."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from models import build, load, save_base
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from peft_round_trip import equal, of, randomised, round_trip, saved_by_peft
from safetensors.torch import load_file

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.errors import PeftlabError
from peftlab.methods.inject import injection_of, trainable_parameters

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


def test_an_expression_that_matches_a_fused_projection_and_its_parts(tmp_path: Path) -> None:
    """peft knows no parts: what matches the whole projection means the whole."""
    fields = {"target_modules": r".*attn\.c_(attn|proj).*", "fan_in_fan_out": True}
    expected = saved_by_peft(build("gpt2"), tmp_path, logits, **fields)
    model = peftlab.load_adapter(build("gpt2"), tmp_path)
    equal(logits(model), expected)
    assert model.transformer.h[0].attn.c_attn.lora_B.shape == (96, 8)


def test_an_expression_that_matches_parts_alone() -> None:
    model = peftlab.inject_lora(build("gpt2"), target_modules=r".*c_attn\.[qv]")
    assert model.transformer.h[0].attn.c_attn.lora_B.shape == (64, 8)


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=96, pad_token_id=0, decoder_start_token_id=0
    )
    return randomised(transformers.T5ForConditionalGeneration(config))


@pytest.mark.parametrize(
    ("pattern", "numbers"), [(None, ["block.1"]), ("block", ["block.1"]), (["nothing", "layer"], ["layer.1"])]
)
def test_which_number_is_that_of_the_layer(tmp_path: Path, pattern: Any, numbers: list[str]) -> None:
    fields = {"target_modules": ["q", "wo"], "layers_to_transform": 1}
    seq2seq = of({"input_ids": IDS, "decoder_input_ids": IDS})
    expected = saved_by_peft(t5(), tmp_path, seq2seq, layers_pattern=pattern, task_type="SEQ_2_SEQ_LM", **fields)
    model = peftlab.load_adapter(t5(), tmp_path)
    equal(seq2seq(model), expected)
    ours = peftlab.inject_lora(t5(), layers_pattern=pattern, **fields)
    assert injection_of(ours).replaced == injection_of(model).replaced
    assert all(any(number in name for number in numbers) for name in injection_of(ours).replaced)


def test_a_pattern_without_layers() -> None:
    with pytest.raises(PeftlabError, match=r"layers_pattern.*layers_to_transform"):
        peftlab.inject_lora(build("llama"), target_modules=["q_proj"], layers_pattern="layers")


WAYS_OF_TRAINING: dict[str, Any] = {
    "velora_config": VeloraConfig(num_groups=2, init_type="random"),
    "monteclora_config": MontecloraConfig(num_samples=2),
}


@pytest.mark.parametrize("field", WAYS_OF_TRAINING)
def test_fields_that_say_how_peft_trained(tmp_path: Path, field: str) -> None:
    fields = {"target_modules": ["q_proj"], field: WAYS_OF_TRAINING[field]}
    expected = saved_by_peft(build("llama"), tmp_path, logits, **fields)
    with pytest.warns(UserWarning, match=f"{field} says how"):
        model = peftlab.load_adapter(build("llama"), tmp_path)
    equal(logits(model), expected)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"}, "depends on the position"),
        ({"layer_replication": [(0, 2), (0, 2)]}, "deeper model"),
        ({"kasa_config": KasaConfig(), "r": 4}, "smallest singular values"),
        ({"use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2)}, "blocks of their diagonals"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_what_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | fields)
    peft.get_peft_model(build("llama"), config).save_pretrained(tmp_path)
    with pytest.raises(PeftlabError, match=f"{next(iter(fields))} is not supported: .*{reason}"):
        peftlab.load_adapter(build("llama"), tmp_path)


@pytest.mark.parametrize("field", ["arrow_config", "use_qalora", "megatron_config"])
def test_what_needs_more_than_the_file(tmp_path: Path, field: str) -> None:
    saved_by_peft(build("llama"), tmp_path, logits, target_modules=["q_proj"])
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: {"top_k": 2}}))
    with pytest.raises(PeftlabError, match=f"{field} is not supported: "):
        peftlab.load_adapter(build("llama"), tmp_path)


@pytest.mark.parametrize("names", [["norm"], ["layernorm"], ["norm", "embed_tokens"]], ids=str)
def test_modules_named_by_the_ends_of_their_names(tmp_path: Path, names: list[str]) -> None:
    """peft trains input_layernorm too where modules_to_save says norm."""
    fields = {"target_modules": ["q_proj"], "modules_to_save": names, "task_type": "CAUSAL_LM"}
    model = round_trip(lambda: build("llama"), logits, tmp_path, **fields)
    trained = {name.rpartition(".")[0].rpartition(".")[2] for name in trainable_parameters(model)}
    assert {"input_layernorm", "post_attention_layernorm"} <= trained and ("norm" in trained) == ("norm" in names)


def test_tokens_of_a_module_named_by_the_end_of_its_name(tmp_path: Path) -> None:
    fields = {"target_modules": ["q_proj"], "trainable_token_indices": {"tokens": [5, 7]}, "task_type": "CAUSAL_LM"}
    round_trip(lambda: build("llama"), logits, tmp_path, **fields)


def test_the_matrix_of_a_linear_map(tmp_path: Path) -> None:
    fields = {"target_modules": ["q_proj"], "target_parameters": ["v_proj.weight"]}
    model = round_trip(lambda: build("llama"), logits, tmp_path, task_type="CAUSAL_LM", **fields)
    ours = peftlab.inject_lora(build("llama"), **fields)
    assert sorted(injection_of(ours).replaced) == sorted(injection_of(model).replaced)
    alone = peftlab.inject_lora(build("llama"), target_parameters=["v_proj.weight"])
    assert all(name.endswith("v_proj") for name in injection_of(alone).replaced)
