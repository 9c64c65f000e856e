"""A linear map whose rows use the low-rank additions of different adapters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from peftlab.methods.leaf import AnyLeaf
from peftlab.methods.lora.function import frozen_linear
from peftlab.methods.several.batch_rows import BatchRows
from peftlab.models.quantised import dequantised, is_quantised


class LowRankAddition(Protocol):
    """What is used of an adapted leaf: scale·B·A."""

    scale: float

    def factors(self) -> tuple[Tensor, Tensor]: ...


class MixedLinear(AnyLeaf):
    """A linear map with the low-rank additions of several adapters: W0·x for all rows at once, s·B·A·x for its own.

    The additions are computed as one adapter alone computes them (``LowRankLinear``), in the same order, on the rows of
    each, and added in place.

    Attributes:
        additions: of each adapter that changes the leaf, its number and its adapted form.
        rows: which adapter each row uses. name: the leaf's name in the model.
    """

    added = ("additions", "rows", "name")
    additions: Sequence[tuple[int, LowRankAddition]]
    rows: BatchRows
    name: str

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self, nn.Linear) and is_quantised(self):
            y = frozen_linear(x, partial(dequantised, self), self.bias, self.out_features)
        else:
            y = super().forward(x)
        if not self.enabled:
            return y
        length = self.rows.length(x, self.name)
        y = y.contiguous()
        with torch.autocast(x.device.type, enabled=False):
            for number, addition in self.additions:
                index = self.rows.index(length, (number,), x.device)
                a, b = (factor.detach().to(y.dtype) for factor in addition.factors())
                low = x[index].to(y.dtype).reshape(-1, x.shape[-1]).mm(a.t())  # (tokens of these rows, r)
                mine = y[index]  # a view, where the rows are next to each other
                mine.view(-1, y.shape[-1]).addmm_(low, b.t(), alpha=addition.scale)
                if isinstance(index, Tensor):
                    y[index] = mine
        return y
