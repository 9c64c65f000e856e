"""LayerSkip's schedules (Elhoushi et al. 2024, arXiv 2404.16710): which layers are left out, and what each exit weighs.

Layers l count from 0 to L - 1, steps t from 0 to T - 1; an exit after k layers is that of layer k - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.drafting.truncation import layer_stack


def dropout_rates(layers: int, most: float) -> list[float]:
    """Return how often each layer is left out: ``most``·(2^(l / (L - 1)) - 1), from 0 to ``most``."""
    return [most * (2 ** (layer / max(1, layers - 1)) - 1) for layer in range(layers)]


def dropout_growth(schedule: str, step: int, steps: int) -> float:
    """Return S(t), the factor of the rates: 1 for ``constant``, 2^(t / (T - 1)) - 1 for ``exponential``."""
    return 1.0 if schedule == "constant" else 2 ** (step / max(1, steps - 1)) - 1


def exit_weights(exits: Sequence[int], layers: int, scale: float | None) -> list[float]:
    """Return e of each exit and, behind them, of the last layer.

    e(l) = ``scale``·(0 + 1 + ... + l), and of the last layer L - 1 + ``scale``·(0 + 1 + ... + L - 2).

    Args:
        exits: layers before each exit. layers: L. scale: None: all weigh the same.
    """
    if scale is None:
        return [1.0] * (len(exits) + 1)
    last = layers - 1 + scale * (layers - 2) * (layers - 1) / 2
    return [*(scale * (exit_ - 1) * exit_ / 2 for exit_ in exits), last]


def enabled(curriculum: str | None, exits: int, step: int, steps: int, every: int) -> list[bool]:
    """Return which exits train in a step; the last layer always does.

    ``rotational``: every R-th exit, and in the next step the exits after these. ``gradual``: the last layer alone at
    first, and in the first half of the steps one exit more after the other, the last one first.

    Args:
        exits: how many there are. steps: T. every: R.
    """
    if curriculum == "rotational":
        return [i % every == step % every for i in range(exits)]
    if curriculum == "gradual":
        return [2 * step * (exits + 1) >= (exits - i) * steps for i in range(exits)]
    return [True] * exits


def shares(weights: Sequence[float], active: Sequence[bool]) -> list[float]:
    """Return what each exit, and the last layer behind them, is of the loss: C·e / Σ C·e."""
    counted = [weight * on for weight, on in zip(weights, [*active, True], strict=True)]
    return [weight / sum(counted) for weight in counted]


class LayerDropout:
    """Leaves layers out of a model in training, for each row of a batch on its own; nothing is scaled.

    What is left out is fixed by ``draw`` until the next call, so that a checkpointed layer is computed again as it was.

    Args:
        model: a causal language model; each of its layers gets a hook. most: see ``dropout_rates``.
    """

    def __init__(self, model: PreTrainedModel, most: float):
        stack = layer_stack(model)
        self._rates = torch.tensor(dropout_rates(len(stack), most))
        self._kept: Tensor | None = None  # [L, b]
        # Before the hooks by which transformers records the states, which are to be those that the next layer reads.
        self._hooks = [
            layer.register_forward_hook(partial(self._leave_out, i), with_kwargs=True, prepend=True)
            for i, layer in enumerate(stack)
        ]

    def draw(self, rows: int, growth: float, device: torch.device) -> None:
        """Draw which layers the next batch of ``rows`` leaves out, at ``growth`` times the rates."""
        self._kept = (torch.rand(len(self._rates), rows) >= growth * self._rates[:, None]).to(device)

    def remove(self) -> None:
        """Remove the hooks: the model is as it was."""
        for hook in self._hooks:
            hook.remove()

    def _leave_out(
        self,
        number: int,
        layer: nn.Module,
        inputs: tuple[Tensor, ...],
        named: dict[str, Tensor],
        output: Tensor | tuple[Tensor, ...],
    ) -> Tensor | tuple[Tensor, ...]:
        if self._kept is None or not layer.training:
            return output
        entered = inputs[0] if inputs else named["hidden_states"]
        kept = self._kept[number].view(-1, *[1] * (entered.dim() - 1))
        if isinstance(output, tuple):
            return (torch.where(kept, output[0], entered), *output[1:])
        return torch.where(kept, output, entered)
