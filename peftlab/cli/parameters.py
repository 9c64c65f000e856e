"""Arguments and options that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

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
