"""Reading, computing and writing tensors concurrently, within a budget of memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from peftlab.checkpoints.io.file_ranges import copy_at, flush, open_binary, read_at, write_at
from peftlab.checkpoints.io.shards import PickleShard, Shard
from peftlab.checkpoints.io.tensorfiles import layout
from peftlab.errors import PeftlabError

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
        if idle and (self._unflushed >= FLUSH or (self._written == self.size and self._unflushed)):
            self._unflushed = 0
            self._flush = flusher.submit(flush, self._descriptor)

    def close(self) -> None:
        """Close the file."""
        if self._flush is not None:
            self._flush.exception()
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


def copying(shard: Shard, source: str, output: OutputFile, key: str) -> Job | Copy:
    """Return the step that copies a tensor unchanged."""
    if isinstance(shard, PickleShard):
        return Job([(shard, source)], lambda tensors: {key: tensors[0]}, {key: output}, shard.entries[source].nbytes)
    return Copy(shard, source, output, key)


def run(jobs: Iterable[Job | Copy], budget: int) -> None:
    """Run ``jobs``, as many at a time as torch has threads, while written data is flushed to the disk.

    Each job reads, computes and writes in one thread, so that one job's reading and writing overlap with another's
    computing. The first error ends the run.

    Args:
        budget: bytes that running jobs may use together; a job larger than that runs alone.
    """
    threads = torch.get_num_threads()
    room = _Room(budget)
    scratch = threading.local()

    def work(job: Job | Copy) -> None:
        if isinstance(job, Copy):
            job.output.copy(job.key, job.shard, job.source)
            job.output.flush_soon(flusher)
            return
        with room.taken(job.nbytes):
            results = job.make(_read(job, scratch))
            for key, tensor in results.items():
                job.outputs[key].write(key, tensor)
                job.outputs[key].flush_soon(flusher)

    with ThreadPoolExecutor(1) as flusher:
        workers = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        try:
            for done in [workers.submit(work, job) for job in jobs]:
                done.result()
        finally:
            workers.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)


class _Room:
    """Memory that several threads share."""

    def __init__(self, size: int) -> None:
        self._size, self._used, self._changed = size, 0, threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
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


def _read(job: Job, scratch: threading.local) -> list[Tensor]:
    if len(job.reads) != 1:
        return [shard.read(key) for shard, key in job.reads]
    (shard, key), *_ = job.reads
    # One buffer per thread, used for all its tensors: allocating memory takes as long as reading into it.
    buffer = getattr(scratch, "buffer", None)
    if buffer is None or len(buffer) < shard.entries[key].nbytes:
        scratch.buffer = None
        scratch.buffer = buffer = torch.empty(shard.entries[key].nbytes, dtype=torch.uint8)
    return [shard.read(key, buffer)]
