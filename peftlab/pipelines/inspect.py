"""What a method would train in a model: counted on the meta device, without loading weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from peftlab.methods.architectures import QUERY_VALUE
from peftlab.methods.injection import count_parameters, inject, injection_of, make_config, trainable_parameters
from peftlab.methods.table import METHODS
from peftlab.methods.targets import has_suffix, model_type
from peftlab.methods.task_head import task_head
from peftlab.models.finetuned import find_model
from peftlab.models.pretrained import load_config
from peftlab.models.skeleton import empty_model
from peftlab.references import locate
from peftlab.reporting.console import Inspection


def inspect_model(
    reference: str, method: str = "lora", fields: Mapping[str, object] | None = None, auto_class: str | None = None
) -> Inspection:
    """Inject ``method`` into the model that ``reference`` describes, without weights, and count.

    Args:
        reference: hub id, directory or ``package:NAME/path``; only its configuration is read.
        fields: of the method's configuration.
        auto_class: transformers auto class; default: the class the configuration names.

    Raises:
        PeftlabError: as loading the configuration and injecting do.
    """
    settings = make_config(method, **(fields or {}))
    config, place = load_config(reference), locate(find_model(reference).base)
    name = auto_class or (config.architectures or ["AutoModel"])[0]
    known = auto_class or hasattr(transformers, name)
    model = empty_model(name if known else "AutoModel", config, place if isinstance(place, Path) else None)
    head = task_head(model)
    inject(model, settings)
    injection, row = injection_of(model), QUERY_VALUE.get(model_type(model), ())
    patterns = Counter(_pattern(module) for module in injection.replaced)
    in_place = Counter(_pattern(parameter) for parameter in injection.originals)
    linear = {n: m.weight.numel() for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    covered = sum(size for n, size in linear.items() if n in set(injection.replaced))
    trainable, total = count_parameters(model)
    return Inspection(
        architecture=type(model).__name__,
        matches=dict(patterns),
        trained_in_place=dict(in_place),
        head=head,
        targets="table" if any(has_suffix(n, t) for t in row for n in injection.replaced) else "fallback",
        trainable=trainable,
        trainable_tensors=len(trainable_parameters(model)),
        total=total,
        linear_covered=covered / max(1, sum(linear.values())),
        folds=METHODS[method].folds,
    )


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
