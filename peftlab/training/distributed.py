"""Training over several processes: the accelerator, FSDP2's sharded parameters, DeepSpeed's ZeRO 1 and 2.

FSDP2 shards parameters over the processes as DTensors; ``full_tensors``, ``shard_like`` and ``shard_state`` convert to
and from plain tensors. They change nothing on plain tensors, and every process must call them.

ZeRO 1 and 2 partition optimiser state and gradients; parameters stay whole. DeepSpeed steps the optimiser inside
``accelerator.backward`` and keeps no gradient afterwards. Nothing here imports DeepSpeed, which is optional.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    compare_versions,
    gather_object,
    is_deepspeed_available,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from peftlab.environment import resolve_device
from peftlab.errors import PeftlabError
from peftlab.methods.inject import injection_of
from peftlab.training.config import TrainConfig

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer
    from torch.optim.optimizer import StateDict

ModelT = TypeVar("ModelT", bound=nn.Module)
NestedT = TypeVar("NestedT")

OLDEST = "0.18"  # DeepSpeed before this ignores ``torch_autocast``


def check_trackers(names: list[str]) -> None:
    """Raise ``PeftlabError`` for a tracker whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise PeftlabError(f"train.trackers: {name} is not installed; pip install 'peftlab[{name}]'")


def make_accelerator(settings: TrainConfig, run_dir: Path, device: str) -> Accelerator:
    """Return accelerate's handle on devices and processes, as the ``train`` section wants it.

    Args:
        settings: the recipe's ``train`` section.
        run_dir: gets the trackers' files.
        device: as ``environment.resolve_device`` takes it; ``auto`` leaves the choice to accelerate's configuration.

    Raises:
        PeftlabError: there is no such device, it does not support ``settings.precision``, accelerate's configuration
            asks for another device or for FSDP 1, or ``zero_plugin`` rejects its DeepSpeed section.
    """
    on_cpu = resolve_device(device).type == "cpu"
    torch.set_float32_matmul_precision("high" if settings.precision == "tf32" else "highest")
    _reset_accelerate()
    zero = zero_plugin(settings)
    autocast = settings.precision in ("bf16", "fp16") and zero is None  # DeepSpeed applies its own autocast
    try:
        accelerator = Accelerator(
            # Without cpu=True, processes without a GPU do not form a group; with it, accelerate ignores DeepSpeed,
            # so there the backend has to be named instead.
            cpu=on_cpu and zero is None,
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if on_cpu and zero is not None else None,
            deepspeed_plugin=zero,
            mixed_precision=settings.precision if autocast else "no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=settings.gradient_accumulation_steps, sync_with_dataloader=False
            ),
            log_with=list(settings.trackers) or None,
            project_dir=run_dir,
        )
    except ValueError as error:
        raise PeftlabError(f"train.precision={settings.precision}: {error}") from None
    _check_device(device, accelerator)
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise PeftlabError("accelerate's configuration asks for FSDP 1; set fsdp_version: 2 in it")
    return accelerator


def accelerator_on(device: str) -> Accelerator:
    """Return accelerate's handle on a device and on the processes, for a model that is not trained.

    Raises:
        PeftlabError: there is no such device, or accelerate's configuration asks for another one.
    """
    _reset_accelerate()
    accelerator = Accelerator(cpu=resolve_device(device).type == "cpu")
    _check_device(device, accelerator)
    return accelerator


def _check_device(device: str, accelerator: Accelerator) -> None:
    if device not in ("auto", accelerator.device.type):
        raise PeftlabError(f"device {device}: accelerate's configuration asks for {accelerator.device.type}")


def _reset_accelerate() -> None:
    """Let the next ``Accelerator`` of this process choose device, precision and plugins afresh.

    A process group stays, and with it the devices of its processes.

    accelerate fixes them for the whole process at the first ``Accelerator`` and has no public way to change them
    (1.15); transformers' ``TrainingArguments`` calls the same function for a second training in one process.
    """
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    AcceleratorState._reset_state(reset_partial_state=not grouped)


class AsTrained(nn.Module):
    """Runs ``module`` on the device and in the precision of training, before accelerate wraps it.

    So a comparison with the model at the start sees no difference of precision.
    """

    def __init__(self, module: nn.Module, accelerator: Accelerator, precision: str) -> None:
        super().__init__()
        nn.Module.to(module, accelerator.device)  # transformers' own refuses weights in 8 bits
        self.module = module
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self.autocast = partial(torch.autocast, accelerator.device.type, dtype, enabled=dtype is not None)

    def forward(self, *inputs: object, **named: object) -> object:
        """Return the module's output, computed under autocast where training uses it."""
        with self.autocast():
            return self.module(*inputs, **named)


def full_tensors(values: NestedT) -> NestedT:
    """Return nested ``values`` with every sharded tensor gathered, detached, on the CPU."""

    def gather(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()

    return tree_map_only(Tensor, gather, values)


def shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a whole ``value`` sharded as ``parameter`` is; one of another shape is returned unchanged.

    Args:
        parameter: plain or sharded.
        value: whole, in every process.
    """
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def shard_state(optimiser: torch.optim.Optimizer, state: StateDict) -> StateDict:
    """Return an optimiser's whole ``state_dict`` with each parameter's tensors sharded as the parameter is.

    Args:
        optimiser: the one that is to load the state.
        state: a ``state_dict`` of whole tensors.
    """
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    return {
        **state,
        "state": {
            index: {
                key: shard_like(parameters[index], value) if isinstance(value, Tensor) else value
                for key, value in values.items()
            }
            for index, values in state["state"].items()
        },
    }


def adapter_template(model: ModelT) -> ModelT:
    """Return a copy of an injected model with empty trainable parameters, and frozen ones on the meta device.

    FSDP2 changes a model for good, its class included; the copy made before receives the trained adapter.
    """
    memo: dict[int, object] = {id(tensor): tensor for tensor in injection_of(model).originals.values()}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="cpu" if parameter.requires_grad else "meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def zero_plugin(settings: TrainConfig) -> DeepSpeedPlugin | None:
    """Return DeepSpeed's configuration if accelerate's configuration asks for DeepSpeed, else None.

    Batch size, accumulation, clipping and precision are the recipe's and override the configuration's.

    Raises:
        PeftlabError: a ZeRO stage other than 1 and 2, offloading, an optimiser or scheduler in DeepSpeed's
            configuration, fp16, ``train.compile``, or DeepSpeed is not installed.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None
    reason = "accelerate's configuration asks for DeepSpeed"
    if not is_deepspeed_available() or compare_versions("deepspeed", "<", OLDEST):
        raise PeftlabError(f"{reason}: install it, {OLDEST} or newer (`pip install 'peftlab[deepspeed]'`)")
    plugin = DeepSpeedPlugin()
    config = plugin.deepspeed_config
    if plugin.zero_stage == 3:
        raise PeftlabError(f"{reason}'s ZeRO 3, which shards the parameters; for that use FSDP with fsdp_version: 2")
    if plugin.zero_stage not in (1, 2):
        raise PeftlabError(f"{reason}'s ZeRO {plugin.zero_stage}; set zero_stage to 1 or 2")
    if plugin.offload_optimizer_device not in (None, "none"):
        raise PeftlabError(f"{reason} with offload_optimizer_device, which replaces the optimiser; set it to none")
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise PeftlabError(f"{reason} with its own {key}; remove it: the recipe decides")
    if settings.precision == "fp16":
        raise PeftlabError("train.precision=fp16 is not supported with DeepSpeed; use bf16 or fp32")
    if settings.compile:
        raise PeftlabError("train.compile is not supported with DeepSpeed; set it to false")
    steps = settings.gradient_accumulation_steps
    config.update(
        {
            # DeepSpeed only checks that these agree: the loop splits the batches.
            "train_micro_batch_size_per_gpu": 1,
            "train_batch_size": steps * int(os.environ.get("WORLD_SIZE", "1")),
            "gradient_accumulation_steps": steps,
            "gradient_clipping": settings.max_grad_norm or 0.0,
            # DeepSpeed's own bf16 rounds frozen weights for good; autocast keeps parameters and gradients in fp32.
            "bf16": {"enabled": False},
            "fp16": {"enabled": False},
            "torch_autocast": {
                "enabled": settings.precision == "bf16",
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],
            },
        }
    )
    return plugin


def optimiser_state(optimiser: AcceleratedOptimizer, accelerator: Accelerator) -> StateDict | list[StateDict]:
    """Return the optimiser's state for a checkpoint; under ZeRO a list of each process's partition.

    Every process must call it.

    Args:
        optimiser: the wrapped optimiser.
        accelerator: devices and processes.
    """
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return full_tensors(optimiser.state_dict())
    return gather_object([full_tensors(_partition(optimiser).state_dict())])


def restore_optimiser(
    optimiser: AcceleratedOptimizer, state: StateDict | list[StateDict], accelerator: Accelerator
) -> None:
    """Load what ``optimiser_state`` returned; the model's parameters must be restored before.

    Args:
        optimiser: the wrapped optimiser.
        state: what ``optimiser_state`` returned.
        accelerator: devices and processes.

    Raises:
        PeftlabError: the state was saved with ZeRO and this run is without, or the other way round.
    """
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    if zero != isinstance(state, list):
        begun, now = ("without", "with") if zero else ("with", "without")
        raise PeftlabError(f"the run was started {begun} DeepSpeed and cannot be resumed {now} it")
    if not isinstance(state, list):
        optimiser.load_state_dict(shard_state(optimiser, state))
        return
    # The optimiser steps fp32 copies: without this the next step would undo the restored parameters.
    optimiser.optimizer.refresh_fp32_params()
    _partition(optimiser).load_state_dict(state[accelerator.process_index])


def _partition(optimiser: AcceleratedOptimizer) -> torch.optim.Optimizer:
    """Return the AdamW over this process's partition: inside DeepSpeed's optimiser, inside accelerate's."""
    return optimiser.optimizer.optimizer
