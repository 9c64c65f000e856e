"""Tokens are made once and kept under a name that says what they depend on."""

from __future__ import annotations

import datasets
import pytest
from transformers import AutoTokenizer, BertTokenizerFast

from peftlab.tasks.batches import tokenise
from peftlab.tasks.labelled_rows import Examples


@pytest.fixture()
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    return tmp_path / "peftlab"


@pytest.fixture()
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


def texts(*given, labels=(0, 1)):
    return Examples(list(given or ("good film", "a very dull plot")), None, labels).dataset()


def untouchable(monkeypatch):
    monkeypatch.setattr(BertTokenizerFast, "__call__", lambda *given, **options: pytest.fail("tokenised again"))


def test_a_second_run_does_not_tokenise_again(folder, tokenizer, model, monkeypatch):
    first = tokenise(texts(), tokenizer, 16)
    assert len(list(folder.glob("*.arrow"))) == 1
    again = AutoTokenizer.from_pretrained(model)
    untouchable(monkeypatch)
    second = tokenise(texts(), again, 16)
    assert second[:] == first[:] and second.features == first.features
    # What the first call left set in the tokenizer makes no other name.
    assert tokenise(texts(), tokenizer, 16)[:] == first[:]


def test_the_tokenizer_is_as_it_was(folder, tokenizer):
    """A run saves it: what the last call set would depend on whether the tokens were there already."""
    before = tokenizer.backend_tokenizer.to_str()
    for _ in range(2):
        tokenise(texts(), tokenizer, 16)
        assert tokenizer.backend_tokenizer.to_str() == before


def test_whatever_matters_makes_other_tokens(folder, tokenizer, model):
    def lengths(given, by, limit):
        return list(tokenise(given, by, limit)["length"])

    assert lengths(texts(), tokenizer, 16) == [4, 6]
    assert lengths(texts(), tokenizer, 5) == [4, 5]
    assert lengths(texts("good", "bad"), tokenizer, 16) == [3, 3]
    assert list(tokenise(texts(labels=(1, 0)), tokenizer, 16)["label"]) == [1, 0]
    other = AutoTokenizer.from_pretrained(model)
    other.add_tokens(["good film"])
    assert lengths(texts(), other, 16) == [3, 6]
    left = AutoTokenizer.from_pretrained(model, truncation_side="left")
    assert tokenise(texts(), left, 5)[1] != tokenise(texts(), tokenizer, 5)[1]
    assert len(list(folder.glob("*.arrow"))) == 6


def test_without_a_place_for_it(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file")
    assert tokenise(texts(), tokenizer, 16)["length"][:] == [4, 6]


def test_a_damaged_file_is_not_used(folder, tokenizer):
    tokenise(texts(), tokenizer, 16)
    (file,) = folder.glob("*.arrow")
    file.write_bytes(b"")
    assert tokenise(texts(), tokenizer, 16)["length"][:] == [4, 6]


def test_caching_switched_off(folder, tokenizer):
    datasets.disable_caching()
    try:
        assert tokenise(texts(), tokenizer, 16)["length"][:] == [4, 6]
    finally:
        datasets.enable_caching()
    assert not folder.exists()
