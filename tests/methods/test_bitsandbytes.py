"""Bases whose linear maps bitsandbytes stores in 4 or 8 bits: every method beside them, and peft on the same base."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

import peftlab
from peftlab.methods.config import FullConfig, HeadConfig
from peftlab.methods.inject import count_parameters, is_injected
from peftlab.models.quantised import dequantised, is_quantised, quantised_linears
from peftlab.training.recomputation import recompute_activations
from tests.forked import two

pytest.importorskip("bitsandbytes")
SIZE: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.arange(20).view(2, 10)
HOW = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE)).save_pretrained(place)
    return place


def load(
    place: Path, how: str, dtype: torch.dtype = torch.float32, auto: Any = AutoModelForCausalLM, **more: Any
) -> Any:
    """Load a model as a user of transformers does."""
    config = BitsAndBytesConfig(**HOW[how], llm_int8_skip_modules=["lm_head", "classifier"])
    return auto.from_pretrained(place, quantization_config=config, dtype=dtype, **more)


def plain_twin(model: Any, place: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return a plain model with the dequantised values of a quantised one."""
    twin = AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
    for name, linear in quantised_linears(model):
        twin.get_submodule(name).weight.data = dequantised(linear, dtype)
    return twin


def shake(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in peftlab.trainable_parameters(model).values():
            parameter += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.05


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.train()
    torch.manual_seed(3)
    model(IDS, labels=IDS).loss.backward()
    return {name: parameter.grad for name, parameter in peftlab.trainable_parameters(model).items()}  # type: ignore[misc]


VARIANTS: dict[str, peftlab.LoraConfig | peftlab.HoulsbyConfig] = {
    "lora": peftlab.LoraConfig(r=4, target_modules="all-linear"),
    "rslora, dropout": peftlab.LoraConfig(r=4, target_modules="all-linear", use_rslora=True, lora_dropout=0.3),
    "dora": peftlab.LoraConfig(r=4, target_modules="all-linear", use_dora=True),
    "dora, dropout": peftlab.LoraConfig(r=4, target_modules="all-linear", use_dora=True, lora_dropout=0.3),
    "lora_bias": peftlab.LoraConfig(r=4, target_modules="all-linear", lora_bias=True),
    "houlsby": peftlab.HoulsbyConfig(bottleneck=8),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("how", HOW)
def test_outputs_and_gradients_are_those_beside_the_dequantised_weights(llama: Path, how: str, variant: str) -> None:
    model = load(llama, how)
    twin = plain_twin(model, llama)
    for each in (model, twin):
        torch.manual_seed(2)
        shake(peftlab.inject(each, VARIANTS[variant]))
    assert {p.dtype for p in peftlab.trainable_parameters(model).values()} == {torch.float32}
    theirs = gradients(twin)
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradient, theirs[name], atol=1e-6, rtol=1e-4), name
    if how != "int8" or variant != "houlsby":  # whose leaves compute as bitsandbytes does, activations in 8 bits too
        with torch.no_grad():
            assert torch.allclose(model.eval()(IDS).logits, twin.eval()(IDS).logits, atol=1e-5)


@pytest.mark.parametrize("how", HOW)
def test_evaluations_do_not_change_the_base(llama: Path, how: str) -> None:
    """On CPUs with bf16 products bitsandbytes would pack 4-bit weights anew, and compute no gradient any more."""
    model = peftlab.inject(load(llama, how).eval(), VARIANTS["lora"])
    before = {name: dequantised(linear, torch.float32) for name, linear in quantised_linears(model)}
    with torch.no_grad():
        model(IDS)
        with peftlab.disabled(model):
            base = model(IDS).logits
    shake(model)
    gradients(model)
    assert all(torch.equal(dequantised(linear, torch.float32), before[n]) for n, linear in quantised_linears(model))
    with torch.no_grad(), peftlab.disabled(model.eval()):
        assert torch.equal(model(IDS).logits, base)
    peftlab.remove(model)
    assert len(before) == 14 and not any(hasattr(linear, "lora_A") for _, linear in quantised_linears(model))


@pytest.mark.parametrize("how", HOW)
def test_weights_of_a_base_in_bf16_are_rounded_once(llama: Path, how: str) -> None:
    model = load(llama, how)
    for _, linear in quantised_linears(model):
        exact = dequantised(linear, torch.float32)
        assert torch.equal(dequantised(linear, torch.bfloat16), exact.to(torch.bfloat16))


@pytest.mark.parametrize("how", ["nf4-double", "int8"])
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_go_to_peft_and_back(llama: Path, how: str, dora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ours = peftlab.inject(load(llama, how), peftlab.LoraConfig(r=4, target_modules="all-linear", use_dora=dora))
    shake(ours)
    peftlab.save_adapter(ours, tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(load(llama, how), str(tmp_path / "ours"))
    theirs.train()  # in evaluation bitsandbytes rounds the activations of an int8 map too
    torch.testing.assert_close(theirs(IDS).logits, ours(IDS).logits, atol=1e-5, rtol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    back = peftlab.load_adapter(load(llama, how), tmp_path / "theirs")
    assert torch.equal(back.eval()(IDS).logits, ours.eval()(IDS).logits)


def test_parameters_are_counted_as_peft_counts_them(llama: Path) -> None:
    peft = pytest.importorskip("peft")
    ours = peftlab.inject(load(llama, "nf4"), VARIANTS["lora"])
    theirs = peft.get_peft_model(load(llama, "nf4"), peft.LoraConfig(r=4, target_modules="all-linear"))
    assert count_parameters(ours) == theirs.get_nb_trainable_parameters()
    assert count_parameters(ours)[1] == count_parameters(plain_twin(ours, llama))[1] + sum(
        p.numel() for p in peftlab.trainable_parameters(ours).values()
    )


def test_gradient_checkpointing_changes_nothing(llama: Path) -> None:
    found = []
    for selective in (None, False, True):
        model = load(llama, "nf4")
        torch.manual_seed(2)
        shake(peftlab.inject(model, VARIANTS["lora"]))
        if selective is not None:
            recompute_activations(model, selective=selective)
        found.append(gradients(model))
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


@pytest.mark.parametrize("bits", ["nf4", "int8"])
def test_biases_and_heads_train_beside_quantised_maps(bits: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **{
            k: SIZE[k]
            for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        }
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    for method in (peftlab.BitFitConfig(), HeadConfig()):
        model = peftlab.inject(load(tmp_path, bits, auto=AutoModelForSequenceClassification), method)
        twin = AutoModelForSequenceClassification.from_pretrained(tmp_path)
        for name, linear in quantised_linears(model):
            twin.get_submodule(name).weight.data = dequantised(linear, torch.float32)
        peftlab.inject(twin, method)
        for each in (model, twin):  # in training bitsandbytes does not round the activations of int8 maps
            each.train()
            for module in each.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            each(IDS, labels=torch.tensor([0, 1])).loss.backward()
        expected = peftlab.trainable_parameters(twin)
        assert expected.keys() == peftlab.trainable_parameters(model).keys()
        for name, parameter in peftlab.trainable_parameters(model).items():
            torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("how", ["nf4", "int8"])
def test_what_needs_full_weights_is_refused(llama: Path, how: str) -> None:
    model = load(llama, how)
    before = {name: (type(module), id(module)) for name, module in model.named_modules()}
    refused = {
        "method full would train .*_proj.weight in place, which is stored in 4 or 8 bits": FullConfig(),
        "init_lora_weights=pissa: .*_proj is stored in 4 or 8 bits": peftlab.LoraConfig(init_lora_weights="pissa"),
        "would train model.layers.0.mlp.gate_proj.weight": peftlab.LoraConfig(
            modules_to_save=["layers.0.mlp.gate_proj"]
        ),
    }
    for message, config in refused.items():
        with pytest.raises(peftlab.PeftlabError, match=message):
            peftlab.inject(model, config)
    assert {name: (type(module), id(module)) for name, module in model.named_modules()} == before
    peftlab.inject(model, VARIANTS["lora"])
    for keep in (False, True):
        with pytest.raises(peftlab.PeftlabError, match=r"_proj.weight is quantised \(.*\): .*`peftlab merge ADAPTER"):
            peftlab.merge(model, keep=keep)
    assert is_injected(model) and all(is_quantised(linear) for _, linear in quantised_linears(model))


def test_copies_and_pickles_compute_the_same(llama: Path, tmp_path: Path) -> None:
    model = peftlab.inject(load(llama, "nf4-double"), VARIANTS["lora"]).eval()
    shake(model)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(other(IDS).logits, model(IDS).logits)


def test_rows_of_one_batch_use_different_adapters(llama: Path) -> None:
    model = load(llama, "int8").eval()
    alone = []
    for number, name in enumerate("ab"):
        peftlab.inject(model, peftlab.LoraConfig(r=4, target_modules="all-linear"), name=name)
        with torch.no_grad():
            for parameter in peftlab.trainable_parameters(model).values():
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
            alone.append(model(IDS[number : number + 1]).logits)
    with torch.no_grad(), peftlab.adapter_names(model, ["a", "b"]):
        torch.testing.assert_close(model(IDS).logits, torch.cat(alone), atol=1e-5, rtol=1e-4)


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = _shaken(Path(folder) / "llama")
    wrapped = DistributedDataParallel(model)
    wrapped(IDS[rank : rank + 1], labels=IDS[rank : rank + 1]).loss.backward()
    torch.save({name: p.grad for name, p in peftlab.trainable_parameters(model).items()}, f"{folder}/{rank}.pt")
    del wrapped  # its reducer would otherwise free the process group, which can hang in torch
    dist.destroy_process_group()


def _shaken(place: Path) -> Any:
    torch.manual_seed(2)
    model = peftlab.inject(load(place, "nf4"), VARIANTS["lora"])
    shake(model)
    return model.train()


def test_two_processes_have_the_gradients_of_one(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "llama").symlink_to(llama)
    ended = two(__file__, tmp_path)
    assert not any(each.returncode for each in ended), "\n".join(each.stderr for each in ended)
    model = _shaken(llama)
    model(IDS, labels=IDS).loss.backward()
    for rank in range(2):
        part = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, parameter in peftlab.trainable_parameters(model).items():
            torch.testing.assert_close(part[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("how", ["nf4", "nf4-double"])
def test_a_base_that_was_used_before_the_injection_trains(how: str, tmp_path: Path) -> None:
    """On CPUs with bf16 products that forward pass packs the weights anew, with scales in bf16."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZE, "intermediate_size": 128})).save_pretrained(
        tmp_path
    )
    used, fresh = load(tmp_path, how).eval(), load(tmp_path, how)
    with torch.no_grad():
        used(IDS)
    for model in (used, fresh):
        torch.manual_seed(2)
        shake(peftlab.inject(model, VARIANTS["lora"]))
    theirs = dict(quantised_linears(fresh))
    for name, linear in quantised_linears(used):
        expected = dequantised(theirs[name], torch.float32)
        torch.testing.assert_close(dequantised(linear, torch.float32), expected, rtol=2**-6, atol=1e-4)
    expected_gradients = gradients(fresh)
    for name, gradient in gradients(used).items():
        assert (
            torch.nn.functional.cosine_similarity(gradient.flatten(), expected_gradients[name].flatten(), dim=0) > 0.99
        )


if __name__ == "__main__":
    _worker(int(os.environ["RANK"]), sys.argv[1])
