"""Full finetuning's configuration."""

from __future__ import annotations

from typing import Literal

from peftlab.methods.config import MethodConfig


class FullConfig(MethodConfig):
    """Full finetuning: every parameter trains."""

    name: Literal["full"] = "full"
