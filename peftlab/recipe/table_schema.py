"""The recipes of tables: what all cells share, and the keys in which rows differ."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from peftlab.checkpoints.merge.config import MergeConfig
from peftlab.drafting.config import DraftData
from peftlab.models.config import Base, BaseConfig
from peftlab.references import is_url
from peftlab.section import Section, Seed
from peftlab.tasks.config import DataConfig
from peftlab.training.config import TrainConfig

Changes = dict[str, dict[str, object]]
"""By task or row, the keys of a cell's recipe that differ there."""


def _on_disk(path: str) -> str:
    """Return the ``output_dir`` of a table, which is no URL."""
    if is_url(path):
        raise ValueError(f"{path}: the cells of a table or sweep share a directory; only single runs have a URL")
    return path


def draft_of_a_reference(value: object) -> object:
    """Return the section that a ``draft`` is short for, if it is a reference alone."""
    return {"kind": "model", "from": value} if isinstance(value, str) else value


class TableCosts(Section):
    """The rows of a table beside others of equal cost."""

    of: str = Field(description="The row whose FLOPs are 1.")
    controls: dict[str, str] = Field(default={}, description="Row to the row of equal cost that it is compared with.")


class TableRecipe(Section):
    """Finetune on every task in every way (row) with every seed, and collect the scores in one table."""

    kind: Literal["table"] = Field(description="What the recipe makes.")
    model: str = Field(description="Hub id, model, run or adapter directory, GGUF file, or package:NAME/path.")
    revision: str | None = Field(default=None, description="Git revision of a hub model.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model repository ships.")
    base: Base = Field(default=BaseConfig(), description="How the model's weights are stored; null: fp32.")
    tasks: list[str] = Field(min_length=1, description="The columns: tasks as a finetune recipe names them.")
    rows: Changes = Field(
        min_length=1,
        description="The rows: name to its own keys, {lora: {method: {name: lora}, train: {lr: 5e-4}}}; per_task among "
        "them is for that row alone, init_from: null starts it from the model in every task.",
    )
    seeds: list[Seed] = Field(
        default=[0], min_length=1, description="Each task and row is run with each of these as train.seed."
    )
    data: DataConfig = Field(default=DataConfig(), description="Where the examples come from.")
    train: TrainConfig = Field(default=TrainConfig(), description="How the loop runs.")
    per_task: Changes = Field(
        default={},
        description="Task to its own keys, {glue/rte: {train: {epochs: 80}}}; a row's own keys win.",
    )
    init: dict[str, str] = Field(
        default={},
        description="Task to the task of this table whose result, same row and seed, it starts from.",
    )
    costs: TableCosts | None = Field(
        default=None,
        description="{of: full, controls: {upper: shorter}}: also show FLOPs as a share of a row's, bytes and "
        "time, and beside each row its control.",
    )
    merge: bool | MergeConfig = Field(
        default=False, description="Write merged/ in every cell whose method has a linear fold; a section says how."
    )
    output_dir: str = Field(description="Directory of the table; its cells are stored below it.")

    _place = field_validator("output_dir")(_on_disk)


class DraftTableRecipe(Section):
    """Train a draft for a target in every way (row) with every seed, and collect their acceptance in one table."""

    kind: Literal["draft_table"] = Field(description="What the recipe makes.")
    target: str = Field(
        description="The model to be served: hub id, model, run or adapter directory, GGUF file, or package:NAME/path."
    )
    draft: dict[str, object] | None = Field(
        default=None, description="What drafts, a section or reference as in kind: draft; null: each row says it."
    )
    revision: str | None = Field(default=None, description="Git revision of a hub target.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that a model repository ships.")
    base: Base = Field(default=BaseConfig(), description="How the target's weights are stored; null: fp32.")
    method: dict[str, object] | None = Field(
        default=None, description="How the drafts train, as in kind: draft; null: as usual for the kind of draft."
    )
    objective: dict[str, object] | None = Field(
        default=None, description="What the drafts minimise, as in kind: draft; null: its default."
    )
    rows: Changes = Field(
        min_length=1,
        description="The rows: name to its own keys of a draft recipe, {tvd: {objective: {name: tvd}}}; a draft of "
        "another kind, or a method of another name, replaces the table's. Gains are those over the first row.",
    )
    seeds: list[Seed] = Field(
        default=[0], min_length=1, description="Each row is run with each of these as train.seed."
    )
    data: DraftData = Field(description="The text the drafts learn from: written once, for all cells that share it.")
    train: TrainConfig = Field(default=TrainConfig(), description="How the loop runs.")
    acceptance_head: bool = Field(default=False, description="As in kind: draft.")
    gamma: int = Field(default=4, ge=1, description="Drafted tokens per step when block efficiency is measured.")
    policy: str = Field(default="fixed", description="How the draft length is chosen then, as in kind: draft.")
    draft_window: str | None = Field(default=None, description="What the draft sees then, as in kind: draft.")
    merge: bool | MergeConfig | None = Field(
        default=None,
        description="Write merged/ in the cells: true, false, or null for wherever the method has a linear fold; a "
        "section is null and says how.",
    )
    output_dir: str = Field(description="Directory of the table; its cells are stored below it.")

    _draft = field_validator("draft", mode="before")(draft_of_a_reference)
    _place = field_validator("output_dir")(_on_disk)


AnyTable = TableRecipe | DraftTableRecipe
"""A recipe whose cells are recipes of their own."""
