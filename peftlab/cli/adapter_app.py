"""The verbs about adapter files: check, convert, extract. Heavy imports wait until a verb needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peftlab.cli.output import Json, Quiet, report

adapter_app = typer.Typer(help="Adapter files: check, convert and extract them.", no_args_is_help=True)

Base = Annotated[str | None, typer.Option("--base", help="Base model; default: the one the adapter names.")]
Alpha = Annotated[
    float | None, typer.Option("--lora-alpha", help="Alpha of a loralib file, which does not contain it.")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result of the same kind.")]


@adapter_app.command()
def check(
    adapter: Annotated[
        Path, typer.Argument(help="An adapter of peft's, peftlab's or AdapterHub's, or a loralib file.")
    ],
    base: Base = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Show what an adapter is, what it would touch, and which programs read it as meant."""
    from peftlab.checkpoints.consumers.check import check_adapter
    from peftlab.reporting.adapter_tables import check_lines, consumers_table

    found = check_adapter(adapter, base)
    report(found, json, quiet, *check_lines(found), consumers_table(found))


@adapter_app.command()
def convert(
    adapter: Annotated[
        Path, typer.Argument(help="An adapter of peft's, peftlab's or AdapterHub's, or a loralib file.")
    ],
    to: Annotated[str, typer.Option("--to", help="vllm, sglang, llama.cpp or lorax.", metavar="ENGINE")],
    out: Out,
    base: Base = None,
    lora_alpha: Alpha = None,
    overwrite: Overwrite = False,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Write an adapter as one engine reads it, and check the result by that engine's rule."""
    from peftlab.checkpoints.consumers.convert import convert_adapter
    from peftlab.reporting.adapter_tables import conversion_lines

    done = convert_adapter(adapter, out, to, base=base, lora_alpha=lora_alpha, overwrite=overwrite)
    report(done, json, quiet, *conversion_lines(done))


@adapter_app.command()
def extract(
    finetuned: Annotated[str, typer.Argument(help="The finetuned model.")],
    base: Annotated[str, typer.Option("--base", help="The model it was finetuned from.")],
    out: Out,
    rank: Annotated[int | None, typer.Option("--rank", help="Highest rank of each module's factors.")] = None,
    energy: Annotated[
        float | None, typer.Option("--energy", help="Instead: the share of each difference's square to keep (0.99).")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Write the difference of two checkpoints as a LoRA adapter, with the error of each module."""
    from peftlab.checkpoints.extract.extraction import extract_adapter
    from peftlab.reporting.adapter_tables import extraction_lines, extraction_table

    done = extract_adapter(finetuned, base, out, rank=rank, energy=energy, overwrite=overwrite)
    report(done, json, quiet, extraction_table(done), *extraction_lines(done))
