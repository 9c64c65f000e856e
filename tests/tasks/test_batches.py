"""Texts as tokens, tokens as batches, and examples that share a row."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from peftlab.errors import PeftlabError
from peftlab.references import locate
from peftlab.tasks.batches import Collate, SplitRows, eval_batches, seeded_order, split_rows, tokenise
from peftlab.tasks.labelled_rows import Examples
from peftlab.tasks.language import nll, pack, packing_fault
from peftlab.tasks.language_examples import collate

LENGTHS = st.lists(st.integers(1, 60), max_size=300)
SIZES = st.integers(1, 40)


def test_the_order_is_the_same_on_every_machine():
    assert seeded_order(8, 0, 0) == [3, 2, 1, 6, 0, 7, 4, 5]


@given(LENGTHS, SIZES)
def test_evaluation_takes_the_longest_first(lengths, batch_size):
    batches = eval_batches(lengths, batch_size)
    order = list(chain(*batches))
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[i] for i in order] == sorted(lengths, reverse=True)
    assert all(len(batch) == batch_size for batch in batches[:-1])


BRIEF, LONG = "good film", "a very long and winding film about a very long and winding road"


@pytest.fixture(scope="module")
def bert(minilm):
    return AutoTokenizer.from_pretrained(locate(minilm))


@pytest.fixture()
def llama(stories):
    return AutoTokenizer.from_pretrained(stories)


def singles(label=(0, 1)):
    return Examples([BRIEF, LONG], None, label).dataset()


def pairs():
    return Examples([BRIEF, LONG], [LONG, BRIEF], [0.5, 4.0]).dataset()


def test_columns_and_values(bert):
    tokens = tokenise(singles(), bert, 128)
    assert set(tokens.column_names) == {"input_ids", "token_type_ids", "length", "whole", "label"}
    assert tokens["length"][:] == [4, 15] and tokens["label"][:] == [0, 1]
    assert bert.decode(tokens[0]["input_ids"]) == "[CLS] good film [SEP]"
    assert "label" not in tokenise(singles(None), bert, 128).column_names


def test_a_tokenizer_without_segments_makes_none(llama):
    assert set(tokenise(singles(), llama, 128).column_names) == {"input_ids", "length", "whole", "label"}


def test_pairs_lose_tokens_from_the_longer_sentence(bert):
    tokens = tokenise(pairs(), bert, 8)
    assert tokens["length"][:] == [8, 8]
    assert bert.decode(tokens[0]["input_ids"]) == "[CLS] good film [SEP] a very long [SEP]"
    assert tokens[0]["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert bert.decode(tokens[1]["input_ids"]) == "[CLS] a very long [SEP] good film [SEP]"


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("rows", [singles, pairs])
def test_what_is_cut_off_is_counted(name, rows, request):
    tokenizer, limit = request.getfixturevalue(name), 6
    whole = tokenise(rows(), tokenizer, 128)
    tokens = tokenise(rows(), tokenizer, limit)
    assert tokens["whole"][:] == whole["whole"][:] == whole["length"][:]
    assert split_rows(whole, 128) == SplitRows(2, longest=max(whole["length"]))
    cut = sum(length > limit for length in whole["length"])
    assert cut and split_rows(tokens, limit) == SplitRows(2, truncated=cut, longest=max(whole["length"]))


def test_too_little_room(bert):
    assert tokenise(pairs(), bert, 5)["length"][:] == [5, 5]
    with pytest.raises(PeftlabError, match="max_length 4 leaves no room for text; this task needs at least 5"):
        tokenise(pairs(), bert, 4)
    with pytest.raises(PeftlabError, match="at least 3"):
        tokenise(singles(), bert, 2)


def test_a_text_without_tokens_is_named(bert):
    bert_without_specials = AutoTokenizer.from_pretrained(bert.name_or_path)
    bert_without_specials.backend_tokenizer.post_processor = None
    blank = Examples([BRIEF, "\u200d"], None, [0, 1]).dataset()
    with pytest.raises(PeftlabError, match="example 1: the tokenizer makes no token"):
        tokenise(blank, bert_without_specials, 16)


def test_no_progress_bar_in_a_log(bert, capsys):
    tokenise(singles(), bert, 16)
    assert capsys.readouterr() == ("", "")


def test_padding_to_the_longest(bert):
    tokens = tokenise(singles(), bert, 128)
    batch = Collate(bert, regression=False)([tokens[0], tokens[1]])
    expected = bert([BRIEF, LONG], padding=True, return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    for name in expected:
        assert torch.equal(batch[name], expected[name]) and batch[name].dtype == torch.int64
    assert batch["labels"].dtype == torch.int64 and batch["labels"].tolist() == [0, 1]


def test_regression_labels_and_unlabelled_rows(bert):
    tokens = tokenise(pairs(), bert, 128)
    batch = Collate(bert, regression=True)(list(tokens))
    assert batch["labels"].dtype == torch.float32 and batch["labels"].tolist() == [0.5, 4.0]
    assert "labels" not in Collate(bert, regression=False)(list(tokenise(singles(None), bert, 128)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_with_a_real_token_keeps_it_attended(llama, side):
    llama.pad_token, llama.padding_side = None, side
    eos = llama.eos_token_id
    rows = [{"input_ids": [1, eos, 5, eos]}, {"input_ids": [1, eos]}]
    batch = Collate(llama, regression=False)(rows)
    padded = {"left": ([eos, eos, 1, eos], [0, 0, 1, 1]), "right": ([1, eos, eos, eos], [1, 1, 0, 0])}
    assert (batch["input_ids"][1].tolist(), batch["attention_mask"][1].tolist()) == padded[side]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 1]


def test_nothing_to_pad_with(llama):
    llama.pad_token = llama.eos_token = None
    with pytest.raises(PeftlabError, match="neither a pad token nor an end-of-sequence token"):
        Collate(llama, regression=False)


# --- Packing: which examples share a row, and that a shared row is the examples alone, in loss and gradients.


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
