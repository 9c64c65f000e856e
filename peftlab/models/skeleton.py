"""A model without weights, and where each key of a checkpoint belongs in it.

The model is on the meta device: it has names, shapes, kinds of modules and ties, and no values.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peftlab.errors import PeftlabError, reason
from peftlab.models.bounds import Bounded
from peftlab.untyped import Converter

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightConverter


def empty_model(
    name: str, config: PretrainedConfig, base: Path | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the model of a class or an auto class, on the meta device.

    Args:
        base: the directory that ``config`` was read from, if it is a local one: its weight files bound the sizes.

    Raises:
        PeftlabError: no such class, or its model cannot be made of the configuration.
    """
    import transformers
    from transformers import PreTrainedModel
    from transformers.initialization import no_init_weights

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
    except Exception as error:  # the library raises anything for a configuration it does not expect
        raise PeftlabError(f"{base or 'model'}: a {name} cannot be made of its config.json: {reason(error)}") from error


@dataclass(frozen=True)
class Place:
    """The place of a base key in the model.

    Attributes:
        name: its name in the model. key: its key in the merged checkpoint.
        converter: transformers' converter that computes model tensors from it and others, where it is not a model
            tensor itself; ``pattern`` is its role there and ``bare`` the key as the converter sees it.
    """

    name: str
    key: str
    converter: WeightConverter | None = None
    pattern: str = ""
    bare: str = ""

    @property
    def names(self) -> list[str]:
        """All model tensors that are computed from the base key."""
        if self.converter is None:
            return [self.name]
        first, *others = self.converter.target_patterns
        return [self.name, *(self.name.replace(first, other) for other in others)]


def places(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, Place | None]:
    """Return the place of each base key in the model; None for a key it has no parameter for.

    Renaming is transformers' own, so that what is found here is what ``from_pretrained`` would find. The
    merged key is the base's, with the name of the body added or removed.
    """
    state = dict.fromkeys(tied_names(model), True)
    state |= dict.fromkeys(model.state_dict(keep_vars=True), True)
    prefix = model.base_model_prefix
    keys = list(keys)
    if all(key in state for key in keys):
        return {key: Place(key, key) for key in keys}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, apply_renamings, rename_source_key

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


def converted(
    converter: Converter, parts: list[tuple[tuple[str, str, str], Tensor]], model: PreTrainedModel
) -> dict[str, Tensor]:
    """Return the model tensors that one of transformers' converters makes of checkpoint tensors, by name.

    Args:
        parts: of each, (name in the model, key as the converter sees it, its role there), and its values.
    """
    fresh: Converter = deepcopy(converter)
    for (name, key, pattern), tensor in parts:
        fresh.add_tensor(name, key, pattern, tensor)
    made = fresh.convert(parts[0][0][0], model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return each tied parameter and the one it is tied to: ``{"lm_head.weight": "model.embed…"}``."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})
