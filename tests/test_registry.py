"""Tables of rows: names resolved when used, and rows of other distributions."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pytest

from peftlab.errors import PeftlabError
from peftlab.registry import Registry, resolve
from tests.distribution import write_distribution

GROUP = "peftlab.fruits"


@dataclass(frozen=True)
class Fruit:
    """A row."""

    peel: str


APPLE = Fruit("collections:OrderedDict")


def _table() -> Registry[Fruit]:
    return Registry("fruit", GROUP, Fruit, {"apple": APPLE})


def _install(root: Path, name: str, points: dict[str, str], files: dict[str, str] | None = None) -> None:
    write_distribution(root, name, files or {}, {GROUP: points})


def test_a_name_is_resolved_to_the_object_once() -> None:
    assert resolve("collections:OrderedDict") is OrderedDict
    assert resolve(APPLE.peel) is OrderedDict


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("collections", "not of the form"),
        (":OrderedDict", "not of the form"),
        ("collections:", "not of the form"),
        ("no_such_package.fruits:ROW", "cannot be imported"),
        ("collections:OrderedDit", r"did you mean 'OrderedDict'\?"),
    ],
)
def test_a_name_of_nothing_is_refused(name: str, reason: str) -> None:
    with pytest.raises(PeftlabError, match=reason):
        resolve(name)


def test_an_unknown_row_names_the_nearest() -> None:
    table = _table()
    assert table["apple"] is table.find("apple") is APPLE
    assert "pear" not in table
    with pytest.raises(PeftlabError, match=r"unknown fruit 'aple' \(did you mean 'apple'\?\); one of apple"):
        table.find("aple")


def test_another_distribution_adds_a_row_read_at_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = _table()
    monkeypatch.syspath_prepend(str(tmp_path))
    row = "from tests.test_registry import Fruit\nPEAR = Fruit('collections:deque')\n"
    _install(tmp_path, "orchard", {"pear": "orchard_rows:PEAR"}, {"orchard_rows.py": row})
    assert "orchard_rows" not in sys.modules
    assert list(table) == ["apple", "pear"]
    assert table["pear"] == Fruit("collections:deque")
    assert len(table) == 2


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ({"apple": "tests.test_registry:APPLE"}, "fruit 'apple' is defined twice: by peftlab and by .* of orchard"),
        ({"pear": "no_such_package:PEAR"}, "fruit 'pear', an entry point of orchard: .*cannot be imported"),
        ({"pear": "tests.test_registry:PEAR"}, "fruit 'pear', an entry point of orchard: .* has no 'PEAR'"),
        ({"pear": "collections:OrderedDict"}, "OrderedDict is a type, not a tests.test_registry.Fruit"),
    ],
)
def test_an_entry_point_that_is_no_new_row_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: dict[str, str], reason: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    _install(tmp_path, "orchard", points)
    with pytest.raises(PeftlabError, match=reason):
        _table().find("apple")


def test_two_distributions_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("orchard", "plantation"):
        _install(tmp_path, name, {"pear": "tests.test_registry:APPLE"})
    with pytest.raises(PeftlabError, match=r"'pear' is defined twice: by orchard and by .* of plantation"):
        len(_table())
