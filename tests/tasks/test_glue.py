from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import datasets
import pytest

from peftlab.errors import PeftlabError
from peftlab.tasks.labelled_rows import load_task_data
from peftlab.tasks.table import TASKS, DataConfig, find_task

COUNTS = {
    "cola": {"train": 8551, "validation": 1043, "test": 1063},
    "sst2": {"train": 67349, "validation": 872, "test": 1821},
    "mrpc": {"train": 3668, "validation": 408, "test": 1725},
    "stsb": {"train": 5749, "validation": 1500, "test": 1379},
    "rte": {"train": 2490, "validation": 277, "test": 3000},
    "wnli": {"train": 635, "validation": 71, "test": 146},
    "qnli": {"validation": 5463, "test": 5463},
    "mnli": {"validation_matched": 9815},
    "ax": {"test": 1104},
}
# The integer order of the labels in nyu-mll/glue.
HUB_LABELS = {
    "cola": ("unacceptable", "acceptable"),
    "sst2": ("negative", "positive"),
    "mrpc": ("not_equivalent", "equivalent"),
    "stsb": (),
    "qqp": ("not_duplicate", "duplicate"),
    "mnli": ("entailment", "neutral", "contradiction"),
    "qnli": ("entailment", "not_entailment"),
    "rte": ("entailment", "not_entailment"),
    "wnli": ("not_entailment", "entailment"),
    "ax": ("entailment", "neutral", "contradiction"),
}


@pytest.fixture(scope="module")
def glue(shared):
    return shared / "data" / "glue"


@pytest.fixture(scope="module")
def official(glue):
    """A task's name to its published data, each read once."""
    return cache(lambda task: load(task, glue))


def write(tmp_path, name, *lines):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return str(path.parent)


def load(task, path, **options):
    return load_task_data(f"glue/{task}", DataConfig(path=str(path), **options))


@pytest.mark.parametrize("task", COUNTS)
def test_official_counts_columns_and_labels(official, task):
    data = official(task)
    assert {name: len(rows) for name, rows in data.splits.items()} == COUNTS[task]
    assert data.left_out == {}
    for name, rows in data.splits.items():
        pair = ["text_pair"] if len(data.task.text) == 2 else []
        labelled = [] if name.startswith("test") else ["label"]
        assert rows.column_names == ["text", *pair, *labelled]
        if labelled:
            assert set(rows["label"]) == set(range(len(data.task.labels))) or task == "stsb"


def test_labels_are_in_the_hubs_order():
    assert {f"glue/{name}": labels for name, labels in HUB_LABELS.items()} == {
        name: task.labels for name, task in TASKS.items() if task.glue
    }


def test_the_label_of_known_sentences(official):
    def first(task, split="validation"):
        return official(task).splits[split][0]

    assert first("cola") == {"text": "The sailors rode the breeze clear of the rocks.", "label": 1}
    assert first("sst2") == {"text": "it 's a charming and often affecting journey . ", "label": 1}
    assert first("rte")["label"] == 1  # not_entailment
    assert first("qnli")["label"] == 0  # entailment
    assert first("wnli")["label"] == 0  # the hair has to be cleaned: not_entailment
    assert first("mnli", "validation_matched")["label"] == 1  # neutral
    assert first("stsb") == {
        "text": "A man with a hard hat is dancing.",
        "text_pair": "A man wearing a hard hat is dancing.",
        "label": 5.0,
    }


def test_stray_quotes_are_text(official):
    row = official("mrpc").splits["validation"][0]
    assert row["text_pair"] == '"The foodservice pie business does not fit our long-term growth strategy.'
    assert row["label"] == 1


def test_the_tasks_own_folder_and_its_parent_give_the_same(glue, official):
    inside, above = load("wnli", glue / "WNLI"), official("wnli")
    assert inside.fingerprint == above.fingerprint
    assert inside.splits["train"][:] == above.splits["train"][:]


def test_a_seeded_subset_of_the_training_split(glue, official):
    full = official("rte")
    some, again, other = (load("rte", glue, max_train_examples=100, split_seed=seed) for seed in (0, 0, 1))
    assert some.splits["train"]["text"] == again.splits["train"]["text"] != other.splits["train"]["text"]
    assert len(some.splits["train"]) == 100 and len(some.splits["validation"]) == 277
    assert some.left_out == {"beyond data.max_train_examples": 2390}
    assert len({full.fingerprint, some.fingerprint, other.fingerprint}) == 3
    assert some.fingerprint == again.fingerprint
    place = {tuple(row.values()): i for i, row in enumerate(full.splits["train"])}
    places = [place[tuple(row.values())] for row in some.splits["train"]]
    assert places == sorted(places)
    assert load("rte", glue, max_train_examples=9999).fingerprint == full.fingerprint


def test_mnlis_official_columns_are_found_by_name(tmp_path):
    columns = [f"extra{i}" for i in range(8)]
    header = "\t".join([*columns, "sentence1", "sentence2", "label1", "gold_label"])
    row = "\t".join([*columns, "A man.", "A person.", "neutral", "contradiction"])
    for file in ("train", "dev_matched", "dev_mismatched"):
        path = write(tmp_path, f"{file}.tsv", header, row)
    write(tmp_path, "test_matched.tsv", "sentence1\tsentence2", "A\tB")
    data = load("mnli", path)
    assert list(data.splits) == ["train", "validation_matched", "validation_mismatched", "test_matched"]
    assert data.splits["train"][0] == {"text": "A man.", "text_pair": "A person.", "label": 2}
    assert data.splits["test_matched"].column_names == ["text", "text_pair"]


def test_qqps_broken_lines_are_left_out_and_counted(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    path = write(tmp_path, "train.tsv", header, "1\t2\t3\tWho?\tWhom?\t1", '"\tWas he real?\t0', "4\t5\t6\tA?\tB?\t0")
    data = load("qqp", path)
    assert data.splits["train"]["text"][:] == ["Who?", "A?"]
    assert data.splits["train"]["label"][:] == [1, 0]
    assert data.left_out == {"lines with a wrong number of columns": 1}


def test_byte_order_mark_windows_newlines_and_unicode_line_separators(tmp_path):
    separator = "one\u2028line\x0band\x85more"
    path = write(tmp_path, "dev.tsv", "\ufeffsentence\tlabel\r", f"{separator}\t1\r", "")
    assert load("sst2", path).splits["validation"][:] == {"text": [separator], "label": [1]}


@pytest.mark.parametrize(
    ("task", "lines", "message"),
    [
        ("sst2", ["sentence\tlabel", "good\t1", "bad"], r"train\.tsv:3: 1 columns where 2"),
        ("sst2", ["sentence\tlabel", "good\t2"], r"train\.tsv:2: unknown label '2'; one of 0, 1"),
        ("sst2", ["sentence\tlabel", "good\t"], r"train\.tsv:2: unknown label ''"),
        ("sst2", ["sentense\tlabel", "good\t1"], r"no column 'sentence'.*did you mean 'sentense'"),
        ("sst2", ["sentence\tlabel"], r"train\.tsv: no examples"),
        ("sst2", [], r"train\.tsv: is empty"),
        ("cola", ["sentence\tlabel", "good\t1"], r"train\.tsv:1: 2 columns where 4"),
        (
            "rte",
            ["sentence1\tsentence2\tlabel", "a\tb\tentailmnt"],
            r":2: unknown label 'entailmnt' \(did you mean 'entailment'\?\)",
        ),
        ("rte", ["sentence1\tsentence2\tlabel", "a\tb\t0"], r":2: unknown label '0'"),
        (
            "stsb",
            ["sentence1\tsentence2\tscore", "a\tb\t5.1"],
            r":2: score '5.1' is not a number from 0 to 5",
        ),
        ("stsb", ["sentence1\tsentence2\tscore", "a\tb\tnan"], r":2: score 'nan'"),
        ("stsb", ["sentence1\tsentence2", "a\tb"], r"no column 'score'"),
    ],
)
def test_malformed_files_are_named_with_their_line(tmp_path, task, lines, message):
    with pytest.raises(PeftlabError, match=message):
        load(task, write(tmp_path, "train.tsv", *lines))


def test_all_bad_labels_are_told_at_once(tmp_path):
    path = write(tmp_path, "train.tsv", "sentence\tlabel", "a\t2", "b\t1", "c\tx", "d")
    with pytest.raises(PeftlabError, match=r"train\.tsv:5: 1 columns where 2 are expected$"):
        load("sst2", path)
    write(tmp_path, "train.tsv", "sentence\tlabel", "a\t2", "b\t1", "c\tx")
    with pytest.raises(PeftlabError, match=r":2: unknown label '2'.*; and 1 more bad rows \(line 4\)"):
        load("sst2", path)


def test_a_models_classes_must_be_the_tasks_in_its_order(tmp_path):
    path = write(tmp_path, "dev.tsv", "sentence\tlabel", "a\t1", "b\t0")
    for classes in (("negative", "positive"), ("NEGATIVE", "Positive"), ("LABEL_0", "LABEL_1"), ("0", "1")):
        data = load_task_data("glue/sst2", DataConfig(path=path), classes)
        assert data.task.labels == ("negative", "positive") and data.splits["validation"]["label"][:] == [1, 0]
    for classes in (("positive", "negative"), ("LABEL_0",), ("a", "b", "c")):
        with pytest.raises(PeftlabError, match="the task's are negative, positive, in this order"):
            load_task_data("glue/sst2", DataConfig(path=path), classes)


def test_not_utf8_names_the_line(tmp_path):
    (tmp_path / "train.tsv").write_bytes(b"sentence\tlabel\nok\t1\ncaf\xe9\t0\n")
    with pytest.raises(PeftlabError, match=r"train\.tsv:3: not UTF-8"):
        load("sst2", tmp_path)


def test_a_directory_without_the_task(tmp_path):
    (tmp_path / "cola").mkdir()
    with pytest.raises(PeftlabError, match=r"neither a folder 'CoLA' \(did you mean 'cola'\?\) nor any of train"):
        load("cola", tmp_path)
    with pytest.raises(PeftlabError, match="no such"):
        load("cola", tmp_path / "absent")
    with pytest.raises(PeftlabError, match="no such directory"):
        load("cola", "absent")


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(PeftlabError, match=r"'glue/colla' \(did you mean 'glue/cola'\?\)"):
        find_task("glue/colla")


def test_an_unreachable_hub_says_how_to_use_a_directory(tmp_path):
    # A fresh process: the hub's client reads its settings once, when imported.
    code = (
        "from peftlab.tasks.table import DataConfig\n"
        "from peftlab.errors import PeftlabError\n"
        "from peftlab.tasks.labelled_rows import load_task_data\n"
        "try: load_task_data('glue/rte', DataConfig())\n"
        "except PeftlabError as error: print(error)\n"
    )
    here = os.path.dirname(__file__)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([here, os.path.join(here, "..", "..")]),
    }
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "glue/rte: nyu-mll/glue could not be loaded from the hub" in result.stdout
    assert "data.path" in result.stdout and "RTE/" in result.stdout


def test_a_hub_copy_is_renamed_and_unlabelled_splits_lose_their_column(monkeypatch):
    features = datasets.Features(
        sentence=datasets.Value("string"),
        label=datasets.ClassLabel(names=["negative", "positive"]),
        idx=datasets.Value("int32"),
    )
    rows = {"sentence": ["good ", "bad"], "label": [1, 0], "idx": [0, 1]}
    hub = datasets.DatasetDict(
        train=datasets.Dataset.from_dict(rows, features),
        test=datasets.Dataset.from_dict({**rows, "label": [-1, -1]}, features),
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: hub)
    data = load_task_data("glue/sst2", DataConfig())
    assert data.splits["train"][:] == {"text": ["good ", "bad"], "label": [1, 0]}
    assert data.splits["test"].column_names == ["text"]
    with pytest.raises(PeftlabError, match=r"classes \['negative', 'positive'\] where"):
        load_task_data("glue/cola", DataConfig())
