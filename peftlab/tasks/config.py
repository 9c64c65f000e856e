"""The ``data`` section of a finetune recipe."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from peftlab.section import Section, Seed

if TYPE_CHECKING:
    from peftlab.tasks.table import Task

Bins = dict[str, tuple[float | None, float | None]] | None
Count = Annotated[int, Field(gt=0)] | Annotated[float, Field(gt=0)]


class DataConfig(Section):
    """Where the examples come from."""

    path: str | None = Field(
        default=None,
        description="GLUE: null for the hub (nyu-mll/glue) or a directory in GLUE's TSV layout. Own task: a "
        "file (csv, tsv, jsonl, parquet; .gz too), a directory with train.* and validation.* files, or "
        "package:NAME/path.",
    )
    text: list[str] | None = Field(
        default=None,
        min_length=1,
        max_length=2,
        description="Own task: the text column, or the two columns of a pair.",
    )
    label: str | None = Field(default=None, description="Own task: the column with the label (class name or number).")
    bins: Bins = Field(
        default=None,
        min_length=2,
        description="Own classification task: make classes from a numeric label column. Class name to "
        "[lowest, highest], both inclusive, null for open; rows in no bin are left out and counted.",
    )
    validation: Count | Literal["all"] | None = Field(
        default=None,
        description="Own task in one file: examples (integer) or share (below 1) held out for validation; all, for "
        "`peftlab eval`: score the whole file.",
    )
    drop_missing: bool = Field(
        default=False,
        description="Own task: leave out rows without a text or label, and count them, instead of refusing the file.",
    )
    split_seed: Seed = Field(default=0, description="Seed of that held-out split; independent of train.seed.")
    max_train_examples: int | None = Field(
        default=None, ge=1, description="Use only this many training examples, drawn with split_seed."
    )

    @field_validator("validation")
    @classmethod
    def _count_or_share(cls, value: int | float | str | None) -> int | float | str | None:
        if isinstance(value, float) and value >= 1:
            raise ValueError(f"a share is below 1 and a number of examples is whole, got {value}")
        return value

    @field_validator("bins")
    @classmethod
    def _disjoint(cls, bins: Bins) -> Bins:
        spans = sorted(
            (-inf if low is None else low, inf if high is None else high, name)
            for name, (low, high) in (bins or {}).items()
        )
        for low, high, name in spans:
            if not low <= high:  # so that NaN is rejected as well
                raise ValueError(f"{name}: its lowest value is above its highest")
        for (_, high, one), (low, _, other) in pairwise(spans):
            if low <= high:
                raise ValueError(f"{one} and {other} overlap (both ends of a bin belong to it)")
        return bins


Problem = tuple[tuple[str, ...], str]
"""The keys of the place in a recipe, and what is wrong there."""
_OWN_KEYS = ("path", "text", "label", "bins", "validation", "drop_missing")


def check_glue(task: Task, data: DataConfig) -> list[Problem]:
    """Return the keys that a GLUE task does not take."""
    reason = f"belongs to one's own task (text/...); {task.name} has its own columns and splits"
    return [(("data", name), f"data.{name}: {reason}") for name in sorted(_given(data) - {"path"})]


def check_own(task: Task, data: DataConfig) -> list[Problem]:
    """Return the keys that a task on the user's files lacks, or does not take."""
    given = _given(data)
    missing = sorted({"path", "text", "label"} - given)
    problems: list[Problem] = [(("task",), f"data.{name}: missing; task {task.name} needs it") for name in missing]
    if task.regression and "bins" in given:
        problems.append((("data", "bins"), f"data.bins: makes classes, but task {task.name} learns a number"))
    return problems


def _given(data: DataConfig) -> set[str]:
    return {name for name in _OWN_KEYS if getattr(data, name) not in (None, False)}
