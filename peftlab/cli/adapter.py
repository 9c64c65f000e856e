"""The verbs about adapter files: check, convert, extract. Heavy imports wait until a verb needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peftlab.cli.verbs import Base, LoraAlpha, Out, Overwrite, show, verb

adapter_app = typer.Typer(help="Adapter files: check, convert and extract them.", no_args_is_help=True)


@adapter_app.command()
@verb()
def check(
    adapter: Annotated[
        Path, typer.Argument(help="An adapter of peft's, peftlab's or AdapterHub's, or a loralib file.")
    ],
    base: Base = None,
) -> object:
    """Show what an adapter is, what it would touch, and which programs read it as it was trained."""
    from peftlab.checkpoints.engines import check_adapter
    from peftlab.reporting.console import check_lines, consumers_table

    found = check_adapter(adapter, base)
    show(*check_lines(found), consumers_table(found))
    return found


@adapter_app.command()
@verb()
def convert(
    adapter: Annotated[
        Path, typer.Argument(help="An adapter of peft's, peftlab's or AdapterHub's, or a loralib file.")
    ],
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
