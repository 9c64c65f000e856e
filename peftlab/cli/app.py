"""The command line: each verb parses, calls one function and prints. Heavy imports are inside the verbs.

What a verb prints is for people; what it returns is for programs, as JSON (``--json``).
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import wraps
from inspect import Parameter, signature
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peftlab.cli.draft import Device, Overwrite, bench, export, generate, plan, update
from peftlab.environment import __version__
from peftlab.errors import PeftlabError, os_error_text, quiet_libraries
from peftlab.files import to_json, write_json
from peftlab.untyped import Function

if TYPE_CHECKING:
    from rich.console import RenderableType

Out = Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")]
Base = Annotated[str | None, typer.Option("--base", help="Base model; default: the one the adapter names.")]
LoraAlpha = Annotated[
    float | None, typer.Option("--lora-alpha", help="Alpha of a loralib file, which does not contain it.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Overrides: train.lr=1e-4, method=lora, ~data.path; a grid: sweep.lr=[1e-4,5e-4].",
        metavar="KEY=VALUE",
    ),
]
On = Annotated[
    str,
    typer.Option(
        "--on", help="Where the cells of a table or sweep run: local, ray, or ray://HOST:PORT.", metavar="ENGINE"
    ),
]
Cpus = Annotated[
    int | None,
    typer.Option(
        "--cpus",
        help="CPU cores and threads of each cell, as many cells at a time as fit; default: 1 on Ray, else all.",
        metavar="N",
    ),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Write the result to this file; - is stdout, and all else then goes to stderr."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors alone.")]
QuietFilter = Annotated[bool, typer.Option("--quiet", help="Print the output and errors alone.")]
RecipeName = Annotated[str, typer.Argument(help="A recipe file, or the short name of a shipped recipe.")]
AdapterFiles = Annotated[
    Path, typer.Argument(help="An adapter of peft's, peftlab's or AdapterHub's, or a loralib file.")
]


def verb(*, filters: bool = False) -> Callable[[Function[object]], Function[None]]:
    """Give a verb ``--json`` and ``--quiet``: what it prints is for people, what it returns is the JSON.

    Args:
        filters: what the verb writes to stdout is its output, such as generated text; ``--quiet`` keeps it.
    """

    def decorate(function: Function[object]) -> Function[None]:
        @wraps(function)
        def call(*arguments: object, json: Path | None = None, quiet: bool = False, **named: object) -> None:
            if json is not None and json.is_dir():
                raise PeftlabError(f"--json {json}: is a directory")
            to_stdout = json == Path("-")
            with ExitStack() as printed:
                if quiet:
                    printed.enter_context(redirect_stderr(_Nowhere()))
                if to_stdout:
                    printed.enter_context(redirect_stdout(sys.stderr))
                elif quiet and not filters:
                    printed.enter_context(redirect_stdout(_Nowhere()))
                result = function(*arguments, **named)
            if json is not None and result is None:
                raise PeftlabError("--json: give it to the subcommand, behind its name")
            if json is not None and os.environ.get("RANK", "0") == "0":  # of several processes, the first writes
                if to_stdout:
                    sys.stdout.write(dumps(to_json(result), indent=2) + "\n")
                else:
                    write_json(json, result)

        own = signature(function, eval_str=True)
        options = [
            Parameter("json", Parameter.KEYWORD_ONLY, default=None, annotation=Json),
            Parameter("quiet", Parameter.KEYWORD_ONLY, default=False, annotation=QuietFilter if filters else Quiet),
        ]
        call.__signature__ = own.replace(parameters=[*own.parameters.values(), *options])  # type: ignore[attr-defined]
        return call

    return decorate


def show(*shown: RenderableType) -> None:
    """Print lines and tables."""
    from rich.console import Console

    console = Console()
    for each in shown:
        console.print(each, soft_wrap=isinstance(each, str), markup=False, highlight=False)


class _Nowhere(io.TextIOBase):
    """A stream that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


app = typer.Typer(
    name="peftlab",
    help="Parameter-efficient finetuning: recipes in, small adapters and plain merged checkpoints out.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
recipes_app = typer.Typer(help="List the shipped recipes, or copy one.", invoke_without_command=True)
draft_app = typer.Typer(help="Draft models: measure, train further and export them.", no_args_is_help=True)
adapter_app = typer.Typer(help="Adapter files: check, convert and extract them.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")
app.add_typer(draft_app, name="draft")
app.add_typer(adapter_app, name="adapter")


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
    recipe: RecipeName,
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
    from peftlab.pipelines.recipes import run as run_recipe

    return run_recipe(recipe, overrides or [], overwrite=overwrite, device=device, shard=shard, on=on, cpus=cpus)


@app.command()
@verb()
def resume(
    directory: Annotated[str, typer.Argument(help="A run directory, or its URL.")],
    device: Device = "auto",
    on: On = "local",
    cpus: Cpus = None,
) -> object:
    """Continue a run that was stopped, from its newest checkpoint."""
    from peftlab.pipelines.recipes import resume as resume_run

    return resume_run(directory, device=device, on=on, cpus=cpus)


@app.command()
@verb()
def runs(
    directory: Annotated[Path, typer.Argument(help="Where to look, in all directories below it, too.")] = Path("runs"),
) -> object:
    """List runs: running, finished or stopped, with step, loss, score, and how long ago their files changed."""
    from peftlab.pipelines.runs import list_runs, runs_table

    found = list_runs(directory)
    show(runs_table(found, directory) if found else f"{directory}: no runs")
    return {"runs": found}


@app.command()
@verb()
def validate(
    recipe: RecipeName,
    overrides: Overrides = None,
    examples: Annotated[
        int,
        typer.Option(
            "--show", help="Print N examples as the model reads them, trained parts marked.", metavar="N", min=0
        ),
    ] = 0,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also read all labels, find the method's targets, and compare the disk's space."),
    ] = False,
) -> object:
    """Check a recipe and that its model and data are there, and print it with all its defaults."""
    from peftlab.pipelines.recipes import validate as validate_recipe
    from peftlab.recipe.load import dump_recipe

    checked = validate_recipe(recipe, overrides or [])
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
    to: Annotated[str, typer.Option("--to", help="File or directory/ to write; default: the name, here.")] = ".",
) -> object:
    """Copy a shipped recipe, or a template of a cluster's jobs, to edit; never overwrites."""
    from peftlab.recipe.library import copy

    done = copy(name, to)
    show(str(done))
    return {"out": done}


@app.command("eval")
@verb()
def eval_(
    reference: Annotated[str, typer.Argument(help="A run, an adapter or a model.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Overrides of what scores depend on: data.path=new.csv, data.validation=all, train.eval_batch_size=8, "
            "generate.beams=4.",
            metavar="KEY=VALUE",
        ),
    ] = None,
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
    from peftlab.reporting.facts import score_lines

    found = score_trained(reference, recipe, overrides or [], latency=latency, device=device)
    show(*score_lines(found.scores, found.examples), *([] if found.timed is None else [found.timed.line()]))
    return found.as_json()


@app.command()
@verb(filters=True)
def predict(
    reference: Annotated[str, typer.Argument(help="A run, an adapter or a model.")],
    source: Annotated[str, typer.Argument(help="csv, tsv, jsonl or parquet; - is stdin.", metavar="INPUT")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Overrides of what predictions depend on: train.eval_batch_size=8, train.max_length=64.",
            metavar="KEY=VALUE",
        ),
    ] = None,
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
    from peftlab.progress import Phase

    with Phase("labelling", unit="row") as phase:
        found = predict_file(
            reference,
            source,
            out,
            text or [],
            recipe,
            overrides or [],
            overwrite=overwrite,
            device=device,
            on_rows=phase.advance,
        )
    if out != STREAM:
        print(f"predictions: {out} ({len(found.answers):,} rows)", file=sys.stderr)
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

    from peftlab.environment import describe_environment, resolve_device

    found = describe_environment(resolve_device("auto"))
    print(json.dumps(found, indent=2))
    return found


app.command()(verb(filters=True)(generate))


@app.command()
@verb()
def merge(
    adapters: Annotated[
        list[str],
        typer.Argument(
            help="A run, an adapter of peftlab's, peft's or AdapterHub's, or a loralib file; several are combined, "
            "each with its weight (1 if not given).",
            metavar="ADAPTER[:WEIGHT]",
        ),
    ],
    out: Out = Path("merged"),
    base: Base = None,
    method: Annotated[str, typer.Option("--method", help="How several adapters become one.")] = "cat",
    rank: Annotated[int | None, typer.Option("--rank", help="Rank of --method svd.")] = None,
    density: Annotated[float, typer.Option("--density", help="Share kept by ties and dare.")] = 0.5,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Store fp32, bf16, fp16 or fp8; in a GGUF file f32, bf16, f16, q8_0, q5_1, q5_0, q4_1, q4_0 or keep; "
            "default: as each weight is stored.",
        ),
    ] = None,
    fp64: Annotated[bool, typer.Option("--fp64", help="Product and sum in fp64.")] = False,
    verify: Annotated[
        bool | None,
        typer.Option("--verify/--no-verify", help="Compare merged with unmerged on real inputs; default: for a run."),
    ] = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Write a model with NaN or infinite weights.")
    ] = False,
    into: Annotated[
        Literal["dequantised", "original"] | None,
        typer.Option(
            "--into",
            help="After training on a base in 4 or 8 bits: add the update to the values of those, or to the original "
            "weights; default: dequantised where the adapter says how its base was loaded.",
        ),
    ] = None,
    lora_alpha: LoraAlpha = None,
    push_to_hub: Annotated[
        str | None, typer.Option("--push-to-hub", help="Upload the result to this repository.", metavar="ID")
    ] = None,
    overwrite: Overwrite = False,
    device: Device = "auto",
) -> object:
    """Fold adapters into their base model: a plain checkpoint, streamed, or a GGUF file (-o FILE.gguf)."""
    from peftlab.checkpoints.gguf import KEEP, TYPES
    from peftlab.checkpoints.merge_plan import MergeOptions
    from peftlab.models.quantised import STORED, stored_dtype
    from peftlab.pipelines.merge import Combining, run_merge
    from peftlab.reporting.console import merge_table

    to_file = out.suffix == ".gguf" or dtype in {*TYPES, KEEP} - {*STORED}  # bf16 is both
    options = MergeOptions(
        dtype=None if dtype is None or to_file else stored_dtype(dtype),
        gguf_type=dtype if to_file else None,
        fp64=fp64,
        allow_nonfinite=allow_nonfinite,
        into=into,
        lora_alpha=lora_alpha,
        push_to_hub=push_to_hub,
        overwrite=overwrite,
    )
    done = run_merge(adapters, base, out, options, Combining(method, rank, density), verify=verify, device=device)
    show(
        merge_table(done.report),
        done.report.accounts.line(),
        *done.report.notes,
        *(f"warning: {text}" for text in done.report.warnings),
    )
    show(*(f"{name.replace('_', ' ')}: {value:.3g}" for name, value in to_json(done.check or {}).items()))
    show(f"merged: {out}")
    return done


@app.command()
@verb()
def unmerge(
    merged: Annotated[Path, typer.Argument(help="A directory that peftlab merge wrote.")],
    out: Out,
    base: Annotated[str | None, typer.Option("--base", help="Base model; default: the one merge.json names.")] = None,
    overwrite: Overwrite = False,
) -> object:
    """Write the base model of a merged directory, bit for bit, after checking that it is the right one."""
    from peftlab.checkpoints.merge import unmerge_checkpoint

    show(f"unmerged: {unmerge_checkpoint(merged, out, base=base, overwrite=overwrite)}")
    return {"out": out}


for _verb in (plan, bench, update, export):
    draft_app.command()(verb()(_verb))


@adapter_app.command()
@verb()
def check(adapter: AdapterFiles, base: Base = None) -> object:
    """Show what an adapter is, what it would touch, and which programs read it as it was trained."""
    from peftlab.checkpoints.engines import check_adapter
    from peftlab.reporting.console import check_lines, consumers_table

    found = check_adapter(adapter, base)
    show(*check_lines(found), consumers_table(found))
    return found


@adapter_app.command()
@verb()
def convert(
    adapter: AdapterFiles,
    to: Annotated[str, typer.Option("--to", help="vllm, sglang, llama.cpp or lorax.", metavar="ENGINE")],
    out: Out,
    base: Base = None,
    lora_alpha: LoraAlpha = None,
    overwrite: Overwrite = False,
) -> object:
    """Write an adapter as one engine reads it, and check the result by that engine's rule."""
    from peftlab.checkpoints.engines import convert_adapter
    from peftlab.reporting.console import conversion_lines

    done = convert_adapter(adapter, out, to, base=base, lora_alpha=lora_alpha, overwrite=overwrite)
    show(*conversion_lines(done))
    return done


@adapter_app.command()
@verb()
def extract(
    finetuned: Annotated[str, typer.Argument(help="The finetuned model.")],
    base: Annotated[str, typer.Option("--base", help="The model it was finetuned from.")],
    out: Out,
    rank: Annotated[int | None, typer.Option("--rank", help="Highest rank of each module's factors.")] = None,
    energy: Annotated[
        float | None, typer.Option("--energy", help="Instead: the share of each difference's square to keep (0.99).")
    ] = None,
    overwrite: Overwrite = False,
) -> object:
    """Write the difference of two checkpoints as a LoRA adapter, with the error of each module."""
    from peftlab.checkpoints.extract import extract_adapter
    from peftlab.reporting.console import extraction_lines, extraction_table

    done = extract_adapter(finetuned, base, out, rank=rank, energy=energy, overwrite=overwrite)
    show(extraction_table(done), *extraction_lines(done))
    return done


def main() -> None:
    """Run the command line: a user's mistake is one message and exit status 2 (130, 143: stopped)."""
    # peftlab itself reports what a loaded checkpoint lacks; a progress bar in a log file is noise.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TQDM_LEAVE", "")  # on a terminal, a bar goes when it is full
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
