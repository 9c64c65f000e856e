"""A tiny random BERT and two GLUE tasks of a few rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

WORDS = ["good", "bad", "film", "plot", "dull", "fine", "the", "a", "was", "very", "and", "not"]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Keep the tokens of these tests out of the user's cache; the cells' processes inherit the variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A BERT of one layer with its tokenizer."""
    directory = tmp_path_factory.mktemp("model") / "bert"
    directory.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (directory / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab=str(directory / "vocab.txt")).save_pretrained(directory)
    torch.manual_seed(5)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **shape)
    BertForSequenceClassification(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def glue(tmp_path_factory) -> Path:
    """CoLA and MRPC in GLUE's TSV layout, 24 rows to learn and 12 to score."""
    root = tmp_path_factory.mktemp("glue")
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 8)))

    for task in ("CoLA", "MRPC"):
        (root / task).mkdir()
        for name, n in (("train", 24), ("dev", 12)):
            if task == "CoLA":
                lines = [f"x\t{i % 2}\t\t{text()}" for i in range(n)]
            else:
                lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
                lines += [f"{i % 2}\t1\t2\t{text()}\t{text()}" for i in range(n)]
            (root / task / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(scope="session")
def table_values(model: Path, glue: Path) -> Callable[[Path], dict]:
    """A table recipe with its directory, as the YAML has it: two tasks in two rows with one seed, two steps each."""

    def values(output: Path) -> dict:
        return {
            "kind": "table",
            "model": str(model),
            "data": {"path": str(glue)},
            "tasks": ["glue/cola", "glue/mrpc"],
            "rows": {"lora": {"method": {"name": "lora", "r": 2}}, "head": {"method": {"name": "head"}}},
            "train": {"max_steps": 2, "eval_every": 1, "batch_size": 8, "max_length": 16, "lr": 0.05},
            "output_dir": str(output),
        }

    return values


@pytest.fixture
def values(table_values: Callable[[Path], dict], tmp_path: Path) -> dict:
    """A table recipe in the test's own directory."""
    return table_values(tmp_path / "table")
