"""Drawn trees and their verifiers by exact enumeration: the output's law is p, and whole paths accept no less."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch
from scipy.stats import chi2

from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_free import with_copies
from peftlab.decoding.sampled_trees import (
    KSEQ,
    Chains,
    DrawnTrees,
    StochasticBeam,
    draw_drafts,
    kseq_rho,
    rsd_c,
    rsd_s,
    specinfer,
    verify_kseq,
)
from peftlab.decoding.sampling import (
    TOKENS,
    TRAVERSAL,
    RandomSource,
    Sampling,
    one_hot,
    probabilities,
    verify_block,
    verify_chain,
    verify_drafts,
    verify_tree,
)
from peftlab.decoding.theory import acceptance_rate
from peftlab.drafting.target import truncate
from peftlab.errors import PeftlabError
from tests.command_line import invoke


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


DRAWN_TREES = {"rsd_c": rsd_c, "rsd_s": rsd_s, "specinfer": specinfer}


@pytest.fixture(scope="module")
def engines(stories_model):
    return build_engine(stories_model, pack=False), build_engine(truncate(stories_model, range(3)), pack=False)


def first_drafts(engines, prompts, grow, sampling, gamma=8):
    target, draft = engines
    drafts = []

    def observe(rows, verified):
        drafts.append(verified.draft)

    how = {"policy": partial(Fixed, gamma), "sampling": sampling, "observe": observe}
    decode(target, prompts, StoppingCriteria(10), DrawnTrees(draft, grow=grow), **how)
    return drafts[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAWN_TREES)
def test_levels_branch_and_continue(engines, uneven_prompts, name, temperature):
    first = first_drafts(engines, uneven_prompts[:3], DRAWN_TREES[name](3), Sampling(temperature, seed=2))
    assert (first.probs is None) == (temperature == 0)
    for i, (tokens, parents) in enumerate(zip(first.tokens.tolist(), first.parents, strict=True)):
        assert parents[:3] == (-1, -1, -1) and all(0 <= parent < 3 for parent in parents[3:6])
        if name == "rsd_c":
            assert parents == (-1, -1, -1, 0, 1, 2, 3, 4)
        siblings = [*zip(parents, tokens, strict=True)]
        if name != "specinfer" or not temperature:
            assert len({*siblings}) == len(tokens), "children of a node differ"
        for node, place in enumerate(siblings):
            elder = siblings.index(place)
            assert elder == node or node not in parents, "a token that is drawn again is not read on"
            if temperature:
                assert first.probs[i, node, tokens[node]] > 0
                for other in range(node):
                    if siblings[other][0] == place[0]:
                        again = bool(first.probs[i, node, tokens[other]] > 0)
                        assert again == (name == "specinfer"), "drawn from what the elder siblings have left"


def test_a_stochastic_beam_follows_the_probabilities(engines, uneven_prompts):
    """Where one token is nearly certain the beam stays below it; constant branching gives each branch its share."""
    sharp = Sampling(temperature=0.05, seed=2)
    beam, chains = (first_drafts(engines, uneven_prompts[2:3] * 8, grow, sharp) for grow in (rsd_s(3), rsd_c(3)))
    below = [sum(parents[3:6].count(i) == 1 for i in range(3)) for parents in beam.parents]
    assert min(below) < 3 and all(parents[3:6] == (0, 1, 2) for parents in chains.parents)


def test_cuts_that_leave_fewer_tokens_than_branches(engines, uneven_prompts):
    for grow in (rsd_c(3), rsd_s(3)):
        draft = first_drafts(engines, uneven_prompts[:2], grow, Sampling(1.0, top_k=2, seed=1), gamma=5)
        assert (draft.tokens[:, :3] < 0).tolist() == [[False, False, True]] * 2
        assert not draft.probs[draft.tokens < 0].any() and not draft.probs.isnan().any()


@pytest.mark.parametrize(
    ("name", "verifier"),
    [
        *((name, verifier) for name in [*DRAWN_TREES, "suffix+rsd_s"] for verifier in (TRAVERSAL, TOKENS)),
        ("specinfer", KSEQ),
    ],
)
def test_rows_draw_as_they_would_alone(engines, uneven_prompts, name, verifier):
    """Budgets differ in the last steps, as the context of each row does not: what a row draws is its own."""
    target, draft = engines
    sampling, policy, ending = Sampling(temperature=1.0, seed=9), partial(Fixed, 5), StoppingCriteria(9)
    drafter = DrawnTrees(draft, grow=DRAWN_TREES[name.removeprefix("suffix+")](2))
    how = {"drafter": with_copies(drafter) if "+" in name else drafter, "policy": policy, "verifier": verifier}
    together = decode(target, uneven_prompts[1:4], ending, sampling=sampling, **how)
    for i, prompt in enumerate(uneven_prompts[1:4]):
        alone = decode(target, [prompt], ending, sampling=replace(sampling, seed=sampling.seed + i), **how)
        assert alone[0].tokens == together[i].tokens


@pytest.mark.parametrize(("tree", "how"), [("rsd_c:2", {}), ("specinfer:2", {"temperature": 0.8, "verify": "kseq"})])
def test_bench_draws_trees(stories, tmp_path, tree, how):
    (tmp_path / "p.txt").write_text("Once upon a time\nTom and Lily\n")
    given = [text for name, value in how.items() for text in (f"--{name}", value)]
    invoke(
        "draft", "bench", "--target", stories, "--draft", "exit:3", "--tree", tree, "--gamma", 6, *given,
        "--prompts", tmp_path / "p.txt", "--max-new-tokens", 8, "--repeats", 1, "--drafter", "lookup",
        "--json", tmp_path / "o.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "o.json").read_text())
    assert (found["tree"], found["verify"], found["gain"], found["width"]) == (tree, how.get("verify"), None, None)
    for drafter in found["drafters"].values():
        assert drafter["lossless"] and drafter["lossless_by"] == ("construction" if how else "comparison")
    assert len(found["acceptance_by_position"]) >= 2, "six nodes on at least two levels"
    assert found["drafters"]["draft"]["tau"] > 1


def test_generate_draws_trees(stories):
    pair = ["--target", stories, "--draft", "exit:3", "--prompt", "Once upon a time", "--max-new-tokens", 8]
    drawn = invoke("generate", *pair, "--temperature", 0.8, "--tree", "rsd_s:3", "--verify", "tokens", "--seed", 4)
    assert (
        drawn.stdout
        and drawn.stdout
        == invoke(
            "generate", *pair, "--temperature", 0.8, "--tree", "rsd_s:3", "--verify", "tokens", "--seed", 4
        ).stdout
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tree", "rsd_c"], "tree rsd_c: needs a value, rsd_c:W; a whole number from 2"),
        (["--tree", "rsd:2"], r"tree rsd:2: one of rsd_c:W, rsd_s:W, specinfer:W \(did you mean"),
        (["--tree", "rsd_s:1"], "tree rsd_s:1: W is a whole number from 2"),
        (
            ["--width", 3],
            "width 3: of heads, eagle3, mtp, dflash, pard and gated_lora; a draft model's trees have names, as tree rsd_c:3",
        ),
        (
            ["--tree", "rsd_c:2", "--policy", "goodput"],
            "policy goodput: needs a chain whose length it can choose by measured times, and",
        ),
        (["--verify", "tokens"], "verify tokens: temperature 0 is greedy, where all verify alike"),
        (["--verify", "block", "--temperature", 1], "verify block: one of traversal, tokens, kseq"),
        (["--verify", "kseq", "--temperature", 1], "verify kseq: verifies independent drafts; give tree specinfer:W"),
        (["--verify", "kseq", "--temperature", 1, "--tree", "rsd_c:2"], "give tree specinfer:W"),
        (
            ["--verify", "tokens", "--temperature", 1, "--lossy", "typical"],
            "verify tokens: lossy typical takes its place",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(stories, arguments, reason):
    with pytest.raises(PeftlabError, match=reason):
        invoke("generate", "--target", stories, "--draft", "exit:2", "--prompt", "Once", *arguments)


def test_trees_need_a_draft_model(stories):
    with pytest.raises(PeftlabError, match="tree: is drawn from a draft model; give one as draft"):
        invoke("generate", "--target", stories, "--drafter", "lookup", "--prompt", "Once", "--tree", "rsd_c:2")
    with pytest.raises(PeftlabError, match="verify tokens: nothing is drafted"):
        invoke("generate", "--target", stories, "--prompt", "Once", "--verify", "tokens", "--temperature", 1)
