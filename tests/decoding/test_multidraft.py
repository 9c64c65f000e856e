from __future__ import annotations

import math

import pytest
import torch

from peftlab.decoding.sampled_trees import draw_drafts, kseq_rho, verify_kseq
from peftlab.decoding.sampling import RandomSource, probabilities
from peftlab.decoding.theory import acceptance_rate
from peftlab.decoding.verify import verify_chain, verify_drafts, verify_tree
from peftlab.errors import PeftlabError


def drafts_law(enumerate_law, p, q, k, replacement):
    """Law of (accepted?, token) when k drafts are drawn and verified."""

    def step(random):
        tokens, rows = draw_drafts(q, k, random, replacement)
        accepted, token = verify_drafts(p, rows, tokens, random)
        return accepted is not None, token

    return enumerate_law(step)


def kseq_law(enumerate_law, p, q, k):
    def step(random):
        tokens, rows = draw_drafts(q, k, random, replacement=True)
        accepted, token = verify_kseq(p, rows, tokens, random)
        assert accepted is None or accepted == tokens.tolist().index(token), "of equal drafts the first"
        return accepted is not None, token

    return enumerate_law(step)


def kseq_acceptance(p, q, k):
    """1 - (1 - β)^k, β = Σ min(q, p/ρ*): that one of k drafts passes."""
    return 1 - (1 - float(torch.minimum(q, p / kseq_rho(p, q, k)).sum())) ** k


def marginal_error(law, p):
    return max(abs(law.get((True, x), 0) + law.get((False, x), 0) - float(p[x])) for x in range(len(p)))


def accepted_mass(law):
    return math.fsum(weight for (accepted, _), weight in law.items() if accepted)


CASES = [(2, 1), (2, 2), (2, 3), (4, 2), (3, 3), (5, 2)]


@pytest.mark.parametrize("zeros", [False, True], ids=["dense", "zeros"])
@pytest.mark.parametrize("vocab, k", CASES)
def test_several_drafts_follow_the_target_exactly(enumerate_law, model, vocab, k, zeros):
    for seed in range(4):
        p, q = model(vocab, 2 * seed, zeros)(), model(vocab, 2 * seed + 1, zeros)()
        with_, without, kseq = (
            drafts_law(enumerate_law, p, q, k, True),
            drafts_law(enumerate_law, p, q, k, False),
            kseq_law(enumerate_law, p, q, k),
        )
        for law in (with_, without, kseq):
            assert marginal_error(law, p) < 1e-12
        single = float(acceptance_rate(p, q))
        assert accepted_mass(with_) >= single - 1e-12
        assert accepted_mass(without) >= accepted_mass(with_) - 1e-12
        assert accepted_mass(kseq) == pytest.approx(kseq_acceptance(p, q, k), abs=1e-12)
        assert accepted_mass(kseq) >= single - 1e-12


def test_without_replacement_gains_strictly_somewhere(enumerate_law, model):
    p, q = model(4, 0)(), model(4, 1)()
    gain = accepted_mass(drafts_law(enumerate_law, p, q, 3, False)) - accepted_mass(
        drafts_law(enumerate_law, p, q, 3, True)
    )
    assert gain > 1e-3


def test_one_draft_is_the_plain_rule(enumerate_law, model):
    p, q = model(5, 2)(), model(5, 3)()
    laws = [drafts_law(enumerate_law, p, q, 1, r) for r in (True, False)] + [kseq_law(enumerate_law, p, q, 1)]
    for law in laws:
        assert law == pytest.approx(laws[0], abs=1e-12)
        assert accepted_mass(law) == pytest.approx(float(acceptance_rate(p, q)), abs=1e-12)


def test_kseq_leaves_room_for_drafts_of_other_distributions(enumerate_law, model):
    """Two independent drafts, then a certain one, then two of a third distribution."""
    p, q, other = (model(3, seed)() for seed in (0, 1, 2))
    certain = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)

    def step(random):
        rows = torch.stack([q, q, certain, other, other])
        accepted, token = verify_kseq(p, rows, random.draw(rows), random)
        return accepted is not None, token

    assert marginal_error(enumerate_law(step), p) < 1e-12


def test_a_draft_equal_to_the_target_is_accepted_at_once(enumerate_law, model):
    p = model(4, 5, True)()
    for law in (
        drafts_law(enumerate_law, p, p, 3, True),
        drafts_law(enumerate_law, p, p, 3, False),
        kseq_law(enumerate_law, p, p, 3),
    ):
        assert all(accepted for accepted, _ in law)


def test_drafts_from_different_models_follow_the_target_exactly(enumerate_law, model):
    p, rows = model(4, 0)(), torch.stack([model(4, i)() for i in (1, 2, 3)])

    def step(random):
        accepted, token = verify_drafts(p, rows, random.draw(rows), random)
        return accepted is not None, token

    assert marginal_error(enumerate_law(step), p) < 1e-12


def test_drafting_every_token_without_replacement_never_misses_a_greedy_target(enumerate_law, model):
    p, q = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64), model(4, 1)()
    law = drafts_law(enumerate_law, p, q, 4, False)
    assert law == {(True, 2): pytest.approx(1, abs=1e-12)}


def test_a_used_up_draft_is_no_draft(enumerate_law, model):
    p, q = model(3, 0)(), torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    tokens, rows = draw_drafts(q, 3, RandomSource(), replacement=False)
    assert rows.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]] and tokens[0] == 1
    assert marginal_error(drafts_law(enumerate_law, p, q, 3, False), p) < 1e-12


def test_drawn_without_replacement_all_differ():
    q = probabilities(torch.randn(30, generator=torch.Generator().manual_seed(0)) * 3)
    tokens, rows = draw_drafts(q, 10, RandomSource(torch.Generator().manual_seed(1)), replacement=False)
    assert len(set(tokens.tolist())) == 10
    torch.testing.assert_close(rows.sum(-1), torch.ones(10))
    assert all((rows[i + 1 :, tokens[i]] == 0).all() for i in range(10))


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_rho_solves_its_equation(model, k):
    for seed in range(20):
        p, q = model(6, seed)(), model(6, 100 + seed)()
        rho = kseq_rho(p, q, k)
        beta = float(torch.minimum(q, p / rho).sum())
        assert 1 <= rho <= k
        assert 1 - (1 - beta) ** k == pytest.approx(rho * beta, abs=1e-12)


def test_rho_at_its_ends():
    p = torch.tensor([0.25, 0.75, 0.0, 0.0], dtype=torch.float64)
    assert kseq_rho(p, p, 4) == 1.0
    assert kseq_rho(p, p.flip(0), 4) == 4.0  # nothing in common


def tree_step(target, draft, parents, replacement, random):
    """Draw a token tree node by node, verify it, and return what is emitted."""
    prefix: dict[int, tuple[int, ...]] = {-1: ()}
    vocab = draft.vocab
    tokens = torch.zeros(len(parents), dtype=torch.long)
    q = torch.zeros(len(parents), vocab, dtype=torch.float64)
    for parent in sorted(set(parents)):
        below = [i for i, up in enumerate(parents) if up == parent]
        tokens[below], q[below] = draw_drafts(draft(prefix[parent]), len(below), random, replacement)
        prefix |= {i: (*prefix[parent], int(tokens[i])) for i in below}
    p = torch.stack([target(prefix[node]) for node in range(-1, len(parents))])
    path, token = verify_tree(p, q, tokens, parents, random)
    assert [parents[node] for node in path] == [-1, *path][: len(path)]
    return (*(int(tokens[node]) for node in path), token)


TREES = {
    "chain": [-1, 0],
    "siblings": [-1, -1, -1],
    "wide": [-1, -1, 0, 0],
    "deep": [-1, -1, 0, 2],
    "mixed": [-1, 0, -1, 2],
}


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES.keys())
def test_a_tree_follows_the_target_exactly(enumerate_law, model, assert_follows, parents, replacement):
    for seed, vocab, zeros in ((0, 2, False), (1, 3, True)):
        target, draft = model(vocab, 2 * seed, zeros), model(vocab, 2 * seed + 1, zeros)
        law = enumerate_law(lambda c, t=target, d=draft: tree_step(t, d, parents, replacement, c))
        assert_follows(law, target, max(len(emitted) for emitted in law))


def test_a_tree_with_single_children_is_a_chain(enumerate_law, model):
    p, q = torch.stack([model(3, i)() for i in range(3)]), torch.stack([model(3, 7 + i)() for i in range(2)])
    tokens = torch.tensor([2, 0])
    tree = enumerate_law(lambda c: (lambda r: (len(r[0]), r[1]))(verify_tree(p, q, tokens, [-1, 0], c)))
    chain = enumerate_law(lambda c: tuple(int(x) for x in verify_chain(p, q, tokens, c)))
    assert tree == pytest.approx(chain, abs=1e-14)


def test_a_greedy_target_takes_its_own_path_through_a_tree():
    p = torch.eye(4)[[1, 0, 3, 2, 0]]  # greedy after root: 1; after node 1 (token 1): 3; after node 3: 0
    q = torch.full((4, 4), 0.25)
    path, token = verify_tree(p[[0, 1, 2, 3, 4]], q, torch.tensor([0, 1, 2, 3]), [-1, -1, 1, 1], RandomSource())
    assert (path, token) == ([1, 3], 0)


def test_an_empty_tree_is_a_plain_draw():
    p = torch.tensor([[0.0, 1.0]])
    assert verify_tree(p, p.new_zeros(0, 2), torch.zeros(0, dtype=torch.long), [], RandomSource()) == ([], 1)


def test_a_parent_after_its_child_is_told():
    with pytest.raises(PeftlabError, match=r"parents\[0\]"):
        verify_tree(torch.ones(3, 2), torch.ones(2, 2), torch.tensor([0, 1]), [1, -1], RandomSource())
