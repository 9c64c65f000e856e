"""TODO: say what this module is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MOST_SEED = 2**32 - 1
"""The largest seed that all generators take."""


class Section(BaseModel):
    """Base of every recipe section: unknown keys are refused and values cannot change later."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
