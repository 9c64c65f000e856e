"""Leaves with a low-rank addition.

In the layout of a linear map, W is (out, in), A (r, in), B (out, r) and the update scale·B·A. GPT-2's ``Conv1D``
and embeddings store Wᵀ; convolutions are linear maps over flattened windows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from peftlab.methods.leaf import FOLDING, AnyLeaf, Folding, with_weight
from peftlab.methods.lora.config import Start
from peftlab.methods.lora.fold import fold_weight, one_thread, row_norms
from peftlab.methods.lora.function import low_rank_linear
from peftlab.methods.lora.start import leading_part


class LowRank(AnyLeaf):
    """What all low-rank leaves hold.

    Attributes:
        lora_A, lora_B (``lora_embedding_A``, ``lora_embedding_B`` in embeddings): the trained factors.
        lora_magnitude_vector: DoRA's trained row norms (out), or None.
        start: PiSSA or OLoRA, where the factors start from W; None otherwise.
        frozen_A, frozen_B: the starting values where there is such a start; the update is B·A − B0·A0, so that
            W keeps its values. None otherwise.
        rows: with targets that are parts of a fused projection, the output rows of each part, one part after
            the other; B then holds those rows alone, and A one factor a part. None otherwise.
        sizes: the number of rows of each part.
        scale: the factor of B·A. dropout: on the low-rank branch's input.
    """

    added = (
        "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "frozen_A", "frozen_B",
        "start", "rows", "sizes", "scale", "dropout",
    )  # fmt: skip
    names = ("lora_A", "lora_B")
    transposed = False
    weight: Tensor
    lora_magnitude_vector: nn.Parameter | None
    start: Start | None
    frozen_A: Tensor | None
    frozen_B: Tensor | None
    rows: Tensor | None
    sizes: tuple[int, ...]
    scale: float
    dropout: float

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A and B of the whole leaf: parts put in their rows, starting values subtracted."""
        a, b = (getattr(self, name) for name in self.names)
        if self.rows is not None:
            b = spread(b, self.rows, self.sizes, out=self.width())
        if self.frozen_A is not None and self.frozen_B is not None:
            a, b = torch.cat([a, self.frozen_A]), torch.cat([b, -self.frozen_B], dim=1)
        return a, b

    def update_start(self) -> None:
        if self.start is None:
            return
        rank, dtype = self.lora_A.shape[0], self.lora_A.dtype  # type: ignore[attr-defined]
        with one_thread():
            factors = leading_part(self.weight, rank, self.scale, self.start, transposed=self.transposed)
        self.frozen_A, self.frozen_B = (factor.to(dtype) for factor in factors)

    def width(self) -> int:
        """Return the number of output features."""
        return self.weight.shape[1 if self.transposed else 0]

    def active_dropout(self) -> float:
        """Return the dropout that applies now."""
        return self.dropout if self.training else 0.0  # type: ignore[attr-defined]

    def fold(self, how: Folding = FOLDING) -> dict[str, Tensor]:
        a, b = self.factors()
        weight: Any = self.weight
        folded = fold_weight(
            weight,
            a,
            b,
            self.scale,
            transposed=self.transposed,
            magnitude=self.lora_magnitude_vector,
            how=how,
        )
        return {"weight": folded}


class LoraLinear(LowRank, nn.Linear):
    """``nn.Linear`` with a low-rank addition, DoRA's norm included."""

    base_class: type[nn.Module] = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        p = self.active_dropout()
        if not self.enabled:
            return self.base_class.forward(self, x)
        a, b = self.factors()
        if self.lora_magnitude_vector is not None:
            return _dora(x, weight, self.bias, a, b, self.scale, p, self.lora_magnitude_vector)
        if type(weight.data) is not Tensor or own_forward(self.base_class):
            # Quantised, or a subclass: the base leaf computes as it is made to, and only the addition is ours.
            low = F.linear(F.linear(F.dropout(x, p), a.to(x.dtype)), b.to(x.dtype))
            return self.base_class.forward(self, x) + low * self.scale
        return low_rank_linear(x, weight, self.bias, a, b, self.scale, p)


class LoraConv1D(LowRank, Conv1D):  # type: ignore[misc]
    """GPT-2's ``Conv1D``, a linear map that stores its weight as (in, out), with a low-rank addition."""

    base_class = Conv1D
    transposed = True
    forward = LoraLinear.forward


class LoraEmbedding(LowRank, nn.Embedding):
    """``nn.Embedding`` with a low-rank addition: A (r, tokens) starts at zero, B (width, r) is normal."""

    base_class: type[nn.Module] = nn.Embedding
    names = ("lora_embedding_A", "lora_embedding_B")
    transposed = True

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base = self.base_class.forward(self, input, *args, **kwargs)
        if not self.enabled:
            return base
        a, b = self.factors()
        if own_forward(self.base_class):  # which scales what it looks up, or computes where to look
            rows = self.base_class.forward(with_weight(self, a.t()), input, *args, **kwargs)
        else:
            rows = F.embedding(input, a.t())
        low = (rows @ b.t()).to(base.dtype) * self.scale
        if self.lora_magnitude_vector is None:
            return base + low
        norm = row_norms(self.weight.t(), a, b, self.scale)
        return (base + low) * (self.lora_magnitude_vector / norm).to(base.dtype)


class LoraConv2d(LowRank, nn.Conv2d):
    """``nn.Conv2d`` with a low-rank addition: A (r, in, h, w) convolves as the base does, B (out, r, 1, 1) follows."""

    base_class: type[nn.Module] = nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        base = self.base_class.forward(self, x)
        if not self.enabled:
            return base
        a, b = self.factors()
        x = F.dropout(x, self.active_dropout())
        low = self._conv_forward(x, a.to(x.dtype), None).movedim(1, -1) @ b.flatten(1).t().to(x.dtype)
        return base + low.movedim(-1, 1) * self.scale


class LoraConv1d(LowRank, nn.Conv1d):
    """``nn.Conv1d`` with a low-rank addition; see ``LoraConv2d``."""

    base_class = nn.Conv1d
    forward = LoraConv2d.forward  # type: ignore[assignment]


LEAVES: dict[type[nn.Module], type[LowRank]] = {
    kind.base_class: kind for kind in (LoraLinear, LoraConv1D, LoraEmbedding, LoraConv1d, LoraConv2d)
}


def own_forward(kind: type[nn.Module]) -> bool:
    """Whether a subclass of a class in ``LEAVES`` has another forward than that."""
    return not any(kind.forward is base.forward for base in LEAVES)


def spread(b: Tensor, rows: Tensor, sizes: tuple[int, ...], out: int) -> Tensor:
    """Return the dense B (out, parts·r) of a fused projection from its parts' rows (Σ sizes, r)."""
    blocks = torch.block_diag(*b.split(list(sizes)))
    return b.new_zeros(out, blocks.shape[1]).index_copy(0, rows, blocks)


def gather(dense: Tensor, rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the parts' rows (Σ sizes, r) of a dense B: the inverse of ``spread``."""
    r = dense.shape[1] // len(sizes)
    blocks = dense[rows].split(list(sizes))
    return torch.cat([block[:, i * r : (i + 1) * r] for i, block in enumerate(blocks)])


def _dora(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    p: float,
    magnitude: Tensor,
) -> Tensor:
    """Return m/‖W + s·B·A‖ ⊙ (W + s·B·A)·x + bias; dropout acts on what is added to the base's W·x."""
    gain = (magnitude / row_norms(weight, a, b, scale)).to(x.dtype)
    if p == 0:
        y = low_rank_linear(x, weight, None, a, b, scale) * gain
    else:
        dropped = F.dropout(x, p)
        base = F.linear(x, weight)
        y = base + low_rank_linear(dropped, weight, None, a, b, scale) * gain - F.linear(dropped, weight)
    return y if bias is None else y + bias
