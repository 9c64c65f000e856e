"""peft's ``LoraConfig`` as an object: its fields in our terms. peft itself is not imported."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

from pydantic import ValidationError

from peftlab.errors import PeftlabError
from peftlab.methods.lora.config import LoraConfig

# Fields of peft's that do not change what is computed, or that are not needed here.
IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ephemeral_gpu_offload", "eva_config",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "loftq_config", "lora_ga_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")  # task types whose head peft trains
_STARTS = ("True", "gaussian", "pissa", "olora")


def from_peft(theirs: Any) -> LoraConfig:
    """Return the configuration that an instance of peft's ``LoraConfig`` describes.

    The task head trains if the task type says so: SEQ_CLS, TOKEN_CLS or QUESTION_ANS.

    Raises:
        PeftlabError: a field is set that is not supported, or has a value that is out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(theirs)}
    known = set(LoraConfig.model_fields) - {"name", "train_head", "loraplus_lr_ratio"}
    for name in fields.keys() - known - IGNORED:
        if getattr(theirs, name) != _default(fields[name]):
            raise PeftlabError(f"peft.LoraConfig: {name}={_plain(getattr(theirs, name))!r} is not supported")
    start = theirs.init_lora_weights
    if str(start) not in _STARTS:
        raise PeftlabError(
            f"peft.LoraConfig: init_lora_weights={start!r} is not computed here; one of {', '.join(_STARTS)}"
        )
    values = {name: _plain(getattr(theirs, name)) for name in fields.keys() & known}
    absent = {name for name, value in values.items() if value is None or value == []}
    try:
        return LoraConfig.model_validate(
            {name: value for name, value in values.items() if name not in absent}
            | {"train_head": _plain(theirs.task_type) in _HEADS}
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise PeftlabError(f"peft.LoraConfig: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _plain(value: Any) -> Any:
    """Return a set as a sorted list, and a member of an enumeration as its value."""
    if isinstance(value, (set, tuple)):
        return sorted(value)
    return value.value if isinstance(value, Enum) else value
