"""LoRA (Hu et al. 2021, arXiv 2106.09685): h = W0·x + (α/r)·B·A·x with W0 frozen."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peftlab.errors import PeftlabError
from peftlab.methods.config import MethodConfig
from peftlab.methods.lora_function import low_rank_linear
from peftlab.methods.plan import Adapted, Plan, adopt
from peftlab.methods.targets import (
    ALL_LINEAR,
    default_targets,
    has_suffix,
    in_layers,
    inside,
    match,
    parameters_under,
    trained_whole,
)

FOLD_ROWS = 256  # rows of W summed in fp32 at a time: a block of this height stays in the cache


class LoraConfig(MethodConfig):
    """LoRA's knobs, spelled as peft spells them."""

    name: Literal["lora"] = "lora"
    r: int = Field(8, ge=1, description="Rank of the update.")
    lora_alpha: float = Field(16, gt=0, description="The update is scaled by lora_alpha / r.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the input of the low-rank branch.")
    target_modules: list[str] | str | None = Field(
        None,
        description="Name suffixes, one full-match regular expression, or all-linear; null: query and value.",
    )
    exclude_modules: list[str] | str | None = Field(None, description="Of the targets, those to leave out.")
    layers_to_transform: list[int] | int | None = Field(None, description="Only the targets in these layers.")
    rank_pattern: dict[str, int] = Field({}, description="Rank by name suffix or regular expression.")
    alpha_pattern: dict[str, float] = Field({}, description="lora_alpha by name suffix or regular expression.")
    use_rslora: bool = Field(False, description="Scale by lora_alpha / sqrt(r) (rank-stabilised).")
    bias: Literal["none", "lora_only", "all"] = Field("none", description="Which biases train too.")
    init_lora_weights: Literal[True, "gaussian"] = Field(
        True, description="Start of A: true for Kaiming uniform, or gaussian; B starts at zero."
    )

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _not_empty(cls, value: list[str] | str | None) -> list[str] | str | None:
        if value is not None and (not value or "" in value and not isinstance(value, str)):
            raise ValueError("names no module")
        return value

    def rank(self, module: str) -> int:
        """Return the rank at ``module``."""
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str, rank: int | None = None) -> float:
        """Return the factor of B·A at ``module``: α/r, or α/√r with ``use_rslora``."""
        r = rank or self.rank(module)
        alpha = _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return float(alpha / math.sqrt(r) if self.use_rslora else alpha / r)


def _by_pattern(patterns: dict[str, Any], module: str, default: Any) -> Any:
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


class LoraLinear(Adapted, nn.Linear):
    """``nn.Linear`` with a low-rank addition: lora_A (r, in), lora_B (out, r)."""

    base_class = nn.Linear
    added = ("lora_A", "lora_B", "scale", "dropout")
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    dropout: float

    def weight_out_in(self) -> Tensor:
        """Return the weight as (out, in)."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return super().forward(x)
        p = self.dropout if self.training else 0.0
        return low_rank_linear(x, self.weight_out_in(), self.bias, self.lora_A, self.lora_B, self.scale, p)

    def fold(self) -> dict[str, Tensor]:
        return {"weight": fold_weight(self.weight, self.lora_A, self.lora_B, self.scale)}


class LoraConv1D(Adapted, Conv1D):
    """GPT-2's ``Conv1D`` (a linear map with its weight stored (in, out)) with a low-rank addition."""

    base_class = Conv1D
    added = LoraLinear.added
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    dropout: float

    def weight_out_in(self) -> Tensor:
        """Return the weight as (out, in)."""
        return self.weight.t()

    forward = LoraLinear.forward

    def fold(self) -> dict[str, Tensor]:
        return {"weight": fold_weight(self.weight, self.lora_A, self.lora_B, self.scale, transposed=True)}


LEAVES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: LoraLinear, Conv1D: LoraConv1D}


def fold_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float, *, transposed: bool = False) -> Tensor:
    """Return W + scale·B·A in W's dtype: product and sum in fp32, rounded once.

    Computed over blocks of rows so that the fp32 intermediates stay in the cache.

    Args:
        weight: (out, in), or (in, out) with ``transposed``. a: (r, in). b: (out, r).
    """
    left, right = (a.t(), b.t()) if transposed else (b, a)
    left, right = left.detach().float(), right.detach().float().contiguous()
    folded = torch.empty_like(weight, requires_grad=False)
    for start in range(0, weight.shape[0], FOLD_ROWS):
        rows = slice(start, start + FOLD_ROWS)
        folded[rows] = torch.addmm(weight.detach()[rows].float(), left[rows], right, alpha=scale)
    return folded


def plan(model: nn.Module, config: LoraConfig) -> Plan:
    """Decide which leaves get a low-rank addition and which parameters train beside it."""
    whole = trained_whole(model, config.modules_to_save)
    leaves = {name: module for name, module in model.named_modules() if type(module) in LEAVES}
    body = [name for name in leaves if not inside(name, whole)]
    targets = _targets(model, config, body)
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        match(targets, rf"(.*\.)?({pattern})", what="rank_pattern/alpha_pattern")
    replace: dict[str, Callable[[nn.Module], nn.Module]] = {}
    for name in targets:
        limit = min(leaves[name].weight.shape)
        if config.rank(name) > limit:
            raise PeftlabError(f"r={config.rank(name)} is larger than the smaller side ({limit}) of {name}")
        replace[name] = partial(_adapt, rank=config.rank(name), scale=config.scale(name), config=config)
    train = parameters_under(model, whole)
    if config.bias != "none":
        owners = tuple(f"{name}.bias" for name in targets)
        train += [
            name
            for name, _ in model.named_parameters()
            if (name in owners or config.bias == "all" and has_suffix(name, "bias")) and name not in train
        ]
    return Plan(replace, train)


def _targets(model: nn.Module, config: LoraConfig, body: list[str]) -> list[str]:
    chosen = config.target_modules
    if chosen is None:
        names = match(body, default_targets(model, body))
    elif chosen == ALL_LINEAR:
        outputs = getattr(model, "get_output_embeddings", lambda: None)()
        names = [name for name in body if model.get_submodule(name) is not outputs]
    else:
        names = _explicit(model, chosen, body)
    if config.exclude_modules:
        excluded = set(match(names, config.exclude_modules, what="exclude_modules"))
        names = [name for name in names if name not in excluded]
    names = in_layers(names, config.layers_to_transform)
    if not names:
        raise PeftlabError("target_modules: nothing is left to train after exclude_modules")
    return names


def _explicit(model: nn.Module, chosen: list[str] | str, body: list[str]) -> list[str]:
    try:
        return match(body, chosen)
    except PeftlabError:
        # Say what it is, where the name exists but is no leaf that LoRA can act on.
        for target in [chosen] if isinstance(chosen, str) else chosen:
            for name, module in model.named_modules():
                if has_suffix(name, target) and not any(has_suffix(leaf, target) for leaf in body):
                    raise PeftlabError(
                        f"target_modules: {target!r} is a {type(module).__name__} ({name}); LoRA acts on "
                        f"{', '.join(kind.__name__ for kind in LEAVES)} outside the task head"
                    ) from None
        raise


def _adapt(leaf: nn.Module, *, rank: int, scale: float, config: LoraConfig) -> nn.Module:
    new: Any = adopt(LEAVES[type(leaf)], leaf)
    d_out, d_in = new.weight_out_in().shape
    like = {"device": leaf.weight.device, "dtype": _trainable_dtype(leaf.weight)}
    a, b = torch.empty(rank, d_in, **like), torch.zeros(d_out, rank, **like)
    if config.init_lora_weights == "gaussian":
        nn.init.normal_(a, std=1 / rank)
    else:
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
    new.lora_A, new.lora_B = nn.Parameter(a), nn.Parameter(b)
    new.scale, new.dropout = scale, config.lora_dropout
    return new


def _trainable_dtype(weight: Tensor) -> torch.dtype:
    # Half-precision or quantised bases get fp32 adapters: small steps would be lost in rounding otherwise.
    return weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
