"""A base model's weight files, opened read-only and read one tensor at a time."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from peftlab.checkpoints.io.file_ranges import open_binary, read_into
from peftlab.checkpoints.io.pickles import read_pickle
from peftlab.checkpoints.io.tensorfiles import DTYPES, NAMES, Entry, check_index, read_header, shard_names
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
        """The name of this file's counterpart in a merged directory."""
        return self.path.name

    @property
    def descriptor(self) -> int:
        """The open file, for copies of whole spans of it."""
        if self._descriptor < 0:
            self._descriptor = open_binary(self.path, os.O_RDONLY)
        return self._descriptor

    def read(self, key: str, buffer: Tensor | None = None) -> Tensor:
        """Read one tensor, into ``buffer`` (bytes, large enough) or memory of its own."""
        entry = self.entries[key]
        raw = torch.empty(entry.nbytes, dtype=torch.uint8) if buffer is None else buffer[: entry.nbytes]
        view, done = raw.numpy().data, 0
        while done < entry.nbytes:
            count = read_into(self.descriptor, view[done:], entry.offset + done)
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
    """One ``.bin`` file: unpickled with ``weights_only`` and memory-mapped, so that only its keys are loaded."""

    _tensors: dict[str, Tensor] | None = None

    @property
    def output_name(self) -> str:
        return self.path.name.replace("pytorch_model", "model").replace(".bin", ".safetensors")

    def read(self, key: str, buffer: Tensor | None = None) -> Tensor:
        if self._tensors is None:
            self._tensors = read_pickle(self.path, mapped=True)
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
        raise PeftlabError(f"{directory}: no weights (neither {SAFETENSORS} nor {PICKLE}, whole or in shards)")
    owner: dict[str, Path] = {}
    for shard in shards:
        for key in shard.entries:
            if key in owner:
                raise PeftlabError(f"{shard.path}: duplicate key {key!r}, which is also in {owner[key].name}")
            owner[key] = shard.path
    return shards


def _open_safetensors(path: Path) -> Shard:
    return Shard(path, read_header(path)[0])


def _open_pickle(path: Path) -> Shard:
    entries = {}
    for key, tensor in read_pickle(path, mapped=True).items():
        if tensor.dtype not in NAMES:
            raise PeftlabError(f"{path}: {key!r}: dtype {tensor.dtype} cannot be stored in a safetensors file")
        entries[key] = Entry(NAMES[tensor.dtype], tuple(tensor.shape), 0)
    return PickleShard(path, entries)


def _drop_pages(mapped: Tensor) -> None:
    """Release the file's pages of a mapped tensor, which would count as this process's memory."""
    storage = mapped.untyped_storage()
    if storage.filename is None or not mapped.is_contiguous():
        return
    start = mapped.data_ptr()
    begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = start + mapped.nbytes - begin
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
