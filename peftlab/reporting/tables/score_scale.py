"""How a table shows a metric: shares and correlations times 100, as papers do, losses and other errors as they are."""

from __future__ import annotations

_ERRORS = ("loss", "perplexity", "bits_per_byte", "mse", "mae")  # how names of errors end: nll_loss, rmse, ...
_UNBOUNDED = (*_ERRORS, "margin")


def lower_is_better(metric: str) -> bool:
    """Return whether a smaller value of ``metric`` is a better one."""
    return metric.endswith(_ERRORS)


def scale(metric: str) -> float:
    """Return what a value of ``metric`` is multiplied by to be shown: 100 for a share or a correlation, else 1."""
    return 1.0 if metric.endswith(_UNBOUNDED) else 100.0


def decimals(metric: str) -> int:
    """Return the decimals that ``metric`` is shown with."""
    return 3 if metric.endswith(_UNBOUNDED) else 1


def shown(metric: str, value: float) -> str:
    """Return a value of ``metric``, not yet multiplied, as a table shows it: 0.8725 is 87.2, a loss of 0.8725 0.873."""
    return f"{scale(metric) * value:.{decimals(metric)}f}"
