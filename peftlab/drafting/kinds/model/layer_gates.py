"""Which of the target's layers a draft keeps: a gate for each layer, trained with the target frozen.

SkipNet (arXiv 1711.09485): x' = g·F(x) + (1 − g)·x, with hard gates in the forward pass, the gradient of soft ones in
the backward pass (straight-through estimator), and a price on open gates. Here a gate reads nothing, so that what stays
is a list of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.drafting.kinds.model.config import Truncation
from peftlab.drafting.kinds.model.search import Found, Search
from peftlab.drafting.truncation import layer_stack, truncate
from peftlab.files import Json

_OPEN = 0.9  # probability of each gate at the start: some must be closed to show what they do, few at a time
_LR = 0.1
_PRICE_RATE = 0.2  # per step and share of the layers that is open too many, in mean losses so far


def choose_layers(search: Search, config: Truncation) -> Found:
    """Return the numbers of the ``keep`` layers whose gates are the most open, rising, as ``layers`` [keep].

    Each row of a batch draws gates of its own, so that a step compares as many sets of layers as it has rows. The price
    of an open gate rises while more than ``keep`` are expected to be open and falls while fewer are: it ends where so
    many layers are worth it. All draws come from the search's seed.
    """
    assert config.keep is not None
    count = len(layer_stack(search.source))
    model = truncate(search.source, range(count), share=True)  # hooks on the source itself might be the target's, too
    model.requires_grad_(False)
    logits = torch.full((count,), _OPEN).logit().requires_grad_(True)
    optimiser = torch.optim.Adam([logits], lr=_LR)
    generator = torch.Generator().manual_seed(search.seed)
    price = losses = 0.0
    for step, batch in enumerate(search.batches(config.batches), start=1):
        gates = draw_gates(logits, len(batch["input_ids"]), generator)
        with gated(model, gates.to(model.device)):
            loss = search.loss(model, batch).cpu()
        expected = logits.sigmoid().sum()
        (loss + price * expected).backward()
        optimiser.step()
        optimiser.zero_grad()
        losses += loss.item()
        price += _PRICE_RATE * (expected.item() - config.keep) / count * (losses / step)
    probabilities = logits.detach().sigmoid()
    kept = probabilities.sort(descending=True, stable=True).indices[: config.keep].sort().values
    report: dict[str, Json] = {
        "layers": kept.tolist(),
        "probabilities": [round(p, 4) for p in probabilities.tolist()],
        "expected": round(float(probabilities.sum()), 4),
        "price": round(price, 4),
        "steps": config.batches,
    }
    return Found({"layers": kept}, report)


def draw_gates(logits: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Return gates [rows, layers] of 0 or 1, open with probability σ(logit), whose gradient is that of soft ones.

    The soft gate is σ(logit + noise), the noise logistic; the hard one says whether it is above a half.
    """
    noise = torch.rand(rows, len(logits), generator=generator).clamp(1e-6, 1 - 1e-6).logit()
    soft = (logits + noise).sigmoid()
    return (soft > 0.5).float() + (soft - soft.detach())


@contextmanager
def gated(model: PreTrainedModel, gates: Tensor) -> Iterator[None]:
    """Within the block, layer i of row b gives g·F(x) + (1 − g)·x with g = ``gates`` [rows, layers] at b, i."""
    handles = []
    for number, layer in enumerate(layer_stack(model)):

        def mix(
            module: nn.Module,
            inputs: tuple[Tensor, ...],
            keywords: Mapping[str, Tensor],
            output: Tensor | tuple[Tensor, ...],
            gate: Tensor = gates[:, number, None, None],
        ) -> Tensor | tuple[Tensor, ...]:
            before = inputs[0] if inputs else keywords["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            mixed = before + gate.to(after.dtype) * (after - before)
            return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

        handles.append(layer.register_forward_hook(mix, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
