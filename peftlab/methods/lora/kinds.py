"""Which modules LoRA can act on: linear maps, embeddings and convolutions, and their subclasses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peftlab.methods.leaf import recast
from peftlab.methods.lora.layers import LowRank, leaves, own_forward
from peftlab.methods.targets import inside
from peftlab.models.quantised import is_quantised

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def adaptable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the leaves that LoRA can act on, by name."""
    passed_over = [*never_called(model), *_called_at_times(model)]
    return {
        name: module
        for name, module in model.named_modules()
        if leaf_kind(module) is not None and not inside(name, passed_over)
    }


def never_called(model: nn.Module) -> list[str]:
    """Return the output projections of ``MultiheadAttention``: it uses their weights and never calls them."""
    return [f"{name}.out_proj".lstrip(".") for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]


def _called_at_times(model: nn.Module) -> list[str]:
    """Return attention that torch passes over where there is no gradient: it uses the weights of the whole layer."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.TransformerEncoderLayer)]
    return [f"{name}.self_attn".lstrip(".") for name in layers]


def reason_against(model: nn.Module, name: str) -> str:
    """Return why LoRA does not act on the module ``name``."""
    if inside(name, never_called(model)):
        return "attention uses its weights and never calls it; name the MultiheadAttention"
    if inside(name, _called_at_times(model)):
        return "without gradients torch's TransformerEncoderLayer uses its weights and does not call it"
    acts_on = f"LoRA acts on {', '.join(kind.__name__ for kind in leaves())} outside the task head"
    return why_not(model.get_submodule(name)) or acts_on


def leaf_kind(module: nn.Module) -> type[LowRank] | None:
    """Return the leaf that adapts ``module``, or None: it is of no class in ``leaves()``, or of a subclass that
    computes something else with its weight (``why_not``)."""
    known = leaves()
    kind = next((known[base] for base in type(module).__mro__ if base in known), None)
    return kind if kind is not None and not why_not(module) else None


def why_not(module: nn.Module) -> str:
    """Return why LoRA cannot act on an instance of a subclass of a class in ``leaves()``; "" for any other module."""
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is None:
        return "its queries, keys and values have different widths"
    own, weight = own_forward(type(module)), module._parameters.get("weight")
    if type(module) in (known := leaves()) or not isinstance(module, tuple(known)):
        return ""
    if weight is None:
        return "its weight is computed of other parameters"
    if is_quantised(module):
        return ""
    if weight.dtype not in _SUMMABLE:
        return f"its weight is stored as {str(weight.dtype).removeprefix('torch.')}"
    if own and isinstance(module, CONVOLUTIONS):
        return "its forward is not that of a plain convolution"
    if any(name in vars(module) for name in LowRank.added):
        return "it has attributes that are called as LoRA's"
    if own and (module._modules or module._parameters.keys() - {"weight", "bias"}):
        return "its forward uses other parameters too"
    if own and isinstance(module, nn.Linear) and not _maps_rows(module):
        return "its forward returns something other than W·x"
    return ""


def _maps_rows(module: nn.Linear) -> bool:
    """Whether the module's forward returns (..., out) of (..., in), by shapes alone."""
    empty = recast(type(module), module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            empty._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    try:
        y = empty.forward(torch.empty(2, module.in_features, dtype=module.weight.dtype, device="meta"))
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return isinstance(y, Tensor) and y.shape == (2, module.out_features)
