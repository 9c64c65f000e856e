"""Warnings of libraries about their own parts, which concern no run: transformers imports torchao if it is there."""

from __future__ import annotations

import logging

_LOGGERS = ("torchao", "torch.utils._pytree")


def quiet_libraries() -> None:
    """Let those libraries log errors alone; call it before they are imported."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
