"""README.md of an adapter, and what a merged model's says of its training: results for the hub, loading code, recipe.

Both are made of one dictionary:

| key | what | |
| --- | --- | --- |
| ``name`` | the model's name or directory, used as title and in the loading code | required |
| ``base_model`` | the base's reference as in the recipe | required |
| ``results`` | the contents of ``results.json`` | required |
| ``recipe`` | the resolved recipe's YAML text | required |
| ``revision`` | git revision of the base | optional |
| ``base_license`` | the base's licence, as its own card calls it | optional |
| ``dataset`` | reference of the data: a hub id or a path | optional |
| ``split`` | the split the results are of | ``validation`` |
| ``labels`` | class names in label order; empty for regression | optional |
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peftlab.checkpoints.model_card import Training, code, fence, hub_id, model_card, table
from peftlab.reporting import facts
from peftlab.reporting.classes import class_rows

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_HUB_METRICS = {"pearson": "pearsonr", "spearman": "spearmanr"}
_CLASSES = 50  # rows of the table of classes
_AUTO_CLASS = "AutoModelForSequenceClassification"


def adapter_card(info: Mapping[str, Any]) -> str:
    """Return the README.md of an adapter directory.

    A LoRA adapter is in peft's format and says ``library_name: peft``; any other is loaded by peftlab.

    Args:
        info: the dictionary described at the top of this module.
    """
    if info["results"]["method"] == "lora":
        library, importing, load = "peft", "from peft import PeftModel", "PeftModel.from_pretrained"
    else:
        importing, load = "from peftlab.checkpoints.adapter import load_adapter", "load_adapter"
        library = "peftlab"
    imports, base = _base_code(info["base_model"])
    lines = [
        importing,
        *imports,
        f"from transformers import {_AUTO_CLASS}, AutoTokenizer",
        "",
        f"base = {base}",
        f"tokenizer = AutoTokenizer.from_pretrained(base{_arguments(info, 'revision')})",
        f"model = {_AUTO_CLASS}.from_pretrained(base{_base_options(info)})",
        f"model = {load}(model, {json.dumps(info['name'])})",
    ]
    trained = training(info)
    data = copy(trained.data)
    data["base_model"], data["base_model_relation"], data["library_name"] = (
        hub_id(info["base_model"]),
        "adapter",
        library,
    )
    parts = [
        f"A {info['results']['method']} adapter of {code(info['base_model'])}, {trained.summary} with peftlab.",
        *trained.parts,
        "## Use\n\n" + fence("\n".join(lines), "python"),
    ]
    return model_card(data, trained.name, parts, recipe=info["recipe"], license_=info.get("base_license"))


def training(info: Mapping[str, Any]) -> Training:
    """Return what the card of a run's adapter, or of its merged model, says of the training.

    Args:
        info: the dictionary described at the top of this module.
    """
    from huggingface_hub import ModelCardData

    results, dataset, evaluated = info["results"], hub_id(info.get("dataset")), _eval_results(info)
    data = ModelCardData(
        pipeline_tag="text-classification",
        tags=list(dict.fromkeys(["peftlab", results["method"], results["task"].partition("/")[0]])),
        datasets=[dataset] if dataset else None,
        metrics=list(dict.fromkeys(result.metric_type for result in evaluated)) or None,
        eval_results=evaluated or None,
        model_name=Path(str(info["name"])).name,
    )
    parts = [
        f"## Results\n\n{_results_table(results)}",
        table(("run", ""), facts.facts(results).items()),
        *([_classes(results["classes"])] if results.get("classes") else []),
    ]
    return Training(str(info["name"]), f"finetuned on {code(results['task'])}", parts, data)


def _classes(classes: Mapping[str, Mapping[str, int]]) -> str:
    header, *rows = class_rows(classes, _CLASSES)
    return table(header, rows)


def _eval_results(info: Mapping[str, Any]) -> list[EvalResult]:
    """Return the finite scores as the hub's client represents them."""
    from huggingface_hub import EvalResult

    task = info["results"]["task"]
    return [
        EvalResult(
            task_type="text-classification",
            dataset_type=hub_id(info.get("dataset")) or "text",
            dataset_name=task,
            dataset_config=task.partition("/")[2] if task.startswith("glue/") else None,
            dataset_split=info.get("split", "validation"),
            metric_type=_HUB_METRICS.get(metric := name.rpartition(".")[2], metric),
            metric_value=value,
            metric_name=facts.label(name),
        )
        for name, value in _scores(info["results"]).items()
        if math.isfinite(value)
    ]


def _scores(results: Mapping[str, Any]) -> dict[str, float]:
    """The deciding score first, then the other metrics."""
    others = {key: value for key, value in facts.flatten(results.get("metrics") or {}) if value is not None}
    return {results["metric"]: results["score"]} | others


def _results_table(results: Mapping[str, Any]) -> str:
    baseline = results.get("baseline_score")
    rows = [
        (facts.label(name), facts.number(value), facts.number(baseline) if name == results["metric"] else "")
        for name, value in _scores(results).items()
    ]
    return table(("metric", "score", facts.baseline_name(results["metric"])), rows)


def _base_code(reference: str) -> tuple[list[str], str]:
    """Imports and expression for the base model as transformers wants it."""
    if reference.startswith("package:"):
        return ["from peftlab.references import locate"], f"locate({json.dumps(reference)})"
    return [], json.dumps(reference)


def _base_options(info: Mapping[str, Any]) -> str:
    labels = info.get("labels")
    count = "" if labels is None else f", num_labels={max(len(labels), 1)}"
    return count + _arguments(info, "revision")


def _arguments(info: Mapping[str, Any], *names: str) -> str:
    return "".join(f", {name}={json.dumps(info[name])}" for name in names if info.get(name))
