"""A task's metrics as an ``evaluate.Metric``. Importing this imports ``evaluate``, which takes seconds."""

from __future__ import annotations

import evaluate
from datasets import Features, Value

from peftlab.tasks.labelled.metrics import Numbers, compute_metrics
from peftlab.tasks.table import Task


class TaskMetric(evaluate.Metric):
    """The official metrics of one task over scikit-learn and SciPy.

    It lives in the package because ``evaluate.load`` fetches its scripts from the hub at run time.

    Args:
        task: whose metrics.
        options: ``evaluate.Metric``'s own, such as ``num_process``, ``process_id`` and ``experiment_id``.
    """

    def __init__(self, task: Task, **options: str | int | None) -> None:
        self.task = task
        super().__init__(config_name=task.name.replace("/", "-"), **options)

    def _info(self) -> evaluate.MetricInfo:
        value = Value("float64" if self.task.regression else "int64")
        return evaluate.MetricInfo(
            description=f"Metrics of {self.task.name}: {', '.join(self.task.metrics)}.",
            citation="",
            inputs_description="predictions: class indices or numbers. references: the labels.",
            features=Features({"predictions": value, "references": value}),
        )

    def _compute(self, *, predictions: Numbers, references: Numbers, **_: object) -> dict[str, float]:
        return compute_metrics(self.task, predictions, references)


def load_metric(
    task: Task,
    *,
    num_process: int = 1,
    process_id: int = 0,
    experiment_id: str | None = None,
    cache_dir: str | None = None,
) -> TaskMetric:
    """Return ``compute_metrics`` as an ``evaluate.Metric``: ``add_batch`` for each batch, then ``compute``.

    With several processes each adds its share to a file in ``cache_dir`` and ``compute`` gathers them:
    the result on process 0, None elsewhere. Nothing is fetched from the hub.

    Args:
        task: whose metrics.
        num_process: processes that add.
        process_id: this process's number.
        experiment_id: keeps apart runs that share ``cache_dir``; needed with several processes.
        cache_dir: directory common to all processes; the default is evaluate's.
    """
    return TaskMetric(
        task,
        num_process=num_process,
        process_id=process_id,
        experiment_id=experiment_id,
        cache_dir=cache_dir,
        keep_in_memory=num_process == 1,
    )
