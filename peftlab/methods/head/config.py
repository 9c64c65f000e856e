"""The linear probe's configuration."""

from __future__ import annotations

from typing import Literal

from peftlab.methods.config import MethodConfig


class HeadConfig(MethodConfig):
    """Linear probe: the task head trains, the body is frozen."""

    name: Literal["head"] = "head"
