"""``python -m tests.peft_cases FILE``: judge all cases and print how many of each set end in which way.

FILE is peft's tests/test_custom_models.py, fetched by whoever runs this; without it only our own cases are judged.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from tests.peft_cases.architectures import architectures
from tests.peft_cases.cases import Case
from tests.peft_cases.embeddings import embeddings
from tests.peft_cases.experts import experts
from tests.peft_cases.judge import Verdict, judge
from tests.peft_cases.towers import towers
from tests.peft_cases.translate import translated
from tests.peft_cases.variants import pickles, starts, variants

ENDS = ("pass", "noted", "refused", "wrong", "other method", "peft fails")


def every(file: Path | None, sets: Sequence[str] = ()) -> Iterator[Case]:
    """Yield all cases, those of peft's ``file`` first; of the architectures, which take long to make, if asked for."""
    yield from translated(file) if file else ()
    yield from variants()
    yield from pickles()
    yield from starts()
    yield from experts()
    yield from embeddings()
    yield from towers()
    if not sets or "architectures" in sets:
        yield from architectures()


def table(verdicts: Iterable[Verdict]) -> str:
    """Return how many cases of each set end in which way; the share is of those that peft itself passes."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        counts[verdict.case.group][verdict.end] += 1
    lines = [f"| set | cases | {' | '.join(ENDS)} | passed |", "| --- | --- |" + " --- |" * (len(ENDS) + 1)]
    for group, ends in counts.items():
        ours = sum(ends[end] for end in ENDS[:4])
        share = f"{ends['pass'] / ours:.1%}" if ours else ""
        cells = " | ".join(str(ends[end]) for end in ENDS)
        lines.append(f"| {group} | {sum(ends.values())} | {cells} | {share} |")
    return "\n".join(lines)


def main() -> int:
    """Judge the cases that the arguments name; 1 if any is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.peft_cases", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="peft's tests/test_custom_models.py")
    parser.add_argument("--set", action="append", help="only cases of this set")
    parser.add_argument("--case", action="append", help="only cases whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    verdicts = []
    started = time.perf_counter()
    for case in every(options.file, options.set or ()):
        if options.set and case.group not in options.set:
            continue
        if options.case and not any(part in case.name for part in options.case):
            continue
        verdict = judge(case)
        verdicts.append(verdict)
        if verdict.end not in ("pass", "noted"):
            print(f"{verdict.end}: {case.group}: {case.name}: {verdict.theirs or verdict.detail}", flush=True)
    print(table(verdicts))
    print(f"{time.perf_counter() - started:.0f} s")
    return 1 if any(verdict.end == "wrong" for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
