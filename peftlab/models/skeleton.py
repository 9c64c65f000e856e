"""The model a merge is about: its empty form, and where each key of a base checkpoint goes in it.

Nothing here holds weights: the model lies on the meta device and says names, shapes, kinds of modules and
which parameters are tied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    rename_source_key,
)
from transformers.initialization import no_init_weights

from peftlab.checkpoints.adapter import Adapter
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import member, reason
from peftlab.models.bounds import Bounded, check_sizes
from peftlab.models.pretrained import load_config

_ADDED = re.compile(r"\.base_layer|[._]lora_\w+$")

# peft's task_type -> the auto class that makes the model; without one, the first that has the adapter's modules.
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

    An adapter of ours names its class and configuration. For a foreign one it is the class that its task type
    or the base's configuration names, with as many labels and tokens as its tensors say.

    Args:
        source: the adapter's path, for messages. trust_remote_code: run model code that lies in ``base``.

    Raises:
        PeftlabError: the adapter is for another architecture than ``base``.
    """
    config = load_config(str(base), trust_remote_code=trust_remote_code)
    trained = adapter.base.get("config") or {}
    if trained.get("model_type", config.model_type) != config.model_type:
        raise PeftlabError(f"{source} belongs to {trained['model_type']!r}, {base} is {config.model_type!r}")
    if trained:
        if type(config).__module__.startswith("transformers."):
            config = _config_of(trained, config, source)
        return empty_model(member(adapter.base, "architecture", str, source), config, base, trust_remote_code)
    names = [config.architectures[0]] if config.architectures else []
    names = [_AUTO[adapter.task_type]] if adapter.task_type in _AUTO else names + list(_AUTO.values())
    wanted = {_ADDED.sub("", name) for name in adapter.tensors}
    misfits: list[tuple[int, str]] = []
    for name in names:
        try:
            model = empty_model(name, config, base, trust_remote_code)
        except PeftlabError as error:
            misfits.append((len(wanted), str(error)))
            continue
        known = {name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))}
        unknown = sorted(wanted - known)
        if not unknown:
            return _resized(model, adapter.tensors, name, base, trust_remote_code)
        hint = did_you_mean(unknown[0], known)
        misfits.append((len(unknown), f"{type(model).__name__} has no {unknown[0]}{hint}"))
    raise PeftlabError(f"{source} does not fit {base}: {min(misfits)[1]}")


def _config_of(values: Mapping[str, Any], like: PretrainedConfig, source: str) -> PretrainedConfig:
    check_sizes(values, f"{source}: the base model's configuration")
    try:
        return type(like).from_dict(dict(values))
    except Exception as error:  # whatever the library makes of values that are not as it expects
        raise PeftlabError(f"{source}: the base model's configuration cannot be read: {reason(error)}") from error


def empty_model(
    name: str, config: PretrainedConfig, base: Path | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the model of a class or an auto class, on the meta device.

    Args:
        base: the directory that ``config`` was read from, if it is a local one: its weight files bound the sizes.

    Raises:
        PeftlabError: no such class, or its model cannot be made of the configuration.
    """
    cls = getattr(transformers, name, None)
    auto = name.startswith("AutoModel")
    if cls is not None and not auto and not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise PeftlabError(f"transformers.{name} is not a class of models")
    try:
        with Bounded(base), torch.device("meta"), no_init_weights():
            if cls is not None and not auto:
                model = cls._from_config(config)
            else:
                reference = next(
                    (ref for ref in (getattr(config, "auto_map", None) or {}).values() if ref.endswith(name)), ""
                )
                if cls is None and not reference:
                    raise PeftlabError(f"transformers has no model class {name!r}")
                maker = cls or getattr(transformers, next(k for k, v in config.auto_map.items() if v == reference))
                config._name_or_path = str(base or config._name_or_path)
                model = maker.from_config(config, trust_remote_code=trust_remote_code)
        model.tie_weights()  # which comes with the initialisation left out
        return model.eval()
    except PeftlabError:
        raise
    except Exception as error:  # whatever the library makes of a configuration that is not as it expects
        raise PeftlabError(f"{base or 'model'}: a {name} cannot be made of its config.json: {reason(error)}") from error


def _resized(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], name: str, base: Path, trust_remote_code: bool
) -> PreTrainedModel:
    """Return the model with as many labels and tokens as the adapter's whole tensors have rows."""
    config, changed = model.config, False
    shapes = {key: p.shape for key, p in model.named_parameters(remove_duplicate=False)}
    for key, tensor in tensors.items():
        shape = shapes.get(_ADDED.sub("", key))
        if shape is None or shape == tensor.shape or shape[1:] != tensor.shape[1:]:
            continue
        if shape[0] == config.num_labels:
            config.num_labels, changed = tensor.shape[0], True
        elif shape[0] == config.vocab_size:
            config.vocab_size, changed = tensor.shape[0], True
    return empty_model(name, config, base, trust_remote_code) if changed else model


@dataclass(frozen=True)
class Place:
    """Where a base key goes.

    Attributes:
        name: its name in the model. key: its key in the merged checkpoint.
        converter: what makes model tensors of it and its like, where it is not one by itself; ``pattern`` is the
            part that it plays there and ``bare`` the key as the converter sees it.
    """

    name: str
    key: str
    converter: WeightConverter | None = None
    pattern: str = ""
    bare: str = ""

    @property
    def names(self) -> list[str]:
        """All model tensors that the base key has a part in."""
        if self.converter is None:
            return [self.name]
        first, *others = self.converter.target_patterns
        return [self.name, *(self.name.replace(first, other) for other in others)]


def places(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, Place | None]:
    """Return where each base key goes; None for one the model has no place for.

    Renaming is transformers' own, so that what is found here is what ``from_pretrained`` would find. The
    merged key is the base's, with the name of the body put before it or taken off.
    """
    state: dict[str, Any] = dict.fromkeys(tied_names(model), True)
    state |= dict.fromkeys(model.state_dict(keep_vars=True), True)
    prefix = model.base_model_prefix
    keys = list(keys)
    if all(key in state for key in keys):
        return {key: Place(key, key) for key in keys}
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Place | None] = {}
    for key in keys:
        bare, pattern = rename_source_key(key, renamings, converters)
        full, _ = rename_source_key(key, renamings, converters, prefix, state)
        if full not in state and key in state:
            bare, full, pattern = key, key, None
        if full not in state:
            found[key] = None
            continue
        merged = key
        if prefix and full == f"{prefix}.{bare}":
            merged = f"{prefix}.{key}"
        elif prefix and bare == f"{prefix}.{full}":
            merged = key.removeprefix(f"{prefix}.")
        found[key] = Place(full, merged)
        if pattern is not None:
            found[key] = Place(full, merged, by_pattern[pattern], pattern, apply_renamings(key, renamings))
    return found


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return each parameter that is another one's twin, and that other one: ``{"lm_head.weight": "model.embed…"}``."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})
