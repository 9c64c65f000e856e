"""The base of a merge as a directory of plain weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from peftlab.checkpoints.adapter import Adapter
from peftlab.checkpoints.folded import load_model
from peftlab.checkpoints.merge.options import MergeOptions
from peftlab.errors import PeftlabError
from peftlab.files import contains, read_object, real, scratch_directory, write_errors
from peftlab.models.bounds import check_directory
from peftlab.models.finetuned import find_model, plain_directory
from peftlab.models.plain import decoder
from peftlab.models.pretrained import load_config, load_tokenizer
from peftlab.references import locate, snapshot
from peftlab.untyped import Attributes


@contextmanager
def plain_base(reference: str, adapter: Adapter, out: Path, options: MergeOptions) -> Iterator[tuple[Path, list[str]]]:
    """Yield the local directory of a base model with plain weights, and notes on how they were obtained.

    A base that is itself an adapter (``models.finetuned``) is folded in memory and written beside ``out`` for the
    duration of the block. A GGUF file or a quantised checkpoint is loaded and saved there as plain fp32 weights. Both
    take memory and disk for the whole model.

    Raises:
        PeftlabError: the base does not exist, or it is quantised and the update is to go into the original.
    """
    place, why = stored_base(reference, options)
    if place is not None:
        yield place, []
        return
    dtype = torch.float32
    if find_model(reference).adapters:
        own = load_config(reference, trust_remote_code=options.trust_remote_code).dtype
        dtype = own if isinstance(own, torch.dtype) else dtype
    with write_errors(out), scratch_directory(real(out), "base") as directory:
        _save_plain(reference, adapter, directory, options.trust_remote_code, dtype)
        yield directory, [why]


def stored_base(reference: str, options: MergeOptions) -> tuple[Path | None, str]:
    """Return the local directory of a base model's plain weights; or None, and what has to be done to get them.

    Raises:
        PeftlabError: as ``plain_base``.
    """
    if find_model(reference).adapters:
        return None, f"{reference} is an adapter: it was folded into its own base model first"
    place = _located(reference)
    if place.suffix == ".gguf":
        quantised = f"{place.name} is quantised (GGUF)"
    else:
        if not place.is_dir():
            raise PeftlabError(f"base model {reference!r}: {place} is a file; name the directory or a .gguf file")
        plain = _is_plain(place)
        method = "" if plain else quantisation(load_config(reference, trust_remote_code=options.trust_remote_code))
        if not method:
            return place, ""
        if options.into == "original":
            raise PeftlabError(
                f"{reference} is stored quantised ({method}) and does not contain its original weights; name the model "
                "that was quantised (--base), or merge --into dequantised: into a plain float32 copy of its values"
            )
        quantised = f"the base was quantised ({method})"
    return None, f"{quantised}: it was dequantised to float32 first, and the update was added to that"


def _is_plain(place: Path) -> bool:
    """Whether a model's ``config.json`` says by itself that its weights are plain: that of a known decoder."""
    try:
        known = decoder(read_object(place / "config.json"))
    except PeftlabError:
        return False  # loading it says what is wrong
    if known:
        check_directory(place)
    return bool(known)


def base_directory(reference: str, what: str = "base model") -> Path:
    """Return the local directory of a model: a path, a package's, or the hub's snapshot.

    Args:
        what: the model's name in messages.
    """
    place = _located(reference, what)
    if not place.is_dir():
        raise PeftlabError(f"{what} {reference!r}: {place} is a file; name the directory")
    return place


def _located(reference: str, what: str = "base model") -> Path:
    place = locate(plain_directory(reference), what)
    return snapshot(place, what) if isinstance(place, str) else place


def refuse_overlap(out: Path, base: Path) -> None:
    """Refuse an output that is, is inside or contains the base directory."""
    if contains(base, out) or contains(out, base):
        raise PeftlabError(f"{out} is, is inside or contains the base directory {base}; choose another directory")


def quantisation(config: object) -> str:
    """Return how a model's weights are quantised, by its configuration; an empty text if they are not."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return ""
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "unknown method")


def _save_plain(
    reference: str, adapter: Adapter, directory: Path, trust_remote_code: bool, dtype: torch.dtype = torch.float32
) -> None:
    architecture = str(adapter.base.get("architecture") or "AutoModelForCausalLM")
    options: Attributes = {"trust_remote_code": True} if trust_remote_code else {}
    model, _ = load_model(reference, architecture, dtype=dtype, **options)
    quantised = getattr(model.config, "quantization_config", None) is not None
    if quantised:
        try:
            model = model.dequantize()
        except (NotImplementedError, ValueError, AttributeError) as error:
            raise PeftlabError(f"{reference} cannot be dequantised: {error}") from None
    # The original format of a quantised checkpoint would be the quantised one.
    model.save_pretrained(directory, save_original_format=not quantised)
    with suppress(PeftlabError):  # the base may have no tokenizer
        load_tokenizer(reference).save_pretrained(directory)
