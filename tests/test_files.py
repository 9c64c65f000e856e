"""Reading JSON with one clear error for every mistake."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from peftlab.errors import PeftlabError
from peftlab.files import member, parse_json, read_json, read_object, to_json


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
