"""Fill the measured columns of ``docs/reference/decoding.md``: every system on SmolLM2-135M, by its own command.

    python -m tests.benchmarks.measure_systems [--only [TEXT ...]] [--dir runs/systems]

Run alone on the machine. The drafts of ``systems.DRAFTS`` are trained into ``--dir`` where they are not there yet (minutes
each). Each command is a process of its own; a row that is not measured this time keeps its figures. ``--only`` alone measures
nothing and writes the rows of ``systems.py`` into the page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from peftlab.environment import Cpu, describe_cpu
from peftlab.recipe.load import load_recipe
from peftlab.reporting.drafts import published_speeds
from peftlab.reporting.facts import threads
from peftlab.tasks.prompts import read_prompts
from tests.benchmarks.systems import DRAFTS, SYSTEMS, System
from tests.packages import SMOLLM2

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "decoding.md"
PROMPTS, NEW_TOKENS, REPEATS = 6, 48, 3
NOT_MEASURED = ("-", "-", "-")
POOL = "pool"

Figures = Mapping[str, tuple[str, str, str]]
"""Name of a system -> tau, speed and the CPU's short name, as text."""
Machines = Mapping[str, str]
"""Short name of a CPU -> when and how its figures were measured, as text."""
Drafts = Mapping[str, tuple[str, ...]]
"""Name of a draft -> parameters, minutes and acceptance, as text."""


def cells(page: str) -> dict[str, tuple[str, str, str]]:
    """Return the figures that a page contains."""
    return {row[0]: (row[3], row[4], row[5]) for row in rows_of_part(page, "systems")}


def trained_drafts(page: str) -> dict[str, tuple[str, ...]]:
    """Return parameters, minutes and acceptance of the drafts that a page contains."""
    return {row[0].strip("`"): tuple(row[2:5]) for row in rows_of_part(page, "drafts")}


def trained(directory: Path) -> dict[str, tuple[str, ...]]:
    """Return trained parameters, minutes of training and held-out acceptance of the drafts below ``directory``."""
    found = {}
    for name in DRAFTS:
        file = directory / name / "results.json"
        if file.exists():
            result = json.loads(file.read_text())
            minutes = f"{result['train_seconds'] / 60:.1f}"
            found[name] = (f"{result['trainable_parameters'] / 1e6:.1f} M", minutes, _acceptance(result["metrics"]))
    return found


def _acceptance(metrics: Mapping[str, Mapping[str, float]]) -> str:
    """Return the acceptance on the first held-out split, and that of each drafted token where it is measured."""
    scores = next(iter(metrics.values()))
    parts = [f"{value:.2f}" for name, value in scores.items() if name.startswith("acceptance_")]
    return f"{scores['acceptance']:.2f}" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")


def short_name(cpu: Cpu) -> str:
    """Return a CPU's name for a column of the table: without trade marks, with AMX where it has it."""
    name = re.sub(r"\((R|TM)\)| Processor", "", cpu.name, flags=re.IGNORECASE)
    return name + (", AMX" if "amx_bf16" in cpu.features else "")


def filled(
    page: str, measured: Figures, where: Machines = MappingProxyType({}), drafts: Drafts = MappingProxyType({})
) -> str:
    """Return the page with a row for every system, and the figures just measured in place of those it had.

    Args:
        where: the machines to add. drafts: figures of ``trained``.
    """
    known = cells(page) | dict(measured)
    lines = ["| system | command | test | τ | speed against plain | CPU |", "| --- | --- | --- | --- | --- | --- |"]
    for system in SYSTEMS:
        test = f"`tests/{system.test}`".replace("::", "` `")
        found = " | ".join(known.get(system.name, NOT_MEASURED))
        lines.append(f"| {system.name} | `{_shown(system.command)}` | {test} | {found} |")
    page = with_part(page, "systems", lines)
    trained = trained_drafts(page) | dict(drafts)
    lines = ["| name | trained by | parameters | minutes | acceptance |", "| --- | --- | --- | --- | --- |"]
    for name, command in DRAFTS.items():
        lines.append(" | ".join([f"| `{name}`", f"`peftlab {command}`", *trained.get(name, ("-",) * 3)]) + " |")
    page = with_part(page, "drafts", lines)
    published = [
        f"| {of.system} | {of.benchmark} | {of.tau:.2f} | `{of.like}` | {of.source} |" for of in published_speeds()
    ]
    head = ["| system | prompts | τ there | our drafter of its kind | source |", "| --- | --- | --- | --- | --- |"]
    page = with_part(page, "published", [*head, *published])
    machines = {row[0]: row[1] for row in rows_of_part(page, "where")} | dict(where)
    lines = ["| CPU | measured |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in machines.items())]
    return with_part(page, "where", lines)


def _shown(command: str) -> str:
    return command.replace("{", "").replace("}", "")


def rows_of_part(page: str, name: str) -> list[list[str]]:
    """Return the cells of a part's table without its head.

    Args:
        page: the page's text. name: of the part, which begins with ``<!-- name -->`` and ends with ``<!-- end -->``.
    """
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in _part(page, name).splitlines()[2:]]


def _part(page: str, name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    if found is None:
        raise SystemExit(f"the page has no part <!-- {name} -->")
    return found[1]


def with_part(page: str, name: str, lines: Sequence[str]) -> str:
    """Return the page with other lines in one of its parts.

    Args:
        page: the page's text. name: of the part, as in ``rows_of_part``. lines: what the part is to contain.
    """
    old = f"<!-- {name} -->\n{_part(page, name)}\n<!-- end -->"
    return page.replace(old, "\n".join([f"<!-- {name} -->", *lines, "<!-- end -->"]))


def words(system: System, directory: Path) -> list[str]:
    """Return a measured system's command with what all of them share."""
    drafts = {name: directory / name for name in DRAFTS}
    shared = ["--prompts", directory / "questions.jsonl", "--max-new-tokens", NEW_TOKENS]
    shared += [] if "--target" in system.command else ["--target", SMOLLM2]
    beside = ["--drafter", "lookup"] if "--draft " in system.command else []  # and not one of each
    return [*shlex.split(system.command.format(**drafts)), *map(str, [*shared, "--repeats", REPEATS]), *beside]


def figures(system: System, result: Mapping[str, object]) -> tuple[str, str]:
    """Return tau and speed of a system, from what its command wrote with ``--json``."""
    found = json.loads(json.dumps(result))
    if system.drafter == POOL:
        first = found["drafter"]
        return f"{found['tau']:.2f}", f"{found['pool']['pooled'][first] / found['pool']['static']['plain']:.2f}"
    of = found["drafters"][system.drafter or found["drafter"]]
    interval = of["speedup_interval"]
    return f"{of['tau']:.2f}", f"{of['speedup']:.2f}" + (
        f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    )


def write_questions(path: Path) -> None:
    """Write questions as ``draft/quickstart`` asks them, about towns that come after its own."""
    data = load_recipe("draft/quickstart").data
    every = read_prompts(data.prompts, field=data.field, most=data.max_prompts + PROMPTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"question": prompt.text}) + "\n" for prompt in every[data.max_prompts :]))


def peftlab(*arguments: str) -> None:
    """Run the command line in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "peftlab", *arguments], check=True, env=environment)


def main() -> None:
    """Measure and write the page after every row, so that a run that is stopped keeps its figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", help="rows whose name contains one of these; none: the table alone")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "systems")
    options = parser.parse_args()
    PAGE.write_text(filled(PAGE.read_text(), {}, drafts=trained(options.dir)))
    wanted = [""] if options.only is None else options.only
    chosen = [of for of in SYSTEMS if of.measured and any(text in of.name for text in wanted)]
    if chosen:
        write_questions(options.dir / "questions.jsonl")
    for name, command in DRAFTS.items():
        needed = any(f"{{{name}}}" in of.command for of in chosen)
        if needed and not (options.dir / name / "results.json").exists():
            peftlab(*shlex.split(command), f"output_dir={options.dir / name}")
            PAGE.write_text(filled(PAGE.read_text(), {}, drafts=trained(options.dir)))
    out = options.dir / "result.json"
    for system in chosen:
        print(f"\n### {system.name}\n", flush=True)
        peftlab(*words(system, options.dir), "--json", str(out))
        result = json.loads(out.read_text())
        cpu = describe_cpu()
        name = short_name(cpu)
        plain = f"plain decoding {result['baseline_tokens_per_second']:.1f} tokens/s"
        where = {name: f"{datetime.date.today()}, {threads(cpu.threads)}, {plain}"}
        PAGE.write_text(filled(PAGE.read_text(), {system.name: (*figures(system, result), name)}, where))


if __name__ == "__main__":
    main()
