"""The tiny model and the rows that this folder's tests train on."""

from __future__ import annotations

import pytest
import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A random BERT with dropout."""
    return tiny.save_model(tmp_path_factory.mktemp("model") / "bert")


@pytest.fixture(scope="session")
def still(tmp_path_factory):
    """The same BERT without dropout."""
    return tiny.save_model(tmp_path_factory.mktemp("still") / "bert", dropout=0.0)


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """Forty rows of two classes."""
    return tiny.save_rows(tmp_path_factory.mktemp("rows") / "rows.csv")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Keep the tokens of these tests out of the user's cache."""
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = before
