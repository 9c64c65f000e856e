"""Tables and lines for the terminal: ASCII text that fits into 80 columns and into a log file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from peftlab.progress import plural
from peftlab.reporting.facts import label, number, percent, plain_table

if TYPE_CHECKING:
    from peftlab.checkpoints.engines import AdapterCheck, Conversion
    from peftlab.checkpoints.extract import Extraction
    from peftlab.checkpoints.merge_steps import MergeReport, TensorReport

_PIECES = re.compile(r"[^./: -]*[./: -]|[^./: -]+")
LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_INDENT = "  "
_LOADS = {True: "yes", False: "no", "unknown": "unknown"}
_NAMES = 8  # shown of a long list


class LongName:
    """A tensor name, path or hub id that is broken after a separator where it does not fit into a line."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max((len(piece) for piece in _PIECES.findall(self.name)), default=0)
        narrowest = min(longest + len(_INDENT), len(self.name), options.max_width)
        return Measurement(narrowest, min(len(self.name), options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = fold_name(self.name, options.max_width)
        yield Text(f"\n{_INDENT}".join(lines), overflow="fold")


def fold_name(name: str, width: int) -> list[str]:
    """Split ``name`` after ``.``, ``/``, ``:``, ``-`` or a blank into lines of at most ``width``.

    Lines after the first leave room for an indent of 2. A piece longer than a line is not broken. Joined, the
    lines are the name again.

    Args:
        name: a tensor name, path or hub id.
        width: characters of a line at most.
    """
    lines = [""]
    for piece in _PIECES.findall(name):
        room = width if len(lines) == 1 else width - len(_INDENT)
        if lines[-1] and len(lines[-1]) + len(piece) > room:
            lines.append(piece)
        else:
            lines[-1] += piece
    return lines


def merge_table(report: MergeReport) -> Table:
    """Return a table of what a merge changed, one row for all tensors whose names differ only in the layer.

    ``n`` tensors; the mean of the change's norm over the weight's; the mean share of elements whose stored
    value changed; and the worst share of the change that rounding to the stored dtype left, in fp8 (``kept``) along the
    change itself.
    """
    groups: dict[str, list[TensorReport]] = {}
    for row in report.tensors:
        groups.setdefault(LAYER.sub("*", row.name), []).append(row)
    table = plain_table(title=f"merged {report.architecture} ({report.dtype})")
    table.add_column("tensor")
    left = "survived" if report.kept is None else "kept"
    for name in ("n", "delta/W", "changed", left):
        table.add_column(name, justify="right", no_wrap=True)
    for name, rows in groups.items():
        ratios = [row.ratio for row in rows if row.ratio is not None]
        table.add_row(
            LongName(name),
            str(len(rows)),
            percent(sum(ratios) / len(ratios)) if ratios else rows[0].kind,
            percent(sum(row.changed for row in rows) / len(rows)),
            percent(min(row.survived if row.kept is None else row.kept for row in rows)),
        )
    return table


def recipes_table(rows: Iterable[Mapping[str, object]]) -> Table:
    """Return a list of recipes; columns are the rows' keys in order, the first (the name) never folded."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = plain_table(title="recipes")
    for i, column in enumerate(columns):
        table.add_column(Text(label(column)), no_wrap=i == 0, overflow="fold")
    for row in rows:
        cells = [number(row.get(column, "")) for column in columns]
        table.add_row(*(Text(cell) if " " in cell else LongName(cell) for cell in cells))
    return table


def print_examples(examples: Iterable[tuple[str, list[tuple[str, bool]]]]) -> None:
    """Print each example's title and its parts of (text, whether it is trained).

    Trained parts are green, in a file between « and ».
    """
    console = Console()
    for title, parts in examples:
        console.print(Text(title, style="bold"))
        line = Text()
        for text, trained in parts:
            marked = f"«{text}»" if trained and not console.is_terminal else text
            line.append(marked, style="green" if trained else "")
        console.print(line, soft_wrap=True)


def error(message: str) -> None:
    """Print ``error: message`` to stderr, without line breaks, so that a path in it can be copied."""
    console = Console(stderr=True)
    console.print(Text.assemble(("error:", "bold red"), " ", message), soft_wrap=True)


def generation_line(
    tokens: int,
    seconds: float,
    reason: str,
    block_efficiency: float | None,
    acceptance: float | None,
    lossy: str | None = None,
) -> str:
    """Return the line below a generated text: tokens, speed, with a drafter its acceptance, and a lossy rule's cost.

    Args:
        tokens: generated tokens.
        seconds: that they took.
        reason: why generation ended.
        block_efficiency: tokens per target step; None without a drafter.
        acceptance: accepted share of the drafted tokens; None where nothing was drafted.
        lossy: what a lossy rule changed, in words; None where the output is exact.
    """
    line = f"{plural(tokens, 'token')} in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s"
    if block_efficiency:
        share = "none drafted" if acceptance is None else f"{100 * acceptance:.0f} %"
        line += f", acceptance {share}, {block_efficiency:.2f} tokens per target step"
    line += f"; {lossy}" if lossy else ""
    return f"[{line}; ended by {reason}]"


# Adapter files


def check_lines(found: AdapterCheck) -> list[str]:
    """Return the lines that describe an adapter and the modules that it changes."""
    settings = ", ".join(f"{key}={value}" for key, value in found.settings.items())
    lines = [f"{found.adapter}: {found.format} format; {settings}"]
    lines.append(f"base: {found.base} ({found.architecture})")
    lines += _module_lines("matched", found.matched) + _module_lines("unmatched", found.unmatched)
    lines += [f"note: {note}" for note in found.notes[:_NAMES]]
    rest = len(found.notes) - _NAMES
    return [*lines, f"and {rest} notes more, in the JSON"] if rest > 0 else lines


def consumers_table(found: AdapterCheck) -> Table:
    """Return a table of programs: whether each computes what was trained, and by which source."""
    table = plain_table(title="read as meant by")
    table.add_column("program", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("why", overflow="fold")
    for name, reading in found.consumers.items():
        version = reading.source.partition(":")[0] + (f", {reading.date}" if reading.date else "")
        table.add_row(name, _LOADS[reading.loads], Text(f"{reading.reason} [{version}]"))
    return table


def conversion_lines(done: Conversion) -> list[str]:
    """Return the lines that describe what a conversion wrote."""
    lines = [f"{done.out}: for {done.engine}, rank {done.rank}, {done.modules} modules"]
    if done.added:
        lines.append(f"with factors of 0 for {len(done.added)} modules, which {done.engine} needs beside the others")
    return [*lines, f"by the rule of {done.engine}: {done.checked}", done.serve]


def extraction_table(done: Extraction) -> Table:
    """Return a table of each module's rank, relative change and error."""
    table = plain_table(title=f"extracted from {done.architecture}")
    table.add_column("module")
    for name in ("rank", "delta/W", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in done.modules:
        exact = "" if row.exact else " *"
        table.add_row(LongName(row.name), str(row.rank), percent(row.ratio), f"{row.error:.2e}{exact}")
    if not all(row.exact for row in done.modules):
        table.caption = "* measured on the factors of a randomised factorisation; the least possible may be smaller"
    return table


def extraction_lines(done: Extraction) -> list[str]:
    """Return the lines that describe what an extraction wrote besides the factors."""
    lines = [f"stored whole: {name}" for name in done.whole]
    if done.biases:
        lines.append(f"stored: {done.biases} biases")
    lines += [f"note: {note}" for note in done.notes]
    size = f"{done.bytes / (1 << 20):,.1f} MiB"
    return [*lines, f"{done.out}: {size}, error of all differences together {done.error:.2e}"]


def _module_lines(what: str, names: Iterable[str]) -> list[str]:
    """Return the names of modules, those that differ only in the layer on one line."""
    groups = Counter(LAYER.sub("*", name) for name in names)
    lines = [f"{what}: {sum(groups.values())} modules"]
    lines += [f"  {pattern} ({count})" for pattern, count in list(groups.items())[:_NAMES]]
    return lines + ([f"  and {len(groups) - _NAMES} more"] if len(groups) > _NAMES else [])
