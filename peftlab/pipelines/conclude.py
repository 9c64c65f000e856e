"""The end of every run: results on disk, the report page, a table on the console."""

from __future__ import annotations

from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import Json, write_json
from peftlab.reporting.console import print_results
from peftlab.reporting.pages import write_report


def write_results(run_dir: Path, results: dict[str, Json]) -> None:
    """Write ``results.json`` and ``report.html``, or print why there is no report.

    Called before measurements too, so that a failing measurement does not lose the results.
    """
    write_json(run_dir / "results.json", results)
    try:
        write_report(run_dir)
    except PeftlabError as error:
        print(f"no report.html: {error}")


def conclude(run_dir: Path, results: dict[str, Json]) -> None:
    """Write the results, as ``write_results`` does, and print them."""
    write_results(run_dir, results)
    print_results(results, run_dir)
