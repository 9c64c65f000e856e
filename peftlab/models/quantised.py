"""Linear maps whose weights bitsandbytes stores in 4 or 8 bits: their shapes, their values, and making them.

bitsandbytes packs two 4-bit codes into a byte, so that a weight's own shape says nothing; a map's shape is that of
the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from peftlab.models.architectures import conv1d
from peftlab.untyped import Attributes, Function, KnownModel, Unwrapped

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel


def is_quantised(module: nn.Module) -> bool:
    """Whether ``module`` is a linear map whose weight is stored in 4 or 8 bits by bitsandbytes."""
    weight = module._parameters.get("weight")
    return isinstance(module, nn.Linear) and weight is not None and _coded(weight)


def quantised_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear maps that are stored in 4 or 8 bits, by name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_quantised(module):
            yield name, module


def _coded(weight: Tensor) -> bool:
    kind = type(weight).__name__  # told by name: a model without such weights needs no bitsandbytes
    return kind == "Params4bit" or (kind == "Int8Params" and weight.dtype == torch.int8)


def weight_shape(module: nn.Module, name: str = "weight") -> torch.Size:
    """Return the shape of a module's weight: (out, in) of a linear map in 4 or 8 bits, however it is packed."""
    if isinstance(module, nn.Linear) and is_quantised(module):
        return torch.Size((module.out_features, module.in_features))
    shape: torch.Size = getattr(module, name).shape
    return shape


def elements(parameter: Tensor) -> int:
    """Return how many weights a parameter holds; of 4-bit weights, not how many bytes they are packed into."""
    state = getattr(parameter, "quant_state", None)
    return int(state.shape.numel()) if state is not None else parameter.numel()


@torch.no_grad()
def dequantised(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return the values of a weight in 4 or 8 bits, (out, in), rounded once to ``dtype``."""
    weight: Unwrapped = module._parameters["weight"]
    if type(weight).__name__ == "Int8Params":
        own: Unwrapped = module
        scales = weight.SCB if weight.SCB is not None else own.state.SCB  # where the first forward pass puts them
        return weight.data.to(dtype).mul_(scales[:, None].mul(1.0 / 127.0))  # as the layer computes it in training
    from bitsandbytes.functional import dequantize_4bit

    state = copy(weight.quant_state)
    state.dtype = dtype
    return dequantize_4bit(weight.data, state)


def int8_maps(model: nn.Module) -> list[nn.Module]:
    """Return the maps of ``model`` that bitsandbytes multiplies in 8 bits."""
    return [module for _, module in quantised_linears(model) if type(module).__name__ == "Linear8bitLt"]


@contextmanager
def inputs_as_they_are(maps: Sequence[nn.Module]) -> Iterator[None]:
    """Within the block ``int8_maps`` on the CPU multiply their inputs by the weights' values, as in training.

    In evaluation bitsandbytes rounds inputs to 8 bits, but for columns with a large number in any row of the batch: the
    output of a token would depend on the tokens that are read with it.
    """
    training = [module.training for module in maps]
    for module in maps:
        module.training = True
    try:
        yield
    finally:
        for module, before in zip(maps, training, strict=True):
            module.training = before


def keep_layout(model: nn.Module) -> None:
    """Let the 4-bit weights of ``model`` keep the layout they are saved in.

    On CPUs with bf16 products bitsandbytes packs them anew at the first forward pass without a gradient, rounds their
    scales to bf16, and then computes no gradient any more: an evaluation would end the training.
    """
    for _, module in quantised_linears(model):
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        vars(module)["support_avx512bf16_for_cpu"] = False
        weight: Unwrapped = module.weight
        if getattr(weight.quant_state, "packing_format_for_cpu", False):
            from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

            scales = weight.quant_state.absmax.t().flatten().float()
            weight.data, weight.quant_state = _convert_weight_packed_for_cpu_inverse(weight.data, weight.quant_state)
            if not weight.quant_state.nested:  # which bitsandbytes (0.50) leaves transposed
                weight.quant_state.absmax = scales


def quantise(model: PreTrainedModel, how: BitsAndBytesConfig) -> None:
    """Store the linear maps of a plain model in 4 or 8 bits, in place: those that transformers would choose.

    transformers quantises while it reads a checkpoint, but not a GGUF file.
    """
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer: Unwrapped = AutoHfQuantizer.from_config(how, pre_quantized=False)
    plain: dict[str, KnownModel] = {
        name: m for name, m in model.named_modules() if type(m) is nn.Linear or isinstance(m, conv1d())
    }
    quantizer.preprocess_model(model=model, device_map={"": model.device})
    for name, linear in plain.items():
        new = model.get_submodule(name)
        if not isinstance(new, Linear4bit | Linear8bitLt):
            continue
        options: Attributes = {key: value for key, value in vars(new.weight).items() if key not in ("CB", "SCB")}
        make: Function[Unwrapped] = Params4bit if isinstance(new, Linear4bit) else Int8Params
        stored: Tensor = linear.weight.data
        values = stored if type(linear) is nn.Linear else stored.t()
        new._parameters["weight"] = make(values, **{**options, "requires_grad": False}).to(model.device)
        if linear.bias is not None:
            new._parameters["bias"] = linear.bias
        new.train(linear.training)
        del linear.weight
    quantizer.postprocess_model(model)
