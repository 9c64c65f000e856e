"""Greedy output equals ``transformers.generate`` on every architecture: batches, chains, trees, past the window."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from peftlab.decoding.cache import Block
from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import acceptance_statistics
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import TokenRecycling
from peftlab.decoding.state_drafters import FeatureDrafter
from peftlab.drafting.eagle import EagleStep
from tests.eagle_models import eagle

NEW, CONTEXT, WINDOW = 20, 64, 10
# A tied head of a random model repeats the token that it reads.
SIZES = {"vocab_size": 64, "initializer_range": 0.3, "tie_word_embeddings": False}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
EIGHT = {**LLAMA, "head_dim": 8, "sliding_window": WINDOW}
NEO = {"num_layers": 3, "num_heads": 4, "window_size": WINDOW, "attention_types": [[["global", "local", "local"], 1]]}
FALCON = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "word_embed_proj_dim": 32}
SSM = {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2}
HYBRID |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "n_group": 2}
LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "topk_group": 1, "num_experts_per_tok": 2}
STEEP = {"alibi_bias_max": 2}  # slopes of 1/4 and more, so that a token in the wrong place is seen
MODELS = {
    "Llama": ("llama", LLAMA),
    "Mistral with a sliding window": ("mistral", {**LLAMA, "sliding_window": WINDOW}),
    "Qwen2": ("qwen2", LLAMA),
    "Gemma 2": ("gemma2", {**EIGHT, "query_pre_attn_scalar": 8}),
    "Gemma 3": ("gemma3_text", {**EIGHT, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2}),
    "gpt-oss": ("gpt_oss", {**EIGHT, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT-2": ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}),
    "GPT-NeoX": ("gpt_neox", {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}),
    "OPT": ("opt", {**OPT, "max_position_embeddings": CONTEXT, "init_std": 0.3}),
    "Falcon": ("falcon", FALCON),
    "MPT": ("mpt", {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": CONTEXT, "attn_config": STEEP}),
    "GPT-Neo": ("gpt_neo", {"hidden_size": 32, "max_position_embeddings": CONTEXT, **NEO}),
    "BLOOM": ("bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "Falcon with ALiBi": ("falcon", {**FALCON, "alibi": True, "multi_query": False, "bias": True}),
    "Mamba": ("mamba", SSM),
    "Mamba 2": ("mamba2", {**SSM, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16}),
    "FalconMamba": ("falcon_mamba", SSM),
    "Qwen3-Next": ("qwen3_next", {**LLAMA, **HYBRID, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "Qwen3.5": ("qwen3_5_text", {**LLAMA, **HYBRID}),
    "DeepSeek-V3": ("deepseek_v3", {**LLAMA, **LATENT, "moe_intermediate_size": 16, "first_k_dense_replace": 1}),
}


def make(name, **changes):
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    return with_biases(
        AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES, **{**settings, **changes})).eval()
    )


def with_biases(model):
    """Return a model with random biases: they start at zero, where leaving one out is not seen."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return make(name)


@pytest.fixture(scope="module")
def target(model):
    return build_engine(model)


@pytest.fixture(scope="module")
def prompts():
    """Eight prompts, some past the window, and one that ends at the context."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in (3, 25, 9, 50, 1, 14, 30, 9)]


@pytest.fixture(scope="module")
def expected(model, target, prompts, generate_greedy):
    limits = [NEW if target.limit is None else min(NEW, target.limit - len(prompt)) for prompt in prompts]
    return [generate_greedy(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]


def near_copy(model):
    """A draft that is often right, not always."""
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter) if parameter.numel() > 1 else 0
    return ModelDrafter(build_engine(draft))


DRAFTERS = {"plain": (None, 1), "chains": (near_copy, 6), "trees": (lambda _: TokenRecycling(), 12)}


def parted_at_a_tie(model, prompt, want, got):
    """Whether two outputs differ first where rounding may decide between their tokens."""
    place = next(i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b)
    logits = model(torch.tensor([[*prompt, *want[:place]]])).logits[0, -1]
    return abs(logits[want[place]] - logits[got[place]]) < 1e-4 * logits.std()


@pytest.mark.parametrize(
    ("how", "batches"),
    [
        ("plain", (1,)),
        ("chains", (8,)),
        ("trees", (3,)),
        *(pytest.param(how, (1, 3, 8), marks=pytest.mark.long) for how in DRAFTERS),
    ],
)
def test_output_is_that_of_transformers(model, target, prompts, expected, how, batches):
    build, gamma = DRAFTERS[how]
    drafter = build and build(model)
    for batch in batches:
        outputs = []
        for i in range(0, len(prompts), batch):
            outputs += decode(
                target, prompts[i : i + batch], StoppingCriteria(NEW), drafter, policy=partial(Fixed, gamma)
            )
        for prompt, want, output in zip(prompts, expected, outputs, strict=True):
            assert output.tokens == want or parted_at_a_tie(model, prompt, want, output.tokens)
        statistics = acceptance_statistics(outputs)
        if drafter is not None:
            assert 0 < statistics.accepted < statistics.drafted


@pytest.mark.parametrize(
    ("width", "gamma", "batches"),
    [
        (1, 4, (8,)),
        (4, 12, (3,)),
        *(pytest.param(*how, (1, 3, 8), marks=pytest.mark.long) for how in ((1, 4), (4, 12))),
    ],
)
def test_a_layer_on_its_states(model, prompts, expected, width, gamma, batches):
    """Chains and growing trees of an untrained EAGLE-3 layer: single rows and batches, past the window."""
    network = EagleStep(eagle(model))
    engine = build_engine(model, features=network.features)
    for batch in batches:
        for i in range(0, len(prompts), batch):
            drafter, some = FeatureDrafter(network, width), prompts[i : i + batch]
            outputs = decode(engine, some, StoppingCriteria(NEW), drafter, policy=partial(Fixed, gamma))
            for prompt, want, output in zip(some, expected[i : i + batch], outputs, strict=True):
                assert output.tokens == want or parted_at_a_tie(model, prompt, want, output.tokens)


def test_outputs_are_not_all_alike(expected):
    assert len({token for output in expected for token in output}) > 5


DOCS = Path(__file__).parents[2] / "docs" / "drafts" / "decoding.md"


def test_the_documented_table_is_what_is_built(name, target):
    line = r"^\| ([^|]+) \| (together|one length at a time) \| (one pass|path by path) \|$"
    table = {
        architecture.strip(): (batch, tree)
        for names, batch, tree in re.findall(line, DOCS.read_text(), re.M)
        for architecture in names.split(", ")
    }
    assert table.keys() == MODELS.keys()
    batch = "one length at a time" if "one length at a time" in target.kind else "together"
    assert table[name] == (batch, "path by path" if "path by path" in target.kind else "one pass")


@pytest.mark.parametrize("name", ["Llama", "Mistral with a sliding window", "Gemma 2", "GPT-2"])
def test_a_long_prompt_has_the_logits_of_transformers(name):
    """Its queries attend in parts, also those of rows of different lengths and behind a prompt that was read before."""
    model = make(name, **{"n_positions" if name == "GPT-2" else "max_position_embeddings": 512})
    engine, tokens = build_engine(model), torch.randint(3, 64, (2, 400), generator=torch.Generator().manual_seed(1))
    assert engine.kind.startswith("flat")
    with torch.inference_mode():
        own = model(tokens).logits
    cache, found = engine.new_cache(2, 400), torch.zeros_like(own)
    for row, n in ((0, 3), (1, 70)):
        found[row, :n] = engine.forward(cache, tokens[[row], :n], Block((0,), n, rows=(row,))).logits
    rest = torch.stack([tokens[0, 3:333], tokens[1, 70:400]])
    found[0, 3:333], found[1, 70:] = engine.forward(cache, rest, Block((3, 70), 330)).logits
    for row, n in ((0, 333), (1, 400)):
        torch.testing.assert_close(found[row, :n], own[row, :n], rtol=1e-3, atol=1e-3)
