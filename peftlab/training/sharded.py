"""Parameters that FSDP2 spreads over processes (DTensors), made whole and spread again.

Everything here does nothing to plain tensors, and every process must call it.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from peftlab.methods.injection import injection_of

ModelT = TypeVar("ModelT", bound=nn.Module)


def whole(values: Any) -> Any:
    """Return nested ``values`` with every tensor in one piece, detached, on the CPU."""

    def gather(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()

    return tree_map_only(Tensor, gather, values)


def spread_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a whole ``value`` spread as ``parameter`` is; one of another shape stays as it is."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def spread_state(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimiser's whole ``state_dict`` with each parameter's tensors spread as the parameter is."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    return {
        **state,
        "state": {
            index: {
                key: spread_like(parameters[index], value) if isinstance(value, Tensor) else value
                for key, value in held.items()
            }
            for index, held in state["state"].items()
        },
    }


def outline(model: ModelT) -> ModelT:
    """Return a copy of an injected model that has room for the adapter, and nothing of the frozen weights.

    Frozen parameters lie on the meta device. FSDP2 changes a model for good, its class included; the outline
    made before takes the trained adapter home.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in injection_of(model).originals.values()}
    for parameter in model.parameters():
        room = torch.empty_like(parameter, device="cpu" if parameter.requires_grad else "meta")
        memo[id(parameter)] = nn.Parameter(room, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)
