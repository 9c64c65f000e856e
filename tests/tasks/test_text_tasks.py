from __future__ import annotations

import gzip
import json
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pydantic import ValidationError

from peftlab.errors import PeftlabError
from peftlab.registry import resolve
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labelled import class_counts
from peftlab.tasks.labelled_rows import load_task_data, stratified

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


@settings(deadline=None)
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
        (labelled("a", "b"), {"validation": 2}, "holds out 2 of 2 examples"),
        (labelled("a", "b"), {"validation": 0.1}, "holds out 0 of 2 examples"),
        (labelled("a", "b", "a"), {"validation": 1.5}, "a share is below 1"),
        (labelled("a", "b", "a"), {"validation": None}, "data.validation must say"),
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
        for file in (path, written):
            data = load(file, validation="all", classes=("LABEL_0", "LABEL_1"))
            assert data.splits["validation"]["label"][:] == [1, 0]
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


def test_a_dataset_that_travels_as_a_package(reviews):
    bins = {"negative": (None, -0.5), "positive": (0.5, None)}
    data = load(reviews, text=["text"], label="sentiment", bins=bins, validation=1000)
    assert len(data.splits["validation"]) == 1000
    assert sum(map(len, data.splits.values())) + data.left_out["outside every bin"] == 10605
    shares = [sum(rows["label"]) / len(rows) for rows in data.splits.values()]
    assert shares[0] == pytest.approx(shares[1], abs=1e-3)
