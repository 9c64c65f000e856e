"""Model cards: an adapter's README.md, and the section on training of a merged model's: results, code, recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.checkpoints.merge import code, fence, hub_id, model_card, table
from peftlab.checkpoints.merge_plan import Training
from peftlab.reporting import facts
from peftlab.reporting.facts import Counts, class_counts, class_rows

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_HUB_METRICS = {"pearson": "pearsonr", "spearman": "spearmanr"}
_CLASSES = 50  # rows of the table of classes


@dataclass(frozen=True)
class CardInfo:
    """The contents of a run that both cards are made of.

    Attributes:
        name: the model's name or directory, used as title and in the loading code.
        base_model: the base's reference as in the recipe.
        revision: its git revision.
        results: the contents of ``results.json``.
        recipe: the resolved recipe's YAML text.
        base_license: the base's licence, as its own card calls it.
        dataset: reference of the data: a hub id or a path.
        split: the split the results are of.
        labels: class names in label order; empty for regression; None where they are not known or there are none.
        auto_class, pipeline: of transformers, for such a model.
    """

    name: str
    base_model: str
    results: facts.Results
    recipe: str
    revision: str | None = None
    base_license: str | None = None
    dataset: str | None = None
    split: str = "validation"
    labels: Sequence[str] | None = None
    auto_class: str = "AutoModelForSequenceClassification"
    pipeline: str = "text-classification"

    @property
    def method(self) -> str:
        """How parameters trained."""
        return str(self.results["method"])

    @property
    def metric(self) -> str:
        """The deciding metric."""
        return str(self.results["metric"])


def adapter_card(info: CardInfo) -> str:
    """Return the README.md of an adapter directory.

    A LoRA adapter is in peft's format and says ``library_name: peft``; any other is loaded by peftlab.
    """
    if info.method == "lora":
        library, importing, load = "peft", "from peft import PeftModel", "PeftModel.from_pretrained"
    else:
        importing, load = "from peftlab.checkpoints.adapter import load_adapter", "load_adapter"
        library = "peftlab"
    imports, base = _base_code(info.base_model)
    lines = [
        importing,
        *imports,
        f"from transformers import {info.auto_class}, AutoTokenizer",
        "",
        f"base = {base}",
        f"tokenizer = AutoTokenizer.from_pretrained(base{_revision(info)})",
        f"model = {info.auto_class}.from_pretrained(base{_base_options(info)})",
        f"model = {load}(model, {json.dumps(info.name)})",
    ]
    trained = training(info)
    data = {
        "base_model": hub_id(info.base_model),
        "base_model_relation": "adapter",
        "library_name": library,
        **trained.data,
    }
    parts = [
        f"A {info.method} adapter of {code(info.base_model)}, {trained.summary} with peftlab.",
        *trained.parts,
        "## Use\n\n" + fence("\n".join(lines), "python"),
    ]
    return model_card(data, trained.name, parts, recipe=info.recipe, license_=info.base_license)


def training(info: CardInfo) -> Training:
    """Return the section on training of the card of a run's adapter or of its merged model."""
    from huggingface_hub import ModelCardData

    task, dataset, evaluated = str(info.results["task"]), hub_id(info.dataset), _eval_results(info)
    data = ModelCardData(
        pipeline_tag=info.pipeline,
        tags=list(dict.fromkeys(["peftlab", info.method, task.partition("/")[0]])),
        datasets=[dataset] if dataset else None,
        metrics=list(dict.fromkeys(result.metric_type for result in evaluated)) or None,
        eval_results=evaluated or None,
        model_name=Path(info.name).name,
    )
    parts = [
        f"## Results\n\n{_results_table(info)}",
        *([table(("generated answers", ""), rows.items())] if (rows := facts.answer_scores(info.results)) else []),
        table(("run", ""), facts.facts(info.results).items()),
        *([_classes(counts)] if (counts := class_counts(info.results)) else []),
    ]
    return Training(info.name, f"finetuned on {code(task)}", parts, data.to_dict())


def _classes(classes: Counts) -> str:
    header, *rows = class_rows(classes, _CLASSES)
    return table(header, rows)


def _eval_results(info: CardInfo) -> list[EvalResult]:
    """Return the finite scores as the hub's client represents them."""
    from huggingface_hub import EvalResult

    task = str(info.results["task"])
    return [
        EvalResult(
            task_type=info.pipeline,
            dataset_type=hub_id(info.dataset) or "text",
            dataset_name=task,
            dataset_config=task.partition("/")[2] if task.startswith("glue/") else None,
            dataset_split=info.split,
            metric_type=_HUB_METRICS.get(metric := name.rpartition(".")[2], metric),
            metric_value=value,
            metric_name=facts.label(name),
        )
        for name, value in _scores(info).items()
        if math.isfinite(value)
    ]


def _scores(info: CardInfo) -> dict[str, float]:
    """Return the metrics by name, the deciding one first."""
    named = {info.metric: info.results["score"]} | dict(facts.flatten(info.results.get("metrics") or {}))
    return {key: number for key, value in named.items() if (number := facts.real(value)) is not None}


def _results_table(info: CardInfo) -> str:
    score, baseline = info.results["score"], info.results.get("baseline_score")
    headline = (facts.label(info.metric), facts.number(score), "" if baseline is None else facts.number(baseline))
    rows = [
        headline,
        *(
            (score.name, facts.number(score.value), "" if score.baseline is None else facts.number(score.baseline))
            for score in facts.other_scores(info.results)
        ),
    ]
    return table(("metric", "score", facts.baseline_name(info.metric)), rows)


def _base_code(reference: str) -> tuple[list[str], str]:
    """Return the import lines and the expression that load the base model with transformers."""
    if reference.startswith("package:"):
        return ["from peftlab.references import locate"], f"locate({json.dumps(reference)})"
    return [], json.dumps(reference)


def _base_options(info: CardInfo) -> str:
    count = "" if info.labels is None else f", num_labels={max(len(info.labels), 1)}"
    return count + _revision(info)


def _revision(info: CardInfo) -> str:
    return f", revision={json.dumps(info.revision)}" if info.revision else ""
