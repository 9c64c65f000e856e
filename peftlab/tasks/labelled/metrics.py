"""The metrics of a task, and those of a constant answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from peftlab.errors import PeftlabError
from peftlab.tasks.table import Task

Array = NDArray[np.float64] | NDArray[np.float32] | NDArray[np.int64]
Numbers = Sequence[float] | Array


def compute_metrics(task: Task, predictions: Numbers, references: Numbers) -> dict[str, float]:
    """Return ``task.metrics`` by name, each in [-1, 1] or [0, 1].

    ``accuracy``: share of equal classes. ``f1``: for GLUE's two-class tasks of class 1 (paraphrase,
    duplicate), as on its leaderboard; for the user's own tasks the unweighted mean over the classes
    that occur, as none of them is special. ``matthews_correlation``: of the confusion matrix. ``pearson``,
    ``spearman``: correlations.

    Constant predictions (or references) have no correlation, 0/0; it is reported as 0.0, the value of answers
    independent of the references, so that such a run compares as worse than any that learnt something, which NaN
    would not.

    Args:
        task: its ``metrics`` and ``regression`` are read.
        predictions: class indices, or numbers for regression; shape (n,).
        references: the labels, same shape.

    Raises:
        PeftlabError: no examples, different numbers of them, or a prediction that is NaN or infinite.
    """
    answers, truth = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    if answers.ndim != 1 or answers.shape != truth.shape or not answers.size:
        raise PeftlabError(
            f"metrics of {task.name}: predictions of shape {answers.shape} and references of shape "
            f"{truth.shape} must be one-dimensional, of one size and not empty"
        )
    bad = int((~np.isfinite(answers)).sum())
    if bad:
        raise PeftlabError(
            f"metrics of {task.name}: {bad} of {answers.size} predictions are not finite; training has "
            "diverged (try a lower train.lr, or train.precision fp32)"
        )
    if not task.regression:
        answers, truth = answers.astype(np.int64), truth.astype(np.int64)
    return {name: METRICS[name](task, answers, truth) for name in task.metrics}


def majority_baseline(task: Task, train_labels: Numbers, eval_labels: Numbers) -> dict[str, float]:
    """Return the metrics of always answering the most frequent training class (the lower index where equal).

    For regression the answer is the mean of the training labels.
    """
    if task.regression:
        answer = float(np.mean(np.asarray(train_labels, np.float64)))
    else:
        counts = Counter(np.asarray(train_labels).tolist())
        answer = min(counts, key=lambda label: (-counts[label], label))
    return compute_metrics(task, np.full(len(eval_labels), answer), eval_labels)


def _accuracy(task: Task, answers: Array, truth: Array) -> float:
    return float((answers == truth).mean())


def _f1(task: Task, answers: Array, truth: Array) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(truth, answers, average="binary" if task.glue else "macro", zero_division=0))


def _matthews(task: Task, answers: Array, truth: Array) -> float:
    from sklearn.metrics import matthews_corrcoef

    return 0.0 if _constant(answers, truth) else float(matthews_corrcoef(truth, answers))


def _pearson(task: Task, answers: Array, truth: Array) -> float:
    from scipy.stats import pearsonr

    return 0.0 if _constant(answers, truth) else float(pearsonr(answers, truth).statistic)


def _spearman(task: Task, answers: Array, truth: Array) -> float:
    from scipy.stats import spearmanr

    return 0.0 if _constant(answers, truth) else float(spearmanr(answers, truth).statistic)


def _constant(answers: Array, truth: Array) -> bool:
    return bool(np.ptp(answers) == 0 or np.ptp(truth) == 0)


METRICS: dict[str, Callable[[Task, Array, Array], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews_correlation": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}
