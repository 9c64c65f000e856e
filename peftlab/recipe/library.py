"""The recipes that come with the package, and the templates that run them on clusters.

Imports nothing heavy: the command line lists them at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import write_text

_LAUNCH = "launch"  # the folder of the templates


def recipes_root() -> Path:
    """Return the directory of shipped recipes: in an installed package, or the repository's ``recipes/``."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def files() -> dict[str, Path]:
    """Return the shipped recipes' files by short name, in order: ``glue/cola-lora``, ..., ``quickstart``."""
    root = recipes_root()
    found = {path.relative_to(root).with_suffix(""): path for path in sorted(root.rglob("*.yaml"))}
    return {name.as_posix(): path for name, path in found.items() if name.parts[0] != _LAUNCH}


def templates() -> dict[str, Path]:
    """Return the files that run a table as jobs of a cluster, by name, in order: ``launch/kubernetes.yaml``, ..."""
    return {f"{_LAUNCH}/{path.name}": path for path in sorted((recipes_root() / _LAUNCH).iterdir())}


def shipped() -> list[tuple[str, str]]:
    """Return each shipped recipe's short name and its summary, the first line of its header."""
    return [(name, _summary(path)) for name, path in files().items()]


def find(name: str) -> Path:
    """Return the file of the shipped recipe ``name`` (``glue/cola-lora``, with or without ``.yaml``).

    Raises:
        PeftlabError: there is none; the nearest name is in the message.
    """
    return _among(files(), name)


def _among(known: Mapping[str, Path], name: str) -> Path:
    short = name if name in known else name.removesuffix(".yaml")
    if short not in known:
        raise PeftlabError(f"no shipped recipe {name!r}{did_you_mean(short, known)}; one of {', '.join(known)}")
    return known[short]


def copy(name: str, destination: str | Path) -> Path:
    """Copy the shipped recipe or template ``name`` to a file or into a directory, and return the new file.

    Args:
        name: the short name.
        destination: a file, or a directory: one that is there, or to be made, whose name ends in a slash.

    Raises:
        PeftlabError: no such recipe or template, or the new file exists already.
    """
    source = _among({**files(), **templates()}, name)
    target = Path(destination)
    if target.is_dir() or str(destination).endswith("/"):
        target = target / source.name
    if target.exists():
        raise PeftlabError(f"{target} exists already; nothing was written")
    write_text(target, source.read_text(encoding="utf-8"))
    return target


def _summary(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return lines.readline().removeprefix("#").strip()
