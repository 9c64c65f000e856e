"""The command line: each verb parses, calls one function and prints. Heavy imports are inside the verbs."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from peftlab.cli.adapter import adapter_app
from peftlab.cli.draft import draft_app, generate
from peftlab.cli.merge import merge, unmerge
from peftlab.cli.verbs import Cpus, Device, On, Overrides, Overwrite, show, verb
from peftlab.errors import PeftlabError, os_error_text, quiet_libraries
from peftlab.version import __version__

app = typer.Typer(
    name="peftlab",
    help="Parameter-efficient finetuning: recipes in, small adapters and plain merged checkpoints out.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
recipes_app = typer.Typer(help="List the shipped recipes, or copy one.", invoke_without_command=True)
app.add_typer(recipes_app, name="recipes")
app.add_typer(draft_app, name="draft")
app.add_typer(adapter_app, name="adapter")

RecipeArgument = Annotated[str, typer.Argument(help="A recipe file, or the short name of a shipped recipe.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"peftlab {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Parameter-efficient finetuning: recipes in, small adapters and plain merged checkpoints out."""


@app.command()
@verb()
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    device: Device = "auto",
    shard: Annotated[
        str | None,
        typer.Option("--shard", help="Of a table or sweep only every N-th cell, from number I on.", metavar="I/N"),
    ] = None,
    on: On = "local",
    cpus: Cpus = None,
) -> object:
    """Run a recipe: inject, train, score, save, merge, report."""
    from peftlab import pipelines

    return pipelines.run(recipe, overrides or [], overwrite=overwrite, device=device, shard=shard, on=on, cpus=cpus)


@app.command()
@verb()
def resume(
    directory: Annotated[str, typer.Argument(help="A run directory, or its URL.")],
    device: Device = "auto",
    on: On = "local",
    cpus: Cpus = None,
) -> object:
    """Continue a run that was stopped, from its newest checkpoint."""
    from peftlab import pipelines

    return pipelines.resume(directory, device=device, on=on, cpus=cpus)


@app.command()
@verb()
def validate(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    examples: Annotated[
        int, typer.Option("--show", help="Print N examples as the model reads them, trained parts marked.", metavar="N")
    ] = 0,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also read all labels, find the method's targets, and compare the disk's space."),
    ] = False,
) -> object:
    """Check a recipe and that its model and data are there, and print it with all its defaults."""
    from peftlab import pipelines
    from peftlab.recipe.load import dump_recipe

    checked = pipelines.validate(recipe, overrides or [])
    found: dict[str, object] = dict(checked.as_json())
    print(dump_recipe(checked), end="")
    if deep:
        from peftlab.pipelines.preview import deep_check, deep_lines

        found["deep"] = looked = deep_check(checked)
        for line in deep_lines(looked):
            print(f"# {line}")
    if examples:
        from peftlab.pipelines.preview import show_examples
        from peftlab.reporting.console import print_examples

        found["examples"] = shown = show_examples(checked, examples)
        print_examples([(each.title, [(part.text, part.trained) for part in each.parts]) for each in shown])
    return found


@app.command()
@verb()
def schema() -> object:
    """Print the JSON Schema of recipes, for editors."""
    import json

    from peftlab.recipe.document import json_schema

    found = json_schema()
    print(json.dumps(found, indent=2))
    return found


@recipes_app.callback()
@verb()
def recipes(context: typer.Context) -> object:
    """List the shipped recipes, or copy one."""
    if context.invoked_subcommand is not None:
        return None
    from peftlab.recipe.library import shipped
    from peftlab.reporting.console import recipes_table

    found = [{"name": name, "summary": summary} for name, summary in shipped()]
    show(recipes_table(found))
    return {"recipes": found}


@recipes_app.command("copy")
@verb()
def recipes_copy(
    name: Annotated[str, typer.Argument(help="Short name of a shipped recipe, or launch/FILE.")],
    to: Annotated[Path | None, typer.Option("--to", help="File to write; default: the name, here.")] = None,
) -> object:
    """Copy a shipped recipe, or a template of a cluster's jobs, to edit; never overwrites."""
    from peftlab.recipe.library import copy

    done = copy(name, to or Path())
    show(str(done))
    return {"out": done}


@app.command("eval")
@verb()
def eval_(
    reference: Annotated[str, typer.Argument(help="A run, an adapter or a model.")],
    overrides: Overrides = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="Recipe that contains task and data; default: the run's own."),
    ] = None,
    latency: Annotated[
        bool, typer.Option("--latency", help="Also time the merged model, and base and adapter, beside the base model.")
    ] = False,
    device: Device = "auto",
) -> object:
    """Score a run, an adapter or a model on its recipe's task."""
    from peftlab.pipelines.evaluate import score_trained
    from peftlab.reporting.console import score_lines

    found = score_trained(reference, recipe, overrides or [], latency=latency, device=device)
    show(*score_lines(found.scores, found.examples), *([] if found.timed is None else [found.timed.line()]))
    return found.as_json()


@app.command()
@verb(filters=True)
def predict(
    reference: Annotated[str, typer.Argument(help="A run, an adapter or a model.")],
    source: Annotated[str, typer.Argument(help="csv, tsv, jsonl or parquet; - is stdin.", metavar="INPUT")],
    overrides: Overrides = None,
    out: Annotated[
        str, typer.Option("-o", "--out", help="csv, jsonl or parquet; - is stdout, one JSON object a row.")
    ] = "-",
    text: Annotated[
        list[str] | None, typer.Option("--text", help="The text column; twice for pairs; default: the recipe's.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Recipe that names the task; default: the run's own.")
    ] = None,
    overwrite: Overwrite = False,
    device: Device = "auto",
) -> object:
    """Label the rows of a file, with the probability of every class."""
    from peftlab.pipelines.predict import STREAM, predict_file
    from peftlab.reporting.console import counting_rows

    with counting_rows() as on_rows:
        found = predict_file(
            reference,
            source,
            out,
            text or [],
            recipe,
            overrides or [],
            overwrite=overwrite,
            device=device,
            on_rows=on_rows,
        )
    if out != STREAM:
        show(f"predictions: {out} ({len(found.answers):,} rows)")
    return found


@app.command()
@verb()
def report(
    runs: Annotated[
        list[str], typer.Argument(help="A run directory, or its URL; several are compared.", metavar="RUN")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")],
    form: Annotated[
        str, typer.Option("--as", help="html, json, or peft: a run on GSM8K as in peft's method_comparison.")
    ] = "html",
) -> object:
    """Write a run's report, or the comparison of several, as one file."""
    from peftlab.reporting.comparison import comparison_tables
    from peftlab.reporting.comparison import report as write_report

    done = write_report(runs, out, form)
    if done.comparison is not None:
        show(*comparison_tables(done.comparison), *done.comparison.notes)
    show(f"report: {out}")
    return done


@app.command("inspect")
@verb()
def inspect_(
    model: Annotated[str, typer.Argument(help="Hub id, directory, or package:NAME/path.")],
    fields: Annotated[
        list[str] | None,
        typer.Argument(help="Fields of the method: r=16 target_modules=all-linear.", metavar="FIELD=VALUE"),
    ] = None,
    method: Annotated[str, typer.Option("--method", help="The method: lora, houlsby, bitfit, full or head.")] = "lora",
    auto_class: Annotated[
        str | None,
        typer.Option("--class", help="Transformers auto class, for example AutoModelForSequenceClassification."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Also count what a training step of so many rows costs; 32 with --length.", min=1)
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of each row; 128 by default.", min=1)] = None,
) -> object:
    """Show what a method would match and train, without loading weights."""
    from peftlab.pipelines.inspect import inspect_model, inspection_table
    from peftlab.recipe.load import parse_fields

    batch = (batch_size or 32, length or 128) if batch_size or length else None
    found = inspect_model(model, method, parse_fields(fields or []), auto_class, batch=batch)
    show(inspection_table(found))
    return found


@app.command()
@verb()
def env() -> object:
    """Print versions and devices, for a bug report."""
    import json

    from peftlab.hardware import resolve_device
    from peftlab.pipelines.provenance import environment

    found = environment(resolve_device("auto"))
    print(json.dumps(found, indent=2))
    return found


for _verb in (generate, merge, unmerge):  # last, so that the help begins with run
    app.command()(_verb)


def main() -> None:
    """Run the command line: a user's mistake is one message and exit status 2 (130, 143: stopped)."""
    # peftlab itself reports what a loaded checkpoint lacks; a progress bar in a log file is noise.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # The interpreter's last collections would look at all of torch's objects once more, which takes half a second.
    atexit.register(gc.freeze)
    quiet_libraries()
    debug = "--debug" in sys.argv  # before or after the verb
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app()
    except (PeftlabError, OSError) as error:
        if debug:
            raise
        from peftlab.reporting.console import error as show

        status = error.status if isinstance(error, PeftlabError) else PeftlabError.status
        show(str(error) if isinstance(error, PeftlabError) else os_error_text(error))
        sys.stderr.flush()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            os._exit(status)  # the other processes may wait for this one in a collective: do not join them
        sys.exit(status)
    finally:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
