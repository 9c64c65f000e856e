"""Labelled tasks on the user's files: classes, numbers, label sets, tagged words and choices."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pydantic import ValidationError
from sklearn.metrics import accuracy_score, f1_score
from sklearn.utils.class_weight import compute_class_weight
from transformers import BertTokenizerFast

from peftlab.errors import PeftlabError
from peftlab.recipe.schema import FinetuneRecipe
from peftlab.registry import resolve
from peftlab.tasks.data import items
from peftlab.tasks.labelled import Answers, WordTags, class_counts
from peftlab.tasks.labelled_rows import entities, entity_tag, is_entity_scheme, load_task_data, stratified
from peftlab.tasks.table import DataConfig, find_task
from tests.training import tiny

ROWS = [
    {"review": f'row {i}, "quoted" text\u2028NA', "mood": ["good", "bad", "so-so"][i % 3], "stars": i / 2}
    for i in range(30)
]


def csv_text(rows):
    def quote(value):
        return '"' + str(value).replace('"', '""') + '"'

    return "\n".join([",".join(rows[0]), *(",".join(map(quote, row.values())) for row in rows)]) + "\n"


def tsv_text(rows):
    return "\n".join(["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)]) + "\n"


def jsonl_text(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def load(path, kind="classification", classes=None, **options):
    options = {"text": ["review"], "label": "mood", **options}
    return load_task_data(f"text/{kind}", DataConfig(path=str(path), **options), classes)


def test_columns_of_usual_names_are_found_and_a_recipe_names_others(tmp_path):
    rows = [{"id": i, "content": f"words {i}", "sentence": f"other {i}", "labels": "ab"[i % 2]} for i in range(4)]
    file = write(tmp_path / "rows.csv", csv_text(rows))
    found = load(file, text=None, label=None, validation="all")
    assert (found.task.text, found.task.found) == (("sentence",), {"text": ["sentence"], "label": "labels"})
    named = load(file, text=["sentence"], label="labels", validation="all")
    assert found.fingerprint == named.fingerprint and named.task.found == {}
    assert load(file, text=["content"], label=None, validation="all").task.found == {"label": "labels"}
    pairs = [{"premise": f"p {i}", "hypothesis": f"h {i}", "label": i % 2} for i in range(4)]
    both = load(write(tmp_path / "pairs.jsonl", jsonl_text(pairs)), text=None, label=None, validation="all")
    assert both.splits["validation"]["text_pair"][0] == "h 0"
    for header in ("Text, LABEL", " text,label "):
        spelt = load(write(tmp_path / "spelt.csv", f"{header}\na,x\nb,y\n"), text=None, label=None, validation="all")
        assert spelt.task.text == (header.split(",")[0],) and spelt.splits["validation"]["label"] == [0, 1]
    exact = write(tmp_path / "exact.csv", "Text,content,label\na,x,1\nb,y,2\n")
    assert load(exact, text=None, label=None, validation="all").task.text == ("content",)
    blank = write(tmp_path / "blank.csv", "notes, mood\na,x\n")
    with pytest.raises(PeftlabError, match=r"no column has .*; columns: notes, ' mood'$"):
        load(blank, text=None, validation="all")
    with pytest.raises(PeftlabError, match=r"no column 'mood' .*did you mean ' mood'.*; columns: notes, ' mood'$"):
        load(blank, text=["notes"], validation="all")
    other = write(tmp_path / "other.csv", csv_text([{"notes": f"words {i}", "mood": "ab"[i % 2]} for i in range(4)]))
    with pytest.raises(PeftlabError, match=r"data\.text: missing, and no column has .*; columns: notes, mood"):
        load(other, text=None, validation="all")
    with pytest.raises(PeftlabError, match=r"data\.label: missing, and no column has .*; columns: mood"):
        load(other, text=["notes"], label=None, validation="all")


def labelled(*labels, text="some words"):
    return csv_text([{"review": f"{text} {i}", "mood": label} for i, label in enumerate(labels)])


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json", "csv.gz", "tsv.gz", "jsonl.gz", "json.gz"])
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    writers = {"csv": csv_text, "tsv": tsv_text, "jsonl": jsonl_text, "json": json.dumps}
    path = write(tmp_path / f"reviews.{suffix}", writers[suffix.split(".")[0]](ROWS))
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "reviews.parquet")
    data, same = load(path, validation=6), load(tmp_path / "reviews.parquet", validation=6)
    assert data.fingerprint == same.fingerprint
    assert data.task.labels == ("bad", "good", "so-so") and data.task.text == ("review",)
    rows = [*data.splits["train"], *data.splits["validation"]]
    found = {row["text"]: data.task.labels[row["label"]] for row in rows}
    assert found == {row["review"]: row["mood"] for row in ROWS}


def test_the_held_out_split_is_stratified_exact_and_seeded(tmp_path):
    path = write(tmp_path / "r.csv", csv_text(ROWS))
    data, again, other = (load(path, validation=0.2, split_seed=seed) for seed in (0, 0, 1))
    assert Counter(data.splits["validation"]["label"]) == {0: 2, 1: 2, 2: 2}
    assert len(data.splits["train"]) == 24
    assert data.splits["validation"][:] == again.splits["validation"][:] != other.splits["validation"][:]
    # Drawing fewer training examples leaves the held-out ones as they are.
    fewer = load(path, validation=0.2, max_train_examples=5)
    assert fewer.splits["validation"][:] == data.splits["validation"][:]
    assert len(fewer.splits["train"]) == 5 and fewer.left_out == {"beyond data.max_train_examples": 19}


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=60),
    st.integers(0, 2**40),
    st.floats(0, 1, exclude_max=True),
)
def test_stratified_draw_is_exact_and_leaves_each_class_some(classes, seed, share):
    counts = Counter(classes)
    size = int(share * (len(classes) - len(counts) + 1))
    rows = stratified(classes, size, seed)
    assert len(set(rows)) == len(rows) == size
    drawn = Counter(classes[row] for row in rows)
    for c, n in counts.items():
        assert drawn[c] < n
        assert drawn[c] >= size * n // len(classes)
    assert rows == stratified(classes, size, seed)


def test_regression_splits_and_labels_are_floats(tmp_path):
    path = write(tmp_path / "r.csv", csv_text(ROWS))
    data = load(path, "regression", label="stars", validation=10)
    assert data.task.labels == () and data.task.regression
    labels = [*data.splits["train"]["label"], *data.splits["validation"]["label"]]
    assert sorted(labels) == [row["stars"] for row in ROWS]
    assert data.splits["validation"].features["label"].dtype == "float64"
    assert len(data.splits["validation"]) == 10


def test_a_directory_of_split_files(tmp_path):
    write(tmp_path / "train.csv", labelled("b", "a", "b"))
    write(tmp_path / "dev.jsonl", jsonl_text([{"review": "x", "mood": "a"}]))
    write(tmp_path / "test.tsv", "review\nunlabelled \n")
    write(tmp_path / "notes.txt", "not data")
    data = load(tmp_path)
    assert data.splits["train"]["label"][:] == [1, 0, 1]
    assert data.splits["validation"][:] == {"text": ["x"], "label": [0]}
    assert data.splits["test"][:] == {"text": ["unlabelled "]}


@pytest.mark.parametrize("stem", ["validation", "valid", "val", "dev", "eval"])
def test_the_names_of_a_validation_file(tmp_path, stem):
    write(tmp_path / "train.csv", labelled("a", "b"))
    write(tmp_path / f"{stem}.csv", labelled("b"))
    assert {split: len(rows) for split, rows in load(tmp_path).splits.items()} == {"train": 2, "validation": 1}


def test_pairs(tmp_path):
    rows = [{"a": f"a{i}", "b": f"b{i}", "mood": i % 2} for i in range(4)]
    data = load(write(tmp_path / "p.jsonl", jsonl_text(rows)), text=["a", "b"], validation=1)
    assert data.splits["train"].column_names == ["text", "text_pair", "label"]
    assert data.task.labels == ("0", "1")


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["10", "9", "-1"], ("-1", "9", "10")),
        ([10, 9, 2.0], ("2", "9", "10")),
        (["10.0", "9.", "2"], ("2", "9", "10")),
        (["1.0", "x"], ("1.0", "x")),
        ([True, False], ("false", "true")),
        (["10", "9", "x"], ("10", "9", "x")),
        ([" yes", "no ", "yes"], ("no", "yes")),
    ],
)
def test_class_names_and_their_order(tmp_path, labels, classes):
    rows = [{"review": str(i), "mood": label} for i, label in enumerate(labels * 2)]
    assert load(write(tmp_path / "r.jsonl", jsonl_text(rows)), validation=1).task.labels == classes


def test_bins_make_classes_in_the_order_given(tmp_path):
    path = write(tmp_path / "r.csv", csv_text(ROWS))
    bins = {"good": (10.0, None), "bad": (None, 4.5), "meh": (6.0, 8.0)}
    data = load(path, label="stars", bins=bins, validation=5)
    assert data.task.labels == ("good", "bad", "meh")
    rows = [*data.splits["train"], *data.splits["validation"]]
    # Stars 0, 0.5 .. 14.5: ten in each outer bin, five in the middle one, 5, 5.5, 8.5, 9, 9.5 in none.
    assert Counter(row["label"] for row in rows) == {0: 10, 1: 10, 2: 5}
    assert data.left_out == {"outside every bin": 5}


@pytest.mark.parametrize(
    ("bins", "message"),
    [
        ({"a": (0.0, 5.0), "b": (5.0, 9.0)}, r"a and b overlap"),
        ({"a": (None, 5.0), "b": (None, 1.0)}, r"overlap"),
        ({"a": (5.0, 4.0), "b": (6.0, 9.0)}, r"bins\n.*a: its lowest value is above"),
        ({"a": (float("nan"), 4.0), "b": (6.0, 9.0)}, r"bins\n.*a: "),
        ({"a": (0.0, 4.0), "b": (60.0, 90.0)}, r"no training example of .* is in bin 'b'"),
    ],
)
def test_bad_bins(tmp_path, bins, message):
    with pytest.raises((PeftlabError, ValidationError), match=message):
        load(write(tmp_path / "r.csv", csv_text(ROWS)), label="stars", bins=bins, validation=2)


def test_a_validation_file_outside_every_bin_is_refused(tmp_path):
    write(tmp_path / "train.csv", csv_text(ROWS))
    write(tmp_path / "validation.csv", csv_text([{**ROWS[0], "stars": 99}]))
    with pytest.raises(PeftlabError, match=r"validation\.csv: no examples; every 'stars' is outside"):
        load(tmp_path, label="stars", bins={"a": (0.0, 4.0), "b": (5.0, 9.0)})


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            labelled("a", "b"),
            {"text": ["revew"]},
            r"no column 'revew' \(data.text\) \(did you mean 'review'\?\)",
        ),
        (
            labelled("a", "b"),
            {"label": "mod"},
            r"no column 'mod' \(data.label\) \(did you mean 'mood'\?\); columns: rev",
        ),
        (labelled("a", "b"), {"label": "review"}, "also in data.text"),
        (labelled("a", "a"), {}, "contains a single class, 'a'"),
        (labelled("a", "", "b", " "), {}, r"'mood' is missing in 2 of 4 rows \(line 3, 5\)"),
        (
            labelled("a", "b", text="").replace(" 1", "  "),
            {},
            r"'review' is missing in 1 of 2 rows \(line 3\)\ndata.drop_missing: true",
        ),
        (labelled("1", "0.5"), {}, r"'mood' is no class but '0.5' \(make classes with data.bins"),
        ("review,mood\n", {}, "no examples"),
        ("", {}, "is empty"),
        ("review,mood\nx,a\ny\n", {}, r"r\.csv:3: 1 columns where 2"),
        ('review,mood\n"two\nlines",a\n\n"open,b\n', {}, r"r\.csv:5: not a CSV row"),
        ("review,mood,mood\n", {}, "'mood' appears more than once"),
        (labelled("a", "b"), {"validation": 2}, "holds out 2 of 2 examples, and leaves none to train on"),
        (
            labelled("a", "b", "c", "d"),
            {"validation": 1},
            r"holds out 1 of 4 examples; the 3 others are fewer than the 4 classes: is 'mood' the column of the classes",
        ),
        (labelled("a", "b"), {"validation": 0.1}, "holds out none of 2 examples"),
        (labelled("a", "b", "a"), {"validation": 1.5}, "a share is below 1"),
        (labelled("a", "b", "a"), {"validation": None}, r"r\.csv: no validation file\. Give data\.path a directory"),
    ],
)
def test_bad_files_are_refused_with_a_place(tmp_path, text, options, message):
    with pytest.raises((PeftlabError, ValidationError), match=message):
        load(write(tmp_path / "r.csv", text), **{"validation": 1, **options})


@pytest.mark.parametrize(
    ("stars", "message"),
    [
        (
            ["1", "4,5", "2"],
            r"not a finite number \('4,5'; write a decimal point, no comma\) in 1 of 3 rows \(line 3\)",
        ),
        (["1", "many", "inf"], r"'stars' is not a finite number \('many'\) in 2 of 3 rows \(line 3, 4\)"),
        (["1", "", "2"], r"'stars' is missing in 1 of 3 rows"),
    ],
)
def test_bad_numbers(tmp_path, stars, message):
    rows = [{"review": f"r{i}", "stars": value} for i, value in enumerate(stars)]
    with pytest.raises(PeftlabError, match=message):
        load(write(tmp_path / "r.csv", csv_text(rows)), "regression", label="stars", validation=1)


def test_all_bad_rows_of_all_files_are_told_at_once(tmp_path):
    train = [("x", "a"), (None, "b"), ("  ", "b"), (5, "a"), ("y", None), ("\ud800", "b"), ("z", 0.5), ("w", "\udc00")]
    write(tmp_path / "train.jsonl", jsonl_text([{"review": text, "mood": label} for text, label in train]))
    write(tmp_path / "validation.jsonl", jsonl_text([{"review": "", "mood": "a"}, {"review": "x", "mood": [1]}]))
    with pytest.raises(PeftlabError) as caught:
        load(tmp_path)
    lines = str(caught.value).splitlines()
    for expected in (
        "train.jsonl: column 'review' is missing in 2 of 8 rows (line 2, 3)",
        "train.jsonl: column 'review' is not text in 1 of 8 rows (line 4)",
        "train.jsonl: column 'review' is not valid Unicode (half a surrogate pair) in 1 of 8 rows (line 6)",
        "train.jsonl: column 'mood' is missing in 1 of 8 rows (line 5)",
        "train.jsonl: column 'mood' is no class but 0.5 (make classes with data.bins, or use text/regression) in 2 of "
        "8 rows (line 7, 8)",
        "validation.jsonl: column 'review' is missing in 1 of 2 rows (line 1)",
        "validation.jsonl: column 'mood' is no class but [1] (make classes with data.bins, or use text/regression) in "
        "1 of 2 rows (line 2)",
    ):
        assert f"{tmp_path}/{expected}" in lines, expected
    assert lines[-1] == "data.drop_missing: true leaves out the rows without a text or label"


def test_rows_without_text_or_label_are_left_out_on_request(tmp_path):
    rows = [{"review": f"r{i}", "mood": "ab"[i % 2]} for i in range(8)]
    bad = [{"review": None, "mood": "c"}, {"review": " ", "mood": "a"}, {"review": "x", "mood": ""}, {"review": "y"}]
    path = write(tmp_path / "r.jsonl", jsonl_text([rows[0], *bad, *rows[1:]]))
    clean = write(tmp_path / "clean.jsonl", jsonl_text(rows))
    data, same = load(path, validation=2, drop_missing=True), load(clean, validation=2)
    assert data.left_out == {"text or label missing": 4}
    assert data.fingerprint == same.fingerprint
    write(path, jsonl_text([*rows, *bad, {"review": 5, "mood": "a"}]))
    with pytest.raises(PeftlabError, match=r"'review' is not text in 1 of 9 rows \(line 13\)$"):
        load(path, validation=2, drop_missing=True)
    write(path, jsonl_text(bad))
    with pytest.raises(PeftlabError, match="no examples; every row lacks a text or label"):
        load(path, validation=2, drop_missing=True)


class TestATrainedModelsClasses:
    """Data that is scored, not learnt: the names and their order are the model's."""

    def test_a_file_that_lacks_classes_keeps_the_models_places(self, tmp_path):
        path = write(tmp_path / "r.csv", labelled("good", "fine", "good"))
        data = load(path, validation="all", classes=("bad", "fine", "good"))
        assert data.task.labels == ("bad", "fine", "good")
        assert list(data.splits) == ["validation"]
        assert data.splits["validation"]["label"][:] == [2, 1, 2]
        one = load(write(tmp_path / "one.csv", labelled("good")), validation="all", classes=("bad", "good"))
        assert one.splits["validation"]["label"][:] == [1]

    def test_other_names_are_refused_with_both_sets(self, tmp_path):
        path = write(tmp_path / "r.csv", labelled("Good", "awful", "bad", "awful"))
        with pytest.raises(PeftlabError) as caught:
            load(path, validation="all", classes=("bad", "good"))
        first, *sets = str(caught.value).splitlines()
        assert "not classes of the model, 'Good' (did you mean 'good'?), in 3 of 4 rows (line 2, 3, 5)" in first
        assert sets == ["  this file's: 'Good', 'awful', 'bad' (3)", "  those of the model: 'bad', 'good' (2)"]

    def test_numbered_classes_take_numbers(self, tmp_path):
        path = write(tmp_path / "r.csv", labelled("1", "0"))
        written = write(tmp_path / "w.csv", labelled("LABEL_1", "LABEL_0"))
        floats = write(tmp_path / "f.csv", labelled("1.0", "0.0"))
        for file in (path, written, floats):
            data = load(file, validation="all", classes=("LABEL_0", "LABEL_1"))
            assert data.splits["validation"]["label"][:] == [1, 0]
        assert load(floats, validation="all", classes=("0.0", "1.0")).splits["validation"]["label"][:] == [1, 0]
        with pytest.raises(PeftlabError, match="not classes of the model, '10', in 1 of 2 rows"):
            load(write(tmp_path / "t.csv", labelled("1", "10")), validation="all", classes=("0", "1"))
        with pytest.raises(PeftlabError, match=r"those of the model: '0', '1' \(2\)"):
            load(write(path, labelled("no", "yes")), validation="all", classes=("LABEL_0", "LABEL_1"))

    def test_bins_must_be_the_models_classes(self, tmp_path):
        path = write(tmp_path / "r.csv", csv_text(ROWS))
        bins = {"high": (10.0, None), "low": (None, 4.5)}
        data = load(path, label="stars", bins=bins, validation="all", classes=("low", "high"))
        assert data.task.labels == ("low", "high")
        assert data.splits["validation"]["label"][:] == [0] * 10 + [1] * 10
        with pytest.raises(PeftlabError, match=r"data\.bins makes the classes high, low; the model's are low, top"):
            load(path, label="stars", bins=bins, validation="all", classes=("low", "top"))


def test_class_counts_by_split(tmp_path):
    write(tmp_path / "train.csv", labelled("b", "a", "b"))
    write(tmp_path / "dev.csv", labelled("a"))
    write(tmp_path / "test.csv", "review\nunlabelled\n")
    data = load(tmp_path)
    found = class_counts(resolve(data.task.answers)(data.task), data.splits)
    assert found == {"a": {"train": 1, "validation": 1}, "b": {"train": 2, "validation": 0}}
    numbers = write(tmp_path / "r.csv", csv_text(ROWS))
    data = load(numbers, "regression", label="stars", validation=3)
    assert class_counts(resolve(data.task.answers)(data.task), data.splits) == {}


def test_the_first_few_of_many_bad_rows_are_named(tmp_path):
    path = write(tmp_path / "r.json", json.dumps([{"review": None, "mood": 1}] * 19))
    with pytest.raises(
        PeftlabError, match=r"is missing in 19 of 19 rows \(row 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, \.\.\.\)"
    ):
        load(path, validation=1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.jsonl", '{"review": "x"}\n{', r"r\.jsonl:2: not a JSON object"),
        ("r.jsonl", '{"review": "x"}\n[1]', r"r\.jsonl:2: not a JSON object but \[1\]"),
        ("r.json", '{"review": "x"}\n{"review": "y"}\n', r"one object a line is named \.jsonl"),
        ("r.json", '{"review": "x"}', "must be a list of objects, not dict"),
        ("r.jsonl", '{"review": 5, "mood": "a"}', r"'review' is not text in 1 of 1 rows"),
        ("r.parquet", "nonsense", "not a readable Parquet file"),
        ("r.xlsx", "", r"must end in one of \.csv"),
    ],
)
def test_bad_formats(tmp_path, name, text, message):
    with pytest.raises(PeftlabError, match=message):
        load(write(tmp_path / name, text), validation=1)


def test_a_damaged_gzip_file(tmp_path):
    (tmp_path / "r.csv.gz").write_bytes(gzip.compress(labelled("a", "b").encode())[:-12])
    with pytest.raises(PeftlabError, match="cannot be read"):
        load(tmp_path / "r.csv.gz", validation=1)


def test_bad_directories(tmp_path):
    with pytest.raises(PeftlabError, match=r"no train\.\* file .* in it, but nothing"):
        load(tmp_path)
    train = write(tmp_path / "train.csv", labelled("good", "bad", "good"))
    write(tmp_path / "validation.csv", labelled("good", "baad"))
    with pytest.raises(
        PeftlabError,
        match=r"validation\.csv: column 'mood' has labels that are not classes of the training data, 'baad' \(did you mean "
        r"'bad'\?\), in 1 of 2 rows \(line 3\)\n.*: 'baad', 'good' \(2\)\n.*: 'bad', 'good' \(2\)",
    ):
        load(tmp_path)
    with pytest.raises(PeftlabError, match=r"data\.validation is set, but .*validation\.csv"):
        load(tmp_path, validation=1)
    write(tmp_path / "dev.csv", labelled("good"))
    with pytest.raises(PeftlabError, match=r"both dev\.csv and validation\.csv"):
        load(tmp_path)
    with pytest.raises(PeftlabError, match=r"no such file or directory \(did you mean 'train\.csv'\?\)"):
        load(train.with_name("tain.csv"), validation=1)


@pytest.mark.parametrize("reference", ["n" * 300, f"{'n' * 300}/r.csv", "~nobody-at-all/r.csv", "loop.csv", "a\0b.csv"])
def test_a_path_that_no_system_takes_is_refused(tmp_path, monkeypatch, reference):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    with pytest.raises(PeftlabError, match="no such file"):
        load(reference, validation=1)


def test_texts_in_place_of_labels_give_a_message_that_can_be_read(tmp_path):
    def texts(end):
        return labelled(*(f"{i} {'long text ' * 1000}{end}" for i in range(60)))

    write(tmp_path / "train.csv", texts("a"))
    write(tmp_path / "validation.csv", texts("b"))
    with pytest.raises(PeftlabError) as caught:
        load(tmp_path)
    assert "in 60 of 60 rows" in str(caught.value) and len(str(caught.value)) < 8000


def test_a_misspelt_relative_path_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    write(tmp_path / "reviews.csv", labelled("a", "b"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PeftlabError, match=r"'review\.csv': no such file or directory \(did you mean 'reviews\.csv'"):
        load("review.csv", validation=1)


def test_a_path_that_does_not_exist_is_told_with_the_directory_it_was_looked_for_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        PeftlabError, match=rf"'\.\./my data/x\.csv': no such file or directory \(looked for in {tmp_path}\)$"
    ):
        load("../my data/x.csv", validation=1)
    with pytest.raises(PeftlabError, match=r"x\.csv': no such file or directory$"):
        load(tmp_path / "x.csv", validation=1)
    for name in ("imdb", "stanfordnlp/imdb"):
        said = (
            rf"data sets of the hub are not read: .*load_dataset\('{name}', split='train'\)\.to_json\('imdb\.jsonl'\)$"
        )
        with pytest.raises(PeftlabError, match=said):
            load(name, validation=1)


def test_a_dataset_that_travels_as_a_package(reviews):
    bins = {"negative": (None, -0.5), "positive": (0.5, None)}
    data = load(reviews, text=["text"], label="sentiment", bins=bins, validation=1000)
    assert len(data.splits["validation"]) == 1000
    assert sum(map(len, data.splits.values())) + data.left_out["outside every bin"] == 10605
    shares = [sum(rows["label"]) / len(rows) for rows in data.splits.values()]
    assert shares[0] == pytest.approx(shares[1], abs=1e-3)


# --- Reading and scoring label sets, tagged words and choices.
SETS = {"text": ["text"], "label": "labels"}


def load_rows(kind: str, path: Path, rows: list[dict[str, Any]] | str, classes: Any = None, **options: Any) -> Any:
    file = path / ("rows.csv" if isinstance(rows, str) else "rows.jsonl")
    file.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    return load_task_data(f"text/{kind}", DataConfig(path=str(file), validation="all", **options), classes)


def answers(name: str, labels: tuple[str, ...], **changes: Any) -> Answers:
    from dataclasses import replace

    task = replace(find_task(name), labels=labels, **changes)
    return resolve(task.answers)(task)


def test_label_sets_are_the_same_in_every_spelling(tmp_path: Path) -> None:
    lists = [{"text": f"t{i}", "labels": found} for i, found in enumerate((["b", "a"], ["c"], ["a", "a"]))]
    one = load_rows("multilabel", tmp_path, lists, **SETS)
    assert one.task.labels == ("a", "b", "c")
    assert one.splits["validation"]["label"][:] == [[0, 1], [2], [0]]
    spelled = "text,labels\nt0,b | a\nt1,c\nt2,a|a\n"
    assert load_rows("multilabel", tmp_path, spelled, separator="|", **SETS).fingerprint == one.fingerprint
    json_cells = 'text,labels\nt0,"[""b"", ""a""]"\nt1,"[""c""]"\nt2,"[""a""]"\n'
    assert load_rows("multilabel", tmp_path, json_cells, **SETS).fingerprint == one.fingerprint
    columns = "text,a,b,c\nt0,1,1,0\nt1,0,0.0,true\nt2,1,0,False\n"
    assert (
        load_rows("multilabel", tmp_path, columns, text=["text"], labels=["a", "b", "c"]).fingerprint == one.fingerprint
    )
    known = load_rows("multilabel", tmp_path, lists, ("c", "b", "a", "z"), **SETS)
    assert known.splits["validation"]["label"][:] == [[1, 2], [0], [2]]


def test_columns_of_0_and_1_may_say_that_a_row_has_no_label(tmp_path: Path) -> None:
    data = load_rows("multilabel", tmp_path, "text,a,b\nx,0,0\ny,0,1\n", text=["text"], labels=["a", "b"])
    assert data.splits["validation"]["label"][:] == [[], [1]]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "x", "labels": ["a"]}, {"text": "y", "labels": []}], SETS, r"rows\.jsonl: column 'labels' is an empty list of labels .*\(line 2\)"),
        ([{"text": "x", "labels": ["a"]}, {"text": "y", "labels": {"b": 1}}], SETS, r"'labels' is no list of labels \({'b': 1}\) in 1 of 2 rows \(line 2\)"),
        ("text,labels\nx,a;b\n", SETS, r"'labels' contains texts, 'a;b'; data\.separator says .* \(line 2\)"),
        ("text,labels\nx,a;b\ny,\n", {**SETS, "separator": ";"}, r"'labels' is missing in 1 of 2 rows \(line 3\)"),
        ("text,labels\nx,a\ny,a\n", {**SETS, "separator": ";"}, "contains a single class, 'a'"),
        ("text,a,b\nx,1,0\ny,2,yes\n", {"text": ["text"], "labels": ["a", "b"]}, r"'a' is neither 0 nor 1 but '2' in 1 of 2 rows \(line 3\)\n.*'b' is neither 0 nor 1 but 'yes'"),
        ("text,a,b\nx,1,0\n", {"text": ["text"], "labels": ["a", "bb"]}, r"no column 'bb' \(data\.labels\)"),
    ],
)  # fmt: skip
def test_bad_label_sets_are_refused_with_file_and_row(tmp_path: Path, rows: Any, options: Any, message: str) -> None:
    with pytest.raises(PeftlabError, match=message):
        load_rows("multilabel", tmp_path, rows, **options)


def test_labels_that_the_model_does_not_have(tmp_path: Path) -> None:
    rows = [{"text": "x", "labels": ["a", "b"]}, {"text": "y", "labels": ["sad", "a"]}]
    with pytest.raises(
        PeftlabError, match=r"not classes of the model, 'sad' \(did you mean 'bad'\?\), in 1 of 2 rows \(line 2\)"
    ):
        load_rows("multilabel", tmp_path, rows, ("a", "b", "bad"), **SETS)
    with pytest.raises(PeftlabError, match=r"data\.labels are a, c; the model's classes are a, b"):
        load_rows("multilabel", tmp_path, "text,a,c\nx,1,0\n", ("a", "b"), text=["text"], labels=["a", "c"])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3))), min_size=1, max_size=20))
def test_scores_of_label_sets_are_those_of_scikit_learn(pairs: list[tuple[set[int], set[int]]]) -> None:
    kind = answers("text/multilabel", ("a", "b", "c", "d"))
    said, truth = ([[int(i in each[k]) for i in range(4)] for each in pairs] for k in (0, 1))
    outputs = [np.where(row, 1.5, -1.5).astype(np.float32) for row in np.array(said)]
    labels = [sorted(each[1]) for each in pairs]
    found = kind.score(outputs, labels)
    options = {"zero_division": 0}
    assert found["micro_f1"] == pytest.approx(f1_score(truth, said, average="micro", **options))
    assert found["macro_f1"] == pytest.approx(f1_score(truth, said, average="macro", **options))
    assert found["subset_accuracy"] == pytest.approx(accuracy_score(truth, said))
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.from_numpy(np.stack(outputs)), torch.tensor(truth).float()
    )
    assert found["loss"] == pytest.approx(wanted.item(), rel=1e-5)


def test_the_baseline_of_label_sets_is_the_most_frequent_set() -> None:
    kind = answers("text/multilabel", ("a", "b"))
    assert kind.baseline([[0], [0, 1], [0, 1]], [[0, 1], [1]])["subset_accuracy"] == 0.5
    assert kind.baseline([[], [], [1]], [[1], []]) == {"micro_f1": 0, "macro_f1": 0, "subset_accuracy": 0.5}


WORDS = [
    {"tokens": ["Ann", "was", "in", "Bonn"], "tags": ["B-PER", "O", "O", "B-LOC"]},
    {"tokens": ["It", "rains"], "tags": ["O", "O"]},
]


def test_words_and_tags_are_lists_or_texts(tmp_path: Path) -> None:
    one = load_rows("tokens", tmp_path, WORDS)
    assert one.task.labels == ("B-LOC", "B-PER", "O") and one.task.metrics[0] == "entity_f1"
    assert one.splits["validation"]["label"][0] == [1, 2, 2, 0]
    text = "tokens,tags\nAnn was in Bonn,B-PER O O B-LOC\nIt rains,O O\n"
    assert load_rows("tokens", tmp_path, text).fingerprint == one.fingerprint
    named = [{"words": row["tokens"], "ner": row["tags"]} for row in WORDS]
    assert load_rows("tokens", tmp_path, named, text=["words"], label="ner").fingerprint == one.fingerprint
    speech = load_rows("tokens", tmp_path, "tokens,tags\nIt rains,PRON VERB\n")
    assert speech.task.metrics == ("accuracy",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, r"'tags' has not one tag for each word \(1 tags for 2 words\) in 1 of 3 rows \(line 3\)"),
        ({"tokens": ["a"], "tags": ["b-PER"]}, r"'tags' has the tag 'b-PER', which is neither O nor like B-PER, in 1 of 3 rows \(line 3\)"),
        ({"tokens": [], "tags": []}, r"'tokens' is no list of words \(\[\]\) in 1 of 3 rows \(line 3\)"),
        ({"tokens": ["a", None], "tags": ["O", "O"]}, r"'tokens' is no list of words"),
        ({"tokens": None, "tags": ["O"]}, r"'tokens' is missing in 1 of 3 rows \(line 3\)"),
    ],
)  # fmt: skip
def test_bad_words_are_refused_with_file_and_row(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(PeftlabError, match=r"rows\.jsonl: column " + message):
        load_rows("tokens", tmp_path, [*WORDS, row])


def test_a_tag_that_training_did_not_have(tmp_path: Path) -> None:
    with pytest.raises(PeftlabError, match=r"not classes of the model, 'B-LOC'.*in 1 of 2 rows \(line 1\)"):
        load_rows("tokens", tmp_path, WORDS, ("B-PER", "O"))


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("I-PER I-PER O I-LOC", [("PER", 0, 1), ("LOC", 3, 3)]),  # IOB1
        ("I-PER B-PER I-PER", [("PER", 0, 0), ("PER", 1, 2)]),
        ("B-PER I-PER I-LOC O", [("PER", 0, 1), ("LOC", 2, 2)]),  # IOB2
        ("I-PER E-PER E-PER O", [("PER", 0, 1), ("PER", 2, 2)]),  # IOE2
        ("B-PER I-PER E-PER S-PER O", [("PER", 0, 2), ("PER", 3, 3)]),  # IOBES
        ("B-PER I-PER L-PER U-PER U-LOC", [("PER", 0, 2), ("PER", 3, 3), ("LOC", 4, 4)]),  # BILOU
        ("B I O I", [("_", 0, 1), ("_", 3, 3)]),
        ("O O", []),
    ],
)
def test_entities_of_each_scheme(tags: str, found: list[tuple[str, int, int]]) -> None:
    assert entities(tags.split()) == found


@settings(max_examples=300)
@given(st.lists(st.sampled_from(["O", *(f"{p}-{t}" for p in "BIES" for t in ("X", "Y-Z"))]), max_size=9))
def test_entities_are_those_of_seqeval(tags: list[str]) -> None:
    seqeval = pytest.importorskip("seqeval.metrics.sequence_labeling", reason="seqeval is not installed")
    assert entities(tags) == seqeval.get_entities(tags)


def test_which_tags_are_of_entities() -> None:
    assert (
        is_entity_scheme({"O", "B-PER"})
        and is_entity_scheme({"O", "B", "I"})
        and is_entity_scheme({"O", "B-A", "oops"})
    )
    assert (
        not is_entity_scheme({"NOUN", "VERB"})
        and not is_entity_scheme({"O", "N", "V"})
        and not is_entity_scheme({"B-PER"})
    )
    assert entity_tag("U-ORG") and not entity_tag("X-ORG") and not entity_tag("BORG")


def test_scores_of_entities_and_of_each_type() -> None:
    kind = answers("text/tokens", ("B-A", "B-B", "I-A", "O"))

    def logits(tags: list[int]) -> np.ndarray:
        return (4 * np.eye(4)[tags]).astype(np.float32)

    truth = [[0, 2, 3, 1], [3, 3, 0]]
    said = [[0, 2, 3, 3], [1, 3, 0]]  # A is found twice of two, B once wrongly
    found = kind.score([logits(tags) for tags in said], truth)
    assert found["entity_f1"] == pytest.approx(2 / 3) and found["accuracy"] == pytest.approx(5 / 7)
    assert found["entity_precision"] == pytest.approx(2 / 3) and found["entity_recall"] == pytest.approx(2 / 3)
    assert kind.baseline(truth, truth) == {
        "entity_f1": 0, "entity_precision": 0, "entity_recall": 0, "accuracy": pytest.approx(3 / 7)
    }  # fmt: skip
    # A word without a token has no logits: it is answered O, and counts.
    cut = logits(said[0])
    cut[0] = np.nan
    assert kind.predictions([cut]).answers == [["O", "I-A", "O", "O"]]
    assert kind.score([cut], truth[:1])["accuracy"] == pytest.approx(2 / 4)
    assert np.isfinite(kind.score([cut], truth[:1])["loss"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> BertTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *tiny.WORDS, "##s", "##er", "!"])
    )
    return BertTokenizerFast(vocab=str(folder / "vocab.txt"))


def test_the_first_token_of_each_word_is_trained(tokenizer: BertTokenizerFast) -> None:
    words = ["the", "films", "was", "\u200b", "fine!"]
    found = WordTags(find_task("text/tokens")).encode({"text": [words]}, tokenizer, 32)
    assert tokenizer.convert_ids_to_tokens(found["input_ids"][0]) == [
        "[CLS]",
        "the",
        "film",
        "##s",
        "was",
        "fine",
        "!",
        "[SEP]",
    ]
    assert found["first"] == [[1, 2, 4, -1, 5]]
    reference = tokenizer([words], is_split_into_words=True).word_ids(0)
    assert [reference.index(i) if i in reference else -1 for i in range(5)] == found["first"][0]
    cut = WordTags(find_task("text/tokens")).encode({"text": [words]}, tokenizer, 5)
    assert cut["first"] == [[1, 2, -1, -1, -1]] and cut["length"] == [5]
    kind = answers("text/tokens", ("B-X", "O"))
    rows = [
        {**{k: v[0] for k, v in found.items()}, "label": [1, 0, 1, 0, 0]},
        {**{k: v[0] for k, v in cut.items()}, "label": [0] * 5},
    ]
    batch = kind.collate(tokenizer)(rows)
    assert batch["labels"].tolist() == [[1, 0, 1, -100, 0], [0, 0, -100, -100, -100]]
    tokenizer.padding_side = "left"
    shifted = kind.collate(tokenizer)(rows)["first"].tolist()
    tokenizer.padding_side = "right"
    assert shifted == [[1, 2, 4, -1, 5], [4, 5, -1, -1, -1]]


CHOICES = [
    {"prompt": "Two and two?", "choices": ["four", "five"], "label": 0},
    {"prompt": "Black is", "choices": ["white", "red", "dark"], "label": 2},
]


def test_choices_are_a_list_or_columns_and_labels_places_or_texts(tmp_path: Path) -> None:
    one = load_rows("choice", tmp_path, CHOICES)
    assert one.task.labels == () and one.splits["validation"]["text_pair"][:] == [
        ["four", "five"],
        ["white", "red", "dark"],
    ]
    spelled = [{**row, "label": row["choices"][row["label"]]} for row in CHOICES]
    assert load_rows("choice", tmp_path, spelled).fingerprint == one.fingerprint
    columns = "context,question,a,b,label\nAt night,it is,dark,bright,0\nBy day,it is,dark,bright,bright\n"
    with pytest.raises(PeftlabError, match=r"'label' is '0', neither the place \(0 to 1\) nor the text"):
        load_rows("choice", tmp_path, columns, text=["context", "question"], choices=["a", "b"])
    data = load_rows(
        "choice", tmp_path, columns.replace("0\n", "dark\n"), text=["context", "question"], choices=["a", "b"]
    )
    assert data.splits["validation"][:] == {
        "text": ["At night it is", "By day it is"], "text_pair": [["dark", "bright"]] * 2, "label": [0, 1],
    }  # fmt: skip


def test_choices_that_are_numbers_are_texts_where_they_can_be_nothing_else(tmp_path: Path) -> None:
    rows = [{"prompt": "Three fives?", "choices": ["12", "15"], "label": "15"}] * 2
    assert load_rows("choice", tmp_path, rows).splits["validation"]["label"][:] == [1, 1]
    rows = [{"prompt": "One?", "choices": ["1", "2", "3"], "label": "1"}] * 2
    with pytest.raises(PeftlabError, match="is '1', the place of one choice and the text of another"):
        load_rows("choice", tmp_path, rows)
    rows = [{**row, "label": 0} for row in rows]
    assert load_rows("choice", tmp_path, rows).splits["validation"]["label"][:] == [0, 0]


def test_a_list_as_python_writes_it_is_no_list() -> None:
    """Split at blanks it would be other words and tags, as many of each."""
    assert items("['Ann', 'left']") is None and items("['sport']", ",") is None
    assert items('["Ann", "left"]') == ["Ann", "left"] and items("[ see below ]") == ["[", "see", "below", "]"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"label": 3}, r"'label' is 3, neither the place \(0 to 2\) nor the text of one of the row's 3 choices, in 1 of 3 rows \(line 3\)"),
        ({"label": -1}, r"'label' is -1, neither the place"),
        ({"choices": ["one"]}, r"'choices' has fewer than two choices in 1 of 3 rows \(line 3\)"),
        ({"choices": []}, r"'choices' has fewer than two choices"),
        ({"choices": {"text": []}}, r"'choices' is no list of texts"),
        ({"prompt": " "}, r"'prompt' is missing"),
    ],
)  # fmt: skip
def test_bad_choices_are_refused_with_file_and_row(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(PeftlabError, match=r"rows\.jsonl: column " + message):
        load_rows("choice", tmp_path, [*CHOICES, {**CHOICES[1], **row}])


def test_balanced_weights() -> None:
    labels = [0, 1, 1, 1, 2, 2]
    one = answers("text/classification", ("a", "b", "c"))
    expected = compute_class_weight("balanced", classes=np.arange(3), y=np.array(labels))
    assert one.weights("balanced", labels).tolist() == pytest.approx(expected.tolist())
    assert one.weights({"b": 2.0}, labels).tolist() == [1, 2, 1]
    tags = answers("text/tokens", ("B-X", "O")).weights("balanced", [[0, 1, 1], [1]])
    assert tags.tolist() == pytest.approx([2.0, 2 / 3])
    sets = answers("text/multilabel", ("a", "b", "never")).weights("balanced", [[0], [0, 1], [], []])
    assert sets.tolist() == [1, 3, 1]


@pytest.mark.parametrize(
    ("task", "values", "message"),
    [
        ("text/multilabel", {"data": {"text": ["t"]}}, "data.path: missing; task text/multilabel needs it"),
        ("text/multilabel", {"data": {"path": "x", "text": ["t"], "label": "a", "labels": ["b", "c"]}}, "give one of the two"),
        ("text/tokens", {"data": {"path": "x", "bins": {"a": [0, 1], "b": [2, 3]}}}, "data.bins: task text/tokens does not take it"),
        ("text/tokens", {"data": {"path": "x", "text": ["a", "b"]}}, "one column of words"),
        ("text/choice", {"data": {"text": ["a"]}}, "data.path: missing"),
        ("text/classification", {"data": {"path": "x", "text": ["t"], "label": "l", "choices": ["c"]}}, "data.choices: task text/classification does not take it"),
        ("text/choice", {"data": {"path": "x"}, "train": {"class_weights": "balanced"}}, "train.class_weights: task text/choice does not take it"),
        ("text/regression", {"data": {"path": "x", "text": ["t"], "label": "l"}, "train": {"class_weights": {"a": 2}}}, "does not take it"),
    ],
)  # fmt: skip
def test_keys_that_a_task_lacks_or_does_not_take(task: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FinetuneRecipe.model_validate({"model": "m", "task": task, "output_dir": "o", **values})
