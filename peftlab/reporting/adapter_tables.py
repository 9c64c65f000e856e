"""What the verbs about adapter files show on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from peftlab.reporting import facts
from peftlab.reporting.console import LAYER, LongName, plain_table

if TYPE_CHECKING:
    from peftlab.checkpoints.consumers.check import AdapterCheck
    from peftlab.checkpoints.consumers.convert import Conversion
    from peftlab.checkpoints.extract.extraction import Extraction

_LOADS = {True: "yes", False: "no", "unknown": "unknown"}
_NAMES = 8  # shown of a long list


def check_lines(found: AdapterCheck) -> list[str]:
    """Return what an adapter is and what it would touch, by line."""
    settings = ", ".join(f"{key}={value}" for key, value in found.settings.items())
    lines = [f"{found.adapter}: {found.format} format; {settings}"]
    lines.append(f"base: {found.base} ({found.architecture})")
    lines += _listed("matched", found.matched) + _listed("unmatched", found.unmatched)
    lines += [f"note: {note}" for note in found.notes[:_NAMES]]
    rest = len(found.notes) - _NAMES
    return [*lines, f"and {rest} notes more, in the JSON"] if rest > 0 else lines


def consumers_table(found: AdapterCheck) -> Table:
    """Return which programs read an adapter as meant, and the version that says so."""
    table = plain_table(title="read as meant by")
    table.add_column("program", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("why", overflow="fold")
    for name, reading in found.consumers.items():
        version = reading.source.partition(":")[0] + (f", {reading.date}" if reading.date else "")
        table.add_row(name, _LOADS[reading.loads], Text(f"{reading.reason} [{version}]"))
    return table


def conversion_lines(done: Conversion) -> list[str]:
    """Return what a conversion wrote, by line."""
    lines = [f"{done.out}: for {done.engine}, rank {done.rank}, {done.modules} modules"]
    if done.added:
        lines.append(f"with factors of 0 for {len(done.added)} modules, which {done.engine} needs beside the others")
    return [*lines, f"by the rule of {done.engine}: {done.checked}", done.serve]


def extraction_table(done: Extraction) -> Table:
    """Return what became of each module's difference."""
    table = plain_table(title=f"extracted from {done.architecture}")
    table.add_column("module")
    for name in ("rank", "delta/W", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in done.modules:
        exact = "" if row.exact else " *"
        table.add_row(LongName(row.name), str(row.rank), facts.percent(row.ratio), f"{row.error:.2e}{exact}")
    if not all(row.exact for row in done.modules):
        table.caption = "* measured on the factors of a randomised factorisation; the least possible may be smaller"
    return table


def extraction_lines(done: Extraction) -> list[str]:
    """Return what an extraction wrote beside the factors, by line."""
    lines = [f"stored whole: {name}" for name in done.whole]
    if done.biases:
        lines.append(f"stored: {done.biases} biases")
    lines += [f"note: {note}" for note in done.notes]
    size = f"{done.bytes / (1 << 20):,.1f} MiB"
    return [*lines, f"{done.out}: {size}, error of all differences together {done.error:.2e}"]


def _listed(what: str, names: Iterable[str]) -> list[str]:
    """Return the names of modules, those that differ only in the layer on one line."""
    groups = Counter(LAYER.sub("*", name) for name in names)
    lines = [f"{what}: {sum(groups.values())} modules"]
    lines += [f"  {pattern} ({count})" for pattern, count in list(groups.items())[:_NAMES]]
    return lines + ([f"  and {len(groups) - _NAMES} more"] if len(groups) > _NAMES else [])
