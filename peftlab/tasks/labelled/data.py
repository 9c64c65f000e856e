"""Loading the labelled splits that a recipe's task and data section name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peftlab.rows import resolve
from peftlab.tasks.batches import seeded_subset
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labelled_texts import fingerprint
from peftlab.tasks.table import Task, find_task
from peftlab.tasks.text import BEYOND

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class TaskData:
    """A task and its examples.

    Attributes:
        task: the table's row; for a ``text/`` task with ``labels`` and ``text`` filled in.
        splits: split name (``train``, ``task.evaluation``, ``test...``) to examples with the columns
            ``text``, for pairs ``text_pair``, and ``label`` (see ``Examples``). An
            unlabelled split has no ``label`` column; a split that the source lacks is absent.
        fingerprint: SHA-256 of the rows used, equal on every machine.
        left_out: reason to the number of rows of the source that are in no split.
    """

    task: Task
    splits: dict[str, Dataset]
    fingerprint: str
    left_out: dict[str, int]


def load_task_data(name: str, data: DataConfig, classes: Sequence[str] | None = None) -> TaskData:
    """Load the examples of a task.

    GLUE comes from the hub, or from ``data.path`` in the benchmark's TSV layout; a ``text/`` task from the
    files at ``data.path`` (formats: ``peftlab.tasks.reading.readers``). With ``data.max_train_examples`` that many
    training rows are drawn with ``data.split_seed``, in file order; the classes stay those of all rows.

    Args:
        name: the task, as in ``peftlab.tasks.table``.
        data: the recipe's data section.
        classes: a trained model's class names in label order: labels are read as these. None: the task's own, or
            those of the training file.

    Raises:
        PeftlabError: an unknown task, labels that are none of ``classes``, or anything wrong with the data, named by
            file and line, row or column.
    """
    task = find_task(name)
    task, splits, left_out = resolve(task.load)(task, data, classes)
    chosen = seeded_subset(len(splits.get("train", ())), data.max_train_examples, data.split_seed)
    if chosen is not None:
        left_out = {**left_out, BEYOND: len(splits["train"]) - len(chosen)}
        splits["train"] = splits["train"].take(chosen)
    datasets = {split: examples.dataset() for split, examples in splits.items()}
    return TaskData(task, datasets, fingerprint(task, splits), left_out)
