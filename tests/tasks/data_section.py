"""What the tests of this folder share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class Data:
    """A data section as plain attributes."""

    path: str | None = None
    text: list[str] | None = None
    label: str | None = None
    bins: dict[str, tuple[float | None, float | None]] | None = None
    validation: int | float | Literal["all"] | None = None
    drop_missing: bool = False
    split_seed: int = 0
    max_train_examples: int | None = None
