"""Texts as tokens, and tokens as batches: tokenising, seeded orders, examples that share a row, padding.

Orders are pure functions of lengths and seeds: a resumed run computes them again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from peftlab.errors import PeftlabError
from peftlab.files import typed_value

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from peftlab.untyped import Tokenised


Row: TypeAlias = Mapping[str, object]
"""One tokenised example: ``input_ids``, ``length``, and what else its data set has."""
ANSWER_KEYS = frozenset({"labels", "trained", "reference", "first", "choices"})
"""Keys of a batch that are no input of the model: labels, and where the answers are."""


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs of the model's forward: a batch without labels and places of answers."""
    return {key: value for key, value in batch.items() if key not in ANSWER_KEYS}


Batch: TypeAlias = Mapping[str, list[object]]
"""Rows by column."""
Encode: TypeAlias = Callable[[Batch, "PreTrainedTokenizerBase", int], dict[str, list[object]]]
"""Columns of rows, tokenizer and ``max_length`` to the tokens: ``input_ids``, ``length``, ``whole`` and others."""
WHOLE = "whole"
"""The column of how many tokens a row has before it is truncated: of its longest text, where it has several."""


@dataclass(frozen=True)
class SplitRows:
    """The rows of a split, and what ``train.max_length`` does to them.

    Attributes:
        rows: that are trained on or scored.
        left_out: reason to the number of rows that are too long.
        truncated: rows that lose their end.
        longest: tokens of the longest row, before that.
    """

    rows: int
    left_out: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    longest: int = 0


def split_rows(tokens: Dataset, max_length: int) -> SplitRows:
    """Return how many rows of a tokenised split there are, and how many were truncated.

    Args:
        tokens: what ``tokenise`` returned, or rows that no length limits.
        max_length: to which it truncated.
    """
    whole = list(tokens[WHOLE]) if WHOLE in tokens.column_names else []
    return SplitRows(len(tokens), truncated=sum(n > max_length for n in whole), longest=max(whole, default=0))


def tokenise(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, encode: Encode | None = None
) -> Dataset:
    """Tokenise ``text`` (and ``text_pair``) once: the result is cached on the disk.

    It is stored in datasets' cache (``HF_DATASETS_CACHE``) under ``peftlab/``, named by the SHA-256 of the rows,
    the tokenizer and ``max_length``. Where that cannot be written, or ``datasets.disable_caching()`` was
    called, the result stays in memory.

    Args:
        dataset: a split of ``TaskData``.
        tokenizer: the model's tokenizer; its special tokens are added.
        max_length: tokens, special ones included, to which an example is truncated; of a pair, the longer
            sentence loses tokens first. The caller checks that the model has that many positions.
        encode: how rows become tokens; None: ``encode_texts``.

    Returns:
        ``input_ids``, ``token_type_ids`` where the tokenizer makes them, ``length`` (tokens), ``whole`` (tokens
        before truncation), and ``label`` where there is one. Nothing is padded, so the attention mask is all ones and
        not stored.

    Raises:
        PeftlabError: ``max_length`` leaves no room beside the special tokens, or a text has no tokens.
    """
    pair = "text_pair" in dataset.column_names
    shortest = tokenizer.num_special_tokens_to_add(pair=pair) + (2 if pair else 1)
    # A tokenizer given less room than its special tokens may return the text untruncated.
    if max_length < shortest:
        raise PeftlabError(f"max_length {max_length} leaves no room for text; this task needs at least {shortest}")
    texts = ["text", "text_pair"] if pair else ["text"]
    encode = encode or encode_texts
    key = _fingerprint(dataset, tokenizer, max_length, encode)
    encoded = partial(
        dataset.map,
        lambda batch: encode(batch, tokenizer, max_length),
        batched=True,
        remove_columns=texts,
        new_fingerprint=key,
    )
    with _bars_on_terminals_only():
        try:
            tokenised = encoded(cache_file_name=_cache_file(key))
        except PeftlabError:
            raise
        except Exception:  # no space on the disk, where closing a file may raise anything, or a damaged file
            tokenised = encoded()
    _reset_backend(tokenizer)
    lengths = list(tokenised["length"])
    if 0 in lengths:
        raise PeftlabError(f"example {lengths.index(0)}: the tokenizer makes no token of its text")
    return tokenised


def encode_texts(batch: Batch, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list[object]]:
    """Return the tokens of texts, or pairs of texts.

    Args:
        batch: columns ``text`` and, for pairs, ``text_pair``.
        tokenizer: the model's tokenizer.
        max_length: tokens, special ones included, to which an example is truncated.
    """
    texts = [batch[name] for name in ("text", "text_pair") if name in batch]
    tokens = tokenizer(*texts, truncation="longest_first", max_length=max_length, return_attention_mask=False)
    lengths = [len(ids) for ids in tokens["input_ids"]]
    return {**tokens, "length": lengths, WHOLE: whole_lengths(tokens, tokenizer, max_length, *texts)}


def whole_lengths(
    tokens: Tokenised, tokenizer: PreTrainedTokenizerBase, max_length: int, *texts: Sequence[object]
) -> list[int]:
    """Return how many tokens each text, or pair of texts, has before it is truncated, special ones included.

    A fast tokenizer keeps what it cuts off a single text. Pairs that fill ``max_length``, and such texts of a slow
    tokenizer, are tokenised once more.

    Args:
        tokens: what the tokenizer returned for the texts.
        tokenizer: the model's tokenizer.
        max_length: to which they were truncated.
        texts: the column of texts, or the two of pairs.
    """
    lengths = [len(ids) for ids in tokens["input_ids"]]
    if tokens.encodings is not None and len(texts) == 1:
        special = tokenizer.num_special_tokens_to_add(pair=False)  # each part that was cut off has its own
        cut = [[len(part) - special for part in each.overflowing] for each in tokens.encodings]
        return [length + sum(parts) for length, parts in zip(lengths, cut, strict=True)]
    full = [row for row, length in enumerate(lengths) if length >= max_length]
    if full:
        again = tokenizer(*([column[row] for row in full] for column in texts), verbose=False)
        for row, ids in zip(full, again["input_ids"], strict=True):
            lengths[row] = len(ids)
    return lengths


def largest_id(dataset: Dataset) -> int:
    """Return the largest token id in a set that ``tokenise`` made."""
    from pyarrow import compute, types

    ids = dataset.data.column("input_ids")
    while types.is_list(ids.type) or types.is_large_list(ids.type):
        ids = compute.list_flatten(ids)
    return int(compute.max(ids).as_py())


def _fingerprint(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, encode: Encode) -> str:
    """Return the SHA-256 of everything the tokens depend on, and of the labels."""
    import transformers
    from datasets.fingerprint import Hasher

    backend = _reset_backend(tokenizer)
    made_by = Hasher.hash(tokenizer) if backend is None else backend.to_str()
    parts = [
        type(tokenizer).__name__,
        transformers.__version__,
        made_by,
        tokenizer.truncation_side,
        max_length,
        getattr(encode, "__qualname__", ""),
        WHOLE,  # tokens without that column have another name
    ]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for rows in dataset.iter(1000):
        digest.update(json.dumps(rows).encode())
    return digest.hexdigest()


def _reset_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Clear the last call's truncation and padding, which would be saved; return the Rust tokenizer, if any."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return backend


def _cache_file(key: str) -> str | None:
    """Return the cache file, or None if caching is off or the folder cannot be written."""
    import datasets

    if not datasets.is_caching_enabled():
        return None
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "peftlab"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder / f"{key}.arrow") if os.access(folder, os.W_OK) else None


def padding_or_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the pad token, or of the end-of-sequence token where there is none; None without either."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the token to pad with: the pad token's, or the end-of-sequence token's.

    Raises:
        PeftlabError: the tokenizer has neither.
    """
    pad = padding_or_end(tokenizer)
    if not isinstance(pad, int):
        raise PeftlabError("the tokenizer has neither a pad token nor an end-of-sequence token to pad with")
    return pad


# --- Which examples, in which order, and which of them share a row.
def seeded_order(n: int, *key: int) -> list[int]:
    """Return a random permutation of ``range(n)`` that depends on ``n`` and the integers of ``key`` alone.

    It sorts uniform draws of PCG64, whose stream NumPy keeps stable between versions, unlike its shuffles.
    """
    seed = np.random.SeedSequence([part % 2**64 for part in key])
    return np.random.Generator(np.random.PCG64(seed)).random(n).argsort(kind="stable").tolist()


def seeded_subset(n: int, size: int | None, seed: int) -> list[int] | None:
    """Return ``size`` of ``range(n)``, drawn with ``seed``, in order; None where all are wanted.

    Args:
        n: how many there are to draw from.
        size: how many to draw; None for all.
        seed: the draw depends on it, ``n`` and ``size`` alone.
    """
    return None if size is None or size >= n else sorted(seeded_order(n, seed, 2)[:size])


def eval_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return batches of all indices, longest first, so that running out of memory happens at once.

    Args:
        lengths: tokens of each example.
        batch_size: examples per batch.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def packed_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the positions 0 to n-1 as rows of neighbours: as few rows as hold at most ``capacity`` tokens each.

    Args:
        lengths: tokens of each example, in the order in which they are placed.
        capacity: tokens of a row; 0: a row per example.
    """
    rows: list[list[int]] = []
    filled = 0
    for i, length in enumerate(lengths):
        if not rows or filled + length > capacity:
            rows.append([])
            filled = 0
        rows[-1].append(i)
        filled += length
    return rows


# --- Batches as tensors.
class Collate:
    """Pad a batch of tokenised examples to its longest and convert it to tensors.

    Padding goes to the tokenizer's padding side; its token is the pad token, or the end-of-sequence token
    where there is none. The attention mask comes from the lengths, never from the ids, so a padding token
    that also occurs in the text is attended to there.

    Args:
        tokenizer: the one that made the tokens.
        regression: labels are float32, else int64 class indices.

    Raises:
        PeftlabError: the tokenizer has neither a pad nor an end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, regression: bool) -> None:
        self.fill = {"input_ids": padding_token(tokenizer), "token_type_ids": tokenizer.pad_token_type_id}
        self.left = tokenizer.padding_side == "left"
        self.regression = regression

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return ``padded``, and ``labels`` of shape (batch,) where the rows have them."""
        import torch

        batch = self.padded(rows)
        if "label" in rows[0]:
            dtype = torch.float32 if self.regression else torch.int64
            batch["labels"] = torch.tensor([row["label"] for row in rows], dtype=dtype)
        return batch

    def padded(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return ``input_ids``, ``attention_mask`` and perhaps ``token_type_ids``, int64 of shape (batch, longest)."""
        import torch

        # Masks are padded with 0 like everything else, from lists of ones.
        lists = {
            name: [typed_value(row, name, list, "an example") for row in rows] for name in self.fill if name in rows[0]
        }
        width = max(map(len, lists["input_ids"]))
        lists["attention_mask"] = [[1] * len(ids) for ids in lists["input_ids"]]
        return {
            name: torch.tensor([self._pad(ids, width, self.fill.get(name, 0)) for ids in values], dtype=torch.int64)
            for name, values in lists.items()
        }

    def _pad(self, ids: Sequence[int], width: int, fill: int) -> list[int]:
        padding = [fill] * (width - len(ids))
        return [*padding, *ids] if self.left else [*ids, *padding]


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Hide the progress bars of ``datasets`` within the block where standard error is no terminal."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
