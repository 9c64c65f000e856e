"""What every method's configuration has in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field


class MethodConfig(BaseModel):
    """Base of the method configurations, told apart by ``name`` in a recipe.

    Unknown keys are refused and a configuration cannot change after it was made.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    name: str
    modules_to_save: list[str] | None = Field(
        None,
        description="Modules trained and saved whole, by name suffix, beside the task's head (which always is).",
    )

    def misfit(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Return what of the configuration does not fit an adapter's tensors, by name; an empty string: nothing.

        A size that a file claims is compared with those of its tensors before anything of that size is made.
        """
        return ""
