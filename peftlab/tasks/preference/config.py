"""The ``objective`` section of a finetune recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from peftlab.section import Section


class PreferenceObjective(Section):
    """What text/preference minimises."""

    name: Literal["dpo"] = Field(default="dpo", description="dpo: direct preference optimisation.")
    beta: float = Field(
        default=0.1,
        gt=0,
        allow_inf_nan=False,
        description="Strength of the penalty for moving away from the model that training starts from.",
    )
