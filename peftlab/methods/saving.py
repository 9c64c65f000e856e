"""What ``save_pretrained`` of an injected model writes: its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

from torch import Tensor, nn

from peftlab.errors import PeftlabError
from peftlab.registry import resolve

# A name, resolved at the call: checkpoints/ imports methods/. This is the one place that names a package above its own.
_WRITER = "peftlab.checkpoints.adapter:save_adapter"
_NAME = "save_pretrained"
# Options of transformers' that make no difference for an adapter's one small file.
_IGNORED = {"max_shard_size", "safe_serialization", "save_original_format", "save_peft_format", "token"}


class SavePretrained:
    """``save_pretrained`` of one injected model, an attribute of the instance.

    The method of the model's class would write W0 beside the adapter's parameters, and ``from_pretrained`` would load
    the base model from that without a warning. A copy or a pickle of the model has its own ``SavePretrained``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(
        self,
        save_directory: str | PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **options: object,
    ) -> None:
        """Write the adapter directory, as ``peftlab.save_adapter`` does.

        Args:
            is_main_process: False writes nothing.
            state_dict: values to write in place of the model's own, as a Trainer gathers them from many processes.
            options: transformers' other options; those that would change what is written are refused.

        Raises:
            PeftlabError: as ``save_adapter``; or an option that an adapter directory cannot honour.
        """
        refused = next((key for key, value in options.items() if value and key not in _IGNORED), None)
        if refused:
            raise PeftlabError(
                f"save_pretrained: this model contains an adapter, which is written without {refused}; "
                "peftlab.merge(model) makes it a plain model first"
            )
        if is_main_process:
            resolve(_WRITER)(self.model, save_directory, state_dict=state_dict)

    def __reduce__(self) -> tuple[type[SavePretrained], tuple[nn.Module]]:
        return SavePretrained, (self.model,)


def save_adapters(model: nn.Module) -> None:
    """Let ``model.save_pretrained`` write the adapter, where the model has such a method."""
    if hasattr(type(model), _NAME):
        setattr(model, _NAME, SavePretrained(model))


def save_models(model: nn.Module) -> None:
    """Let ``model.save_pretrained`` write the whole model, as its class does."""
    vars(model).pop(_NAME, None)
