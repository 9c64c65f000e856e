"""Counts what a method would train in a model, on the meta device and without loading weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from peftlab.errors import PeftlabError
from peftlab.files import read_object
from peftlab.methods.base import has_suffix
from peftlab.methods.config import ALL_LINEAR, METHODS, MethodConfig
from peftlab.methods.inject import count_parameters, inject, injection_of, make_config, trainable_parameters
from peftlab.models.architectures import (
    QUERY_VALUE,
    NoValues,
    conv1d,
    generates_text,
    model_type,
    plain_model,
    task_head,
)
from peftlab.models.config import find_model
from peftlab.models.load import Bounded, check_directory, empty_model, load_config
from peftlab.references import locate
from peftlab.reporting import facts
from peftlab.reporting.console import LongName
from peftlab.reporting.facts import plain_table
from peftlab.untyped import Attributes, KnownModel

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

    from peftlab.models.costs import Cost


@dataclass(frozen=True)
class Inspection:
    """The modules and parameters that a method would train in a model.

    Attributes:
        architecture: the class of the model.
        matches: adapted modules, pattern to their number.
        trained_in_place: the same of parameters.
        head: modules trained whole.
        targets: where default targets came from: "all-linear" of a language model; of another model "table" or
            "fallback"; "given" where the method has none or the fields name them.
        trainable: trainable parameters; trainable_tensors: the tensors that contain them. total: all parameters.
        linear_covered: share of the linear weights that is in adapted modules.
        folds: whether the method can be merged into plain weights.
        cost: of a training step; None where it was not asked for.
    """

    architecture: str
    matches: dict[str, int]
    trained_in_place: dict[str, int]
    head: list[str]
    targets: str
    trainable: int
    trainable_tensors: int
    total: int
    linear_covered: float
    folds: bool
    cost: Cost | None = None


def inspect_model(
    reference: str,
    method: str = "lora",
    fields: Mapping[str, object] | None = None,
    auto_class: str | None = None,
    *,
    head: Attributes | None = None,
    batch: tuple[int, int] | None = None,
) -> Inspection:
    """Inject ``method`` into the model that ``reference`` describes, without weights, and count.

    Args:
        reference: hub id, directory or ``package:NAME/path``; only its configuration is read.
        method: the method's name.
        fields: of the method's configuration.
        auto_class: transformers auto class; default: the class the configuration names.
        head: values that replace the configuration's for the task head, such as ``num_labels``.
        batch: rows and tokens of a training step whose cost is wanted too; None: no cost.

    Raises:
        PeftlabError: as loading the configuration, injecting and ``count_step`` do.
    """
    settings, reference = make_config(method, **(fields or {})), str(reference)
    place = locate(find_model(reference).base)
    if batch is not None:  # which takes the class itself, with its forward
        return _with_cost(_empty_model(reference, place, auto_class, head), settings, *batch)
    plain = _plain_model(place) if isinstance(place, Path) and auto_class in (None, "AutoModelForCausalLM") else None
    if plain is not None:
        with suppress(PeftlabError):  # what does not fit is told by the names of the class itself
            return _count_trainable(plain, settings)
    return _count_trainable(_empty_model(reference, place, auto_class, head), settings)


def inspection_table(found: Inspection) -> Table:
    """Return a table of what was counted: matched module patterns with their numbers, then the parameters."""
    table = plain_table(title=found.architecture)
    table.add_column("what")
    table.add_column("number", justify="right", no_wrap=True)
    for counts, title in ((found.matches, "adapted"), (found.trained_in_place, "trained in place")):
        for pattern, count in counts.items():
            table.add_row(LongName(f"{title}: {pattern}"), f"{count:,}")
    table.add_section()
    for name, value in (
        ("trainable parameters", f"{found.trainable:,}"),
        ("all parameters", f"{found.total:,}"),
        ("trainable share", facts.percent(found.trainable / found.total)),
        ("linear weights covered", facts.percent(found.linear_covered)),
        ("folds into plain weights", "yes" if found.folds else "no"),
    ):
        table.add_row(name, value)
    if found.cost is not None:
        table.add_section()
        for name, value in facts.costs(vars(found.cost)).items():
            table.add_row(name, value)
    if found.targets == "fallback":
        table.caption = (
            "The architecture has no row in the table of targets: linear maps with the usual names of query and value, "
            "or all where there are none."
        )
    return table


def _plain_model(place: Path) -> nn.Module | None:
    """Return the empty model of a directory whose configuration alone describes it."""
    try:
        config = read_object(place / "config.json")
        check_directory(place)
        with Bounded(place):
            return plain_model(config)
    except (PeftlabError, OSError):
        return None  # loading the model then raises the error that names what is wrong


def _with_cost(model: PreTrainedModel, settings: MethodConfig, batch_size: int, length: int) -> Inspection:
    from peftlab.models.costs import count_step

    found = _count_trainable(model, settings)
    return replace(found, cost=count_step(model, batch_size, length))


def _empty_model(reference: str, place: Path | str, auto_class: str | None, head: Attributes | None) -> PreTrainedModel:
    import transformers

    config = load_config(reference)
    config.update(head or {})
    name = auto_class or (config.architectures or ["AutoModel"])[0]
    known = auto_class or hasattr(transformers, name)
    return empty_model(name if known else "AutoModel", config, place if isinstance(place, Path) else None)


def _count_trainable(model: nn.Module, settings: MethodConfig) -> Inspection:
    head = task_head(model)
    with NoValues():
        inject(model, settings)
    injection, row = injection_of(model), QUERY_VALUE.get(model_type(model), ())
    default = [getattr(settings, name, "") for name in ("target_modules", "target_parameters")] == [None, None]
    in_table = any(has_suffix(name, target) for target in row for name in injection.replaced)
    by_default = ALL_LINEAR if generates_text(model) else "table" if in_table else "fallback"
    patterns = Counter(_module_pattern(module) for module in injection.replaced)
    in_place = Counter(_module_pattern(parameter) for parameter in injection.originals)
    maps: dict[str, KnownModel] = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, *conv1d()))}
    linear = {name: module.weight.numel() for name, module in maps.items()}
    covered = sum(size for n, size in linear.items() if n in set(injection.replaced))
    trainable, total = count_parameters(model)
    return Inspection(
        architecture=type(model).__name__,
        matches=dict(patterns),
        trained_in_place=dict(in_place),
        head=head,
        targets=by_default if default else "given",
        trainable=trainable,
        trainable_tensors=len(trainable_parameters(model)),
        total=total,
        linear_covered=covered / max(1, sum(linear.values())),
        folds=METHODS[settings.name].folds,
    )


def _module_pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
