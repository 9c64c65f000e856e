"""What a benchmark measured beside a peer, as rows of the JSON files that ``docs/benchmarks/figures.md`` is made of."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from peftlab.environment import describe_cpu
from tests.benchmarks.measure_systems import short_name

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
PACKAGES = ("torch", "transformers", "peft")
_SET = ("PEFTLAB_", "OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")  # what makes another measurement


@dataclass(frozen=True)
class Figure:
    """One row.

    Attributes:
        work: what was done. peer: what else did it, in the same run.
        ratio: how many times as fast peftlab is (``of="speed"``), or its share of the peer's time or memory.
        interval: the ends of the ratio's 95 % interval, or of its range; None where it has none.
    """

    work: str
    peer: str
    ratio: float
    of: Literal["speed", "time", "memory"] = "speed"
    interval: tuple[float, float] | None = None


def ranged(work: str, peer: str, ratios: Sequence[float], of: Literal["speed", "time", "memory"] = "speed") -> Figure:
    """Return the row of a work that was measured in several cases: the median, and the least and largest ratio."""
    return Figure(work, peer, statistics.median(ratios), of, (round(min(ratios), 3), round(max(ratios), 3)))


def record(name: str, title: str, conditions: str, figures: Sequence[Figure]) -> Path:
    """Write a benchmark's rows into its file, in place of those of the same command and CPU, and return the file.

    Args:
        name: of the benchmark. title: of its section on the page. conditions: of all its rows, in one line.
        figures: what it measured, the row for the top of the page first.
    """
    path = FOLDER / f"{name}.json"
    given = {key: value for key, value in os.environ.items() if key.startswith(_SET) and key != "PEFTLAB_ENGINES"}
    measured = {
        "command": " ".join(
            [
                *(f"{k}={shlex.quote(v)}" for k, v in sorted(given.items())),
                *("python -m tests.benchmarks", name, *sys.argv[1:]),
            ]
        ),
        "date": str(datetime.date.today()),
        "cpu": short_name(describe_cpu()),
        "versions": ", ".join(f"{package} {metadata.version(package)}" for package in PACKAGES),
    }
    stored: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in stored if (row["command"], row["cpu"]) != (measured["command"], measured["cpu"])]
    rows = [{**asdict(figure), "ratio": round(figure.ratio, 3), **measured} for figure in figures]
    text = json.dumps({"title": title, "conditions": conditions, "rows": [*rows, *kept]}, indent=1, ensure_ascii=False)
    path.write_text(f"{text}\n")
    return path
