"""The recipes that come with the package. Imports nothing heavy: the command line lists them at once."""

from __future__ import annotations

from pathlib import Path

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import write_text


def recipes_root() -> Path:
    """Return the directory of shipped recipes: in an installed package, or the repository's ``recipes/``."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def files() -> dict[str, Path]:
    """Return the shipped recipes' files by short name, in order: ``glue/cola-lora``, ..., ``quickstart``."""
    root = recipes_root()
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def shipped() -> list[tuple[str, str]]:
    """Return each shipped recipe's short name and its summary, the first line of its header."""
    return [(name, _summary(path)) for name, path in files().items()]


def find(name: str) -> Path:
    """Return the file of the shipped recipe ``name`` (``glue/cola-lora``, with or without ``.yaml``).

    Raises:
        PeftlabError: there is none; the nearest name is in the message.
    """
    known = files()
    short = name.removesuffix(".yaml")
    if short not in known:
        raise PeftlabError(f"no shipped recipe {name!r}{did_you_mean(short, known)}; one of {', '.join(known)}")
    return known[short]


def copy(name: str, destination: str | Path) -> Path:
    """Copy the shipped recipe ``name`` to a file or into a directory, and return the new file.

    Raises:
        PeftlabError: no such recipe, or the new file exists already.
    """
    source = find(name)
    target = Path(destination)
    if target.is_dir():
        target = target / source.name
    if target.exists():
        raise PeftlabError(f"{target} exists already; nothing was written")
    write_text(target, source.read_text(encoding="utf-8"))
    return target


def _summary(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return lines.readline().removeprefix("#").strip()
