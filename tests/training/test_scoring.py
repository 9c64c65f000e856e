"""``peftlab eval`` on other data than the run's: the classes are the trained model's."""

from __future__ import annotations

import codecs
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import tiny
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoTokenizer, BertForSequenceClassification, BertModel
from typer.testing import CliRunner

import peftlab
from peftlab.cli.app import app
from peftlab.environment import describe_cpu, resolve_device
from peftlab.errors import PeftlabError
from peftlab.files import to_json
from peftlab.pipelines.evaluate import evaluate, score_trained
from peftlab.pipelines.merge import ROUNDS
from peftlab.pipelines.predict import predict, predict_file
from peftlab.tasks.data import read_table

CLASSES = ("fine", "good", "poor")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, still: Path) -> Path:
    """The tiny BERT without a head."""
    directory = tmp_path_factory.mktemp("encoder") / "bert"
    BertModel.from_pretrained(still).save_pretrained(directory)
    AutoTokenizer.from_pretrained(still).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Path:
    """A merged run on three classes."""
    place = tmp_path_factory.mktemp("scoring")
    rows = tiny.save_rows(place / "rows.csv", 42, ("good", "poor", "fine"))
    values = tiny.recipe(encoder, rows, place / "run", epochs=1) | {"merge": True}
    tiny.run(values)
    return place / "run"


def write(file: Path, *rows: tuple[str, str]) -> Path:
    file.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    return file


def places(run: Path) -> list[Path]:
    return [run, run / "adapter", run / "merged"]


def predicted(run: Path, texts: list[str]) -> list[str]:
    """The merged model's answers by transformers alone."""
    model = BertForSequenceClassification.from_pretrained(run / "merged").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "merged")
    return [model.config.id2label[int(model(**tokenizer(t, return_tensors="pt")).logits.argmax())] for t in texts]


def test_a_whole_file_that_lacks_classes_is_scored_by_name(finished: Path, tmp_path: Path) -> None:
    texts = ["good film", "dull plot", "a film", "very bad", "not the plot and film"]
    answers = predicted(finished, texts)
    for right in (5, 3):
        labels = [a if i < right else next(c for c in CLASSES if c != a) for i, a in enumerate(answers)]
        file = write(tmp_path / f"{right}.csv", *zip(texts, labels, strict=True))
        for place in places(finished):
            scores = evaluate(place, finished / "recipe.yaml", [f"data.path={file}", "data.validation=all"])
            assert scores["validation"]["accuracy"] == pytest.approx(right / 5)
    last = write(tmp_path / "one.csv", ("good film", "poor"))
    found = score_trained(finished, None, [f"data.path={last}", "data.validation=all"])
    assert found.examples == {"validation": 1}
    assert found.scores["validation"]["accuracy"] == float(predicted(finished, ["good film"]) == ["poor"])


@pytest.mark.device
def test_scores_and_latency_are_taken_on_the_device_asked_for(finished: Path) -> None:
    """Where there is an accelerator, nothing runs on the CPU; elsewhere all does."""
    seen: list[tuple[str, str]] = []

    def note(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(module, BertForSequenceClassification):
            seen.append((module.device.type, next(iter(module.parameters())).device.type))

    hook = register_module_forward_hook(note)
    try:
        evaluate(finished, latency=True)
    finally:
        hook.remove()
    assert set(seen) == {(resolve_device("auto").type,) * 2}
    assert len(seen) > 3 * ROUNDS, "one pass more warms up each of base, merged and unmerged"


def test_latency_is_measured_where_it_is_asked_for(finished: Path, encoder: Path, tmp_path: Path) -> None:
    """By a recipe or by the option; it takes a merged model beside the adapter."""
    assert "latency" not in json.loads((finished / "results.json").read_text())
    for place in (finished, finished / "adapter"):
        scores = evaluate(place, latency=True)
        assert scores.keys() == {"validation", "latency"} and scores["latency"].keys() == {"merged", "unmerged"}
        assert all(ratio > 0 for ratio in scores["latency"].values())
    assert evaluate(finished).keys() == {"validation"}
    out = tmp_path / "scores.json"
    shown = CliRunner().invoke(app, ["eval", str(finished), "--latency", "--device", "cpu", "--json", str(out)])
    found = json.loads(out.read_text())["timed"]
    assert found["weights"] == {"base": "fp32", "merged": "fp32"} and found["cpu"] == to_json(describe_cpu())
    assert found["device"] == "cpu"
    printed = " ".join(shown.output.split())
    assert f"timed on {describe_cpu()}; weights: base in fp32, merged in fp32" in printed
    with pytest.raises(PeftlabError, match="this is no adapter"):
        evaluate(finished / "merged", latency=True)
    alone = tmp_path / "alone"
    shutil.copytree(finished / "adapter", alone)
    with pytest.raises(PeftlabError, match=f"peftlab merge {alone} -o"):
        evaluate(alone, finished / "recipe.yaml", latency=True)
    rows = tiny.save_rows(tmp_path / "rows.csv")
    results = tiny.run(tiny.recipe(encoder, rows, tmp_path / "timed", epochs=1) | {"merge": {"latency": True}})
    assert results["latency"].keys() == {"merged", "unmerged"}


def test_other_class_names_are_refused_with_both_sets(finished: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "other.csv", ("good film", "great"), ("dull plot", "awful"), ("a film", "soso"))
    for place in places(finished):
        with pytest.raises(PeftlabError) as caught:
            evaluate(place, finished / "recipe.yaml", [f"data.path={file}", "data.validation=all"])
        assert "this file's: 'awful', 'great', 'soso' (3)" in str(caught.value)
        assert "those of the model: 'fine', 'good', 'poor' (3)" in str(caught.value)


@pytest.mark.parametrize("override", ["method.r=3", "train.lr=5", "sweep.lr=[1e-4,1e-3]", "output_dir=x", "~merge"])
def test_an_override_that_changes_nothing_is_refused(finished: Path, override: str) -> None:
    said = re.escape(f"override {override!r}: the run is trained already; it changes nothing here, where model, ")
    for act in (
        lambda: evaluate(finished, None, [override]),
        lambda: peftlab.predict(finished, ["a"], None, [override]),
    ):
        with pytest.raises(PeftlabError, match=said):
            act()
    with pytest.raises(PeftlabError, match=r"train\.bach_size: unknown key .did you mean 'batch_size'"):
        evaluate(finished, None, ["train.bach_size=5"])
    with pytest.raises(PeftlabError, match=r"override .data\.validation=all.: the run is trained already"):
        peftlab.predict(finished, ["a"], None, ["data.validation=all"])
    assert len(peftlab.predict(finished, ["a"], None, ["train.eval_batch_size=2"]).answers) == 1


def test_a_model_without_a_trained_head_is_not_scored(encoder: Path, finished: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "numbers.csv", ("good film", "0"), ("dull plot", "1"))
    overrides = [f"data.path={file}", "data.validation=all"]
    with pytest.raises(PeftlabError, match=r"no trained weights for .*classifier\.weight"):
        evaluate(encoder, finished / "recipe.yaml", overrides)


def test_an_adapter_without_class_names_takes_class_numbers_alone(finished: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "adapter_config.json").write_bytes((finished / "adapter" / "adapter_config.json").read_bytes())
    save_file(load_file(finished / "adapter" / "adapter_model.safetensors"), foreign / "adapter_model.safetensors")
    rows = [("good film", "0"), ("dull plot", "1"), ("a film", "2")]
    overrides = [f"data.path={write(tmp_path / 'numbers.csv', *rows)}", "data.validation=all"]
    accuracy = evaluate(foreign, finished / "recipe.yaml", overrides)["validation"]["accuracy"]
    answers = predicted(finished, [text for text, _ in rows])
    assert accuracy == pytest.approx(sum(a == CLASSES[i] for i, a in enumerate(answers)) / 3)
    with pytest.raises(PeftlabError, match=r"does not say what its classes are called, .* fine, good, poor"):
        evaluate(foreign, finished / "recipe.yaml")


def test_a_run_needs_something_to_train_on(still: Path, rows: Path, tmp_path: Path) -> None:
    values = tiny.recipe(still, rows, tmp_path / "run")
    values["data"]["validation"] = "all"
    with pytest.raises(PeftlabError, match=r"no training split; data\.validation=all is for peftlab eval"):
        tiny.run(values)


def test_classes_and_dropped_rows_are_printed_and_in_the_results(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tiny.save_rows(tmp_path / "rows.csv", 40, ("neg", "pos", "Neg", "pos"))
    rows.write_text(rows.read_text() + "good film,\n,neg\n")
    values = tiny.recipe(encoder, rows, tmp_path / "run", max_steps=1)
    with pytest.raises(PeftlabError, match="drop_missing"):
        tiny.run(values)
    values["data"]["drop_missing"] = True
    tiny.run(values)
    printed = capsys.readouterr().out
    assert "warning: class names that differ only in case or spaces: 'Neg', 'neg'" in printed
    assert printed.index("left out: 2 rows") < printed.index("trainable params")
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    assert found["dropped_rows"] == 2
    assert list(found["classes"]) == ["Neg", "neg", "pos"]
    assert {name: sum(counts.values()) for name, counts in found["classes"].items()} == {
        "Neg": 10,
        "neg": 10,
        "pos": 20,
    }
    assert sum(counts["validation"] for counts in found["classes"].values()) == 9


def test_truncated_rows_are_counted(encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "a good film,pos\na dull plot and a dull film,neg\n" * 10)
    values = tiny.recipe(encoder, rows, tmp_path / "run", max_steps=1)
    values["train"]["max_length"] = 6
    tiny.run(values)
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "run" / "results.json").read_text())["splits"]
    assert found["train"]["rows"] + found["validation"]["rows"] == 20
    assert found["train"]["truncated"] + found["validation"]["truncated"] == 10
    assert f"truncated: {found['train']['truncated']} of {found['train']['rows']} training rows and " in printed
    assert printed.count("are longer than train.max_length (6 tokens); the longest has 9\n") == 1
    predict(tmp_path / "run", ["a good film", "a dull plot and a dull film"])
    note = "truncated: 1 of 2 rows are longer than train.max_length (6 tokens); the longest has 9\n"
    assert capsys.readouterr().err.count(note) == 1
    predict(tmp_path / "run", ["a good film"])
    assert "truncated" not in capsys.readouterr().err


def test_one_run_is_merged_by_its_name(finished: Path, tmp_path: Path) -> None:
    peftlab.run_merge(finished, out=tmp_path / "merged", verify=False)
    ours, theirs = (place / "merged" / "model.safetensors" for place in (tmp_path, finished))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_row_has_as_many_texts_as_those_of_training(finished: Path) -> None:
    with pytest.raises(PeftlabError, match=r"trained on single texts \(text\)"):
        predict(finished, [("good film", "dull plot")])
    with pytest.raises(PeftlabError, match=r"trained on pairs of texts \(one, two\)"):
        predict(finished, ["good film"], overrides=["data.text=[one, two]"])


def _pipe(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``content`` stdin, in a strict ASCII locale."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


def test_stdin_is_read_as_a_file_is(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UTF-8 whatever the locale, without its byte order mark; what is not UTF-8 is told with its line."""
    given = [{"text": "good film"}, {"text": "sch\u00f6n"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in given)
    _pipe(codecs.BOM_UTF8 + lines.encode(), monkeypatch)
    predict_file(finished, "-", str(tmp_path / "out.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == [row["text"] for row in given]
    assert [row["prediction"] for row in rows] == predicted(finished, [row["text"] for row in given])
    _pipe("good film\nsch\u00f6n\n".encode("latin-1"), monkeypatch)
    with pytest.raises(PeftlabError, match="stdin:2: not UTF-8"):
        predict_file(finished, "-", str(tmp_path / "other.jsonl"))


@pytest.mark.parametrize("text", ["a\rb", "\r", "a\r\nb", "a\nb", 'a "b", c'])
def test_a_written_csv_has_the_texts_it_was_given(finished: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "good film", "note": text}) + "\n")
    predict_file(finished, str(tmp_path / "in.jsonl"), str(tmp_path / "out.csv"))
    assert read_table(tmp_path / "out.csv").columns["note"] == [text]
    header = (tmp_path / "out.csv").read_bytes().split(b"\n")[0]
    assert header.startswith(b"text,note,prediction") and not header.endswith(b"\r")


def test_rows_without_a_text_are_refused_or_left_out(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.csv").write_text("id,text\n1,good film\n2,  \n3,dull plot\n")
    with pytest.raises(
        PeftlabError, match=r"column 'text' is missing in 1 of 3 rows[\s\S]*data\.drop_missing: true leaves"
    ):
        predict_file(finished, str(tmp_path / "in.csv"), str(tmp_path / "out.jsonl"))
    predict_file(finished, str(tmp_path / "in.csv"), str(tmp_path / "out.jsonl"), overrides=["data.drop_missing=true"])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["1", "3"]
    assert "left out: 1 of 3 rows (text missing)" in capsys.readouterr().err


def test_a_line_of_stdin_is_the_text_whatever_its_column_is_called(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["good film", "dull plot"]
    _pipe("".join(f"{text}\n" for text in texts).encode(), monkeypatch)
    predict_file(finished, "-", str(tmp_path / "out.jsonl"), overrides=["data.text=[review]"])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == texts
    assert [row["prediction"] for row in rows] == predicted(finished, texts)


def test_a_misspelled_run_is_told_with_the_nearest(finished: Path) -> None:
    with pytest.raises(PeftlabError, match=r"no such directory \(did you mean 'run'\?\)"):
        evaluate(finished.with_name("rum"))


def test_validation_rows_that_are_trained_on_are_counted(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "rows"
    place.mkdir()
    write(place / "train.csv", ("good film", "a"), ("dull plot", "b"), ("good film", "a"), ("fine", "a"))
    write(place / "validation.csv", ("good film", "a"), ("a plot", "b"), ("dull plot", "a"))
    values = tiny.recipe(encoder, place, tmp_path / "run", max_steps=1)
    values["data"]["validation"] = None
    tiny.run(values)
    assert "warning: validation rows with the text of a training row: 2; scores" in capsys.readouterr().out
    write(place / "validation.csv", ("good plot", "a"), ("a plot", "b"))
    tiny.run(values, overwrite=True)
    assert "of a training row" not in capsys.readouterr().out


def test_a_head_of_another_number_of_classes_starts_anew(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model for three classes is finetuned on two; the run's own adapter is what its evaluation and merge load."""
    rows = tiny.save_rows(tmp_path / "rows.csv")
    tiny.run(tiny.recipe(finished / "merged", rows, tmp_path / "run", max_steps=2) | {"merge": True})
    assert "newly initialised: classifier.bias, classifier.weight\n" in capsys.readouterr().out
    config = BertForSequenceClassification.from_pretrained(tmp_path / "run" / "merged").config
    assert config.id2label == {0: "neg", 1: "pos"}
    assert evaluate(tmp_path / "run").keys() == {"validation"}
    same = tiny.save_rows(tmp_path / "same.csv", 42, CLASSES)
    tiny.run(tiny.recipe(finished / "merged", same, tmp_path / "more", max_steps=1))
    assert "newly initialised" not in capsys.readouterr().out


def test_weights_of_other_shapes_than_the_configuration_s_are_named(finished: Path, rows: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "merged", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "intermediate_size": 20}))
    message = r"intermediate\.dense\.bias has shape \(24,\) in the weight files and \(20,\) by config\.json"
    with pytest.raises(PeftlabError, match=message):
        tiny.run(tiny.recipe(tmp_path / "model", rows, tmp_path / "run"))


def test_more_tokens_than_usable_positions_are_refused(tmp_path: Path, still: Path, rows: Path) -> None:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = tmp_path / "roberta"
    config = RobertaConfig(vocab_size=len(tiny.WORDS) + 5, max_position_embeddings=34, pad_token_id=0, **sizes)
    RobertaForSequenceClassification(config).save_pretrained(model)
    AutoTokenizer.from_pretrained(still).save_pretrained(model)
    with pytest.raises(PeftlabError, match=r"train\.max_length is 34; .* has positions for 33 tokens"):
        tiny.run(tiny.recipe(model, rows, tmp_path / "run", max_length=34))
    assert not (tmp_path / "run").exists()
