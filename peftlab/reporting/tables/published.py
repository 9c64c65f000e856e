"""The rows of published tables, to be shown beside one's own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from peftlab.files import member, read_object

FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class PublishedRow:
    """One row of a published table.

    Attributes:
        model: the model's name as a reference contains it, ``roberta-base``. title: what the paper calls the row.
        parameters: trainable parameters as printed there, ``0.3M``.
        scores: by task; deviations: over the paper's seeds, where it gives them.
    """

    model: str
    title: str
    parameters: str
    scores: dict[str, float]
    deviations: dict[str, float]

    def text(self, task: str) -> str:
        """Return the score of a task with its deviation; "-" where there is none."""
        if task not in self.scores:
            return "-"
        deviation = self.deviations.get(task)
        return f"{self.scores[task]:.1f}" + ("" if deviation is None else f" ±{deviation:.1f}")


@dataclass(frozen=True)
class Published:
    """The published rows that belong to a table.

    Attributes:
        beside: by the table's own rows, the one with the same method and model.
        others: the remaining rows of the table's models; of RoBERTa-base where no model of the table has any.
        notes: where they come from, and how they were measured.
    """

    beside: dict[str, PublishedRow] = field(default_factory=dict)
    others: tuple[PublishedRow, ...] = ()
    notes: tuple[str, ...] = ()


def published_rows(models: Mapping[str, str], tasks: Collection[str]) -> Published:
    """Return what was published on ``tasks``.

    Args:
        models: the table's rows, name to the reference of the model. A published row belongs to the row of its own
            name if that has its model.
    """
    source = read_object(FILE)
    columns = [str(task) for task in member(source, "tasks", list, FILE)]
    rows = {
        name: _row(values, columns, tasks)
        for name, values in member(source, "rows", dict, FILE).items()
        if isinstance(values, dict)
    }
    rows = {name: row for name, row in rows.items() if row.scores}
    if not rows:
        return Published()
    used = {row.model for row in rows.values() if any(_is(model, row.model) for model in models.values())}
    notes = [f"Published rows: {source['source']}.", *map(str, member(source, "notes", list, FILE))]
    if not used:
        notes.append("They are of other models than this table's: a scale, not a comparison.")
        used = {"roberta-base"}
    beside = {name: row for name, row in rows.items() if name in models and _is(models[name], row.model)}
    others = tuple(row for name, row in rows.items() if row.model in used and name not in beside)
    return Published(beside, others, tuple(notes))


def _row(values: dict[str, object], columns: list[str], tasks: Collection[str]) -> PublishedRow:
    def by_task(key: str) -> dict[str, float]:
        numbers = member(values, key, list, FILE) if key in values else []
        return {task: number for task, number in zip(columns, numbers, strict=False) if task in tasks}

    model, title, parameters = (member(values, key, str, FILE) for key in ("model", "title", "parameters"))
    return PublishedRow(model, title, parameters, by_task("scores"), by_task("deviations"))


def _is(reference: str, model: str) -> bool:
    return model in reference.lower()
