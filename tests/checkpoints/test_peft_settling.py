"""The file decides what the adapter is: what it lacks stays the base's, what it has too much is told or refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from models import LLAMA, SMALL, build, load, save_base, stir
from peft_round_trip import of, randomised, round_trip
from safetensors.torch import load_file, save_file

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.errors import PeftlabError
from peftlab.methods.inject import injection_of, trainable_parameters

IDS = torch.arange(3, 33).view(2, 15)
WEIGHTS = "adapter_model.safetensors"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def saved_by_peft(model: Any, directory: Path, **fields: Any) -> torch.Tensor:
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(model, peft.LoraConfig(r=3, **fields))
        stir(theirs, 0.1)
        theirs.save_pretrained(directory)
    return logits(theirs)


def rewrite(directory: Path, change: Any) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def test_a_head_that_peft_did_not_train_stays_and_is_named(tmp_path: Path) -> None:
    expected = saved_by_peft(build("roberta"), tmp_path, target_modules=["query", "value"])
    with pytest.warns(UserWarning, match=r"does not contain classifier\.dense\.weight"):
        model = peftlab.load_adapter(build("roberta"), tmp_path)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    assert not any("classifier" in name for name in trainable_parameters(model))
    peftlab.save_adapter(model, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    mapping = {"base_model_class": "RobertaForSequenceClassification"}
    mapping["parent_library"] = "transformers.models.roberta.modeling_roberta"
    assert written["task_type"] is None and written["auto_mapping"] == mapping
    theirs = peft.PeftModel.from_pretrained(build("roberta"), str(tmp_path / "ours"))
    torch.testing.assert_close(logits(theirs), expected, rtol=1e-5, atol=1e-6)


def deberta() -> Any:
    torch.manual_seed(0)
    sizes = {**SMALL, "max_position_embeddings": 40, "num_labels": 3}
    model = transformers.DebertaV2ForSequenceClassification(transformers.DebertaV2Config(**sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def test_a_head_of_which_peft_trained_a_part(tmp_path: Path) -> None:
    expected = saved_by_peft(deberta(), tmp_path, target_modules=["query_proj"], task_type="SEQ_CLS")
    with pytest.warns(UserWarning, match=r"does not contain pooler\.dense\.weight, pooler\.dense\.bias"):
        model = peftlab.load_adapter(deberta(), tmp_path)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    assert {n for n in trainable_parameters(model) if "lora" not in n} == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("bias", ["lora_only", "all"])
@pytest.mark.parametrize(
    ("task", "targets"),
    [
        ("BertForTokenClassification", ["query", "classifier"]),
        ("BertForQuestionAnswering", ["query", "qa_outputs"]),
        ("BertForMultipleChoice", ["query", "classifier"]),
        ("RobertaForSequenceClassification", ["query", "classifier.out_proj"]),
    ],
)
def test_factors_and_biases_in_a_head(tmp_path: Path, task: str, targets: list[str], bias: str) -> None:
    def make() -> Any:
        kind = getattr(transformers, task)
        return randomised(kind(kind.config_class(**SMALL, max_position_embeddings=40)))

    ids = torch.arange(3, 33).view(2, 15)
    compute = of({"input_ids": ids.view(1, 2, 15) if "Choice" in task else ids})
    round_trip(make, compute, tmp_path, target_modules=targets, bias=bias)


@pytest.mark.parametrize("lost", ["classifier.dense.weight", "classifier"])
def test_a_head_that_the_configuration_names_and_the_file_lacks(tmp_path: Path, lost: str) -> None:
    saved_by_peft(build("roberta"), tmp_path, target_modules=["query"], task_type="SEQ_CLS")
    rewrite(tmp_path, lambda tensors: [tensors.pop(key) for key in list(tensors) if lost in key])
    with pytest.raises(PeftlabError, match=r"in the model, not in the file.*classifier\.dense\.weight"):
        peftlab.load_adapter(build("roberta"), tmp_path)


def test_pefts_auto_classes_know_the_base_of_what_we_save(tmp_path: Path) -> None:
    save_base(build("llama"), tmp_path / "base")
    model = peftlab.inject_lora(load(type(build("llama")), tmp_path / "base"), r=2)
    model.get_parameter("model.layers.0.self_attn.q_proj.lora_B").data.fill_(0.1)
    peftlab.save_adapter(model, tmp_path / "ours", base=str(tmp_path / "base"))
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "ours"))
    assert type(theirs) is peft.PeftModelForCausalLM
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-6)


def test_factors_that_are_not_there(tmp_path: Path) -> None:
    saved_by_peft(build("llama"), tmp_path, target_modules=["q_proj", "v_proj"])
    rewrite(tmp_path, lambda tensors: [tensors.pop(key) for key in list(tensors) if "v_proj" in key])
    with pytest.raises(PeftlabError, match=r"in the model, not in the file \(4\)"):
        peftlab.load_adapter(build("llama"), tmp_path)


def test_names_that_match_nothing_are_told_on_loading_and_refused_on_injecting(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"target_modules": ["q_proj", "query"], "exclude_modules": ["nowhere"]}
    expected = saved_by_peft(build("llama"), tmp_path, **fields)
    with pytest.warns(UserWarning, match=r"match nothing.*target_modules: query; exclude_modules: nowhere"):
        model = peftlab.load_adapter(build("llama"), tmp_path)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(PeftlabError, match="'query' matches no module"):
        peftlab.inject_lora(build("llama"), **fields)


def grown(seed: int) -> Any:
    """A model whose vocabulary was resized: the new rows are random."""
    model = build("llama")
    torch.manual_seed(seed)
    model.resize_token_embeddings(LLAMA["vocab_size"] + 8, mean_resizing=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[-8:].normal_(std=0.1)
    return model


def test_rows_of_a_resized_vocabulary_come_with_the_adapter(tmp_path: Path) -> None:
    base = save_base(build("llama"), tmp_path / "base")
    trained = grown(5)
    trained.config.name_or_path = trained.name_or_path = str(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(trained, peft.LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        stir(theirs, 0.1)
        theirs.save_pretrained(tmp_path / "adapter")
    assert "base_model.model.model.embed_tokens.weight" in load_file(tmp_path / "adapter" / WEIGHTS)
    expected, other = logits(theirs), grown(6)
    before = logits(other)
    with pytest.warns(UserWarning, match=r"embed_tokens\.weight, and 8 of its 104 rows"):
        model = peftlab.load_adapter(other, tmp_path / "adapter")
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    assert not any("embed" in name for name in trainable_parameters(model))
    peftlab.save_adapter(model, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(grown(7), str(tmp_path / "ours"))
    torch.testing.assert_close(logits(again), expected, rtol=1e-5, atol=1e-6)
    peftlab.load_adapter(model, tmp_path / "adapter")  # into the same model again
    with peftlab.disabled(model):
        assert torch.equal(logits(model), before)
    peftlab.unmerge(peftlab.merge(model, keep=True))
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    assert injection_of(model).frozen == ("model.embed_tokens.weight",)
    assert torch.equal(logits(peftlab.remove(model)), before)
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    merged = load(transformers.LlamaForCausalLM, tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(PeftlabError, match=r"resize_token_embeddings\(104\) first"):
        peftlab.load_adapter(build("llama"), tmp_path / "adapter")


def test_embeddings_come_and_go_with_their_adapter(tmp_path: Path) -> None:
    trained = grown(5)
    trained.config.name_or_path = trained.name_or_path = str(save_base(build("llama"), tmp_path / "base"))
    first = saved_by_peft(trained, tmp_path / "grown", target_modules=["q_proj"], task_type="CAUSAL_LM")
    plain = peftlab.inject_lora(grown(6), r=2, target_modules=["v_proj", "q_proj"])
    stir(plain, 0.1)
    second = logits(plain)
    peftlab.save_adapter(plain, tmp_path / "plain")
    model = grown(6)
    before = logits(model)
    with pytest.warns(UserWarning, match="embed_tokens"):
        peftlab.load_adapter(model, tmp_path / "grown", name="grown")
    peftlab.load_adapter(model, tmp_path / "plain", name="plain")
    for name, expected in (("plain", second), ("grown", first), ("plain", second)):
        peftlab.set_adapter(model, name)
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    for names, expected in ((["grown", "plain"], (first, second)), (["plain", "__base__"], (second, before))):
        with peftlab.adapter_names(model, names):
            mixed = torch.stack([expected[0][0], expected[1][1]])
            torch.testing.assert_close(logits(model), mixed, rtol=1e-5, atol=1e-6)
    peftlab.save_adapter(model, tmp_path / "again", name="grown")
    again = peft.PeftModel.from_pretrained(grown(7), str(tmp_path / "again"))
    torch.testing.assert_close(logits(again), first, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits(peftlab.remove(model)), before)


def test_a_rank_above_the_smaller_side(tmp_path: Path) -> None:
    model = peftlab.inject_lora(build("llama"), r=40, target_modules=["q_proj"])
    stir(model, 0.1)
    peftlab.save_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(build("llama"), str(tmp_path))
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-6)
    with pytest.raises(PeftlabError, match="r=40 is larger than the smaller side"):
        peftlab.inject_lora(build("llama"), r=40, target_modules=["q_proj"], init_lora_weights="pissa")


def test_a_router_trains_and_merges(tmp_path: Path) -> None:
    base = save_base(build("mixtral"), tmp_path / "base")
    model = peftlab.inject_lora(build("mixtral"), r=2, target_parameters=["mlp.gate.weight"])
    stir(model, 0.3)
    assert {name.rpartition(".")[2] for name in trainable_parameters(model)} == {"weight_lora_A", "weight_lora_B"}
    expected = logits(model)
    assert (expected - logits(build("mixtral"))).abs().max() > 1e-3
    peftlab.save_adapter(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(build("mixtral"), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(theirs), expected, rtol=1e-4, atol=1e-5)
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    merged = load(transformers.MixtralForCausalLM, tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)
    model(IDS).logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trainable_parameters(model).values())


def test_a_target_of_a_kind_that_is_not_supported_is_named(tmp_path: Path) -> None:
    saved_by_peft(build("llama"), tmp_path, target_modules=["q_proj"])
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "target_modules": ["q_proj", "input_layernorm"]}))
    with pytest.raises(PeftlabError, match="'input_layernorm' is a LlamaRMSNorm"):
        peftlab.load_adapter(build("llama"), tmp_path)
