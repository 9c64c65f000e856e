"""The model that an adapter was trained in, without weights: its class, labels and vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from peftlab.checkpoints.adapter import Adapter
from peftlab.checkpoints.formats.peft_renaming import new_names
from peftlab.errors import PeftlabError, did_you_mean, reason
from peftlab.files import Json, member
from peftlab.models.bounds import check_sizes
from peftlab.models.pretrained import load_config
from peftlab.models.skeleton import empty_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_ADDED = re.compile(r"\.base_layer|[._]lora_\w+$|\.token_rows$")


# peft's task_type -> the auto class that makes the model; otherwise the first class that has the adapter's modules.
_AUTO = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoModel",
}


def task_model(adapter: Adapter, base: Path, *, source: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the model the adapter was trained in, on the meta device.

    An adapter that peftlab wrote names class and configuration. For any other it is the first class that has the
    adapter's modules (the one that its task type names, or the one that the base's configuration names), with the
    numbers of labels and tokens of its tensors.

    Args:
        source: the adapter's path, for messages. trust_remote_code: run model code in ``base``.

    Raises:
        PeftlabError: the adapter is for another architecture than ``base``.
    """
    model, unknown = closest_model(adapter, base, source=source, trust_remote_code=trust_remote_code)
    if unknown:
        hint = did_you_mean(unknown[0], _names(model))
        raise PeftlabError(f"{source} does not fit {base}: {type(model).__name__} has no {unknown[0]}{hint}")
    return model


def closest_model(
    adapter: Adapter, base: Path, *, source: str, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model that lacks fewest of the adapter's modules, and what it lacks; else as ``task_model``."""
    config = load_config(str(base), trust_remote_code=trust_remote_code)
    trained = adapter.base.get("config")
    if isinstance(trained, dict) and trained:
        part = _part(config, trained.get("model_type", config.model_type))
        if part is None:
            raise PeftlabError(f"{source} was trained on {trained['model_type']!r}, {base} is {config.model_type!r}")
        config = part
        if type(config).__module__.startswith("transformers."):
            config = _config_of(trained, config, source)
        return empty_model(member(adapter.base, "architecture", str, source), config, base, trust_remote_code), []
    own, autos = (config.architectures or [])[:1], list(_AUTO.values())
    # The class of a model of images and text is the base's own, whatever task its adapter names.
    names = [_AUTO[adapter.task_type], *own] if adapter.task_type in _AUTO else own + autos
    closest: tuple[PreTrainedModel, list[str]] | None = None
    failed = ""
    for name in names:
        try:
            model = empty_model(name, config, base, trust_remote_code)
        except PeftlabError as error:
            failed = failed or str(error)
            continue
        renamed = new_names(model, adapter.tensors)
        wanted = {_ADDED.sub("", renamed.get(name, name)) for name in adapter.tensors}
        unknown = sorted(wanted - _names(model))
        if not unknown:
            tensors = {renamed.get(key, key): tensor for key, tensor in adapter.tensors.items()}
            return _resized(model, tensors, name, base, trust_remote_code), []
        if closest is None or len(unknown) < len(closest[1]):
            closest = model, unknown
    if closest is None:
        raise PeftlabError(f"{source} does not fit {base}: {failed}")
    return closest


def _part(config: PretrainedConfig, model_type: object) -> PretrainedConfig | None:
    """Return a configuration, or the one in it, that is of ``model_type``; None where there is none.

    A text model is loaded from a composite checkpoint by the text configuration in its config.json.
    """
    inner = (getattr(config, name, None) for name in config.sub_configs)
    return next((each for each in (config, *inner) if getattr(each, "model_type", None) == model_type), None)


def _names(model: PreTrainedModel) -> set[str]:
    """Return the names of a model's modules and parameters."""
    return {name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))}


def _config_of(values: Mapping[str, Json], like: PretrainedConfig, source: str) -> PretrainedConfig:
    check_sizes(values, f"{source}: the base model's configuration")
    try:
        return type(like).from_dict(dict(values))
    except Exception as error:  # whatever the library makes of values that are not as it expects
        raise PeftlabError(f"{source}: the base model's configuration cannot be read: {reason(error)}") from error


def _resized(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], name: str, base: Path, trust_remote_code: bool
) -> PreTrainedModel:
    """Return the model with the numbers of labels and tokens of the adapter's whole tensors."""
    config, changed = model.config, False
    text = config.get_text_config()  # of a model of images and text, the part that has a vocabulary
    shapes = {key: p.shape for key, p in model.named_parameters(remove_duplicate=False)}
    for key, tensor in tensors.items():
        shape = shapes.get(_ADDED.sub("", key))
        if shape is None or shape == tensor.shape or shape[1:] != tensor.shape[1:]:
            continue
        if shape[0] == config.num_labels:
            config.num_labels, changed = tensor.shape[0], True
        elif shape[0] == getattr(text, "vocab_size", None):
            text.vocab_size, changed = tensor.shape[0], True
    return empty_model(name, config, base, trust_remote_code) if changed else model
