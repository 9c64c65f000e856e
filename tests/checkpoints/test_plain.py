"""Plain decoders whose configuration alone describes them: as the class of transformers has them, and merged alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from models import adapt, save_base
from safetensors.torch import load_file, save_file
from torch import nn

from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.errors import PeftlabError
from peftlab.methods.config import METHODS
from peftlab.models.architectures import DECODERS, plain_model
from peftlab.models.load import empty_model, tied_names
from peftlab.pipelines.inspect import inspect_model

SMALL = models.SMALL | {"num_key_value_heads": 2}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied llama": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases and wide heads": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "mistral": ("Mistral", {"head_dim": 4}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3 with biases": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
}


def configuration(name: str) -> transformers.PretrainedConfig:
    family, changes = CONFIGURATIONS[name]
    config = getattr(transformers, f"{family}Config")(**SMALL, **changes)
    config.architectures = [f"{family}ForCausalLM"]
    return config


def written(directory: Path, name: str) -> Path:
    """A directory that contains nothing but the configuration."""
    configuration(name).save_pretrained(directory)
    return directory


def kinds(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(m) for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}


def test_every_row_is_compared_with_its_class() -> None:
    assert {f"{family}ForCausalLM" for family, _ in CONFIGURATIONS.values()} == set(DECODERS)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_plain_model_has_the_names_the_shapes_and_the_ties_of_its_class(name: str, tmp_path: Path) -> None:
    config = configuration(name)
    theirs = empty_model(config.architectures[0], config)
    for values in (config.to_diff_dict(), json.loads((written(tmp_path, name) / "config.json").read_text())):
        ours = plain_model(values | {"architectures": config.architectures})
        assert ours is not None and type(ours).__name__ == type(theirs).__name__
        for every in (True, False):
            shapes = [[(n, p.shape) for n, p in m.named_parameters(remove_duplicate=every)] for m in (ours, theirs)]
            assert shapes[0] == shapes[1]
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert kinds(ours) == kinds(theirs) and tied_names(ours) == tied_names(theirs)
        assert {parameter.device.type for parameter in ours.parameters()} == {"meta"}


@pytest.mark.parametrize("change", [
    {"hidden_size": "32"}, {"num_hidden_layers": 0}, {"num_key_value_heads": 3}, {"attention_bias": 1},
    {"tie_word_embeddings": None}, {"auto_map": {"AutoModel": "x.Y"}}, {"quantization_config": {"quant_method": "x"}},
    {"architectures": ["LlamaModel"]}, {"model_type": "gemma"}, {"architectures": None}, {"vocab_size": True},
])  # fmt: skip
def test_what_is_not_plain_is_left_to_the_class(change: dict[str, Any]) -> None:
    values = configuration("llama").to_diff_dict()
    assert plain_model(values) is not None
    assert plain_model(values | change) is None


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_inspection_counts_as_on_the_class_itself(name: str, tmp_path: Path) -> None:
    """Named as the class, the model is transformers' own."""
    place, own = str(written(tmp_path, name)), configuration(name).architectures[0]
    for method in METHODS:
        found: list[object] = []
        for auto_class in (None, own):
            try:
                found.append(inspect_model(place, method, {}, auto_class))
            except PeftlabError as error:
                found.append(str(error))
        assert found[0] == found[1]
    for fields in ({"target_modules": "all-linear"}, {"target_modules": ["input_layernorm"]}, {"lora_bias": True}):
        try:
            expected: object = inspect_model(place, "lora", fields, own)
        except PeftlabError as error:
            expected = str(error)
            with pytest.raises(PeftlabError) as caught:
                inspect_model(place, "lora", fields)
            assert str(caught.value) == expected
        else:
            assert inspect_model(place, "lora", fields) == expected


def outcome(out: Path) -> dict[str, object]:
    """What a merged directory contains, but for times, places and transformers' version."""
    report = json.loads((out / "merge.json").read_text())
    config = transformers.AutoConfig.from_pretrained(out).to_dict()
    weights = {file.name: file.read_bytes() for file in out.glob("*.safetensors*")}
    for key in ("seconds", "out", "base"):
        del report[key]
    return {"report": report, "weights": weights, "config": config | {"transformers_version": "", "_name_or_path": ""}}


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("foreign", [False, True], ids=["peftlab's", "peft's"])
def test_a_plain_merge_is_the_merge_by_the_class_bit_for_bit(name: str, foreign: bool, tmp_path: Path) -> None:
    """Without a ``generation_config.json`` the model is transformers' own, which makes one."""
    config = configuration(name)
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])(config).to(torch.bfloat16)
    base = save_base(model, tmp_path / "base", max_shard_size="30KB")
    adapter = adapt(model, tmp_path / "adapter", r=4, target_modules="all-linear", use_rslora=True)
    if foreign:
        file = adapter / "adapter_model.safetensors"
        save_file(load_file(file), file, metadata={"format": "pt"})
    by_class = Path(shutil.copytree(base, tmp_path / "by-class"))
    (by_class / "generation_config.json").unlink()
    for options in (MergeOptions(), MergeOptions(dtype=torch.float32)):
        found = []
        for directory in (base, by_class):
            out = tmp_path / f"{directory.name}-{options.dtype}"
            merge_checkpoint(adapter, directory, out, options)
            found.append(outcome(out))
        assert found[0] == found[1]


def test_a_plain_merge_that_does_not_fit_says_what_the_class_says(tmp_path: Path) -> None:
    config = configuration("llama")
    model = transformers.LlamaForCausalLM(config)
    base = save_base(model, tmp_path / "base")
    adapter = adapt(model, tmp_path / "adapter", r=4, target_modules=["q_proj"])
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": ["q_proj", "o_proj"]}))
    by_class = Path(shutil.copytree(base, tmp_path / "by-class"))
    (by_class / "generation_config.json").unlink()
    messages = []
    for directory in (base, by_class):
        with pytest.raises(PeftlabError, match="does not fit this model") as caught:
            merge_checkpoint(adapter, directory, tmp_path / "out")
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
