from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from peftlab.errors import PeftlabError
from peftlab.references import locate
from peftlab.tasks.labelled_rows import Examples
from peftlab.tasks.tokens import Collate, tokenise

SHORT, LONG = "good film", "a very long and winding film about a very long and winding road"


@pytest.fixture(scope="module")
def bert(minilm):
    return AutoTokenizer.from_pretrained(locate(minilm))


@pytest.fixture()
def llama(stories):
    return AutoTokenizer.from_pretrained(stories)


def singles(label=(0, 1)):
    return Examples([SHORT, LONG], None, label).dataset()


def pairs():
    return Examples([SHORT, LONG], [LONG, SHORT], [0.5, 4.0]).dataset()


def test_columns_and_values(bert):
    tokens = tokenise(singles(), bert, 128)
    assert set(tokens.column_names) == {"input_ids", "token_type_ids", "length", "label"}
    assert tokens["length"][:] == [4, 15] and tokens["label"][:] == [0, 1]
    assert bert.decode(tokens[0]["input_ids"]) == "[CLS] good film [SEP]"
    assert "label" not in tokenise(singles(None), bert, 128).column_names


def test_a_tokenizer_without_segments_makes_none(llama):
    assert set(tokenise(singles(), llama, 128).column_names) == {"input_ids", "length", "label"}


def test_pairs_lose_tokens_from_the_longer_sentence(bert):
    tokens = tokenise(pairs(), bert, 8)
    assert tokens["length"][:] == [8, 8]
    assert bert.decode(tokens[0]["input_ids"]) == "[CLS] good film [SEP] a very long [SEP]"
    assert tokens[0]["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert bert.decode(tokens[1]["input_ids"]) == "[CLS] a very long [SEP] good film [SEP]"


def test_too_little_room(bert):
    assert tokenise(pairs(), bert, 5)["length"][:] == [5, 5]
    with pytest.raises(PeftlabError, match="max_length 4 leaves no room for text; this task needs at least 5"):
        tokenise(pairs(), bert, 4)
    with pytest.raises(PeftlabError, match="at least 3"):
        tokenise(singles(), bert, 2)


def test_a_text_without_tokens_is_named(bert):
    bert_without_specials = AutoTokenizer.from_pretrained(bert.name_or_path)
    bert_without_specials.backend_tokenizer.post_processor = None
    blank = Examples([SHORT, "\u200d"], None, [0, 1]).dataset()
    with pytest.raises(PeftlabError, match="example 1: the tokenizer makes no token"):
        tokenise(blank, bert_without_specials, 16)


def test_no_progress_bar_in_a_log(bert, capsys):
    tokenise(singles(), bert, 16)
    assert capsys.readouterr() == ("", "")


def test_padding_to_the_longest(bert):
    tokens = tokenise(singles(), bert, 128)
    batch = Collate(bert, regression=False)([tokens[0], tokens[1]])
    expected = bert([SHORT, LONG], padding=True, return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    for name in expected:
        assert torch.equal(batch[name], expected[name]) and batch[name].dtype == torch.int64
    assert batch["labels"].dtype == torch.int64 and batch["labels"].tolist() == [0, 1]
    wide = Collate(bert, regression=False, pad_to_multiple_of=8)([tokens[0], tokens[1]])
    assert wide["input_ids"].shape == wide["attention_mask"].shape == (2, 16)
    assert wide["attention_mask"].sum(1).tolist() == [4, 15]


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
