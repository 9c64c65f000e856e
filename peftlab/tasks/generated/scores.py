"""The scores of generated answers by the metrics of the table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from statistics import fmean

from peftlab.errors import PeftlabError
from peftlab.rows import resolve
from peftlab.tasks.generated.contexts import Answer
from peftlab.tasks.generated.table import GENERATION_METRICS, HIGH, LOW


def check_packages(names: Iterable[str]) -> None:
    """Raise ``PeftlabError`` for a metric whose packages are not installed."""
    for name in names:
        missing = [package for package in GENERATION_METRICS.find(name).packages if find_spec(package) is None]
        if missing:
            raise PeftlabError(
                f"generate.metrics: {name} needs {' and '.join(missing)}: pip install 'peftlab[metrics]'"
            )


def score(names: Iterable[str], answers: Sequence[Answer]) -> dict[str, float]:
    """Return the value of each metric; a mean over answers has its 95 % interval as ``NAME_low`` and ``NAME_high``.

    Raises:
        PeftlabError: no answer, or a reference that a metric cannot use.
    """
    if not answers:
        raise PeftlabError("generate: no answer to score")
    values: dict[str, float] = {}
    for name in names:
        metric = GENERATION_METRICS.find(name)
        found = resolve(metric.score)(answers)
        values[name] = fmean(found) if metric.mean else float(found)
        if metric.mean and len(found) > 1:
            values[name + LOW], values[name + HIGH] = interval(found)
    return values


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of a mean: percentiles of 9,999 bootstrap samples, seeded."""
    import numpy as np
    from scipy.stats import bootstrap

    found = bootstrap((np.asarray(values),), np.mean, method="percentile", batch=1000, rng=np.random.default_rng(0))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
