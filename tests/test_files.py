"""Files and output directories: errors of JSON and of a full disk, what is never replaced, who holds a directory."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from peftlab.errors import PeftlabError
from peftlab.files import (
    LOCK,
    STAGING_PREFIX,
    Mark,
    claimed,
    contains_path,
    is_locked,
    locked,
    parse_json,
    read_json,
    read_mark,
    read_object,
    record_file,
    refuse_loss,
    remove,
    replacing,
    scratch_directory,
    staged_directory,
    to_json,
    typed_value,
    write_mark,
    write_text,
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "nested too deeply"),
        ("1" * 5_000, "an integer of more than 4,300 digits"),
    ],
)
def test_bad_json_is_a_value_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_pairs_make_the_objects() -> None:
    assert parse_json('{"a": 1, "a": 2}', pairs=lambda pairs: {"pairs": pairs}) == {"pairs": [("a", 1), ("a", 2)]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", r"a\.json:1: not UTF-8"),
        (b'{"a": "\\ud800"}', r"a\.json: not valid JSON \(a string contains half a surrogate pair\)"),
        (b"[", r"a\.json: not valid JSON"),
    ],
)
def test_the_error_names_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(PeftlabError, match=message):
        read_json(tmp_path / "a.json")
    with pytest.raises(PeftlabError, match="no such file"):
        read_json(tmp_path / "b.json")


@pytest.mark.parametrize(("value", "kind"), [([1], "a list"), ("a", "a string"), (None, "null"), (1.5, "a number")])
def test_an_object_is_required(tmp_path: Path, value: object, kind: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(value))
    with pytest.raises(PeftlabError, match=rf"a\.json: must be a JSON object, not {kind}"):
        read_object(tmp_path / "a.json")


def test_a_member_has_its_type() -> None:
    values = {"r": 8, "flag": True, "names": ["a"]}
    assert typed_value(values, "r", int, "x.json") == 8 and typed_value(values, "names", list, "x.json") == ["a"]
    with pytest.raises(PeftlabError, match=r"x\.json: flag must be a number, not true or false"):
        typed_value(values, "flag", int, "x.json")
    with pytest.raises(PeftlabError, match=r"x\.json: alpha is missing"):
        typed_value(values, "alpha", int, "x.json")


@dataclass
class _Score:
    value: float
    split: str | None = None


def test_values_become_jsons() -> None:
    value = {"path": Path("a/b"), "scores": (_Score(0.5), _Score(1.0, "test")), 3: True}
    assert to_json(value) == {
        "path": "a/b",
        "scores": [{"value": 0.5, "split": None}, {"value": 1.0, "split": "test"}],
        "3": True,
    }


def test_what_json_cannot_represent_is_refused_whole() -> None:
    with pytest.raises(TypeError, match="JSON has no value for a set"):
        to_json({"a": 1, "names": {"x"}})


def _write(file: Path) -> None:
    file.write_text("x" * 10_000)


def _save_tokenizer(file: Path) -> None:
    Tokenizer(WordLevel({str(token): token for token in range(1000)}, unk_token="0")).save(str(file))


def _copy(file: Path) -> None:
    shutil.copyfile("large", file)


def _copy_tree(file: Path) -> None:
    shutil.copytree(".", file, ignore=lambda place, names: {name for name in names if name != "large"})


WRITERS: list[Callable[[Path], object]] = [
    _write,
    _save_tokenizer,
    _copy,
    _copy_tree,
    lambda file: save_file({"a": torch.zeros(10_000)}, file),
    lambda file: parquet.write_table(pyarrow.table({"a": list(range(100_000))}), file),
    lambda file: torch.save(torch.zeros(10_000), file),
]


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk, here the current directory, on which no file grows beyond 4 KiB."""
    monkeypatch.chdir(tmp_path)
    _write(Path("large"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_is_said_with_the_path(write: Callable[[Path], object]) -> None:
    """Whatever the library raises: tokenizers a plain Exception, shutil a list, torch and others no name."""
    why = r"\((File too large|.*File too large|.*inline_container.*)\)"
    if write != _copy_tree:
        with pytest.raises(PeftlabError, match=f"^out.file: cannot be written {why}$"), replacing("out.file") as file:
            write(file)
    for path in ("out", "sub/out"):
        with (
            pytest.raises(PeftlabError, match=f"^{path}: cannot be written {why}; nothing was left behind$"),
            staged_directory(path, "model") as staging,
        ):
            write(staging / "part")
        with (
            pytest.raises(PeftlabError, match=f"^{path}: cannot be written .*; nothing was left behind$"),
            staged_directory(path, "model") as staging,
        ):
            write_text(staging / "part.txt", "x" * 10_000)
    with pytest.raises(PeftlabError, match=r"^out.txt: cannot be written \(File too large\)$"):
        write_text("out.txt", "x" * 10_000)
    assert [path.name for path in Path().iterdir()] == ["large"]


def test_a_lock_without_room_leaves_no_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with (
            pytest.raises(PeftlabError, match=r"^out: cannot be written \(File too large\)$"),
            locked(tmp_path / "a" / "lock", "out"),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.rglob("lock"))


def test_other_errors_pass_through_a_file_that_is_written(tmp_path: Path) -> None:
    for error in (ValueError("mine"), OSError("Can't load tokenizer"), FileNotFoundError(2, "No such file", "data")):
        with pytest.raises(type(error)) as caught, replacing(tmp_path / "out"):
            raise error
        assert caught.value is error


RUN = Mark("run", ["results.json", "checkpoints/step-*.pt"])


def model(path: Path, text: str = "weights") -> Path:
    """Write a model directory as a merge does."""
    with staged_directory(path, "model", overwrite=True) as staging:
        (staging / "model[1].safetensors").write_text(text)
        (staging / "additional_chat_templates").mkdir()
        (staging / "additional_chat_templates" / "t.jinja").write_text(text)
    return path


def run(path: Path) -> Path:
    """Write a run directory with a model in it."""
    with claimed(path, RUN, overwrite=True) as claim:
        claim.begin()
        (path / "results.json").write_text("{}")
        (path / "checkpoints").mkdir()
        (path / "checkpoints" / "step-1.pt").write_text("state")
        model(path / "merged")
    return path


def tree(path: Path) -> dict[str, str]:
    return {p.relative_to(path).as_posix(): p.read_text() for p in sorted(path.rglob("*")) if p.is_file()}


def refused(path: Path, words: str, kind: str = "run", **inputs: str | Path | None) -> None:
    """Assert that nothing replaces ``path``, for the reason given, and that it stays as it is."""
    before = tree(path)
    with pytest.raises(PeftlabError, match=words), claimed(path, Mark(kind, []), overwrite=True, inputs=inputs):
        pytest.fail("claimed")
    with pytest.raises(PeftlabError, match=words), staged_directory(path, kind, overwrite=True, inputs=inputs):
        pytest.fail("staged")
    with pytest.raises(PeftlabError, match=words):
        remove(path, kind, inputs)
    assert tree(path) == before


class TestWhatIsReplaced:
    """Only what peftlab wrote."""

    def test_a_result_of_the_same_kind(self, tmp_path: Path) -> None:
        model(tmp_path / "m", "old")
        model(tmp_path / "m", "new")
        assert tree(tmp_path / "m").keys() == {
            "model[1].safetensors",
            "additional_chat_templates/t.jinja",
            "peftlab.json",
        }
        assert (tmp_path / "m" / "model[1].safetensors").read_text() == "new"
        run(tmp_path / "r")
        (tmp_path / "r" / "checkpoints" / f"{STAGING_PREFIX}0-step-2.pt").write_text("half")
        with claimed(tmp_path / "r", RUN, overwrite=True) as claim:
            assert "results.json" in tree(tmp_path / "r"), "nothing goes before it is known that the new run fits"
            claim.begin()
        assert tree(tmp_path / "r").keys() == {"peftlab.json"}
        remove(tmp_path / "r", "run")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]

    def test_a_kill_while_an_earlier_run_is_removed_leaves_no_torn_model(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run(tmp_path / "r")
        whole = tree(tmp_path / "r" / "merged")

        def killed(path: Path) -> None:
            next(file for file in Path(path).rglob("*") if file.is_file()).unlink()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, claimed(tmp_path / "r", RUN, overwrite=True) as claim:
            patch.setattr(shutil, "rmtree", killed)
            with pytest.raises(KeyboardInterrupt):
                claim.begin()
        assert not (tmp_path / "r" / "merged").exists() or tree(tmp_path / "r" / "merged") == whole
        assert not (tmp_path / "r" / "checkpoints").exists() or len(tree(tmp_path / "r" / "checkpoints")) == 1
        with claimed(tmp_path / "r", RUN, overwrite=True) as claim:
            claim.begin()
        assert {path.name for path in (tmp_path / "r").rglob("*")} <= {"peftlab.json", LOCK}

    def test_who_asks_whether_a_run_is_locked_refuses_no_start(self, tmp_path: Path) -> None:
        run(tmp_path / "r")
        file = tmp_path / "r" / LOCK
        with locked(file, "r"):
            assert is_locked(tmp_path / "r")
        asking = os.open(file, os.O_RDWR | os.O_CREAT)
        assert filelock.lock_descriptor(asking, blocking=False)
        answered = threading.Timer(0.05, os.close, [asking])
        answered.start()
        with locked(file, "r"):
            answered.join()

    def test_a_kill_between_the_two_renames_loses_no_model(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = tree(model(tmp_path / "m"))
        place, replace = tmp_path / "m", os.replace

        def killed(source: Path, target: Path) -> None:
            if Path(source).name == "new":
                raise KeyboardInterrupt
            if Path(source).name == "old":
                return  # a process that is killed restores nothing
            replace(source, target)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "replace", killed)
            patch.setattr(shutil, "rmtree", lambda *given, **options: None)
            with staged_directory(place, "model", overwrite=True) as staging:
                (staging / "config.json").write_text("{}")
        assert not place.exists()
        with pytest.raises(RuntimeError), staged_directory(place, "model", overwrite=True):
            raise RuntimeError
        assert tree(place) == before

    def test_not_unasked(self, tmp_path: Path) -> None:
        with pytest.raises(PeftlabError, match="m exists already; choose another directory or pass --overwrite"):
            refuse_loss(model(tmp_path / "m"), "model", overwrite=False)
        with pytest.raises(PeftlabError, match="r exists already; resume it"):
            refuse_loss(run(tmp_path / "r"), "run", overwrite=False, advice="resume it")

    def test_what_others_wrote(self, tmp_path: Path) -> None:
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "thesis.tex").write_text("three years")
        refused(tmp_path / "thesis", "was not written by peftlab .it has no peftlab.json")
        (tmp_path / "thesis" / "peftlab.json").write_text('{"kind": "run", "files": "*"}')
        refused(tmp_path / "thesis", "was not written by peftlab")

    @pytest.mark.parametrize("kind", ["run", "model"])
    @pytest.mark.parametrize("forged", ["thesis.tex", "*", "[!x]*", "*.tex", "./thesis.tex"])
    def test_what_a_forged_mark_lists(self, tmp_path: Path, kind: str, forged: str) -> None:
        """A list names files that peftlab writes; whatever else it names stays where it is."""
        (tmp_path / "thesis.tex").write_text("three years")
        write_mark(tmp_path, Mark(kind, [forged, "config.json", "results.json"]))
        refused(tmp_path, r"contains thesis\.tex, which peftlab did not write", kind)

    @pytest.mark.parametrize(
        "name",
        ["notes.txt", "checkpoints/best.pt", "merged/notes.txt", "deep/er/x", "merged/additional_chat_templates/y"],
    )
    def test_what_others_added(self, tmp_path: Path, name: str) -> None:
        run(tmp_path / "r")
        (tmp_path / "r" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "r" / name).write_text("mine")
        refused(tmp_path / "r", f"contains {name}, which peftlab did not write")

    def test_another_kind(self, tmp_path: Path) -> None:
        refused(run(tmp_path / "r"), "is a run, not a model", "model")
        refused(model(tmp_path / "m"), "is a model, not a run")

    def test_an_empty_directory_is_free(self, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        model(tmp_path / "m")
        (tmp_path / "r").mkdir()
        run(tmp_path / "r")

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        for overwrite in (False, True):
            with pytest.raises(PeftlabError, match="file exists already and is not a directory"):
                refuse_loss(tmp_path / "file", "run", overwrite=overwrite)

    def test_what_is_added_later_is_recorded(self, tmp_path: Path) -> None:
        model(tmp_path / "m")
        record_file(tmp_path / "m", "tokenizer[1].json")
        (tmp_path / "m" / "tokenizer[1].json").write_text("{}")
        model(tmp_path / "m")

    def test_the_run_is_as_the_user_left_it_when_files_are_added_meanwhile(self, tmp_path: Path) -> None:
        model(tmp_path / "m", "old")
        with (
            pytest.raises(PeftlabError, match=r"contains notes\.txt"),
            staged_directory(tmp_path / "m", "model", overwrite=True) as staging,
        ):
            (staging / "w").write_text("new")
            (tmp_path / "m" / "notes.txt").write_text("mine")
        assert tree(tmp_path / "m")["model[1].safetensors"] == "old"
        assert [p.name for p in tmp_path.iterdir()] == ["m"]


class TestWhatIsProtected:
    """Inputs and the directories one works in, by whatever name."""

    def test_inputs(self, tmp_path: Path) -> None:
        place = run(tmp_path / "r")
        for path in (place, place / "merged", place / "checkpoints" / "step-1.pt", tmp_path / "x" / ".." / "r"):
            (tmp_path / "x").mkdir(exist_ok=True)
            refused(place, "r is or contains the model", **{"the model": path})
        (tmp_path / "link").symlink_to(place / "merged")
        refused(place, "is or contains the model", **{"the model": tmp_path / "link"})
        refuse_loss(place, "run", overwrite=True, inputs={"the model": "roberta-base", "the data": tmp_path, "x": None})

    def test_a_model_of_links_into_the_output(self, tmp_path: Path) -> None:
        place = model(tmp_path / "m")
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "model.bin").symlink_to(place / "model[1].safetensors")
        refused(place, "contains the base", "model", **{"the base": tmp_path / "cache"})

    def test_a_bind_mount(self, tmp_path: Path) -> None:
        place = run(tmp_path / "r")
        (tmp_path / "mounted").mkdir()
        mount = ["mount", "--bind", place / "merged", tmp_path / "mounted"]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("cannot mount here")
        try:
            refused(place, "contains the base", **{"the base": tmp_path / "mounted"})
            refused(place / "merged", "is or contains the base", "model", **{"the base": tmp_path / "mounted"})
            assert contains_path(tmp_path / "mounted", place / "merged" / "new" / "directory")
        finally:
            subprocess.run(["umount", tmp_path / "mounted"], check=True)

    def test_the_current_directory_and_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        place = run(tmp_path / "r")
        monkeypatch.chdir(place / "merged")
        for path in (Path("."), Path("../../r")):
            refused(path, "is or contains the current directory", "model" if path == Path(".") else "run")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(place / "checkpoints"))
        refused(place, "is or contains the home directory")

    def test_a_run_in_an_empty_current_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with claimed(".", RUN) as claim:
            claim.begin()
        assert read_mark(tmp_path) == RUN

    def test_an_output_that_is_a_link(self, tmp_path: Path) -> None:
        """The directory it points to is written; the link stays."""
        model(tmp_path / "disk")
        (tmp_path / "m").symlink_to("disk")
        model(tmp_path / "m", "new")
        assert (tmp_path / "m").is_symlink() and (tmp_path / "disk" / "model[1].safetensors").read_text() == "new"


def killed(work: Callable[[], None], when: Callable[[], bool]) -> None:
    """Do ``work`` in a process of its own and kill it when ``when`` holds."""
    child = os.fork()
    if child == 0:
        try:
            work()
            time.sleep(60)
        finally:
            os._exit(1)
    until = time.monotonic() + 30
    while not when() and time.monotonic() < until:
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


class TestStaging:
    """Directories that appear complete or not at all."""

    def test_leaves_the_staging_of_others_alone(self, tmp_path: Path) -> None:
        with staged_directory(tmp_path / "m-fr", "model") as staging:
            (staging / "w").write_text("french")
            model(tmp_path / "m")
            model(tmp_path / "m")
        assert tree(tmp_path / "m-fr").keys() == {"w", "peftlab.json"}
        assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "m-fr"]

    def test_flushes_everything_once_and_before_it_appears(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flushed: list[tuple[str, bool]] = []
        flush = os.fsync

        def noted(descriptor: int) -> None:
            status = os.fstat(descriptor)
            name = next(p for p in (tmp_path, *tmp_path.rglob("*")) if os.path.samestat(p.stat(), status)).name
            flushed.append((name, (tmp_path / "m").exists()))
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", noted)
        with staged_directory(tmp_path / "m", "model") as staging:
            write_text(staging / "a.json", "{}")
            write_text(staging / "in" / "deep" / "b.json", "{}")
            (staging / "weights").write_text("weights")
        inside = ["a.json", "b.json", "deep", "in", "new", "peftlab.json", "weights"]
        assert sorted(flushed) == sorted([(name, False) for name in inside] + [(tmp_path.name, True)])
        flushed.clear()
        write_text(tmp_path / "m" / "a.json", "[]")
        assert [name.endswith("a.json") for name, _ in flushed] == [True, False], "the file, and its directory"

    def test_removes_what_the_dead_left_under_the_same_name(self, tmp_path: Path) -> None:
        def begin(name: str) -> None:
            with staged_directory(tmp_path / name, "model") as staging:
                (staging / "w").write_text("half")
                time.sleep(60)

        for name in ("m", "m-fr", "1-m"):
            killed(lambda name=name: begin(name), lambda name=name: any(tmp_path.glob(f"*-{name}/new/w")))  # type: ignore[misc]
        left = {p.name.split("-", 4)[-1] for p in tmp_path.glob(f"{STAGING_PREFIX}out-*")}
        assert left == {"m", "m-fr", "1-m"}
        model(tmp_path / "m")
        assert {p.name.split("-", 4)[-1] for p in tmp_path.glob(f"{STAGING_PREFIX}out-*")} == {"m-fr", "1-m"}

    def test_of_two_at_once_the_second_is_refused(self, tmp_path: Path) -> None:
        with staged_directory(tmp_path / "m", "model") as staging:
            (staging / "w").write_text("first")
            for overwrite in (False, True):
                with (
                    pytest.raises(PeftlabError, match="m: another process is writing it"),
                    staged_directory(tmp_path / "m", "model", overwrite=overwrite),
                ):
                    pytest.fail("staged")
        assert tree(tmp_path / "m")["w"] == "first"

    @pytest.mark.parametrize("again", [False, True])
    def test_a_staging_directory_that_vanishes(self, tmp_path: Path, again: bool) -> None:
        """Also when something makes it anew, as writing a file does: it would lack what was written before."""
        with (
            pytest.raises(PeftlabError, match=r"m: its staging directory .* was removed"),
            staged_directory(tmp_path / "m", "model") as staging,
        ):
            (staging / "weights").write_text("all of them")
            (staging / "weights").unlink()
            staging.rmdir()
            if again:
                write_text(staging / "README.md", "the rest")
        assert not list(tmp_path.iterdir())

    def test_an_error_leaves_nothing(self, tmp_path: Path) -> None:
        model(tmp_path / "a" / "m", "old")
        for path in (tmp_path / "a" / "m", tmp_path / "b" / "c" / "m"):
            with pytest.raises(OSError, match="full"), staged_directory(path, "model", overwrite=True) as staging:
                (staging / "w").write_text("new")
                raise OSError("full")
        assert tree(tmp_path).keys() == {
            "a/m/model[1].safetensors",
            "a/m/additional_chat_templates/t.jinja",
            "a/m/peftlab.json",
        }
        assert not (tmp_path / "b").exists()

    def test_from_within_the_output(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model(tmp_path / "out", "old")
        monkeypatch.chdir(tmp_path / "out")
        with pytest.raises(PeftlabError, match="is or contains the current directory"):
            model(Path("../out"), "new")
        assert tree(tmp_path / "out")["model[1].safetensors"] == "old"
        monkeypatch.chdir(tmp_path)
        with staged_directory("out", "model", overwrite=True) as staging:
            (staging / "model[1].safetensors").write_text("new")
            monkeypatch.chdir("/")  # a relative path means what it meant at the start
        assert tree(tmp_path / "out")["model[1].safetensors"] == "new"

    def test_permissions_are_the_users_own(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            model(tmp_path / "m")
        finally:
            os.umask(before)
        assert (tmp_path / "m").stat().st_mode & 0o777 == 0o750


class TestLock:
    """One process a directory."""

    def test_the_second_is_refused_and_changes_nothing(self, tmp_path: Path) -> None:
        with claimed(tmp_path / "r", RUN) as claim:
            for begin in (lambda: None, claim.begin):
                begin()
                before = sorted(p.name for p in (tmp_path / "r").iterdir())
                for options in ({}, {"overwrite": True}):
                    with (
                        pytest.raises(PeftlabError, match="r: another process is writing it"),
                        claimed(tmp_path / "r", RUN, **options),  # type: ignore[arg-type]
                    ):
                        pytest.fail("claimed")
                assert sorted(p.name for p in (tmp_path / "r").iterdir()) == before
            with (
                pytest.raises(PeftlabError, match="another process is writing it"),
                claimed(tmp_path / "r", RUN, resume=True),
            ):
                pytest.fail("claimed")
            with pytest.raises(PeftlabError, match="another process is writing it"):
                remove(tmp_path / "r", "run")
        assert [p.name for p in (tmp_path / "r").iterdir()] == ["peftlab.json"]

    def test_it_dies_with_its_owner(self, tmp_path: Path) -> None:
        def work(begin: bool) -> None:
            with claimed(tmp_path / "r", RUN, overwrite=True) as claim:
                if begin:
                    claim.begin()
                (tmp_path / "reached").touch()
                time.sleep(60)

        for begin in (False, True):
            killed(lambda begin=begin: work(begin), (tmp_path / "reached").exists)  # type: ignore[misc]
            (tmp_path / "reached").unlink()
            with claimed(tmp_path / "r", RUN, overwrite=begin) as claim:  # killed before it began: nothing to lose
                claim.begin()
            remove(tmp_path / "r", "run")

    def test_a_start_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no such model"), claimed(tmp_path / "a" / "b" / "r", RUN):
            raise ValueError("no such model")
        assert not list(tmp_path.iterdir())
        before = tree(run(tmp_path / "r"))
        with pytest.raises(ValueError, match="no such model"), claimed(tmp_path / "r", RUN, overwrite=True):
            raise ValueError("no such model")
        assert tree(tmp_path / "r") == before

    def test_only_our_runs_are_resumed(self, tmp_path: Path) -> None:
        (tmp_path / "recipe.yaml").write_text("model: m\n")
        for path, words in ((tmp_path, "not a run that peftlab wrote"), (model(tmp_path / "m"), "a model, not a run")):
            before = tree(path)
            with pytest.raises(PeftlabError, match=words), claimed(path, RUN, resume=True):
                pytest.fail("claimed")
            assert tree(path) == before

    @pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK"])
    def test_processes_of_one_launch_do_not_refuse_each_other(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setenv(name, "0")
        with claimed(tmp_path / "r", RUN) as claim:
            claim.begin()
            monkeypatch.setenv(name, "1")
            with claimed(tmp_path / "r", RUN), claimed(tmp_path / "r", RUN, resume=True):
                pass
            monkeypatch.setenv(name, "0")
            with pytest.raises(PeftlabError, match="another process"), claimed(tmp_path / "r", RUN, resume=True):
                pytest.fail("claimed")

    def test_a_directory_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(PeftlabError, match="r: cannot be written"), claimed(tmp_path / "file" / "r", RUN):
            pytest.fail("claimed")
        with pytest.raises(PeftlabError, match="m: cannot be written"):
            model(tmp_path / "file" / "m")

    def test_a_system_without_locks_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(descriptor: int, *, blocking: bool) -> bool:
            raise OSError(errno.ENOSYS, "no fcntl")

        monkeypatch.setattr(filelock, "lock_descriptor", refuse)
        (tmp_path / f"{STAGING_PREFIX}out-01234567-m").mkdir()
        model(tmp_path / "m")
        assert "this system has no file locks (no fcntl)" in capsys.readouterr().err
        assert (tmp_path / f"{STAGING_PREFIX}out-01234567-m").exists(), "whether its owner lives is not known"

    def test_many_take_turns(self, tmp_path: Path) -> None:
        """Eight processes take and give back one lock that is removed each time; never do two hold it."""
        held = tmp_path / "held"
        children = []
        for _ in range(8):
            children.append(os.fork())
            if children[-1] == 0:
                status, turns, until = 1, 0, time.monotonic() + 30
                while turns < 20 and time.monotonic() < until:
                    try:
                        with locked(tmp_path / "lock" / "file", "x"):
                            held.mkdir()
                            held.rmdir()
                            turns += 1
                            status = 0 if turns == 20 else 1
                    except PeftlabError:
                        pass
                    except OSError:
                        os._exit(2)
                os._exit(status)
        assert [os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in children] == [0] * 8
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_scratch_directories_are_removed(tmp_path: Path) -> None:
    with scratch_directory(tmp_path / "m", "base") as first, scratch_directory(tmp_path / "m", "out") as second:
        assert first != second and not [*first.iterdir(), *second.iterdir()]
        with pytest.raises(PeftlabError, match="another process"), scratch_directory(tmp_path / "m", "base"):
            pytest.fail("a second one")
    assert not list(tmp_path.iterdir())


def test_marks(tmp_path: Path) -> None:
    write_mark(tmp_path, RUN)
    assert read_mark(tmp_path) == RUN
    for text in ("", "[]", "{", '{"kind": 1, "files": []}', '{"kind": "run"}', '{"kind": "run", "files": [1]}'):
        (tmp_path / "peftlab.json").write_text(text)
        assert read_mark(tmp_path) is None
