"""A draft from the target's own layers."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    LlamaForCausalLM,
    SmolLM3Config,
)

from peftlab.drafting.heads import MedusaHeads
from peftlab.drafting.target import truncate
from peftlab.errors import PeftlabError
from peftlab.models.load import load_base


@pytest.fixture(scope="module")
def model(stories):
    return load_base(str(stories), "AutoModelForCausalLM")[0]


def by_hand(model, layers, ids):
    """The model run with only some of its layers, by making the others hand on what they get."""
    handles = [
        layer.register_forward_hook(lambda module, inputs, output: inputs[0])
        for i, layer in enumerate(model.model.layers)
        if i not in layers
    ]
    logits = model(ids).logits
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize("layers", [[0], [0, 1, 2], [0, 2, 4], [3], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("share", [False, True])
@torch.inference_mode()
def test_computes_the_layers_named(model, layers, share, tmp_path):
    ids = torch.randint(3, 512, (2, 9))  # generate would mask padding
    draft = truncate(model, layers, share=share)
    assert isinstance(draft, LlamaForCausalLM) and not draft.training
    assert draft.config.num_hidden_layers == len(layers) and model.config.num_hidden_layers == 5
    torch.testing.assert_close(draft(ids).logits, by_hand(model, layers, ids))
    # With a cache: each layer has its own place in it.
    generated = draft.generate(ids[:1], max_new_tokens=5, do_sample=False, pad_token_id=0)
    last = draft(generated[:, :-1]).logits[0, -1]
    assert last[generated[0, -1]] > last.max() - 1e-4  # of two that are nearly equal either may win
    if not share:
        draft.save_pretrained(tmp_path)
        again, fresh = load_base(str(tmp_path), "AutoModelForCausalLM")
        assert fresh == []
        ours, theirs = draft.state_dict(), again.state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        torch.testing.assert_close(again(ids).logits, draft(ids).logits)


def test_copies_or_shares(model):
    copied, shared = truncate(model, [1, 2]), truncate(model, [1, 2], share=True)
    ours = {p.data_ptr() for p in model.parameters()}
    assert not ours & {p.data_ptr() for p in copied.parameters()}
    assert {p.data_ptr() for p in shared.parameters()} <= ours
    assert copied.lm_head.weight is copied.model.embed_tokens.weight  # still tied
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    assert model.lm_head.weight.abs().sum() > 0


def test_another_architecture():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=3, n_head=2, n_positions=32)).eval()
    draft = truncate(model, [0, 2])
    assert len(draft.transformer.h) == 2
    ids = torch.randint(40, (1, 6))
    out = draft.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out[0, -1] == draft(out[:, :-1]).logits[0, -1].argmax()


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([], "layers: none named"),
        ([0, 5], "no layer 5; LlamaForCausalLM has 0 to 4"),
        ([-1], "no layer -1"),
        ([2, 1], "not a rising list"),
        ([1, 1], "not a rising list"),
    ],
)
def test_layers_that_are_not_there(model, layers, reason):
    with pytest.raises(PeftlabError, match=reason):
        truncate(model, layers)


def test_windows_go_with_their_layers():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=kinds,
    )
    draft = truncate(Qwen2ForCausalLM(config).eval(), [1, 2])
    assert draft.config.layer_types == ["sliding_attention", "full_attention"]


TINY = {"vocab_size": 40, "hidden_size": 16, "max_position_embeddings": 32, "pad_token_id": 0}


@pytest.mark.parametrize(
    "config",
    [
        SmolLM3Config(
            **TINY, intermediate_size=16, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=2, bos_token_id=1,
            eos_token_id=2, initializer_range=0.3,
        ),
        GPTNeoConfig(
            **TINY, num_layers=3, num_heads=2, window_size=3, attention_types=[[["global", "local", "local"], 1]],
            initializer_range=0.3,
        ),
    ],
    ids=["SmolLM3", "GPT-Neo"],
)  # fmt: skip
@torch.inference_mode()
def test_what_is_stored_computes_what_was_cut(config, tmp_path):
    """Layers that differ by their number stay what they were: one in four of SmolLM3's has no positions."""
    torch.manual_seed(0)
    draft = truncate(AutoModelForCausalLM.from_config(config).eval(), [0, 1, config.num_hidden_layers - 1])
    draft.save_pretrained(tmp_path)
    again, _ = load_base(str(tmp_path), "AutoModelForCausalLM")
    ids = torch.randint(3, 40, (1, 12))
    torch.testing.assert_close(again(ids).logits, draft(ids).logits)


def test_needs_one_stack_of_layers():
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    assert truncate(BertForMaskedLM(config).eval(), [1]).config.num_hidden_layers == 1
    model = BertForMaskedLM(config)
    model.second = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))
    with pytest.raises(PeftlabError, match="found 2 stacks of 2 layers"):
        truncate(model, [0])


def test_untrained_medusa_heads_repeat_the_target():
    head = torch.randn(11, 6)
    heads = MedusaHeads(head, 3, bias=True)
    hidden = torch.randn(2, 5, 6)
    torch.testing.assert_close(heads(hidden), (hidden @ head.T).expand(3, -1, -1, -1))


def test_medusa_heads_compute_their_formula():
    heads = MedusaHeads(torch.randn(11, 6), 2, bias=True)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    state = heads.state_dict()
    assert set(state) == {
        f"{name}" for i in range(2) for name in
        (f"blocks.{i}.layers.0.weight", f"blocks.{i}.layers.0.bias", f"lm_heads.{i}.weight")
    }  # fmt: skip
    hidden = torch.randn(4, 6)
    for i in range(2):
        w1, b1 = state[f"blocks.{i}.layers.0.weight"], state[f"blocks.{i}.layers.0.bias"]
        inner = torch.nn.functional.silu(hidden @ w1.T + b1) + hidden
        torch.testing.assert_close(heads(hidden)[i], inner @ state[f"lm_heads.{i}.weight"].T)
