"""A draft restricted to some tokens: its logits are the model's own there, and -inf elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch

from peftlab.decoding.cache import Block, KVCache
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ReducedVocabulary, read_draft_tokens, write_draft_tokens
from peftlab.errors import PeftlabError


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
