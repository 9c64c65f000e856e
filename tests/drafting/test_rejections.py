"""Training on some tokens of a text alone, and which tokens of an output were rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draft_models import medusa, requests, tiny

from peftlab.decoding.decode import Fixed, Step, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.drafting.heads import HeadsLoss
from peftlab.drafting.live import LiveRequest, RejectionTopK, rejected_tokens, rejection_dataset
from peftlab.drafting.objectives import Objective, PairLoss, topk_targets
from peftlab.drafting.pard import PardLoss
from peftlab.drafting.state_network import FeatureLoss, TargetWithNetwork
from peftlab.drafting.text import Collate, make_dataset
from peftlab.tasks.prompts import Request
from tests.eagle_models import eagle


def _model() -> tuple[Any, Any]:
    return PairLoss(Objective("kl"), tiny(0)), tiny(1)


def _heads() -> tuple[Any, Any]:
    return HeadsLoss(Objective("kl")), medusa(tiny(0), heads=3)


def _eagle() -> tuple[Any, Any]:
    target = tiny(3, layers=4).requires_grad_(False)
    return FeatureLoss(Objective("kl"), 3, 0.8), TargetWithNetwork(target, eagle(target))


def _pard() -> tuple[Any, Any]:
    return PardLoss(Objective("kl"), tiny(0), 3, 1.0, 1.0, lambda: 37), tiny(1)


@pytest.mark.parametrize("make", [_model, _heads, _eagle, _pard])
def test_the_losses_of_some_tokens_and_of_the_others_are_the_whole(make: Callable[[], tuple[Any, Any]]) -> None:
    """Whatever drafts several tokens ahead learns each of them for its own sake, alone or beside others."""
    rows = requests()
    odd, even = ([list(range(first, len(r.response), 2)) for r in rows] for first in (1, 0))

    def total(counted: list[list[int]] | None) -> torch.Tensor:
        loss, model = make()
        data = make_dataset(rows, counted=counted)
        with torch.no_grad():
            return loss(model, Collate(pad=2)([data[i] for i in range(len(data))]))

    torch.testing.assert_close(total(odd) + total(even), total(None), rtol=1e-4, atol=1e-3)
    assert 0 < float(total(odd)) < float(total(None))


def test_rejected_tokens_are_those_where_the_draft_alone_would_have_gone_another_way() -> None:
    target, draft = tiny(0), tiny(1)
    with torch.no_grad():
        draft.load_state_dict(target.state_dict())
        draft.lm_head.weight.add_(torch.randn_like(draft.lm_head.weight) * 0.15)
    prompt, kept = [5, 6, 7], RejectionTopK(4)
    engine, drafter = build_engine(target), ModelDrafter(build_engine(draft))
    (output,) = decode(engine, [prompt], StoppingCriteria(24), drafter, policy=lambda: Fixed(3), observe=kept)
    text = torch.tensor([prompt + output.tokens])
    with torch.no_grad():
        logits, guesses = target(text).logits[0], draft(text).logits[0].argmax(-1)
    asked, place = set(), 0  # the tokens that were drafted, up to the first wrong one of each step
    for step in output.steps:
        asked |= set(range(place, place + min(step.drafted, step.accepted + 1)))
        place += step.emitted
    wrong = [i for i in sorted(asked) if i < len(output.tokens) and int(guesses[2 + i]) != output.tokens[i]]
    assert rejected_tokens(output.steps) == wrong and 2 <= len(wrong) < len(asked)
    top, expected = kept.of(output), topk_targets(logits[[2 + i for i in wrong]], 4)
    assert torch.equal(top.indices, expected.indices)
    torch.testing.assert_close(top.values, expected.values, rtol=1e-4, atol=1e-4)
    served = LiveRequest(Request(prompt, output.tokens), output.steps, output.steps, True, top)
    again = LiveRequest.from_json(served.as_json(), "a file")
    assert again.as_json() == served.as_json() and again.rejected == wrong
    data = rejection_dataset([served, LiveRequest(Request([1], [2]), [Step(0, 0, 1)], [], True, kept.of(output))])
    batch = Collate()([data[0]])
    assert len(data) == 1 and data["kept"] == [len(wrong)]
    assert batch["weights"][0].nonzero().flatten().tolist() == [2 + i for i in wrong]
    stored = batch["top_values"], batch["top_indices"], batch["top_rest"]
    assert all(torch.equal(a, b) for a, b in zip(stored, top, strict=True))


def test_an_output_that_ends_within_a_draft_rejects_nothing() -> None:
    assert rejected_tokens([Step(4, 4, 5), Step(4, 1, 2), Step(0, 0, 1), Step(2, 2, 2)]) == [6]
