"""The forward pass: every engine computes the model's own logits, at every slot, ragged, in trees, in windows."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXJapaneseConfig,
    GPTNeoXJapaneseForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from peftlab.decoding.cache import Block, KVCache, shape_of
from peftlab.decoding.engines import EqualLengths, PathByPath, TransformersEngine, Trial, build_engine, difference
from peftlab.decoding.flat import FlatEngine, structure_of
from peftlab.decoding.model_drafter import ReducedVocabulary, read_draft_tokens, write_draft_tokens
from peftlab.decoding.packed import float16_scale
from peftlab.decoding.theory import best_tree, parents_of
from peftlab.errors import PeftlabError

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
NEOX = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama, biases, scaled rope": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3)
    ),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=6)),
    "qwen2, some windows": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "gemma2, windows and caps": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SMALL, head_dim=8, sliding_window=6, query_pre_attn_scalar=8)
    ),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SMALL, head_dim=8)),
    "gemma3, windows and two kinds of angles": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=6, query_pre_attn_scalar=8, sliding_window_pattern=2)
    ),
    "qwen3, norms of heads": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
    "olmo2, norms after": lambda: Olmo2ForCausalLM(Olmo2Config(**SMALL)),
    "phi3, some numbers rotated": lambda: Phi3ForCausalLM(
        Phi3Config(**SMALL, pad_token_id=0, rope_parameters={**DEFAULT, "partial_rotary_factor": 0.5})
    ),
    "smollm3, some layers rotated": lambda: SmolLM3ForCausalLM(
        SmolLM3Config(**SMALL, pad_token_id=0, no_rope_layers=[1, 0, 1])
    ),
    "gpt_neox, parallel": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**NEOX, rope_parameters={**DEFAULT, "partial_rotary_factor": 0.5})
    ),
    "gpt_neox, in turn": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX, use_parallel_residual=False)),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            vocab_size=96,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            max_position_embeddings=128,
            init_std=0.3,
        )
    ),
    "gpt2, learned positions": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3)
    ),
}
SIXTEEN = ("llama, biases, scaled rope", "qwen2, some windows", "gemma2, windows and caps", "olmo2, norms after")
for known in (*SIXTEEN, "gpt2, learned positions", "gpt_neox, parallel"):
    MODELS[f"{known}, 16 bits"] = MODELS[known]
WAYS = {"packed": {}, "flat": {"pack": False}, "transformers": {"flat": False}}
CASES = [(m, w) for m in MODELS for w in WAYS if w == "transformers" or m != "opt"]
CASES += [("llama", "split"), ("gemma2, windows and caps", "split")]


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):  # biases start at zero, where leaving one out is not seen
            torch.nn.init.normal_(parameter)
        elif "norm" in parameter_name or "ln_" in parameter_name:  # and these at one
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith("16 bits"):
            parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.fixture(scope="module", params=CASES, ids=lambda p: f"{p[0]}-{p[1]}")
def built(request):
    name, way = request.param
    model = build(name)
    engine = build_engine(model, **WAYS.get(way, {"flat": False}))
    if way == "split":
        engine = PathByPath(EqualLengths(engine))
    assert engine.kind.startswith("transformers" if way in ("transformers", "split") else "flat")
    assert ("16 bits" in engine.kind) == ("16 bits" in name and way == "packed")
    return model, engine


def close(a, b):
    torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def test_ragged_blocks_and_overwritten_slots(built):
    model, engine = built
    ids = torch.randint(96, (3, 30))
    want = model(ids).logits
    cache = KVCache(engine.layers, 3, 40)
    # All rows read 12 tokens, of which row 0 is to forget 7 and row 2 forgets 3.
    first = engine.forward(cache, ids[:, :12], Block((0, 0, 0), 12), keep=[4, 11])
    close(first.logits, want[:, [4, 11]])
    starts = (5, 12, 9)
    more = torch.stack([ids[i, s : s + 6] for i, s in enumerate(starts)])
    second = engine.forward(cache, more, Block(starts, 6))
    for i, s in enumerate(starts):
        close(second.logits[i], want[i, s : s + 6])
    # A step of some rows only, then of all, one token each.
    third = engine.forward(cache, ids[[2, 0]][:, [15, 11]].diagonal()[:, None], Block((15, 11), 1, rows=(2, 0)))
    close(third.logits[:, 0], torch.stack([want[2, 15], want[0, 11]]))
    cache.select([2, 0])
    last = engine.forward(cache, torch.stack([ids[2, 16:18], ids[0, 12:14]]), Block((16, 12), 2))
    close(last.logits, torch.stack([want[2, 16:18], want[0, 12:14]]))


def line_of(parents, node):
    """A node of a tree and those above it, from the root's child down."""
    return [] if node < 0 else [*line_of(parents, parents[node]), node]


@torch.inference_mode()
def test_each_rows_tree_sees_its_ancestors_only(built):
    model, engine = built
    trees = [parents_of(best_tree(9, 4, 3)), (-1, -1, 0, 2, 3, 4, 1, -1, -1)]
    ids = torch.randint(96, (2, 20))
    drafted = torch.randint(96, (2, 9))
    starts = (19, 11)  # past the window, with 20 and 12 tokens known
    cache = KVCache(engine.layers, 2, 40)
    engine.forward(cache, ids, Block((0, 0), 20))
    inputs = torch.cat((torch.stack([ids[0, 19:20], ids[1, 11:12]]), drafted), 1)
    out = engine.forward(cache, inputs, Block(starts, 10, tree=shape_of(trees)))
    for row, (start, parents) in enumerate(zip(starts, trees, strict=True)):
        for node in range(9):
            line = torch.cat((ids[row, : start + 1], drafted[row, line_of(parents, node)]))
            close(out.logits[row, node + 1], model(line[None]).logits[0, -1])
    # Node by node the accepted path moves up, and decoding continues after it.
    path = line_of(trees[1], 5)
    cache.commit(1, starts[1] + 1, path)
    line = torch.cat((ids[1, : starts[1] + 1], drafted[1, path], ids[1, :1]))
    after = engine.forward(cache, ids[1:, :1], Block((len(line) - 1,), 1, rows=(1,)))
    close(after.logits[0, 0], model(line[None]).logits[0, -1])
    # Rows of equal length, one of them with a tree of its own again.
    even = engine.forward(cache, inputs, Block((11, 11), 10, tree=shape_of(trees)))
    for row, parents in enumerate(trees):
        line = torch.cat((ids[row, :11], inputs[row, :1], drafted[row, line_of(parents, 8)]))
        close(even.logits[row, 9], model(line[None]).logits[0, -1])


@torch.inference_mode()
def test_hidden_is_what_the_head_reads(built):
    model, engine = built
    ids = torch.randint(96, (1, 7))
    out = engine.forward(KVCache(engine.layers, 1, 8), ids, Block((0,), 7), keep=[2, 6])
    close(out.hidden, model.base_model(ids).last_hidden_state[:, [2, 6]])


@torch.inference_mode()
def test_tokens_that_are_only_read(built):
    """Without any output, as prompts are read: what follows is what it would have been."""
    model, engine = built
    ids = torch.randint(96, (2, 9))
    cache = KVCache(engine.layers, 2, 10)
    out = engine.forward(cache, ids[:, :8], Block((0, 0), 8), keep=[])
    assert out.logits.shape[:2] == out.hidden.shape[:2] == (2, 0)
    close(engine.forward(cache, ids[:, 8:], Block((8, 8), 1)).logits[:, 0], model(ids).logits[:, -1])


def test_vocabulary_cuts_the_padding():
    model = build("llama")
    ids = torch.randint(90, (1, 5))
    want = model(ids).logits[..., :90]
    for way in WAYS.values():
        engine = build_engine(model, vocabulary=90, **way)
        assert engine.vocab_size == 90
        close(engine.forward(KVCache(engine.layers, 1, 5), ids, Block((0,), 5)).logits, want.detach())


@pytest.mark.parametrize("largest", [3e-30, 0.37, 65504.0, 3e30])
def test_weights_are_halved_only_where_none_is_rounded(largest):
    weight = torch.randn(24, 16).clamp(-1, 1).bfloat16().float() * 2.0 ** round(math.log2(largest))
    grow = float16_scale(weight)
    assert grow is not None and torch.equal((weight * grow).half().float() / grow, weight)
    weight[3, 5] *= 1 + 2**-12  # a number that float16 has no room for
    assert float16_scale(weight) is None
    weight[3, 5] = weight.abs().max() * 2**-40
    assert float16_scale(weight) is None


def wrap(model):
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj, torch.nn.Tanh())


def hook(model):
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


@pytest.mark.parametrize("change", [wrap, hook])
def test_a_changed_model_is_not_flattened(change):
    model = build("llama")
    change(model)
    engine = build_engine(model)
    assert engine.kind == "transformers"
    ids = torch.randint(90, (1, 5))
    out = engine.forward(KVCache(engine.layers, 1, 5), ids, Block((0,), 5))
    close(out.logits, model(ids).logits.detach())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            lambda: Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv", "conv", "full_attention"])),
            "cannot be cropped",
        ),
        (
            lambda: BertModel(BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=1)),
            "not a language model",
        ),
    ],
    ids=["hybrid", "bert"],
)
def test_models_that_cannot_be_decoded_here(model, reason):
    with pytest.raises(PeftlabError, match=reason):
        build_engine(model().eval())


def test_a_model_that_gave_hidden_states_is_still_flattened():
    model = MODELS["llama"]().eval()
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert build_engine(model).kind.startswith("flat")


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def mistral(window=20, **settings):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        sliding_window=window,
        **settings,
    )
    return MistralForCausalLM(config).eval()


class Wider(TransformersEngine):
    """Sees one token too many past the window."""

    def __init__(self, model):
        super().__init__(model)
        self._window += 1


class Longest(TransformersEngine):
    """Gives all rows the positions of the longest, as padding on the left without positions would."""

    def forward(self, cache, tokens, block, keep=None):
        self._longest = replace(block, starts=(max(block.starts),) * len(block.starts))
        return super().forward(cache, tokens, block, keep)

    def _logits(self, cache, tokens, positions, block, keep):
        positions = self._longest.positions(self.device).expand(len(tokens), -1)
        return super()._logits(cache, tokens, positions, block, keep)


class Chained(TransformersEngine):
    """Takes a tree for a chain."""

    def forward(self, cache, tokens, block, keep=None):
        return super().forward(cache, tokens, replace(block, tree=None), keep)


class BySlot(TransformersEngine):
    """Masks a tree, but gives its tokens the positions of their slots."""

    def _logits(self, cache, tokens, positions, block, keep):
        return super()._logits(cache, tokens, block.slots(self.device), block, keep)


def flat(model):
    return FlatEngine(structure_of(model))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("engine", "right"),
    [
        (TransformersEngine, (True, True, True)),
        (flat, (True, True, True)),
        (Wider, (False, False, False)),
        (Longest, (True, False, False)),
        (Chained, (True, True, False)),
        (BySlot, (True, True, False)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong_is_found(engine, right, dtype):
    model = mistral().to(dtype)
    trial, made = Trial(model), engine(model)
    assert (trial.chains(made), trial.batches(made), trial.trees(made)) == right


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions_by_slot_are_found_in_a_model_near_its_initialisation(dtype):
    """GPT-Neo's window and MPT's biases change the logits of a model with small weights by little."""
    torch.manual_seed(0)
    neo = GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=96,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=256,
            max_position_embeddings=512,
        )
    )
    engine, trial = TransformersEngine(neo.eval().to(dtype)), Trial(neo)
    assert (trial.chains(engine), trial.batches(engine), trial.trees(engine)) == (True, False, False)
    mpt = MptForCausalLM(MptConfig(vocab_size=96, d_model=32, n_layers=2, n_heads=4, max_seq_len=512))
    engine, trial = TransformersEngine(mpt.eval().to(dtype)), Trial(mpt)
    assert (trial.chains(engine), trial.batches(engine), trial.trees(engine)) == (True, True, False)


def test_a_window_is_passed_without_reading_it():
    model = mistral(window=900)
    read = []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, output: read.append(inputs[0].numel()))
    trial = Trial(model)
    assert not trial.chains(Wider(model))
    assert trial.chains(TransformersEngine(model))
    assert sum(read) < 100


def test_a_model_in_training_is_tried_without_dropout_and_stays_in_training():
    model = mistral(attention_dropout=0.5).train()
    model.model.norm.eval()
    training = [module.training for module in model.modules()]
    trial = Trial(model)
    assert trial.causal and trial.chains(TransformersEngine(model))
    assert [module.training for module in model.modules()] == training


@pytest.mark.parametrize("limit", [7, 12, 24])
def test_a_short_context(limit):
    model = mistral()
    model.config.max_position_embeddings = limit
    assert build_engine(model, flat=False).kind == "transformers"


def test_difference_leaves_out_logits_that_are_ruled_out():
    a = torch.randn(3, 8)
    b = torch.cat((a * 1.01, torch.full((3, 1), -torch.inf)), 1)
    assert 0.005 < difference(torch.cat((a, torch.full((3, 1), -1e30)), 1), b) < 0.02
    assert difference(torch.full_like(a, torch.nan), a) == float("inf")


def test_a_model_that_views_its_keys_in_one_piece():
    torch.manual_seed(0)
    config = GPTNeoXJapaneseConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3
    )
    engine = build_engine(GPTNeoXJapaneseForCausalLM(config).eval())
    assert engine.kind == "transformers, its own mask, rows of one length at a time, trees path by path"


class Peeking(MistralForCausalLM):
    """Reads the keys in the library's cache without asking for them."""

    def forward(self, past_key_values=None, **inputs):
        if past_key_values.get_seq_length():
            assert past_key_values.layers[0].keys.shape[0] == 1
        return super().forward(past_key_values=past_key_values, **inputs)


def test_a_model_that_reads_the_cache_itself_is_refused_by_name():
    model = Peeking(mistral().config).eval()
    reason = r"Peeking cannot be decoded losslessly here \(its forward fails on chains: .*\): .* generate"
    with pytest.raises(PeftlabError, match=reason):
        build_engine(model)


def test_a_model_that_is_not_causal_is_refused_by_name():
    config = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(PeftlabError, match="BertLMHeadModel is not causal"):
        build_engine(BertLMHeadModel(config).eval())


def logits(engine, ids):
    return engine.forward(KVCache(engine.layers, 1, 8), ids, Block((0,), ids.shape[1])).logits


@pytest.mark.parametrize("flat", [True, False])
def test_logits(stories_model, flat, monkeypatch):
    tokens = torch.tensor([1, 2, 5, 100, 511])
    model = copy.deepcopy(stories_model)
    if not flat:
        model.model.norm.register_forward_hook(lambda *_: None)
    whole = logits(build_engine(model), torch.tensor([[1, 403, 407]]))
    reduced = ReducedVocabulary(model, tokens, 512)
    assert reduced.kind.startswith("flat") == flat and reduced.kind.endswith("5 of 512 tokens")
    some = logits(reduced, torch.tensor([[1, 403, 407]]))
    torch.testing.assert_close(some[..., tokens], whole[..., tokens], rtol=1e-5, atol=1e-5)
    assert torch.isneginf(some).sum() == 3 * (512 - 5)


def test_directory(stories_model, tmp_path):
    assert read_draft_tokens(tmp_path) is None
    write_draft_tokens(tmp_path, torch.tensor([3, 600]))
    with pytest.raises(PeftlabError, match=r"token ids outside 0\.\.511"):
        ReducedVocabulary(copy.deepcopy(stories_model), read_draft_tokens(tmp_path), 512)
