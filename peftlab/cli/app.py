"""The command line: each verb parses, calls one function and prints. Heavy imports are inside the verbs."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from peftlab import __version__
from peftlab.cli.draft_app import draft_app, generate
from peftlab.errors import PeftlabError
from peftlab.files import os_error_text

app = typer.Typer(
    name="peftlab",
    help="Parameter-efficient finetuning: recipes in, small adapters and plain merged checkpoints out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
recipes_app = typer.Typer(help="List the shipped recipes, or copy one.", invoke_without_command=True)
app.add_typer(recipes_app, name="recipes")
app.add_typer(draft_app, name="draft")
app.command()(generate)

RecipeArgument = Annotated[str, typer.Argument(help="A recipe file, or the short name of a shipped recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Overrides: train.lr=1e-4, method=lora, ~data.path; a grid: sweep.lr=[1e-4,5e-4].",
        metavar="[key=value]...",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result of the same kind.")]


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
def run(recipe: RecipeArgument, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Run a recipe: inject, train, score, save, merge, report."""
    from peftlab import pipelines

    pipelines.run(recipe, overrides or [], overwrite=overwrite)


@app.command()
def resume(directory: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Continue a run that was stopped, from its newest checkpoint."""
    from peftlab import pipelines

    pipelines.resume(directory)


@app.command()
def validate(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Check a recipe and print it with all its defaults."""
    from peftlab import pipelines
    from peftlab.recipe.loading import dump_recipe

    print(dump_recipe(pipelines.validate(recipe, overrides or [])), end="")


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    import json

    from peftlab.recipe.document import json_schema

    print(json.dumps(json_schema(), indent=2))


@recipes_app.callback()
def recipes(context: typer.Context) -> None:
    """List the shipped recipes, or copy one."""
    if context.invoked_subcommand is None:
        from rich.console import Console

        from peftlab.recipe.library import shipped
        from peftlab.reporting.console import recipes_table

        Console().print(recipes_table([{"name": name, "summary": summary} for name, summary in shipped()]))


@recipes_app.command("copy")
def recipes_copy(
    name: Annotated[str, typer.Argument(help="Short name of a shipped recipe.")],
    to: Annotated[Path | None, typer.Option("--to", help="File to write; default: the name, here.")] = None,
) -> None:
    """Copy a shipped recipe to edit; never overwrites."""
    from peftlab.recipe.library import copy

    print(copy(name, to or Path(f"{name.rpartition('/')[2].removesuffix('.yaml')}.yaml")))


@app.command("eval")
def eval_(
    directory: Annotated[Path, typer.Argument(help="A run, an adapter or a model directory.")],
    overrides: Overrides = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="Recipe that contains task and data; default: the run's own."),
    ] = None,
) -> None:
    """Score a run, an adapter or a model directory on its recipe's task."""
    from peftlab.pipelines.evaluate import evaluate

    for split, metrics in evaluate(directory, recipe, overrides or []).items():
        print(f"{split}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


@app.command()
def merge(
    source: Annotated[
        Path | None,
        typer.Argument(help="A run, an adapter of peftlab's, peft's or AdapterHub's, or a loralib file."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")] = Path("merged"),
    base: Annotated[
        str | None,
        typer.Option("--base", help="Base model; default: the one the adapter names."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter", help="Adapter and weight, once per adapter, instead of one source.", metavar="DIR:WEIGHT"
        ),
    ] = None,
    method: Annotated[str, typer.Option("--method", help="How several adapters become one.")] = "linear",
    rank: Annotated[int | None, typer.Option("--rank", help="Rank of --method svd.")] = None,
    density: Annotated[float, typer.Option("--density", help="Share kept by ties and dare.")] = 0.5,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Store fp32, bf16 or fp16; default: as each weight is stored."),
    ] = None,
    fp64: Annotated[bool, typer.Option("--fp64", help="Product and sum in fp64.")] = False,
    verify: Annotated[
        bool | None,
        typer.Option("--verify/--no-verify", help="Compare merged with unmerged on real inputs; default: for a run."),
    ] = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Write a model with NaN or infinite weights.")
    ] = False,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Merge into a quantised base; the result is larger.")
    ] = False,
    lora_alpha: Annotated[
        float | None,
        typer.Option("--lora-alpha", help="Alpha of a loralib file, which does not contain it."),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option("--push-to-hub", help="Upload the result to this repository.", metavar="ID"),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Fold an adapter into its base model: a plain checkpoint, streamed."""
    from rich.console import Console

    from peftlab.checkpoints.merge.options import MergeOptions
    from peftlab.files import to_json
    from peftlab.models.dtypes import torch_dtype
    from peftlab.pipelines.merge import combined, run_merge
    from peftlab.reporting.console import merge_table

    if (source is None) == (not adapter):
        raise PeftlabError("merge: name one source, or several with --adapter DIR:WEIGHT")
    options = MergeOptions(
        dtype=None if dtype is None else torch_dtype(dtype),
        fp64=fp64,
        allow_nonfinite=allow_nonfinite,
        dequantize=dequantize,
        lora_alpha=lora_alpha,
        push_to_hub=push_to_hub,
        overwrite=overwrite,
    )
    adapted = source or combined(adapter or [], method, rank, density)
    report, check = run_merge(adapted, base, out, options, verify=verify)
    Console().print(merge_table(to_json(report)))
    for line in (*report.notes, *(f"warning: {text}" for text in report.warnings)):
        print(line)
    for name, value in to_json(check).items() if check else ():
        print(f"{name.replace('_', ' ')}: {value:.3g}")
    print(f"merged: {out}")


@app.command()
def unmerge(
    merged: Annotated[Path, typer.Argument(help="A directory that peftlab merge wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")],
    base: Annotated[
        str | None,
        typer.Option("--base", help="Base model; default: the one merge.json names."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write the base model of a merged directory, bit for bit, after checking that it is the right one."""
    from peftlab.checkpoints.merge.unmerge import unmerge_checkpoint

    print(unmerge_checkpoint(merged, out, base=base, overwrite=overwrite))


@app.command("inspect")
def inspect_(
    model: Annotated[str, typer.Argument(help="Hub id, directory, or package:NAME/path.")],
    fields: Annotated[
        list[str] | None,
        typer.Argument(help="Fields of the method: r=16 target_modules=all-linear.", metavar="[key=value]..."),
    ] = None,
    method: Annotated[str, typer.Option("--method", help="The method: lora, houlsby, bitfit, full or head.")] = "lora",
    auto_class: Annotated[
        str | None,
        typer.Option("--class", help="Transformers auto class, for example AutoModelForSequenceClassification."),
    ] = None,
) -> None:
    """Show what a method would match and train, without loading weights."""
    from rich.console import Console

    from peftlab.pipelines.inspect import inspect_model
    from peftlab.recipe.loading import parse_fields
    from peftlab.reporting.console import inspection_table

    Console().print(inspection_table(inspect_model(model, method, parse_fields(fields or []), auto_class)))


@app.command()
def env() -> None:
    """Print versions and devices, for a bug report."""
    import json

    from peftlab.pipelines.provenance import environment

    print(json.dumps(environment(), indent=2))


def main() -> None:
    """Run the command line: a user's mistake is one message and exit status 2 (130, 143: stopped)."""
    # peftlab itself reports what a loaded checkpoint lacks; a progress bar in a log file is noise.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # transformers imports torchao wherever it is installed; its warnings about its own parts concern no run.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
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
