"""EAGLE-3: training is what drafting computes, which tokens it can draft, and what its files contain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from draft_models import VOCAB, requests, tiny
from torch.nn.parallel import DistributedDataParallel

from peftlab.decoding.cache import KVCache
from peftlab.decoding.engines import build_engine
from peftlab.decoding.theory import RankRates
from peftlab.drafting.acceptance import RANKS, ceiling, write_ranks
from peftlab.drafting.eagle import EagleStep, read_eagle, write_eagle
from peftlab.drafting.objectives import Objective
from peftlab.drafting.state_network import (
    FeatureLoss,
    TargetWithNetwork,
    default_features,
    measure_features,
    measure_ranks,
    predictions,
    store_states,
    unroll,
)
from peftlab.drafting.target import IDENTITY_FILE, TargetIdentity, forward_hidden, head_weight, input_embedding
from peftlab.drafting.text import Collate, make_dataset
from peftlab.errors import PeftlabError
from peftlab.tasks.prompts import Request
from tests.eagle_models import eagle

TOKENS = torch.tensor([0, 1, 2, 5, 7, 8, 11, 20, 21, 33, 39])


@pytest.fixture(scope="module")
def target():
    return tiny(3, layers=4)


def fed_back(network, features, ids, read, steps):
    """Draft after ``read`` tokens as a decoder does, but on the text: the cache grows by one row at a time."""
    network = EagleStep(network, pack=False)
    cache, rows = KVCache(1, 1, 64), read - 1  # the last token read has no state yet
    block = cache.block([0], [0], rows)
    state = network.advance(cache, ids[None, 1:read], network.fuse(features[None, :rows]), block)[:, -1:]
    outputs = [state]
    for k in range(1, steps):
        block = cache.block([0], [rows - 1 + k], 1)
        token = ids[None, rows + k : rows + k + 1]
        state = network.advance(cache, token, state, block)
        outputs.append(state)
    return torch.cat([network.logits(o)[0] for o in outputs])


def test_a_step_of_training_is_a_drafted_token(target) -> None:
    """Training-time test, step k at row t: the logits of the k + 1st token drafted after t + 2 tokens, with a cache."""
    network, ids = eagle(target, TOKENS), torch.randint(3, VOCAB, (14,), generator=torch.Generator().manual_seed(1))
    hidden = forward_hidden(target, ids[None], torch.ones(1, 14))
    features = torch.cat([hidden[i] for i in network.features], -1)
    with torch.no_grad():
        trained = [network.logits(states)[0] for states in unroll(network, features, ids[None], 4)]
        for row in range(9):
            drafted = fed_back(network, features[0], ids, row + 2, 4)
            for k in range(4):
                torch.testing.assert_close(trained[k][row], drafted[k], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(trained[1][0], trained[0][1], atol=1e-2), "a step reads its own output, not the target's"


def test_no_row_sees_a_later_token(target) -> None:
    network, ids = eagle(target), torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(2))
    changed = ids.clone()
    changed[0, 8] = (changed[0, 8] + 1) % VOCAB
    features = torch.randn(1, 12, 3 * 16, generator=torch.Generator().manual_seed(0))
    other = features.clone()
    other[0, 7] += 1
    with torch.no_grad():
        for k, (one, two, three) in enumerate(
            zip(
                *(list(unroll(network, f, x, 3)) for f, x in ((features, ids), (features, changed), (other, ids))),
                strict=True,
            )
        ):
            assert torch.equal(one[0, : 7 - k], two[0, : 7 - k]) and not torch.equal(one[0, 7 - k], two[0, 7 - k])
            assert torch.equal(one[0, :7], three[0, :7]) and not torch.equal(one[0, 7], three[0, 7])


def test_which_rows_are_trained() -> None:
    """Prompt of 3 tokens, continuation of 4: the first token drafted is the continuation's second, by row 2."""
    weights = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]])
    assert predictions(weights, 1).int().tolist() == [[0, 1, 1, 1, 1, 0, 0]]
    assert predictions(weights, 2).int().tolist() == [[0, 1, 1, 1, 0, 0]]
    assert predictions(weights, 3).int().tolist() == [[0, 1, 1, 0, 0]]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("features", [(0,), (4,), (1, 3), (0, 2, 3)])
def test_engines_report_the_states_entering_layers(target, flat, features) -> None:
    engine = build_engine(target, flat=flat, pack=False, features=features)
    ids = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
    cache = KVCache(engine.layers, 2, 16)
    hidden = forward_hidden(target, ids, torch.ones_like(ids))
    out = engine.forward(cache, ids, cache.block([0, 1], [0, 0], 6), [5])
    expected = torch.cat([hidden[i] for i in features], -1)
    assert out.logits.shape[1] == 1
    torch.testing.assert_close(out.features, expected, atol=1e-5, rtol=1e-4)
    assert (
        build_engine(target, flat=flat, pack=False).forward(cache, ids, cache.block([0, 1], [0, 0], 6)).features is None
    )


def test_usual_features() -> None:
    assert default_features(30) == (2, 15, 27)
    assert default_features(7) == (2, 3, 4)
    assert [default_features(n) for n in (1, 2, 3, 5)] == [(0,), (0, 1), (0, 1, 2), (1, 2, 4)]


@pytest.mark.parametrize("name", ["kl", "lk_hybrid", "ce"])
@pytest.mark.parametrize("tokens", [None, TOKENS])
def test_training_lowers_the_loss_of_every_step(target, name, tokens) -> None:
    data = make_dataset(requests(8))
    network = eagle(target, tokens).train()
    model = TargetWithNetwork(target, network)
    target.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for n, p in network.named_parameters() if n != "lm_head.weight"}
    optimiser = torch.optim.AdamW(trained, lr=5e-3)
    batch, loss = Collate()([data[i] for i in range(8)]), FeatureLoss(Objective(name), 3, 0.8)
    before, first_loss = measure_features(model, data, 3), loss(model, batch).detach()
    head = network.lm_head.weight.clone()
    for _ in range(40):
        optimiser.zero_grad()
        loss(model, batch).backward()
        optimiser.step()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained), "each parameter is reached"
    assert torch.equal(head, network.lm_head.weight)
    after = measure_features(model, data, 3)
    assert loss(model, batch) < 0.8 * first_loss
    for first, last in zip(before, after, strict=True):
        # Random text is not the target's own: only what compares with the target's distribution comes nearer to it.
        assert name == "ce" or last.rates()["acceptance"] > first.rates()["acceptance"] + 0.05
    if tokens is not None:
        cap = ceiling(target, data, tokens)
        assert all(each.rates()["acceptance"] <= cap + 1e-6 for each in after)


def test_the_loss_of_a_step_by_hand(target) -> None:
    """Only step 0, batch of one: KL between the target's distribution over the drafted tokens and the network's."""
    data = make_dataset(requests(1))
    network = eagle(target, TOKENS)
    batch = Collate()([data[0]])
    ids = batch["input_ids"]
    hidden = forward_hidden(target, ids, batch["attention_mask"])
    states = next(unroll(network, torch.cat([hidden[i] for i in network.features], -1), ids, 1))
    rows = range(data[0]["prompt"] - 2, data[0]["length"] - 2)
    p = (hidden[-1] @ head_weight(target)[TOKENS].T).log_softmax(-1)[0]
    q = network.logits(states).log_softmax(-1)[0]
    expected = sum((p[t + 1].exp() * (p[t + 1] - q[t])).sum() for t in rows)
    found = FeatureLoss(Objective("kl"), 1, 1.0)(TargetWithNetwork(target, network), batch)
    torch.testing.assert_close(found, expected)


def test_regression_brings_the_state_nearer(target) -> None:
    """EAGLE-1 as a setting: the state that the LM head reads, in and out, one step."""
    data, network = make_dataset(requests(8)), eagle(target, features=(4,)).train()
    target.requires_grad_(False)
    model, batch = TargetWithNetwork(target, network), Collate()([data[i] for i in range(8)])
    alone, both = (FeatureLoss(Objective("kl"), 1, 1.0, weight) for weight in (0.0, 10.0))

    def distance() -> float:
        return float((both(model, batch) - alone(model, batch)).detach()) / 10

    before = distance()
    optimiser = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(40):
        optimiser.zero_grad()
        both(model, batch).backward()
        optimiser.step()
    assert 0 < distance() < 0.8 * before


def counted(target, network, written, depth):
    """The right choices and the tries at each depth, text by text and place by place."""
    right, tried = [[0] * RANKS for _ in range(depth)], [0] * depth
    for request in written:
        ids = [*request.prompt, *request.response]
        with torch.no_grad():
            output = target(input_ids=torch.tensor([ids]), output_hidden_states=True)
            features = torch.cat([output.hidden_states[layer] for layer in network.features], -1)
            drafted = [network.logits(states)[0] for states in unroll(network, features, torch.tensor([ids]), depth)]
        greedy = output.logits[0].argmax(-1).tolist()
        for t in range(len(request.prompt) - 2, len(ids) - 2):  # the tokens up to t + 1 are known
            for k in range(depth):
                if t + 2 + k >= len(ids) or (k and ids[t + 1 + k] != greedy[t + k]):
                    break
                ranking = network.tokens[drafted[k][t].topk(RANKS).indices].tolist()
                tried[k] += 1
                if greedy[t + 1 + k] not in ranking:
                    break
                right[k][ranking.index(greedy[t + 1 + k])] += 1
    return right, tried


def test_rates_by_depth_and_rank_are_counted_where_a_tree_can_reach(target, tmp_path: Path) -> None:
    torch.manual_seed(2)
    text = target.generate(torch.randint(3, VOCAB, (16, 3)), max_new_tokens=20, do_sample=False, eos_token_id=None)
    written = [Request(row[:3], row[3:]) for row in text.tolist()]
    written[1] = Request(written[1].prompt, [*written[1].response[:6], 30, *written[1].response[6:9]])
    network = eagle(target, text.unique())
    found = measure_ranks(TargetWithNetwork(target, network), make_dataset(written), 5, 3)
    right, tried = counted(target, network, written, 3)
    assert tried[0] > tried[1] > tried[2] > 0
    assert found == RankRates.counted(right, tried)
    write_eagle(network, tmp_path, target="t", architecture="LlamaForCausalLM", tokens=3)
    assert read_eagle(tmp_path, input_embedding(target)).ranks is None
    TargetIdentity("t", "", {}).write(tmp_path)
    assert read_eagle(tmp_path, input_embedding(target)).ranks is None
    write_ranks(tmp_path / IDENTITY_FILE, found)
    assert read_eagle(tmp_path, input_embedding(target)).ranks == found
    (tmp_path / "target.json").write_text(json.dumps({"rank_acceptance": [[0.2, 0.5]]}))
    with pytest.raises(PeftlabError, match=r"target\.json: rank_acceptance is not"):
        read_eagle(tmp_path, input_embedding(target))


@pytest.mark.parametrize("sixteen", [False, True])
def test_what_is_rounded_keeps_the_rows_of_the_target(sixteen: bool) -> None:
    target = tiny(3, layers=4)
    if sixteen:
        target.to(torch.bfloat16).to(torch.float32)
    network, head = eagle(target), head_weight(target).detach().clone()
    before = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    network.round()
    assert network.lm_head.weight.dtype == (torch.bfloat16 if sixteen else torch.float32)
    network.parts_to(torch.float32)
    for name, tensor in network.state_dict().items():
        wanted = head if name == "lm_head.weight" else before[name].bfloat16().float()
        assert torch.equal(tensor, wanted), name


def test_stored_states_train_alike_and_the_target_does_not_run_again(target, tmp_path: Path, monkeypatch) -> None:
    rows = make_dataset([*requests(40), *requests(2)])
    network = eagle(target, TOKENS).train()
    model, passes = TargetWithNetwork(target, network), []
    target.requires_grad_(False)
    hook = target.register_forward_hook(lambda *_: passes.append(1))
    stored = store_states(model, rows["input_ids"], tmp_path, most=1.0)
    assert len(passes) == 5, "forty texts in batches of eight; two occur twice"
    fresh, kept = (FeatureLoss(Objective("kl"), 3, 0.8, 1.0, known) for known in (None, stored))
    for batch in (Collate()([rows[i] for i in range(8)]), Collate()([rows[i] for i in (33, 41)])):
        found, passes[:] = kept(model, batch), []
        found.backward()
        assert not passes, "an epoch runs the layer alone"
        gradients = [p.grad.clone() for p in network.parameters() if p.grad is not None]
        network.zero_grad()
        wanted = fresh(model, batch)
        wanted.backward()
        assert len(passes) == 1
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=0)
        for one, other in zip(gradients, (p.grad for p in network.parameters() if p.grad is not None), strict=True):
            assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), 0) > 0.99
        network.zero_grad()
    # A second run reads what is there, and computes only what is not, whatever texts they were stored with.
    files = sorted(tmp_path.glob("states-*/part-*.safetensors"), key=lambda file: file.stat().st_size)
    assert len(files) == 2
    files[0].unlink()
    passes.clear()
    again = store_states(model, rows["input_ids"], tmp_path, most=1.0)
    assert len(passes) == 1 and torch.equal(
        again.read(batch["input_ids"], batch["attention_mask"]),
        stored.read(batch["input_ids"], batch["attention_mask"]),
    )
    passes.clear()
    store_states(model, [*rows["input_ids"][5:9], [4, 5, 6]], tmp_path, most=1.0)
    assert len(passes) == 1, "one text is new"
    hook.remove()
    tokens = sum(len(text) for text in {tuple(text) for text in rows["input_ids"]})
    with pytest.raises(
        PeftlabError, match=rf"store_gb: .* {tokens} tokens .* \(128 bytes per token\), more than 1e-06"
    ):
        store_states(model, rows["input_ids"], tmp_path, most=1e-6)
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 1000}))
    assert store_states(model, rows["input_ids"], tmp_path, most=1.0), "nothing is missing"
    with pytest.raises(PeftlabError, match="has room for 1e-06 GB"):
        store_states(model, rows["input_ids"], tmp_path / "elsewhere", most=1.0)


def test_known_states_pass_through_the_wrapped_model(target, tmp_path: Path) -> None:
    """DDP averages gradients only after a forward pass through it: without one, each process would train on its own."""
    rows = make_dataset(requests(4))
    target.requires_grad_(False)
    model, batch = TargetWithNetwork(target, eagle(target, TOKENS).train()), Collate()([rows[i] for i in range(4)])
    stored = store_states(model, rows["input_ids"], tmp_path, most=1.0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", world_size=1, rank=0)
    try:
        averaged = []
        wrapped = DistributedDataParallel(model)

        def average(state, bucket):
            averaged.append(bucket.buffer().numel())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        wrapped.register_comm_hook(None, average)
        FeatureLoss(Objective("kl"), 2, 1.0, known=stored)(wrapped, batch).backward()
        assert sum(averaged) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    finally:
        dist.destroy_process_group()
