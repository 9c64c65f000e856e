"""Which model a recipe or a command names, and how the weights of the base and of the merged model are stored.

A reference stands for a model itself or for a finetuned one, which is a base and its adapters. No torch is imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from peftlab.errors import PeftlabError
from peftlab.files import is_url, read_object
from peftlab.references import local_copy, locate, similar_path, snapshot
from peftlab.registry import Section

PlainDtype = Literal["fp32", "bf16", "fp16"]
CONFIG_FILE = "adapter_config.json"
GATED_FILE = "gated_lora.json"
"""Beside the adapter of a draft that acts on masks alone: folded into its base it would change every token."""


class BaseConfig(Section):
    """How the weights of the pretrained model are stored in memory."""

    dtype: Literal["fp32", "bf16", "fp16", "int8", "nf4"] = Field(
        default="fp32",
        description="int8, nf4: the linear maps but for the LM head in 8 or 4 bits (bitsandbytes), the other weights "
        "in the dtype of train.precision.",
    )
    double_quant: bool = Field(
        default=False, description="nf4: quantise the scales of the blocks too; 4.13 bits a weight in place of 4.5."
    )

    @model_validator(mode="after")
    def _possible(self) -> BaseConfig:
        if self.double_quant and self.dtype != "nf4":
            raise ValueError(f"double_quant: dtype {self.dtype} has no blocks with scales; it belongs to nf4")
        return self

    @property
    def quantised(self) -> bool:
        """Whether the linear maps are stored in 8 or 4 bits."""
        return self.dtype in ("int8", "nf4")


def _or_default(value: object) -> object:
    return BaseConfig() if value is None else value


Base = Annotated[BaseConfig, BeforeValidator(_or_default)]
"""The section as a recipe has it, where null is fp32."""


Into = Literal["dequantised", "original"]
"""What an update is added to where the base was quantised while it was trained."""


class MergeConfig(Section):
    """How merged/ is written."""

    into: Into = Field(
        default="dequantised",
        description="On a base in int8 or nf4: what the update is added to, the values that the model computed with "
        "in training, or the original weights.",
    )
    verify: bool = Field(
        default=True,
        description="Compare the merged model with base and adapter on 16 held-out examples, for which both are loaded "
        "on the CPU; false where they are too large for that.",
    )
    latency: bool = Field(
        default=False,
        description="Measure the forward pass of the merged model, and of base and adapter, relative to the base's.",
    )


def merge_into(merge: bool | MergeConfig | None) -> Into | None:
    """Return what a recipe's ``merge`` says of ``into``; None where it says nothing."""
    return merge.into if isinstance(merge, MergeConfig) else None


def verifies_merge(merge: bool | MergeConfig | None) -> bool:
    """Whether a merge is compared with base and adapter: yes, unless a recipe's ``merge`` says no."""
    return not isinstance(merge, MergeConfig) or merge.verify


def measures_latency(merge: bool | MergeConfig | None) -> bool:
    """Whether a recipe's ``merge`` asks for the latency."""
    return isinstance(merge, MergeConfig) and merge.latency


@dataclass(frozen=True)
class ModelParts:
    """A model that can be loaded.

    Attributes:
        base: reference of plain weights. adapters: directories of what is folded into them, in this order.
        tokenizer: reference of its tokenizer.
        revision: of a hub model; None where the adapter names none.
    """

    base: str
    adapters: tuple[Path, ...]
    tokenizer: str
    revision: str | None = None


def find_model(reference: str, *, revision: str | None = None) -> ModelParts:
    """Return what has to be loaded for ``reference``; no weights are read.

    Args:
        reference: a model (hub id, directory, GGUF file, ``package:NAME/path``); a run directory, which stands for its
            ``merged/`` or, without one, for its ``adapter/``; the URL of a run; or an adapter directory, whose base
            may itself be any of these.
        revision: of a hub model.

    Raises:
        PeftlabError: a run that has neither, or an adapter that names no base model or leads back to itself.
    """
    reference = local_copy(reference)
    adapters: list[Path] = []
    seen: set[str] = set()
    while (place := _directory(reference)) is not None and not (place / "config.json").exists():
        if (place / "merged" / "config.json").exists():
            reference = str(place / "merged")
            break
        adapter = next((path for path in (place, place / "adapter") if (path / CONFIG_FILE).exists()), None)
        if adapter is None:
            if (place / "recipe.yaml").exists():
                raise PeftlabError(f"{reference}: a run without merged/ or adapter/: no model was written; did it end?")
            break
        if os.path.realpath(adapter) in seen:
            raise PeftlabError(f"{reference}: its base model is itself")
        seen.add(os.path.realpath(adapter))
        refuse_gated(adapter)
        adapters.insert(0, adapter)
        reference, revision = _base_of(adapter)
        reference = local_copy(reference)
    own = next((path for path in reversed(adapters) if (path / "tokenizer_config.json").exists()), None)
    return ModelParts(reference, tuple(adapters), str(own or reference), revision)


def refuse_gated(adapter: Path) -> None:
    """Raise ``PeftlabError`` for an adapter that is the draft of its base."""
    if (adapter / GATED_FILE).exists():
        raise PeftlabError(
            f"{adapter}: a gated LoRA, which acts on a draft's masks alone and is wrong on text; give it as --draft, "
            "with its base as the target"
        )


def plain_directory(reference: str) -> str:
    """Return the reference of plain weights that other programs load too.

    Raises:
        PeftlabError: they exist only in memory, as base and adapter.
    """
    parts = find_model(reference)
    if parts.adapters:
        raise PeftlabError(
            f"{reference}: an adapter, and a plain model directory is needed here; write one: "
            f"peftlab merge {parts.adapters[-1]} -o DIR"
        )
    return parts.base


def base_directory(reference: str, what: str = "base model", *, revision: str | None = None) -> Path:
    """Return the local directory of a model: a path, a package's, or the hub's snapshot.

    Args:
        what: the model's name in messages. revision: of a hub model.
    """
    place = model_place(reference, what, revision=revision)
    if not place.is_dir():
        raise PeftlabError(f"{what} {reference!r}: {place} is a file; name the directory")
    return place


def model_place(reference: str, what: str = "base model", *, revision: str | None = None) -> Path:
    """Return the local directory or GGUF file of a model; arguments as for ``base_directory``."""
    place = locate(plain_directory(reference), what)
    return snapshot(place, what, revision=revision) if isinstance(place, str) else place


def _directory(reference: str) -> Path | None:
    place = locate(reference)
    return place if isinstance(place, Path) and place.is_dir() else None


def _base_of(adapter: Path) -> tuple[str, str | None]:
    """Return the base model that an adapter of peftlab, peft or AdapterHub names, and its revision."""
    raw = read_object(adapter / CONFIG_FILE)
    base, revision = raw.get("base_model_name_or_path", raw.get("model_name")), raw.get("revision")
    if not isinstance(base, str) or not base:
        raise PeftlabError(f"{adapter}: {CONFIG_FILE} names no base model (base_model_name_or_path)")
    try:
        if not is_url(base):
            _directory(base)
    except PeftlabError as error:
        raise PeftlabError(f"{adapter}: its base model is not there: {error}{similar_path(base)}") from None
    return base, revision if isinstance(revision, str) else None
