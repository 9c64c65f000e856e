"""The section ``draft: {kind: mtp}``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from peftlab.decoding.analysis.advice import FEATURE_TREE, REDUCED, DraftCost, TargetWeights
from peftlab.drafting.kinds.eagle3.config import StateConfig


class MtpDraft(StateConfig):
    """One transformer layer on the target's last state, used for every drafted token (FastMTP, arXiv 2509.18362)."""

    kind: Literal["mtp"] = "mtp"
    decay: float = Field(default=0.6, gt=0, le=1, description="The loss of step k (from 0) is weighted decay^k.")


def costs(target: TargetWeights) -> list[DraftCost]:
    """Return what a layer, the map into it, and a reduced head cost; each level reads them once."""
    rows = min(target.vocabulary, REDUCED)
    recipe = "kind: mtp" + (f", vocabulary: {rows}" if rows < target.vocabulary else "")
    each = (target.layer + 2 * target.hidden**2 + rows * target.hidden) / target.total
    return [DraftCost("mtp", "1 layer", recipe, 0.0, each, tree=True, width=FEATURE_TREE)]
