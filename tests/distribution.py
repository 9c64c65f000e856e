"""A tiny distribution on ``sys.path``: modules, and entry points as an installed wheel has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_distribution(
    root: Path, name: str, files: Mapping[str, str], points: Mapping[str, Mapping[str, str]]
) -> Path:
    """Write the distribution ``name`` into ``root`` and return ``root``, which belongs on ``sys.path``.

    Args:
        files: path below ``root`` to its text.
        points: the entry points, ``module:attribute`` by group and name.
    """
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    info = root / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in rows.items()) for group, rows in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return root
