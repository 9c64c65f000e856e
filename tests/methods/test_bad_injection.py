"""Mistakes: one clear error, and the model is as it was."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import base, batch, injected, logits, trained

import peftlab
from peftlab import PeftlabError
from peftlab.methods.config import METHODS, config_class
from peftlab.methods.inject import adapted_line, injection_of, is_injected


def fingerprint(model):
    return (
        {name: (id(p), p.requires_grad) for name, p in model.named_parameters()},
        {name: (id(m), type(m)) for name, m in model.named_modules()},
    )


def kinds(model):
    return {name: type(module) for name, module in model.named_modules()}


BAD_LORA = [
    ({"target_modules": ["qury"]}, "'qury' matches no module; nearest: .*query"),
    ({"target_modules": ["query", "valeu"]}, "'valeu' matches no module"),
    ({"target_modules": r".*\.nothing"}, "matches no module"),
    ({"target_modules": "query,value"}, r"'query,value' matches no module \(did you mean \[query, value\]\?\)$"),
    ({"target_modules": "query"}, r"did you mean \[query\]"),
    ({"target_modules": "query, valeu"}, "'query, valeu' matches no module; nearest: "),
    ({"target_modules": "("}, "not a regular expression"),
    ({"target_modules": []}, "target_modules"),
    ({"r": 0}, "r: "),
    ({"r": -3}, "r: "),
    ({"r": 10**6}, "larger than 65536"),
    ({"lora_dropout": 1.0}, "lora_dropout"),
    ({"lora_dropout": -0.1}, "lora_dropout"),
    ({"lora_alpha": 0}, "lora_alpha"),
    ({"layers_to_transform": [5]}, "no layer 5; there are 0 to 1"),
    ({"rank_pattern": {"qury": 2}}, r"^rank_pattern: 'qury' matches no adapted module; nearest: query"),
    ({"alpha_pattern": {"qury": 2}}, r"^alpha_pattern: 'qury' matches no adapted module; nearest: query"),
    ({"modules_to_save": ["poolr"]}, "'poolr' matches no module; nearest: .*pooler"),
    ({"lora_alhpa": 3}, "did you mean 'lora_alpha'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_LORA)
def test_bad_lora(fields, message):
    model = base("bert")
    before = fingerprint(model)
    with pytest.raises(PeftlabError, match=message):
        peftlab.inject_lora(model, **fields)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 4}, r"lora: rank: unknown field \(did you mean 'r'\?\)"),
        ({"dropout": 0.1}, "did you mean 'lora_dropout'"),
        ({"task_type": "SEQ_CLS"}, r"task_type: unknown field, which is not needed; peftlab\.inject takes peft's"),
        ({"r": peftlab.LoraConfig()}, r"lora: r is a LoraConfig; use peftlab\.inject\(model, config\)"),
        ({"r": peft.LoraConfig()}, r"lora: r is a LoraConfig; use peftlab\.inject\(model, config\)"),
    ],
)
def test_habits_from_other_libraries(fields, message):
    with pytest.raises(PeftlabError, match=message):
        peftlab.inject_lora(base("bert"), **fields)


def test_the_line_of_a_module_whose_name_ends_in_a_number_has_the_whole_name():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    assert adapted_line(peftlab.inject_lora(model, target_modules=["0.0"])) == "lora in 1 module: 0.0"


@pytest.mark.parametrize("wrap", ["get_peft_model", "add_adapter"])
def test_a_model_that_peft_has_wrapped_is_refused(wrap):
    model, config = base("bert"), peft.LoraConfig(target_modules=["query"])
    if wrap == "get_peft_model":
        model = peft.get_peft_model(model, config)
    else:
        model.add_adapter(config)
    with pytest.raises(PeftlabError, match=r"wrapped by peft already: give the base model .*model\.unload\(\)"):
        peftlab.inject_lora(model)
    if wrap == "get_peft_model":
        assert is_injected(peftlab.inject_lora(model.unload()))


@pytest.mark.parametrize("second", METHODS)
@pytest.mark.parametrize("first", METHODS)
def test_a_second_injection_is_refused(first, second):
    model = injected(first, "bert")
    before = fingerprint(model)
    with pytest.raises(PeftlabError, match=f"holds a {first} injection already"):
        peftlab.inject(model, config_class(second)())
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    "call", [peftlab.remove, peftlab.merge, lambda m: peftlab.disabled(m).__enter__(), injection_of]
)
def test_a_model_without_injection(call):
    with pytest.raises(PeftlabError, match="has no injected method"):
        call(base("bert"))


@pytest.mark.parametrize("method", ["lora", "houlsby"])
def test_a_patched_leaf_would_hide_the_adapter(method):
    model = base("llama")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = module.forward
    with pytest.raises(PeftlabError, match=r"layers.0.self_attn.*forward of its own"):
        peftlab.inject(model, config_class(method)())
    assert not is_injected(model)


def test_a_tied_module_to_save_names_its_twin():
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(PeftlabError, match=r"lm_head are those of model.embed_tokens .*name model.embed_tokens"):
        peftlab.inject_lora(model, modules_to_save=["lm_head"])
    assert not is_injected(model)
    peftlab.inject_lora(model, modules_to_save=["embed_tokens"])
    assert model.lm_head.weight.requires_grad


def test_head_without_a_head():
    model = base("bert").bert
    with pytest.raises(PeftlabError, match="no task head"):
        peftlab.inject(model, config_class("head")())


@pytest.mark.parametrize("method", METHODS)
def test_a_model_on_the_meta_device_counts_but_does_not_save(method, tmp_path):
    model = peftlab.inject(base("bert").to("meta"), config_class(method)())
    with pytest.raises(PeftlabError, match="meta device"):
        peftlab.save_adapter(model, tmp_path)
    assert not list(tmp_path.iterdir())


def damage(directory, change):
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    with_header = change(tensors)
    save_file(with_header if with_header is not None else tensors, path, metadata={"format": "pt"})


def _nan(tensors):
    next(iter(tensors.values())).view(-1)[0] = torch.nan


def _drop_one(tensors):
    tensors.pop(next(iter(tensors)))


def _rename_one(tensors):
    name = next(iter(tensors))
    tensors[name.replace("bert", "brt")] = tensors.pop(name)


def _reshape_one(tensors):
    name = next(iter(tensors))
    tensors[name] = tensors[name][..., :-1].contiguous()


@pytest.mark.parametrize("method", ["lora", "houlsby", "bitfit"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_nan, "NaN"),
        (_drop_one, "in the model, not in the file"),
        (_rename_one, "in the file, not in the model"),
        (_reshape_one, "shape"),
    ],
)
def test_damaged_files(method, change, message, tmp_path):
    peftlab.save_adapter(trained(method, "bert"), tmp_path)
    damage(tmp_path, change)
    model = base("bert")
    before = fingerprint(model)
    with pytest.raises(PeftlabError, match=message):
        peftlab.load_adapter(model, tmp_path)
    assert kinds(model) == kinds(base("bert")) and fingerprint(model)[0] == before[0]
    assert torch.equal(logits(model, batch("bert")), logits(base("bert"), batch("bert")))


def test_a_file_cut_short(tmp_path):
    peftlab.save_adapter(trained("lora", "bert"), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(PeftlabError, match="truncated"):
        peftlab.load_adapter(base("bert"), tmp_path)


@pytest.mark.parametrize("method", ["lora", "houlsby"])
def test_another_base_model_is_refused(method, tmp_path):
    peftlab.save_adapter(trained(method, "bert"), tmp_path)
    model = base("roberta")
    with pytest.raises(PeftlabError, match="another base model"):
        peftlab.load_adapter(model, tmp_path)
    assert not is_injected(model)


def llama(**changes):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes, **changes))


def test_a_weight_that_trains_under_another_name_takes_no_addition():
    """Else only the embedding's use of it would train."""
    with pytest.raises(PeftlabError, match=r"lm_head shares its weight with model\.embed_tokens\.weight"):
        peftlab.inject_lora(
            llama(tie_word_embeddings=True), target_modules=["q_proj", "lm_head"], modules_to_save=["embed_tokens"]
        )


def test_a_model_s_name_is_not_the_model():
    with pytest.raises(PeftlabError, match=r"in memory, not 'some/model': load it first"):
        peftlab.inject_lora("some/model")


def test_a_model_that_is_itself_the_leaf():
    with pytest.raises(PeftlabError, match="no module holds it"):
        peftlab.inject_lora(torch.nn.Linear(8, 8), target_modules="all-linear")


def test_what_torch_compile_returned_is_refused_before_anything_changes():
    model = injected("lora", "bert")
    compiled = torch.compile(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for call in (peftlab.merge, peftlab.remove, lambda m: peftlab.set_adapter(m, "other"), peftlab.inject_lora):
        with pytest.raises(PeftlabError, match=r"_orig_mod|no adapter 'other'"):
            call(compiled)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_blocks_of_the_base_model_within_each_other():
    model, inputs = trained("lora", "bert"), batch("bert")
    adapted = logits(model, inputs)
    with peftlab.disabled(model):
        plain = logits(model, inputs)
        with peftlab.disabled(model):
            pass
        assert torch.equal(logits(model, inputs), plain)
    assert torch.equal(logits(model, inputs), adapted) and not torch.equal(adapted, plain)


def test_the_base_model_between_a_forward_pass_and_its_backward():
    """As a loss against the base model computes it; the classifier trains in place, and has its values again."""
    model, inputs = trained("lora", "bert"), batch("bert")
    model.eval()
    loss = model(**inputs).logits.square().sum()
    expected = torch.autograd.grad(model(**inputs).logits.square().sum(), model.classifier.weight)[0]
    with torch.no_grad(), peftlab.disabled(model):
        model(**inputs)
    loss.backward()
    torch.testing.assert_close(model.classifier.weight.grad, expected)


def test_merged_models_lead_back_to_one_base():
    model = peftlab.inject_lora(llama(), target_modules=["q_proj"])
    peftlab.merge(model, keep=True)
    peftlab.inject_lora(model, target_modules=["v_proj"])
    with pytest.raises(PeftlabError, match="merged with keep=True already"):
        peftlab.merge(model, keep=True)
    peftlab.merge(model)
    with pytest.raises(PeftlabError, match="nothing to unmerge"):
        peftlab.unmerge(model)


def test_a_weight_that_a_merge_unties_trains_as_it_did():
    model = llama(tie_word_embeddings=True)
    peftlab.merge(peftlab.inject_lora(model, target_modules=["lm_head"]))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_layers_of_experts():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=50, num_local_experts=2, num_key_value_heads=2, **sizes)
    model = transformers.MixtralForCausalLM(config)
    peftlab.inject_lora(model, target_parameters=["experts.gate_up_proj"], layers_to_transform=[1])
    assert {name.split(".")[2] for name in peftlab.trainable_parameters(model)} == {"1"}
    with pytest.raises(PeftlabError, match="no layer 2; there are 0 to 1"):
        peftlab.inject_lora(
            transformers.MixtralForCausalLM(config),
            target_parameters=["experts.gate_up_proj"],
            layers_to_transform=[2],
        )
