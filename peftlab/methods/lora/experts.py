"""LoRA on parameters that a module uses in its own way: experts (experts, out, in) and routers (out, in)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from peftlab.methods.leaf import FOLDING, AnyLeaf, Folding, adapted_class, recast
from peftlab.methods.lora.fold import expert_factors, fold_weight
from peftlab.untyped import Parameters


class LoraExperts(AnyLeaf):
    """A module whose parameters carry a low-rank addition: experts one each, a matrix (out, in) one.

    Its forward is the base module's own, run on W + scale·B·A. For each adapted parameter ``p`` it holds
    ``p_lora_A`` (experts·r, in) and ``p_lora_B`` (out, r·experts), in peft's layout.
    """

    adapted: dict[str, float]

    @property
    def added(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of what the adapted form has beside the base's."""
        return (*(f"{p}_lora_{side}" for p in self.adapted for side in "AB"), "adapted")

    def factors(self, parameter: str) -> tuple[Tensor, Tensor]:
        """Return A and B of one adapted parameter."""
        return getattr(self, f"{parameter}_lora_A"), getattr(self, f"{parameter}_lora_B")

    def forward(self, *args: object, **kwargs: object) -> object:
        forward = super().forward
        if not self.enabled:
            return forward(*args, **kwargs)
        own: Parameters = self._parameters
        effective: Parameters = {name: self._effective(own[name], name) for name in self.adapted}
        self._parameters = {**own, **effective}
        try:
            return forward(*args, **kwargs)
        finally:
            self._parameters = own

    def _effective(self, weight: Tensor, name: str) -> Tensor:
        if weight.ndim == 2:
            a, b = (t.to(weight.dtype) for t in self.factors(name))
            return torch.addmm(weight, b, a, alpha=self.adapted[name])
        a, b = (t.to(weight.dtype) for t in expert_factors(*self.factors(name), weight.shape[0]))
        left, right = (a.mT, b.mT) if stored_transposed(self, weight) else (b, a)
        return torch.baddbmm(weight, left, right, alpha=self.adapted[name])

    def fold(self, how: Folding = FOLDING) -> dict[str, Tensor]:
        return {
            name: fold_weight(weight, *self.factors(name), scale, transposed=stored_transposed(self, weight), how=how)
            for name, scale in self.adapted.items()
            if how.only in (None, name)
            for weight in [getattr(self, name)]
        }


def stored_transposed(module: nn.Module, weight: Tensor) -> bool:
    """Whether an experts module stores a weight as (experts, in, out)."""
    return weight.ndim == 3 and bool(getattr(module, "is_transposed", False))


def adapt_experts(
    module: nn.Module, ranks: dict[str, int], scales: dict[str, float], init: Callable[[Tensor], None]
) -> nn.Module:
    """Return ``module`` with a low-rank addition on the parameters named in ``ranks``."""
    new = recast(adapted_class(LoraExperts, type(module)), module)
    new.adapted = dict(scales)
    for name, rank in ranks.items():
        weight = getattr(module, name)
        experts, d_out, d_in = (1, *weight.shape)[-3:]
        if stored_transposed(module, weight):
            d_out, d_in = d_in, d_out
        dtype = weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
        a = torch.empty(rank * experts, d_in, device=weight.device, dtype=dtype)
        init(a)
        new.register_parameter(f"{name}_lora_A", nn.Parameter(a))
        b = torch.zeros(d_out, rank * experts, device=weight.device, dtype=dtype)
        new.register_parameter(f"{name}_lora_B", nn.Parameter(b))
    return new
