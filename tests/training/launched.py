"""Run as a program by two processes or by ``accelerate launch``: run the recipes named by the arguments, one after the other.

``resume:FILE`` resumes the run that an earlier recipe of the same run directory began. With ``ACCELERATE_USE_FSDP``
in the environment the model is sharded by FSDP2. accelerate does that on accelerators only; here CPUs stand in.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from peftlab.pipelines.recipes import run_recipe
from peftlab.recipe.load import load_recipe
from peftlab.tasks.problem import Scores, TrainingProblem

_start = AcceleratorState.__init__
_evaluate = TrainingProblem.evaluate


def _sharding(self: AcceleratorState, *arguments: Any, **options: Any) -> None:
    _start(self, *arguments, **options)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
    if "fsdp_plugin" in options:
        self.fsdp_plugin = options["fsdp_plugin"]


def _checking(self: TrainingProblem, model: torch.nn.Module) -> Scores:
    frozen = {parameter.requires_grad for parameter in model.parameters() if isinstance(parameter, DTensor)}
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert frozen and not whole, f"not sharded: {whole}"
    return _evaluate(self, model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        AcceleratorState.__init__ = _sharding
        TrainingProblem.evaluate = _checking  # type: ignore[method-assign]
    for argument in sys.argv[1:]:
        file = argument.removeprefix("resume:")
        run_recipe(load_recipe(file, []), resume=file != argument)
