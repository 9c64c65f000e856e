"""Loading base models and tokenizers from what a recipe names."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.errors import PeftlabError
from peftlab.files import reason
from peftlab.hub import snapshot, unreachable
from peftlab.models.bounds import Bounded, check_directory, check_ids
from peftlab.references import locate, similar_path
from peftlab.untyped import Function

T = TypeVar("T")


def load_base(
    reference: str,
    auto_class: str = "AutoModelForSequenceClassification",
    *,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    **options: object,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a pretrained model and list the parameters that are not in its checkpoint.

    Args:
        reference: hub id, local directory, GGUF file (dequantised to ``dtype``), or ``package:NAME/path``.
        auto_class: name of the transformers auto class.
        revision: git revision of a hub model.
        options: passed to ``from_pretrained``: ``num_labels``, ``trust_remote_code``, ...

    Returns:
        The model in eval mode, and the names of its freshly initialised parameters.

    Raises:
        PeftlabError: the model cannot be loaded; the library's reason is given.
    """
    loader = getattr(transformers, auto_class).from_pretrained
    model, info = _load(reference, loader, dtype=dtype, output_loading_info=True, revision=revision, **options)
    if getattr(model.config, "quantization_config", None) is not None and _gguf(reference):
        # The tensors are dequantised; with this entry, saved copies would be loaded as quantised.
        del model.config.quantization_config
        model.hf_quantizer = None
    model.config._name_or_path = reference
    return model.eval(), sorted(info["missing_keys"])


def load_config(reference: str, *, revision: str | None = None, **options: object) -> transformers.PretrainedConfig:
    """Load a model's configuration; ``reference`` and errors as in ``load_base``."""
    return _load(reference, transformers.AutoConfig.from_pretrained, revision=revision, **options)


def load_tokenizer(reference: str, *, revision: str | None = None, **options: object) -> PreTrainedTokenizerBase:
    """Load the tokenizer that belongs to a model; ``reference`` and errors as in ``load_base``."""
    tokenizer = _load(reference, transformers.AutoTokenizer.from_pretrained, revision=revision, **options)
    check_ids(tokenizer, reference)
    return tokenizer


def describe(model: nn.Module) -> dict[str, object]:
    """Return what identifies a base model: class, model type, vocabulary and the configuration itself."""
    config = getattr(model, "config", None)
    return {
        "architecture": type(model).__name__,
        "model_type": getattr(config, "model_type", None),
        "vocab_size": getattr(config, "vocab_size", None),
        "config": config.to_diff_dict() if config is not None else {},
    }


def _gguf(reference: str) -> bool:
    return reference.endswith(".gguf")


def _load(reference: str, loader: Function[T], *, revision: str | None, **options: object) -> T:
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
        elif not (place / "config.json").exists():
            raise PeftlabError(f"model {reference!r}: {place} has no config.json")
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
