"""A base in 4 bits beside the same in 16 and 32: bytes of its linear maps, and the time of a training step.

SmolLM2-135M, LoRA r=16 on all linear maps, one row of 512 tokens; the steps are taken in turn. Run alone on the
machine: ``python -m tests.benchmarks quantised``.
"""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import peftlab
from peftlab.models.config import BaseConfig
from peftlab.models.load import load_base, storage
from peftlab.models.quantised import is_quantised
from tests.benchmarks.bench_lora import interleaved
from tests.benchmarks.figures import Figure
from tests.packages import SMOLLM2

TOKENS, REPEATS = 512, 5
NF4, DOUBLE, INT8 = (BaseConfig(dtype="nf4"), BaseConfig(dtype="nf4", double_quant=True), BaseConfig(dtype="int8"))
TITLE = "Bases in 8 and 4 bits"
CONDITIONS = (
    f"SmolLM2-135M, LoRA r=16 on all linear maps, one step of {TOKENS} tokens without the LM head's loss; memory is that of "
    "the linear maps; `train.precision=bf16`."
)
BASES = {"plain": None, "nf4": NF4, "nf4, double_quant": DOUBLE, "int8": INT8}


def model_of(place: str, base: BaseConfig | None, precision: str) -> Any:
    """Return SmolLM2 with LoRA beside a base stored so, in training mode."""
    chosen = base or BaseConfig.model_validate({"dtype": precision})
    model, _ = load_base(place, "AutoModelForCausalLM", **storage(chosen, precision))
    torch.manual_seed(0)
    return peftlab.inject_lora(model, r=16, lora_alpha=32, target_modules="all-linear").train()


def linear_bytes(model: nn.Module) -> int:
    """Return the bytes that the frozen linear maps but for the LM head are stored in, scales included."""
    found = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("lm_head"):
            found += module.weight.nbytes + sum(scales.nbytes for scales in scales_of(module))
    return found


def scales_of(module: Any) -> list[torch.Tensor]:
    """Return what a linear map in 8 or 4 bits stores beside its codes."""
    if not is_quantised(module):
        return []
    state = getattr(module.weight, "quant_state", None)
    if state is None:
        return [module.state.SCB if module.weight.SCB is None else module.weight.SCB]
    return [state.absmax, *([state.state2.absmax] if state.nested else [])]


def step(model: Any, precision: str, ids: torch.Tensor) -> Callable[[], None]:
    """Return a function that takes the gradients of one batch."""

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        hidden.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    return run


def main() -> list[Figure]:
    """Print the table and return the ratios of bases beside one in bf16."""
    figures = []
    print(f"SmolLM2-135M, LoRA r=16 all-linear, {TOKENS} tokens, without the LM head's loss\n")
    print(
        "| train.precision | base | bytes of the linear maps, MB | share of bf16's | step, ms | times the plain step |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    ids = torch.randint(100, 40000, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with TemporaryDirectory() as place:
        load_base(SMOLLM2, "AutoModelForCausalLM")[0].save_pretrained(place)
        every = {p: {name: model_of(place, base, p) for name, base in BASES.items()} for p in ("fp32", "bf16")}
    for precision, models in every.items():
        half = linear_bytes(models["plain"]) / (2 if precision == "fp32" else 1)
        seconds = interleaved({name: step(model, precision, ids) for name, model in models.items()}, REPEATS)
        for name, model in models.items():
            size = linear_bytes(model)
            print(
                f"| {precision} | {name if name != 'plain' else precision} | {size / 1e6:.0f} | {size / half:.3f} | "
                f"{1e3 * seconds[name]:.0f} | {seconds[name] / seconds['plain']:.2f} |",
                flush=True,
            )
            if precision == "bf16" and name != "plain":
                stored, *double = name.split(", ")
                work, peer = ", ".join([f"a training step, {stored} base", *double]), "the base in bf16"
                figures.append(Figure(work, peer, size / half, "memory"))
                figures.append(Figure(work, peer, seconds[name] / seconds["plain"], "time"))
    return figures


if __name__ == "__main__":
    main()
