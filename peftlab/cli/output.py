"""Where a verb's result goes: to the terminal for people, and as JSON for programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

Json = Annotated[
    Path | None,
    typer.Option("--json", help="Write the result to this file; - is stdout, and the rest then goes to stderr."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors alone.")]


def report(result: object, json: Path | None, quiet: bool, *shown: RenderableType) -> None:
    """Write ``result`` as JSON where it is wanted, and show the rest to people unless they want quiet."""
    from rich.console import Console

    from peftlab.files import write_json

    to_stdout = json is not None and str(json) == "-"
    if not quiet:
        console = Console(stderr=to_stdout)
        for each in shown:
            console.print(each, soft_wrap=isinstance(each, str), markup=False, highlight=False)
    if json is not None and not to_stdout:
        write_json(json, result)
    if to_stdout:
        import json as format_

        from peftlab.files import to_json

        sys.stdout.write(format_.dumps(to_json(result), indent=2, ensure_ascii=False) + "\n")
