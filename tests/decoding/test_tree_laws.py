"""Drawn trees and their verifiers by exact enumeration: the output's law is p, and whole paths accept no less."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import pytest
import torch
from scipy.stats import chi2

from peftlab.decoding.sampled_trees import KSEQ, Chains, StochasticBeam, draw_drafts
from peftlab.decoding.sampling import RandomSource, one_hot
from peftlab.decoding.verify import TOKENS, TRAVERSAL, verify_block

VERIFIERS = {"tokens": TOKENS.tree, "traversal": TRAVERSAL.tree, "kseq": KSEQ.tree}


def accepted(law):
    return math.fsum(weight * (len(emitted) - 1) for emitted, weight in law.items())


def verified(target, paths, tokens, rows, random, verify):
    """What is emitted for a tree; ``paths`` are its nodes' tokens from the root on."""
    place = {-1: ()} | dict(enumerate(paths))
    parents = [paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths]
    p = torch.stack([target(place[node]) for node in range(-1, len(paths))])
    path, token = verify(p, rows, torch.tensor(tokens), parents, random)
    return (*(tokens[node] for node in path), token)


def drawn(growth, draft, size, random):
    """Grow a tree of ``size`` nodes; return their paths, tokens and what they were drawn from."""
    paths, tokens, rows, last = [], [], [], [()]
    while len(paths) < size:
        level = growth.level(torch.stack([draft(path) for path in last])[None], random)
        last = [(*last[k], x) for k, x in zip(level.above[0].tolist(), level.tokens[0].tolist(), strict=True)]
        paths, tokens, rows = paths + last, tokens + level.tokens[0].tolist(), [*rows, *level.drawn_from[0]]
    return paths[:size], tokens[:size], torch.stack(rows[:size])


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("replacement", [True, False], ids=["specinfer", "rsd_c"])
@pytest.mark.parametrize(
    ("vocab", "width", "size", "zeros"), [(2, 2, 4, False), (2, 3, 5, False), (3, 2, 3, False), (3, 2, 4, True)]
)
def test_chains_with_shared_beginnings(
    enumerate_law, model, assert_follows, vocab, width, size, zeros, replacement, verify
):
    target, draft = model(vocab, 2, zeros), model(vocab, 3, zeros)

    def step(random):
        tree = drawn(Chains(width, replacement), draft, size, random)
        return verified(target, *tree, random, VERIFIERS[verify])

    law = enumerate_law(step)
    assert_follows(law, target, max(map(len, law)))


def beams(draft, width, size):
    """Law of the paths of a stochastic beam's nodes.

    Whole sequences are drawn one after the other, without replacement. A beam has of each length the first that are
    different: where the largest Gumbel of a node is its parent's, all of them are those of the sequences.
    """
    levels, law = [], defaultdict(float)
    while sum(levels) < size:
        levels.append(min(width, (levels or [1])[-1] * draft.vocab))
    sequences = {leaf: weight for leaf, weight in draft.sequences(len(levels)).items() if weight > 0}

    def follow(order, weight):
        found = [[*dict.fromkeys(leaf[:n] for leaf in order)] for n in range(1, len(levels) + 1)]
        if all(len(of) >= count for of, count in zip(found, levels, strict=True)):
            paths = [path for of, count in zip(found, levels, strict=True) for path in of[:count]]
            law[tuple(paths[:size])] += weight
            return
        left = 1 - math.fsum(sequences[leaf] for leaf in order)
        for leaf in sequences.keys() - {*order}:
            follow([*order, leaf], weight * sequences[leaf] / left)

    follow([], 1.0)
    return law


def without_elders(draft, paths):
    rows = [draft(path[:-1]).clone() for path in paths]
    for i, path in enumerate(paths):
        for elder in paths[:i]:
            if elder[:-1] == path[:-1]:
                rows[i][elder[-1]] = 0
    return torch.stack([row / row.sum() for row in rows])


@pytest.mark.parametrize("verify", ["tokens", "traversal"])
@pytest.mark.parametrize(("vocab", "width", "size"), [(2, 2, 4), (2, 3, 5), (3, 2, 4)])
def test_a_stochastic_beam_follows_the_target_exactly(enumerate_law, model, assert_follows, vocab, width, size, verify):
    target, draft = model(vocab, 2), model(vocab, 3)
    law = defaultdict(float)
    for paths, weight in beams(draft, width, size).items():
        tokens, rows = [path[-1] for path in paths], without_elders(draft, paths)
        outcomes = enumerate_law(lambda c, t=(paths, tokens, rows): verified(target, *t, c, VERIFIERS[verify]))
        for emitted, share in outcomes.items():
            law[emitted] += weight * share
    assert_follows(law, target, max(map(len, law)))


@pytest.mark.parametrize(("vocab", "width", "size"), [(2, 3, 5), (3, 2, 4)])
def test_a_stochastic_beam_is_drawn_by_its_law(model, vocab, width, size):
    draft, count, growth = model(vocab, 3), 3000, StochasticBeam(width)
    random, rows, last = RandomSource(torch.Generator().manual_seed(1)), [[] for _ in range(count)], [[()]] * count
    while len(rows[0]) < size:
        laws = {path: draft(path) for path in {path for row in last for path in row}}
        level = growth.level(torch.stack([torch.stack([laws[path] for path in row]) for row in last]), random)
        places = zip(last, level.above.tolist(), level.tokens.tolist(), strict=True)
        last = [[(*row[k], x) for k, x in zip(above, tokens, strict=True)] for row, above, tokens in places]
        for row, new, own in zip(rows, last, level.drawn_from, strict=True):
            assert torch.allclose(own, without_elders(draft, new), atol=1e-12)
            row += new
    law, counts = beams(draft, width, size), Counter(tuple(row[:size]) for row in rows)
    assert counts.keys() <= law.keys()
    common = [paths for paths, weight in law.items() if weight * count >= 5]
    statistic = sum((counts[paths] - law[paths] * count) ** 2 / (law[paths] * count) for paths in common)
    assert chi2.sf(statistic, len(common) - 1) > 1e-3


def branched(target, draft, widths, replacement, verify, random):
    """A tree with as many children per level, which share no beginnings."""
    paths, parents, rows, last = [], [], [], [-1]
    for width in widths:
        above, last = last, []
        for parent in above:
            prefix = paths[parent] if parent >= 0 else ()
            drafted, laws = draw_drafts(draft(prefix), width, random, replacement)
            last += range(len(paths), len(paths) + width)
            paths += [(*prefix, x) for x in drafted.tolist()]
            parents, rows = parents + [parent] * width, [*rows, laws]
    tokens = [path[-1] for path in paths]
    p = torch.stack([target(path) for path in [(), *paths]])
    accepted, token = verify(p, torch.cat(rows), torch.tensor(tokens), parents, random)
    return (*(tokens[node] for node in accepted), token)


@pytest.mark.parametrize(
    ("widths", "replacement", "vocab"),
    [((1, 1), False, 3), ((2, 1), False, 3), ((1, 2), False, 3), ((2, 2), True, 2)],
)
def test_whole_paths_accept_more_than_token_by_token(enumerate_law, model, assert_follows, widths, replacement, vocab):
    gains = []
    for seed in (0, 1):
        target, draft = model(vocab, 2 * seed, vocab > 2), model(vocab, 2 * seed + 1, vocab > 2)
        laws = [
            enumerate_law(lambda c, t=target, d=draft, v=verify: branched(t, d, widths, replacement, v, c))
            for verify in (TRAVERSAL.tree, TOKENS.tree)
        ]
        assert_follows(laws[0], target, max(map(len, laws[0])))
        gains.append(accepted(laws[0]) - accepted(laws[1]))
    assert min(gains) > -1e-12 and max(gains) > 1e-3


def test_on_a_chain_it_is_block_verification(enumerate_law, model):
    p, q = torch.stack([model(3, i)() for i in range(4)]), torch.stack([model(3, 7 + i)() for i in range(3)])
    tokens = torch.tensor([2, 0, 1])

    def step(random):
        path, token = TRAVERSAL.tree(p, q, tokens, [-1, 0, 1], random)
        return len(path), token

    block = enumerate_law(lambda c: tuple(int(x) for x in verify_block(p, q, tokens, c)))
    assert enumerate_law(step) == pytest.approx(block, abs=1e-14)


def test_of_certain_candidates_whole_paths_accept_as_many(enumerate_law, model):
    """Such trees are verified token by token by default."""
    p, tokens = torch.stack([model(3, i)() for i in range(6)]), torch.tensor([0, 1, 2, 0, 1])
    laws = [
        enumerate_law(lambda c, v=verify: v(p, one_hot(tokens, p), tokens, [-1, -1, 0, 0, 1], c)[0].__len__())
        for verify in (TRAVERSAL.tree, TOKENS.tree)
    ]
    means = [math.fsum(length * weight for length, weight in law.items()) for law in laws]
    assert means[0] == pytest.approx(means[1], abs=1e-12)


def test_padding_of_a_tree_takes_no_number(model):
    p, q = torch.stack([model(3, i)() for i in range(5)]), torch.stack([model(3, 7 + i)() for i in range(4)])
    for verify in VERIFIERS.values():
        alone, padded = (RandomSource(torch.Generator().manual_seed(3)) for _ in range(2))
        one = verify(p[:3], q[:2], torch.tensor([1, 2]), [-1, 0], alone)
        assert one == verify(p, q, torch.tensor([1, 2, -1, -1]), [-1, 0, 1, -1], padded)
        assert torch.equal(alone.generator.get_state(), padded.generator.get_state())
