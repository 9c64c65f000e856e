"""A run's copy at a URL can be continued wherever the machine that writes it is lost."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from peftlab.errors import PeftlabError
from peftlab.files import Mark, write_mark
from peftlab.pipelines.directory import RUN
from peftlab.references import local_copy
from peftlab.remote import Mirror, mirrored

URL = "ending://bucket/run"
LAST = 4  # pushes of a run: its start, two checkpoints, its end


class Killed(BaseException):
    """The process is gone: nothing catches this."""


class Ending(MemoryFileSystem):
    """Memory that kills whoever writes it after so many uploads and removals."""

    protocol = "ending"
    left = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("ending://", "memory://"))

    def _count(self) -> None:
        if Ending.left == 0:
            raise Killed
        Ending.left -= 1

    def put_file(self, lpath: str, rpath: str, **options: object) -> None:
        self._count()
        super().put_file(lpath, rpath, **options)

    def rm_file(self, path: str) -> None:
        self._count()
        super().rm_file(path)


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    fsspec.register_implementation("ending", Ending, clobber=True)
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


def write(directory: Path, push: int, seed: str = "") -> None:
    """Make a directory what a run has made of it before one of its pushes; the seed is in every file."""
    (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    if push == 0:
        write_mark(directory, RUN)
        (directory / "recipe.yaml").write_text(f"recipe{seed}")
    elif push < LAST - 1:
        (directory / "metrics.jsonl").write_text(f"{seed}line\n" * push)
        (directory / "checkpoints" / f"step-0000000{push}.pt").write_text(json.dumps([push, seed]))
        (directory / "checkpoints" / f"step-0000000{push - 1}.pt").unlink(missing_ok=True)
    else:
        for name in ("model.safetensors", "config.json"):
            (directory / "adapter").mkdir(exist_ok=True)
            (directory / "adapter" / name).write_text(f"{name}{seed}" + "." * (directory / "results.json").exists())
        write_mark(directory / "adapter", Mark("adapter", ["model.safetensors", "config.json"]))
        (directory / "results.json").write_text(f"results{seed}")


def run(*, resume: bool, seed: str = "") -> None:
    """Do what a run does, from the checkpoint that there is."""
    with mirrored(URL, RUN, overwrite=True, resume=resume, advice="") as (mirror, place):
        assert isinstance(mirror, Mirror)
        begun = sorted(place.glob("checkpoints/*.pt"))
        first = json.loads(begun[-1].read_text())[0] if begun else 0
        write(place, 0, seed)
        for push in range(first, LAST):
            if push:
                write(place, push, seed)
            mirror.push()


def check(place: Path, seed: str) -> None:
    """Check that a directory is a run of one seed that can be continued, and what is said to be complete is."""
    files = {path.relative_to(place).as_posix(): path.read_text() for path in place.rglob("*") if path.is_file()}
    checkpoints = sorted(name for name in files if name.startswith("checkpoints/"))
    if checkpoints:
        newest, of = json.loads(files[checkpoints[-1]])
        assert of == seed and files["recipe.yaml"] == f"recipe{seed}"
        assert files["metrics.jsonl"].startswith(f"{seed}line\n" * newest)
    if "adapter/peftlab.json" in files:
        assert {files["adapter/model.safetensors"].rstrip("."), files["adapter/config.json"].rstrip(".")} == {
            f"model.safetensors{seed}", f"config.json{seed}"
        } and files["adapter/model.safetensors"].count(".") == files["adapter/config.json"].count(".")  # fmt: skip
    if "results.json" in files:
        assert "adapter/peftlab.json" in files


def operations(*, replaced: bool, resumed: bool) -> int:
    """Return how many uploads and removals the run takes."""
    Ending.left = 10**6
    prepare(replaced, resumed)
    Ending.left = 10**6
    run(resume=resumed, seed="new" if replaced else "")
    return 10**6 - Ending.left


def prepare(replaced: bool, resumed: bool) -> None:
    MemoryFileSystem.store.clear()
    if replaced or resumed:
        run(resume=False)


@pytest.mark.parametrize(("replaced", "resumed"), [(False, False), (True, False), (False, True)])
def test_killed_after_each_operation(replaced, resumed, tmp_path, monkeypatch):
    """A new run, one that replaces another, and a finished one whose end is repeated: killed, then seen from another machine."""
    monkeypatch.setenv("PEFTLAB_CACHE", str(tmp_path / "first"))
    total = operations(replaced=replaced, resumed=resumed)
    assert total > 8
    for left in range(total):
        monkeypatch.setenv("PEFTLAB_CACHE", str(tmp_path / f"{left}"))
        Ending.left = 10**6
        prepare(replaced, resumed)
        Ending.left = left
        seed = "new" if replaced else ""
        with pytest.raises(Killed):
            run(resume=resumed, seed=seed)
        Ending.left = 10**6
        names = fsspec.filesystem("memory").find("/bucket/run")
        if "/bucket/run/recipe.yaml" not in names:
            assert not any("step-" in name for name in names)  # nothing can be taken for another run's
            run(resume=False, seed=seed)
        else:
            monkeypatch.setenv("PEFTLAB_CACHE", str(tmp_path / f"{left}-other"))
            first = fsspec.filesystem("memory").cat_file("/bucket/run/recipe.yaml").decode().removeprefix("recipe")
            check(Path(local_copy(URL)), first)
            with mirrored(URL, RUN, overwrite=False, resume=True, advice="") as (_, place):
                check(place, first)
            run(resume=True, seed=first)
        monkeypatch.setenv("PEFTLAB_CACHE", str(tmp_path / f"{left}-last"))
        done = Path(local_copy(URL))
        assert {"results.json", "metrics.jsonl", "recipe.yaml", "adapter"} <= {path.name for path in done.iterdir()}
        assert [name for name in fsspec.filesystem("memory").find("/bucket/run") if "step-" in name] == [
            "/bucket/run/checkpoints/step-00000002.pt"
        ]


def test_a_full_disk_of_this_machine_is_said_with_its_file(tmp_path, monkeypatch):
    """Downloading is not tried again: the error names the file here, not the one at the URL."""
    monkeypatch.setenv("PEFTLAB_CACHE", str(tmp_path))
    Ending.left = 10**6
    run(resume=False)

    def full(self: Ending, rpath: str, lpath: str, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Ending, "get_file", full)
    with pytest.raises(PeftlabError, match=rf"^{tmp_path}.*: cannot be written \(No space left on device\)$"):
        local_copy(URL)
