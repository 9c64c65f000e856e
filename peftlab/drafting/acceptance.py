"""How often a target would accept a draft's tokens, measured on text without decoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from datasets import Dataset
from torch import Tensor, nn

from peftlab.decoding.theory import acceptance_rate
from peftlab.drafting.hidden_states import frozen_hidden, head_weight, logits_of
from peftlab.drafting.text.continuations import Collate
from peftlab.tasks.batches import eval_batches

_CHUNK = 256  # tokens whose two distributions live at a time


class Acceptance(NamedTuple):
    """Sums over each example's predictions, all [n] in float64.

    Attributes:
        tokens: how many predictions. overlap: Σ α, α = Σ_x min(p, q) = 1 - TV(p, q): the acceptance of sampling at
            temperature 1. agreement: predictions where both have the same largest token: the acceptance of
            greedy decoding. certain: Σ p(argmax q): sampling from p, drafting greedily.
    """

    tokens: Tensor
    overlap: Tensor
    agreement: Tensor
    certain: Tensor

    def rates(self) -> dict[str, float]:
        """Return the pooled rates: sums over all examples, divided by all predictions."""
        total = max(1.0, float(self.tokens.sum()))
        return {
            "acceptance": float(self.overlap.sum()) / total,
            "agreement": float(self.agreement.sum()) / total,
            "target_probability": float(self.certain.sum()) / total,
        }


def by_depth(measured: Iterable[Acceptance]) -> dict[str, float]:
    """Return the mean acceptance over several tokens ahead, and the rates of each, numbered from 1."""
    rates = [each.rates() for each in measured]
    each = {f"{key}_{k}": of[key] for k, of in enumerate(rates, start=1) for key in ("acceptance", "agreement")}
    return {"acceptance": sum(of["acceptance"] for of in rates) / len(rates), **each}


@torch.no_grad()
def measure(target: nn.Module, draft: nn.Module, data: Dataset, batch_size: int = 16) -> Acceptance:
    """Return the acceptance of ``draft`` by ``target`` on the continuations of ``data``, both reading the text.

    Args:
        target, draft: causal language models over the same vocabulary, on one device.
        data: rows as ``continuations.make_dataset`` makes them.
    """
    sums = torch.zeros(4, len(data), dtype=torch.float64)
    heads = head_weight(target), head_weight(draft)
    for rows, places, ids, mask in batches(data, batch_size, heads[0].device):
        own, other = (frozen_hidden(model, ids, mask)[places] for model in (target, draft))
        add_rates(sums, rows[places.nonzero()[:, 0].cpu()], own, other, *heads)
    return Acceptance(*sums)


@torch.no_grad()
def each_token(
    target: nn.Module, draft: nn.Module, data: Dataset, batch_size: int = 16
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, for a few predictions at a time, the draft's states [t, H], their α [t] and agreement [t]."""
    heads = head_weight(target), head_weight(draft)
    for _, places, ids, mask in batches(data, batch_size, heads[0].device):
        own, other = (frozen_hidden(model, ids, mask)[places] for model in (target, draft))
        for mine, theirs in zip(own.split(_CHUNK), other.split(_CHUNK), strict=True):
            p, q = (logits_of(h, w).float().softmax(-1) for h, w in zip((mine, theirs), heads, strict=True))
            yield theirs, acceptance_rate(p, q), p.argmax(-1) == q.argmax(-1)


@torch.no_grad()
def target_states(target: nn.Module, data: Dataset, batch_size: int = 16) -> Iterator[Tensor]:
    """Yield the target's states [t, H] at a few predictions at a time."""
    for _, places, ids, mask in batches(data, batch_size, head_weight(target).device):
        yield from frozen_hidden(target, ids, mask)[places].split(_CHUNK)


def batches(data: Dataset, batch_size: int, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """Yield row numbers [b], which predictions count [b, n], token ids [b, n] and their mask [b, n]."""
    collate = Collate()
    keys = ("input_ids", "prompt", "length")
    for batch in eval_batches(data["length"], batch_size):
        inputs = collate([{key: row[key] for key in keys} for row in data.__getitems__(batch)])
        inputs = {key: value.to(device) for key, value in inputs.items()}
        yield torch.tensor(batch), inputs["weights"] > 0, inputs["input_ids"], inputs["attention_mask"]


def add_rates(
    sums: Tensor,
    rows: Tensor,
    target: Tensor,
    draft: Tensor,
    target_head: Tensor,
    draft_head: Tensor,
    tokens: Tensor | None = None,
) -> None:
    """Add each token's rates to its row's sums, a chunk of hidden states [T, H] at a time.

    ``tokens`` [V_d] says which tokens ``draft_head`` [V_d, H] is for; None for all. The draft never proposes another.
    """
    for part in torch.arange(len(rows)).split(_CHUNK):
        p = logits_of(target[part], target_head).float().softmax(-1)
        q = logits_of(draft[part], draft_head).float().softmax(-1)
        if tokens is not None:
            q = torch.zeros_like(p).index_copy_(-1, tokens, q)
        best = q.argmax(-1)
        certain = p.gather(-1, best[:, None]).squeeze(-1)
        for total, rate in zip(
            sums, (torch.ones_like(certain), acceptance_rate(p, q), p.argmax(-1) == best, certain), strict=True
        ):
            total.index_add_(0, rows[part], rate.cpu().double())
