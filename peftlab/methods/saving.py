"""What ``save_pretrained`` of an injected model writes: its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from os import PathLike
from typing import Any

from torch import Tensor, nn

from peftlab.errors import PeftlabError

# Named, not imported: what writes files builds on the methods.
WRITER = "peftlab.checkpoints.adapter:save_adapter"
_NAME = "save_pretrained"
# What transformers passes that says nothing about an adapter's one small file.
_NO_MATTER = {"max_shard_size", "safe_serialization", "save_original_format", "save_peft_format", "token"}


class SavePretrained:
    """``save_pretrained`` of one injected model, an attribute of the instance.

    transformers' own would write W0 beside the adapter's parameters, and ``from_pretrained`` would read the base
    model of it without a word. A copy or a pickle of the model has one of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(
        self,
        save_directory: str | PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Write the adapter directory, as ``peftlab.save_adapter`` does.

        Args:
            is_main_process: False writes nothing.
            state_dict: values to write in place of the model's own, as a Trainer gathers them from many processes.
            options: transformers' others; those that would change what is written are refused.

        Raises:
            PeftlabError: as ``save_adapter``; or an option is one that an adapter directory does not have.
        """
        refused = next((key for key, value in options.items() if value and key not in _NO_MATTER), None)
        if refused:
            raise PeftlabError(
                f"save_pretrained: this model holds an adapter, which is written without {refused}; "
                "peftlab.merge(model) makes it a plain model first"
            )
        if is_main_process:
            module, _, function = WRITER.partition(":")
            getattr(import_module(module), function)(self.model, save_directory, state_dict=state_dict)

    def __reduce__(self) -> tuple[type[SavePretrained], tuple[nn.Module]]:
        return SavePretrained, (self.model,)


def save_adapters(model: nn.Module) -> None:
    """Let ``model.save_pretrained`` write the adapter, where the model has such a method."""
    if hasattr(type(model), _NAME):
        setattr(model, _NAME, SavePretrained(model))


def save_models(model: nn.Module) -> None:
    """Let ``model.save_pretrained`` write the whole model, as its class does."""
    vars(model).pop(_NAME, None)
