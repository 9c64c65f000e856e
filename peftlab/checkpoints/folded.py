"""Loading a model from any reference: a model directory or hub id, a run, or an adapter, folded into its base."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from peftlab.checkpoints.adapter import load_adapter, read_adapter
from peftlab.errors import PeftlabError, about
from peftlab.methods.merging import merge
from peftlab.methods.table import METHODS
from peftlab.models.config import BaseConfig
from peftlab.models.finetuned import find_model
from peftlab.models.pretrained import load_base

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_model(
    reference: str,
    auto_class: str = "AutoModelForSequenceClassification",
    *,
    dtype: torch.dtype = torch.float32,
    quantised: BaseConfig | None = None,
    revision: str | None = None,
    **options: object,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a pretrained or finetuned model and list the parameters that neither checkpoint nor adapter contains.

    Adapters are folded into the weights in memory (W0 + (α/r)·B·A, rounded once to ``dtype``), so that the model is a
    plain one.

    Args:
        reference: as ``models.finetuned.find_model`` takes it. The others are those of ``load_base``.

    Raises:
        PeftlabError: the model cannot be loaded, or an adapter does not fit it or has no linear fold.
    """
    parts = find_model(reference, revision=revision)
    adapters = [(place, read_adapter(place)) for place in parts.adapters]
    for place, adapter in adapters:
        if not METHODS[adapter.config.name].folds:
            raise PeftlabError(
                f"{reference}: method {adapter.config.name} has no linear fold, so {place} is no model by itself"
            )
    if adapters and quantised is not None:
        raise PeftlabError(
            f"base.dtype: {quantised.dtype} needs a stored model, and {reference} is an adapter, folded in memory; "
            f"write the model first: peftlab merge {parts.adapters[-1]} -o DIR"
        )
    model, fresh = load_base(
        parts.base, auto_class, dtype=dtype, quantised=quantised, revision=parts.revision, **options
    )
    for place, adapter in adapters:
        # Injection draws values that the adapter's then replace: what the caller draws must not depend on that.
        with about(place), torch.random.fork_rng(devices=[]):
            merge(load_adapter(model, adapter))
        fresh = [name for name in fresh if name not in adapter.tensors]
    model.config._name_or_path = reference
    return model, fresh
