"""Trees that grow while an EAGLE-3 layer drafts: EAGLE-2's nodes, each computed as a chain along its path would."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.draft_length import Fixed
from peftlab.decoding.drafters.base import Row, TargetState
from peftlab.decoding.drafters.feature_drafter import FeatureDrafter
from peftlab.decoding.engines.build import build_engine
from peftlab.decoding.engines.cache import KVCache
from peftlab.decoding.engines.prefill import prefill
from peftlab.decoding.verification.sampling import Sampling
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


def tree(engine, network, width, size, depth=6):
    drafter = FeatureDrafter(network, width, depth)
    drafter.start([row(PROMPT)], state_of(engine, [PROMPT]))
    return drafter.propose([row(PROMPT)], [size])


def next_scores(network, features, drafted):
    """Log-probabilities of the token after the prompt and drafted ones, by one row at a time."""
    ids = torch.tensor([[*PROMPT, *drafted]])
    cache, rows = KVCache(1, 1, 64), len(PROMPT) - 1
    block = cache.block([0], [0], rows)
    with torch.no_grad():
        cpu = ids.device
        fused = network.fuse(features)[None]
        state = network.advance(
            cache, ids[:, 1 : rows + 1], fused, block, block.positions(cpu), block.visible(None, cpu)
        )[:, -1:]
        for i in range(len(drafted)):
            block = cache.block([0], [rows + i], 1)
            token = ids[:, rows + 1 + i : rows + 2 + i]
            state = network.advance(cache, token, state, block, block.positions(cpu), block.visible(None, cpu))
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
    paths = []
    for token, parent in zip(draft.tokens[0].tolist(), draft.shape.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert set(paths) == grown(network, features, width, min(depth, size), size)
    assert [len(path) for path in paths] == list(draft.shape.depths[1:])


def test_the_first_choices_of_a_tree_are_the_chain(engine, network):
    chain = FeatureDrafter(network)
    chain.start([row(PROMPT)], state_of(engine, [PROMPT]))
    drafted = chain.propose([row(PROMPT)], [4])
    best = tree(engine, network, 3, 12)
    path, parent = [], -1
    while len(path) < 2:  # the first choice of the first level, and of that
        node = next(n for n, p in enumerate(best.shape.parents) if p == parent)
        path, parent = [*path, int(best.tokens[0, node])], node
    assert drafted.shape is None and drafted.tokens[0, :2].tolist() == path


def test_rows_of_a_batch_do_not_influence_one_another(engine, network):
    """Rows of other lengths, read together: the chain of each is the one that it gets alone."""
    prompts = [PROMPT, [1, 291], [1, 403, 407, 261, 378, 317, 269, 274, 287, 263]]
    rows = [row(prompt, i) for i, prompt in enumerate(prompts)]
    together = FeatureDrafter(network, width=3)
    together.start(rows, state_of(engine, prompts))
    batch = together.propose(rows, [4, 2, 3])
    assert batch.shape is None
    for i, (prompt, budget) in enumerate(zip(prompts, (4, 2, 3), strict=True)):
        alone = FeatureDrafter(network)
        alone.start([row(prompt)], state_of(engine, [prompt]))
        want = alone.propose([row(prompt)], [budget]).tokens[0].tolist()
        assert batch.tokens[i].tolist() == want + [-1] * (4 - budget)


def test_an_engine_without_states_is_refused(stories_model, network):
    bare = build_engine(stories_model, pack=False)
    with pytest.raises(PeftlabError, match=r"states entering layers 1, 2, 4; build_engine\(\.\.\., features=\.\.\.\)"):
        decode(bare, [PROMPT], StoppingCriteria(4), FeatureDrafter(network), policy=partial(Fixed, 2))
