"""How the weights of a base model were stored while an adapter was trained beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b

import torch
from torch import Tensor, nn

from peftlab.errors import PeftlabError
from peftlab.files import Json, member
from peftlab.models.dtypes import DTYPES
from peftlab.models.quantised import is_quantised
from peftlab.untyped import Unwrapped

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
        left = member(values, "left", list, source)
        compute = member(values, "compute", str, source)
        if compute not in DTYPES or not all(isinstance(name, str) for name in left):
            raise PeftlabError(f"{source}: the base's format is damaged: compute {compute!r}, left {left!r}")
        return cls(
            dtype=member(values, "dtype", str, source),
            double_quant=member(values, "double_quant", bool, source),
            block=member(values, "block", int, source),
            compute=compute,
            left=tuple(str(name) for name in left),
            first=member(values, "first", str, source),
            digest=member(values, "digest", str, source),
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
    said = "" if getattr(state, "packing_format_for_cpu", False) else digest([codes])
    return BaseFormat(state.quant_type, state.nested, state.blocksize, _NAMES[compute], left, name, said)


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
