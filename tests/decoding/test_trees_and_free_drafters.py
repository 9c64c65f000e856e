"""Trees, drafters without a model, and draft length policies, each on its own."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peftlab.decoding.cache import Block, Output, depths_of, shape_of
from peftlab.decoding.decode import Fixed, Proposal, Row, TargetState, Verified
from peftlab.decoding.model_free import END, NGramDrafter, PromptLookup, SuffixAutomaton, TokenRecycling
from peftlab.decoding.policies import AcceptanceHead, Confidence, Heuristic
from peftlab.decoding.sampling import Sampling, walk_greedy
from peftlab.decoding.theory import RankRates, best_tree, parents_of, rank_probability, reach_probabilities


def row(tokens, place=0):
    return Row(place, place, list(tokens), len(tokens), Fixed(4), torch.Generator())


def started(drafter, *rows, vocab=50):
    drafter.start(list(rows), TargetState(None, [None] * len(rows), vocab, Sampling()))
    return drafter


@given(size=st.integers(1, 12), depth=st.integers(1, 4), width=st.integers(1, 3))
def test_best_tree_is_the_best(size, depth, width):
    tree = best_tree(size, depth, width)
    paths = [p for d in range(1, depth + 1) for p in product(range(width), repeat=d)]

    def score(path):
        return torch.tensor([rank_probability(d, r) for d, r in enumerate(path)], dtype=torch.float64).prod()

    assert len(tree) == len(set(tree)) == min(size, len(paths))
    best = sorted((score(path) for path in paths), reverse=True)[: len(tree)]
    torch.testing.assert_close(torch.stack([score(path) for path in tree]), torch.stack(best))
    assert all(len(path) == 1 or path[:-1] in tree[:i] for i, path in enumerate(tree))
    assert best_tree(size + 1, depth, width)[: len(tree)] == tree


def test_a_tree_of_measured_rates():
    """Counts to rates, rates to the tree: head 2 is good at its second choice, head 1 only at its first."""
    rates = RankRates.counted([[60, 5, 9], [30, 29, 1]], [99, 59])
    assert rates.rates == ((0.605, 0.055, 0.055), (30.5 / 60, 29.5 / 60, 1.5 / 60))  # a later rank is never better
    tree = best_tree(4, 2, rates.width, rates)
    assert tree == ((0,), (0, 0), (0, 1), (1,))
    assert reach_probabilities(tree, rates) == pytest.approx([0.605, 0.605 * 30.5 / 60, 0.605 * 29.5 / 60, 0.055])
    assert RankRates.counted([[0, 0]], [0]).rates == ((0.5, 0.5),)


def test_shapes_of_trees():
    parents = parents_of(((0,), (0, 0), (1,), (0, 0, 0), (1, 0)))
    assert parents == (-1, 0, -1, 1, 2) and depths_of(parents) == [1, 2, 1, 3, 2]
    shape = shape_of([parents, (-1, -1, 1, 0, -1)])
    assert shape.depths.tolist() == [[0, 1, 2, 1, 3, 2], [0, 1, 1, 2, 2, 1]]
    assert shape.of_rows([1]).depths.tolist() == [[0, 1, 1, 2, 2, 1]]
    assert shape.below[1].sum(1).tolist() == [1, 2, 2, 3, 3, 2]
    assert shape.below[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 0, 0, 1, 0, 1],
    ]


def test_a_tree_that_is_a_chain_sees_what_a_chain_sees():
    shape = shape_of([parents_of(best_tree(5, 5, 1))] * 2)
    cpu = torch.device("cpu")
    for starts in ((7, 7), (7, 3)):
        for window in (None, 4, 100):
            as_tree = Block(starts, 6, tree=shape).visible(window, cpu)
            as_chain = Block(starts, 6).visible(window, cpu)
            assert torch.equal(*torch.broadcast_tensors(as_tree, as_chain))


def test_windows_count_positions_and_not_slots():
    shape = shape_of([parents_of(((0,), (1,), (1, 0), (1, 0, 0), (1, 0, 0, 0)))])
    seen = Block((2,), 6, tree=shape).visible(3, torch.device("cpu"))
    assert seen[0, 0].int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0, 0],  # the root, position 2
        [0, 1, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 1, 0, 0, 0],  # in slot 4, but at position 3
        [0, 0, 1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1],  # position 6: 3 behind is out of sight, slot 4 or not
    ]


def test_greedy_walk():
    parents = (-1, -1, 1, 1, 3)
    tokens = (5, 6, 7, 8, 9)
    assert walk_greedy([6, 0, 8, 0, 9, 4], tokens, parents) == ([1, 3, 4], 4)
    assert walk_greedy([6, 0, 1, 0, 9, 4], tokens, parents) == ([1], 1)
    assert walk_greedy([3, 0, 1, 0, 9, 4], tokens, parents) == ([], 3)
    assert walk_greedy([6, 0, 8, 0, 9, 4], (5, 6, 7, -1, -1), parents) == ([1], 8)


def test_lookup_takes_the_longest_and_latest_match():
    one = row([1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3])
    drafter = started(PromptLookup(), one)
    assert drafter.propose([one], [3]).tokens.tolist() == [[4, 9, 2]]  # 1 2 3 beats the later 2 3
    one.tokens = [*one.tokens, 6, 2, 3]
    assert drafter.propose([one], [2]).tokens.tolist() == [[6, 2]]  # of equals the latest
    two = row([4, 4], place=1)
    started(drafter, one, two)
    assert drafter.propose([one, two], [2, 1]).tokens.tolist() == [[6, 2], [4, -1]]


def test_lookup_finds_nothing_in_what_is_new():
    one = row([1, 2, 3])
    assert started(PromptLookup(), one).propose([one], [4]).tokens.shape == (1, 0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 6))
def test_lookup_against_a_plain_search(tokens, budget):
    def search():
        for n in range(min(3, len(tokens)), 0, -1):
            for end in range(len(tokens) - 1, n - 1, -1):
                if tokens[end - n : end] == tokens[-n:]:
                    return tokens[end : end + budget]
        return []

    one = row(tokens)
    assert started(PromptLookup(), one).propose([one], [budget]).tokens.tolist() == [search()]


def test_ngrams_count_and_back_off():
    one = row([1, 2, 3, 1, 2, 3, 1, 2, 4, 7])
    drafter = started(NGramDrafter(order=3), one)
    # 7 was never followed: the most frequent token begins (2; the first token of a text follows nothing), then 3.
    assert drafter.propose([one], [2]).tokens.tolist() == [[2, 3]]
    two = row([9, 1, 2], place=0)
    started(drafter, two)
    assert drafter.propose([two], [3]).tokens.tolist() == [[3, 1, 2]]  # what it learnt before, it knows


@pytest.mark.parametrize(
    ("order", "law"),
    [
        (0, dict.fromkeys(range(10), 1 / 10)),
        (1, {1: 4 / 11, 2: 4 / 11, 3: 2 / 11, 4: 1 / 11}),  # the corpus has 1, 4, 2, 1; the text 2, 3, 1, 2, 3, 1, 2
        (2, {3: 2 / 3, 1: 1 / 3}),  # after 2
        (3, {3: 1.0}),  # after 1, 2
    ],
)
def test_ngrams_are_drawn_from_what_was_counted(order, law):
    corpus = SuffixAutomaton([1, 4, END, 2, 1, END])
    one = row([1, 2, 3, 1, 2, 3, 1, 2])
    drafter = NGramDrafter(order, corpus)
    drafter.start([one], TargetState(None, [None], 10, Sampling(temperature=1.0)))
    draft = drafter.propose([one], [1])
    expected = torch.zeros(10)
    for token, share in law.items():
        expected[token] = share
    torch.testing.assert_close(draft.probs[0, 0], expected)
    assert float(expected[draft.tokens[0, 0]]) > 0


def test_recycling_drafts_what_the_target_thought():
    one = row([3])
    drafter = started(TokenRecycling(width=2), one, vocab=6)
    assert drafter.propose([one], [3]).tokens.tolist() == [[-1, -1, -1]]
    logits = torch.zeros(1, 3, 6)
    logits[0, 0, [4, 5]] = torch.tensor([2.0, 1.0])  # after 3: 4, then 5
    logits[0, 1, [1, 2]] = torch.tensor([2.0, 1.0])  # after 4: 1, then 2
    read = Proposal(torch.tensor([[4, -1]]))
    drafter.accept([one], Verified(torch.tensor([[3, 4, 0]]), read, Output(logits, logits), [[0]], [1]))
    tree = best_tree(4, 4, 2)
    assert tree == ((0,), (0, 0), (1,), (0, 0, 0))
    assert drafter.propose([one], [4]).tokens.tolist() == [[4, 1, 5, -1]]  # nothing was read after 1


def test_policies():
    hidden = torch.zeros(3)
    confidence = Confidence(6, 0.5)
    assert (
        confidence.budget(1),
        confidence.should_continue(0.5, hidden),
        confidence.should_continue(0.49, hidden),
    ) == (
        6,
        True,
        False,
    )
    heuristic = Heuristic(5)
    for drafted, accepted, then in ((5, 5, 7), (7, 6, 6), (0, 0, 6), (6, 0, 5)):
        heuristic.update(drafted, accepted)
        assert heuristic.budget(1) == then
    for _ in range(9):
        heuristic.update(1, 0)
    assert heuristic.budget(1) == 1
    head = AcceptanceHead(8, head=lambda h: 0.8, h=0.45)
    for _ in range(2):  # a step begins afresh
        assert head.budget(1) == 8
        assert [head.should_continue(1.0, hidden) for _ in range(3)] == [True, True, False]  # 1-.8, 1-.64, 1-.512
