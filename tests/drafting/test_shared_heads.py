"""Medusa heads that answer through the target's own LM head: the same numbers, one matrix, one head's logits."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import medusa, requests, tiny
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peftlab.checkpoints.adapter import load_adapter, save_adapter
from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.state_drafters import HeadsDrafter
from peftlab.drafting.heads import HeadsLoss, MedusaHeads, check_trunk, measure_heads, read_medusa, write_medusa
from peftlab.drafting.objectives import Objective, kl
from peftlab.drafting.target import head_weight, last_hidden
from peftlab.drafting.text import Collate, make_dataset
from peftlab.errors import PeftlabError
from peftlab.methods.inject import count_parameters, disabled, is_injected, make_config, trainable_parameters
from peftlab.models.load import load_base
from tests.forked import python

TRUNK = {"r": 2}


def injected(model: Any = None, *, heads: int = 3, **fields: Any) -> Any:
    return medusa(model, heads=heads, shared_head=True, **fields)


def stirred(model: Any) -> Any:
    """Move all that trains away from its start, where heads are alike and gradients vanish."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.normal_(std=0.3)
    return model


def batch(count: int = 6, **lengths: int) -> dict[str, Tensor]:
    rows = make_dataset(requests(count, **lengths))
    return Collate(pad=2)([rows[i] for i in range(len(rows))])


def summed_loss(model: Any, inputs: dict[str, Tensor], *, decay: float, preserve: float) -> Tensor:
    """All heads' whole logits at once, one graph, one backward: what the loss is by its definition."""
    ids, mask, weights = (inputs[key] for key in ("input_ids", "attention_mask", "weights"))
    hidden, head = last_hidden(model, ids, mask), head_weight(model)
    with torch.no_grad(), disabled(model.trunk) if is_injected(model.trunk) else nullcontext():
        base = F.linear(last_hidden(model, ids, mask), head)
    logits = model.heads(hidden)  # [K, b, n, V]
    loss = preserve * kl(base[weights > 0], F.linear(hidden, head)[weights > 0]).sum()
    for i in range(len(logits)):
        places = (weights[:, : -i - 1] > 0) & (weights[:, i + 1 :] > 0)
        loss = loss + decay**i * kl(base[:, i + 1 :][places], logits[i, :, : -i - 1][places]).sum()
    return loss


class TestModule:
    """What is put into the model."""

    def test_before_training_every_head_is_the_lm_head(self) -> None:
        model = injected(bias=True)
        hidden = torch.randn(4, 16)
        assert all(torch.equal(block(hidden), hidden) for block, _ in model.heads)
        logits = model.heads(hidden)
        torch.testing.assert_close(logits, model.trunk.lm_head(hidden).expand(3, -1, -1))
        stirred(model)
        assert not torch.allclose(model.heads(hidden), logits)

    def test_one_product_is_the_product_of_each_head(self) -> None:
        heads = stirred(injected()).heads
        hidden = torch.randn(2, 5, 16)
        each = torch.stack([F.linear(block(hidden), weight) for block, weight in heads])
        assert each.shape == (3, 2, 5, 40)
        torch.testing.assert_close(heads(hidden), each)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_there_is_one_matrix_and_it_stays_the_models(self, dtype: torch.dtype) -> None:
        model = tiny(0).to(dtype)
        weight = model.lm_head.weight
        model = injected(model)
        assert all(w2 is weight for _, w2 in model.heads)
        assert weight.dtype == dtype and not weight.requires_grad
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        assert {p.dtype for p in trainable_parameters(model).values()} == {kept}
        twin = copy.deepcopy(model)
        assert all(w2 is twin.trunk.lm_head.weight is not weight for _, w2 in twin.heads)
        assert model.trunk.lm_head.weight is weight and type(model.trunk.lm_head) is torch.nn.Linear

    def test_only_the_blocks_train_and_count_also_without_weights(self) -> None:
        base = count_parameters(tiny())[1]
        for model in (tiny(), tiny().to("meta")):
            assert count_parameters(injected(model, bias=True)) == (3 * (16 * 16 + 16), base + 3 * (16 * 16 + 16))
        assert all(".blocks." in name for name in trainable_parameters(injected()))

    @pytest.mark.parametrize("tied", [False, True])
    def test_a_trunk_that_trains_the_lm_head_is_refused_and_nothing_is_changed(self, tied: bool) -> None:
        model = tiny(0)
        if tied:
            model.lm_head.weight = model.model.embed_tokens.weight
        before = set(model.state_dict())
        name = "embed_tokens" if tied else "lm_head"
        with pytest.raises(PeftlabError, match=rf"method lora trains .*{name}\.weight.*take it out"):
            check_trunk(model, make_config("lora", **TRUNK, modules_to_save=[name]))
        assert set(model.state_dict()) == before and all(p.requires_grad for p in model.parameters())


class TestTraining:
    """One head after the other."""

    @pytest.mark.parametrize("trunk", [None, TRUNK], ids=["frozen", "trained"])
    def test_loss_and_gradients_are_those_of_the_sum(self, trunk: Any) -> None:
        model, inputs = stirred(injected(tiny(0).double(), trunk=trunk)), batch()
        loss = HeadsLoss(Objective("kl"), decay=0.7, preserve=3.0)(model, inputs)
        loss.backward()
        found = {name: p.grad.clone() for name, p in trainable_parameters(model).items()}
        model.zero_grad()
        expected = summed_loss(model, inputs, decay=0.7, preserve=3.0 if trunk else 0.0)
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
        for name, parameter in trainable_parameters(model).items():
            assert parameter.grad.abs().max() > 1e-6, name
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-10)
        assert model.trunk.lm_head.weight.grad is None
        assert (trunk is not None) == any("lora" in name for name in found)

    @pytest.mark.parametrize("trunk", [None, TRUNK], ids=["frozen", "trained"])
    def test_three_more_heads_cost_no_more_logits(self, trunk: Any) -> None:
        """In units of one head's logits [T, V], the sum holds each head's several times, the loss none more."""
        inputs = batch(4, prompt=3, response=30)
        unit = int((inputs["weights"] > 0).sum()) * 4096 * 4
        mine, naive = [], []
        for heads in (1, 4):
            model = injected(tiny(0, vocab=4096), heads=heads, trunk=trunk)
            loss = HeadsLoss(Objective("kl"), preserve=1.0)
            mine.append(peak(lambda model=model, loss=loss: loss(model, inputs).backward()) / unit)
            naive.append(
                peak(lambda model=model: summed_loss(model, inputs, decay=0.8, preserve=1.0).backward()) / unit
            )
        assert mine[0] > 1, "the measure sees logits"
        assert mine[1] - mine[0] < 0.25
        assert naive[1] - naive[0] > 3

    def test_acceptance_is_measured_through_the_lm_head(self) -> None:
        model, rows = stirred(injected()), make_dataset(requests())
        found, _ = measure_heads(model, rows)
        copied = medusa(tiny(0), heads=3)
        blocks = model.heads.blocks.state_dict()
        copied.heads.blocks.load_state_dict(blocks)
        expected, _ = measure_heads(copied, rows)
        assert [head.rates() for head in found] == [head.rates() for head in expected]


def peak(run: Any) -> int:
    """Return the most bytes that operators' results made by ``run`` held at one time."""
    held: dict[int, tuple[StorageWeakRef, int]] = {}
    most = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            answer = func(*args, **(kwargs or {}))
            for key in [key for key, (storage, _) in held.items() if storage.expired()]:
                del held[key]
            for tensor in tree_leaves((args, kwargs)):  # what the operator only passes on is not its own
                if isinstance(tensor, Tensor):
                    known.setdefault(tensor.untyped_storage()._cdata, StorageWeakRef(tensor.untyped_storage()))
            for tensor in tree_leaves(answer):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    if storage._cdata in known and not known[storage._cdata].expired():
                        continue
                    held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            most = max(most, sum(size for _, size in held.values()))
            return answer

    known: dict[int, StorageWeakRef] = {}
    with Watch():
        run()
    return most


class TestFiles:
    """Adapter, serving format, and the way back."""

    def test_heads_and_the_trunks_adapter_are_two_directories_and_come_back(self, tmp_path: Path) -> None:
        model = stirred(injected(bias=True, trunk=TRUNK))
        write_medusa(model.heads, tmp_path / "heads")
        save_adapter(model.trunk, tmp_path / "adapter")
        stored = load_file(tmp_path / "heads" / "model.safetensors")
        kinds = ("weight", "bias")
        blocks = {f"blocks.{i}.layers.0.{kind}" for i in range(3) for kind in kinds}
        assert set(stored) == blocks | {"lm_heads.0.weight"}
        adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert adapter and all("lora_" in name for name in adapter), "peft's format, the trunk's LoRA alone"
        back, heads = load_adapter(tiny(0), tmp_path / "adapter"), read_medusa(tmp_path / "heads")
        ids = torch.arange(3, 12)[None]
        hidden = last_hidden(model, ids, torch.ones_like(ids))
        assert torch.equal(last_hidden(back, ids, torch.ones_like(ids)), hidden)
        assert torch.equal(heads(hidden), model.heads(hidden))

    @pytest.mark.parametrize("tokens", [None, torch.tensor([1, 4, 7, 30])], ids=["all", "some"])
    def test_the_serving_format_has_one_w2(self, tmp_path: Path, tokens: Tensor | None) -> None:
        model = stirred(injected())
        back = read_medusa(write_medusa(model.heads, tmp_path / "m", tokens=tokens))
        stored = load_file(tmp_path / "m" / "model.safetensors")
        assert {name for name in stored if name.startswith("lm_heads")} == {"lm_heads.0.weight"}
        config = json.loads((tmp_path / "m" / "config.json").read_text())
        assert config["original_lm_head"] is True and config["num_heads"] == 3
        hidden = torch.randn(5, 16)
        picked, inner = (slice(None), back) if tokens is None else (tokens, back.heads)
        torch.testing.assert_close(inner(hidden), model.heads(hidden)[..., picked])
        write_medusa(medusa(tiny(0), heads=2).heads, tmp_path / "own")
        assert json.loads((tmp_path / "own" / "config.json").read_text())["original_lm_head"] is False


class TestRun:
    """From a command line to drafted tokens, on a real model."""

    @pytest.fixture(scope="class")
    def run(self, stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        out = tmp_path_factory.mktemp("shared") / "run"
        overrides = ["method=null", "draft={kind: medusa, heads: 3, shared_head: true, vocabulary: 400, markov: 8}"]
        small = ["data.samples=4", "data.max_new_tokens=24", "train.epochs=15", "train.max_length=64", "train.lr=1e-2"]
        peftlab("run", "draft/ci", f"target={stories}", *overrides, *small, f"output_dir={out}")
        return out

    def test_rates_by_head_and_rank_are_stored_with_the_heads(self, run: Path) -> None:
        ranks = read_medusa(run / "heads").ranks
        assert ranks is not None and len(ranks.rates) == 3 and ranks(0, 0) > ranks(0, 1)

    def test_acceptance_rises(self, run: Path) -> None:
        results = json.loads((run / "results.json").read_text())
        assert results["score"] > results["baseline_score"] + 0.05
        assert results["trainable_parameters"] == 3 * 64 * 64 + 2 * 512 * 8
        after = results["decoding"]["after"]
        assert after["block_efficiency"] > 1 and sum(after["time"].values()) == pytest.approx(1)
        assert after["gain"]["tau"] == after["block_efficiency"] and len(after["gain"]["verification"]) == 13

    @pytest.mark.parametrize("width", [1, 4, None], ids=["chain", "tree", "measured"])
    def test_decoding_is_the_targets_own(self, run: Path, stories: Path, width: int | None) -> None:
        model, _ = load_base(str(stories), "AutoModelForCausalLM")
        engine, prompts = build_engine(model), [[1, 403, 407, 261], [1, 410], [1, 300, 320, 290, 270, 280]]
        plain = [output.tokens for output in decode(engine, prompts, StoppingCriteria(40))]
        drafter = HeadsDrafter(read_medusa(run / "heads"), width)
        drafted = decode(engine, prompts, StoppingCriteria(40), drafter, policy=partial(Fixed, 3))
        assert [output.tokens for output in drafted] == plain
        assert sum(step.accepted for output in drafted for step in output.steps) > 10

    def test_a_trained_lm_head_is_refused_before_anything_starts(self, stories: Path, tmp_path: Path) -> None:
        method = "method={name: lora, r: 2, modules_to_save: [embed_tokens]}"
        draft = "draft={kind: medusa, shared_head: true}"
        arguments = ("run", "draft/ci", f"target={stories}", method, draft, f"output_dir={tmp_path / 'out'}")
        assert "from which the heads learn" in peftlab(*arguments, status=2)
        assert not (tmp_path / "out").exists()


def test_standalone_heads_read_the_parameter_they_are_given() -> None:
    weight = torch.nn.Parameter(torch.randn(11, 6))
    heads = MedusaHeads(weight, 2, shared=True)
    with torch.no_grad():
        weight.zero_()
    assert not heads(torch.randn(3, 6)).any()


def peftlab(*arguments: str, status: int = 0) -> str:
    """Run the command line as a process and return what it said."""
    done = python("-m", "peftlab", *arguments, HF_HUB_OFFLINE="1")
    assert done.returncode == status, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())
