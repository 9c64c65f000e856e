"""What a training step costs: exact integers by method, and what a real step keeps."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ARCHITECTURES
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, bmm_flop
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForSequenceClassification,
    DeepseekV3Config,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MixtralConfig,
    T5Config,
)

import peftlab
from peftlab import PeftlabError
from peftlab.methods.inject import inject, make_config, trainable_parameters
from peftlab.models.costs import CountFlops, Meter, count_step, kv_bytes_per_token
from peftlab.models.load import empty_model
from peftlab.training.recomputation import recompute_activations

B, L, D, F, LAYERS, HEADS = 3, 10, 32, 48, 3, 4
N = B * L
MAPS = [(D, D)] * 4 + [(D, F), (F, D)]  # query, key, value, output, and the FFN's two
METHODS = {
    "full": {},
    "lora": {"target_modules": "all-linear", "r": 2},
    "lora 1-2": {"target_modules": "all-linear", "r": 2, "first_layer": 1},
    "lora q,v": {"r": 2},
    "houlsby": {"bottleneck": 5},
    "bitfit": {},
    "head": {},
}


def bert(dropout=0.0):
    return BertConfig(
        vocab_size=97,
        hidden_size=D,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=F,
        max_position_embeddings=L,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def method_of(name):
    return make_config(name.partition(" ")[0], **METHODS[name])


def macs(n, maps):
    return sum(n * i * o for i, o in maps)


FORWARD = 2 * LAYERS * macs(N, MAPS) + LAYERS * 4 * B * L * L * D + 2 * macs(B, [(D, D), (D, 2)])
ATTENTION = 10 * B * L * L * D  # of a layer's backward: two products for each of two, and the scores again


def low_rank(n, r, maps, times):
    """2·n·r·(times·in + 2·out) over maps."""
    return sum(2 * n * r * (times * i + 2 * o) for i, o in maps)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("full", 0, 4 * LAYERS * macs(N, MAPS) + LAYERS * ATTENTION + 4 * macs(B, [(D, D), (D, 2)])),
        ("head", 0, 2 * macs(B, [(D, 2)])),
        # BitFit trains the embeddings' LayerNorm: every map passes the gradient on, none has a weight gradient.
        ("bitfit", 0, 2 * LAYERS * macs(N, MAPS) + LAYERS * ATTENTION + 2 * macs(B, [(D, D)]) + 4 * macs(B, [(D, 2)])),
        (
            "lora",
            2 * 2 * (LAYERS * sum(N * (i + o) for i, o in MAPS) + B * 2 * D),
            # layer 0's query, key and value need no gradient of their input
            2 * LAYERS * macs(N, MAPS) - 6 * N * D * D + LAYERS * ATTENTION
            + low_rank(N, 2, MAPS * LAYERS, 2) - 3 * 2 * N * 2 * D
            + 2 * macs(B, [(D, D)]) + low_rank(B, 2, [(D, D)], 2) + 4 * macs(B, [(D, 2)]),
        ),
        (
            "lora 1-2",  # the pooler is in no layer: frozen
            2 * 2 * (LAYERS - 1) * sum(N * (i + o) for i, o in MAPS),
            2 * (LAYERS - 1) * macs(N, MAPS) - 6 * N * D * D + (LAYERS - 1) * ATTENTION
            + low_rank(N, 2, MAPS * (LAYERS - 1), 2) - 3 * 2 * N * 2 * D
            + 2 * macs(B, [(D, D)]) + 4 * macs(B, [(D, 2)]),
        ),
        (
            "houlsby",
            LAYERS * 2 * 4 * N * D * 5,
            2 * LAYERS * macs(N, MAPS) + LAYERS * ATTENTION + LAYERS * 2 * 8 * N * D * 5
            + 2 * macs(B, [(D, D)]) + 4 * macs(B, [(D, 2)]),
        ),
    ],
)  # fmt: skip
def test_flops_by_formula(name, forward, backward):
    model = inject(empty_model("BertForSequenceClassification", bert()), method_of(name))
    cost = count_step(model, B, L)
    assert cost.forward_flops == FORWARD + forward
    assert cost.backward_flops == backward
    assert cost.optimizer_bytes == 12 * sum(p.numel() for p in trainable_parameters(model).values())
    assert cost.kv_bytes_per_token is None
    assert all(p.is_meta for p in model.parameters()) and not model.training  # as it was


def kept_by(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[int, Tensor]:
    apart = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(**inputs).logits
    return sum(storage.nbytes() for storage in storages.values()), logits


def mm_in_place(left_shape, *shapes, **options):
    (_, a, b) = (left_shape, *shapes)
    return 2 * a[0] * a[1] * b[1]


def attention(query, key, value, *rest, **options):
    b, h, s, d = query
    return 2 * bmm_flop((b * h, s, d), (b * h, d, key[2]))


def attention_backward(grad, query, key, value, *rest, **options):
    b, h, s, d = query
    return 5 * bmm_flop((b * h, s, d), (b * h, d, key[2]))


AS_TORCH_COUNTS = {
    torch.ops.aten.addmm_: mm_in_place,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", METHODS)
def test_a_real_step_keeps_and_computes_what_shapes_say(name, dropout):
    """Real weights and token ids, on torch's own counter and hooks; LoRA with its own dropout too."""
    config = method_of(name)
    if dropout and config.name == "lora":
        config = config.model_copy(update={"lora_dropout": 0.1})
    expected = count_step(inject(empty_model("BertForSequenceClassification", bert(dropout)), config), B, L)
    model = inject(BertForSequenceClassification(bert(dropout)), config).train()
    with FlopCounterMode(display=False, custom_mapping=AS_TORCH_COUNTS) as forward:
        kept, logits = kept_by(model, {"input_ids": torch.randint(0, 97, (B, L))})
    with FlopCounterMode(display=False, custom_mapping=AS_TORCH_COUNTS) as backward:
        logits.sum().backward()
    assert (forward.get_total_flops(), backward.get_total_flops()) == (expected.forward_flops, expected.backward_flops)
    assert kept == expected.kept_bytes


def test_gradient_checkpointing_keeps_less_and_computes_again():
    models = [inject(empty_model("BertForSequenceClassification", bert()), method_of("lora")) for _ in range(3)]
    for model, selective in zip(models[1:], (False, True), strict=True):
        recompute_activations(model, selective=selective)
    one, other, products_kept = (count_step(model, B, L) for model in models)
    assert (products_kept.forward_flops, products_kept.backward_flops) == (one.forward_flops, one.backward_flops)
    assert other.forward_flops == one.forward_flops and other.kept_bytes < one.kept_bytes / 3
    layers = one.forward_flops - 2 * macs(B, [(D, D), (D, 2)]) - 2 * 2 * B * 2 * D
    assert one.backward_flops < other.backward_flops <= one.backward_flops + layers


def test_a_decoders_cache():
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = inject(empty_model("LlamaForCausalLM", config), method_of("lora"))
    assert kv_bytes_per_token(model) == 2 * 3 * 2 * 16 * 4
    cost = count_step(model, B, L)
    assert cost.kv_bytes_per_token == 768
    real = peftlab.inject(LlamaForCausalLM(config), method_of("lora")).train()
    with CountFlops() as forward:
        kept, logits = kept_by(real, {"input_ids": torch.randint(0, 97, (B, L))})
    with CountFlops() as backward:
        logits.sum().backward()
    assert (cost.forward_flops, cost.backward_flops, cost.kept_bytes) == (forward.flops, backward.flops, kept)


def test_models_of_other_inputs_are_refused():
    config, values, name = ARCHITECTURES["vit"]
    import transformers

    model = inject(empty_model(name, getattr(transformers, config)(**values)), make_config("full"))
    with pytest.raises(PeftlabError, match="costs: ViTForImageClassification"):
        count_step(model, 2, 8)


def counted(length):
    """Return what a meter says of a training step of two rows of a small Llama with LoRA."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=D, intermediate_size=3 * D, num_hidden_layers=2, num_attention_heads=4
    )
    model = peftlab.inject_lora(LlamaForCausalLM(config), r=2)
    meter = Meter(model, {})
    ids = torch.zeros(2, length, dtype=torch.long)
    with meter.forward("a"):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with meter.backward("a"):
        loss.backward()
    return meter.known["a"]


@pytest.mark.parametrize(
    ("others", "length", "is_known"),
    [
        ((80, 96), 90, True), ((80, 97), 81, True), ((80, 97), 80, True), ((80, 98), 81, False), ((79, 96), 96, True),
        ((63, 70), 66, False), ((64, 70), 66, True), ((80,), 85, False), ((96,), 85, False), ((), 85, False),
    ],
)  # fmt: skip
def test_a_length_between_two_near_ones_costs_what_lies_between_theirs(others, length, is_known):
    """From 64 tokens on, and for the same rows and the same kind of batch."""
    known = {f"2x{n} padded": counted(n) for n in others}
    meter = Meter(nn.Linear(1, 1), known)
    assert not meter._is_known(f"2x{length}") and not meter._is_known(f"3x{length} padded")
    assert meter._is_known(f"2x{length} padded") == is_known
    if is_known:
        exact = counted(length)  # of which attention, which is not linear, is much in layers this narrow
        assert known[f"2x{length} padded"] == pytest.approx(exact, rel=5e-3)
        with meter.forward(f"2x{length} padded"), CountFlops() as outer:
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert outer.flops and meter._forward == (0, 0)


SMALL = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2}
HEADED = {**SMALL, "intermediate_size": 64, "num_attention_heads": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CACHED = {
    "falcon, one key for all heads": FalconConfig(**SMALL, num_attention_heads=8, multi_query=True, alibi=False),
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4),
    "latent": DeepseekV3Config(**{**HEADED, "num_attention_heads": 4, "num_key_value_heads": 4}, **LATENT, **EXPERTS),
    "t5, more layers in the decoder": T5Config(
        vocab_size=50, d_model=32, d_kv=16, num_heads=4, num_layers=2, num_decoder_layers=3, d_ff=32
    ),
}


@pytest.mark.parametrize("name", CACHED)
def test_a_token_costs_what_a_real_cache_grows_by(name):
    auto = AutoModelForSeq2SeqLM if name.startswith("t5") else AutoModelForCausalLM
    model = auto.from_config(CACHED[name]).eval()

    def kept(length):
        ids = torch.ones(1, length, dtype=torch.long)
        others = {"decoder_input_ids": ids, "input_ids": ids[:, :3]} if name.startswith("t5") else {"input_ids": ids}
        with torch.no_grad():
            cache = model(**others, use_cache=True).past_key_values
        layers = getattr(cache, "self_attention_cache", cache).layers
        return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))

    assert kv_bytes_per_token(model) == kept(8) - kept(7) > 0


def test_a_model_without_keys_and_values_has_no_such_cache():
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2))
    assert kv_bytes_per_token(model) is None


def test_grouped_products_of_experts_count_each_row_once():
    config = MixtralConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    ids, flops = torch.randint(0, 32, (2, 16)), {}
    for way in ("grouped_mm", "eager"):
        model = AutoModelForCausalLM.from_config(config, experts_implementation=way)
        with CountFlops() as forward:
            logits = model(input_ids=ids).logits
        with CountFlops() as backward:
            logits.sum().backward()
        flops[way] = forward.flops, backward.flops
    assert flops["grouped_mm"] == flops["eager"]
