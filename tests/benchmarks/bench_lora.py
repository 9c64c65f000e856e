"""The LoRA step beside peft's: bytes kept for backward, seconds a step. MiniLM-L6, r=8 on all linear maps.

Run alone on the machine: ``python -m tests.benchmarks lora``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import Tensor, nn

import peftlab
from peftlab.models.load import load_base
from tests.benchmarks.figures import Figure
from tests.packages import MINILM

BATCH, LENGTH, REPEATS = 16, 128, 25
TITLE = "A training step with LoRA"
CONDITIONS = (
    f"MiniLM-L6, LoRA r=8 on all linear maps, batch {BATCH} of {LENGTH} tokens; forward, backward and AdamW; memory is what "
    "is kept for backward. Training the biases alone bounds what any method needs."
)


def load() -> nn.Module:
    """Return MiniLM with a head of two classes, in training mode but without its own dropout."""
    torch.manual_seed(0)
    model, _ = load_base(MINILM, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return model.train()


def contestants(dropout: float) -> dict[str, nn.Module]:
    """Return the model with our LoRA, with peft's, and with its biases alone trained (the lower bound)."""
    ours = peftlab.inject_lora(load(), r=8, lora_alpha=16, lora_dropout=dropout, target_modules="all-linear")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, lora_dropout=dropout, target_modules="all-linear")
    theirs: Any = peft.get_peft_model(load(), config)
    return {"peftlab": ours, "peft": theirs, "biases only": peftlab.inject_bitfit(load())}


def batch() -> dict[str, Tensor]:
    """Return token ids without padding, and labels."""
    ids = torch.randint(1000, 20000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(BATCH) % 2}


def bytes_saved(model: nn.Module) -> tuple[int, int]:
    """Return the bytes that a forward pass keeps for backward: each storage once, and each hand-over counted.

    (Query, key and value are handed the same input: one storage, three hand-overs.)
    """
    storages: dict[int, int] = {}
    handed = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal handed
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        handed += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**batch())
    return sum(storages.values()), handed


def interleaved(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each step, the contestants taking turns."""
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            spent[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in spent.items()}


def stepper(model: nn.Module) -> Callable[[], None]:
    """Return one training step (forward, backward, AdamW) on ``model``."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    inputs = batch()

    def step() -> None:
        model(**inputs).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def injection_seconds(maps: int = 10_000) -> tuple[float, float]:
    """Return the seconds to inject LoRA into that number of linear layers, and to allocate its factors."""
    net = nn.ModuleList(nn.Linear(16, 16) for _ in range(maps))
    started = time.perf_counter()
    kept = [(torch.empty(8, 16), torch.zeros(16, 8)) for _ in range(maps)]
    allocated = time.perf_counter() - started
    del kept
    started = time.perf_counter()
    peftlab.inject_lora(net, r=8, target_modules="all-linear")
    return time.perf_counter() - started, allocated


def main() -> list[Figure]:
    """Print the table and return the ratios."""
    figures = []
    print("10,000 linear maps: injected in {:.2f} s, {:.2f} s of it allocation\n".format(*injection_seconds()))
    print(
        f"MiniLM-L6, LoRA r=8 on all linear maps, batch {BATCH}, length {LENGTH}, {torch.get_num_threads()} threads\n"
    )
    print(
        "| lora_dropout | | MB kept | of peft's | MB handed over | of peft's | ms a step | of peft's | of biases only |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for dropout in (0.0, 0.1):
        models = contestants(dropout)
        kept = {name: bytes_saved(model) for name, model in models.items()}
        seconds = interleaved({name: stepper(model) for name, model in models.items()}, REPEATS)
        for name in models:
            print(
                f"| {dropout} | {name} | {kept[name][0] / 1e6:.1f} | {kept[name][0] / kept['peft'][0]:.3f} "
                f"| {kept[name][1] / 1e6:.1f} | {kept[name][1] / kept['peft'][1]:.3f} "
                f"| {1e3 * seconds[name]:.0f} | {seconds[name] / seconds['peft']:.3f} "
                f"| {seconds[name] / seconds['biases only']:.3f} |"
            )
        work = f"a training step, dropout {dropout}" if dropout else "a training step"
        figures += [
            Figure(work, "peft", seconds["peft"] / seconds["peftlab"]),
            Figure(work, "peft", kept["peftlab"][0] / kept["peft"][0], "memory"),
            Figure(work, "biases alone", seconds["peftlab"] / seconds["biases only"], "time"),
        ]
    return figures


if __name__ == "__main__":
    main()
