"""What verbs share: arguments and options, and where a result goes: to people on the terminal, to programs as JSON."""

from __future__ import annotations

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

from peftlab.errors import PeftlabError
from peftlab.files import to_json, write_json
from peftlab.untyped import Function

if TYPE_CHECKING:
    from rich.console import RenderableType

Out = Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result of the same kind.")]
Base = Annotated[str | None, typer.Option("--base", help="Base model; default: the one the adapter names.")]
Device = Annotated[
    Literal["auto", "cpu", "cuda", "mps"],
    typer.Option("--device", help="Where models run; auto: cuda if there is one, else mps, else cpu."),
]
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
