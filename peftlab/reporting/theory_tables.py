"""The tables of ``draft plan --theory`` for people."""

from __future__ import annotations

from collections.abc import Sequence

from peftlab.decoding.theory import Theory
from peftlab.reporting.tables.published_drafts import published_theory


def theory_tables(theory: Theory) -> list[tuple[str, list[str], Sequence[Sequence[str]]]]:
    """Return the tables: title, header, rows."""
    gammas = list(dict.fromkeys(row.gamma for row in theory.rows))
    alphas = list(dict.fromkeys(row.alpha for row in theory.rows))
    tokens = {(row.alpha, row.gamma): f"{row.tokens:.2f}" for row in theory.rows}
    expected = [(f"{alpha:.1f}", *(tokens[alpha, gamma] for gamma in gammas)) for alpha in alphas]
    published = published_theory()
    speeds = [
        (f"{row.alpha:.1f}", str(row.gamma), f"{row.operations:.2f}x", *(f"{gain:.2f}x" for gain in row.speedup))
        for row in theory.rows
        if (row.alpha, row.gamma) in published.cells
    ]
    printed = [
        (f"{alpha:.1f}", str(gamma), f"{operations:.2f}x", f"{speed:.2f}x")
        for (alpha, gamma), (operations, speed) in published.cells.items()
    ]
    bounds = [
        (f"{bound.nats:g}", f"{bound.floor:.3f}", f"{bound.low:.3f} to {bound.high:.3f}") for bound in theory.bounds
    ]
    return [
        ("expected tokens per target step", ["alpha", *(f"gamma {gamma}" for gamma in gammas)], expected),
        ("arithmetic and speed", ["alpha", "gamma", "operations", *(f"c = {c:g}" for c in theory.costs)], speeds),
        (f"as published: {published.source}", ["alpha", "gamma", "operations", "c = 0"], printed),
        ("acceptance by divergence per token", ["nats", "KL: at least", "JSD: between"], bounds),
    ]


def theory_facts() -> list[str]:
    """Return what the tables mean, in sentences."""
    return [
        "c is the time of a draft step by that of a target step. Verifying several tokens is taken to cost what one "
        "does, and each token to be accepted with the same alpha; draft plan --target measures c and verification",
        "KL is the divergence of draft and target in either direction, JSD the Jensen-Shannon divergence, of one token "
        "or on average; the acceptance is that of sampling from the two",
    ]
