"""Trees that grow while an EAGLE-3 layer drafts: they have EAGLE-2's nodes, each computed as in a chain."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from peftlab.decoding.cache import KVCache, depths_of, prefill
from peftlab.decoding.decode import Fixed, Row, StoppingCriteria, TargetState, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.state_drafters import FeatureDrafter, GrowingTrees
from peftlab.errors import PeftlabError
from tests.eagle_models import trained_eagle

PROMPT = [1, 403, 407, 261, 378, 317]


@pytest.fixture(scope="module")
def network(stories_model):
    return trained_eagle(stories_model)


@pytest.fixture(scope="module")
def engine(stories_model, network):
    return build_engine(stories_model, pack=False, features=network.features)


def state_of(engine, prompts):
    cache = KVCache(engine.layers, len(prompts), 128)
    read = prefill(engine, cache, prompts, range(len(prompts)))
    return TargetState(cache, read.hidden, engine.vocab_size, Sampling(), read.features)


def row(tokens, place=0):
    return Row(place, place, list(tokens), len(tokens), Fixed(4), torch.Generator())


def tree(engine, network, width, size, depth=6, prompt=PROMPT):
    drafter = FeatureDrafter(network, width, depth)
    drafter.start([row(prompt)], state_of(engine, [prompt]))
    return drafter.propose([row(prompt)], [size])


def paths(draft, i=0):
    """The paths of a row's nodes, as tokens; of nodes that were not drafted none."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens[i].tolist(), draft.parents[i], strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return [path for path in found if path[-1] >= 0]


def next_scores(network, features, drafted):
    """Log-probabilities of the token after the prompt and drafted ones, by one row at a time."""
    ids = torch.tensor([[*PROMPT, *drafted]])
    cache, rows = KVCache(1, 1, 64), len(PROMPT) - 1
    block = cache.block([0], [0], rows)
    with torch.no_grad():
        fused = network.fuse(features)[None]
        state = network.advance(cache, ids[:, 1 : rows + 1], fused, block)[:, -1:]
        for i in range(len(drafted)):
            block = cache.block([0], [rows + i], 1)
            token = ids[:, rows + 1 + i : rows + 2 + i]
            state = network.advance(cache, token, state, block)
        return network.logits(state)[0, 0].log_softmax(-1)


def grown(network, features, width, depth, size):
    """EAGLE-2 by its definition, every level expanded: paths of the ``size`` most probable nodes."""
    values: dict[tuple[int, ...], float] = {}
    newest: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        parents = sorted(newest, key=lambda path: -newest[path])[:width]
        newest = {}
        for path in parents:
            best = next_scores(network, features, path).topk(width)
            for place, score in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                newest[(*path, int(network.tokens[place]))] = values.get(path, 0.0) + score
        values |= newest
    return set(sorted(values, key=lambda path: -values[path])[:size])


@pytest.mark.parametrize(("width", "size", "depth"), [(2, 5, 3), (3, 9, 4), (4, 12, 6), (3, 2, 4)])
def test_the_most_probable_nodes_are_drafted(engine, network, width, size, depth):
    features = state_of(engine, [PROMPT]).features[0]
    draft = tree(engine, network, width, size, depth)
    assert set(paths(draft)) == grown(network, features, width, min(depth, size), size)
    assert [len(path) for path in paths(draft)] == depths_of(draft.parents[0])


def test_the_first_choices_of_a_tree_are_the_chain(engine, network):
    chain = FeatureDrafter(network)
    chain.start([row(PROMPT)], state_of(engine, [PROMPT]))
    drafted = chain.propose([row(PROMPT)], [4])
    best = tree(engine, network, 3, 12)
    path, parent = [], -1
    while len(path) < 2:  # the first choice of the first level, and of that
        node = next(n for n, p in enumerate(best.parents[0]) if p == parent)
        path, parent = [*path, int(best.tokens[0, node])], node
    assert drafted.parents is None and drafted.tokens[0, :2].tolist() == path


LONG = [1, 403, 407, 261, 378, 317, 269, 274, 287, 263]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("prompts", [[PROMPT, [1, 291], LONG], [PROMPT, LONG[:6], LONG[1:7]]], ids=["uneven", "even"])
def test_rows_of_a_batch_do_not_influence_one_another(engine, network, prompts, width):
    """Rows read together: the chain or the tree of each is the one that it gets alone, of its own size."""
    sizes = [9, 2, 5]
    rows = [row(prompt, i) for i, prompt in enumerate(prompts)]
    together = FeatureDrafter(network, width)
    together.start(rows, state_of(engine, prompts))
    batch = together.propose(rows, list(sizes))
    for i, (prompt, size) in enumerate(zip(prompts, sizes, strict=True)):
        alone = tree(engine, network, width, size, prompt=prompt)
        assert batch.tokens[i].tolist() == alone.tokens[0].tolist() + [-1] * (9 - size)
        if width > 1:
            assert paths(batch, i) == paths(alone) and len(paths(alone)) == size
    assert (batch.parents is None) == (width == 1) and (width == 1 or len(set(batch.parents)) == 3)


def test_a_row_without_states_waits_for_its_first_step(engine, network):
    """A prompt of one token has none yet; the others draft, and sizes of 0 are no trees."""
    prompts = [[1], PROMPT, LONG]
    rows = [row(prompt, i) for i, prompt in enumerate(prompts)]
    drafter = FeatureDrafter(network, width=3)
    drafter.start(rows, state_of(engine, prompts))
    draft = drafter.propose(rows, [5, 5, 0])
    assert [len(paths(draft, i)) for i in range(3)] == [0, 5, 0]
    assert paths(draft, 1) == paths(tree(engine, network, 3, 5))


def test_of_equally_probable_nodes_the_older_ones_are_kept():
    """A token that is certain is as probable as the one before it."""
    trees = GrowingTrees(2, torch.device("cpu"))
    sure, even = [0.0, -torch.inf], [math.log(0.5)] * 2
    trees.add(torch.tensor([[[7, 8]], [[5, 6]]]), torch.tensor([[sure], [even]]))
    for _ in range(2):
        tokens, place, seen = trees.expand(1)
        trees.add(tokens[..., None] + torch.tensor([10, 20]), torch.tensor([[sure], [even]]))
    assert place.tolist() == [[0], [0]] and seen.tolist() == [[[True, True]]] * 2
    tokens, parents = trees.best([3, 4])
    assert tokens.tolist() == [[7, 17, 27, -1], [5, 6, 15, 25]]
    assert parents == [(-1, 0, 1, -1), (-1, -1, 0, 0)]


def test_an_engine_without_states_is_refused(stories_model, network):
    bare = build_engine(stories_model, pack=False)
    with pytest.raises(PeftlabError, match=r"states entering layers 1, 2, 4; build_engine\(\.\.\., features=\.\.\.\)"):
        decode(bare, [PROMPT], StoppingCriteria(4), FeatureDrafter(network), policy=partial(Fixed, 2))
