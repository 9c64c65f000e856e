from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from peftlab.drafting.objectives import OBJECTIVES, TopK, chunked_loss, topk_targets
from peftlab.errors import PeftlabError
from tests.forked import python

T, H, HT, V = 23, 6, 5, 17
FROM_HIDDEN = [name for name in OBJECTIVES if name not in ("ce", "topk_kl")]


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)

    def make(dtype=torch.float64):
        shapes = {"hidden": (T, H), "head": (V, H), "target": (T, HT), "target_head": (V, HT)}
        tensors = {
            name: (0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
            for name, shape in shapes.items()
        }
        tensors["hidden"].requires_grad_()
        tensors["head"].requires_grad_()
        return tensors

    return make


def gradients(loss, tensors):
    return torch.autograd.grad(loss, [tensors["hidden"], tensors["head"]])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
@pytest.mark.parametrize("objective", FROM_HIDDEN)
def test_value_and_gradients_are_the_plain_ones(batch, objective, chunk, weighted):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        t = batch(dtype)
        weights = (torch.arange(T) % 5).to(dtype) / 4 if weighted else None
        chunked = chunked_loss(t["hidden"], t["head"], t["target"], t["target_head"], objective, weights, chunk)
        losses = OBJECTIVES[objective](t["target"] @ t["target_head"].T, t["hidden"] @ t["head"].T)
        plain = losses.mean() if weights is None else (weights * losses).sum() / weights.sum()
        torch.testing.assert_close(chunked, plain, rtol=tolerance, atol=tolerance)
        for a, b in zip(gradients(3 * chunked, t), gradients(3 * plain, t), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_token_ids_stored_targets_and_logits_go_the_same_way(batch):
    t = batch()
    ids = torch.arange(T) % V
    target_logits = t["target"] @ t["target_head"].T
    for objective, target in (
        ("ce", ids),
        ("topk_kl", topk_targets(target_logits, 4)),
        ("kl", target_logits),
    ):
        chunked = chunked_loss(t["hidden"], t["head"], target, objective=objective, chunk=4)
        plain = OBJECTIVES[objective](target, t["hidden"] @ t["head"].T).mean()
        torch.testing.assert_close(chunked, plain, rtol=0, atol=1e-12)
        for a, b in zip(gradients(chunked, t), gradients(plain, t), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert isinstance(topk_targets(target_logits, 4), TopK)


@pytest.mark.parametrize("objective", FROM_HIDDEN)
def test_gradcheck(batch, objective):
    t = batch()
    settings = {"eta": 0.0} if objective == "lk_hybrid" else {}
    weights = torch.arange(4, dtype=torch.float64)

    def loss(hidden, head):
        return chunked_loss(
            hidden, head, t["target"][:4], t["target_head"], objective, weights, chunk=3, settings=settings
        )

    assert torch.autograd.gradcheck(loss, (t["hidden"][:4].detach().requires_grad_(), t["head"]))


def test_settings_reach_the_objective(batch):
    t = batch()
    values = {
        chunked_loss(t["hidden"], t["head"], t["target"], t["target_head"], "jsd", settings={"beta": b}).item()
        for b in (0.2, 0.5)
    }
    assert len(values) == 2


def test_only_what_wants_a_gradient_gets_one(batch):
    t = batch()
    arguments = (t["target"].requires_grad_(), t["target_head"].requires_grad_())
    chunked_loss(t["hidden"].detach(), t["head"], *arguments).backward()
    assert t["head"].grad is not None and t["hidden"].grad is None
    assert t["target"].grad is None and t["target_head"].grad is None
    chunked_loss(t["hidden"], t["head"].detach(), *arguments).backward()
    assert t["hidden"].grad is not None
    with torch.no_grad():
        assert not chunked_loss(t["hidden"], t["head"], *arguments).requires_grad


def test_tokens_without_weight_are_never_computed_with(batch):
    t = batch()
    weights = torch.ones(T, dtype=torch.float64)
    weights[3] = 0
    whole = chunked_loss(t["hidden"], t["head"], t["target"], t["target_head"], weights=weights)
    broken = t["hidden"].detach().clone()
    broken[3] = torch.nan
    broken.requires_grad_()
    loss = chunked_loss(broken, t["head"], t["target"], t["target_head"], weights=weights)
    assert torch.equal(loss, whole)
    loss.backward()
    assert torch.isfinite(broken.grad).all() and torch.isfinite(t["head"].grad).all()
    nothing = chunked_loss(t["hidden"], t["head"], t["target"], t["target_head"], weights=weights * 0)
    assert nothing.item() == 0 and (gradients(nothing, t)[0] == 0).all()


def test_half_precision_accumulates_in_float32(batch):
    t = batch(torch.bfloat16)
    loss = chunked_loss(t["hidden"], t["head"], t["target"], t["target_head"], chunk=1)
    assert loss.dtype == torch.float32
    got = gradients(loss, t)
    assert [g.dtype for g in got] == [torch.bfloat16] * 2
    plain = OBJECTIVES["kl"](t["target"] @ t["target_head"].T, t["hidden"] @ t["head"].T).mean()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-6)
    for a, b in zip(got, gradients(plain, t), strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.003)


def test_it_runs_under_autocast(batch):
    t = batch(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_loss(t["hidden"], t["head"], t["target"], t["target_head"], chunk=5)
    got = gradients(loss, t)
    assert [g.dtype for g in got] == [torch.float32] * 2
    plain = OBJECTIVES["kl"](t["target"] @ t["target_head"].T, t["hidden"] @ t["head"].T).mean()
    torch.testing.assert_close(loss, plain, rtol=0.05, atol=0.05)


def test_mistakes_are_told(batch):
    t = batch()
    with pytest.raises(PeftlabError, match="did you mean 'reverse_kl'"):
        chunked_loss(t["hidden"], t["head"], t["target"], t["target_head"], "reverse-kl")
    with pytest.raises(PeftlabError, match="chunk"):
        chunked_loss(t["hidden"], t["head"], t["target"], t["target_head"], chunk=0)
    with pytest.raises(PeftlabError, match="vocabulary of 16"):
        chunked_loss(t["hidden"], t["head"], t["target"], t["target_head"][:-1])


MEASURE = """
    import torch
    from peftlab.drafting.objectives import chunked_loss
    from peftlab.drafting.objectives import kl

    torch.set_num_threads(1)
    T, H, V = 256, 16, 49152
    hidden, head = torch.randn(T, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    target, target_head = torch.randn(T, H), torch.randn(V, H)

    def peak():  # of this program alone: ru_maxrss would begin with the parent's at the time of the fork
        return next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))

    def chunked(rows):
        return chunked_loss(hidden[:rows], head, target[:rows], target_head, chunk=32)

    def plain(rows):
        return kl(target[:rows] @ target_head.T, hidden[:rows] @ head.T).mean()

    for loss in (chunked, plain):  # libraries load and threads start on first use
        loss(2).backward()
    marks = [peak()]
    for loss in (chunked, plain):
        loss(T).backward()
        marks.append(peak())
    print(*marks)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux' /proc")
def test_peak_memory_is_a_fraction_of_the_plain_one(tmp_path):
    (tmp_path / "measure.py").write_text(textwrap.dedent(MEASURE))
    run = python(tmp_path / "measure.py")
    assert run.returncode == 0, run.stderr
    start, after_chunked, after_plain = map(int, run.stdout.split())
    assert after_plain - start > 300_000  # kilobytes: the plain computation did need its [T, V] tensors
    assert after_chunked - start <= 0.4 * (after_plain - start)
