"""DFlash and DSpark: training is what drafting computes, what a block sees, how its tokens weigh, and what its files contain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import VOCAB, requests, tiny
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from peftlab.drafting.block import (
    BlockAttention,
    BlockLoss,
    BlockStep,
    DFlash,
    confidence_inputs,
    dpace_weights,
    draw_anchors,
    measure_blocks,
    predicted_places,
    read_dflash,
    write_dflash,
)
from peftlab.drafting.objectives import Objective, kl
from peftlab.drafting.state_network import TargetWithNetwork, target_states
from peftlab.drafting.target import head_weight, input_embedding
from peftlab.drafting.text import Collate, make_dataset
from peftlab.errors import PeftlabError
from tests.eagle_models import dflash

TOKENS = torch.tensor([0, 1, 2, 5, 7, 8, 11, 20, 21, 33, 39])
ANCHORS = torch.tensor([[0, 3, 5, 9], [1, 2, 8, 11]])


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny(3, layers=4).requires_grad_(False)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, 14), generator=torch.Generator().manual_seed(1))


def network_of(target: Any, tokens: torch.Tensor | None = None, **sizes: Any) -> DFlash:
    """A network away from its start, whose norms are not one."""
    network = dflash(target, tokens, **{"block_size": 4, "mask_token": 2} | sizes)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, std=0.3)
            elif "markov" in name or "confidence" in name:
                parameter.normal_(std=0.5)
    return network


def spark(kind: str, rank: int = 5, **sizes: Any) -> dict[str, Any]:
    """The fields of a DSpark's shape."""
    return {"from_anchor": True, "markov_rank": rank, "markov_head": kind, "confidence": True} | sizes


def features_of(target: Any, network: DFlash, ids: torch.Tensor) -> torch.Tensor:
    return target_states(TargetWithNetwork(target, network), ids, torch.ones_like(ids))[0]


@pytest.mark.parametrize("window", [None, 5])
@torch.no_grad()
def test_several_anchors_are_as_one_by_one(target: Any, ids: torch.Tensor, window: int | None) -> None:
    network = network_of(target, window=window)
    features = features_of(target, network, ids)
    together = network.drafts(features, ids, ANCHORS)
    for i in range(ANCHORS.shape[1]):
        torch.testing.assert_close(network.drafts(features, ids, ANCHORS[:, i : i + 1])[:, 0], together[:, i])


@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_what_a_block_sees(target: Any, ids: torch.Tensor, window: int | None) -> None:
    """The states before the anchor, and the anchor's token: nothing at or behind it. A window ends at the row itself."""
    network = network_of(target, window=window, layers=1)
    features = features_of(target, network, ids)
    anchors = torch.tensor([[6], [6]])
    wanted = network.drafts(features, ids, anchors)
    for place in range(ids.shape[1]):
        changed, others = features.clone(), ids.clone()
        changed[:, place] += 1
        others[:, place] = 30
        # Rows 1 to 3 stand at places 7 to 9.
        rows = [place < 6 and (window is None or place > row - window) for row in (7, 8, 9)]
        differs = (network.drafts(changed, ids, anchors) != wanted).flatten(3).any(-1)[0, 0]
        assert differs.tolist() == rows, place
        # A row of a window of 3 sees the rows one and two before it.
        seen = [place == 6 and (window is None or row - window < 6) for row in (7, 8, 9)]
        assert (network.drafts(features, others, anchors) != wanted).any(-1)[0, 0].tolist() == seen, place


@pytest.mark.parametrize("window", [None, 4])
def test_attention_is_dense_attention_with_a_mask(window: int | None) -> None:
    """Over all T states and n·B rows, [n·B, T + n·B], by one mask."""
    generator = torch.Generator().manual_seed(0)
    b, heads, kv, dim, length, size = 2, 4, 2, 8, 12, 4
    n = ANCHORS.shape[1]
    keys, values = (torch.randn(b, kv, length, dim, generator=generator) for _ in "kv")
    q = torch.randn(b, heads, n * size, dim, generator=generator)
    k, v = (torch.randn(b, kv, n * size, dim, generator=generator) for _ in "kv")
    places = ANCHORS[..., None] + torch.arange(size)
    rows, text = places.flatten(1)[..., None], torch.arange(length)
    first = places[..., :1].expand(-1, -1, size).flatten(1)[..., None]
    far = text < first
    near = first == first.mT
    if window is not None:
        far = far & (rows - text < window)
        near = near & (rows >= rows.mT) & (rows - rows.mT < window)
    whole = F.scaled_dot_product_attention(
        q,
        torch.cat((keys, k), 2),
        torch.cat((values, v), 2),
        attn_mask=torch.cat((far, near), -1)[:, None],
        enable_gqa=True,
    )
    torch.testing.assert_close(BlockAttention(keys, values, places, window)(q, k, v), whole)


@pytest.mark.parametrize("tokens", [None, TOKENS])
@pytest.mark.parametrize("window", [None, 5])
@torch.no_grad()
def test_a_drafted_block_is_one_of_training(
    target: Any, ids: torch.Tensor, tokens: torch.Tensor | None, window: int | None
) -> None:
    """With a cache into which the states come in parts, and several rows of different lengths."""
    network = network_of(target, tokens, window=window)
    step, features = BlockStep(network, pack=False), features_of(target, network, ids)
    cache = step.new_cache(2, 32)
    step.read(cache, features[:, :3], cache.block([0, 1], [0, 0], 3))
    for at in ([3, 3], [5, 3], [9, 8]):
        for row, end in enumerate(at):  # as one row has more new states than the other, each comes alone
            step.read(cache, features[row : row + 1, 3:end], cache.block([row], [3], end - 3)) if end > 3 else None
        anchors = torch.tensor(at)[:, None]
        last = ids.gather(1, anchors)[:, 0]
        drafted = step.draft(cache, last, cache.block([0, 1], at, step.block_size), 3)
        trained = network.drafts(features, ids, anchors)[:, 0]
        torch.testing.assert_close(drafted.logits, network.logits(trained), atol=1e-5, rtol=1e-4)
        assert drafted.logits.argmax(-1).equal(network.logits(trained).argmax(-1))
        fewer = step.draft(cache, last, cache.block([0, 1], at, step.block_size), 2)
        torch.testing.assert_close(fewer.logits, drafted.logits[:, :2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 5])
@torch.no_grad()
def test_packed_rows_draft_the_same(ids: torch.Tensor, window: int | None, dtype: torch.dtype) -> None:
    """Compiled, where there is numba: heads of 16 numbers."""
    target = tiny(3, layers=4, width=32)
    network = network_of(target, window=window, **spark("gated", rank=16))
    features = features_of(target, network, ids)
    last, at = torch.stack((ids[0, 9], ids[1, 6])), [9, 6]
    anchors = torch.tensor(at)[:, None]
    wanted = network.drafts(features, ids, anchors)[:, 0]
    before = ids.gather(1, anchors)
    scored = network.scored(wanted[:, None], before[:, :, None].expand(-1, -1, 4))[:, 0, 0] @ network.score_weight.T
    network.parts_to(dtype)
    step = BlockStep(network)
    cache = step.new_cache(2, 32)
    for row, end in enumerate(at):
        step.read(cache, features[row : row + 1, :end], cache.block([row], [0], end))
    drafted = step.draft(cache, last, cache.block([0, 1], at, step.block_size), 4)
    found, _ = step.place(drafted, 0, before, None)
    exact = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1.0, "rtol": 0.05}
    torch.testing.assert_close(found.logits[:, 0].float(), scored, **exact)


@pytest.mark.parametrize("tokens", [None, TOKENS])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@torch.no_grad()
def test_a_token_drafted_after_another_is_one_of_training(
    target: Any, ids: torch.Tensor, tokens: torch.Tensor | None, kind: str
) -> None:
    """Left to right with the drafted token, against all slots at once with the text's."""
    network = network_of(target, tokens, **spark(kind))
    step, features = BlockStep(network, pack=False), features_of(target, network, ids)
    assert (step.length, step.sees_tokens) == (4, True) and step.acceptance is not None
    anchors = torch.tensor([[6], [8]])
    places = anchors[..., None] + torch.arange(4)
    before = ids.gather(1, places.flatten(1)).view_as(places)
    scored = network.scored(network.drafts(features, ids, anchors), before)
    trained = scored[:, 0] @ network.score_weight.T  # [b, P, V_d]
    odds = network.confidence_head(confidence_inputs(network, scored.flatten(0, 2), before.flatten())).view(2, 4)
    cache, memory = step.new_cache(2, 32), None
    step.read(cache, features[:, :8], cache.block([0, 1], [0, 0], 8))
    drafted = step.draft(cache, ids.gather(1, anchors)[:, 0], cache.block([0, 1], [6, 8], 4), 4)
    for k in range(4):
        found, memory = step.place(drafted, k, before[:, 0, k : k + 1], memory)
        torch.testing.assert_close(found.logits[:, 0], trained[:, k], atol=1e-5, rtol=1e-4)
        for row in range(2):
            assert step.acceptance(found.hidden[row, 0]) == pytest.approx(float(odds[row, k].sigmoid()), abs=1e-5)
    other = network.scored(network.drafts(features, ids, anchors), before.roll(1, -1))
    assert not torch.allclose(other, scored)


def test_a_bias_stays_with_its_tokens(target: Any) -> None:
    network, head = network_of(target, TOKENS, **spark("vanilla")), head_weight(target)
    rows = network.markov_head.markov_w2.weight.detach().clone()
    network.draft_only(head, None)
    whole = network.markov_head.markov_w2.weight.detach()
    assert whole.shape == (VOCAB, 5) and torch.equal(whole[TOKENS], rows)
    assert int(whole.any(1).sum()) == len(TOKENS)
    network.draft_only(head[TOKENS[3:]], TOKENS[3:])
    assert torch.equal(network.markov_head.markov_w2.weight, rows[3:]) and network.score_weight.shape == (8, 16 + 5)


def test_the_loss_of_heads_is_that_of_the_logits_and_of_the_acceptance(target: Any) -> None:
    network, data = network_of(target, TOKENS, **spark("rnn")), make_dataset(requests())
    inputs, model = Collate(pad=2)([data[i] for i in range(len(data))]), TargetWithNetwork(target, network)
    ids, counted = inputs["input_ids"], inputs["weights"] > 0
    features, final = target_states(model, ids, inputs["attention_mask"])
    torch.manual_seed(3)
    found = BlockLoss(Objective("kl"), 4, 0.7)(model, inputs)
    torch.manual_seed(3)
    anchors, drawn = draw_anchors(counted, 4)
    places, both = predicted_places(anchors, counted, 4)
    both = both & drawn[..., None]
    before = ids.gather(1, places.flatten(1)).view_as(places)
    scored = network.scored(network.drafts(features, ids, anchors), before)[both]
    rows = torch.arange(len(ids))[:, None, None].expand_as(places)
    p, q = final[rows, places][both] @ network.lm_head.weight.T, scored @ network.score_weight.T
    weights = (0.7 ** torch.arange(4)).expand_as(both)[both]
    overlap = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).detach()
    odds = network.confidence_head(confidence_inputs(network, scored, before[both]))
    error = F.binary_cross_entropy(odds.sigmoid(), overlap, reduction="none")
    wanted = ((kl(p, q) + error) * weights).sum() / weights.sum() * counted.sum()
    torch.testing.assert_close(found, wanted)
    gradients = [
        torch.autograd.grad(loss, [p for p in network.parameters() if p.requires_grad]) for loss in (found, wanted)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


def test_anchors_are_places_of_the_continuation_drawn_anew() -> None:
    places = torch.zeros(3, 12, dtype=torch.bool)
    places[0, 2:9], places[1, 4:6] = True, True
    torch.manual_seed(0)
    drawn = [draw_anchors(places, 4) for _ in range(20)]
    for anchors, real in drawn:
        assert real.sum(1).tolist() == [4, 2, 0]
        for row in range(3):
            own = anchors[row][real[row]].tolist()
            assert own == sorted(set(own)) and places[row, own].all()
    assert len({tuple(anchors[0].tolist()) for anchors, _ in drawn}) > 3
    anchors, real = draw_anchors(places, 100)
    assert anchors[0][real[0]].tolist() == list(range(2, 9))


@pytest.mark.parametrize("tokens", [None, TOKENS])
@pytest.mark.parametrize(("name", "dpace"), [("kl", None), ("ce", None), ("kl", 0.5), ("ce", 0.5)])
def test_the_loss_is_the_weighted_mean_over_all_blocks(
    target: Any, tokens: torch.Tensor | None, name: str, dpace: float | None
) -> None:
    network, data = network_of(target, tokens), make_dataset(requests())
    inputs, model = Collate(pad=2)([data[i] for i in range(len(data))]), TargetWithNetwork(target, network)
    found = BlockLoss(Objective(name), 50, 0.7, dpace)(model, inputs)  # 50: a block at every place
    ids, weights = inputs["input_ids"], inputs["weights"]
    features, final = target_states(model, ids, inputs["attention_mask"])
    head, total, norm = network.lm_head.weight, 0.0, 0.0
    for row in range(len(ids)):
        for anchor in weights[row].nonzero()[:, 0].tolist():
            states = network.drafts(features[row : row + 1], ids[row : row + 1], torch.tensor([[anchor]]))[0, 0]
            logits, losses, right, counted = network.logits(states).detach(), [], [], []
            for k in range(3):
                place = anchor + k
                if place >= ids.shape[1] or not weights[row, place]:
                    continue
                label = int(network.draft_ids(ids[row, place + 1]))
                if name == "ce" and label < 0:
                    continue
                counted.append(k)
                right.append(float(logits[k].softmax(-1)[label]) if label >= 0 else 0.0)
                if name == "ce":
                    losses.append(float(-logits[k].log_softmax(-1)[label]))
                else:
                    losses.append(float(kl(F.linear(final[row, place], head)[None], logits[k][None])))
            reached = torch.tensor([0.5 * q + 0.5 for q in right]).cumprod(0)
            for i, (k, loss) in enumerate(zip(counted, losses, strict=True)):
                weight = 0.7**k if dpace is None else float(reached[i:].sum())
                total, norm = total + weight * loss, norm + weight
    assert float(found.detach()) == pytest.approx(total / norm * float((weights > 0).sum()), rel=1e-4)
    found.backward()
    assert all(p.grad is not None for p in network.parameters() if p.requires_grad)


def test_dpace_weighs_a_token_by_what_the_accepted_length_owes_to_it() -> None:
    """It is ∂ Σ_j Π_{i≤j} s_i / ∂ log s_k."""
    q = torch.tensor([[0.9, 0.2, 0.6, 0.5]], dtype=torch.float64)
    s = (0.5 * q + 0.5).requires_grad_()
    length = s[:, :3].cumprod(-1).sum()
    (gradient,) = torch.autograd.grad(length, s)
    counted = torch.tensor([[True, True, True, False]])
    torch.testing.assert_close(dpace_weights(q, counted, 0.5)[:, :3], (gradient * s)[:, :3].detach())


def test_acceptance_is_measured_on_the_training_forward(target: Any) -> None:
    network, data = network_of(target), make_dataset(requests())
    model, sums = TargetWithNetwork(target, network), torch.zeros(3, 2)
    for row in (data[i] for i in range(len(data))):
        ids = torch.tensor(row["input_ids"])[None]
        features, final = target_states(model, ids, torch.ones_like(ids))
        counted = torch.zeros(1, ids.shape[1], dtype=torch.bool)
        counted[:, row["prompt"] - 1 : ids.shape[1] - 1] = True
        anchors = counted.nonzero()[:, 1][None]
        places, both = predicted_places(anchors, counted, 3)
        p = F.linear(final[0, places], head_weight(target)).softmax(-1)
        q = network.logits(network.drafts(features, ids, anchors)).softmax(-1)
        sums[:, 0] += (torch.minimum(p, q).sum(-1) * both).sum((0, 1))
        sums[:, 1] += both.sum((0, 1))
    measured = measure_blocks(model, data, 4)
    assert [each.rates()["acceptance"] for each in measured] == pytest.approx((sums[:, 0] / sums[:, 1]).tolist())


@pytest.mark.parametrize("head", [None, "vanilla", "gated", "rnn"])
@pytest.mark.parametrize(("tokens", "window"), [(None, None), (TOKENS, 7)])
def test_files_are_those_of_speculators(
    tmp_path: Path, target: Any, ids: torch.Tensor, tokens: torch.Tensor | None, window: int | None, head: str | None
) -> None:
    network = network_of(target, tokens, window=window, **({} if head is None else spark(head)))
    write_dflash(network, tmp_path, target="mine", architecture="LlamaForCausalLM")
    h, d, between = 16, 8, 32
    expected = {"fc.weight": (h, 3 * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for i in range(2):
        expected |= {
            **{f"layers.{i}.{name}_layernorm.weight": (h,) for name in ("input", "post_attention")},
            **{f"layers.{i}.self_attn.{name}_proj.weight": (h, h) for name in "qkvo"},
            **{f"layers.{i}.self_attn.{name}_norm.weight": (d,) for name in "qk"},
            **{f"layers.{i}.mlp.{name}_proj.weight": (between, h) for name in ("gate", "up")},
            f"layers.{i}.mlp.down_proj.weight": (h, between),
        }
    if tokens is not None:
        expected |= {"lm_head.weight": (len(tokens), h), "d2t": (len(tokens),), "t2d": (VOCAB,)}
    if head is not None:
        expected |= {"markov_head.markov_w1.weight": (VOCAB, 5)}
        expected |= {"markov_head.markov_w2.weight": (VOCAB if tokens is None else len(tokens), 5)}
        expected |= {"confidence_head.proj.weight": (1, h + 5), "confidence_head.proj.bias": (1,)}
        name, rows, width = {"gated": ("gate", 5, h + 5), "rnn": ("joint", 15, h + 10), "vanilla": ("", 0, 0)}[head]
        if name:
            expected |= {f"markov_head.{name}_proj.weight": (rows, width), f"markov_head.{name}_proj.bias": (rows,)}
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    wanted = {"block_size": 4, "mask_token_id": 2, "sample_from_anchor": head is not None}
    wanted |= {"aux_hidden_state_layer_ids": [1, 2, 3]}
    if head is not None:
        wanted |= {"markov_rank": 5, "markov_head_type": head, "enable_confidence_head": True}
        wanted |= {"confidence_head_with_markov": True, "architectures": ["DSparkDraftModel"]}
    wanted |= {"speculators_model_type": "dspark" if head else "dflash", "sliding_window_non_causal": window is None}
    assert {key: config[key] for key in wanted} == wanted
    layer = config["transformer_layer_config"]
    kind = "full_attention" if window is None else "sliding_attention"
    assert (layer["layer_types"], layer["sliding_window"], layer["model_type"]) == ([kind] * 2, window, "qwen3")
    back = read_dflash(tmp_path, input_embedding(target), head_weight(target))
    assert back.shape == network.shape
    features = features_of(target, network, ids)
    with torch.no_grad():
        places = ANCHORS[..., None] + torch.arange(network.shape.length)
        before = ids.gather(1, places.clamp_max(13).flatten(1)).view_as(places)
        mine, theirs = (
            each.scored(each.drafts(features, ids, ANCHORS), before) @ each.score_weight.T for each in (network, back)
        )
    assert torch.equal(mine, theirs)
    save_file(tensors | {"strange": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(PeftlabError, match="strange"):
        read_dflash(tmp_path, input_embedding(target), head_weight(target))


def _set(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    if key in config["transformer_layer_config"]:
        return config | {"transformer_layer_config": config["transformer_layer_config"] | {key: value}}
    return config | {key: value}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("aux_hidden_state_layer_ids", [3, 1, 2], "aux_hidden_state_layer_ids must be layer numbers from 0, rising"),
        ("aux_hidden_state_layer_ids", [1, 2], "tensors that do not fit its configuration: fc.weight"),
        ("num_hidden_layers", 3, "layer_types must be 3 times full_attention or 3 times sliding_attention"),
        ("block_size", 1, "block_size 1"),
        ("mask_token_id", VOCAB, f"mask_token_id {VOCAB} must be"),
        ("sample_from_anchor", 1, "sample_from_anchor"),
        ("attention_bias", True, "without attention_bias"),
        ("layer_types", ["full_attention", "sliding_attention"], "layer_types must be 2 times"),
        ("draft_vocab_size", 11, "d2t is not the map of 11 drafted tokens"),
        ("speculators_model_type", "eagle3", "speculators_model_type is 'eagle3', not dflash or dspark"),
    ],
)
def test_a_file_whose_settings_contradict_its_tensors_is_refused(
    tmp_path: Path, target: Any, key: str, value: Any, words: str
) -> None:
    write_dflash(network_of(target), tmp_path, target="mine", architecture="LlamaForCausalLM")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(_set(config, key, value)))
    with pytest.raises(PeftlabError, match=words):
        read_dflash(tmp_path, input_embedding(target), head_weight(target))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("markov_rank", 4, "tensors that do not fit its configuration: confidence_head.proj.weight, markov_head"),
        ("markov_rank", 0, "tensors that do not fit its configuration: confidence_head.proj.weight, markov_head"),
        ("markov_head_type", "gated", "tensors that do not fit its configuration: markov_head.gate_proj.bias"),
        ("markov_head_type", "deep", "markov_head_type 'deep' one of vanilla, gated and rnn"),
        ("enable_confidence_head", False, "tensors that do not fit its configuration: confidence_head.proj.bias"),
        ("confidence_head_with_markov", False, "tensors that do not fit its configuration: confidence_head.proj.wei"),
    ],
)
def test_heads_that_contradict_their_tensors_are_refused(
    tmp_path: Path, target: Any, key: str, value: Any, words: str
) -> None:
    write_dflash(network_of(target, **spark("vanilla")), tmp_path, target="mine", architecture="LlamaForCausalLM")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(PeftlabError, match=words):
        read_dflash(tmp_path, input_embedding(target), head_weight(target))


def test_a_full_vocabulary_needs_the_targets_head(tmp_path: Path, target: Any) -> None:
    network = network_of(target)
    write_dflash(network, tmp_path, target="mine", architecture="LlamaForCausalLM")
    with pytest.raises(PeftlabError, match="by the LM head of its target"):
        read_dflash(tmp_path, input_embedding(target))
