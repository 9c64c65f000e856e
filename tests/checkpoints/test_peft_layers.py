"""LoRA on all kinds of layers that peft adapts."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from models import LLAMA, SMALL, load
from peft_round_trip import equal, of, randomised, round_trip, saved_by_peft, trains_as_in_peft
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.errors import PeftlabError
from peftlab.methods.lora.dropout import dropout

IDS = torch.arange(3, 33).view(2, 15)
TEXT = {"input_ids": IDS}


def gemma3() -> Any:
    config = transformers.Gemma3TextConfig(**LLAMA | {"head_dim": 8, "pad_token_id": 0})
    return randomised(transformers.Gemma3ForCausalLM(config))


def bart() -> Any:
    config = transformers.BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=96, max_position_embeddings=40, scale_embedding=True,
    )  # fmt: skip
    return randomised(transformers.BartForConditionalGeneration(config))


def falcon() -> Any:
    config = transformers.FalconConfig(**SMALL, alibi=False, bias=True, tie_word_embeddings=False)
    return randomised(transformers.FalconForCausalLM(config))


def siglip() -> Any:
    config = transformers.SiglipVisionConfig(**SMALL | {"image_size": 16, "patch_size": 8})
    return randomised(transformers.SiglipVisionModel(config))


def vit() -> Any:
    config = transformers.ViTConfig(**SMALL | {"image_size": 16, "patch_size": 8})
    return randomised(transformers.ViTModel(config))


def segformer() -> Any:
    """Return a model whose decoder has a BatchNorm."""
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3,
    )  # fmt: skip
    return randomised(transformers.SegformerForSemanticSegmentation(config))


def wav2vec2() -> Any:
    sizes = {
        "conv_dim": (8, 8),
        "conv_kernel": (4, 3),
        "conv_stride": (2, 2),
        "num_conv_pos_embedding_groups": 4,
        "conv_bias": True,
    }
    return randomised(transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**SMALL | sizes)))


def videomae() -> Any:
    sizes = {"image_size": 16, "patch_size": 8, "num_frames": 4, "tubelet_size": 2}
    return randomised(transformers.VideoMAEModel(transformers.VideoMAEConfig(**SMALL | sizes)))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 8, 3, stride=2, padding="valid", groups=2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).mean((2, 3)))


SUBCLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "scaled embedding of Gemma 3": (gemma3, {"target_modules": ["embed_tokens", "q_proj"]}),
    "scaled embedding with DoRA": (gemma3, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "FalconLinear": (falcon, {"target_modules": ["query_key_value", "dense"]}),
    "FalconLinear with DoRA": (falcon, {"target_modules": ["query_key_value"], "use_dora": True}),
    "FalconLinear, all-linear": (falcon, {"target_modules": "all-linear", "use_rslora": True}),
}


@pytest.mark.parametrize("case", SUBCLASSES)
def test_subclasses_of_linear_maps_and_embeddings(tmp_path: Path, case: str) -> None:
    make, fields = SUBCLASSES[case]
    model = round_trip(make, of(TEXT), tmp_path, task_type="CAUSAL_LM", **fields)
    trains_as_in_peft(make, TEXT | {"labels": IDS}, tmp_path / "adapter", lambda out: out.loss)
    again = pickle.loads(pickle.dumps(model))
    for other in (copy.deepcopy(model), again):
        assert torch.equal(of(TEXT)(other), of(TEXT)(model))
        assert {type(m) for m in other.modules()} == {type(m) for m in model.modules()}


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


CONVOLUTIONS: dict[str, tuple[Any, dict[str, torch.Tensor], list[str]]] = {
    "Conv1d": (wav2vec2, {"input_values": values(2, 60)}, ["conv_layers.0.conv", "conv_layers.1.conv"]),
    "Conv2d": (vit, {"pixel_values": values(2, 3, 16, 16)}, ["projection"]),
    "Conv3d": (videomae, {"pixel_values": values(2, 4, 3, 16, 16)}, ["projection"]),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"lora_alpha": 16},
    "dora": {"use_dora": True, "lora_alpha": 16},
    "lora_bias": {"lora_bias": True, "lora_alpha": 16},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions(tmp_path: Path, kind: str, variant: str) -> None:
    make, inputs, targets = CONVOLUTIONS[kind]
    round_trip(make, of(inputs), tmp_path, target_modules=targets, r=4, **VARIANTS[variant])
    trains_as_in_peft(make, inputs, tmp_path / "adapter", lambda out: out[0].logsumexp(-1).mean())


@pytest.mark.parametrize("variant", VARIANTS)
def test_grouped_convolutions(tmp_path: Path, variant: str) -> None:
    def make() -> Any:
        return randomised(Grouped())

    inputs = {"x": values(2, 6, 9, 9)}
    model = round_trip(make, of(inputs), tmp_path, folds=False, target_modules=["conv"], r=4, **VARIANTS[variant])
    trains_as_in_peft(make, inputs, tmp_path / "adapter", lambda out: out.logsumexp(-1).mean())
    expected = of(inputs)(model)
    with pytest.raises(PeftlabError, match="conv cannot be merged: its update connects all channels"):
        peftlab.merge(model)
    assert torch.equal(of(inputs)(model), expected)


def test_dropout_in_a_convolution_with_dora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside peft's, with the same masks."""
    monkeypatch.setattr(nn.Dropout, "forward", lambda module, x: dropout(x, module.p if module.training else 0.0))
    inputs, fields = {"pixel_values": values(2, 3, 16, 16)}, {"use_dora": True, "lora_dropout": 0.5, "r": 4}
    plain = saved_by_peft(vit(), tmp_path, of(inputs), target_modules=["projection"], **fields)
    outputs = []
    for model in (
        peft.PeftModel.from_pretrained(vit(), str(tmp_path), is_trainable=True),
        peftlab.load_adapter(vit(), tmp_path),
    ):
        torch.manual_seed(4)
        outputs.append(model.train()(**inputs)[0].detach())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    assert (outputs[1] - plain).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("leaf", "fields", "message"),
    [
        (nn.Conv1d(4, 4, 3, groups=4), {"r": 2}, "4 groups, which must divide r"),
        (nn.Conv1d(4, 4, 3, dilation=2, padding="same"), {"r": 2}, "by 'same' and dilation"),
        (nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), {"r": 2}, "other values than zeros"),
        (nn.Embedding(8, 4), {"lora_bias": True, "r": 2}, "lora_bias: at 0"),
        (nn.Linear(4, 4), {"lora_bias": True, "use_dora": True, "r": 2}, "lora_bias: at 0"),
    ],
)
def test_layers_that_no_adapter_fits(leaf: nn.Module, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PeftlabError, match=message):
        peftlab.inject_lora(nn.Sequential(leaf), target_modules=["0"], **fields)


def test_a_bias_of_the_update(tmp_path: Path) -> None:
    fields = {"target_modules": "all-linear", "lora_bias": True, "lora_alpha": 32}
    round_trip(falcon, of(TEXT), tmp_path / "falcon", task_type="CAUSAL_LM", **fields)
    round_trip(vit, of({"pixel_values": values(2, 3, 16, 16)}), tmp_path / "vit", **fields, bias="lora_only")


def test_a_bias_that_no_base_has(tmp_path: Path) -> None:
    fields = {"target_modules": ["q_proj", "v_proj"], "lora_bias": True, "task_type": "CAUSAL_LM"}
    model = round_trip(gemma3, of(TEXT), tmp_path, folds=False, **fields)
    trains_as_in_peft(gemma3, TEXT | {"labels": IDS}, tmp_path / "adapter", lambda out: out.loss)
    with pytest.raises(PeftlabError, match="q_proj cannot be merged: its base has no bias"):
        peftlab.merge(model)
    gemma3().save_pretrained(tmp_path / "base")
    with pytest.raises(PeftlabError, match="q_proj cannot be merged: its base has no bias"):
        merge_checkpoint(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


PIXELS = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}


def test_running_statistics_of_a_module_to_save(tmp_path: Path) -> None:
    fields = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["decode_head"]}
    model = round_trip(segformer, of(PIXELS), tmp_path, **fields)
    norm = "decode_head.batch_norm"
    assert load_file(tmp_path / "ours" / "adapter_model.safetensors").keys() >= {
        f"base_model.model.{norm}.{name}" for name in ("weight", "running_mean", "running_var", "num_batches_tracked")
    }
    model.train()(**PIXELS)
    peftlab.save_adapter(model, tmp_path / "again", state_dict=model.state_dict())
    assert torch.equal(of(PIXELS)(peftlab.load_adapter(segformer(), tmp_path / "again")), of(PIXELS)(model))
    assert model.get_buffer(f"{norm}.num_batches_tracked") == 3
    peftlab.inject(model, peftlab.LoraConfig(target_modules=["q_proj"], train_head=False), name="another")
    assert model.get_buffer(f"{norm}.num_batches_tracked") == 0
    peftlab.set_adapter(model, "default")
    assert model.get_buffer(f"{norm}.num_batches_tracked") == 3


def test_running_statistics_of_a_head_that_the_base_has_not(tmp_path: Path) -> None:
    segformer().segformer.save_pretrained(tmp_path / "base")
    model = peftlab.inject_lora(segformer(), target_modules=["q_proj"], modules_to_save=["decode_head"])
    model.train()(**PIXELS)
    peftlab.save_adapter(model, tmp_path / "adapter")
    merge_checkpoint(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged")
    merged = load(transformers.SegformerForSemanticSegmentation, tmp_path / "merged")
    torch.testing.assert_close(of(PIXELS)(merged), of(PIXELS)(model))


def test_a_parameter_of_integers_is_refused(tmp_path: Path) -> None:
    model = peftlab.inject_lora(segformer(), target_modules=["q_proj"], modules_to_save=["decode_head"])
    peftlab.save_adapter(model, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    with safe_open(path, "pt") as file:
        header, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for key, message in (
        ("decode_head.batch_norm.weight", "int64 values; trained weights are floating-point"),
        ("decode_head.batch_norm.running_mean", "int64 values, the model's torch.float32"),
    ):
        changed = tensors | {f"base_model.model.{key}": tensors[f"base_model.model.{key}"].long()}
        save_file(changed, path, metadata=header)
        with pytest.raises(PeftlabError, match=message):
            peftlab.load_adapter(segformer(), tmp_path)


def test_embeddings_of_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    round_trip(bart, of(TEXT), tmp_path, task_type="SEQ_2_SEQ_LM", target_modules=["embed_tokens", "fc1"])


def test_positions_are_looked_up_where_the_subclass_looks() -> None:
    """BART's embedding of positions adds 2 to each; peft looks up the tokens' numbers instead."""
    model = peftlab.inject_lora(bart(), target_modules=["embed_positions"])
    for name, parameter in model.named_parameters():
        if "lora_embedding_A" in name:
            nn.init.normal_(parameter)
    expected = of(TEXT)(model)
    assert (expected - of(TEXT)(bart())).abs().max() > 1e-3
    torch.testing.assert_close(of(TEXT)(peftlab.merge(model)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{"padding_idx": 1}, {"padding_idx": -1, "scale_grad_by_freq": True}], ids=str)
def test_gradients_of_an_embedding_s_factors(fields: dict[str, Any]) -> None:
    """As in peft and in ``nn.Embedding``, the padding's row has none."""
    options: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["0"]}
    ours = peftlab.inject_lora(nn.Sequential(randomised(nn.Embedding(6, 4, **fields))), **options)
    theirs = peft.get_peft_model(nn.Sequential(randomised(nn.Embedding(6, 4, **fields))), peft.LoraConfig(**options))
    gradients = []
    for model in (ours, theirs):
        factors = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with torch.no_grad():
            for parameter in factors:
                parameter.copy_(values(*parameter.shape))
        model(torch.tensor([[1, 2, 5, 5], [3, 1, 1, 0]])).square().sum().backward()
        gradients.append([parameter.grad for parameter in factors])
    torch.testing.assert_close(*gradients)
    columns = gradients[0][0].count_nonzero(dim=0).tolist()  # of A (r, tokens)
    assert columns == [2 * (token in (0, 1, 2, 3, 5) and token != fields["padding_idx"] % 6) for token in range(6)]


def test_a_projection_that_attention_never_calls(tmp_path: Path) -> None:
    """peft adapts the output projection of nn.MultiheadAttention, without effect; a merge must not change it."""
    inputs = {"pixel_values": values(2, 3, 16, 16)}
    with pytest.warns(UserWarning, match=r"head\.attention\.out_proj.*no effect"):
        model = round_trip(siglip, of(inputs), tmp_path, target_modules="all-linear")
    assert type(model.head.attention.out_proj) is type(siglip().head.attention.out_proj)
    with pytest.raises(PeftlabError, match=r"attention\.out_proj.*never calls it; name the Mult"):
        peftlab.inject_lora(siglip(), target_modules=["attention.out_proj"])


def mamba() -> Any:
    config = transformers.MambaConfig(vocab_size=96, hidden_size=32, state_size=4, num_hidden_layers=2)
    model = transformers.MambaForCausalLM(config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model.eval()


def test_the_maps_that_mamba_calls_and_those_that_it_does_not(tmp_path: Path) -> None:
    """Its kernels for training use the weight of ``x_proj`` alone, so that it takes LoRA by name, not by default."""
    model = round_trip(mamba, of(TEXT), tmp_path, target_modules=["in_proj", "x_proj"])
    loss = model.train()(**TEXT, labels=IDS).loss
    loss.backward()
    assert all(p.grad.abs().max() > 0 for name, p in model.named_parameters() if "x_proj.lora_" in name)
    expected = saved_by_peft(mamba(), tmp_path / "more", of(TEXT), target_modules=["x_proj", "dt_proj"])
    with pytest.warns(UserWarning, match=r"left out .*layers\.1\.mixer\.dt_proj: the module above .* never calls it"):
        model = peftlab.load_adapter(mamba(), tmp_path / "more")
    equal(of(TEXT)(model), expected)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mha(x, x, x)[0])


@pytest.mark.parametrize("fields", [{"lora_alpha": 3}, {"rank_pattern": {"mha": 2}, "use_rslora": True}], ids=str)
def test_multihead_attention(tmp_path: Path, fields: dict[str, Any]) -> None:
    def make() -> Any:
        return randomised(Attending())

    inputs = {"x": values(2, 5, 8)}
    fields = {"target_modules": ["mha", "head"], "r": 3, **fields}
    model = round_trip(make, of(inputs), tmp_path, folds=False, **fields)
    trains_as_in_peft(make, inputs, tmp_path / "adapter", lambda out: out.logsumexp(-1).mean())
    expected = of(inputs)(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(of(inputs)(other), expected)
    peftlab.merge(model, keep=True)
    torch.testing.assert_close(of(inputs)(model), expected, rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name, _ in model.named_parameters()) and type(model.mha) is nn.MultiheadAttention
    assert torch.equal(of(inputs)(peftlab.unmerge(model)), expected)
    assert torch.equal(of(inputs)(peftlab.remove(model)), of(inputs)(make())) and model.mha.dropout == 0.3


def test_multihead_attention_merges_alike_on_disk(tmp_path: Path) -> None:
    def pooled(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(pixel_values=values(2, 3, 16, 16)).pooler_output

    model = round_trip(siglip, pooled, tmp_path, target_modules=["attention", "q_proj"], lora_alpha=16)
    assert model.head.attention.out_proj.lora_B.shape == (32, 8)


def test_attention_that_is_not_called() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1)
    with pytest.raises(PeftlabError, match=r"self_attn'.*without gradients torch's TransformerEncoderLayer"):
        peftlab.inject_lora(model, target_modules=["self_attn"], r=2)


class Router(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).topk(2)


class Causal(nn.Conv1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.pad(x, (2, 0)))


class Normed(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(ids))


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (Router(4, 4), "something other than W·x"),
        (Causal(4, 4, 3), "not that of a plain convolution"),
        (Normed(), "uses other parameters too"),
        (nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3)), "computed of other parameters"),
        (nn.utils.weight_norm(nn.Linear(4, 4)), "computed of other parameters"),
    ],
)
def test_subclasses_that_compute_something_else(leaf: nn.Module, reason: str) -> None:
    with pytest.raises(PeftlabError, match=reason):
        peftlab.inject_lora(nn.Sequential(leaf), target_modules=["0"])
    model = nn.Sequential(leaf, nn.Linear(4, 4))
    peftlab.inject_lora(model, r=2, target_modules="all-linear")
    assert model[0] is leaf
