"""How weights are stored: the dtypes that a user can name, and linear maps that bitsandbytes keeps in 4 or 8 bits.

bitsandbytes packs two 4-bit codes into a byte, so that a weight's own shape says nothing; a map's shape is that of
the module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json, typed_value
from peftlab.models.architectures import conv1d
from peftlab.untyped import Attributes, Function, KnownModel, Unwrapped

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STORED = {**DTYPES, "fp8": torch.float8_e4m3fn}
_LONG_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


def compute_dtype(precision: str) -> torch.dtype:
    """Return the dtype of activations at a ``train.precision``: TF32 is a way to multiply fp32."""
    return DTYPES.get(precision, torch.float32)


def torch_dtype(name: str, option: str = "dtype") -> torch.dtype:
    """Return the dtype that ``fp32``, ``bf16`` or ``fp16`` names.

    Args:
        option: what the user set, for the error message.

    Raises:
        PeftlabError: any other name; torch's own names are answered with ours.
    """
    return _named(name, option, DTYPES)


def stored_dtype(name: str, option: str = "dtype") -> torch.dtype:
    """Return the dtype that weights on disk are asked to have: as ``torch_dtype``, or ``fp8`` (e4m3).

    Args:
        name: what the user set. option: the key or option that it was set by, for the message.
    """
    return _named(name, option, STORED)


def _named(name: str, option: str, known: dict[str, torch.dtype]) -> torch.dtype:
    if name in known:
        return known[name]
    hint = f"; write {_LONG_NAMES[name]}" if name in _LONG_NAMES else did_you_mean(name, known)
    raise PeftlabError(f"{option} {name}: one of {', '.join(known)}{hint}")


def is_quantised(module: nn.Module) -> bool:
    """Whether ``module`` is a linear map whose weight is stored in 4 or 8 bits by bitsandbytes."""
    weight = module._parameters.get("weight")
    return isinstance(module, nn.Linear) and weight is not None and is_coded(weight)


def quantised_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear maps that are stored in 4 or 8 bits, by name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_quantised(module):
            yield name, module


def is_coded(weight: Tensor) -> bool:
    """Whether a parameter is bitsandbytes' codes of 4 or 8 bits, in whatever dtype it stores them."""
    kind = type(weight).__name__  # told by name: a model without such weights needs no bitsandbytes
    return kind == "Params4bit" or (kind == "Int8Params" and weight.dtype == torch.int8)


def weight_shape(module: nn.Module, name: str = "weight") -> torch.Size:
    """Return the shape of a module's weight: (out, in) of a linear map in 4 or 8 bits, however it is packed.

    Args:
        module: a leaf. name: of its parameter.
    """
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
    """Return the values of a weight in 4 or 8 bits, (out, in), rounded once to ``dtype``.

    Args:
        module: a linear map of bitsandbytes. dtype: of the result.
    """
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
def unquantised_inputs(maps: Sequence[nn.Module]) -> Iterator[None]:
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

    Args:
        model: in fp32, 16 bits or mixed. how: bits, and the modules to leave.
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


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class BaseFormat:
    """The quantisation that bitsandbytes made of a base model when it was loaded.

    Attributes:
        dtype: ``nf4``, ``int8``, or what else bitsandbytes can do (``fp4``).
        double_quant: the blocks' magnitudes are quantised, too.
        block: weights that share a magnitude; 0 for int8, where a row shares one.
        compute: dtype that they are dequantised to in the forward pass: fp32, bf16 or fp16.
        left: the linear modules that were not quantised, as the LM head.
        first, digest: the first module that was, and a digest of its codes, to recognise them when they are computed
            again; the digest is empty where they are packed in another order.
    """

    dtype: str
    double_quant: bool
    block: int
    compute: str
    left: tuple[str, ...]
    first: str
    digest: str

    def to_dict(self) -> dict[str, Json]:
        """Return the attributes as JSON has them."""
        return {**asdict(self), "left": list(self.left)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Json], source: str) -> BaseFormat:
        """Return the format that ``to_dict`` gave; ``source`` is named in the error for anything else."""
        left = typed_value(values, "left", list, source)
        compute = typed_value(values, "compute", str, source)
        if compute not in DTYPES or not all(isinstance(name, str) for name in left):
            raise PeftlabError(f"{source}: the base's format is damaged: compute {compute!r}, left {left!r}")
        return cls(
            dtype=typed_value(values, "dtype", str, source),
            double_quant=typed_value(values, "double_quant", bool, source),
            block=typed_value(values, "block", int, source),
            compute=compute,
            left=tuple(str(name) for name in left),
            first=typed_value(values, "first", str, source),
            digest=typed_value(values, "digest", str, source),
        )

    def __str__(self) -> str:
        return f"{self.dtype}{' with double quantisation' if self.double_quant else ''}"


def base_format(model: nn.Module) -> BaseFormat | None:
    """Return the format of a live model's linear maps; None where bitsandbytes stores none of them.

    It is the first quantised map's: all have the same.
    """
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    coded = {name: module for name, module in linears.items() if is_quantised(module)}
    if not coded:
        return None
    name, found = next(iter(coded.items()))
    first: Unwrapped = found
    left, codes = tuple(name for name in linears if name not in coded), first.weight.data
    if type(first.weight).__name__ == "Int8Params":
        # That of the activations, which what is not quantised is loaded in.
        compute = getattr(getattr(model, "config", None), "dtype", None) or torch.float32
        return BaseFormat("int8", False, 0, _NAMES[compute], left, name, digest([codes]))
    state = first.weight.quant_state
    compute = first.compute_dtype or state.dtype
    codes_digest = "" if getattr(state, "packing_format_for_cpu", False) else digest([codes])
    return BaseFormat(state.quant_type, state.nested, state.blocksize, _NAMES[compute], left, name, codes_digest)


def digest(parts: Iterable[Tensor]) -> str:
    """Return what recognises codes, given part by part in order."""
    found = blake2b(digest_size=16)
    for part in parts:
        found.update(part.detach().cpu().contiguous().view(torch.uint8).view(-1).numpy().data)
    return found.hexdigest()


def is_linear(module: nn.Module) -> bool:
    """Whether bitsandbytes can quantise a module in place of its own: a linear map, or GPT-2's transposed one."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module's weight is (in, out)."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
