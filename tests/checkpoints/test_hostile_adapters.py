"""Adapter directories that are broken, or made to do harm: one clear error, and nothing of what they ask for."""

from __future__ import annotations

import json
import os
import pickle
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models import adapt, build, save_base
from safetensors.torch import load_file, save_file

import peftlab
from peftlab import patterns
from peftlab.checkpoints.adapter import read_adapter
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.checkpoints.tensors import open_shards, read_pickle
from peftlab.errors import PeftlabError
from peftlab.methods.inject import is_injected

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def an_adapter(directory: Path, method: str = "lora", family: str = "llama", **fields: Any) -> Path:
    return adapt(build(family), directory, method, **fields)


def edit(directory: Path, **changes: Any) -> Path:
    path = directory / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def refused(directory: Path, message: str, family: str = "llama") -> None:
    """Check that reading, loading and merging all refuse, in a second and within a gigabyte."""
    model = build(family)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PeftlabError, match=message):
        peftlab.load_adapter(model, directory)
    assert not is_injected(model)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("r", 10**7, "rank 10000000 .* have rank 8"),
        ("r", 10**400, "rank 1000.* have rank 8"),
        ("r", "8", r"r: .*integer"),
        ("r", 8.0, r"r: .*integer"),
        ("r", True, r"r: .*integer"),
        ("r", None, r"r: .*integer"),
        ("r", [8], r"r: .*integer"),
        ("r", 0, r"r: .*greater"),
        ("lora_alpha", "16", r"lora_alpha: .*number"),
        ("lora_alpha", None, r"lora_alpha: .*number"),
        ("lora_alpha", float("nan"), r"lora_alpha: "),
        ("lora_alpha", float("inf"), r"lora_alpha: .*finite"),
        ("lora_alpha", -1, r"lora_alpha: .*greater"),
        ("lora_alpha", 10**400, r"lora_alpha: "),
        ("alpha_pattern", {"q_proj": float("nan")}, r"alpha_pattern\.q_proj: "),
        ("alpha_pattern", {"q_proj": 0}, r"alpha_pattern\.q_proj: .*greater"),
        ("alpha_pattern", {"q_proj": -3}, r"alpha_pattern\.q_proj: .*greater"),
        ("alpha_pattern", {"q_proj": "3"}, r"alpha_pattern\.q_proj: .*number"),
        ("alpha_pattern", ["q_proj"], r"alpha_pattern: .*dict"),
        ("rank_pattern", {"q_proj": 0}, r"rank_pattern\.q_proj: .*greater"),
        ("rank_pattern", {"q_proj": 10**7}, "rank 10000000 for .*q_proj, whose factors have rank 8"),
        ("rank_pattern", "q_proj", r"rank_pattern: .*dict"),
        ("target_modules", 3, r"target_modules"),
        ("target_modules", ["q_proj", None], r"target_modules"),
        ("target_modules", {"q_proj": 1}, r"target_modules"),
        ("modules_to_save", "lm_head", r"modules_to_save"),
        ("modules_to_save", [["lm_head"]], r"modules_to_save"),
        ("target_parameters", "experts", r"target_parameters"),
        ("use_rslora", "yes", r"use_rslora: .*boolean"),
        ("use_dora", 1, r"use_dora: .*boolean"),
        ("bias", ["all"], r"bias: "),
        ("peft_type", ["LORA"], r"peft_type \['LORA'\] is not supported"),
        ("peft_type", "ADALORA", r"peft_type 'ADALORA' is not supported"),
        ("task_type", ["CAUSAL_LM"], r"task_type: \['CAUSAL_LM'\] is not a string"),
        ("base_model_name_or_path", 7, r"base_model_name_or_path: 7 is not a string"),
        ("arrow_config", {"top_k": 1}, r"arrow_config"),
        ("layer_replication", [[0, 1]], r"layer_replication"),
        ("trainable_token_indices", [1], r"not in the file \(1\): model.embed_tokens.token_rows"),
        ("trainable_token_indices", ["x"], r"trainable_token_indices"),
        ("megatron_config", {"x": "y" * 10_000}, r"megatron_config is not supported: it adapts layers of Megatron"),
        ("a_field_to_come", {"x": "y" * 10_000}, r"a_field_to_come=.{100,200} is not supported"),
    ],
)
def test_values_that_peft_never_writes(tmp_path: Path, key: str, value: Any, message: str) -> None:
    refused(edit(an_adapter(tmp_path), **{key: value}), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('"text"', "must be a JSON object"),
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 10**6, "nested too deeply"),
        ('{"a":' * 10**6, "nested too deeply"),
        ('{"r": ' + "9" * 5000 + "}", "4,300 digits"),
        ("{}", "neither a peft adapter"),
        ('{"method": {"name": ["lora"]}}', "no known method"),
        ('{"method": {"name": "houlsby", "bottleneck": [1]}}', "bottleneck"),
    ],
)
def test_a_configuration_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    (an_adapter(tmp_path) / CONFIG).write_text(text)
    refused(tmp_path, message)


@pytest.mark.parametrize(
    "pattern", [r".*(?:.*?.*?.*?){30}[XZ]", r"((.*?,)|(.*?\.)|(.*?_))+(?<=[XZ])q_proj[XZ]", "(" * 400 + "q_proj", "("]
)
@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_patterns_that_take_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, pattern: str) -> None:
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.2)  # tests/test_patterns.py waits for the limit itself
    value: Any = {pattern: 8} if key.endswith("pattern") else pattern
    edit(an_adapter(tmp_path), **{key: value})
    started = time.thread_time()
    model = build("llama")
    try:
        peftlab.load_adapter(model, tmp_path)
    except PeftlabError as error:
        assert key.partition("_")[2] in str(error), error
        assert not is_injected(model)
    else:
        assert key in ("exclude_modules", "rank_pattern", "alpha_pattern")
    assert time.thread_time() - started < 20


def test_the_patterns_of_a_recipe_are_bounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.2)
    with pytest.raises(PeftlabError, match=r"target_modules: matching .* takes more than"):
        peftlab.inject_lora(build("llama"), target_modules=r".*(?:.*?.*?.*?){30}[XZ]")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_factors_that_are_no_floating_point_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    file = an_adapter(tmp_path) / WEIGHTS
    tensors = load_file(file)
    key = next(iter(tensors))
    tensors[key] = tensors[key].to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    refused(tmp_path, f"has {str(dtype)[6:]} values")


def _header(file: Path, change: Any) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def _overlap(header: dict[str, Any]) -> None:
    first, second, *_ = (value for key, value in header.items() if key != "__metadata__")
    second["data_offsets"] = first["data_offsets"]
    second["shape"] = first["shape"]


def _huge(header: dict[str, Any]) -> None:
    entry = next(value for key, value in header.items() if key != "__metadata__")
    entry["shape"] = [10**9, 10**9]
    entry["data_offsets"] = [0, 4 * 10**18]


def _negative(header: dict[str, Any]) -> None:
    next(value for key, value in header.items() if key != "__metadata__")["shape"] = [-1, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [(_overlap, "overlaps|hole|extra bytes"), (_huge, "truncated or out of range"), (_negative, "list of sizes")],
)
def test_headers_that_claim_what_the_file_does_not_hold(tmp_path: Path, change: Any, message: str) -> None:
    _header(an_adapter(tmp_path) / WEIGHTS, change)
    refused(tmp_path, message)


def test_files_cut_short_anywhere(tmp_path: Path) -> None:
    file = an_adapter(tmp_path) / WEIGHTS
    raw = file.read_bytes()
    for length in (0, 4, 8, 100, len(raw) // 2, len(raw) - 1):
        file.write_bytes(raw[:length])
        refused(tmp_path, r"adapter_model\.safetensors")
    file.write_bytes((2**62).to_bytes(8, "little") + raw[8:])
    refused(tmp_path, "longer than the file")


def test_a_pipe_in_place_of_a_file_blocks_nothing(tmp_path: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        file = an_adapter(tmp_path / name) / name
        file.unlink()
        os.mkfifo(file)
        done: list[str] = []

        def read(directory: Path = tmp_path / name, done: list[str] = done) -> None:
            with pytest.raises(PeftlabError) as caught:
                read_adapter(directory)
            done.append(str(caught.value))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(20)
        assert done and "not a regular file" in done[0]


@pytest.mark.parametrize(
    ("method", "fields", "changes", "message"),
    [
        ("houlsby", {"bottleneck": 4}, {"bottleneck": 10**9}, "bottleneck 1000000000, and the adapters' width is 4"),
    ],
)
def test_sizes_of_our_own_methods(
    tmp_path: Path, method: str, fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    an_adapter(tmp_path, method, **fields)
    raw = json.loads((tmp_path / CONFIG).read_text())
    edit(tmp_path, method=raw["method"] | changes)
    refused(tmp_path, message)


def test_a_rank_that_no_tensor_bounds(tmp_path: Path) -> None:
    """Expert weights that the file has no factors of must not be given a rank of ten million."""
    an_adapter(tmp_path, family="mixtral", target_modules=["q_proj"])
    edit(tmp_path, target_parameters=["experts.down_proj"], rank_pattern={"experts.down_proj": 10**7})
    refused(tmp_path, "does not fit|larger than 65536", family="mixtral")


def test_damage_in_what_our_header_says(tmp_path: Path) -> None:
    base = save_base(build("llama"), tmp_path / "base")
    for value in ("{", "[1]", '{"base": 3}', '{"base": {"architecture": 3, "config": {}}}', '{"base": {"config": []}}'):
        file = an_adapter(tmp_path / "adapter") / WEIGHTS

        def change(header: dict[str, Any], value: str = value) -> None:
            header["__metadata__"]["peftlab"] = value

        _header(file, change)
        with pytest.raises(PeftlabError):
            merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_refused_without_advice_to_run_it(tmp_path: Path, zipped: bool) -> None:
    file = tmp_path / "pytorch_model.bin"
    content = {"a.lora_A": Harm(tmp_path / "ran")}
    if zipped:
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(content, protocol=2))
    for read in (
        lambda: peftlab.load_adapter(build("bert"), file, lora_alpha=1),
        lambda: open_shards(tmp_path),
        lambda: read_pickle(file, mapped=True),
    ):
        with pytest.raises(PeftlabError) as caught:
            read()
        said = str(caught.value)
        assert "pytorch_model.bin: cannot be read as tensors alone" in said
        assert "weights_only" not in said and "likely succeed" not in said
        assert "nsupported" in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": "8"}, "r must be"),
        ({"alpha": None}, "lora_alpha"),
        ({"attn_matrices": ["q", "x"]}, "attn_matrices"),
        ({"attn_matrices": 3}, "attn_matrices"),
        ({"dropout": "x"}, "lora_dropout"),
    ],
)
def test_adapterhubs_settings_of_wrong_types(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    settings = {"architecture": "lora", "r": 4, "alpha": 16, "selfattn_lora": True} | changes
    (tmp_path / CONFIG).write_text(json.dumps({"config": settings, "model_type": "bert"}))
    save_file(
        {"bert.encoder.layer.0.attention.self.query.loras.x.lora_A": torch.ones(4, 32)},
        tmp_path / "adapter.safetensors",
    )
    refused(tmp_path, message, family="bert")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "non_linearity is missing"),
        ({"non_linearity": 3}, "non_linearity must be"),
        ({"non_linearity": "relu"}, "mh_adapter is missing"),
    ],
)
def test_adapterhubs_bottleneck_settings_that_are_missing(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"config": settings, "model_type": "bert"}))
    save_file(
        {"bert.encoder.layer.0.output.adapters.x.adapter_down.0.weight": torch.ones(4, 32)},
        tmp_path / "adapter.safetensors",
    )
    refused(tmp_path, message, family="bert")
