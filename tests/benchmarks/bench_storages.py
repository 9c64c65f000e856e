"""The linear maps of a decoder by how its weights are stored: the products a step of 1, 4 and 8 tokens takes.

Run alone on the machine: ``OMP_NUM_THREADS=1 python -m tests.benchmarks storages``. The maps are those of SmolLM2-135M
in 12 of its layers, 42 million weights, which no cache holds. What is timed depends on the form of the blocks, not on
the values. The weights are packed as ``build_engine`` packs them, and take turns with fp32 weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from peftlab.checkpoints.quantised import int8_values, nf4_values
from peftlab.decoding.packed import Linear, Products
from tests.benchmarks.figures import Figure

TITLE = "Linear maps by how weights are stored"
CONDITIONS = "The maps of 12 of SmolLM2-135M's layers (42 million weights); CPU time of a step over one token."
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS, REPEATS, ROWS = 12, 7, (1, 2, 4, 8)


def blocks(size: int, least: int, most: int, minima: bool, shape: tuple[int, int]) -> Tensor:
    """Return a weight in blocks, with codes between two numbers."""
    groups = shape[1] // size
    codes = torch.randint(least, most + 1, (shape[0], groups, size)).float()
    codes[..., 0], codes[..., 1] = least, most
    scales = (torch.rand(shape[0], groups, 1) * 0.02 + 0.01).half().float()
    return (codes * scales + (-torch.rand(shape[0], groups, 1).half().float() if minima else 0)).flatten(1)


STORAGES: dict[str, Callable[[tuple[int, int]], Tensor]] = {
    "fp32": torch.randn,
    "fp32, rounded to bf16": lambda shape: torch.randn(shape).bfloat16(),
    "bf16": lambda shape: torch.randn(shape).bfloat16().float(),
    "nf4, computed in fp32": lambda shape: nf4_values(torch.randn(shape), double=False, dtype=torch.float32),
    "nf4, computed in bf16": lambda shape: nf4_values(
        torch.randn(shape), double=False, dtype=torch.bfloat16
    ).bfloat16(),
    "int8": lambda shape: int8_values(torch.randn(shape), dtype=torch.float32),
    "Q4_0, Q5_0, Q8_0, IQ4_NL, IQ4_XS": lambda shape: blocks(32, -127, 127, False, shape),
    "Q4_1, Q5_1, Q4_K, Q5_K": lambda shape: blocks(32, 0, 15, True, shape),
    "Q3_K, Q6_K": lambda shape: blocks(16, -32, 31, False, shape),
}


def packed(make: Callable[[tuple[int, int]], Tensor]) -> tuple[Callable[[int], None], str]:
    """Return what multiplies n tokens by all maps, and how the weights are stored."""
    torch.manual_seed(0)
    products = Products(pack=True)
    weights = {shape: make(shape) for shape in SHAPES}
    maps = [(shape, products.product([Linear(weights[shape].clone())])[0]) for _ in range(LAYERS) for shape in SHAPES]
    dtype = weights[SHAPES[0]].dtype
    x = {(n, shape[1]): torch.randn(1, n, shape[1]).to(dtype) for n in ROWS for shape in SHAPES}

    def step(n: int) -> None:
        for shape, multiply in maps:
            multiply(x[n, shape[1]])

    return step, ", ".join(products.stored)


def seconds(step: Callable[[int], None], n: int) -> float:
    """Return how long a pass takes: of the thread, which may wait for a core."""
    began = time.thread_time()
    step(n)
    return time.thread_time() - began


def main() -> list[Figure]:
    """Print medians, and beside each the time of fp32 weights, taken in turn with it; return those of one token."""
    figures = []
    plain, _ = packed(STORAGES["fp32"])
    print(f"| weights | kept as | {' | '.join(f'{n} tokens: ms, of fp32' for n in ROWS)} |")
    print("| --- | --- |" + " --- |" * len(ROWS))
    with torch.inference_mode():
        for name, make in STORAGES.items():
            step, kept = packed(make)
            cells = []
            for n in ROWS:
                pairs = [(seconds(plain, n), seconds(step, n)) for _ in range(REPEATS)]
                own = statistics.median(taken for _, taken in pairs)
                share = statistics.median(taken / fp32 for fp32, taken in pairs)
                cells.append(f"{1e3 * own:.1f}, {share:.2f}")
                if n == 1 and not name.startswith("fp32"):
                    figures.append(Figure(f"products by {name}", "weights in fp32", share, "time"))
            print(f"| {name} | {kept} | {' | '.join(cells)} |", flush=True)
            del step
    return figures


if __name__ == "__main__":
    main()
