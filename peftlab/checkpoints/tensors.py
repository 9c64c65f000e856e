"""Tensors on disk: the safetensors format, a base model's weight files, and steps that stream from one to another.

A safetensors file is 8 bytes of header length, a JSON header, and the data. The reader checks everything in a header
against the file before any data is used; each mistake is an error that names file and key. Weight files are opened
read-only and read one tensor at a time; ``run`` reads, computes and writes concurrently within a budget of memory.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from peftlab.errors import PeftlabError, reason
from peftlab.files import Json, open_regular, parse_json, read_object
from peftlab.progress import counted
from peftlab.untyped import Unpickled

MAX_HEADER = 100_000_000  # bytes; the format's own limit

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16,
    "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32, "C64": torch.complex64,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
# The order in which safetensors' own writer lays tensors out: widest first, then by name.
_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64",
    "U64",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype's name, its shape and the offset of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return a safetensors file's entries by key, in file order, and its metadata.

    Raises:
        PeftlabError: the file is missing, truncated or longer than its tensors; the header is longer than the
            file or not JSON; a key occurs twice; a dtype is unknown; offsets overlap, leave holes, are outside the
            file or do not fit dtype and shape.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8:
                raise PeftlabError(f"{path}: truncated; {size} bytes are too few for a safetensors header")
            if length > MAX_HEADER or 8 + length > size:
                raise PeftlabError(f"{path}: header of {length} bytes is longer than the file ({size} bytes)")
            text = file.read(length)
    except OSError as error:
        raise PeftlabError(f"{path}: {reason(error)}") from None
    raw = _parse(path, text)
    metadata = raw.pop("__metadata__", {})
    if not _is_text_map(metadata):
        raise PeftlabError(f"{path}: __metadata__ is not a map of strings")
    return _entries(path, raw, 8 + length, size), metadata


def _parse(path: Path, text: bytes) -> dict[str, Json]:
    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found: dict[str, Json] = {}
        for key, value in pairs:
            if key in found:
                raise PeftlabError(f"{path}: duplicate key {key!r} in the header")
            found[key] = value
        return found

    try:
        raw = parse_json(text.decode("utf-8"), unique)
        json.dumps(raw, ensure_ascii=False).encode("utf-8")  # a key may contain half a surrogate pair
    except ValueError as error:
        raise PeftlabError(f"{path}: the header is not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise PeftlabError(f"{path}: the header is not a JSON object")
    return raw


def _entries(path: Path, raw: Mapping[str, Json], data: int, size: int) -> dict[str, Entry]:
    spans: list[tuple[int, int, str, Entry]] = []
    for key, value in raw.items():
        where = f"{path}: {key!r}"
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise PeftlabError(f"{where}: an entry must have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise PeftlabError(f"{where}: unknown dtype {dtype!r}")
        if not _are_sizes(shape):
            raise PeftlabError(f"{where}: shape {shape!r} is not a list of sizes")
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise PeftlabError(f"{where}: data_offsets {offsets!r} are not a begin and an end")
        begin, end = offsets
        if data + end > size:
            raise PeftlabError(f"{where}: ends at byte {data + end}, the file has {size}: truncated or out of range")
        entry = Entry(dtype, tuple(shape), data + begin)
        if entry.nbytes != end - begin:
            raise PeftlabError(f"{where}: {dtype} {shape} takes {entry.nbytes} bytes, data_offsets span {end - begin}")
        spans.append((begin, end, key, entry))
    spans.sort(key=lambda span: span[:3])
    position = 0
    for begin, end, key, _ in spans:
        if begin != position:
            kind = "overlaps the tensor before it" if begin < position else "leaves a hole before it"
            raise PeftlabError(f"{path}: {key!r}: begins at {begin}, {kind} (expected {position})")
        position = end
    if data + position != size:
        raise PeftlabError(f"{path}: {size - data - position} extra bytes after the last tensor")
    return {key: entry for _, _, key, entry in spans}


def _is_text_map(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def layout(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Entry]]:
    """Return the head of a new file (length and JSON header) and where each tensor goes in it.

    Args:
        tensors: dtype name and shape by key.
        metadata: texts to put into the header beside ``format: pt``.

    Order, spacing and metadata are those of safetensors' own writer for transformers, so that equal tensors
    make equal files.
    """
    order = sorted(tensors, key=lambda key: (-_ORDER.index(tensors[key][0]), key.encode()))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    begins: dict[str, int] = {}
    position = 0
    for key in order:
        dtype, shape = tensors[key]
        end = position + Entry(dtype, shape, 0).nbytes
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        begins[key], position = position, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {key: Entry(*tensors[key], len(head) + begin) for key, begin in begins.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a whole file: the same tensors and metadata give the same bytes.

    (The safetensors package writes its metadata in an order that differs from run to run.)

    Args:
        path: the file. tensors: by key. metadata: texts for the header.
    """
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    head, entries = layout({key: (NAMES[t.dtype], tuple(t.shape)) for key, t in plain.items()}, metadata)
    with open(path, "wb") as file:
        file.write(head)
        for key in entries:
            file.write(plain[key].flatten().view(torch.uint8).numpy().data)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a whole file's tensors by key, and its metadata; errors as in ``read_header``."""
    entries, metadata = read_header(path)
    shard = Shard(path, entries)
    try:
        return {key: shard.read(key) for key in entries}, metadata
    finally:
        shard.close()


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Return a whole file's tensors by key, each read from the disk where it is used; errors as in ``read_header``.

    What is written to them stays in memory: the file does not change.
    """
    entries, _ = read_header(path)
    with open_regular(path) as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {
        key: torch.frombuffer(whole, dtype=DTYPES[e.dtype], count=e.numel, offset=e.offset).view(e.shape)
        for key, e in entries.items()
    }


# The part of torch's message that names the fault in the file; the rest advises to load it without protection.
_FAULT = re.compile(r"unsupported (?:global|class|operand)\W+(?:GLOBAL )?[\w.]+", re.IGNORECASE)


def read_pickle(path: Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a pickled state dict.

    Args:
        mapped: leave the values in the file until they are used, where the file's format allows it.

    Raises:
        PeftlabError: not a regular file, a damaged one, or one that contains anything but tensors by name.
    """
    loaded = unpickle(path, mapped=mapped)
    if not _named(loaded):
        raise PeftlabError(f"{path}: contains something other than tensors by name")
    return loaded


def unpickle(path: Path, *, mapped: bool = False) -> Unpickled:
    """Return the tensors, numbers, texts and containers of a pickle, on the CPU.

    Args:
        mapped: as in ``read_pickle``.

    Raises:
        PeftlabError: not a regular file, a damaged one, or one that contains other objects.
    """
    open_regular(path).close()
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except RuntimeError as error:
            if not mapped or "mmap" not in str(error):
                raise
            # Files of torch before 1.6 cannot be mapped.
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        raise PeftlabError(f"{path}: cannot be read as tensors alone ({_fault(error)})") from None


def _named(value: object) -> TypeGuard[dict[str, Tensor]]:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(t, Tensor) for k, t in value.items())


def _fault(error: Exception) -> str:
    if found := _FAULT.search(str(error)):
        return found[0]
    return "not a pickle of tensors" if "weights_only" in str(error) else reason(error)


# Reading, writing and copying at positions of open files, each by the system's own call where it has one: macOS has no
# copy_file_range and no fdatasync, Windows has no positioned reads and writes either.

_SEEK_LOCK = threading.Lock()  # without positioned reads, threads share the descriptor's one position
_PART = 1 << 20


def open_binary(path: Path, flags: int) -> int:
    """Return a descriptor of a file; Windows translates no line ends in it.

    Args:
        path: the file. flags: as of ``os.open``.
    """
    return os.open(path, flags | getattr(os, "O_BINARY", 0), 0o644)


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Return up to ``size`` bytes from ``offset``; none at the end of the file.

    Args:
        descriptor: of the file. size: in bytes. offset: of the first byte.
    """
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    with _SEEK_LOCK:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


def read_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill ``view`` from ``offset`` on, and return how many bytes were read; 0 at the end of the file.

    Args:
        descriptor: of the file. view: memory to fill. offset: of the first byte.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    part = read_at(descriptor, min(_PART, len(view)), offset)
    view[: len(part)] = part
    return len(part)


def write_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Write ``view`` at ``offset``, and return how many bytes were written.

    Args:
        descriptor: of the file. view: memory to write. offset: of the first byte.
    """
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, view, offset)
    with _SEEK_LOCK:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, view)


def copy_at(source: int, target: int, size: int, begin: int, end: int) -> int:
    """Copy up to ``size`` bytes from ``begin`` of a file to ``end`` of another, and return how many were copied.

    Args:
        source, target: descriptors of the files. size: in bytes. begin, end: offsets in source and in target.

    Raises:
        OSError: the system, or these two file systems, cannot do so without reading them.
    """
    if not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOTSUP, "no copy_file_range")
    return os.copy_file_range(source, target, size, begin, end)


def flush(descriptor: int) -> None:
    """Wait until what was written is on the disk."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


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

    def read_rows(self, key: str, count: int) -> Iterator[Tensor]:
        """Yield a tensor's rows, up to ``count`` at a time.

        Args:
            key: of the tensor. count: of rows.
        """
        entry = self.entries[key]
        width = entry.nbytes // entry.shape[0]
        for start in range(0, entry.shape[0], count):
            rows = min(count, entry.shape[0] - start)
            part = Entry(entry.dtype, (rows, *entry.shape[1:]), entry.offset + start * width)
            yield Shard(self.path, {key: part}, self.descriptor).read(key)

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
    """Return the weight files of a model directory as transformers reads them: safetensors first, a single file first.

    Raises:
        PeftlabError: no weights, a missing or damaged file, a key in two files, or an index that does not fit.
    """
    if (directory / SAFETENSORS_INDEX).exists() or (directory / SAFETENSORS).exists():
        single, index, open_file = directory / SAFETENSORS, directory / SAFETENSORS_INDEX, _open_safetensors
    else:
        single, index, open_file = directory / PICKLE, directory / PICKLE_INDEX, _open_pickle
    if single.exists():
        shards = [open_file(single)]
    elif index.exists():
        weight_map = _read_index(index)
        shards = [open_file(directory / name) for name in sorted(set(weight_map.values()))]
        entries = {shard.path.name: shard.entries for shard in shards}
        for key, name in weight_map.items():
            if key not in entries[name]:
                raise PeftlabError(f"{index}: {key!r} is not in {name}")
    else:
        raise PeftlabError(f"{directory}: no weights (neither {SAFETENSORS} nor {PICKLE}, whole or in shards)")
    owner: dict[str, Path] = {}
    for shard in shards:
        for key in shard.entries:
            if key in owner:
                raise PeftlabError(f"{shard.path}: duplicate key {key!r}, which is also in {owner[key].name}")
            owner[key] = shard.path
    return shards


def _read_index(path: Path) -> dict[str, str]:
    """Return the shard of each key by an index file; each shard is a file beside it."""
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise PeftlabError(f"{path}: has no weight_map")
    shards: dict[str, str] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", "..") or "\\" in name:
            raise PeftlabError(f"{path}: {key!r} points to {name!r}, which is not a file name inside the directory")
        if not (path.parent / name).is_file():
            raise PeftlabError(f"{path}: {key!r} is in {name}, which is missing")
        shards[key] = name
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


COPIED = 64 << 20  # bytes that one call copies from file to file
WRITTEN = 512 << 10  # bytes that one call writes; larger calls were measured to be up to three times as slow
FLUSH = 64 << 20  # bytes after which written data is flushed to the disk


class OutputFile:
    """One safetensors file being written: the header first, then each tensor at its place, in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.path = path
        head, self.entries = layout(tensors)
        self.size = len(head) + sum(entry.nbytes for entry in self.entries.values())
        self._descriptor = open_binary(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._flush: Future[None] | None = None
        self._written = self._unflushed = 0
        self._lock = threading.Lock()
        self._write(memoryview(head), 0)

    def write(self, key: str, tensor: Tensor) -> None:
        """Write one tensor's bytes."""
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._write(raw.numpy().data, self.entries[key].offset)

    def copy(self, key: str, shard: Shard, source: str) -> None:
        """Copy one tensor's bytes from another file; they never enter this process."""
        entry, target = shard.entries[source], self.entries[key]
        done = 0
        while done < entry.nbytes:
            count = min(COPIED, entry.nbytes - done)
            begin, end = entry.offset + done, target.offset + done
            try:
                count = copy_at(shard.descriptor, self._descriptor, count, begin, end)
                self._count(count)
            except OSError:
                # Not by this system, or not between these two file systems.
                part = read_at(shard.descriptor, min(count, 1 << 20), begin)
                self._write(memoryview(part), end)
                count = len(part)
            if count == 0:
                raise PeftlabError(f"{shard.path}: {source!r}: the file ended while it was read")
            done += count

    def flush_soon(self, flusher: ThreadPoolExecutor) -> None:
        """Start flushing written data to the disk, if there is enough of it and no flush is running."""
        idle = self._flush is None or self._flush.done()
        if idle and self._flush is not None:
            self._flush.result()  # a disk says once that it could not write
        if idle and (self._unflushed >= FLUSH or (self._written == self.size and self._unflushed)):
            self._unflushed = 0
            self._flush = flusher.submit(flush, self._descriptor)

    def close(self) -> None:
        """Close the file, after the flush that is running.

        Raises:
            OSError: the disk could not write what was flushed.
        """
        try:
            if self._flush is not None:
                self._flush.result()
        finally:
            os.close(self._descriptor)

    def _write(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            done += write_at(self._descriptor, view[done : done + WRITTEN], offset + done)
        self._count(done)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._written += nbytes
            self._unflushed += nbytes


@dataclass(frozen=True)
class Job:
    """One step: tensors to read, what is computed from them, and the files the results go to.

    Attributes:
        reads: shard and key of each tensor to read.
        make: computes the results, by output key, from the tensors in order.
        outputs: the file of each result.
        nbytes: memory that the tensors and the results take together.
    """

    reads: Sequence[tuple[Shard, str]]
    make: Callable[[list[Tensor]], dict[str, Tensor]]
    outputs: Mapping[str, OutputFile]
    nbytes: int


@dataclass(frozen=True)
class Copy:
    """One step without computation: a tensor's bytes are copied from file to file."""

    shard: Shard
    source: str
    output: OutputFile
    key: str
    nbytes: int = 0


def copy_step(shard: Shard, source: str, output: OutputFile, key: str) -> Job | Copy:
    """Return the step that copies a tensor unchanged.

    Args:
        shard: the file to read. source: the tensor's key there.
        output: the file to write. key: the tensor's key there.
    """
    if isinstance(shard, PickleShard):
        return Job([(shard, source)], lambda tensors: {key: tensors[0]}, {key: output}, shard.entries[source].nbytes)
    return Copy(shard, source, output, key)


def run(jobs: Iterable[Job | Copy], budget: int) -> None:
    """Run ``jobs``, as many at a time as torch has threads, while written data is flushed to the disk.

    Each job reads, computes and writes in one thread, so that one job's reading and writing overlap with another's
    computing. A thread takes its next job itself: waking another to hand it out would cost as much as a small job. The
    first error ends the run.

    Args:
        jobs: the steps.
        budget: bytes that running jobs may use together; a job larger than that runs alone.
    """
    threads = torch.get_num_threads()
    memory = _MemoryBudget(budget)
    steps = list(jobs)
    left = counted(steps, "writing the weights", len(steps), "tensor")
    taking, ended = threading.Lock(), threading.Event()

    def work(job: Job | Copy, scratch: _Scratch) -> None:
        if isinstance(job, Copy):
            job.output.copy(job.key, job.shard, job.source)
            job.output.flush_soon(flusher)
            return
        with memory.reserved(job.nbytes):
            results = job.make(scratch.read(job))
            for key, tensor in results.items():
                job.outputs[key].write(key, tensor)
                job.outputs[key].flush_soon(flusher)

    def work_through() -> None:
        scratch = _Scratch()
        try:
            while not ended.is_set():
                with taking:
                    job = next(left, None)
                if job is None:
                    return
                work(job, scratch)
        except BaseException:
            ended.set()
            raise

    with ThreadPoolExecutor(1) as flusher:
        workers = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        try:
            for each in [workers.submit(work_through) for _ in range(threads)]:
                each.result()
        finally:
            ended.set()
            workers.shutdown()
            left.close()
            torch.set_num_threads(threads)


class _MemoryBudget:
    """Bytes of memory that several threads share."""

    def __init__(self, size: int) -> None:
        self._size, self._used, self._changed = size, 0, threading.Condition()

    @contextmanager
    def reserved(self, nbytes: int) -> Iterator[None]:
        """Wait until ``nbytes`` are free, or nothing else is in use, and reserve them for the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + nbytes <= self._size)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


class _Scratch:
    """Memory that a thread reads one tensor after another into: allocating it takes as long as reading into it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, job: Job) -> list[Tensor]:
        """Read a job's tensors, a single one into the thread's memory."""
        if len(job.reads) != 1:
            return [shard.read(key) for shard, key in job.reads]
        (shard, key), *_ = job.reads
        nbytes = shard.entries[key].nbytes
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        return [shard.read(key, self._buffer)]
