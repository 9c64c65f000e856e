"""Loading base models, tokenizers and models without weights, and what a loaded model tells about itself.

A model without weights is on the meta device: it has names, shapes, kinds of modules and ties, and no values. Before a
library builds one, or a list of a length that a configuration states, the sizes are checked: a typing error must not
use up all memory. The model's elements are counted against the size of the weight files, if there are any.
"""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial, reduce
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from peftlab.errors import PeftlabError, reason
from peftlab.files import is_url, read_object
from peftlab.models.architectures import inside, task_head
from peftlab.models.config import BaseConfig, find_model
from peftlab.models.quantised import (
    DTYPES,
    base_format,
    compute_dtype,
    is_coded,
    keep_layout,
    quantise,
    quantised_linears,
)
from peftlab.references import locate, similar_path, snapshot, unreachable
from peftlab.untyped import Attributes, Converter, Function, Processor, Unwrapped

if TYPE_CHECKING:
    from transformers import (
        BaseImageProcessor,
        BitsAndBytesConfig,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )
    from transformers.core_model_loading import WeightConverter

T = TypeVar("T")
_CONFIG = "config.json"
_PROCESSOR = "processor_config.json"
_MOST_LAYERS, _MOST_LABELS, _MOST_TENSORS = 1_000, 100_000, 200_000
_ID_RANGE = 10  # ids may leave gaps
# A chunk_size of -1 stands for no chunks (Phi-4 multimodal).
_SIZE = re.compile(r"^(num|n)_|(?<!chunk)_(size|dim|heads|layers|labels|embeddings)$")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
# A byte of a weight file stores at most eight parameters (one-bit weights). Heads and buffers may be new.
_ELEMENTS_PER_BYTE, _FRESH_ELEMENTS = 8, 200_000_000
_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.rand, torch.randn, torch.tensor}


def load_base(
    reference: str,
    auto_class: str = "AutoModelForSequenceClassification",
    *,
    dtype: torch.dtype = torch.float32,
    quantised: BaseConfig | None = None,
    revision: str | None = None,
    **options: object,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a pretrained model and list the parameters that are not in its checkpoint.

    A parameter of the task head that the checkpoint has for another number of classes counts as one of them.

    Args:
        reference: hub id, local directory, GGUF file (dequantised to ``dtype``), or ``package:NAME/path``.
        auto_class: name of the transformers auto class.
        dtype: of the weights; of those that are not quantised, and of the products, with ``quantised`` or where the
            checkpoint is.
        quantised: store the linear maps but for the LM head in 8 or 4 bits. The codes are those of the checkpoint's
            own values, whatever ``dtype`` is.
        revision: git revision of a hub model.
        options: passed to ``from_pretrained``: ``num_labels``, ``trust_remote_code``, ...

    Returns:
        The model in eval mode, and the names of its freshly initialised parameters.

    Raises:
        PeftlabError: the model cannot be loaded; the library's reason is given. Or a parameter of the body has another
            shape in the checkpoint.
    """
    arguments: Attributes = {"revision": revision, **options}
    if quantised is not None:
        model, fresh = _load_quantised(reference, auto_class, quantised, dtype, arguments)
    else:
        model, fresh = _load_weights(reference, auto_class, dtype=dtype, **arguments)
        if any(quantised_linears(model)):  # as the checkpoint is stored
            _cast_unquantised(model, dtype)
    model.config._name_or_path = reference
    return model.eval(), sorted(fresh)


def storage(base: BaseConfig, precision: str) -> Attributes:
    """Return what ``load_base`` takes for a recipe's ``base`` and ``train.precision``.

    Args:
        base: the recipe's section. precision: fp32, tf32, bf16 or fp16.
    """
    if base.quantised:
        return {"dtype": compute_dtype(precision), "quantised": base}
    return {"dtype": DTYPES[base.dtype]}


def _load_weights(
    reference: str, auto_class: str, *, revision: str | None, **options: object
) -> tuple[PreTrainedModel, list[str]]:
    import transformers

    loader = getattr(transformers, auto_class).from_pretrained
    arguments = {"output_loading_info": True, "ignore_mismatched_sizes": True, **options}
    model, info = _load(reference, loader, _CONFIG, revision=revision, **arguments)
    resized = _resized_head(model, info["mismatched_keys"], reference)
    if getattr(model.config, "quantization_config", None) is not None and _gguf(reference):
        # The tensors are dequantised; with this entry, saved copies would be loaded as quantised.
        del model.config.quantization_config
        model.hf_quantizer = None
    return model, [*info["missing_keys"], *resized]


def _resized_head(
    model: PreTrainedModel, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]], reference: str
) -> list[str]:
    """Return the parameters of the task head that have another shape in the checkpoint; refuse those of the body.

    Args:
        mismatched: name, shape in the checkpoint and shape in the model of each.
    """
    names = sorted(mismatched)
    head = task_head(model) if names else []
    for name, stored, needed in names:
        if not inside(name, head):
            raise PeftlabError(
                f"model {reference!r}: {name} has shape {tuple(stored)} in the weight files and {tuple(needed)} by "
                "config.json"
            )
    return [name for name, _, _ in names]


def _load_quantised(
    reference: str, auto_class: str, base: BaseConfig, dtype: torch.dtype, options: Attributes
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model with its linear maps in 8 or 4 bits, but for LM head, task head and what has no weights yet.

    Weights are quantised from fp32: rounded before, they would get other codes.
    """
    # On the CPU, like any base: codes made on a GPU might differ from those that a merge makes again.
    options = {**options, "dtype": torch.float32, "device_map": {"": "cpu"}}
    if _gguf(reference):  # transformers quantises no such file
        model, fresh = _load_weights(reference, auto_class, **options)
        quantise(model, _bitsandbytes(base, dtype, [*_kept(model, base), *_owners(fresh)]))
    else:
        arguments = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
        trust = bool(options.get("trust_remote_code"))
        kept = _kept(empty_model(auto_class, load_config(reference, **arguments), trust_remote_code=trust), base)
        how = _bitsandbytes(base, dtype, kept)
        model, fresh = _load_weights(reference, auto_class, quantization_config=how, **options)
        if untrained := [name for name, _ in quantised_linears(model) if name in _owners(fresh)]:
            how = _bitsandbytes(base, dtype, [*kept, *untrained])
            model, fresh = _load_weights(reference, auto_class, quantization_config=how, **options)
    _cast_unquantised(model, dtype)
    vars(model).pop("hf_device_map", None)  # accelerate would refuse to train it on another device
    return model, fresh


def _kept(model: PreTrainedModel, base: BaseConfig) -> list[str]:
    """Return the modules that are not quantised.

    On CPUs with AVX-512 bitsandbytes (0.50) takes the scales of a row in 4 bits from the wrong blocks where its length
    is a multiple of 16 but not of its blocks, 64. Rows of language models are multiples of 64; of parts that see
    (SigLIP's 4,304) not all are.
    """
    from transformers.quantizers.base import get_keys_to_not_convert

    linears = [(name, m.in_features) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    misread = [name for name, size in linears if size % 16 == 0 and size % 64] if base.dtype == "nf4" else []
    return [*get_keys_to_not_convert(model), *task_head(model), *misread]


def _owners(parameters: list[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in parameters}


def _bitsandbytes(base: BaseConfig, dtype: torch.dtype, kept: list[str]) -> BitsAndBytesConfig:
    if find_spec("bitsandbytes") is None:
        raise PeftlabError(
            f"base.dtype: {base.dtype} needs bitsandbytes, which is not installed; pip install 'peftlab[quantised]'"
        )
    from transformers import BitsAndBytesConfig

    # They advise installing kernels for a product that is not used here, and repeat at each product what int8 means.
    for name in ("bitsandbytes.backends.cpu.ops", "bitsandbytes.autograd._functions"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if base.dtype == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=kept)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=base.double_quant,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=kept,
    )


def _cast_unquantised(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give what is not quantised the dtype of the products; embeddings and norms are not kept in fp32 for it."""
    keep_layout(model)
    for _, found in quantised_linears(model):
        module: Unwrapped = found
        if getattr(module.weight, "quant_state", None) is not None:
            module.weight.quant_state.dtype = module.compute_dtype = dtype
    wide = [name for name, kept in model._get_dtype_plan(dtype).items() if kept == torch.float32]
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not is_coded(parameter) and not any(part in name for part in wide):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def load_config(reference: str, *, revision: str | None = None, **options: object) -> PretrainedConfig:
    """Load the configuration of a model, finetuned or not (``models.config``); errors as in ``load_base``.

    Args:
        reference: as ``find_model`` takes it. revision: of a hub model. options: passed to ``from_pretrained``.
    """
    from transformers import AutoConfig

    parts = find_model(reference, revision=revision)
    return _load(parts.base, AutoConfig.from_pretrained, _CONFIG, revision=parts.revision, **options)


def language_model_class(config: PretrainedConfig) -> str:
    """Return the name of the auto class of a language model of this configuration.

    ``AutoModelForCausalLM`` would load an encoder-decoder model without its encoder, and no model that sees images.
    """
    if sees_images(config):
        return "AutoModelForImageTextToText"
    return "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"


def sees_images(config: PretrainedConfig) -> bool:
    """Return whether a configuration is that of a decoder that reads images and text.

    Where a class for text alone loads the same checkpoint (Qwen3.5), that one is the language model.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as OF_TEXT
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES

    seeing = CLASSES.get(config.model_type)
    return seeing is not None and OF_TEXT.get(config.model_type, seeing) == seeing and not config.is_encoder_decoder


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the number of positions of a model by its (text) configuration; None if it states no limit."""
    # MPT has no other name for it: its biases are made for this number of positions.
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def load_tokenizer(reference: str, *, revision: str | None = None, **options: object) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, finetuned or not (``models.config``); errors as in ``load_base``.

    Args:
        reference: as ``find_model`` takes it. revision: of a hub model. options: passed to ``from_pretrained``.
    """
    from transformers import AutoTokenizer

    parts = find_model(reference, revision=revision)
    needs = _CONFIG if parts.tokenizer == parts.base else "tokenizer_config.json"  # an adapter has no config
    loader = AutoTokenizer.from_pretrained
    tokenizer = _load(parts.tokenizer, loader, needs, revision=parts.revision, **options)
    check_ids(tokenizer, reference)
    return tokenizer


def load_image_processor(reference: str, *, revision: str | None = None, **options: object) -> BaseImageProcessor:
    """Load the image processor of a model, finetuned or not; it computes with Pillow, so that all machines agree.

    Args:
        reference: as ``find_model`` takes it. revision: of a hub model. options: passed to ``from_pretrained``.

    Raises:
        PeftlabError: as ``load_base``; or Pillow is not installed.
    """
    if find_spec("PIL") is None:
        raise PeftlabError("images are read with Pillow, which is not installed; pip install 'peftlab[images]'")
    from transformers import AutoImageProcessor

    parts = find_model(reference, revision=revision)
    loader = partial(AutoImageProcessor.from_pretrained, backend="pil")
    needs = "preprocessor_config.json"
    if isinstance(place := locate(parts.base), Path) and (place / _PROCESSOR).exists():
        needs = _PROCESSOR  # which may contain the image processor's settings too
    return _load(parts.base, loader, needs, revision=parts.revision, **options)


def load_processor(reference: str, *, revision: str | None = None, **options: object) -> Processor:
    """Load the processor of a model of images and text, without its part for videos, which would need torchvision.

    Args:
        reference: as ``find_model`` takes it. revision: of a hub model. options: passed to ``from_pretrained``.

    Raises:
        PeftlabError: as ``load_image_processor``; or transformers has no processor for the model.
    """
    parts: dict[str, object] = {
        "image_processor": load_image_processor(reference, revision=revision, **options),
        "tokenizer": load_tokenizer(reference, revision=revision, **options),
    }
    config = load_config(reference, revision=revision, **options)

    def make(place: str, **options: object) -> Processor:
        import transformers
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

        values, _ = transformers.ProcessorMixin.get_processor_dict(place, **options)
        usual = PROCESSOR_MAPPING.get(type(config), None)
        cls: Processor = getattr(transformers, str(values.get("processor_class")), usual)
        if cls is None:
            raise PeftlabError(f"model {reference!r}: transformers has no processor of images and text for it")

        def check(self: Processor, name: str, argument: object) -> object:
            return None if argument is None else cls.check_argument_for_proper_class(self, name, argument)

        without_videos: Processor = type(cls.__name__, (cls,), {"check_argument_for_proper_class": check})
        return without_videos.from_args_and_dict([parts.get(name) for name in cls.get_attributes()], values)

    found = find_model(reference, revision=revision)
    return _load(found.base, make, _CONFIG, revision=found.revision, **options)


def save_processor(processor: Processor, directory: str | Path) -> None:
    """Write a tokenizer or an image processor, or both parts of a processor, which ``load_processor`` put together.

    Args:
        processor: what to write.
        directory: where to.
    """
    parts: list[Processor] = [getattr(processor, name, None) for name in ("image_processor", "tokenizer")]
    for part in [part for part in parts if part is not None] or [processor]:
        part.save_pretrained(directory)


def _load(reference: str, loader: Function[T], needs: str, *, revision: str | None, **options: object) -> T:
    """Call ``loader`` with the place of ``reference``, which, if it is a directory, contains the file ``needs``."""
    place = locate(reference)
    if isinstance(place, str) and unreachable():
        place = snapshot(place, "model", revision=revision)
    local = isinstance(place, Path) and not _gguf(reference)
    if isinstance(place, Path):
        if _gguf(reference):
            options["gguf_file"] = place.name
            place = place.parent
        elif not place.is_dir():
            raise PeftlabError(f"model {reference!r}: {place} is a file; name the directory or a .gguf file")
        elif not (place / needs).exists():
            raise PeftlabError(f"model {reference!r}: {place} has no {needs}")
        else:
            check_directory(place)
    else:
        options["revision"] = revision
    try:
        with Bounded(Path(place) if local else None):
            return loader(str(place), **options)
    except PeftlabError:
        raise
    except ImportError as error:
        raise PeftlabError(f"model {reference!r}: {error}") from error
    except Exception as error:  # the libraries raise anything for files they do not expect
        why = reason(error)
        if isinstance(place, str):
            why = f"no such directory{similar_path(reference)}, and as a hub id: {why}"
        raise PeftlabError(f"model {reference!r} cannot be loaded: {why}") from error


def _gguf(reference: str) -> bool:
    return reference.endswith(".gguf")


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
        self, func: Function[object], types: object, args: Sequence[object] = (), kwargs: Attributes | None = None
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


def check_sizes(config: Mapping[str, object], where: str | Path) -> None:
    """Refuse sizes below zero, numbers of layers and labels that no model has, and classes that are not named by text.

    Args:
        config: the object of a ``config.json``. where: its place, for the message.

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
    """Refuse token ids far beyond the number of tokens: libraries make lists as long as the largest.

    Args:
        tokenizer: of any class. where: its reference, for the message.
    """
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

    Args:
        model: the one the checkpoint is for, on any device. keys: of the checkpoint's tensors.
    """
    state = dict.fromkeys(tied_names(model), True)
    state |= dict.fromkeys(model.state_dict(keep_vars=True), True)
    prefix = model.base_model_prefix
    keys = list(keys)
    if all(key in state for key in keys):
        return {key: Place(key, key) for key in keys}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

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
            renamed = reduce(lambda name, renaming: renaming.rename_source_key(name)[0], renamings, key)
            found[key] = Place(full, merged, by_pattern[pattern], pattern, renamed)
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


def describe(model: nn.Module) -> dict[str, object]:
    """Return what identifies a base model: class, model type, vocabulary and the configuration itself.

    A base quantised by bitsandbytes also has ``format``, see ``BaseFormat``.
    """
    config = getattr(model, "config", None)
    values = config_values(model)
    values.pop("quantization_config", None)  # it says how this copy is stored, not what the model is
    how = base_format(model)
    return {
        "architecture": type(model).__name__,
        "model_type": getattr(config, "model_type", values.get("model_type")),
        "vocab_size": getattr(config, "vocab_size", values.get("vocab_size")),
        "config": values,
        **({"format": how.to_dict()} if how is not None else {}),
    }


def config_values(model: nn.Module) -> dict[str, object]:
    """Return the configuration of a model by key: transformers', or a dict or dataclass of a class of the user's."""
    config = getattr(model, "config", None)
    to_dict: Function[dict[str, object]] | None = getattr(config, "to_diff_dict", None)
    if to_dict is not None:
        return to_dict()
    if isinstance(config, Mapping):
        return {str(key): value for key, value in config.items()}
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}


def loaded_from(model: nn.Module) -> str | None:
    """Return the reference that transformers loaded a model from; None where there is none."""
    return getattr(getattr(model, "config", None), "_name_or_path", None) or None


def vocabulary(model: nn.Module) -> int | None:
    """Return the number of tokens in a model's configuration, or in that of its text model; None if it has none."""
    return _tokens(getattr(model, "config", None))


def stored_vocabulary(model: nn.Module, reference: str | None) -> int | None:
    """Return the number of tokens of the checkpoint that ``model`` was loaded from; None where that is not known.

    The network is not asked: a hub model's configuration is the one in the cache.

    Args:
        model: loaded by transformers. reference: what it was loaded from; None where that is not known.
    """
    read: Function[object] | None = getattr(getattr(model, "config", None), "from_pretrained", None)
    if not reference or is_url(reference) or read is None:
        return None
    try:
        place = locate(find_model(reference).base)
        if isinstance(place, str):
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(place, _CONFIG)
            place = Path(cached).parent if isinstance(cached, str) else Path()
        return _tokens(read(str(place))) if (place / _CONFIG).is_file() else None
    except Exception:  # the libraries raise anything for files they do not expect; then it is not known
        return None


def _tokens(config: object) -> int | None:
    try:
        text = getattr(config, "get_text_config", lambda: config)()
    except ValueError:  # several text models
        text = config
    tokens = getattr(text, "vocab_size", None)
    return tokens if isinstance(tokens, int) else None


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Within the block ``models`` are in eval mode; afterwards each of their modules is in the mode it was in.

    ``model.train(was_training)`` would not do: it puts modules into training mode that were kept in eval mode.
    """
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


_TOKENS = 4
_PRODUCTS = frozenset({F.linear, torch.addmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__})


def position_limit(model: PreTrainedModel) -> int | None:
    """Return how many tokens ``model`` has positions for; None where nothing limits them.

    The configuration's ``max_position_embeddings`` is not that number everywhere: RoBERTa and its relatives count
    positions from the padding token's id + 1, BART's table has two more rows. So a few tokens are embedded and the
    tables that are read at consecutive rows are recorded: one of n rows whose first token reads row k has positions
    for n - k tokens. Without such a table the configuration's number is used.

    Args:
        model: on the CPU, in eval mode; it is not changed.
    """
    if model.main_input_name == "pixel_values":  # a model of images, whose positions are no tokens
        return None
    declared = getattr(model.config, "max_position_embeddings", None) or 0  # XLNet, which has no limit, has -1
    limits = [declared] * (declared > 0) + [rows - first for rows, first in _tables(model)]
    return min(limits, default=None)


class _EmbeddingsDone(Exception):
    """Raised at the first matrix product: the embeddings are complete."""


class _Lookups(TorchFunctionMode):
    """Notes the embedding tables that are read at consecutive rows: number of rows, and the first that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int]] = []

    def __torch_function__(
        self, func: Function[object], types: object, args: Sequence[object] = (), kwargs: Attributes | None = None
    ) -> object:
        if func in _PRODUCTS:
            raise _EmbeddingsDone
        if func is F.embedding:
            match args:
                case [Tensor() as ids, Tensor() as table, *_]:
                    self._note(ids, table)
        return func(*args, **(kwargs or {}))

    def _note(self, ids: Tensor, table: Tensor) -> None:
        if ids.dim() == 0 or ids.shape[-1] < _TOKENS:
            return
        rows = ids.reshape(-1, ids.shape[-1])[:, :_TOKENS]  # more where a model pads to a window's width
        first = int(rows[0, 0])
        if torch.equal(rows, torch.arange(first, first + _TOKENS, device=rows.device).expand_as(rows)):
            self.found.append((table.shape[0], first))


def _tables(model: PreTrainedModel) -> Iterable[tuple[int, int]]:
    pad = getattr(model.config, "pad_token_id", None)
    size = model.config.get_text_config().vocab_size
    ids = [token for token in range(min(size, 2 * _TOKENS)) if token != pad][:_TOKENS]
    if len(ids) < _TOKENS:
        return []
    with torch.no_grad(), _Lookups() as lookups:
        try:
            model(input_ids=torch.tensor([ids[::-1]], device=model.device))  # decreasing: not mistaken for positions
        except _EmbeddingsDone:
            pass
        except Exception:  # four tokens alone are no valid input for this model: its configuration is used
            return []
    return lookups.found
