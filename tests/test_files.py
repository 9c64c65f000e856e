"""Files: one clear error for every mistake in JSON, and for whatever a full disk raises."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from peftlab.errors import PeftlabError
from peftlab.files import member, parse_json, read_json, read_object, replacing, to_json, write_text
from peftlab.outputs import staged_directory


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
    assert member(values, "r", int, "x.json") == 8 and member(values, "names", list, "x.json") == ["a"]
    with pytest.raises(PeftlabError, match=r"x\.json: flag must be a number, not true or false"):
        member(values, "flag", int, "x.json")
    with pytest.raises(PeftlabError, match=r"x\.json: alpha is missing"):
        member(values, "alpha", int, "x.json")


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
    with pytest.raises(PeftlabError, match=r"^out.txt: cannot be written \(File too large\)$"):
        write_text("out.txt", "x" * 10_000)
    assert [path.name for path in Path().iterdir()] == ["large"]


def test_other_errors_pass_through_a_file_that_is_written(tmp_path: Path) -> None:
    for error in (ValueError("mine"), OSError("Can't load tokenizer"), FileNotFoundError(2, "No such file", "data")):
        with pytest.raises(type(error)) as caught, replacing(tmp_path / "out"):
            raise error
        assert caught.value is error
