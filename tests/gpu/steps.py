"""A training step of LoRA beside peft's, eager and compiled, and beside unsloth's where that is installed."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import peft
import torch

import peftlab
from peftlab.models.costs import CountFlops
from peftlab.tasks.language import nll
from tests.gpu.shapes import Work
from tests.gpu.timing import Taken, ceiling, taken

Step = Callable[[], object]


def ours(work: Work, device: torch.device, compiled: bool) -> Step:
    """Return peftlab's step: its layers, and of a language model its loss."""
    model = peftlab.inject_lora(work.model(device), r=work.r, lora_alpha=2 * work.r, target_modules=work.targets)
    inputs = work.inputs(device)
    if not work.generates:
        return stepper(model, lambda m: m(**inputs).loss, device, compiled)
    labels = inputs.pop("labels")
    given = {**inputs, "trained": labels != -100}
    return stepper(model, lambda m: nll(m, given) / given["trained"].sum(), device, compiled)


def theirs(work: Work, device: torch.device, compiled: bool) -> Step:
    """Return peft's step, with the model's own loss."""
    task = "CAUSAL_LM" if work.generates else "SEQ_CLS"
    base = work.model(device)
    base.is_loaded_in_4bit = work.nf4  # by this peft knows
    config = peft.LoraConfig(task_type=task, r=work.r, lora_alpha=2 * work.r, target_modules=work.targets)
    inputs = work.inputs(device)
    return stepper(peft.get_peft_model(base, config), lambda m: m(**inputs).loss, device, compiled)


def unsloths(work: Work, device: torch.device, compiled: bool) -> Step:
    """Return unsloth's step: it loads a checkpoint and has checkpointing and a loss of its own."""
    from unsloth import FastLanguageModel

    with tempfile.TemporaryDirectory() as place:
        work.model(device).save_pretrained(place)
        model, _ = FastLanguageModel.from_pretrained(place, max_seq_length=work.length, load_in_4bit=work.nf4)
    maps = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = FastLanguageModel.get_peft_model(
        model, r=work.r, lora_alpha=2 * work.r, target_modules=maps, use_gradient_checkpointing="unsloth"
    )
    inputs = work.inputs(device)
    return stepper(model, lambda m: m(**inputs).loss, device, compiled)


SIDES: dict[str, tuple[Callable[[Work, torch.device, bool], Step], bool]] = {
    "peftlab": (ours, False),
    "peft": (theirs, False),
    "peftlab, compiled": (ours, True),
    "peft, compiled": (theirs, True),
}


def stepper(model: Any, loss: Callable[[Any], torch.Tensor], device: torch.device, compiled: bool) -> Step:
    """Return one step in bf16 autocast: forward, backward, fused AdamW."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    if compiled:
        model.compile()

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            found = loss(model)
        found.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def measure(work: Work, device: torch.device, *, rounds: int, repeats: int, size: int = 8192) -> dict[str, Any]:
    """Return each side's seconds, memory and share of what the device's products could do, and how peftlab compares.

    The share counts the FLOPs of peftlab's step for every side. Each round builds one side after another, alone on the device, so that the peaks are theirs.

    Args:
        size: of the square matrices whose product tells what the device can do.
    """
    sides = dict(SIDES)
    if work.generates and importlib.util.find_spec("unsloth"):
        sides["unsloth"] = (unsloths, False)
    found: dict[str, list[Taken]] = {}
    flops = 0
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for name, (make, compiled) in sides.items():
            if name in failed:
                continue
            torch._dynamo.reset()
            try:
                step = make(work, device, compiled)
                if name == "peftlab" and not flops:
                    with CountFlops() as counter:
                        step()
                    flops = counter.flops
                found.setdefault(name, []).append(taken(step, device, warm=3, repeats=repeats))
            except Exception as error:  # the others are measured all the same
                failed[name] = f"{type(error).__name__}: {str(error)[:500]}"
            step = None
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    fastest = ceiling(device, size=size)
    figures = {name: summary(runs) for name, runs in found.items() if runs}
    for one in figures.values():
        one["share_of_products"] = flops / one["seconds"] / fastest
    return {
        "work": asdict(work), "flops": flops, "products_per_second": fastest, "sides": figures, "failed": failed,
        **compared(figures),
    }  # fmt: skip


def summary(runs: list[Taken]) -> dict[str, Any]:
    """Return the median of the rounds' seconds, and the largest spread and memory."""
    peaks = [run.peak_mb for run in runs if run.peak_mb is not None]
    return {
        "seconds": statistics.median(run.seconds for run in runs),
        "spread": max(run.spread for run in runs),
        "peak_mb": max(peaks, default=None),
    }


def compared(figures: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return how many times faster peftlab is than each other side, and its share of each one's memory."""
    own = figures.get("peftlab")
    others = {name: other for name, other in figures.items() if name != "peftlab"}
    if own is None:
        return {}
    shares = {name: own["peak_mb"] / other["peak_mb"] for name, other in others.items() if other["peak_mb"]}
    return {"faster_by": {name: other["seconds"] / own["seconds"] for name, other in others.items()}, "memory": shares}
