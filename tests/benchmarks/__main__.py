"""``python -m tests.benchmarks [name ...] [--option ...]``: run the benchmarks (all, or those named), one after the other.

What each measures beside a peer becomes the rows of ``docs/benchmarks/NAME.json``; ``make docs`` makes the page of them.
"""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import torch

from tests.benchmarks.figures import record

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    """Run them, each under its name, after a line that says on what."""
    every = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    chosen = [word for word in sys.argv[1:] if word not in options] or every
    sys.argv[1:] = options  # a benchmark's own
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "peft"))
    print(f"{datetime.date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, {versions}")
    for name in chosen:
        if name not in every:
            raise SystemExit(f"no benchmark {name!r}; there are {', '.join(every)}")
        print(f"\n## {name}\n", flush=True)
        benchmark = importlib.import_module(f"tests.benchmarks.bench_{name}")
        if figures := benchmark.main():
            print(f"\nwrote {record(name, benchmark.TITLE, benchmark.CONDITIONS, figures)}")


if __name__ == "__main__":
    main()
