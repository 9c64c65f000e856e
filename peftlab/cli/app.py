"""The command line: parses, calls one function, prints. Heavy imports wait until a verb needs them."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from peftlab import __version__
from peftlab.cli.draft_app import draft_app, generate
from peftlab.errors import PeftlabError
from peftlab.files import told

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
    Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Parameter-efficient finetuning: recipes in, small adapters and plain merged checkpoints out."""


@app.command()
def run(recipe: RecipeArgument, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Run a recipe: inject, train, score, save, merge, report."""
    from peftlab.recipe.loading import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    from peftlab.pipelines import run_recipe

    run_recipe(loaded, overwrite=overwrite)


@app.command()
def resume(directory: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Go on with a run that was stopped, from its newest checkpoint."""
    from peftlab.pipelines import run_recipe
    from peftlab.recipe.loading import load_recipe

    if not (directory / "recipe.yaml").exists():
        raise PeftlabError(f"{directory}: no run here (there is no recipe.yaml)")
    recipe = load_recipe(directory / "recipe.yaml")
    # Set as a value: a path in an override would be read as YAML.
    run_recipe(recipe.model_copy(update={"output_dir": str(directory)}), resume=True)


@app.command()
def validate(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Check a recipe and print it with all its defaults."""
    from peftlab.recipe.loading import dump_recipe, load_recipe

    print(dump_recipe(load_recipe(recipe, overrides or [])), end="")


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
    to: Annotated[Optional[Path], typer.Option("--to", help="File to write; default: the name, here.")] = None,  # noqa: UP045
) -> None:
    """Copy a shipped recipe to edit; never overwrites."""
    from peftlab.recipe.library import copy

    print(copy(name, to or Path(f"{name.rpartition('/')[2].removesuffix('.yaml')}.yaml")))


@app.command("eval")
def evaluate(
    directory: Annotated[Path, typer.Argument(help="A run, an adapter, or a merged directory.")],
    overrides: Overrides = None,
    recipe: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--recipe", help="Recipe that names task and data; default: the run's own."),
    ] = None,
) -> None:
    """Score what lies on disk on its recipe's task."""
    from peftlab.pipelines.evaluate import run_evaluate

    for split, metrics in run_evaluate(directory, recipe, overrides or []).items():
        print(f"{split}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


@app.command()
def merge(
    source: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(help="A run, an adapter of peftlab's, peft's or AdapterHub's, or a loralib file."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")] = Path("merged"),
    base: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--base", help="Base model; default: the one the adapter names."),
    ] = None,
    adapter: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--adapter", help="DIR:WEIGHT, several times, instead of one source.", metavar="DIR:WEIGHT"),
    ] = None,
    method: Annotated[str, typer.Option("--method", help="How several adapters become one.")] = "linear",
    rank: Annotated[Optional[int], typer.Option("--rank", help="Rank of --method svd.")] = None,  # noqa: UP045
    density: Annotated[float, typer.Option("--density", help="Share kept by ties and dare.")] = 0.5,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--dtype", help="Store fp32, bf16 or fp16; default: as each weight is stored."),
    ] = None,
    fp64: Annotated[bool, typer.Option("--fp64", help="Product and sum in fp64.")] = False,
    verify: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option("--verify/--no-verify", help="Compare merged with unmerged on real inputs; default: for a run."),
    ] = None,
    allow_nonfinite: Annotated[bool, typer.Option("--allow-nonfinite", help="Write NaN and infinity.")] = False,
    dequantize: Annotated[bool, typer.Option("--dequantize", help="Accept a quantised base; it grows.")] = False,
    lora_alpha: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--lora-alpha", help="Alpha of a loralib file, which does not say it."),
    ] = None,
    push_to_hub: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--push-to-hub", help="Upload the result to this repository.", metavar="ID"),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Fold an adapter into its base model: a plain checkpoint, streamed."""
    from rich.console import Console

    from peftlab.pipelines.merge import combined, run_merge, torch_dtype
    from peftlab.reporting.console import merge_table

    if (source is None) == (not adapter):
        raise PeftlabError("merge: name one source, or several with --adapter DIR:WEIGHT")
    report, checked = run_merge(
        source or combined(adapter or [], method, rank, density),
        base,
        out,
        verify=verify,
        dtype=torch_dtype(dtype),
        fp64=fp64,
        allow_nonfinite=allow_nonfinite,
        dequantize=dequantize,
        lora_alpha=lora_alpha,
        push_to_hub=push_to_hub,
        overwrite=overwrite,
    )
    Console().print(merge_table(report))
    for line in (*report["notes"], *(f"warning: {text}" for text in report["warnings"])):
        print(line)
    for name, value in checked.items():
        print(f"{name.replace('_', ' ')}: {value:.3g}")
    print(f"merged: {out}")


@app.command()
def unmerge(
    merged: Annotated[Path, typer.Argument(help="A directory that peftlab merge wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")],
    base: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--base", help="Base model; default: the one merge.json names."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write the base model back, bit for bit, after checking that it is the one."""
    from peftlab.checkpoints.merge.unmerge import unmerge_checkpoint

    print(unmerge_checkpoint(merged, out, base=base, overwrite=overwrite))


@app.command("inspect")
def inspect_(
    model: Annotated[str, typer.Argument(help="Hub id, directory, or package:NAME/path.")],
    fields: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="Fields of the method: r=16 target_modules=all-linear.", metavar="[key=value]..."),
    ] = None,
    method: Annotated[str, typer.Option("--method", help="A row of the method table.")] = "lora",
    auto_class: Annotated[
        Optional[str],  # noqa: UP045
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
    """Print what matters in a bug report."""
    import json

    from peftlab.pipelines.provenance import environment

    print(json.dumps(environment(), indent=2))


def main() -> None:
    """Run the command line: a user's mistake is one message and exit status 2 (130, 143: stopped)."""
    # What a loaded checkpoint lacks is said by peftlab itself; a bar in a log file is noise.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # transformers imports torchao wherever it is installed, whose remarks on its own parts concern no run.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    debug = "--debug" in sys.argv  # wherever it stands, before or after the verb
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app()
    except (PeftlabError, OSError) as error:
        if debug:
            raise
        from peftlab.reporting.console import error as show

        status = error.status if isinstance(error, PeftlabError) else PeftlabError.status
        show(str(error) if isinstance(error, PeftlabError) else told(error))
        sys.stderr.flush()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            os._exit(status)  # the other processes may wait for this one in a collective: do not join them
        sys.exit(status)
    finally:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
