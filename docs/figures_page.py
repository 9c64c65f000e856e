"""The page of figures: what peftlab does beside its peers, from the rows that ``make bench`` wrote.

``python docs/figures_page.py`` writes ``docs/benchmarks/figures.md``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peftlab.files import write_text

FOLDER = Path(__file__).with_name("benchmarks")
PAGE = FOLDER / "figures.md"
ORDER = (
    "merge", "training", "language", "lora", "quantised", "mixed", "extract", "decoding", "families", "storages",
    "endpoint", "startup",
)  # fmt: skip
OF = {"speed": "× as fast", "time": "of the time", "memory": "of the memory"}
TEXT = """\
# Figures
<!-- Written by `python docs/figures_page.py` from the JSON files beside it, which `make bench` writes. -->

Each ratio compares peftlab with a peer in one run, by medians of measurements taken in turn, on otherwise idle
machines: two virtual cores, two threads where nothing else is said{versions}. In
brackets are 95 % intervals, or the range over what a row lists. `make bench` measures all of this again; what else was
found out is in [Findings](findings.md). On a GPU nothing has been measured yet.

| work | peer | peftlab | command |
| --- | --- | --- | --- |
{top}
"""


def page() -> str:
    """Return the page."""
    files = sorted(FOLDER.glob("*.json"), key=lambda f: (ORDER.index(f.stem) if f.stem in ORDER else 99, f.stem))
    parts = [json.loads(file.read_text()) for file in files]
    versions = {row["versions"] for part in parts for row in part["rows"]}
    shared = f"; {versions.pop()}" if len(versions) == 1 else ""
    top = [_top_row(part["rows"]) for part in parts]
    sections = [_section(part, versioned=not shared) for part in parts]
    return TEXT.format(versions=shared, top="\n".join(top)) + "".join(sections)


def _ratios(rows: list[dict[str, Any]], cpu: str, of: str = "") -> str:
    """Return the ratios that ``rows`` have on a CPU: all, or those of speed, time or memory."""
    found = [row for row in rows if row["cpu"] == cpu and of in row["of"]]
    ends = ["({:.2f} to {:.2f})".format(*row["interval"]) if row["interval"] else "" for row in found]
    texts = [f"{row['ratio']:.2f} {OF[row['of']]} {end}".strip() for row, end in zip(found, ends, strict=True)]
    return ", ".join(texts)


def _top_row(rows: list[dict[str, Any]]) -> str:
    """Return the first row of a benchmark, with its ratio on each CPU."""
    first = rows[0]
    same = [row for row in rows if _key(row) == _key(first)]
    cpus = sorted({row["cpu"] for row in same if row["of"] == first["of"]})
    ratios = "; ".join(f"{cpu}: {_ratios(same, cpu, first['of'])}" for cpu in cpus)
    return f"| {first['work']} | {first['peer']} | {ratios} | `{first['command']}` |"


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["work"], row["peer"]


def _section(part: dict[str, Any], *, versioned: bool) -> str:
    """Return a benchmark's section: how it was measured in one line, and a table with a column for each CPU."""
    rows = part["rows"]
    measured: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        where = f"{row['cpu']} {row['date']}" + (f" ({row['versions']})" if versioned else "")
        measured.setdefault((row["cpu"], where), []).append(row["command"])
    commands = list(dict.fromkeys(row["command"] for row in rows))
    apart = any(len(set(found)) > 1 for found in measured.values())  # then each row says its own
    if apart or len(commands) == 1:
        how = "; ".join(where for _, where in measured) + ("" if apart else f": `{commands[0]}`")
    else:
        how = "; ".join(f"{where}: `{found[0]}`" for (_, where), found in measured.items())
    cpus = sorted({row["cpu"] for row in rows})
    lines = [
        f"| work | peer | {' | '.join(cpus)} |" + " command |" * apart,
        "| --- | --- |" + " --- |" * (len(cpus) + apart),
    ]
    keys = [(*_key(row), row["command"] if apart else "") for row in rows]
    for key in dict.fromkeys(keys):
        found = [row for row, of_row in zip(rows, keys, strict=True) if of_row == key]
        cells = [_ratios(found, cpu) for cpu in cpus]
        cells += [f"`{key[2]}`"] * apart
        lines.append(f"| {key[0]} | {key[1]} | {' | '.join(cells)} |")
    return f"\n## {part['title']}\n{part['conditions']} {how}.\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    write_text(PAGE, page())


if __name__ == "__main__":
    main()
