"""Bottleneck adapters (Houlsby et al. 2019, arXiv 1902.00751): y = h + W_up·f(W_down·h + b_down) + b_up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from peftlab.errors import PeftlabError
from peftlab.methods.base import (
    AnyLeaf,
    Plan,
    adapted_class,
    find,
    fully_trained,
    parameters_under,
    recast,
    sites_of,
    trainable_dtype,
)
from peftlab.methods.config import HoulsbyConfig
from peftlab.models.architectures import conv1d
from peftlab.untyped import Attributes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "leakyrelu": F.leaky_relu,
    "relu": F.relu,
    "sigmoid": F.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": F.tanh,
}


class SharedInput:
    """One activation, stored by the leaf that receives it for the leaf that needs it later in the same forward pass.

    A copy or a pickle of it is empty: its value belongs to a running forward pass.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def take(self) -> Tensor:
        """Return the stored activation and drop the reference to it."""
        value, self.value = self.value, None
        assert value is not None
        return value

    def __reduce__(self) -> tuple[type[SharedInput], tuple[()]]:
        return SharedInput, ()


class Bottleneck(AnyLeaf):
    """A leaf of any kind with a bottleneck on its output h: adapter_down (m, d), adapter_up (d, m).

    y = h + up(f(down(x))), where x is h itself; with ``parallel`` the input of the sub-layer instead, which is the
    leaf's own input or, if the leaf is not the sub-layer's first, the ``shared_input`` stored by the first.
    """

    added = ("adapter_down", "adapter_up", "non_linearity", "parallel", "shared_input")
    adapter_down: nn.Linear
    adapter_up: nn.Linear
    non_linearity: str
    parallel: bool
    shared_input: SharedInput | None

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        h: Tensor = super().forward(x, *args, **kwargs)
        if not self.enabled:
            return h
        if self.parallel:
            return h + self.branch(x if self.shared_input is None else self.shared_input.take())
        return h + self.branch(h)

    def branch(self, x: Tensor) -> Tensor:
        """Return up(f(down(x))), (..., d) to (..., d), in the dtype of x or of autocast."""
        x = ACTIVATIONS[self.non_linearity](_linear(x, self.adapter_down))  # (..., m)
        return _linear(x, self.adapter_up)


class Recorder(AnyLeaf):
    """A leaf that computes what its base does and stores its input in a ``shared_input``."""

    added = ("shared_input",)
    shared_input: SharedInput

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        if self.enabled:
            self.shared_input.value = x
        return super().forward(x, *args, **kwargs)


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


def plan(model: nn.Module, config: HoulsbyConfig) -> Plan:
    """Decide which leaves get a bottleneck and which parameters train beside it.

    Raises:
        PeftlabError: the architecture's sub-layers are not known, or ``skip_layers`` names a layer that does not
            exist or leaves none.
    """
    sites = sites_of(model)
    names = [name for name, _ in model.named_modules()]
    patterns = sites.attention + sites.ffn if config.placement == "houlsby" else sites.ffn
    ends = _kept(find(names, patterns), config.skip_layers)
    starts = {layer: name for name, layer in find(names, sites.ffn_input).items()}
    replace: dict[str, Callable[[nn.Module], nn.Module]] = {}
    for name, layer in ends.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        make = partial(_adapt, d=_width(model, name), like=next(parent.parameters()), config=config)
        if config.placement == "parallel" and starts[layer] != name:
            shared_input = SharedInput()
            replace[starts[layer]] = partial(_record, shared_input=shared_input)
            make = partial(make, shared_input=shared_input)
        replace[name] = make
    train = set(parameters_under(model, fully_trained(model, config.modules_to_save, head=config.train_head)))
    if config.train_layer_norms:
        train |= {f"{name}.{key}" for name, norm in layer_norms(model) for key, _ in norm.named_parameters()}
    return Plan(replace, [name for name, _ in model.named_parameters() if name in train])


def layer_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all LayerNorms and RMSNorms with their names; recognised by the names of their classes."""
    ends = ("LayerNorm", "RMSNorm")
    return [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith(ends)]


def _kept(ends: dict[str, str], skip: list[int] | int | None) -> dict[str, str]:
    numbers = {name: int(layer.rpartition(".")[2]) for name, layer in ends.items()}
    skipped = list(range(skip)) if isinstance(skip, int) else list(skip or [])
    missing = sorted(set(skipped) - set(numbers.values()))
    if missing:
        raise PeftlabError(f"skip_layers: no layer {missing[0]}; there are 0 to {max(numbers.values())}")
    kept = {name: layer for name, layer in ends.items() if numbers[name] not in skipped}
    if not kept:
        raise PeftlabError("skip_layers: no layer is left to adapt; method head trains the task head alone")
    return kept


def _width(model: nn.Module, name: str) -> int:
    leaf = model.get_submodule(name)
    if isinstance(leaf, nn.Linear):
        return leaf.out_features
    if isinstance(leaf, conv1d()):
        return int(getattr(leaf, "nf"))  # noqa: B009
    config: PretrainedConfig = getattr(model, "config")  # noqa: B009
    return int(config.get_text_config().hidden_size)


def _adapt(
    leaf: nn.Module, *, d: int, like: Tensor, config: HoulsbyConfig, shared_input: SharedInput | None = None
) -> nn.Module:
    new = recast(adapted_class(Bottleneck, type(leaf)), leaf)
    options: Attributes = {"device": like.device, "dtype": trainable_dtype(like)}
    m = config.width(d)
    new.adapter_down, new.adapter_up = nn.Linear(d, m, **options), nn.Linear(m, d, **options)
    # The paper draws W_up at random too. With zeros the model starts as exactly the base model, at any width and depth.
    scale = config.init_scale
    nn.init.trunc_normal_(new.adapter_down.weight, std=scale, a=-2 * scale, b=2 * scale)
    for tensor in (new.adapter_down.bias, new.adapter_up.weight, new.adapter_up.bias):
        nn.init.zeros_(tensor)
    new.non_linearity, new.parallel, new.shared_input = (
        config.non_linearity,
        config.placement == "parallel",
        shared_input,
    )
    return new


def _record(leaf: nn.Module, *, shared_input: SharedInput) -> nn.Module:
    new = recast(adapted_class(Recorder, type(leaf)), leaf)
    new.shared_input = shared_input
    return new
