"""Reports of finished runs as one file: the HTML page, all as JSON, or peft's format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json, read_object, read_text, write_json, write_text
from peftlab.remote.mirror import local_copy
from peftlab.reporting.html import run_page
from peftlab.reporting.runs.compared_runs import Comparison, compare_runs
from peftlab.reporting.runs.comparison_views import comparison_page

FORMS = ("html", "json", "peft")


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        out: the file. runs: their directories. comparison: of several runs; None of one.
    """

    out: Path
    runs: list[Path]
    comparison: Comparison | None


def report(runs: str | Path | Sequence[str | Path], out: str | Path, form: str = "html") -> Report:
    """Write the report of a run, or of several beside each other, to ``out``.

    Args:
        runs: finished runs, or their URLs.
        form: ``html`` is a page: the run's own, or the comparison of several; ``json`` a run's recipe, provenance and
            results, or the comparison; ``peft`` the JSON of peft's method_comparison for one run on GSM8K.

    Raises:
        PeftlabError: no such form, no finished run, or a run that the form is not for; nothing is written then.
    """
    places, out = [Path(local_copy(run)) for run in ([runs] if isinstance(runs, str | Path) else runs)], Path(out)
    if form not in FORMS:
        raise PeftlabError(f"--as {form}: one of {', '.join(FORMS)}{did_you_mean(form, FORMS)}")
    for place in places:
        if not (place / "results.json").is_file():
            raise PeftlabError(f"{place}: no finished run here (there is no results.json)")
    if len(places) == 1:
        _write_run(places[0], out, form)
        return Report(out, places, None)
    if form == "peft":
        raise PeftlabError("--as peft: the format of one run; name one, or take html or json")
    found = compare_runs(places)
    if form == "html":
        write_text(out, comparison_page(found))
    else:
        write_json(out, found)
    return Report(out, places, found)


def _write_run(run: Path, out: Path, form: str) -> None:
    if form == "html":
        write_text(out, run_page(run))
    elif form == "json":
        write_json(out, _everything(run))
    else:
        from peftlab.reporting.peft_results import peft_results

        write_json(out, peft_results(run))


def _everything(run_dir: Path) -> dict[str, Json]:
    return {
        "recipe": read_text(run_dir / "recipe.yaml"),
        "provenance": read_object(run_dir / "provenance.json"),
        "results": read_object(run_dir / "results.json"),
    }
