"""Run as a program by ``accelerate launch``: run the recipes named by the arguments, one after the other.

With ``ACCELERATE_USE_FSDP`` in the environment the model is sharded by FSDP2. accelerate does that on
accelerators only; here CPUs are taken for such.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from peftlab.pipelines import run_recipe
from peftlab.recipe.loading import load_recipe

_start = AcceleratorState.__init__


def _sharding(self: AcceleratorState, *arguments: Any, **options: Any) -> None:
    _start(self, *arguments, **options)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
    if "fsdp_plugin" in options:
        self.fsdp_plugin = options["fsdp_plugin"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        AcceleratorState.__init__ = _sharding
    for file in sys.argv[1:]:
        run_recipe(load_recipe(file, []))
