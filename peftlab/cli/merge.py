"""The verbs merge and unmerge. Heavy imports wait until a verb needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from peftlab.cli.verbs import Base, Device, LoraAlpha, Out, Overwrite, show, verb

Adapters = Annotated[
    list[str],
    typer.Argument(
        help="A run, an adapter of peftlab's, peft's or AdapterHub's, or a loralib file; several are combined, each "
        "with its weight (1 if not given).",
        metavar="ADAPTER[:WEIGHT]",
    ),
]
Method = Annotated[str, typer.Option("--method", help="How several adapters become one.")]
Rank = Annotated[int | None, typer.Option("--rank", help="Rank of --method svd.")]
Density = Annotated[float, typer.Option("--density", help="Share kept by ties and dare.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Store fp32, bf16, fp16 or fp8; default: as each weight is stored.")
]
Fp64 = Annotated[bool, typer.Option("--fp64", help="Product and sum in fp64.")]
Verify = Annotated[
    bool | None,
    typer.Option("--verify/--no-verify", help="Compare merged with unmerged on real inputs; default: for a run."),
]
AllowNonfinite = Annotated[bool, typer.Option("--allow-nonfinite", help="Write a model with NaN or infinite weights.")]
Into = Annotated[
    Literal["dequantised", "original"] | None,
    typer.Option(
        "--into",
        help="After training on a base in 4 or 8 bits: add the update to the values of those, or to the original "
        "weights; default: dequantised where the adapter says how its base was loaded.",
    ),
]
PushToHub = Annotated[
    str | None, typer.Option("--push-to-hub", help="Upload the result to this repository.", metavar="ID")
]


@verb()
def merge(
    adapters: Adapters,
    out: Out = Path("merged"),
    base: Base = None,
    method: Method = "linear",
    rank: Rank = None,
    density: Density = 0.5,
    dtype: Dtype = None,
    fp64: Fp64 = False,
    verify: Verify = None,
    allow_nonfinite: AllowNonfinite = False,
    into: Into = None,
    lora_alpha: LoraAlpha = None,
    push_to_hub: PushToHub = None,
    overwrite: Overwrite = False,
    device: Device = "auto",
) -> object:
    """Fold adapters into their base model: a plain checkpoint, streamed."""
    from peftlab.checkpoints.merge_plan import MergeOptions
    from peftlab.files import to_json
    from peftlab.models.quantised import stored_dtype
    from peftlab.pipelines.merge import Combining, run_merge
    from peftlab.reporting.console import merge_table

    options = MergeOptions(
        dtype=None if dtype is None else stored_dtype(dtype),
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
