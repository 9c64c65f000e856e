"""LoRA's configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from peftlab.methods.config import MethodConfig
from peftlab.patterns import matching

T = TypeVar("T")

_A = re.compile(r"(.+?)[._]lora_(?:embedding_)?A")


Start = Literal["pissa", "olora"]
"""The initialisations that take the leading part of the base's weight."""
Rank = Annotated[int, Field(ge=1)]
Token = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LoraConfig(MethodConfig):
    """LoRA's fields, named as peft names them."""

    name: Literal["lora"] = "lora"
    r: Rank = Field(default=8, description="Rank of the update.")
    lora_alpha: Positive = Field(default=16, description="The update is scaled by lora_alpha / r.")
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the input of the low-rank branch.")
    target_modules: list[str] | str | None = Field(
        default=None,
        description="Name suffixes, one full-match regular expression, or all-linear; null: query and value.",
    )
    exclude_modules: list[str] | str | None = Field(default=None, description="Of the targets, those to leave out.")
    layers_to_transform: list[int] | int | None = Field(default=None, description="Only the targets in these layers.")
    layers_pattern: list[str] | str | None = Field(
        default=None,
        description="Of which list layers_to_transform gives numbers: names or regular expressions; null: the first.",
    )
    rank_pattern: dict[str, Rank] = Field(default={}, description="Rank by name suffix or regular expression.")
    alpha_pattern: dict[str, Positive] = Field(
        default={}, description="lora_alpha by name suffix or regular expression."
    )
    use_rslora: bool = Field(default=False, description="Scale by lora_alpha / sqrt(r) (rank-stabilised).")
    use_dora: bool = Field(default=False, description="Train each output row's norm apart from its direction (DoRA).")
    target_parameters: list[str] | None = Field(
        default=None,
        description="Expert weights: 3-D parameters by name suffix; without target_modules, these alone.",
    )
    ensure_weight_tying: bool = Field(
        default=True,
        description="Modules of modules_to_save stay tied to those they share weights with; false: they train a copy.",
    )
    train_head: bool = Field(default=True, description="Train the task head too.")
    trainable_token_indices: list[Token] | dict[str, Annotated[list[Token], Field(min_length=1)]] | None = Field(
        default=None,
        description="Tokens whose embeddings train: of the input embedding, and whatever shares its weight; or by "
        "module name suffix.",
    )
    loraplus_lr_ratio: float | None = Field(
        default=None, gt=0, description="LoRA+: multiple of the learning rate for B."
    )
    lora_bias: bool = Field(default=False, description="Train a bias beside each B, scaled as B is.")
    bias: Literal["none", "lora_only", "all"] = Field(default="none", description="Which biases train too.")
    init_lora_weights: Literal[True, "gaussian", "pissa", "olora"] = Field(
        default=True,
        description="true: A Kaiming uniform, B zero; gaussian: A normal; pissa, olora: A and B the leading part "
        "of W by SVD or QR, with W kept and the start subtracted (embeddings start as with true).",
    )

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _not_empty(cls, value: list[str] | str | None) -> list[str] | str | None:
        if value is not None and (not value or (not isinstance(value, str) and "" in value)):
            raise ValueError("names no module")
        return value

    @model_validator(mode="after")
    def _pattern_of_layers(self) -> LoraConfig:
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError("layers_pattern: says which numbers layers_to_transform means; give that too")
        return self

    @model_validator(mode="after")
    def _within_layers(self) -> LoraConfig:
        if self.first_layer is not None and (self.bias == "all" or self.trainable_token_indices):
            what = "bias: all" if self.bias == "all" else "trainable_token_indices"
            raise ValueError(f"{what} trains outside the layers from {self.first_layer} on (train.layers.from)")
        return self

    @property
    def start(self) -> Start | None:
        """The start that takes part of the base's weight, if it is one."""
        start = self.init_lora_weights
        return start if start == "pissa" or start == "olora" else None

    def rank(self, module: str) -> int:
        """Return the rank at ``module``."""
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def alpha(self, module: str) -> float:
        """Return α at ``module``."""
        return float(_by_pattern(self.alpha_pattern, module, self.lora_alpha))

    def scale(self, module: str, rank: int | None = None) -> float:
        """Return the factor of B·A at ``module``: α/r, or α/√r with ``use_rslora``."""
        r, alpha = rank or self.rank(module), self.alpha(module)
        return alpha / math.sqrt(r) if self.use_rslora else alpha / r

    def mismatch(self, shapes: Mapping[str, Sequence[int]]) -> str:
        for name, shape in shapes.items():
            found = _A.fullmatch(name)
            if found is None:
                continue
            attention = found[1].removesuffix(".out_proj")  # whose rank its output projection has
            rank = self.rank(attention if f"{attention}.lora_A" in shapes else found[1])
            rows = shape[0] if shape else 0
            experts = name.endswith("_lora_A") and rows > 0 and rows % rank == 0
            if rows != rank and not experts:
                return f"rank {rank} for {found[1]}, whose factors have rank {rows}"
        return ""


def _by_pattern(patterns: dict[str, T], module: str, default: T) -> T:
    for pattern, value in patterns.items():
        if matching(rf"(.*\.)?({pattern})", [module], what="rank_pattern/alpha_pattern"):
            return value
    return default
