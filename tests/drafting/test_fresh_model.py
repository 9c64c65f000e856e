"""A new draft: sizes that divide, the target's tokens, the same weights for the same seed."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from peftlab.drafting.config import NewModel
from peftlab.drafting.model import FAMILIES, fresh_config, fresh_model
from peftlab.errors import PeftlabError

SIZES = {
    "vocab_size": 48,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 48, "n_embd": 96, "n_layer": 4, "n_head": 6, "n_positions": 64}


def config_of(family: str) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **(GPT2 if family == "gpt2" else SIZES))


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(family)).eval()


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_every_family_makes_a_small_model(family: str) -> None:
    target = model_of(family)
    draft = fresh_model(target, NewModel(layers=2, width=32), torch.float32, 0)
    assert type(draft) is type(target) and not draft.training
    config = draft.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 32, 2)
    assert draft.get_output_embeddings().weight.shape == (48, 32)
    assert config.tie_word_embeddings == target.config.tie_word_embeddings
    tied = draft.get_output_embeddings().weight is draft.get_input_embeddings().weight
    assert tied == config.tie_word_embeddings
    ids = torch.arange(3, 12)[None]
    assert draft(input_ids=ids).logits.shape == (1, 9, 48)
    assert target.config.hidden_size == 96 and target.config.num_hidden_layers == 4, "the target's stays"
    assert draft.num_parameters() < target.num_parameters() / 4


def test_heads_divide() -> None:
    llama = config_of("llama")
    sizes = {width: fresh_config(llama, NewModel(layers=1, width=width)) for width in (48, 64, 80, 24)}
    found = {w: (c.head_dim, c.num_attention_heads, c.num_key_value_heads) for w, c in sizes.items()}
    # Three query heads share a key-value head in the target; of 4 heads 2 do, of 5 none.
    assert found == {48: (16, 3, 1), 64: (16, 4, 2), 80: (16, 5, 5), 24: (8, 3, 1)}
    assert [c.intermediate_size for c in sizes.values()] == [96, 136, 168, 48]


def test_kinds_of_layers_are_sampled_evenly() -> None:
    config = config_of("gemma2")
    config.layer_types = ["sliding_attention", "full_attention"] * 2
    kinds = {n: fresh_config(config, NewModel(layers=n, width=32)).layer_types for n in (1, 2, 8)}
    assert kinds[1] == ["full_attention"] and kinds[2] == ["full_attention"] * 2
    assert len(kinds[8]) == 8 and kinds[8][-1] == "full_attention" and len(set(kinds[8])) == 2


def test_weights_depend_on_the_seed_alone() -> None:
    target, size = model_of("llama"), NewModel(layers=1, width=32)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, other = fresh_model(target, size, torch.float32, 1), fresh_model(target, size, torch.float32, 2)
    assert torch.equal(state, torch.get_rng_state()), "what is drawn later does not depend on it"
    torch.manual_seed(6)
    again = fresh_model(target, size, torch.float32, 1)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), again.parameters(), strict=True))
    assert not torch.equal(one.model.embed_tokens.weight, other.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("family", "width", "message"),
    [
        ("llama", 36, r"draft\.new\.width: 36 is no multiple of a head's size; the nearest is 32"),
        ("llama", 3, r"the nearest is 16"),
        ("mamba", 32, r"draft\.new: the target is a mamba model; .*Write draft: \{kind: model, from: REF\}"),
    ],
)
def test_refused(family: str, width: int, message: str) -> None:
    config = config_of(family) if family != "mamba" else AutoConfig.for_model("mamba")
    with pytest.raises(PeftlabError, match=message):
        fresh_config(config, NewModel(layers=1, width=width))
