"""The version of this package, stated here alone, and those of others."""

from __future__ import annotations

from importlib import metadata

__version__ = "0.1.0"


def version_of(package: str) -> str | None:
    """Return the version of a distribution; None where it is not installed. This package need not be."""
    if package == "peftlab":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
