"""What every method's configuration has in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from peftlab.section import Section


class MethodConfig(Section):
    """Base of the methods' configurations; ``name``, a ``Literal`` in each, selects the method in a recipe."""

    name: str
    modules_to_save: list[str] | None = Field(
        default=None,
        description="Further modules to train and save whole, by name suffix; the task head always is.",
    )
    first_layer: SkipJsonSchema[int | None] = Field(  # recipes say train.layers.from, for any method
        default=None,
        ge=0,
        description="Only the layers from this one on (from 0), the task head and modules_to_save train.",
    )

    def mismatch(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Return what in the configuration contradicts the shapes of an adapter's tensors; "" where nothing does.

        Checked before anything is allocated, so that a wrong size in a file costs no memory.

        Args:
            shapes: the shape of each of the adapter's tensors, by name.
        """
        return ""
