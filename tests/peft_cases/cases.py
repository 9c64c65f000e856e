"""A case: a small model, its inputs, and the fields of the adapter that peft makes in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

BATCH, TOKENS, VOCABULARY = 2, 11, 96
INVOCATION = (7, 9)  # the tokens after which an activated LoRA acts


@dataclass(frozen=True)
class Case:
    """One adapter of peft.

    Attributes:
        group: the set that it is counted in. name: within its set.
        build: makes the base model, in eval mode; every call returns equal values.
        inputs: makes the arguments of its forward.
        fields: of ``peft.LoraConfig``.
        other: the name of a method other than LoRA that the fields switch on, if they do.
        prepare: what peft asks to be called on the model and the configuration before it injects.
        pickled: the file is written as ``adapter_model.bin``.
    """

    group: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Mapping[str, Any]]
    fields: Mapping[str, Any]
    other: str = ""
    prepare: Callable[[nn.Module, Any], None] | None = field(default=None)
    pickled: bool = False


def randomised(model: nn.Module, std: float = 0.2) -> nn.Module:
    """Return ``model`` in eval mode with all parameters drawn anew, so that every one of them is seen in the output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            start = 1.0 if parameter.ndim == 1 and parameter.numel() and bool((parameter == 1).all()) else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std + start)
    return model.eval()


def token_ids() -> dict[str, Any]:
    """Return a batch of token ids; both rows contain the invocation tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, VOCABULARY - 8, (BATCH, TOKENS), generator=generator)
    ids[:, 4:6] = torch.tensor(INVOCATION)
    return {"input_ids": ids}
