"""A run's report as one file: the HTML page, all of its JSON, or peft's format."""

from __future__ import annotations

from pathlib import Path

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json, read_object, read_text, write_json, write_text
from peftlab.reporting.html import run_page

FORMS = ("html", "json", "peft")


def report_run(run_dir: str | Path, out: str | Path, form: str = "html") -> Path:
    """Write the report of a run to ``out`` and return its path.

    Args:
        run_dir: a finished run.
        form: ``html`` is its page, ``json`` its recipe, provenance and results, ``peft`` the JSON of peft's
            method_comparison for a run on GSM8K.

    Raises:
        PeftlabError: no such form, no finished run, or a run that the form is not for; nothing is written then.
    """
    directory, out = Path(run_dir), Path(out)
    if form not in FORMS:
        raise PeftlabError(f"--as {form}: one of {', '.join(FORMS)}{did_you_mean(form, FORMS)}")
    if not (directory / "results.json").is_file():
        raise PeftlabError(f"{directory}: no finished run here (there is no results.json)")
    if form == "html":
        write_text(out, run_page(directory))
    elif form == "json":
        write_json(out, _everything(directory))
    else:
        from peftlab.reporting.peft_results import peft_results

        write_json(out, peft_results(directory))
    return out


def _everything(run_dir: Path) -> dict[str, Json]:
    return {
        "recipe": read_text(run_dir / "recipe.yaml"),
        "provenance": read_object(run_dir / "provenance.json"),
        "results": read_object(run_dir / "results.json"),
    }
