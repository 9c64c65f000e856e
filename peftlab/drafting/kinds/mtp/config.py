"""The section ``draft: {kind: mtp}``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from peftlab.decoding.advice import DraftCost, TargetWeights
from peftlab.drafting.kinds.eagle3.config import StateConfig, layer_cost


class MtpDraft(StateConfig):
    """One transformer layer on the target's last state, used for every drafted token (FastMTP, arXiv 2509.18362)."""

    kind: Literal["mtp"] = "mtp"
    decay: float = Field(default=0.6, gt=0, le=1, description="The loss of step k (from 0) is weighted decay^k.")


def costs(target: TargetWeights) -> list[DraftCost]:
    """Return what a layer, the map into it, and a reduced head cost; each level reads them once."""
    return [layer_cost("mtp", target)]
