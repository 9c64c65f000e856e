"""Values that no careful writer would put into a file, and how they are written out."""

from __future__ import annotations

import json
import random
from typing import Any

import hypothesis
from hypothesis import strategies as st

# Texts that `spelled` replaces by what no JSON writer would write: deep nesting, very long and non-finite numbers.
_SPELLINGS = {
    "@list@": "[" * 3000 + "]" * 3000,
    "@mapping@": '{"a":' * 3000 + "1" + "}" * 3000,
    "@digits@": "9" * 4400,
    "@exponent@": "1e400",
    "@nan@": "NaN",
    "@infinity@": "-Infinity",
    "@plus@": "Infinity",
    "@surrogate@": '"\\ud800"',
}
_SCALARS: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 0.0, -0.0, 0.5, 1e-320, 1e308, 2**31, 2**63, 2**64, 10**6, 10**9, 10**400,
    "", " ", "x", "null", "true", "1", "1e-4", "é", "\u2028", "a\x00b", "x" * 5000, "../../x", "/dev/zero", "~", ".*",
    "(", "(?P<", "([a-z_.0-9]+)+X", "(a|aa)+$", "{{ 1/0 }}", "LORA", "lora", "full", "all-linear", "float32", "int8",
    [], {}, [None], [[]], {"": None}, {"a": 1}, [0], ["query", "query"], [["LlamaForCausalLM"]], [1, "a", None],
]  # fmt: skip
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def drawn(strategy: st.SearchStrategy[Any], rng: random.Random) -> Any:
    """Return one value of a hypothesis strategy that ``rng`` determines."""
    found: list[Any] = []

    @hypothesis.seed(rng.getrandbits(32))
    @hypothesis.settings(max_examples=3, database=None, phases=[hypothesis.Phase.generate])
    @hypothesis.given(strategy)
    def take(value: Any) -> None:
        found.append(value)

    take()
    return found[-1]  # the first is the simplest of all


def value(rng: random.Random) -> Any:
    """Return a hostile JSON value."""
    kind = rng.random()
    if kind < 0.15:
        return rng.choice(list(_SPELLINGS))
    return drawn(_VALUES, rng) if kind < 0.3 else rng.choice(_SCALARS)


def spelled(tree: Any) -> str:
    """Return ``tree`` as JSON text, the named spellings put in."""
    text = json.dumps(tree)
    for name, spelling in _SPELLINGS.items():
        text = text.replace(f'"{name}"', spelling)
    return text
