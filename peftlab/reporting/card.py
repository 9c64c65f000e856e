"""README.md of an adapter and of a merged model: front matter for the hub, results, loading code, recipe.

Both cards are made of one dictionary:

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

import io
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peftlab.reporting import facts
from peftlab.reporting.classes import class_rows

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_HUB_METRICS = {"pearson": "pearsonr", "spearman": "spearmanr"}
# What YAML 1.1 readers (the hub's Python client) and 1.2 readers alike take for a string without quotes.
_PLAIN = re.compile(r"[A-Za-z][\w-]*([./][A-Za-z][\w-]*)*", re.ASCII)
_NOT_A_STRING = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
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
    head = {
        "base_model": _hub_id(info["base_model"]),
        "base_model_relation": "adapter",
        "library_name": library,
    }
    options = _base_options(info)
    imports, base = _base_code(info["base_model"])
    lines = [
        importing,
        *imports,
        f"from transformers import {_AUTO_CLASS}, AutoTokenizer",
        "",
        f"base = {base}",
        f"tokenizer = AutoTokenizer.from_pretrained(base{_arguments(info, 'revision')})",
        f"model = {_AUTO_CLASS}.from_pretrained(base{options})",
        f"model = {load}(model, {json.dumps(info['name'])})",
    ]
    what = f"A {info['results']['method']} adapter of {_code(info['base_model'])}"
    return _card(info, head, what, "\n".join(lines))


def merged_card(info: Mapping[str, Any]) -> str:
    """Return the README.md of a merged model directory, which plain transformers loads.

    Args:
        info: the dictionary described at the top of this module.
    """
    head = {
        "base_model": _hub_id(info["base_model"]),
        "base_model_relation": "finetune",
        "library_name": "transformers",
    }
    name = json.dumps(info["name"])
    lines = [
        f"from transformers import {_AUTO_CLASS}, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({name})",
        f"model = {_AUTO_CLASS}.from_pretrained({name})",
    ]
    what = f"{_code(info['base_model'])} with a {info['results']['method']} adapter merged into its weights"
    return _card(info, head, what, "\n".join(lines))


def _card(info: Mapping[str, Any], head: dict[str, Any], what: str, code: str) -> str:
    results = info["results"]
    parts = [
        f"---\n{front_matter(head | _about(info))}---",
        f"# {_prose(str(info['name']))}",
        f"{what}, finetuned on {_code(results['task'])} with peftlab.",
        f"## Results\n\n{_results_table(results)}",
        _table(("run", ""), facts.facts(results).items()),
        *([_table(*_classes(results["classes"]))] if results.get("classes") else []),
        f"## Use\n\n{_fence(code, 'python')}",
        f"## Recipe\n\n{_fence(info['recipe'], 'yaml')}",
    ]
    merge = dict(facts.flatten(results.get("merge") or {}))
    if merge:
        rows = ((facts.label(key), facts.number(value)) for key, value in merge.items())
        parts.insert(5, "## Merge verification\n\n" + _table(("check", "value"), rows))
    if info.get("base_license"):
        parts.append(
            f"## Licence\n\nThe base model is licensed under {_code(info['base_license'])}; "
            "its terms apply to what is derived from it."
        )
    return "\n\n".join(parts) + "\n"


def _classes(classes: Any) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header, *rows = class_rows(classes, _CLASSES)
    return header, rows


def _about(info: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the front matter that adapter and merged model share."""
    results = info["results"]
    dataset = _hub_id(info.get("dataset"))
    config = results["task"].partition("/")[2] if results["task"].startswith("glue/") else None
    scores = _scores(results)
    finite = {name: value for name, value in scores.items() if math.isfinite(value)}
    data = {
        "name": results["task"],
        "type": dataset or "text",
        "config": config,
        "split": info.get("split", "validation"),
    }
    metrics = [
        {
            "type": _HUB_METRICS.get(metric := name.rpartition(".")[2], metric),
            "value": value,
            "name": facts.label(name),
        }
        for name, value in finite.items()
    ]
    result = {"task": {"type": "text-classification"}, "dataset": data, "metrics": metrics}
    return {
        "pipeline_tag": "text-classification",
        "tags": list(dict.fromkeys(["peftlab", results["method"], results["task"].partition("/")[0]])),
        "datasets": [dataset] if dataset else None,
        "metrics": list(dict.fromkeys(metric["type"] for metric in metrics)) or None,
        "model-index": [{"name": Path(str(info["name"])).name, "results": [result]}] if metrics else None,
    }


def front_matter(values: Mapping[str, Any]) -> str:
    """Return ``values`` as YAML that YAML 1.1 and 1.2 readers understand alike; nulls are left out."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 1 << 20
    yaml.allow_unicode = False
    buffer = io.StringIO()
    yaml.dump(_quoted(values), buffer)
    return buffer.getvalue()


def _quoted(value: Any) -> Any:
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString

    if isinstance(value, Mapping):
        return {key: _quoted(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_quoted(inner) for inner in value]
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _NOT_A_STRING):
        return DoubleQuotedScalarString(value)
    return value


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
    return _table(("metric", "score", facts.baseline_name(results["metric"])), rows)


def _table(header: tuple[str, ...], rows: Any) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(_prose(cell) for cell in line)} |" for line in lines)


def _hub_id(reference: str | None) -> str | None:
    """Return ``reference`` if the hub would take it for an id: it refuses cards that name local paths."""
    named = reference and _HUB_ID.fullmatch(reference) and not Path(reference).exists()
    return reference if named else None


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


def _prose(text: str) -> str:
    """Return ``text`` with what Markdown or HTML would act on in a line or table cell made harmless."""
    escaped = re.sub(r"([\\`*_\[\]|])", r"\\\1", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


def _code(text: str) -> str:
    """Return ``text`` as inline code, whatever backticks are in it."""
    ticks = "`" * (_longest_run(text) + 1)
    return f"{ticks}{text}{ticks}" if len(ticks) == 1 else f"{ticks} {text} {ticks}"


def _fence(text: str, language: str) -> str:
    """Return ``text`` as a fenced block, whatever fences are in it."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
