"""What the sections of a recipe have in common: their base class, and types that several of them use."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from peftlab.files import Json

Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""A seed that python's, numpy's and torch's generators all take."""


class Section(BaseModel):
    """Base of every section of a recipe: unknown keys are refused, and values cannot change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    def as_json(self) -> dict[str, Json]:
        """Return the values under the names that a recipe gives them."""
        return self.model_dump(mode="json", by_alias=True)
