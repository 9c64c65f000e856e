"""Heads over part of the vocabulary: which tokens, what it costs, and the round trip."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from draft_models import medusa, requests, tiny
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from peftlab.drafting.acceptance import ceiling, frequent_tokens
from peftlab.drafting.heads import read_medusa, write_medusa
from peftlab.drafting.text import make_dataset
from peftlab.errors import PeftlabError


@given(st.lists(st.lists(st.integers(0, 9)), max_size=4), st.integers(1, 10))
def test_no_token_left_out_is_more_frequent(texts: list[list[int]], size: int) -> None:
    tokens = frequent_tokens(texts, size, 10).tolist()
    counts = Counter(token for text in texts for token in text)
    assert len(tokens) == size and tokens == sorted(set(tokens))
    least = min(counts[token] for token in tokens)
    assert all(counts[token] <= least for token in range(10) if token not in tokens)


def test_size_out_of_range() -> None:
    with pytest.raises(PeftlabError, match=r"11 is outside 1\.\.10"):
        frequent_tokens([[1]], 11, 10)


def test_ceiling_is_the_mean_mass_and_bounds_any_reduced_draft() -> None:
    target, rows = tiny(0), make_dataset(requests())
    tokens = torch.tensor([2, 3, 5, 8, 13, 21])
    found = ceiling(target, rows, tokens)
    masses, best = [], []
    for row in rows:
        with torch.no_grad():
            p = target(input_ids=torch.tensor([row["input_ids"]])).logits[0, row["prompt"] - 1 : -1].softmax(-1)
        masses += p[:, tokens].sum(-1).tolist()
        reduced = torch.zeros_like(p)
        reduced[:, tokens] = p[:, tokens] / p[:, tokens].sum(-1, keepdim=True)
        best += torch.minimum(p, reduced).sum(-1).tolist()
    assert found == pytest.approx(sum(masses) / len(masses), abs=1e-6)
    assert sum(best) / len(best) == pytest.approx(found, abs=1e-5), "the best reduced draft reaches it"
    assert ceiling(target, rows, torch.arange(40)) == pytest.approx(1.0)


def test_round_trip_with_the_map(tmp_path: Path) -> None:
    model = medusa(tiny(0), heads=2)
    tokens = torch.tensor([1, 4, 7, 30])
    heads = read_medusa(write_medusa(model.heads, tmp_path / "m", tokens=tokens))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (40, 4)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert torch.equal(stored["token_map"], tokens) and stored["lm_heads.0.weight"].shape == (4, 16)
    hidden = torch.randn(3, 16)
    with torch.no_grad():
        logits, whole = heads.heads(hidden), model.heads(hidden)
    torch.testing.assert_close(logits, whole[..., tokens])
    drafted = heads.tokens(hidden, torch.tensor([5, 6, 7]), [(0,), (1,), (0, 0)])
    assert set(drafted.flatten().tolist()) <= set(tokens.tolist())
