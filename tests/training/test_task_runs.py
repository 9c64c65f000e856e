"""Tasks whose answers are more than a class, from the recipe to predictions, on generated rows that can be learnt."""

from __future__ import annotations

import csv
import json
import random
import shutil
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertModel,
)

import peftlab
from peftlab.checkpoints.tensors import read_tensors
from peftlab.errors import PeftlabError
from peftlab.files import MERGE_INPUTS
from peftlab.pipelines.evaluate import evaluate
from peftlab.pipelines.finetune import load_task, sample_inputs
from peftlab.pipelines.predict import predict_file
from peftlab.pipelines.preview import example_inputs
from peftlab.recipe.load import dump_recipe, load_recipe
from peftlab.recipe.schema import FinetuneRecipe

TASKS = ("text/multilabel", "text/tokens", "text/choice", "text/regression")
CLASSES = {
    "text/multilabel": AutoModelForSequenceClassification,
    "text/tokens": AutoModelForTokenClassification,
    "text/choice": AutoModelForMultipleChoice,
    "text/regression": AutoModelForSequenceClassification,
}
TAG = {"film": "B-THING", "plot": "I-THING", "good": "B-MOOD", "bad": "B-MOOD"}
LABELS = {"good": "praise", "bad": "blame", "film": "cinema"}


def rows(task: str, n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows whose answers are in their words."""
    draw = random.Random(seed)
    made = []
    for i in range(n):
        words = [draw.choice(tiny.WORDS) for _ in range(draw.randint(3, 8))]
        words[draw.randrange(len(words))] = ("good", "bad", "film")[i % 3]
        if task == "text/multilabel":
            found = sorted({LABELS[word] for word in words if word in LABELS})
            made.append({"text": " ".join(words), "label": found})
        elif task == "text/tokens":
            made.append({"tokens": words, "tags": [TAG.get(word, "O") for word in words]})
        elif task == "text/choice":
            others = ["dull was the", "very fine plot", "not a plot"][: draw.randint(1, 3)]
            choices = [*others, "good film"]
            draw.shuffle(choices)
            made.append({"prompt": " ".join(words[:3]), "choices": choices, "label": choices.index("good film")})
        else:
            other = [draw.choice(tiny.WORDS) for _ in range(3)]
            made.append({"a": " ".join(words), "b": " ".join(other), "score": words.count("good") - other.count("bad")})
    return made


def write(task: str, file: Path, n: int = 40, seed: int = 0) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(task, n, seed)))
    return file


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT without a head."""
    start = tiny.save_model(tmp_path_factory.mktemp("start") / "bert", dropout=0.0)
    directory = start.parent / "encoder"
    BertModel.from_pretrained(start).save_pretrained(directory)
    AutoTokenizer.from_pretrained(start).save_pretrained(directory)
    return directory


def recipe(task: str, model: Path, file: Path, run: Path, method: str = "full", **train: Any) -> dict[str, Any]:
    values = tiny.recipe(model, file, run, method, **train)
    columns = {
        "text/multilabel": {"text": ["text"], "label": "label"},
        "text/regression": {"text": ["a", "b"], "label": "score"},
    }
    return {
        **values,
        "task": task,
        "data": {"path": str(file), "validation": 12, **columns.get(task, {})},
        "merge": None,
    }


@pytest.fixture(scope="module", params=TASKS)
def learnt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Any:
    """A task, its run and what it ended with."""
    task, place = request.param, tmp_path_factory.mktemp("learnt")
    file = write(task, place / "rows.jsonl", 120)
    values = recipe(task, encoder, file, place / "run", epochs=12, lr=1e-2, batch_size=16)
    return task, place / "run", tiny.run(values)


def test_what_can_be_learnt_is_learnt_and_taken_apart(learnt: Any) -> None:
    task, run, results = learnt
    assert results["score"] > results["baseline_score"] + 0.3
    assert results["merge"]["max_logit_difference"] < 1e-4
    stored = json.loads((run / "results.json").read_text())
    assert len(stored["hardest"]) == 10 and all(isinstance(row["text"], str) for row in stored["hardest"])
    if task == "text/regression":
        assert len(stored["points"]) == 12 and stored["hardest"][0]["text_pair"]
        return
    names = {
        "text/multilabel": {"blame", "cinema", "praise"},
        "text/tokens": {"MOOD", "THING"},
        "text/choice": set("0123"),
    }
    assert set(stored["by_class"]) == names[task]
    assert ("confusion" in stored) == (task == "text/choice")
    page = (run / "report.html").read_text()
    assert stored["metric"].replace("_", " ") in page and "Hardest examples" in page
    for name in names[task]:
        assert name in page


def test_a_merge_compares_on_the_first_examples_without_loading_another_model(
    learnt: Any, encoder: Path, tmp_path: Path
) -> None:
    _, run, results = learnt
    recipe = load_recipe(run / "recipe.yaml")
    assert isinstance(recipe, FinetuneRecipe)
    for count in (5, 16):
        tiny.assert_same(example_inputs(recipe, count), sample_inputs(load_task(recipe), count)[0])
    tiny.assert_same(read_tensors(run / MERGE_INPUTS)[0], example_inputs(recipe, 16))
    shutil.copytree(run / "adapter", tmp_path / "run")
    shutil.copytree(encoder, tmp_path / "words", ignore=shutil.ignore_patterns("*.safetensors"))
    values = recipe.model_copy(update={"model": str(tmp_path / "words")})
    (tmp_path / "run" / "recipe.yaml").write_text(dump_recipe(values))
    check = peftlab.run_merge(tmp_path / "run", str(encoder), tmp_path / "merged").check
    assert check is not None and check.examples == 12
    assert check.max_logit_difference == pytest.approx(results["merge"]["max_logit_difference"], abs=1e-5)


def test_transformers_loads_the_merged_model_and_answers_as_predict_does(learnt: Any) -> None:
    task, run, _ = learnt
    given = rows(task, 6, seed=1)
    asked: list[Any] = {
        "text/multilabel": lambda: [row["text"] for row in given],
        "text/tokens": lambda: [row["tokens"] for row in given],
        "text/choice": lambda: [(row["prompt"], row["choices"]) for row in given],
        "text/regression": lambda: [(row["a"], row["b"]) for row in given],
    }[task]()
    found = peftlab.predict(run, asked)
    model = CLASSES[task].from_pretrained(run / "merged").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "merged")
    for row, question, answer in zip(range(6), asked, found.answers, strict=True):
        if task == "text/choice":
            text, choices = question
            tokens = tokenizer([text] * len(choices), choices, return_tensors="pt", padding=True)
            logits = model(**{key: value[None] for key, value in tokens.items()}).logits[0]
            assert int(logits.argmax()) == answer
            shares = logits.softmax(-1).tolist()
            assert found.probabilities[row].tolist() == pytest.approx(
                [*shares, *[0] * (len(found.classes) - len(shares))]
            )
            continue
        text = (
            (" ".join(question),) if task == "text/tokens" else (question,) if isinstance(question, str) else question
        )
        logits = model(**tokenizer(*text, return_tensors="pt")).logits[0]
        if task == "text/regression":
            assert logits.item() == pytest.approx(answer, abs=1e-5)
        elif task == "text/tokens":  # each word of this tokenizer is one token
            assert [model.config.id2label[i] for i in logits[1:-1].argmax(-1).tolist()] == answer
        else:
            shares = logits.sigmoid()
            assert [model.config.id2label[i] for i in (shares >= 0.5).nonzero().flatten().tolist()] == answer
            assert found.probabilities[row].tolist() == pytest.approx(shares.tolist(), abs=1e-6)


def test_adapter_run_and_merged_model_have_the_runs_score(learnt: Any, tmp_path: Path) -> None:
    task, run, results = learnt
    file = write(task, tmp_path / "new.jsonl", 20, seed=2)
    overrides = [f"data.path={file}", "data.validation=all"]
    one, *others = (
        evaluate(place, run / "recipe.yaml", overrides)["validation"]
        for place in (run, run / "adapter", run / "merged")
    )
    for other in others:
        assert other == pytest.approx(one, abs=1e-5)
    assert evaluate(run)["validation"] == pytest.approx(results["metrics"]["validation"], abs=1e-6)


def test_predicted_files(learnt: Any, tmp_path: Path) -> None:
    task, run, _ = learnt
    file = write(task, tmp_path / "new.jsonl", 5, seed=3)
    found = predict_file(run, str(file), str(tmp_path / "out.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["prediction"] for line in lines] == list(found.answers)
    predict_file(run, str(tmp_path / "out.jsonl").replace("out", "new"), str(tmp_path / "out.csv"))
    with (tmp_path / "out.csv").open(newline="") as stream:
        cells = [row["prediction"] for row in csv.DictReader(stream)]
    assert [json.loads(cell) for cell in cells] == list(found.answers)
    # What was written as csv can be read again: lists are JSON.
    again = predict_file(run, str(_without(tmp_path / "out.csv")), str(tmp_path / "again.jsonl"))
    assert list(again.answers) == list(found.answers)


def test_columns_beside_what_is_predicted(learnt: Any, tmp_path: Path) -> None:
    """Times and decimal numbers of parquet, and a column of several types of jsonl, are written in every format."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    task, run, _ = learnt
    given = rows(task, 3, seed=3)
    table = pyarrow.Table.from_pylist(given)
    when = [datetime(2026, 1, day) for day in (1, 2, 3)]
    table = table.append_column("when", [when]).append_column("price", [[Decimal("1.50"), None, Decimal("2.25")]])
    parquet.write_table(table, tmp_path / "new.parquet")
    beside = [{"id": 1, "score": 0.5}, {"id": "a", "score": None}, {"id": None, "score": 1.0}]
    mixed = [row | other for row, other in zip(given, beside, strict=True)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    for source in ("new.parquet", "mixed.jsonl"):
        for kind in ("csv", "jsonl", "parquet"):
            predict_file(run, str(tmp_path / source), str(tmp_path / f"{source}.{kind}"))
    line = json.loads((tmp_path / "new.parquet.jsonl").read_text().splitlines()[0])
    assert (line["when"], line["price"]) == ("2026-01-01 00:00:00", "1.50")
    ids = parquet.read_table(tmp_path / "mixed.jsonl.parquet")["id"].to_pylist()
    assert ids == ["1", "a", None]


def _without(file: Path) -> Path:
    """Write a csv file without what was predicted."""
    with file.open(newline="") as stream:
        given = [
            {k: v for k, v in row.items() if not k.startswith("pr") or k == "prompt"} for row in csv.DictReader(stream)
        ]
    with file.with_name("plain.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(given[0]))
        writer.writeheader()
        writer.writerows(given)
    return file.with_name("plain.csv")


@pytest.mark.parametrize("method", ["lora", "houlsby", "bitfit", "head"])
@pytest.mark.parametrize("task", TASKS[:3])
def test_every_method_trains_and_stores_the_head(task: str, method: str, encoder: Path, tmp_path: Path) -> None:
    file = write(task, tmp_path / "rows.jsonl")
    results = tiny.run(recipe(task, encoder, file, tmp_path / "run", method, max_steps=3))
    asked = [row.get("text") or row.get("tokens") or (row["prompt"], row["choices"]) for row in rows(task, 4, seed=5)]
    answers = peftlab.predict(tmp_path / "run", asked).answers
    assert evaluate(tmp_path / "run")["validation"] == pytest.approx(results["metrics"]["validation"], abs=1e-6)
    if method != "houlsby":
        assert results["merge"]["argmax_agreement"] == 1
        assert list(
            peftlab.predict(tmp_path / "run" / "merged", asked, tmp_path / "run" / "recipe.yaml").answers
        ) == list(answers)


@pytest.mark.parametrize("task", TASKS[:3])
def test_peft_loads_the_saved_adapter_with_its_head(task: str, encoder: Path, tmp_path: Path) -> None:
    file = write(task, tmp_path / "rows.jsonl")
    tiny.run(recipe(task, encoder, file, tmp_path / "run", "lora", max_steps=3))
    merged = CLASSES[task].from_pretrained(tmp_path / "run" / "merged").eval()
    torch.manual_seed(1)  # another head than the one that was trained
    plain = CLASSES[task].from_pretrained(encoder, num_labels=merged.config.num_labels)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "run" / "adapter").eval()
    kind = {
        "text/tokens": peft.PeftModelForTokenClassification,
        "text/multilabel": peft.PeftModelForSequenceClassification,
    }
    assert type(theirs) is kind.get(task, peft.PeftModel)
    ids = torch.tensor([[[2, 5, 6, 3], [2, 9, 8, 3]]]) if task == "text/choice" else torch.tensor([[2, 5, 6, 3]])
    assert torch.allclose(theirs(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-5)


def test_weights_make_a_rare_class_more_likely(encoder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"  # the text says nothing about the label: one in ten is good
    file.write_text("text,label\n" + "".join(f"the film was,{'bad' if i % 10 else 'good'}\n" for i in range(100)))
    shares = {}
    for name, weights in (("none", None), ("balanced", "balanced"), ("named", {"good": 9})):
        values = tiny.recipe(encoder, file, tmp_path / name, "head", class_weights=weights, epochs=3, lr=0.05)
        tiny.run({**values, "data": {**values["data"], "validation": 20}})
        shares[name] = peftlab.predict(tmp_path / name, ["the film was"]).probabilities[0, 1]
    assert shares["none"] < 0.25 < 0.35 < shares["balanced"] < 0.65
    assert 0.35 < shares["named"] < 0.65


def test_class_weights_that_name_no_class_are_refused(encoder: Path, tmp_path: Path) -> None:
    file = write("text/tokens", tmp_path / "rows.jsonl")
    values = recipe("text/tokens", encoder, file, tmp_path / "run", class_weights={"B-MOD": 2.0})
    with pytest.raises(PeftlabError, match=r"train\.class_weights: no class 'B-MOD' \(did you mean 'B-MOOD'\?\)"):
        tiny.run(values)
    assert not (tmp_path / "run").exists()
