"""Bounds on the sizes in a model's configuration: a typing error in it must not use up all memory.

A configuration is checked before a library builds lists of its lengths. Models are then built on the meta device,
where tensors have no values, and their elements are counted against the size of the weight files, if there are any.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from peftlab.errors import PeftlabError
from peftlab.files import read_object
from peftlab.untyped import Function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_LAYERS, _MOST_LABELS, _MOST_TENSORS = 1_000, 100_000, 200_000
_ID_RANGE = 10  # ids may leave gaps
# A chunk_size of -1 stands for no chunks (Phi-4 multimodal).
_SIZE = re.compile(r"^(num|n)_|(?<!chunk)_(size|dim|heads|layers|labels|embeddings)$")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
# A byte of a weight file stores at most eight parameters (one-bit weights). Heads and buffers may be new.
_ELEMENTS_PER_BYTE, _FRESH_ELEMENTS = 8, 200_000_000
_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.rand, torch.randn, torch.tensor}


def check_sizes(config: Mapping[str, object], where: str | Path) -> None:
    """Refuse sizes below zero, numbers of layers and labels that no model has, and classes that are not named by text.

    Raises:
        PeftlabError: such a value; ``where`` and the key are named.
    """
    architectures = config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise PeftlabError(f"{where}: architectures is not a list of class names")
    for key, value in _integers(config):
        if value < 0 and _SIZE.search(key):
            raise PeftlabError(f"{where}: {key} is negative")
        most = _MOST_LABELS if key == "num_labels" else _MOST_LAYERS if key.endswith(("layer", "layers")) else None
        if most is not None and value > most:
            raise PeftlabError(f"{where}: {key} is {min(value, 10**100):.3g}, which is more than {most:,}")


def check_directory(directory: Path) -> None:
    """Check a local model before a library reads it.

    Raises:
        PeftlabError: ``config.json`` is not a JSON object or has sizes that no model has; or a file is a pipe or a
            device, which might never end.
    """
    for path in directory.iterdir():
        with suppress(OSError):  # a dangling link counts as no file
            if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
                raise PeftlabError(f"{path}: not a regular file")
    if (directory / "config.json").exists():  # an adapter, whose tokenizer is read, has none
        check_sizes(read_object(directory / "config.json"), directory / "config.json")


def check_ids(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Refuse token ids far beyond the number of tokens: libraries make lists as long as the largest."""
    vocabulary = tokenizer.get_vocab()
    count = len(vocabulary)
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", 0))
    if largest > _ID_RANGE * (count + 1000):
        raise PeftlabError(f"tokenizer of {where!r}: {token[:50]!r} has the id {largest}, but there are {count} tokens")


def _integers(value: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    """Yield the keys of all integers of a JSON object, those of objects in it too."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _integers(inner)
        elif type(inner) is int:
            yield key, inner


class Bounded(TorchFunctionMode):
    """A context in which building a model on the meta device fails if its tensors are too many or too large.

    Args:
        directory: of the model, whose weight files bound the size. None: only the number of tensors is bounded.
    """

    def __init__(self, directory: Path | None) -> None:
        super().__init__()
        self._directory, self._tensors, self._elements = directory, 0, 0
        sizes = [f.stat().st_size for p in _WEIGHTS for f in directory.glob(p) if f.is_file()] if directory else []
        self._stored = sum(sizes)

    def __torch_function__(
        self,
        func: Function[object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func in _FACTORIES and isinstance(result, Tensor) and result.is_meta:
            self._tensors += 1
            self._elements += result.numel()
            self._check()
        return result

    def _check(self) -> None:
        if self._tensors > _MOST_TENSORS:
            raise PeftlabError(f"{self._directory or 'model'}: config.json names more than {_MOST_TENSORS:,} tensors")
        if self._stored and self._elements > _ELEMENTS_PER_BYTE * self._stored + _FRESH_ELEMENTS:
            raise PeftlabError(
                f"{self._directory}: config.json names a model of {self._elements:.2g} parameters or more, but the "
                f"weight files have {self._stored:,} bytes; is a size in it wrong?"
            )
