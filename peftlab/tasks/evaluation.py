"""The metrics as an ``evaluate.Metric``. Importing this imports ``evaluate`` (seconds): go through
``load_metric``."""

from __future__ import annotations

from typing import Any

import evaluate
from datasets import Features, Value

from peftlab.tasks.metrics import compute_metrics
from peftlab.tasks.table import Task


class GlueMetric(evaluate.Metric):
    """The official metrics of one task over scikit-learn and SciPy.

    It lives in the package because ``evaluate.load`` fetches its scripts from the hub at run time.

    Args:
        task: whose metrics.
        options: ``evaluate.Metric``'s own, such as ``num_process``, ``process_id`` and ``experiment_id``.
    """

    def __init__(self, task: Task, **options: Any) -> None:
        self.task = task
        super().__init__(config_name=task.name.replace("/", "-"), **options)

    def _info(self) -> evaluate.MetricInfo:
        value = Value("float64" if self.task.regression else "int64")
        return evaluate.MetricInfo(
            description=f"Official metrics of {self.task.name}: {', '.join(self.task.metrics)}.",
            citation="",
            inputs_description="predictions: class indices or numbers. references: the labels.",
            features=Features({"predictions": value, "references": value}),
        )

    def _compute(self, *, predictions: Any = None, references: Any = None, **_: Any) -> dict[str, float]:
        return compute_metrics(self.task, predictions, references)
