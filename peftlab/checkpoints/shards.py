"""A base model's weight files, opened read-only and read one tensor at a time."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peftlab.checkpoints.tensorfiles import DTYPES, NAMES, Entry, check_index, read_header, shard_names
from peftlab.errors import PeftlabError

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


@dataclass
class Shard:
    """One safetensors file.

    Attributes:
        path: the file.
        entries: its tensors by key.
    """

    path: Path
    entries: dict[str, Entry]
    _descriptor: int = field(default=-1, repr=False)

    @property
    def output_name(self) -> str:
        """The name of the file that takes this one's place in a merged directory."""
        return self.path.name

    @property
    def descriptor(self) -> int:
        """The open file, for copies of whole spans of it."""
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        return self._descriptor

    def read(self, key: str, buffer: Tensor | None = None) -> Tensor:
        """Read one tensor, into ``buffer`` (bytes, large enough) or memory of its own."""
        entry = self.entries[key]
        raw = torch.empty(entry.nbytes, dtype=torch.uint8) if buffer is None else buffer[: entry.nbytes]
        view, done = raw.numpy().data, 0
        while done < entry.nbytes:
            count = os.preadv(self.descriptor, [view[done:]], entry.offset + done)
            if count == 0:
                raise PeftlabError(f"{self.path}: {key!r}: the file ended while it was read")
            done += count
        return raw.view(DTYPES[entry.dtype]).view(entry.shape)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class PickleShard(Shard):
    """One ``.bin`` file: unpickled with ``weights_only`` and mapped, so that no more than its keys is loaded."""

    _tensors: dict[str, Tensor] | None = None

    @property
    def output_name(self) -> str:
        return self.path.name.replace("pytorch_model", "model").replace(".bin", ".safetensors")

    def read(self, key: str, buffer: Tensor | None = None) -> Tensor:
        if self._tensors is None:
            self._tensors = _unpickle(self.path)
        mapped = self._tensors[key]
        tensor = mapped.clone(memory_format=torch.contiguous_format)
        _drop_pages(mapped)
        return tensor

    def close(self) -> None:
        super().close()
        self._tensors = None


def open_shards(directory: Path) -> list[Shard]:
    """Return the weight files of a model directory, safetensors before pickle, indexed before single.

    Raises:
        PeftlabError: no weights, a missing or damaged file, a key in two files, or an index that does not fit.
    """
    if (directory / SAFETENSORS_INDEX).exists() or (directory / SAFETENSORS).exists():
        single, index, kind = SAFETENSORS, SAFETENSORS_INDEX, _open_safetensors
    else:
        single, index, kind = PICKLE, PICKLE_INDEX, _open_pickle
    if (directory / index).exists():
        shards = [kind(directory / name) for name in shard_names(directory, index)]
        check_index(directory, index, {shard.path.name: shard.entries for shard in shards})
    elif (directory / single).exists():
        shards = [kind(directory / single)]
    else:
        raise PeftlabError(f"{directory}: no weights here (neither {SAFETENSORS} nor {PICKLE}, whole or in shards)")
    owner: dict[str, Path] = {}
    for shard in shards:
        for key in shard.entries:
            if key in owner:
                raise PeftlabError(f"{shard.path}: duplicate key {key!r}, which {owner[key].name} holds too")
            owner[key] = shard.path
    return shards


def _open_safetensors(path: Path) -> Shard:
    return Shard(path, read_header(path)[0])


def _open_pickle(path: Path) -> Shard:
    entries = {}
    for key, tensor in _unpickle(path).items():
        if tensor.dtype not in NAMES:
            raise PeftlabError(f"{path}: {key!r}: dtype {tensor.dtype} has no place in a safetensors file")
        entries[key] = Entry(NAMES[tensor.dtype], tuple(tensor.shape), 0)
    return PickleShard(path, entries)


def _unpickle(path: Path) -> dict[str, Tensor]:
    try:
        try:
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            # Files of torch before 1.6 cannot be mapped; then this one shard lies in memory.
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler has no end of ways to say that a file is none of its own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PeftlabError(f"{path}: cannot be read as weights alone ({reason})") from None
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise PeftlabError(f"{path}: holds something other than tensors by name")
    return loaded


def _drop_pages(mapped: Tensor) -> None:
    """Give back the file's pages under a mapped tensor: they would count as this process's memory."""
    storage = mapped.untyped_storage()
    if storage.filename is None or not mapped.is_contiguous():
        return
    start = mapped.data_ptr()
    begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = start + mapped.nbytes - begin
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
