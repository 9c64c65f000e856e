"""Regular expressions of others: what ``re`` matches, and no more time than is given."""

from __future__ import annotations

import re
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peftlab.errors import PeftlabError
from peftlab.patterns import MAX_LENGTH, MAX_REPETITIONS, matching

NAMES = [
    "a", "b", "ab", "ba", "layer.1.a", "{", "a{", "{e}", "a{e}", "x{e}", "aa", "", "abc", "]", "[a", "a]", "1", ".", "a}",
    "layer", "A", "layerX", "a\n", "a-b", "[", "&&a", "a{i<=1}", "-", "é", "ß", "ss",
]  # fmt: skip
PIECES = [
    "a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "[[a]", "[]a]", r"[a\]]", "{", "}", "{e}", "{1}", "{,2}", "{0,1}",
    "{i<=1}", "*", "+", "?", "|", "(", ")", "(?:", "layer", "x{", r"\{", "[{]", "$", "^", r"\b", "(?=a)", "(?!b)", r"\1",
    "*?", "+?", "[[:alpha:]]", "[a-c]", r"\Z", r"\A", "(?i)", "&&", "--", "[a--b]", "[a&&b]", "||", r"\N{DIGIT ONE}",
    "(?i:A)", "ß", "(?s:.)",
]  # fmt: skip
MODULES = [f"model.layers.{i}.self_attn.{x}_proj" for i in range(100) for x in "qkvo"]


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join))
def test_what_matches_is_what_re_matches(pattern: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = [name for name in NAMES if re.fullmatch(pattern, name)]
        except re.error:
            with pytest.raises(PeftlabError, match="not a regular expression"):
                matching(pattern, NAMES, what="x")
            return
        assert matching(pattern, NAMES, what="x") == expected


@pytest.mark.parametrize("pattern", [r"([a-z_.0-9]+)+X", r"(.*)*(?=X)", r"(a|a|\w|\.)*[XY]", r"(x+x+)+y"])
def test_nested_repetitions_end(pattern: str) -> None:
    started = time.thread_time()
    assert matching(pattern, MODULES, what="x") == []
    assert time.thread_time() - started < 10


def test_what_takes_too_long_is_an_error() -> None:
    started = time.thread_time()
    with pytest.raises(PeftlabError, match=r"target_modules: matching .* takes more than 2 s"):
        matching(r"(.*?.*?.*?){30}[XZ]", MODULES, what="target_modules")
    assert time.thread_time() - started < 15


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a" * (MAX_LENGTH + 1), "characters"),
        ("((((a{900}){900}){900}){900}){900}", f"more than {MAX_REPETITIONS} repetitions"),
        ("a{" + "9" * 5000 + "}", "not a regular expression"),
        ("a{99999999999}", "not a regular expression"),
        ("(" * 5000 + "a" + ")" * 5000, "not a regular expression|characters"),
        ("(", "not a regular expression"),
        (r"\p{L}", "not a regular expression"),
    ],
)
def test_what_is_not_compiled(pattern: str, message: str) -> None:
    with pytest.raises(PeftlabError, match=f"rank_pattern: .*{message}"):
        matching(pattern, MODULES, what="rank_pattern")
