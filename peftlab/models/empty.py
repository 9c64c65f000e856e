"""Models without weights: their size is bounded, and each key of a checkpoint has its place in them.

Such a model is on the meta device: it has names, shapes, kinds of modules and ties, and no values. Before a library
builds one, or a list of a length that a configuration states, the sizes are checked: a typing error must not use up all
memory. The model's elements are counted against the size of the weight files, if there are any.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from peftlab.errors import PeftlabError, reason
from peftlab.files import read_object
from peftlab.untyped import Converter, Function

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.core_model_loading import WeightConverter


_MOST_LAYERS, _MOST_LABELS, _MOST_TENSORS = 1_000, 100_000, 200_000
_ID_RANGE = 10  # ids may leave gaps
# A chunk_size of -1 stands for no chunks (Phi-4 multimodal).
_SIZE = re.compile(r"^(num|n)_|(?<!chunk)_(size|dim|heads|layers|labels|embeddings)$")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
# A byte of a weight file stores at most eight parameters (one-bit weights). Heads and buffers may be new.
_ELEMENTS_PER_BYTE, _FRESH_ELEMENTS = 8, 200_000_000
_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.rand, torch.randn, torch.tensor}


def check_sizes(config: Mapping[str, object], where: str | Path) -> None:
    """Refuse sizes below zero, numbers of layers and labels that no model has, and classes that are not named by text.

    Raises:
        PeftlabError: such a value; ``where`` and the key are named.
    """
    architectures = config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise PeftlabError(f"{where}: architectures is not a list of class names")
    for key, value in _integers(config):
        if value < 0 and _SIZE.search(key):
            raise PeftlabError(f"{where}: {key} is negative")
        most = _MOST_LABELS if key == "num_labels" else _MOST_LAYERS if key.endswith(("layer", "layers")) else None
        if most is not None and value > most:
            raise PeftlabError(f"{where}: {key} is {min(value, 10**100):.3g}, which is more than {most:,}")


def check_directory(directory: Path) -> None:
    """Check a local model before a library reads it.

    Raises:
        PeftlabError: ``config.json`` is not a JSON object or has sizes that no model has; or a file is a pipe or a
            device, which might never end.
    """
    for path in directory.iterdir():
        with suppress(OSError):  # a dangling link counts as no file
            if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
                raise PeftlabError(f"{path}: not a regular file")
    if (directory / "config.json").exists():  # an adapter, whose tokenizer is read, has none
        check_sizes(read_object(directory / "config.json"), directory / "config.json")


def check_ids(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Refuse token ids far beyond the number of tokens: libraries make lists as long as the largest."""
    vocabulary = tokenizer.get_vocab()
    count = len(vocabulary)
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", 0))
    if largest > _ID_RANGE * (count + 1000):
        raise PeftlabError(f"tokenizer of {where!r}: {token[:50]!r} has the id {largest}, but there are {count} tokens")


def _integers(value: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    """Yield the keys of all integers of a JSON object, those of objects in it too."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _integers(inner)
        elif type(inner) is int:
            yield key, inner


class Bounded(TorchFunctionMode):
    """A context in which building a model on the meta device fails if its tensors are too many or too large.

    Args:
        directory: of the model, whose weight files bound the size. None: only the number of tensors is bounded.
    """

    def __init__(self, directory: Path | None) -> None:
        super().__init__()
        self._directory, self._tensors, self._elements = directory, 0, 0
        sizes = [f.stat().st_size for p in _WEIGHTS for f in directory.glob(p) if f.is_file()] if directory else []
        self._stored = sum(sizes)

    def __torch_function__(
        self,
        func: Function[object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        try:
            result = func(*args, **(kwargs or {}))
        except (TypeError, RuntimeError) as error:
            if func not in _FACTORIES:
                raise
            # Sizes, or a number of elements, beyond 64 bits.
            place = self._directory or "model"
            raise PeftlabError(f"{place}: config.json names a tensor that cannot be made: {reason(error)}") from error
        if func in _FACTORIES and isinstance(result, Tensor) and result.is_meta:
            self._tensors += 1
            self._elements += result.numel()
            self._check()
        return result

    def _check(self) -> None:
        if self._tensors > _MOST_TENSORS:
            raise PeftlabError(f"{self._directory or 'model'}: config.json names more than {_MOST_TENSORS:,} tensors")
        if self._stored and self._elements > _ELEMENTS_PER_BYTE * self._stored + _FRESH_ELEMENTS:
            raise PeftlabError(
                f"{self._directory}: config.json names a model of {self._elements:.2g} parameters or more, but the "
                f"weight files have {self._stored:,} bytes; is a size in it wrong?"
            )


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
