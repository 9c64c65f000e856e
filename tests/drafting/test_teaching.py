"""The losses of draft training against their plain definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draft_models import medusa, requests, tiny
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from peftlab.decoding.theory import acceptance_rate
from peftlab.drafting.acceptance import measure
from peftlab.drafting.base import in_mixed_precision
from peftlab.drafting.block import BlockLoss
from peftlab.drafting.early_exit import EarlyExitLoss, find_exit, measure_exits
from peftlab.drafting.heads import HeadsLoss, measure_heads
from peftlab.drafting.model import OnPolicy
from peftlab.drafting.objectives import OBJECTIVES, Objective, PairLoss, selective_mask, topk_targets
from peftlab.drafting.state_network import FeatureLoss, TargetWithNetwork
from peftlab.drafting.target import check_head, forward_hidden, head_weight, truncate
from peftlab.drafting.text import Collate, make_dataset, stored_topk
from peftlab.errors import PeftlabError
from peftlab.methods.inject import count_parameters, inject, make_config, trainable_parameters
from peftlab.tasks.prompts import Request
from peftlab.training.config import TrainConfig
from tests.eagle_models import dflash, eagle


def batch_of(rows: Any) -> dict[str, torch.Tensor]:
    return Collate(pad=2)([rows[i] for i in range(len(rows))])


def plain(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and following tokens at the counted places, by the model's own forward."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    places = batch["weights"] > 0
    return logits[places], batch["input_ids"].roll(-1, 1)[places]


@pytest.mark.parametrize("name", ["ce", "kl", "reverse_kl", "jsd", "tvd", "lk", "lk_hybrid"])
def test_pair_loss_and_gradient_are_the_plain_ones(name: str) -> None:
    target, draft = tiny(0), tiny(1)
    batch = batch_of(make_dataset(requests()))
    settings = {"beta": 0.3} if name == "jsd" else {}
    loss = PairLoss(Objective(name, settings), target)(draft, batch)
    loss.backward()
    gradients = {key: p.grad.clone() for key, p in draft.named_parameters()}
    draft.zero_grad()
    logits, following = plain(draft, batch)
    with torch.no_grad():
        teacher = following if name == "ce" else plain(target, batch)[0]
    expected = OBJECTIVES[name](teacher, logits, **settings).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    for key, parameter in draft.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-3, atol=1e-4)
    assert all(p.grad is None for p in target.parameters())


def test_pair_loss_on_stored_top_k(tmp_path: Any) -> None:
    target, draft, rows = tiny(0), tiny(1), requests()
    batch = batch_of(make_dataset(rows, stored_topk(target, rows, 5, tmp_path)))
    loss = PairLoss(Objective("topk_kl"))(draft, batch)
    with torch.no_grad():
        exact = OBJECTIVES["topk_kl"](topk_targets(plain(target, batch)[0], 5), plain(draft, batch)[0]).sum()
    torch.testing.assert_close(loss.detach(), exact, rtol=1e-4, atol=1e-4)


def test_the_sum_does_not_depend_on_how_a_batch_is_dealt() -> None:
    target, draft, reference = tiny(0), tiny(1), tiny(2)
    rows = make_dataset(requests())
    loss = PairLoss(Objective("kl", share=0.4), target, reference)
    whole = loss(draft, batch_of(rows))
    parts = loss(draft, batch_of(rows.select(range(2)))) + loss(draft, batch_of(rows.select(range(2, 6))))
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-4)


def test_selective_filter_keeps_the_stated_share_of_each_example() -> None:
    target, draft, reference = tiny(0), tiny(1), tiny(2)
    rows, objective = make_dataset(requests()), Objective("kl", share=0.4)
    batch = batch_of(rows)
    with torch.no_grad():
        own, theirs = (OBJECTIVES["kl"](plain(target, batch)[0], plain(m, batch)[0]) for m in (draft, reference))
        row = (batch["weights"] > 0).nonzero()[:, 0]
        kept = sum(selective_mask(own, theirs, 0.4, row == i).int() for i in range(len(rows))).bool()  # type: ignore[union-attr]
        loss = PairLoss(objective, target, reference)(draft, batch)
    torch.testing.assert_close(loss, own[kept].sum(), rtol=1e-4, atol=1e-4)
    assert int(kept.sum()) == sum(objective.kept(n) for n in rows["kept"])


def test_of_several_targets_each_row_is_compared_with_the_one_that_wrote_it() -> None:
    """Also where one has other layers and another width than the first."""
    first, second, draft, rows = tiny(0), tiny(3, layers=3, width=32), tiny(1), requests()
    loss = PairLoss(Objective("kl"), first, others=[second])
    mixed = make_dataset(rows, teachers=[0, 1, 0, 0, 1, 1])
    alone = [
        PairLoss(Objective("kl"), target)(draft, batch_of(make_dataset([rows[i] for i in own])))
        for target, own in ((first, (0, 2, 3)), (second, (1, 4, 5)))
    ]
    torch.testing.assert_close(loss(draft, batch_of(mixed)), sum(alone), rtol=1e-4, atol=1e-4)
    only = loss(draft, batch_of(make_dataset(rows, teachers=[1] * 6)))
    torch.testing.assert_close(only, PairLoss(Objective("kl"), second)(draft, batch_of(make_dataset(rows))))


class TestOnPolicy:
    """Rows rewritten by the draft."""

    def test_rewritten_rows_are_the_drafts_own_and_weigh_as_much(self) -> None:
        draft, rows = tiny(1), make_dataset(requests())
        batch = batch_of(rows)
        torch.manual_seed(0)
        new = OnPolicy(1.0, 0.0, frozenset({2}))(draft, batch)
        assert set(new) == set(batch) and all(new[key].shape == batch[key].shape for key in new)
        for i in range(len(rows)):
            prompt, kept = rows[i]["prompt"], rows[i]["kept"]
            assert torch.equal(new["input_ids"][i, :prompt], batch["input_ids"][i, :prompt])
            ids = new["input_ids"][i : i + 1, :prompt]
            greedy = draft.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=kept, do_sample=False)
            written = greedy[0, prompt:].tolist()
            assert new["input_ids"][i, prompt : prompt + len(written)].tolist() == written
            assert float(new["weights"][i].sum()) == pytest.approx(kept)
            assert int((new["weights"][i] > 0).sum()) == len(written)
            assert int(new["attention_mask"][i].sum()) == prompt + len(written)

    def test_lambda_0_changes_nothing_and_in_between_some(self) -> None:
        draft, batch = tiny(1), batch_of(make_dataset(requests(24)))
        assert OnPolicy(0.0, 1.0, frozenset({2}))(draft, batch) is batch
        torch.manual_seed(1)
        some = OnPolicy(0.5, 1.0, frozenset({2}))(draft, batch)
        changed = (some["input_ids"] != batch["input_ids"]).any(1).sum()
        assert 4 <= int(changed) <= 20
        torch.manual_seed(1)
        again = OnPolicy(0.5, 1.0, frozenset({2}))(draft, batch)
        assert all(torch.equal(some[key], again[key]) for key in some), "a resumed run draws the same"

    def test_training_mode_and_weights_are_as_before(self) -> None:
        draft = inject(tiny(1), make_config("lora", r=2))
        draft.train()
        rewrite = OnPolicy(1.0, 0.0, frozenset({2}))
        batch = batch_of(make_dataset(requests()))
        first = rewrite(draft, batch)
        assert draft.training
        with torch.no_grad():
            for name, parameter in trainable_parameters(draft).items():
                if name.endswith("lora_B"):
                    parameter.normal_(std=2.0)
        assert not torch.equal(rewrite(draft, batch)["input_ids"], first["input_ids"]), "the draft as it is now writes"


class TestAcceptance:
    """What is measured on text."""

    def test_draft_is_target_is_exactly_1(self) -> None:
        target, rows = tiny(0), make_dataset(requests())
        assert measure(target, target, rows).rates() == pytest.approx({"acceptance": 1.0, "agreement": 1.0}
            | {"target_probability": measure(target, target, rows).rates()["target_probability"]}, abs=0)  # fmt: skip
        assert measure(target, target, rows).rates()["acceptance"] == 1.0

    def test_rates_are_those_of_the_definitions(self) -> None:
        target, draft, rows = tiny(0), tiny(1), make_dataset(requests())
        batch = batch_of(rows)
        with torch.no_grad():
            p, q = (plain(m, batch)[0].double().softmax(-1) for m in (target, draft))
        rates = measure(target, draft, rows, batch_size=4).rates()
        assert rates["acceptance"] == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-5)
        assert rates["agreement"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
        sure = p.gather(-1, q.argmax(-1)[:, None]).mean()
        assert rates["target_probability"] == pytest.approx(float(sure), abs=1e-5)
        torch.testing.assert_close(acceptance_rate(p, q), torch.minimum(p, q).sum(-1))

    def test_overfitting_one_sample_reaches_acceptance_1(self) -> None:
        target, draft = tiny(0), tiny(1, width=32)
        rows = make_dataset(requests(1))
        loss = PairLoss(Objective("kl"), target)
        optimiser = torch.optim.AdamW(draft.parameters(), lr=1e-2)
        for _ in range(150):
            optimiser.zero_grad()
            loss(draft, batch_of(rows)).backward()
            optimiser.step()
        rates = measure(target, draft, rows).rates()
        assert rates["agreement"] == 1.0 and rates["acceptance"] > 0.99


class TestHeads:
    """Medusa's loss and acceptance."""

    def test_cross_entropy_is_of_the_tokens_that_many_places_on(self) -> None:
        model = medusa(tiny(0), heads=2)
        batch = batch_of(make_dataset(requests(2)))
        loss = HeadsLoss(Objective("ce"), decay=0.5)(model, batch)
        hidden = forward_hidden(model, batch["input_ids"], batch["attention_mask"])[-1]
        logits = model.heads(hidden)
        expected = torch.zeros(())
        for i, row in enumerate(make_dataset(requests(2))):
            ids, prompt = torch.tensor(row["input_ids"]), row["prompt"]
            for head in range(2):
                for t in range(prompt - 1, len(ids) - 2 - head):
                    expected = expected + 0.5**head * F.cross_entropy(logits[head, i, t], ids[t + 2 + head])
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)

    def test_only_the_heads_learn_and_a_trained_trunk_is_held_to_the_base(self) -> None:
        batch = batch_of(make_dataset(requests()))
        frozen = medusa(tiny(0), heads=1)
        HeadsLoss(Objective("kl"))(frozen, batch).backward()
        assert {n for n, p in frozen.named_parameters() if p.grad is not None} == set(trainable_parameters(frozen))
        both = medusa(tiny(0), heads=1, trunk={"r": 2})
        loss = HeadsLoss(Objective("kl"), preserve=0.0)(both, batch)
        kept = HeadsLoss(Objective("kl"), preserve=10.0)(both, batch)
        torch.testing.assert_close(loss, kept, rtol=1e-5, atol=1e-3)  # nothing to hold to before training
        kept.backward()
        assert {n for n, p in both.named_parameters() if p.grad is not None} == set(trainable_parameters(both))
        with torch.no_grad():
            both.trunk.model.layers[0].self_attn.q_proj.lora_B.normal_(std=3)
        assert HeadsLoss(Objective("kl"), preserve=10.0)(both, batch) > 1.001 * HeadsLoss(
            Objective("kl"), preserve=0.0
        )(both, batch)

    def test_a_frozen_trunk_is_read_without_dropout(self) -> None:
        config = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.5)
        model = medusa(GPT2LMHeadModel(config).eval(), heads=2)
        batch, loss = batch_of(make_dataset(requests())), HeadsLoss(Objective("kl"))
        expected = loss(model, batch)
        model.train()
        found = loss(model, batch)
        found.backward()
        torch.testing.assert_close(found, expected)
        assert model.training and all(p.grad is not None for p in trainable_parameters(model).values())

    def test_an_untrained_head_repeats_the_base_head(self) -> None:
        model = medusa(tiny(0), heads=3)
        hidden = torch.randn(4, 16)
        with torch.no_grad():
            expected = model.trunk.lm_head(hidden)
            for logits in model.heads(hidden):
                assert torch.equal(logits, expected)

    def test_without_weights_the_same_parameters_are_counted(self) -> None:
        counts = [count_parameters(medusa(m, heads=3, bias=True)) for m in (tiny(), tiny().to("meta"))]
        assert counts[0] == counts[1] and counts[0][0] == 3 * (16 * 16 + 16 + 40 * 16)

    def test_acceptance_of_heads(self) -> None:
        model, rows = medusa(tiny(0), heads=2), make_dataset(requests(3))
        heads, trunk = measure_heads(model, rows)
        assert trunk.rates()["acceptance"] == 1.0
        assert [int(head.tokens.sum()) for head in heads] == [sum(n - 1 - i for n in rows["kept"]) for i in range(2)]
        short = make_dataset([Request([1, 2], [3, 4])])
        found, _ = measure_heads(medusa(tiny(0), heads=4), short)
        assert [int(head.tokens.sum()) for head in found] == [1, 0, 0, 0]


class _Products(TorchDispatchMode):
    """Collects the dtypes of matrix products within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.dtypes |= {value.dtype for value in args if isinstance(value, torch.Tensor)}
        return func(*args, **kwargs or {})


def _features() -> tuple[Any, Any]:
    target = tiny(3, layers=4).requires_grad_(False)
    return FeatureLoss(Objective("kl"), 3, 0.8), TargetWithNetwork(target, eagle(target))


def _blocks() -> tuple[Any, Any]:
    target = tiny(3, layers=4).requires_grad_(False)
    return BlockLoss(Objective("kl"), 8, 0.8), TargetWithNetwork(target, dflash(target, mask_token=2))


def _heads() -> tuple[Any, Any]:
    return HeadsLoss(Objective("kl")), medusa(tiny(0), heads=2)


@pytest.mark.parametrize("make", [_features, _blocks, _heads])
def test_modules_of_a_draft_compute_in_the_precision_of_training(make: Callable[[], tuple[Any, Any]]) -> None:
    """Accelerate's autocast covers the forward pass of the model, and these modules compute outside it."""
    losses = {}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        loss, model = make()
        torch.manual_seed(0)
        with _Products() as products:
            value = in_mixed_precision(loss, TrainConfig(lr=1e-3, precision=precision))(
                model, batch_of(make_dataset(requests()))
            )
            value.backward()
        assert products.dtypes == {dtype}
        losses[precision] = float(value.detach())
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)


def test_early_exit_is_the_truncated_model() -> None:
    model, rows = tiny(0, layers=3), make_dataset(requests())
    cut = truncate(model, [0, 1])
    with torch.no_grad():
        batch = batch_of(rows)
        expected = OBJECTIVES["kl"](plain(model, batch)[0], plain(cut, batch)[0]).sum()
        expected_rates = measure(model, cut, rows).rates()
    inject(model, make_config("lora", r=2, target_modules="all-linear"))
    found = find_exit(model, 2)
    loss = EarlyExitLoss(Objective("kl"), [found], [1.0, 1.0])(model, batch)
    torch.testing.assert_close(loss.detach(), expected / 2, rtol=1e-4, atol=1e-3)
    early, whole = measure_exits(model, [found], rows)
    assert early.rates() == pytest.approx(expected_rates, abs=1e-6)
    assert whole.rates()["acceptance"] == 1.0
    loss.backward()
    assert trainable_parameters(model)["model.layers.0.self_attn.q_proj.lora_B"].grad is not None


def test_the_head_check_finds_what_comes_after_the_head() -> None:
    check_head(tiny(0), "target")
    capped = tiny(0)
    capped.lm_head.register_forward_hook(lambda module, inputs, output: 5 * torch.tanh(output / 5))
    with pytest.raises(PeftlabError, match="target: LlamaForCausalLM computes other logits"):
        check_head(capped, "target")
    biased = tiny(0)
    biased.lm_head.bias = torch.nn.Parameter(torch.zeros(40))
    with pytest.raises(PeftlabError, match="has a bias"):
        head_weight(biased)


def test_continuations_too_short_for_a_head_teach_nothing_and_break_nothing() -> None:
    model = medusa(tiny(0), heads=2)
    loss = HeadsLoss(Objective("kl"))(model, batch_of(make_dataset([Request([5, 6], [7]), Request([8], [9])])))
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in trainable_parameters(model).values())
