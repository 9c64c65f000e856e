"""Factors expert by expert, as engines read them that store each expert's matrices apart.

A model of today has all experts' weights in two tensors, (experts, 2·width, in) and (experts, in, width), and peft one
pair of factors for each. Engines whose converters know the older checkpoints want ``experts.7.gate_proj`` and the like.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

# The names by the class of the model: the module that holds the experts, there and in transformers, and the three
# matrices (gate, up, down).
_QWEN = ("mlp.experts", "mlp.experts", ("gate_proj", "up_proj", "down_proj"))
NAMES: dict[str, tuple[str, str, tuple[str, str, str]]] = {
    "Qwen2MoeForCausalLM": _QWEN,
    "Qwen3MoeForCausalLM": _QWEN,
    "OlmoeForCausalLM": _QWEN,
    "MixtralForCausalLM": ("block_sparse_moe.experts", "mlp.experts", ("w1", "w3", "w2")),
}
_ONE = re.compile(r"(?P<container>.+)\.(?P<expert>\d+)\.(?P<matrix>\w+)")


@dataclass(frozen=True)
class OneExpert:
    """What a module name of one expert's matrix means.

    Attributes:
        container: the module with all experts' weights, as transformers calls it.
        expert: the expert's number. matrix: 0 gate, 1 up, 2 down.
    """

    container: str
    expert: int
    matrix: int

    @property
    def parameter(self) -> str:
        """The parameter of the container that has the matrix."""
        return ("gate_up_proj", "gate_up_proj", "down_proj")[self.matrix]


def one_expert(architecture: str, module: str) -> OneExpert | None:
    """Return the expert and matrix that a module name of an older checkpoint means; None for any other name."""
    found = _ONE.fullmatch(module)
    if found is None or architecture not in NAMES:
        return None
    theirs, ours, matrices = NAMES[architecture]
    container = found["container"]
    if not container.endswith(f".{theirs}") or found["matrix"] not in matrices:
        return None
    return OneExpert(container.removesuffix(theirs) + ours, int(found["expert"]), matrices.index(found["matrix"]))


def by_expert(architecture: str, name: str, a: Tensor, b: Tensor, experts: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the factors of one parameter of all experts as factors of each expert's matrices, by module name.

    Args:
        name: of the parameter. a: (experts·r, in). b: (out, r·experts), in peft's order.
    """
    theirs, ours, (gate, up, down) = NAMES[architecture]
    module, _, parameter = name.rpartition(".")
    prefix = module.removesuffix(ours) + theirs
    inner, outer = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    half = b.shape[0] // 2
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for expert in range(experts):
        if parameter == "down_proj":
            found[f"{prefix}.{expert}.{down}"] = inner[expert], outer[expert]
        else:
            found[f"{prefix}.{expert}.{gate}"] = inner[expert], outer[expert, :half]
            found[f"{prefix}.{expert}.{up}"] = inner[expert], outer[expert, half:]
    return found
