"""``peftlab adapter check`` and ``convert``: what an adapter is, who reads it, and a directory that an engine reads."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

import peftlab
from peftlab.checkpoints.adapter_contents import fit_to_base, read_contents
from peftlab.checkpoints.engines import ENGINES, Peft
from peftlab.cli.app import app
from peftlab.errors import PeftlabError
from tests.checkpoints.models import adapt, build, save_base

IDS = torch.arange(1, 21).view(2, 10)
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
FAMILIES = ("llama", "mixtral", "qwen3_moe")


def model_of(family: str) -> PreTrainedModel:
    if family != "qwen3_moe":
        return build(family)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=96, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A saved base of each family."""
    place = tmp_path_factory.mktemp("bases")
    return {family: str(save_base(model_of(family), place / family)) for family in FAMILIES}


def by_peft(family: str, place: Path, **options: Any) -> Path:
    """Save an adapter with values in it as peft does."""
    fields = {"task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], **options}
    model = peft.get_peft_model(model_of(family), peft.LoraConfig(**fields))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(str(place))
    return place


def command(*arguments: object) -> Any:
    """Run a verb and return its JSON, the only thing on stdout."""
    done = CliRunner().invoke(app, ["adapter", *map(str, arguments), "--json", "-"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def edited(place: Path, change: Any) -> Path:
    """Change the tensors of a directory."""
    tensors = load_file(place / "adapter_model.safetensors")
    save_file(change(tensors), place / "adapter_model.safetensors", metadata={"format": "pt"})
    return place


def test_the_json_names_what_is_matched_and_who_reads_it(tmp_path: Path, bases: dict[str, str]) -> None:
    found = command("check", by_peft("llama", tmp_path / "a"), "--base", bases["llama"])
    assert found["format"] == "peft" and found["architecture"] == "LlamaForCausalLM"
    assert found["settings"]["r"] == 8 and found["settings"]["lora_alpha"] == 16
    assert found["matched"] == [f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in ("q_proj", "v_proj")]
    assert found["unmatched"] == found["missing"] == []
    assert list(found["consumers"]) == ["peftlab", "peft", "vllm", "sglang", "llama.cpp", "lorax"]
    for name, reading in found["consumers"].items():
        assert reading["loads"] is True and reading["reason"] and reading["source"], name
    assert peft.__version__ in found["consumers"]["peft"]["source"]


@pytest.mark.parametrize("name", ENGINES)
def test_each_rule_names_a_version_and_its_day(name: str) -> None:
    row = ENGINES[name]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.date) and re.search(r"\d", row.source)


# Which of vLLM, SGLang, llama.cpp and LoRAX read an adapter as meant, and a word of the first refusal's reason.
READERS: dict[str, tuple[dict[str, Any], tuple[bool, bool, bool, bool], str]] = {
    "rslora": ({"use_rslora": True}, (True, False, False, True), "scale"),
    "alpha pattern": ({"alpha_pattern": {"layers.0.self_attn.q_proj": 5}}, (True, False, False, False), "scale"),
    # llama.cpp divides alpha by each module's own rank, as peft does; the others by r.
    "rank pattern": ({"rank_pattern": {"v_proj": 4}}, (True, False, True, False), "rank"),
    "rank above 16": ({"r": 20, "target_modules": ["o_proj", "down_proj"]}, (True, True, True, False), "pads"),
    "rank below 8": ({"r": 4}, (True, True, True, False), "pads"),
    "dora": ({"use_dora": True}, (False,) * 4, "use_dora"),
    "pissa": ({"init_lora_weights": "pissa"}, (False,) * 4, "init_lora_weights"),
    "gaussian": ({"init_lora_weights": "gaussian"}, (True,) * 4, ""),
    "head trained whole": ({"modules_to_save": ["lm_head"]}, (False,) * 4, "modules_to_save"),
    "tied head": ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, (True, True, False, True), "tied"),
    "embeddings": ({"target_modules": ["embed_tokens"]}, (True, True, True, False), "out"),
    "key alone": ({"target_modules": ["k_proj"]}, (True, False, True, True), "beside"),
    "one layer": ({"layers_to_transform": [1]}, (True, True, True, False), "one layer lacks it"),
    "regex": ({"target_modules": r".*\.(q|v)_proj"}, (True, False, True, True), "list of names"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", READERS)
def test_the_rules_of_the_engines(tmp_path: Path, bases: dict[str, str], case: str) -> None:
    options, wanted, word = READERS[case]
    found = peftlab.check_adapter(by_peft("llama", tmp_path / "a", **options), bases["llama"])
    assert tuple(found.consumers[name].loads for name in ENGINES) == wanted
    assert found.consumers["peft"].loads is True and found.consumers["peftlab"].loads is True
    refusals = [found.consumers[name].reason for name in ENGINES if found.consumers[name].loads is False]
    assert not refusals or word in refusals[0]


@pytest.mark.parametrize("case", READERS)
def test_peft_loads_all_that_is_judged_a_plain_lora(tmp_path: Path, bases: dict[str, str], case: str) -> None:
    place = by_peft("llama", tmp_path / "a", **READERS[case][0])
    fit = fit_to_base(read_contents(place), bases["llama"])
    assert fit.plain == (case in ("rslora", "rank above 16", "rank below 8", "key alone"))
    if fit.plain:
        assert Peft()._load(fit, str(place)) == ([], [])
    config = place / "adapter_config.json"
    for changed in ({"r": 7}, {"target_modules": ["q_proj"]}, {"lora_bias": True}, {"task_type": "SEQ_CLS"}):
        values = json.loads(config.read_text())
        config.write_text(json.dumps(values | changed))
        assert not fit_to_base(read_contents(place), bases["llama"]).plain
        config.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("family", "wanted"), [("mixtral", (False, False, False, False)), ("qwen3_moe", (True, False, False, False))]
)
def test_factors_of_all_experts_in_one_tensor(
    tmp_path: Path, bases: dict[str, str], family: str, wanted: tuple[bool, ...]
) -> None:
    found = peftlab.check_adapter(by_peft(family, tmp_path / "a", **EXPERTS), bases[family])
    assert tuple(found.consumers[name].loads for name in ENGINES) == wanted
    assert "model.layers.0.mlp.experts" in found.matched and found.consumers["peft"].loads is True


def test_factors_of_one_of_two_expert_weights_are_not_read_by_vllm(tmp_path: Path, bases: dict[str, str]) -> None:
    place = by_peft("qwen3_moe", tmp_path / "a", target_parameters=["mlp.experts.down_proj"])
    reading = peftlab.check_adapter(place, bases["qwen3_moe"]).consumers["vllm"]
    assert reading.loads is False and "gate_up_proj" in reading.reason


def test_exchanged_factors_of_experts_are_found(tmp_path: Path, bases: dict[str, str]) -> None:
    """Older versions of peft took the weights of experts for (experts, in, out)."""

    def exchange(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        experts = {key for key in tensors if ".experts." in key}
        other = {"A": "B", "B": "A"}
        kept = {key: tensor for key, tensor in tensors.items() if key not in experts}
        turned = {re.sub("lora_([AB])", lambda m: f"lora_{other[m[1]]}", key): tensors[key].mT for key in experts}
        return kept | {key: tensor.contiguous() for key, tensor in turned.items()}

    place = edited(by_peft("qwen3_moe", tmp_path / "a", **EXPERTS), exchange)
    found = peftlab.check_adapter(place, bases["qwen3_moe"])
    assert "model.layers.0.mlp.experts" in found.unmatched and any("swapped" in note for note in found.notes)
    assert not any(reading.loads is True for reading in found.consumers.values())


def test_what_the_base_lacks_and_what_the_file_lacks(tmp_path: Path, bases: dict[str, str]) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {
            key.replace("layers.1.self_attn.q_proj", "layers.7.self_attn.q_proj"): t for key, t in tensors.items()
        }
        return renamed

    found = command("check", edited(by_peft("llama", tmp_path / "a"), change), "--base", bases["llama"])
    assert found["unmatched"] == ["model.layers.7.self_attn.q_proj"]
    assert found["missing"] == ["model.layers.1.self_attn.q_proj"]
    assert "model.layers.7.self_attn.q_proj" not in found["matched"]
    assert not any(reading["loads"] is True for reading in found["consumers"].values())


def test_a_target_that_matches_nothing_is_a_note(tmp_path: Path, bases: dict[str, str]) -> None:
    place = by_peft("llama", tmp_path / "a", target_modules=["q_proj", "v_proj", "wq"])
    found = peftlab.check_adapter(place, bases["llama"])
    assert any("'wq'" in note for note in found.notes)


def test_a_start_that_changed_the_base_is_read_by_nobody(tmp_path: Path, bases: dict[str, str]) -> None:
    place = by_peft("llama", tmp_path / "a")
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "lora_ga"}))
    found = peftlab.check_adapter(place, bases["llama"])
    assert {name for name, each in found.consumers.items() if each.loads is True} == set()


def test_other_formats(tmp_path: Path, bases: dict[str, str]) -> None:
    place = by_peft("llama", tmp_path / "a")
    tensors = load_file(place / "adapter_model.safetensors")
    flat = {key.removeprefix("base_model.model.").removesuffix(".weight"): tensor for key, tensor in tensors.items()}
    torch.save(flat, tmp_path / "loralib.bin")
    found = peftlab.check_adapter(tmp_path / "loralib.bin", bases["llama"])
    assert found.format == "loralib" and len(found.matched) == 4 and found.consumers["peftlab"].loads is True
    assert all(found.consumers[name].loads is False for name in ("peft", *ENGINES))
    base = save_base(build("bert"), tmp_path / "bert")
    theirs = peftlab.check_adapter(adapt(build("bert"), tmp_path / "houlsby", "houlsby"), str(base))
    assert theirs.format == "peftlab" and theirs.consumers["peftlab"].loads is True and not theirs.unmatched


def test_a_task_head_is_no_reason_against_vllm_where_it_classifies(tmp_path: Path) -> None:
    base = save_base(build("bert"), tmp_path / "bert")
    place = tmp_path / "a"
    config = peft.LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"])
    peft.get_peft_model(build("bert"), config).save_pretrained(str(place))
    found = peftlab.check_adapter(place, str(base))
    assert "classifier" in found.matched and found.consumers["vllm"].loads == "unknown"
    assert found.consumers["sglang"].loads is found.consumers["llama.cpp"].loads is False


@pytest.mark.filterwarnings("ignore")
def test_peftlab_says_what_loads_and_does_not_merge(tmp_path: Path, bases: dict[str, str]) -> None:
    reading = peftlab.check_adapter(by_peft("llama", tmp_path / "a", lora_bias=True), bases["llama"]).consumers[
        "peftlab"
    ]
    assert reading.loads is True and "cannot be merged" in reading.reason


def test_a_pickled_adapter_is_checked_too(tmp_path: Path, bases: dict[str, str]) -> None:
    place = by_peft("llama", tmp_path / "a")
    torch.save(load_file(place / "adapter_model.safetensors"), place / "adapter_model.bin")
    (place / "adapter_model.safetensors").unlink()
    found = peftlab.check_adapter(place, bases["llama"])
    assert len(found.matched) == 4 and found.consumers["peft"].loads is True
    done = peftlab.convert_adapter(place, tmp_path / "out", "sglang", base=bases["llama"])
    assert done.modules == 4


def test_without_peft_its_verdict_is_unknown(
    tmp_path: Path, bases: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = by_peft("llama", tmp_path / "a")
    monkeypatch.setitem(sys.modules, "peft", None)
    reading = peftlab.check_adapter(place, bases["llama"]).consumers["peft"]
    assert reading.loads == "unknown" and "not installed" in reading.reason


@pytest.mark.parametrize(
    ("change", "named"),
    [({"r": "four"}, "r: 'four'"), ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"), ({"r": 0}, "r: 0")],
)
def test_values_of_a_wrong_type_are_one_error(
    tmp_path: Path, bases: dict[str, str], change: dict[str, Any], named: str
) -> None:
    place = by_peft("llama", tmp_path / "a")
    raw = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(raw | change))
    with pytest.raises(PeftlabError, match=named):
        peftlab.check_adapter(place, bases["llama"])


def test_for_people_and_for_nobody(tmp_path: Path, bases: dict[str, str]) -> None:
    arguments = ["adapter", "check", str(by_peft("llama", tmp_path / "a")), "--base", bases["llama"]]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert "model.layers.*.self_attn.q_proj (2)" in shown and "vLLM 0.33.0, 2026-11-02" in " ".join(shown.split())
    quiet = CliRunner().invoke(app, [*arguments, "--quiet", "--json", str(tmp_path / "check.json")])
    assert not quiet.output and json.loads((tmp_path / "check.json").read_text())["format"] == "peft"


# What is converted, and for whom; the number of modules that get factors of 0.
CONVERTED: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("llama", {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 5}},
     {"vllm": 0, "sglang": 0, "llama.cpp": 0, "lorax": 0}),
    ("llama", {"target_modules": ["k_proj", "up_proj"]}, {"vllm": 0, "sglang": 6, "llama.cpp": 0, "lorax": 0}),
    ("llama", {"layers_to_transform": [1], "r": 20}, {"vllm": 0, "sglang": 0, "llama.cpp": 0, "lorax": 2}),
    ("llama", {"target_modules": ["embed_tokens", "q_proj"]}, {"vllm": 0, "sglang": 2, "llama.cpp": 0}),
    ("mixtral", EXPERTS, {"vllm": 0, "llama.cpp": 0}),
    ("qwen3_moe", EXPERTS | {"use_rslora": True}, {"vllm": 0, "sglang": 0, "llama.cpp": 0}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "options", "engines"), CONVERTED)
def test_a_converted_adapter_computes_the_same_and_its_engine_reads_it(
    tmp_path: Path, bases: dict[str, str], family: str, options: dict[str, Any], engines: dict[str, int]
) -> None:
    place = by_peft(family, tmp_path / "a", **options)

    def logits(adapter: Path | None) -> Tensor:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(bases[family])
        model = model if adapter is None else peft.PeftModel.from_pretrained(model, str(adapter))
        with torch.no_grad():
            return model.eval()(IDS).logits

    wanted = logits(place)
    assert not torch.allclose(wanted, logits(None), atol=1e-6)
    for name, added in engines.items():
        out = tmp_path / name
        done = command("convert", place, "--to", name, "-o", out, "--base", bases[family])
        assert done["engine"] == name and len(done["added"]) == added
        assert torch.allclose(logits(out), wanted, atol=2e-6), name
        found = peftlab.check_adapter(out, bases[family])
        assert found.consumers[name].loads is True, found.consumers[name].reason
        assert found.consumers["peft"].loads is True and not found.unmatched


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("engine", "options", "named"),
    [
        ("vllm", {"use_dora": True}, "use_dora"),
        ("sglang", {"modules_to_save": ["lm_head"]}, "lm_head"),
        ("lorax", {"target_modules": ["embed_tokens"]}, "embed_tokens"),
        ("llama.cpp", {"target_modules": ["lm_head"]}, "tied"),
        ("vllm", {"init_lora_weights": "pissa"}, "pissa"),
        ("vlm", {}, "did you mean 'vllm'"),
    ],
)
def test_what_an_engine_cannot_read_is_refused_and_nothing_is_written(
    tmp_path: Path, bases: dict[str, str], engine: str, options: dict[str, Any], named: str
) -> None:
    place = by_peft("llama", tmp_path / "a", **options)
    with pytest.raises(PeftlabError, match=named):
        peftlab.convert_adapter(place, tmp_path / "out", engine, base=bases["llama"])
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_the_base_is_not_converted(tmp_path: Path, bases: dict[str, str]) -> None:
    place = by_peft("llama", tmp_path / "a")
    with pytest.raises(PeftlabError, match=r"does not fit.*\.layers\.7"):
        edited(place, lambda tensors: {key.replace("layers.1", "layers.7"): each for key, each in tensors.items()})
        peftlab.convert_adapter(place, tmp_path / "out", "vllm", base=bases["llama"])


@pytest.mark.parametrize("change", [lambda tensor: tensor[0], lambda tensor: tensor[:, :4]])
def test_factors_that_cannot_be_multiplied_are_one_error(tmp_path: Path, change: Any) -> None:
    place = by_peft("llama", tmp_path / "a")
    broken = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    edited(place, lambda tensors: tensors | {broken: change(tensors[broken]).contiguous()})
    with pytest.raises(PeftlabError, match="q_proj"):
        peftlab.convert_adapter(place, tmp_path / "out", "vllm")
    assert not (tmp_path / "out").exists()


def test_without_a_base_the_result_is_said_to_be_unchecked(tmp_path: Path) -> None:
    model = build("llama")
    model.config._name_or_path = ""
    place = adapt(model, tmp_path / "a", target_modules=["q_proj", "v_proj"], layers_to_transform=[0])
    done = peftlab.convert_adapter(place, tmp_path / "out", "vLLM")
    assert done.engine == "vllm" and done.checked.startswith("unchecked")
    reader = peft.PeftModel.from_pretrained(build("llama"), str(tmp_path / "out")).eval()
    assert torch.allclose(reader(IDS).logits, model(IDS).logits, atol=1e-6)


def test_an_output_is_not_replaced_unless_told(tmp_path: Path, bases: dict[str, str]) -> None:
    place = by_peft("llama", tmp_path / "a")
    for _ in range(2):
        peftlab.convert_adapter(place, tmp_path / "out", "vllm", base=bases["llama"], overwrite=True)
    with pytest.raises(PeftlabError, match="exists already"):
        peftlab.convert_adapter(place, tmp_path / "out", "vllm", base=bases["llama"])
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(PeftlabError, match="the adapter"):
        peftlab.convert_adapter(place, place, "vllm", base=bases["llama"], overwrite=True)
