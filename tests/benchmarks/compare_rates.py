"""Fill ``docs/benchmarks/rates.md``: the held-out loss over the learning rate, for LoRA's ranks and full finetuning.

    python -m tests.benchmarks.compare_rates [--data gsm8k alpaca] [--only ROW ...] [--seeds 0 1 2] [--write-only]

Each data set is a run of the table ``tables/rates`` with the first seed, and one of the best two rates of each rank with the
others. A run that was stopped is continued by the same command; cells that are not measured keep what the page has.
Run alone on the machine; needs GSM8K and alpaca, in ../shared/data/lm or where ``--lm`` says.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peftlab.environment import Cpu
from peftlab.pipelines.table import CellsFailed, is_complete
from peftlab.recipe.load import load_recipe, table_cells
from peftlab.recipe.schema import TableRecipe
from tests.benchmarks.bench_language import LM
from tests.benchmarks.measure_systems import ROOT, peftlab, rows_of_part, short_name, with_part

PAGE = ROOT / "docs" / "benchmarks" / "rates.md"
RECIPE = "tables/rates"
DATA = {"gsm8k": "GSM8K", "alpaca": "alpaca"}
FILES = {
    "gsm8k": ("data.path={}/gsm8k_train.jsonl",),
    "alpaca": ("data.path={}/alpaca_en_demo_1000.json", "~data.prompt", "~data.completion"),
}
FULL, TENTH = "full", " at a tenth of the rate"
COMPARED = (("r1", "r16"), ("r256", "r16"), (FULL, "r16"), ("attention", "mlp"))
"""Groups whose losses at their best rates are compared: the first one's minus the second one's."""
INK = "#808080"  # grey that is seen on light and on dark pages, as are the colours
COLOURS = {
    "r1": "#5b8ff9", "r4": "#2aa5b5", "r16": "#3fa34d", "r64": "#c79a1b", "r256": "#e0653a", "attention": "#b36ae2",
    "mlp": "#d84f8b", FULL: INK,
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """What a finished cell measured.

    Attributes:
        row: its row of the recipe, a group and a rate: ``r16-1e-3``. seed: its seed.
        loss: of the held-out rows. seconds: of training. total_seconds: of the whole run.
        memory: the largest resident memory in MiB. parameters: those trained.
        cpu: what computed. date: when. versions: of the libraries.
    """

    row: str
    seed: int
    loss: float
    seconds: float
    total_seconds: float
    memory: float
    parameters: int
    cpu: Cpu
    date: str
    versions: str


def grid(recipe: TableRecipe) -> dict[str, list[str]]:
    """Return the rates of each group of rows, as the recipe writes them: ``{"r16": ["3e-4", ...], ...}``."""
    found: dict[str, list[str]] = {}
    for row in recipe.rows:
        group, _, rate = row.partition("-")
        found.setdefault(group, []).append(rate)
    return found


def read_cells(recipe: TableRecipe) -> list[Cell]:
    """Return what the finished cells of a table have measured; one whose loss is not finite has no figure."""
    found = []
    for cell in filter(is_complete, table_cells(recipe)):
        result, origin = (json.loads((cell.directory / f"{of}.json").read_text()) for of in ("results", "provenance"))
        versions = ", ".join(f"{name} {origin['versions'][name]}" for name in ("torch", "transformers"))
        if result["score"] is not None:
            found.append(
                Cell(
                    cell.row, cell.seed, result["score"], result["train_seconds"], result["total_seconds"],
                    result["peak_rss_mb"], result["trainable_parameters"], Cpu(**result["cpu"]),
                    origin["created_at"][:10], versions,
                )
            )  # fmt: skip
    return found


def by_row(cells: Sequence[Cell]) -> dict[str, dict[int, Cell]]:
    """Return the cells by row and seed."""
    found: dict[str, dict[int, Cell]] = {}
    for cell in cells:
        found.setdefault(cell.row, {})[cell.seed] = cell
    return found


def best_rows(cells: Sequence[Cell], group: str, rates: Sequence[str], seed: int) -> list[str]:
    """Return a group's rows that were measured with a seed, the one of the least loss first.

    Args:
        cells: of the table. group: the rows' group. rates: its rates. seed: the seed.
    """
    rows = {f"{group}-{rate}" for rate in rates}
    return [cell.row for cell in sorted(cells, key=lambda cell: cell.loss) if cell.row in rows and cell.seed == seed]


def best_row(cells: Sequence[Cell], group: str, rates: Sequence[str]) -> dict[int, Cell] | None:
    """Return the cells of a group's best rate by seed: the least mean loss among the rates with the most seeds.

    Args:
        cells: of the table. group: the rows' group. rates: its rates.
    """
    rows = by_row(cells)
    measured = [rows[row] for row in (f"{group}-{rate}" for rate in rates) if row in rows]
    return min(measured, key=lambda seeds: (-len(seeds), _mean(seeds)), default=None)


def _mean(seeds: Mapping[int, Cell]) -> float:
    return statistics.mean(cell.loss for cell in seeds.values())


def loss_text(seeds: Mapping[int, Cell]) -> str:
    """Return the mean loss over the seeds, and their sample standard deviation where there are several."""
    spread = f" ± {statistics.stdev(cell.loss for cell in seeds.values()):.3f}" if len(seeds) > 1 else ""
    return f"{_mean(seeds):.3f}{spread}"


def paired_difference(one: Mapping[int, Cell], other: Mapping[int, Cell]) -> str:
    """Return the mean difference of two rows' losses over the seeds that both have, with its 95 % interval.

    Args:
        one: the cells of a row by seed. other: those of the row that is subtracted.
    """
    from scipy import stats

    seeds = sorted(one.keys() & other.keys())
    differences = [one[seed].loss - other[seed].loss for seed in seeds]
    mean = statistics.mean(differences) if differences else float("nan")
    if len(seeds) < 2:
        return f"{mean:+.3f} (one seed)" if seeds else "-"
    half = stats.t.ppf(0.975, len(seeds) - 1) * stats.sem(differences)
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def filled(page: str, name: str, rates: Mapping[str, Sequence[str]], cells: Sequence[Cell]) -> str:
    """Return the page with what the cells of a data set measured in place of what it had.

    Args:
        page: the page's text. name: of the data set. rates: those of each group. cells: the finished ones.
    """
    rows = by_row(cells)
    best = {group: found for group, of in rates.items() if (found := best_row(cells, group, of))}
    page = with_part(page, f"{name} loss", list(_loss_table(page, name, rates, rows)))
    page = with_part(page, f"{name} best", list(_best_table(page, name, rates, best)))
    known = {row[0]: row[1] for row in rows_of_part(page, f"{name} differences")}
    lines = ["| held-out loss at the best rate | difference |", "| --- | --- |"]
    for one, other in COMPARED:
        label = f"`{one}` minus `{other}`"
        measured = paired_difference(best[one], best[other]) if one in best and other in best else known.get(label, "-")
        lines.append(f"| {label} | {measured} |")
    page = with_part(page, f"{name} differences", lines)
    where = {(row[0], row[1]): row[2:] for row in rows_of_part(page, "where")} | _where(DATA[name], cells)
    lines = ["| data | CPU | measured | cells | core hours |", "| --- | --- | --- | --- | --- |"]
    return with_part(page, "where", [*lines, *(_line(*key, *text) for key, text in where.items())])


def _loss_table(
    page: str, name: str, rates: Mapping[str, Sequence[str]], rows: Mapping[str, Mapping[int, Cell]]
) -> Iterator[str]:
    known = {_group(row[0]): row[1:] for row in rows_of_part(page, f"{name} loss")}
    yield _line("rate", *rates["r16"])
    yield _line(*["---"] * (1 + len(rates["r16"])))
    for group, of in rates.items():
        kept = known.get(group, ["-"] * len(of))
        measured = [rows.get(f"{group}-{rate}") for rate in of]
        texts = [loss_text(seeds) if seeds else old for seeds, old in zip(measured, kept, strict=True)]
        yield _line(f"`{group}`{TENTH if group == FULL else ''}", *texts)


def _best_table(
    page: str, name: str, rates: Mapping[str, Sequence[str]], best: Mapping[str, Mapping[int, Cell]]
) -> Iterator[str]:
    known = {_group(row[0]): row[1:] for row in rows_of_part(page, f"{name} best")}
    head = ("rows", "best rate", "of full's", "held-out loss", "trained parameters", "training s", "memory MiB")
    yield _line(*head)
    yield _line(*["---"] * len(head))
    full = _rate(best[FULL]) if FULL in best else known.get(FULL, "-")[0].partition(",")[0]
    for group, of in rates.items():
        texts = known.get(group, ["-"] * (len(head) - 1))
        if group in best:
            cells = list(best[group].values())
            rate = _rate(best[group])
            texts = [
                rate + (", the end of the grid" if rate in (of[0], of[-1]) else ""),
                f"{float(rate) / float(full):.3g} ×" if full != "-" else "-",
                loss_text(best[group]),
                f"{cells[0].parameters / 1e6:.2f} M",
                f"{statistics.median(cell.seconds for cell in cells):.0f}",
                f"{max(cell.memory for cell in cells):,.0f}",
            ]
        yield _line(f"`{group}`", *texts)


def _rate(seeds: Mapping[int, Cell]) -> str:
    return next(iter(seeds.values())).row.partition("-")[2]


def _where(data: str, cells: Sequence[Cell]) -> dict[tuple[str, str], list[str]]:
    """Return, for each CPU that measured cells of a data set, when and by what, and what they cost."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((data, short_name(cell.cpu)), []).append(cell)
    return {
        key: [
            f"{max(cell.date for cell in of)}, {of[-1].cpu.threads} thread{'s' * (of[-1].cpu.threads > 1)} a cell, "
            f"{', '.join(of[-1].cpu.features)}, {of[-1].versions}",
            str(len(of)),
            f"{sum(cell.total_seconds * cell.cpu.threads for cell in of) / 3600:.1f}",
        ]
        for key, of in found.items()
    }


def _line(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"


def _group(label: str) -> str:
    return label.split("`")[1]


def draw(page: str, rates: Mapping[str, Sequence[str]], path: Path) -> None:
    """Write the figure: the losses that the page's tables have over the rate, a curve for each group of rows.

    Args:
        page: the page's text, with at least one loss. rates: those of each group. path: the SVG file.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none", "svg.hashsalt": "rates", "font.family": "sans-serif", "font.size": 9, "axes.spines.top": False,
        "axes.spines.right": False, **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color"), INK),
    }  # fmt: skip
    with matplotlib.rc_context(style):
        drawing = Figure(figsize=(7.6, 3.1), layout="constrained")
        tables = {name: rows_of_part(page, f"{name} loss") for name in DATA}
        drawn = [name for name, rows in tables.items() if any(text != "-" for row in rows for text in row[1:])]
        panels = drawing.subplots(1, len(drawn), squeeze=False)[0]
        for axes, name in zip(panels, drawn, strict=True):
            axes.set(title=DATA[name], xscale="log", xlabel="learning rate", ylabel="held-out loss")
            axes.xaxis.set_major_formatter(lambda rate, _: f"{rate:.0e}".replace("e-0", "e-"))
            axes.minorticks_off()
            axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
            lowest, highest = [], []
            for row in tables[name]:
                group = _group(row[0])
                points = [
                    (float(rate), *_loss(text)) for rate, text in zip(rates[group], row[1:], strict=True) if text != "-"
                ]
                if not points:
                    continue
                x, y, spread = zip(*points, strict=True)
                dashes = "--" if group == FULL else ":" if group in ("attention", "mlp") else "-"
                axes.errorbar(
                    x,
                    y,
                    spread,
                    label=group,
                    color=COLOURS[group],
                    linestyle=dashes,
                    marker="o",
                    markersize=3,
                    linewidth=1.4,
                )
                lowest += sorted(y)[:1]
                highest += sorted(y)[:3][-1:]
            room = 1.5 * (max(highest) - min(lowest)) or 0.1  # a rate that is far too high would flatten all the rest
            axes.set_ylim(min(lowest) - 0.1 * room, min(lowest) + room)
        curves = {
            label: curve for axes in panels for curve, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        drawing.legend(curves.values(), curves.keys(), loc="outside right center", frameon=False)
        text = io.StringIO()
        drawing.savefig(
            text, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    path.write_text(re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", text.getvalue()))


def _loss(text: str) -> tuple[float, float]:
    """Return the mean and the deviation of a text of ``loss_text``."""
    mean, _, spread = text.partition(" ± ")
    return float(mean), float(spread or 0)


def main(arguments: list[str] | None = None) -> None:
    """Run the cells that are missing, and write page and figure after each data set and choice of seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "rates", help="where the cells are kept")
    parser.add_argument(
        "--lm", type=Path, default=LM, help="directory of gsm8k_train.jsonl and alpaca_en_demo_1000.json"
    )
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--only", nargs="+", help="rows, such as r16-1e-3, or groups of them, such as r16")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="the first for all rows, others for the best two rates"
    )
    parser.add_argument("--cpus", type=int, default=1, help="threads of each cell; as many cells at a time as fit")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to fill; its figure is beside it")
    parser.add_argument("--write-only", action="store_true", help="measure nothing, and write what has been measured")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of the recipe")
    options = parser.parse_args(arguments)
    first, *others = options.seeds
    for name in options.data:
        given = [text.format(options.lm.resolve()) for text in FILES[name]]
        given += [*options.set, f"output_dir={options.dir / name}"]
        recipe = load_recipe(RECIPE, [*given, f"seeds={options.seeds}"])
        assert isinstance(recipe, TableRecipe)
        rates = grid(recipe)
        every = [f"{group}-{rate}" for group, of in rates.items() for rate in of]
        wanted = [row for row in every if not options.only or {row, row.partition("-")[0]} & {*options.only}]
        if not wanted:
            raise SystemExit(f"--only: none of {', '.join(rates)} or of their rows")
        for seeds in ([first], others):
            if not seeds:
                continue
            if seeds is others:
                cells = read_cells(recipe)
                best = {row for group, of in rates.items() for row in best_rows(cells, group, of, first)[:2]}
                wanted = [row for row in wanted if row in best]
            if not options.write_only:
                run_rows(given, [row for row in every if row not in wanted], seeds, options.cpus)
            page = filled(options.page.read_text(), name, rates, read_cells(recipe))
            options.page.write_text(page)
            draw(page, rates, options.page.with_suffix(".svg"))


def run_rows(overrides: Sequence[str], left_out: Sequence[str], seeds: Sequence[int], cpus: int) -> None:
    """Run the table without some of its rows; a cell that fails, as one whose loss is not finite, has no figure.

    Args:
        overrides: of the recipe. left_out: the rows. seeds: those to run. cpus: threads of a cell.
    """
    rows = [f"~rows.{row}" for row in left_out]
    try:
        peftlab("run", RECIPE, *overrides, *rows, f"seeds={seeds}", "--cpus", str(cpus))
    except subprocess.CalledProcessError as error:
        if error.returncode != CellsFailed.status:
            raise SystemExit(error.returncode) from None


if __name__ == "__main__":
    main()
