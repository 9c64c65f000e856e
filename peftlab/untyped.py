"""Types that annotations cannot state, each with the reason: the one module that names ``Any``."""

from __future__ import annotations

from typing import Any, TypeAlias

Named: TypeAlias = Any
"""What ``"module:attribute"`` names: a class or a function whose type is known only once it is imported. The rows'
docstrings say what each one is."""
