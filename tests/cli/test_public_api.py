"""The public API: every name of ``peftlab`` exists, is documented, and is declared in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import peftlab

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "api.md"


@pytest.mark.parametrize("name", [name for name in peftlab.__all__ if name != "__version__"])
def test_each_name_is_imported_and_has_a_docstring(name: str) -> None:
    value = getattr(peftlab, name)
    assert value.__module__.startswith("peftlab.") and value.__name__ == name and value.__doc__


def test_the_reference_lists_each_name_once() -> None:
    listed = re.findall(r"^\.\. auto\w+:: peftlab\.(\w+)$", REFERENCE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(peftlab.__all__) - {"__version__"})


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="No peftlab attribute inject_lor"):
        peftlab.inject_lor  # noqa: B018
    assert set(dir(peftlab)) == set(peftlab.__all__)
