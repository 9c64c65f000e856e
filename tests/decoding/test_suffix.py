"""The suffix automaton against a plain search, and copies joined with drafts in one tree."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peftlab.decoding.decode import Fixed, Proposal, Row, StoppingCriteria, TargetState, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import END, ROOT, SuffixAndDraft, SuffixAutomaton, SuffixLookup, fuse
from peftlab.decoding.sampling import Sampling, verify_traversal, verify_tree
from peftlab.drafting.base import Pair, make_drafter
from peftlab.drafting.target import truncate
from peftlab.drafting.text import index_corpus, read_documents
from peftlab.errors import PeftlabError

TEXT = st.lists(st.integers(0, 2), max_size=40)


def row(tokens, place=0):
    return Row(place, place, list(tokens), len(tokens), Fixed(4), torch.Generator())


def started(drafter, *rows):
    drafter.start(list(rows), TargetState(None, [None] * len(rows), 50, Sampling()))
    return drafter


def ends(text, part):
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


def repeated(text):
    """The longest suffix that ends earlier, too, and where it ends first, by trying all."""
    for length in range(len(text) - 1, 0, -1):
        found = ends(text[:-1], text[-length:])
        if found:
            return length, found[0]
    return 0, 0


def matched(corpus, text):
    """The longest suffix of the text that occurs in the corpus, and where it ends first."""
    for length in range(len(text), 0, -1):
        found = ends(corpus, text[-length:])
        if found:
            return length, found[0]
    return 0, 0


@given(TEXT)
def test_the_longest_repeated_suffix_at_every_length(text):
    automaton = SuffixAutomaton()
    for n, token in enumerate(text, start=1):
        automaton.extend(token)
        assert automaton.repeated() == repeated(text[:n])


@given(TEXT, TEXT)
def test_the_longest_match_in_a_corpus_at_every_length(corpus, text):
    automaton, place = SuffixAutomaton(corpus), ROOT
    for n, token in enumerate(text, start=1):
        place = automaton.follow(place, token)
        assert (place[1], automaton.end(place)) == matched(corpus, text[:n])


def test_a_long_text_takes_linear_room():
    generator = random.Random(0)
    text = [generator.randrange(3) for _ in range(3000)] + [1] * 3000
    automaton = SuffixAutomaton(text)
    assert len(automaton._next) <= 2 * len(text)
    assert sum(map(len, automaton._next)) <= 3 * len(text)
    assert automaton.repeated()[0] == 2999


@given(TEXT.filter(bool), st.integers(1, 6))
def test_copies_follow_the_match_and_go_round_in_a_loop(text, budget):
    one = row(text)
    length, copied = started(SuffixLookup(), one).find(one, budget)
    expected, end = repeated(text)
    longer = list(text)
    for k in range(budget):
        longer.append(longer[end + k])
    assert (length, copied) == ((expected, longer[len(text) :]) if expected else (0, []))


def test_the_corpus_is_copied_where_its_match_is_longer_by_the_margin():
    corpus = SuffixAutomaton([5, 6, 7, 8, 9, END, 8, 9, 3, END])
    for tokens, margin, expected in (
        ([1, 6, 7], 1, [8, 9]),  # 2 tokens of the corpus against none; a document ends at 9
        ([1, 6, 7], 2, []),
        ([7, 2, 6, 7], 0, [8, 9]),  # 2 against 1
        ([7, 2, 6, 7], 1, [2, 6, 7]),
        ([0, 8, 9], 0, []),  # nothing followed in the first document
        ([0, 9, 3, 8, 9, 3], 0, [8, 9, 3]),
    ):
        one = row(tokens)
        drafter = started(SuffixLookup(corpus, margin=margin), one)
        assert drafter.find(one, 3)[1] == expected, (tokens, margin)


def test_rows_do_not_share_a_text():
    one, two = row([1, 2, 3, 1], 0), row([7, 8, 7], 1)
    drafter = started(SuffixLookup(), one, two)
    assert drafter.propose([one, two], [2, 3]).tokens.tolist() == [[2, 3, -1], [8, 7, 8]]
    one.tokens += [2]
    assert drafter.propose([one], [2]).tokens.tolist() == [[3, 1]]


def paths(draft, i=0):
    """The paths of a row's tree, as tokens."""
    n = draft.tokens.shape[1]
    parents = draft.parents[i] if draft.parents else range(-1, n - 1)
    found = []
    for node in range(n):
        path, at = [], node
        while at >= 0:
            path.insert(0, int(draft.tokens[i, at]))
            at = parents[at]
        if path[-1] >= 0:
            found.append(tuple(path))
    return found


def test_a_copy_shares_the_prefix_and_leaves_the_draft_where_it_differs():
    draft = Proposal(torch.tensor([[4, 5, 6]]))
    assert fuse(draft, [[]], [6], 10) is draft
    assert paths(fuse(draft, [[4, 7, 8]], [6], 10)) == [(4,), (4, 5), (4, 5, 6), (4, 7), (4, 7, 8)]
    assert paths(fuse(draft, [[9, 7, 8]], [4], 10)) == [(4,), (4, 5), (4, 5, 6), (9,)]
    longer = fuse(draft, [[4, 5, 6, 1, 2]], [5], 10)
    assert longer.parents is None and longer.tokens.tolist() == [[4, 5, 6, 1, 2]]
    tree = Proposal(torch.tensor([[4, 5, 3]]), parents=[(-1, 0, -1)])
    assert paths(fuse(tree, [[3, 5, 1]], [5], 10)) == [(4,), (4, 5), (3,), (3, 5), (3, 5, 1)]


@given(st.data())
def test_a_fused_tree_contains_what_rows_have_within_their_budgets(data):
    chain = st.lists(st.integers(0, 1), max_size=4)
    rows = data.draw(st.lists(st.tuples(chain, chain, st.integers(4, 8)), min_size=1, max_size=3))
    n = max(len(drafted) for drafted, _, _ in rows)
    tokens = torch.tensor([[*drafted, *[-1] * (n - len(drafted))] for drafted, _, _ in rows]).reshape(len(rows), n)
    budgets = [budget for _, _, budget in rows]
    found = fuse(Proposal(tokens), [copied for _, copied, _ in rows], budgets, 10)
    assert found.tokens.shape[1] <= max(budgets)
    for i, (drafted, copied, budget) in enumerate(rows):
        mine = paths(found, i)
        own = {tuple(drafted[:k]) for k in range(1, len(drafted) + 1)}
        other = {tuple(copied[:k]) for k in range(1, len(copied) + 1)}
        assert len(mine) == len(set(mine)) <= budget
        assert own <= set(mine) <= own | other
        assert all(len(path) == 1 or path[:-1] in mine for path in mine)
        assert len(mine) == min(budget, len(own | other))


def test_a_copy_that_the_draft_model_finds_unlikely_is_dropped():
    logits = torch.zeros(1, 2, 8)
    logits[0, 0, [4, 7]], logits[0, 1, [5, 6, 7]] = torch.tensor([2.0, 1.0]), torch.tensor([3.0, 2.0, 1.0])
    draft = Proposal(torch.tensor([[4, 5]]), logits=logits)
    assert (4, 6) in paths(fuse(draft, [[4, 6]], [4], top=2))
    assert (4, 7) not in paths(fuse(draft, [[4, 7]], [4], top=2))
    assert (7,) in paths(fuse(draft, [[7]], [4], top=2))
    assert (4, 5, 1) in paths(fuse(draft, [[4, 5, 1]], [4], top=2))  # the model said nothing there


def test_a_copy_follows_the_eldest_of_equal_siblings():
    """The others have no children: a node below them would never be accepted."""
    draft = Proposal(torch.tensor([[5, 5, 7]]), torch.full((1, 3, 10), 0.1), parents=[(-1, -1, 0)])
    found = fuse(draft, [[5, 7, 9]], [4], 10)
    assert found.tokens.tolist() == [[5, 5, 7, 9]] and found.parents == [(-1, -1, 0, 2)]


@pytest.mark.parametrize("verify", [verify_tree, verify_traversal])
def test_a_fused_tree_follows_the_target_exactly(enumerate_law, model, assert_follows, verify):
    """Every drafted chain, coin and draw, with the copy cut where the chain leaves it."""
    for seed in range(3):
        target, q = model(3, 2 * seed, True), model(3, 2 * seed + 1)
        copied = [seed % 3, (seed + 1) % 3]

        def step(random, target=target, q=q, copied=copied):
            drafted = []
            for _ in range(2):
                drafted.append(int(random.draw(q(tuple(drafted)))))
            probs = torch.stack([q(tuple(drafted[:k])) for k in range(2)])
            tree = fuse(Proposal(torch.tensor([drafted]), probs[None]), [copied], [4], 10)
            before = [(), *paths(tree)]
            p = torch.stack([target(path) for path in before])
            parents = tree.parents[0] if tree.parents else tuple(range(-1, len(before) - 2))
            path, token = verify(p, tree.probs[0], tree.tokens[0], parents, random)
            return (*(int(tree.tokens[0, node]) for node in path), token)

        assert_follows(enumerate_law(step), target, 3)


def test_after_a_branch_the_draft_models_cache_is_the_texts_own(stories_model, uneven_prompts):
    """A copied branch is accepted: the next chain must be what a fresh draft model would write."""
    target = build_engine(stories_model, pack=False)
    engine = build_engine(truncate(stories_model, range(3)), pack=False)
    output = decode(target, [uneven_prompts[2]], StoppingCriteria(24))[0].tokens

    class Oracle(SuffixLookup):
        """Copies the output itself at every other step."""

        def find(self, row, budget):
            done = len(row.tokens) - row.prompt_length
            return (1, output[done : done + budget]) if done % 2 else (0, [])

    chains, branches = [], []

    class Watched(ModelDrafter):
        def propose(self, rows, budgets):
            draft = super().propose(rows, budgets)
            fresh = ModelDrafter(engine)
            fresh.start(rows, TargetState(self._state.cache, [None], target.vocab_size, Sampling()))
            chains.append((draft.tokens.tolist(), fresh.propose(rows, budgets).tokens.tolist()))
            return draft

        def start(self, rows, state):
            self._state = state
            super().start(rows, state)

    def observe(rows, verified):
        branches.append(any(node > 0 and verified.draft.parents for node in verified.paths[0]))

    drafter = SuffixAndDraft(Oracle(), Watched(engine), long=100, top=512)
    found = decode(
        target, [uneven_prompts[2]], StoppingCriteria(24), drafter, policy=partial(Fixed, 6), observe=observe
    )
    assert found[0].tokens == output and any(branches)
    assert all(mine == fresh for mine, fresh in chains)


def test_a_corpus_is_read_once_and_refused_by_name(tmp_path, stories_tokenizer):
    (tmp_path / "a.txt").write_text("Lily saw a dog.\nThe dog ran.", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "Lily"}\n{"text": "Tom"}\n', encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"words": "Lily"}\n', encoding="utf-8")
    (tmp_path / "d.txt").write_text(" \n", encoding="utf-8")
    assert read_documents(str(tmp_path / "a.txt")) == ["Lily saw a dog.\nThe dog ran."]
    corpus = index_corpus(read_documents(str(tmp_path / "b.jsonl")), stories_tokenizer)
    assert corpus.tokens.count(END) == 2 and corpus.tokens[-1] == END
    for name, message in (("c.jsonl", "no column to copy from"), ("d.txt", "no text in it"), ("e.txt", "no such file")):
        with pytest.raises(PeftlabError, match=message):
            read_documents(str(tmp_path / name))
    made = make_drafter("suffix", Pair(None, stories_tokenizer, frozenset(), None, corpus=corpus))
    assert made.corpus is corpus
