"""GPT-2's linear map, without importing transformers for it."""

from __future__ import annotations

import sys

from torch import nn


def conv1d() -> tuple[type[nn.Module], ...]:
    """Return transformers' ``Conv1D``, a linear map that stores its weight as (in, out).

    Nothing before the module that defines it is imported: until then no model contains one.
    """
    module = sys.modules.get("transformers.pytorch_utils")
    return () if module is None else (module.Conv1D,)
