"""The order of examples, and examples that share a row."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from peftlab.tasks.batches import (
    best_fit,
    epoch_batches,
    eval_batches,
    packed_batches,
    packed_rows,
    padded_tokens,
    padding_share,
    seeded_order,
    split_batch,
    split_rows,
)
from peftlab.tasks.language import nll, pack, packing_fault
from peftlab.tasks.language_examples import collate

LENGTHS = st.lists(st.integers(1, 60), max_size=300)
SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 2**64)


@settings(deadline=None)
@given(LENGTHS, SIZES, SEEDS, st.integers(0, 50))
def test_an_epoch_holds_every_example_once(lengths, batch_size, seed, epoch):
    batches = epoch_batches(lengths, batch_size, seed=seed, epoch=epoch)
    assert sorted(chain(*batches)) == list(range(len(lengths)))
    full, rest = divmod(len(lengths), batch_size)
    assert sorted(map(len, batches)) == sorted([batch_size] * full + [rest] * (rest > 0))
    assert batches == epoch_batches(np.asarray(lengths), batch_size, seed=seed, epoch=epoch)
    assert all(type(i) is int for i in chain(*batches))
    for batch in batches:
        sizes = [lengths[i] for i in batch]
        assert sizes == sorted(sizes)


def test_epochs_and_seeds_give_different_orders():
    lengths = [5] * 500
    orders = {
        tuple(chain(*epoch_batches(lengths, 8, seed=seed, epoch=epoch))) for seed in (0, 1, 2) for epoch in (0, 1, 2)
    }
    assert len(orders) == 9


def test_the_order_is_the_same_on_every_machine():
    assert seeded_order(8, 0, 0) == [3, 2, 1, 6, 0, 7, 4, 5]
    assert epoch_batches([3, 1, 2, 3, 1], 2, seed=7, epoch=1) == [[0], [2, 3], [1, 4]]


def test_bucketing_saves_most_of_the_padding():
    lengths = np.random.default_rng(0).integers(1, 128, 5000).tolist()
    order = seeded_order(len(lengths), 1)
    shuffled = [order[i : i + 32] for i in range(0, len(order), 32)]
    bucketed = padding_share(epoch_batches(lengths, 32, seed=0, epoch=0), lengths)
    assert padding_share(shuffled, lengths) > 0.4
    assert bucketed < 0.05


def test_batches_do_not_come_in_the_order_of_their_lengths():
    lengths = list(range(1, 2049))
    means = [np.mean([lengths[i] for i in batch]) for batch in epoch_batches(lengths, 32, seed=0, epoch=0)]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.4


def test_equal_lengths_do_not_keep_their_neighbours():
    lengths = [7] * 640
    batches = epoch_batches(lengths, 10, seed=0, epoch=0)
    gaps = [abs(a - b) for batch in batches for a, b in pairwise(batch)]
    assert np.mean(gaps) == pytest.approx(640 / 3, rel=0.15)  # of independent uniform draws


@settings(deadline=None)
@given(st.lists(st.integers(), max_size=70), st.integers(1, 12))
def test_shares_of_a_batch(batch, parts):
    shares = split_batch(batch, parts)
    assert len(shares) == parts
    assert list(chain(*shares)) == batch
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@settings(deadline=None)
@given(LENGTHS, SIZES)
def test_evaluation_takes_the_longest_first(lengths, batch_size):
    batches = eval_batches(lengths, batch_size)
    order = list(chain(*batches))
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[i] for i in order] == sorted(lengths, reverse=True)
    assert all(len(batch) == batch_size for batch in batches[:-1])


def test_padding_share_by_hand():
    # Cells 2 * 4 + 1 * 3 = 11, tokens 4 + 1 + 3 = 8.
    assert padding_share([[0, 1], [2]], [4, 1, 3]) == pytest.approx(3 / 11)
    assert padding_share([[], [0]], [4]) == 0.0
    assert padding_share([], []) == 0.0


# --- Packing: which examples share a row, and that a shared row is the examples alone, in loss and gradients.
SHORT_LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=120)


@settings(deadline=None)
@given(SHORT_LENGTHS, st.integers(40, 90), st.integers(1, 9), st.none() | st.integers(40, 300), st.integers(0, 9))
def test_every_example_once_in_batches_of_whole_bins(lengths, capacity, size, budget, epoch):
    def made(values):
        return packed_batches(values, capacity, size, budget, seed=3, epoch=epoch)

    batches = made(lengths)
    assert sorted(chain(*batches)) == list(range(len(lengths))) and all(batches)
    assert batches == made(np.asarray(lengths)), "a pure function of its arguments"
    for batch in batches:
        rows = packed_rows([lengths[i] for i in batch], capacity)
        if budget:
            assert len(rows) <= max(1, budget // capacity)
    if not budget:
        for step, batch in enumerate(batches):  # on average: after each step as many as so many batches contain
            before = sum(map(len, batches[:step]))
            assert step * size <= before < (step + 1) * size
            assert len(batch) < 2 * size


@settings(deadline=None)
@given(SHORT_LENGTHS, st.integers(0, 90), st.integers(1, 6))
def test_rows_and_parts(lengths, capacity, parts):
    rows = packed_rows(lengths, capacity)
    assert list(chain(*rows)) == list(range(len(lengths)))
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        assert sum(lengths[i] for i in row) <= capacity or len(row) == 1
        assert following is None or sum(lengths[i] for i in row) + lengths[following[0]] > capacity
    batch = list(range(len(lengths)))
    split = split_rows(batch, parts, lengths, capacity)
    assert list(chain(*split)) == batch and len(split) == parts
    if len(rows) >= parts:
        assert all(split) and sum(len(packed_rows([lengths[i] for i in p], capacity)) for p in split) == len(rows)
    assert padded_tokens(lengths, 0) == len(lengths) * max(lengths)
    assert split_rows(batch, parts, lengths, 0) == split_batch(batch, parts), "a row per example"


def test_bins_are_full_and_batches_differ_by_epoch_and_seed():
    assert best_fit([0, 1, 2, 3], [5, 4, 3, 6], 9, 9) == [[3, 2], [0, 1]]
    assert best_fit([0, 1, 2], [2, 2, 2], 9, 2) == [[0, 1], [2]]
    assert best_fit([0, 1], [20, 2], 9, 2) == [[0], [1]]
    lengths = np.random.default_rng(0).lognormal(4.5, 0.6, 4000).clip(8, 512).astype(int).tolist()
    batches = packed_batches(lengths, 512, 16, None, seed=0, epoch=0)
    assert 1 - sum(lengths) / sum(padded_tokens([lengths[i] for i in batch], 512) for batch in batches) < 0.04
    assert padding_share([list(range(i, i + 16)) for i in range(0, 4000, 16)], lengths) > 0.4
    assert len(batches) == 250
    for seed, epoch in ((0, 1), (1, 0)):
        assert packed_batches(lengths, 512, 16, None, seed=seed, epoch=epoch) != batches


S = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
NEO = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4,
       "attention_types": [[["global", "local"], 1]]}  # fmt: skip
EXACT = {
    "Llama": S, "Mistral": {**S, "sliding_window": 4}, "Mixtral": {**S, "num_local_experts": 4}, "Qwen2": S,
    "Qwen3": {**S, "head_dim": 8}, "Gemma": {**S, "head_dim": 8},
    "Gemma2": {**S, "head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 2.0},
    "Gemma3Text": {**S, "head_dim": 8, "sliding_window": 4}, "Phi": S, "Phi3": S, "SmolLM3": S, "GPT2": GPT,
    "GPTNeoX": {key: value for key, value in S.items() if key != "num_key_value_heads"},
    "GPTJ": {**GPT, "rotary_dim": 4}, "GPTNeo": NEO, "Olmo2": S, "Granite": S, "StableLm": S, "Starcoder2": S,
    "Cohere": S,
}  # fmt: skip
SHORT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
MIXED = {
    "OPT": {**SHORT, "ffn_dim": 48, "num_attention_heads": 4, "word_embed_proj_dim": 32},
    "Falcon": {**SHORT, "num_attention_heads": 4}, "Bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4},
    "GptOss": {**S, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, "Mamba": {**SHORT, "state_size": 4},
    "Mamba2": {**SHORT, "state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "Lfm2": {**S, "layer_types": ["conv", "full_attention"]},
    "Qwen3_5Text": {**S, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}  # fmt: skip


def made(name: str, config: dict):
    torch.manual_seed(0)
    values = {**config, "initializer_range": 0.1}  # far from zero, as a trained model's weights are
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**values))


def rows(lengths=(9, 1, 12, 5, 17, 8)) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": i, "trained": [place % 3 > 0 for place in range(len(i))]} for i in ids]


@pytest.mark.parametrize("name", EXACT)
def test_a_shared_row_is_the_examples_alone(name):
    """In loss and gradients, in training mode, in several rows of which one is padded."""
    model = made(name, EXACT[name]).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert packing_fault(model, rows()) is None and model.training
    values, gradients = [], []
    for batches in ([pack(rows(), 24, pad=0)], [collate([row], pad=0) for row in rows()]):
        model.zero_grad()
        total = sum(nll(model, batch) for batch in batches)
        total.backward()
        values.append(total.item())
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert gradients[0].keys() == gradients[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients[1].values())
    for key, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][key], gradient, rtol=1e-3, atol=1e-5 * largest, msg=key)


@pytest.mark.parametrize("name", MIXED)
def test_a_model_that_mixes_examples_is_found(name):
    model = made(name, MIXED[name])
    fault = packing_fault(model, rows((40, 30)))
    assert fault is not None and type(model).__name__ in fault


def test_what_a_shared_row_contains():
    batch = pack(rows((2, 3, 4)), 6, pad=7)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]
    assert batch["trained"].tolist() == [[False, True, False, True, True], [False, True, True, False, False]]
    assert batch["input_ids"][1, -1] == 7 and batch.keys() == {"input_ids", "position_ids", "trained"}
    (one,) = pack([{"input_ids": [5, 6], "trained": [True, True]}], 6, pad=0)["trained"].tolist()
    assert one == [False, True], "nothing predicts an example's first token"
