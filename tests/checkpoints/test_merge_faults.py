"""A merge that is killed, or meets a full disk or bad input, leaves nothing half done."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from models import adapt, build, load, save_base, weight_files
from safetensors.torch import load_file, save_file

from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.errors import PeftlabError
from peftlab.files import STAGING_PREFIX, remove


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    """A small base in shards, and an adapter of it."""
    base = save_base(build("llama"), tmp_path / "base", max_shard_size="20KB")
    return base, adapt(load(type(build("llama")), base), tmp_path / "adapter", target_modules="all-linear")


def test_a_dtype_is_torchs() -> None:
    with pytest.raises(PeftlabError, match=r"dtype 'bf16' is not a torch.dtype; write torch.bfloat16$"):
        MergeOptions(dtype="bf16")
    with pytest.raises(PeftlabError, match=r"dtype 'int4' .*one of torch.float32, torch.bfloat16, torch.float16"):
        MergeOptions(dtype="int4")


@pytest.mark.parametrize("kills", [6, pytest.param(30, marks=pytest.mark.long)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_any_moment(parts: tuple[Path, Path], tmp_path: Path, overwrite: bool, kills: int) -> None:
    """SIGKILL at random moments: OUT is absent or complete, the base untouched, and the rerun gives the same."""
    base, adapter = parts
    expected = tmp_path / "expected"
    merge_checkpoint(adapter, base, expected)
    began = time.perf_counter()
    merge_checkpoint(adapter, base, expected, MergeOptions(overwrite=True))
    seconds = time.perf_counter() - began
    before = weight_files(base)
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    chance, killed, left_behind = random.Random(seed), 0, 0
    out = tmp_path / "work" / "out"

    def complete() -> bool:
        names = {p.name for p in out.iterdir()} == {p.name for p in expected.iterdir()}
        return names and weight_files(out) == weight_files(expected)

    # Forks of one process that has imported everything: a kill costs milliseconds instead of seconds.
    while killed < kills or not left_behind:
        began, child = time.perf_counter(), os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                merge_checkpoint(adapter, base, out, MergeOptions(overwrite=overwrite))
            finally:
                os._exit(0 if out.exists() else 1)
        if chance.random() < 0.5:
            time.sleep(chance.random() * 1.2 * seconds)
        else:  # while it writes, which is the smaller part of the time
            while not any(out.parent.glob(f"{STAGING_PREFIX}out-*")) and time.perf_counter() - began < seconds:
                time.sleep(0.001)
            time.sleep(chance.random() * 0.1 * seconds)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
        left_behind += any(out.parent.glob(f"{STAGING_PREFIX}*"))
        assert not out.exists() or complete()
        if overwrite:
            continue
        if not out.exists():
            merge_checkpoint(adapter, base, out)
            assert complete() and [p.name for p in out.parent.iterdir()] == ["out"]
        remove(out, "model")
    assert weight_files(base) == before
    merge_checkpoint(adapter, base, out, MergeOptions(overwrite=True))
    assert complete() and [p.name for p in out.parent.iterdir()] == ["out"]


def test_of_two_merges_at_once_one_is_refused(parts: tuple[Path, Path], tmp_path: Path) -> None:
    """As when both are started by hand: the first is held up in the middle of its work while the second starts."""
    base, adapter = parts
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            while True:
                merge_checkpoint(adapter, base, tmp_path / "out", MergeOptions(overwrite=True))
        finally:
            os._exit(1)

    def writing() -> bool:
        return any(tmp_path.glob(f"{STAGING_PREFIX}out-*-out/new/*.safetensors"))

    try:
        os.kill(child, signal.SIGSTOP)
        while not writing():
            os.kill(child, signal.SIGCONT)
            time.sleep(0.002)
            os.kill(child, signal.SIGSTOP)
            os.waitpid(child, os.WUNTRACED)
        with pytest.raises(PeftlabError, match="out: another process is writing it"):
            merge_checkpoint(adapter, base, tmp_path / "out", MergeOptions(overwrite=True))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    expected = tmp_path / "expected"
    merge_checkpoint(adapter, base, expected)
    merge_checkpoint(adapter, base, tmp_path / "out", MergeOptions(overwrite=True))
    assert weight_files(tmp_path / "out") == weight_files(expected)
    assert not list(tmp_path.glob(f"{STAGING_PREFIX}*"))


def test_overwriting_spares_what_is_no_merge(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``merge A -o A --overwrite`` deleted the adapter, and ``-o ../out`` from within ``out`` deleted that."""
    base, adapter = parts
    merge_checkpoint(adapter, base, tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    for out, words in (
        (adapter, "is or contains the adapter"),
        (Path("../out"), "is or contains the current directory"),
        (tmp_path, "is, is inside or contains the base"),
    ):
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        with pytest.raises(PeftlabError, match=words):
            merge_checkpoint(adapter, base, out, MergeOptions(overwrite=True))
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(PeftlabError, match=r"out contains notes\.txt, which peftlab did not write"):
        merge_checkpoint(adapter, base, "out", MergeOptions(overwrite=True))


def test_a_mounted_base_is_the_base(parts: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = parts
    (tmp_path / "mounted").mkdir()
    mount = ["mount", "--bind", base, tmp_path / "mounted"]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        for out in (base, base / "inside"):
            with pytest.raises(PeftlabError, match="is, is inside or contains the base"):
                merge_checkpoint(adapter, tmp_path / "mounted", out, MergeOptions(overwrite=True))
    finally:
        subprocess.run(["umount", tmp_path / "mounted"], check=True)


def test_full_disk(parts: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = parts
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, limits[1]))
    try:
        with pytest.raises(PeftlabError, match=r"out: cannot be written \(File too large\); nothing"):
            merge_checkpoint(adapter, base, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


def test_no_space_left(parts: tuple[Path, Path], tmp_path: Path) -> None:
    """The real thing, where a file system can be mounted."""
    base, adapter = parts
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        with pytest.raises(PeftlabError, match="No space left"):
            merge_checkpoint(adapter, base, small / "out")
        assert not list(small.iterdir())
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.skipif(not hasattr(os, "fdatasync"), reason="this system has another call for it")
def test_a_disk_that_fails_after_the_last_write(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write fills the system's memory; the disk's error comes when that is flushed."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    base, adapter = parts
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(PeftlabError, match=r"out: cannot be written \(Input/output error\); nothing"):
        merge_checkpoint(adapter, base, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


def test_read_only_base(parts: tuple[Path, Path], tmp_path: Path) -> None:
    """The base's files are opened for reading alone, and neither bytes nor times change."""
    base, adapter = parts
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in base.iterdir()}
    opened: list[tuple[str, int]] = []
    watching = True

    def hook(event: str, args: tuple) -> None:
        if watching and event == "open" and str(args[0]).startswith(str(base)):
            opened.append((str(args[0]), args[2] or 0))

    sys.addaudithook(hook)
    merge_checkpoint(adapter, base, tmp_path / "out")
    watching = False
    assert len(opened) > len(weight_files(base))
    assert not [name for name, flags in opened if flags & (os.O_WRONLY | os.O_RDWR)]
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in base.iterdir()} == before


def _refused(adapter: Path, base: Path, out: Path, words: str, options: MergeOptions | None = None) -> None:
    there = sorted(out.parent.iterdir())
    with pytest.raises(PeftlabError, match=words):
        merge_checkpoint(adapter, base, out, options)
    assert sorted(out.parent.iterdir()) == there


def test_outputs_that_are_refused(parts: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = parts
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    _refused(adapter, base, tmp_path / "there", "exists already")
    for out in (base, base / "inside", tmp_path):
        with pytest.raises(PeftlabError, match="is, is inside or contains the base"):
            merge_checkpoint(adapter, base, out, MergeOptions(overwrite=True))
    (tmp_path / "link").symlink_to(base)
    with pytest.raises(PeftlabError, match="is, is inside or contains the base"):
        merge_checkpoint(adapter, base, tmp_path / "link" / "x")
    assert weight_files(base)


def test_adapters_that_are_refused(parts: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = parts
    file = adapter / "adapter_model.safetensors"
    good = load_file(file)
    first = next(iter(good))
    for change, words in (
        ({first: None}, "not in the file"),
        (
            {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(8, 32)},
            "has no model.layers.9.self_attn.q_proj .did you mean",
        ),
        ({first: torch.ones(8, 31)}, "has shape"),
        ({first: torch.full_like(good[first], float("nan"))}, "NaN or infinity"),
        ({"other.lora_A.weight": torch.ones(1)}, "other.lora_A.weight"),
    ):
        tensors = {key: tensor for key, tensor in (good | change).items() if tensor is not None}
        save_file(tensors, file, metadata={"format": "pt"})
        _refused(adapter, base, tmp_path / "out", words)
    save_file(good, file, metadata={"format": "pt"})
    merge_checkpoint(adapter, base, tmp_path / "out")


def test_bases_that_are_refused(parts: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = parts
    other = save_base(build("gpt2"), tmp_path / "gpt2")
    _refused(adapter, other, tmp_path / "out", "was trained on 'llama'")
    config = json.loads((base / "config.json").read_text())
    for method in ("bitsandbytes", "gptq", "awq"):
        quantised = config | {"quantization_config": {"quant_method": method, "bits": 4}}
        (base / "config.json").write_text(json.dumps(quantised))
        options = MergeOptions(into="original")
        _refused(adapter, base, tmp_path / "out", f"stored quantised .{method}.*--into dequantised", options)
    (base / "config.json").write_text(json.dumps(config))
    shard = next(p for p in sorted(base.iterdir()) if p.suffix == ".safetensors")
    whole = load_file(shard)
    gone = next(iter(whole))
    shard.rename(tmp_path / "moved")
    _refused(adapter, base, tmp_path / "out", "missing")
    raw = (tmp_path / "moved").read_bytes()
    shard.write_bytes(raw[:-4])
    _refused(adapter, base, tmp_path / "out", "truncated")
    index = json.loads((base / "model.safetensors.index.json").read_text())
    del index["weight_map"][gone]
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({key: tensor for key, tensor in whole.items() if key != gone}, shard)
    _refused(adapter, base, tmp_path / "out", f"lack 1 tensors.*{gone}")


def test_nonfinite_base(tmp_path: Path) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = float("inf")
    base = save_base(model, tmp_path / "base")
    adapter = adapt(load(type(model), base), tmp_path / "adapter")
    _refused(adapter, base, tmp_path / "out", "q_proj.weight: 1 merged weights are NaN or infinite")
    report = merge_checkpoint(adapter, base, tmp_path / "out", MergeOptions(allow_nonfinite=True))
    assert sum(row.nonfinite for row in report.tensors) == 1


def test_overflow_in_the_stored_dtype(tmp_path: Path) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = 1e5
    base = save_base(model, tmp_path / "base")
    adapter = adapt(load(type(model), base), tmp_path / "adapter")
    with pytest.raises(PeftlabError, match="1 merged weights are NaN or infinite"):
        merge_checkpoint(adapter, base, tmp_path / "out", MergeOptions(dtype=torch.float16))


def test_houlsby_has_no_fold(tmp_path: Path) -> None:
    base = save_base(build("bert"), tmp_path / "base")
    adapter = adapt(load(type(build("bert")), base), tmp_path / "adapter", "houlsby", bottleneck=4)
    _refused(adapter, base, tmp_path / "out", "no linear fold.*load_adapter")
