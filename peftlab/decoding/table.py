"""Tables of what a user names as NAME or NAME:X: draft length policies, trees, verifiers, drafters; draft windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from peftlab.errors import PeftlabError, did_you_mean

Value = float | tuple[float, ...]


@dataclass(frozen=True)
class Argument:
    """The argument X of a rule that is written NAME:X.

    Attributes:
        name: for messages. description: what it may be. read: text -> its value, of several numbers a tuple;
            ValueError for another.
        default: its value where it is left out; None is a value as well.
        required: whether it may not be left out.
    """

    name: str
    description: str
    read: Callable[[str], Value]
    default: Value | None = None
    required: bool = False


@dataclass(frozen=True)
class Rule:
    """A named rule of a table.

    Attributes:
        make: ``"module:attribute"`` of its constructor.
        description: what it does, for the command line.
        argument: its X; None: it takes none.
        needs: what it takes, see ``POLICIES``, ``LOSSY`` and ``VERIFIERS``; "" for nothing.
    """

    make: str
    description: str
    argument: Argument | None = None
    needs: str = ""


@dataclass(frozen=True)
class NamedRule:
    """A rule as a user named it.

    Attributes:
        text: what was written. name, row: of the rule. value: its X, the default where it was left out.
    """

    text: str
    name: str
    row: Rule
    value: Value | None


def parse_rule(what: str, rows: Mapping[str, Rule], text: str) -> NamedRule:
    """Return the rule that ``text``, NAME or NAME:X, names.

    Args:
        what: the option, for messages. rows: name -> rule. text: what was written.

    Raises:
        PeftlabError: no such rule, an X that it cannot have, or one where it takes none.
    """
    name, colon, x = text.partition(":")
    if name not in rows:
        forms = ", ".join(_written_form(each, row.argument) for each, row in rows.items())
        raise PeftlabError(f"{what} {text}: one of {forms}{did_you_mean(name, rows)}")
    rule = rows[name]
    if rule.argument is None:
        if colon:
            raise PeftlabError(f"{what} {text}: {name} takes no value")
        return NamedRule(text, name, rule, None)
    if not colon:
        if rule.argument.required:
            form = _written_form(name, rule.argument)
            raise PeftlabError(f"{what} {text}: needs a value, {form}; {rule.argument.description}")
        return NamedRule(text, name, rule, rule.argument.default)
    try:
        return NamedRule(text, name, rule, rule.argument.read(x))
    except ValueError:
        raise PeftlabError(f"{what} {text}: {rule.argument.name} is {rule.argument.description}") from None


def _written_form(name: str, argument: Argument | None) -> str:
    if argument is None:
        return name
    return f"{name}:{argument.name}" if argument.required else f"{name}[:{argument.name}]"


def rule_help(rows: Mapping[str, Rule]) -> str:
    """Return the help text of an option: the forms that may be written and what each does."""
    return "; ".join(f"{_written_form(name, row.argument)}, {row.description}" for name, row in rows.items())


def _number(kind: type[int] | type[float], allowed: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a parser of numbers; it raises ValueError for a text that is no number, or one not allowed."""

    def read(text: str) -> float:
        if not allowed(value := kind(text)):
            raise ValueError
        return value

    return read


def _numbers(*readers: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    """Return a parser of as many numbers, with colons between them; it raises ValueError for other texts."""
    return lambda text: tuple(read(part) for read, part in zip(readers, text.split(":"), strict=True))


_FROM_0 = _number(int, lambda n: n >= 0)
MOST_DRAFTED = 64
"""Tokens that a step drafts at most: caches have as many slots past the longest sequence for those it rejects."""

_FROM_1 = _number(int, lambda n: n >= 1)
_DRAFTED = _number(int, lambda n: 1 <= n <= MOST_DRAFTED)
_FROM_2 = _number(int, lambda n: n >= 2)
_FROM_0_TO_1 = _number(float, lambda x: 0 <= x <= 1)
_BETWEEN_0_AND_1 = _number(float, lambda x: 0 < x < 1)
_NUMBER_AND_SHARE = _numbers(_FROM_1, _BETWEEN_0_AND_1)
_ABOVE_0 = _number(float, lambda x: 0 < x < math.inf)
_ABOVE_1 = _number(float, lambda x: 1 < x < math.inf)

_POLICY = "peftlab.decoding.policies"
DRAWN, HEAD, CHAIN = "probabilities", "acceptance head", "chain"

POLICIES: dict[str, Rule] = {
    "fixed": Rule(
        "peftlab.decoding.decode:fixed",
        "N tokens (default: gamma)",
        Argument("N", f"a whole number from 1 to {MOST_DRAFTED}", _DRAFTED),
    ),
    "confidence": Rule(
        f"{_POLICY}:confidence",
        "up to one that the draft gave less than T (default 0.4)",
        Argument("T", "a probability from 0 to 1", _FROM_0_TO_1, 0.4),
        DRAWN,
    ),
    "heuristic": Rule(f"{_POLICY}:heuristic", "from gamma, 2 more after a step without a rejection, else 1 fewer"),
    "head": Rule(
        f"{_POLICY}:head",
        "until the draft run's acceptance head expects a rejection with H (default 0.7)",
        Argument("H", "a probability from 0 to 1", _FROM_0_TO_1, 0.7),
        HEAD,
    ),
    "goodput": Rule(f"{_POLICY}:goodput", "the most tokens per second by measured step times", needs=CHAIN),
}
"""Name -> rule of draft length. ``make`` is (``decode.PolicyInputs``, X) -> a factory of policies.

``needs``: tokens drawn one after the other from a draft's probabilities; a trained head that reads the states of such a
draft; or a chain, of any kind of draft, whose length measured times decide.
"""


def policy(text: str, gamma: int = MOST_DRAFTED) -> NamedRule:
    """Return the rule of draft length that ``text`` names.

    Args:
        text: what was written. gamma: the most tokens that may be drafted.

    Raises:
        PeftlabError: as for ``parse_rule``, or ``fixed:N`` with an N above ``gamma``.
    """
    rule = parse_rule("policy", POLICIES, text)
    if rule.name == "fixed" and isinstance(rule.value, int) and rule.value > gamma:
        raise PeftlabError(f"policy {text}: drafts more than gamma {gamma}; give gamma {rule.value}")
    return rule


_SAMPLING = "peftlab.decoding.sampling"
_IMAGE_TOKENS = "peftlab.decoding.image_tokens"
EMBEDDING = "token embeddings"

LOSSY: dict[str, Rule] = {
    "typical": Rule(
        f"{_SAMPLING}:typical",
        "drafted tokens of p > min(E, sqrt(E)/exp(entropy)) (default 0.09)",
        Argument("E", "a number between 0 and 1", _BETWEEN_0_AND_1, 0.09),
    ),
    "accept_k": Rule(
        f"{_SAMPLING}:accept_k",
        "drafted tokens among the target's K most probable",
        Argument("K", "a whole number from 2", _FROM_2, required=True),
    ),
    "lantern": Rule(
        f"{_IMAGE_TOKENS}:lantern",
        "image tokens, with the p of the K nearest up to D together",
        Argument("K:D", "a whole number from 1 and a number between 0 and 1", _NUMBER_AND_SHARE, required=True),
        EMBEDDING,
    ),
    "lantern++": Rule(
        f"{_IMAGE_TOKENS}:lantern_plus",
        "the same, up to L times their own p in all",
        Argument("K:L", "a whole number from 1 and a number above 1", _numbers(_FROM_1, _ABOVE_1), required=True),
        EMBEDDING,
    ),
    "gsd": Rule(
        f"{_IMAGE_TOKENS}:GroupedTokens",
        "image tokens by groups of like ones, W ranks of p on each side, at most D apart (default 7:0.5)",
        Argument("W:D", "a whole number from 1 and a number above 0", _numbers(_FROM_1, _ABOVE_0), (7, 0.5)),
        EMBEDDING,
    ),
}
"""Name -> rule of lossy verification. ``make`` is (p [..., V], X) -> which tokens are accepted [..., V].

``needs``: the target's token embeddings. ``make`` is then (embeddings [V, H], X's numbers) -> a ``sampling.Relaxed``.
"""


def lossy(text: str) -> NamedRule:
    """Return the lossy rule that ``text`` names; errors as for ``parse_rule``."""
    return parse_rule("lossy", LOSSY, text)


_TREES = "peftlab.decoding.sampled_trees"
_WIDTH = Argument("W", "a whole number from 2", _FROM_2, required=True)

TREES: dict[str, Rule] = {
    "rsd_c": Rule(f"{_TREES}:rsd_c", "W different first tokens, each continued as a chain", _WIDTH),
    "rsd_s": Rule(f"{_TREES}:rsd_s", "of each length the W first of a stochastic beam", _WIDTH),
    "specinfer": Rule(f"{_TREES}:specinfer", "W independent chains with shared beginnings", _WIDTH),
}
"""Name -> tree drawn from a draft model. ``make`` is X -> a factory of its growth, see ``sampled_trees``."""


def tree(text: str) -> NamedRule:
    """Return the drawn tree that ``text`` names; errors as for ``parse_rule``."""
    return parse_rule("tree", TREES, text)


VERIFIERS: dict[str, Rule] = {
    "traversal": Rule(f"{_SAMPLING}:TRAVERSAL", "chains as a block, trees path by path (default)"),
    "tokens": Rule(f"{_SAMPLING}:TOKENS", "token by token"),
    "kseq": Rule(f"{_TREES}:KSEQ", "independent drafts by K-SEQ", needs="specinfer"),
}
"""Name -> verifier of sampled drafts, a ``sampling.Verifier``. ``needs``: the tree that it verifies."""


def verifier(text: str) -> NamedRule:
    """Return the verifier that ``text`` names; errors as for ``parse_rule``."""
    return parse_rule("verify", VERIFIERS, text)


_MODEL_FREE = "peftlab.decoding.model_free"

MODEL_FREE: dict[str, Rule] = {
    "lookup": Rule(f"{_MODEL_FREE}:lookup", "what followed the last tokens before"),
    "suffix": Rule(f"{_MODEL_FREE}:suffix", "what followed the longest repeated suffix"),
    "recycling": Rule(f"{_MODEL_FREE}:recycling", "a tree of the target's earlier choices"),
    "ngram": Rule(
        f"{_MODEL_FREE}:ngram",
        "counts of N tokens (default 3; 1: unigram, 0: uniform)",
        Argument("N", "a whole number from 0", _FROM_0, 3),
    ),
}
"""Name -> drafter that needs no model. ``make`` is (a corpus or None, X) -> a new drafter."""


def model_free(text: str) -> NamedRule:
    """Return the drafter without a model that ``text`` names; errors as for ``parse_rule``."""
    return parse_rule("drafter", MODEL_FREE, text)


@dataclass(frozen=True)
class Window:
    """The part of a text that a draft sees: the first tokens, which always attract attention, and the last ones.

    They need a cache of constant size, whatever the length of the text (StreamingLLM, Xiao et al. 2023, arXiv
    2309.17453; for drafts LongSpec, Yang et al. 2025, arXiv 2502.17421). Positions stay those of the whole text.

    Attributes:
        sinks: how many of the first. last: how many of the last, a token itself among them.
    """

    sinks: int
    last: int


def window(text: str) -> Window:
    """Return the window that ``text``, SINKS:LAST, names.

    Raises:
        PeftlabError: it is not two whole numbers, or LAST is 0.
    """
    try:
        sinks, last = (int(part) for part in text.split(":"))
    except ValueError:
        sinks, last = -1, 0
    if sinks < 0 or last < 1:
        raise PeftlabError(f"draft_window {text}: SINKS:LAST, two whole numbers such as 4:512, LAST at least 1")
    return Window(sinks, last)
