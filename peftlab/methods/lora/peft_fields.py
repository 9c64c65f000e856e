"""peft's ``LoraConfig`` as an object: its fields in our terms. peft itself is not imported."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING

from pydantic import ValidationError

from peftlab.errors import PeftlabError
from peftlab.methods.lora.config import LoraConfig

if TYPE_CHECKING:
    import peft

# Fields of peft's that do not change what is computed, or that are not needed here.
IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ephemeral_gpu_offload", "eva_config",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "loftq_config", "lora_ga_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
# Fields of adapters that no LoRA on the base as it is can express, or that need what the file does not contain.
REFUSED = {
    "alora_invocation_tokens": "aLoRA adds to the tokens from its invocation tokens on and not to those before: the "
    "update depends on the position, so that it folds into no weight, and each call needs the place of those tokens; "
    "serve it with vLLM, or train plain LoRA",
    "layer_replication": "it makes another, deeper model of the base, in which layers share weights; no config.json "
    "and no engine knows such a model. Copy the layers first (mergekit's passthrough), and train on the result",
    "kasa_config": "KaSA takes the smallest singular values out of the base's weights, so that the adapter is none of "
    "the base that it names; merge it with peft",
    "use_bdlora": "the factors of BD-LoRA are stored as blocks of their diagonals, for vLLM; convert it with peft's "
    "convert_to_lora",
    "arrow_config": "Arrow routes every token through several adapters that are not in the file",
    "use_qalora": "QA-LoRA acts on averages of the input of a GPTQ model",
    "megatron_config": "it adapts layers of Megatron, not of transformers",
}
_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")  # task types whose head peft trains
_STARTS = ("True", "gaussian", "pissa", "olora")


def from_peft(theirs: peft.LoraConfig) -> LoraConfig:
    """Return the configuration that an instance of peft's ``LoraConfig`` describes.

    The task head trains if the task type says so: SEQ_CLS, TOKEN_CLS or QUESTION_ANS.

    Raises:
        PeftlabError: a field is set that is not supported, or has a value that is out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(theirs)}
    known = set(LoraConfig.model_fields) - {"name", "train_head", "loraplus_lr_ratio"}
    for name in fields.keys() - known - IGNORED:
        if getattr(theirs, name) != _default(fields[name]):
            reason = f": {REFUSED[name]}" if name in REFUSED else ""
            raise PeftlabError(f"peft.LoraConfig: {name}={_plain(getattr(theirs, name))!r} is not supported{reason}")
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


def _default(field: dataclasses.Field[object]) -> object:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _plain(value: object) -> object:
    """Return a set as a sorted list, and a member of an enumeration as its value."""
    if isinstance(value, (set, tuple)):
        return sorted(value)
    return value.value if isinstance(value, Enum) else value
