"""What recipes are composed of: tables of methods, tasks and drafts, and the base class of their sections.

A row is a frozen dataclass whose fields name classes and functions as ``"module:attribute"``; ``resolve`` imports one
when it is used. So reading a table, as validating a recipe does, imports neither torch nor transformers.

Another distribution adds a row by an entry point of the table's group, whose value names the row::

    [project.entry-points."peftlab.methods"]
    scaled = "my_package.row:SCALED"      # SCALED = Method(config="my_package.config:ScaledConfig", plan=...)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from peftlab.errors import PeftlabError, did_you_mean, usual_form
from peftlab.files import Json
from peftlab.untyped import Named

RowT = TypeVar("RowT")


@cache
def resolve(reference: str) -> Named:
    """Return the object that ``reference``, ``"module:attribute"``, names; its module is imported at the first call.

    Raises:
        PeftlabError: the reference is not of that form, the module cannot be imported, or it has no such attribute.
    """
    module, separator, attribute = reference.partition(":")
    if not (module and separator and attribute):
        raise PeftlabError(f"{reference!r} is not of the form 'module:attribute'")
    try:
        found = import_module(module)
    except ImportError as error:
        raise PeftlabError(f"{reference}: {module} cannot be imported ({error})") from error
    if not hasattr(found, attribute):
        raise PeftlabError(f"{reference}: {module} has no {attribute!r}{did_you_mean(attribute, vars(found))}")
    return getattr(found, attribute)


class Registry(Mapping[str, RowT], Generic[RowT]):
    """A table of rows by name: the built-in ones in order, then those of installed distributions, sorted by name.

    The entry points are read once, when the table is first used.

    Args:
        what: what a row describes, ``"method"``, for messages.
        group: the entry points' group, ``"peftlab.methods"``.
        kind: the class of a row.
        built_in: the rows of this package.
    """

    def __init__(self, what: str, group: str, kind: type[RowT], built_in: Mapping[str, RowT]) -> None:
        self.what, self.group, self.kind, self.built_in = what, group, kind, built_in

    def __getitem__(self, name: str) -> RowT:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, name: str) -> RowT:
        """Return the row ``name``.

        Raises:
            PeftlabError: there is none; the nearest name is in the message.
        """
        if name not in self._rows:
            hint = usual_form(name) or did_you_mean(name, self._rows)
            raise PeftlabError(f"unknown {self.what} {name!r}{hint}; one of {', '.join(self._rows)}")
        return self._rows[name]

    @cached_property
    def _rows(self) -> dict[str, RowT]:
        rows = dict(self.built_in)
        owners = dict.fromkeys(rows, "peftlab")
        entries = sorted((entry.name, _owner(entry), entry) for entry in entry_points(group=self.group))
        for name, owner, entry in entries:
            if name in rows:
                raise PeftlabError(
                    f"{self.what} {name!r} is defined twice: by {owners[name]} and by the entry point "
                    f"{entry.value} of {owner}; rename the entry point or uninstall {owner}"
                )
            rows[name], owners[name] = self._load(entry, owner), owner
        return rows

    def _load(self, entry: EntryPoint, owner: str) -> RowT:
        try:
            row = resolve(entry.value)
        except PeftlabError as error:
            raise PeftlabError(f"{self.what} {entry.name!r}, an entry point of {owner}: {error}") from error
        if not isinstance(row, self.kind):
            raise PeftlabError(
                f"{self.what} {entry.name!r}, an entry point of {owner}: {entry.value} is a {type(row).__name__}, "
                f"not a {self.kind.__module__}.{self.kind.__name__}"
            )
        return row


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown distribution"


# --- Sections of a recipe.
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""A seed that python's, numpy's and torch's generators all take."""


def as_list(value: object) -> object:
    """Return a text as a list of one; anything else as it is."""
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(as_list, json_schema_input_type=str | list[str])]
"""A list of texts; a recipe may write a text where a list of one is meant."""


class Section(BaseModel):
    """Base of every section of a recipe: unknown keys are refused, and values cannot change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    def as_json(self) -> dict[str, Json]:
        """Return the values under the names that a recipe gives them."""
        return self.model_dump(mode="json", by_alias=True)
