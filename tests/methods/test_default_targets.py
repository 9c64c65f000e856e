"""Default targets and all-linear take linear maps alone, and quantised ones are refused by name."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

import peftlab
from peftlab import PeftlabError
from peftlab.methods.inject import injection_of, is_injected

LLAMA: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 50,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
# Architectures without a row in the table of targets, with embeddings, convolutions or an output layer beside.
FALLBACKS = {
    "FNetForMaskedLM": transformers.FNetConfig(
        hidden_size=16, num_hidden_layers=2, intermediate_size=24, vocab_size=40
    ),
    "FNetForSequenceClassification": transformers.FNetConfig(
        hidden_size=16, num_hidden_layers=2, intermediate_size=24, vocab_size=40
    ),
    "JetMoeForCausalLM": transformers.JetMoeConfig(
        hidden_size=16, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8, intermediate_size=24,
        vocab_size=40, num_local_experts=2, num_experts_per_tok=1,
    ),
    "CTRLLMHeadModel": transformers.CTRLConfig(n_embd=16, n_layer=2, n_head=2, dff=24, vocab_size=40, n_positions=20),
    "SqueezeBertModel": transformers.SqueezeBertConfig(
        hidden_size=16, embedding_size=16, num_hidden_layers=1, intermediate_size=16, num_attention_heads=4,
        vocab_size=40, q_groups=1, k_groups=1, v_groups=1, post_attention_groups=1, intermediate_groups=1,
        output_groups=1,
    ),
    "Wav2Vec2Model": transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, intermediate_size=16, num_attention_heads=2, conv_dim=(8, 8),
        conv_stride=(2, 2), conv_kernel=(3, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("targets", [None, "all-linear"])
@pytest.mark.parametrize("name", FALLBACKS)
def test_only_linear_maps_but_the_output_layer(name: str, targets: str | None) -> None:
    model = getattr(transformers, name)(FALLBACKS[name])
    linear = {n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    outputs = {n for n, m in model.named_modules() if m is model.get_output_embeddings()}
    peftlab.inject_lora(model, r=2, target_modules=targets)
    chosen = set(injection_of(model).replaced)
    assert chosen and chosen <= linear - outputs
    if targets or name.startswith(("FNet", "CTRL")):  # which have no projection that is called as the table's are
        head = {"classifier"} & linear
        assert chosen == linear - outputs - head


CLASSIFIER = transformers.LlamaConfig(**LLAMA, num_labels=2)
T5 = transformers.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=40)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (transformers.LlamaForCausalLM(CLASSIFIER), "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        (transformers.LlamaForSequenceClassification(CLASSIFIER), "q_proj, v_proj"),
        (transformers.T5ForConditionalGeneration(T5), "q, v"),
    ],
)
def test_language_models_get_all_linear_maps(
    model: transformers.PreTrainedModel, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    peftlab.print_trainable_parameters(peftlab.inject_lora(model, r=2))
    count = len(injection_of(model).replaced)
    assert capsys.readouterr().out.splitlines()[1:] == [f"lora in {count} modules: {names}"]
    chosen = set(injection_of(model).replaced)
    peftlab.remove(model)
    peftlab.inject_lora(model, r=2, target_modules="query-value")
    assert {name.rpartition(".")[2] for name in injection_of(model).replaced} == {*names.split(", ")} & {
        "q_proj",
        "v_proj",
        "q",
        "v",
    }
    assert chosen >= set(injection_of(model).replaced)


def test_a_configuration_of_peft_without_targets_means_what_it_means_there() -> None:
    ours, theirs = (transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)) for _ in range(2))
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM")
    peftlab.inject(ours, config)
    adapted = {
        name
        for name, module in peft.get_peft_model(theirs, config).base_model.model.named_modules()
        if hasattr(module, "lora_A")
    }
    assert set(injection_of(ours).replaced) == adapted


def test_a_table_row_of_other_leaves_is_named() -> None:
    class Other(nn.Identity):
        pass

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    for layer in model.model.layers:
        layer.self_attn.q_proj = Other()
    with pytest.raises(PeftlabError, match=r"model.layers.0.self_attn.q_proj, .* is a Other of .*name other modules"):
        peftlab.inject_lora(model, target_modules="query-value")
    assert not is_injected(model)


def test_no_linear_map_at_all() -> None:
    with pytest.raises(PeftlabError, match=r"has no nn\.Linear or Conv1D outside"):
        peftlab.inject_lora(nn.Sequential(nn.Conv1d(2, 2, 1)), r=1)


def test_maps_that_are_never_called_are_left_out() -> None:
    """Their weights are arguments of a kernel, or of torch's attention: an addition would train nothing."""
    mamba = transformers.MambaConfig(vocab_size=50, hidden_size=32, state_size=4, num_hidden_layers=1)
    model = peftlab.inject_lora(transformers.MambaForCausalLM(mamba))
    assert {name.rpartition(".")[2] for name in injection_of(model).replaced} == {"in_proj"}
    with pytest.raises(PeftlabError, match=r"'dt_proj' is a Linear .* the module above it uses its weights"):
        peftlab.inject_lora(transformers.MambaForCausalLM(mamba), target_modules=["dt_proj"])
    wavlm = transformers.WavLMConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(16,),
        conv_stride=(2,), conv_kernel=(3,), num_feat_extract_layers=1, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    model = peftlab.inject_lora(transformers.WavLMForSequenceClassification(wavlm))
    assert not any(name.endswith(("q_proj", "k_proj", "v_proj", "out_proj")) for name in injection_of(model).replaced)


def test_what_torchs_encoder_layer_passes_over_without_gradients() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    for name in ("linear1", "linear2", "self_attn"):
        with pytest.raises(PeftlabError, match="without gradients torch's TransformerEncoderLayer uses its weights"):
            peftlab.inject_lora(Model(), target_modules=[name])
