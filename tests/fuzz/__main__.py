"""``python -m tests.fuzz --inputs 2000 --seed 0``: the whole campaign; ``--case N``: one input of it again."""

from __future__ import annotations

import argparse
import random
import sys

import torch

from tests.fuzz.campaign import run


def main() -> int:
    """Run the campaign that the arguments name; 1 if any input was at fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=2000, help="how many inputs")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one")
    parser.add_argument("--processes", type=int, default=None, help="as processes of their own; default: one in 20")
    parser.add_argument("--case", type=int, action="append", help="only the input of this number")
    parser.add_argument("--keep", action="store_true", help="leave the files of inputs at fault in place")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    count = options.inputs // 20 if options.processes is None else options.processes
    chosen = random.Random(seed).sample(range(options.inputs), min(count, options.inputs))
    numbers = options.case or range(options.inputs)
    summary = run(seed, numbers, processes=frozenset() if options.case else frozenset(chosen), keep=options.keep)
    print(summary)
    return 1 if summary.faults else 0


sys.exit(main())
