"""Reading and scoring label sets, tagged words and choices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn.metrics import accuracy_score, f1_score
from sklearn.utils.class_weight import compute_class_weight
from transformers import BertTokenizerFast

from peftlab.errors import PeftlabError
from peftlab.recipe.schema import FinetuneRecipe
from peftlab.registry import resolve
from peftlab.tasks.answers import Answers, WordTags
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labelled_rows import entities, entity_tag, is_entity_scheme, load_task_data
from peftlab.tasks.table import find_task
from tests.training import tiny

SETS = {"text": ["text"], "label": "labels"}


def load(kind: str, path: Path, rows: list[dict[str, Any]] | str, classes: Any = None, **options: Any) -> Any:
    file = path / ("rows.csv" if isinstance(rows, str) else "rows.jsonl")
    file.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    return load_task_data(f"text/{kind}", DataConfig(path=str(file), validation="all", **options), classes)


def answers(name: str, labels: tuple[str, ...], **changes: Any) -> Answers:
    from dataclasses import replace

    task = replace(find_task(name), labels=labels, **changes)
    return resolve(task.answers)(task)


def test_label_sets_are_the_same_in_every_spelling(tmp_path: Path) -> None:
    lists = [{"text": f"t{i}", "labels": found} for i, found in enumerate((["b", "a"], ["c"], ["a", "a"]))]
    one = load("multilabel", tmp_path, lists, **SETS)
    assert one.task.labels == ("a", "b", "c")
    assert one.splits["validation"]["label"][:] == [[0, 1], [2], [0]]
    spelled = "text,labels\nt0,b | a\nt1,c\nt2,a|a\n"
    assert load("multilabel", tmp_path, spelled, separator="|", **SETS).fingerprint == one.fingerprint
    json_cells = 'text,labels\nt0,"[""b"", ""a""]"\nt1,"[""c""]"\nt2,"[""a""]"\n'
    assert load("multilabel", tmp_path, json_cells, **SETS).fingerprint == one.fingerprint
    columns = "text,a,b,c\nt0,1,1,0\nt1,0,0.0,true\nt2,1,0,False\n"
    assert load("multilabel", tmp_path, columns, text=["text"], labels=["a", "b", "c"]).fingerprint == one.fingerprint
    known = load("multilabel", tmp_path, lists, ("c", "b", "a", "z"), **SETS)
    assert known.splits["validation"]["label"][:] == [[1, 2], [0], [2]]


def test_columns_of_0_and_1_may_say_that_a_row_has_no_label(tmp_path: Path) -> None:
    data = load("multilabel", tmp_path, "text,a,b\nx,0,0\ny,0,1\n", text=["text"], labels=["a", "b"])
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
        load("multilabel", tmp_path, rows, **options)


def test_labels_that_the_model_does_not_have(tmp_path: Path) -> None:
    rows = [{"text": "x", "labels": ["a", "b"]}, {"text": "y", "labels": ["sad", "a"]}]
    with pytest.raises(
        PeftlabError, match=r"not classes of the model, 'sad' \(did you mean 'bad'\?\), in 1 of 2 rows \(line 2\)"
    ):
        load("multilabel", tmp_path, rows, ("a", "b", "bad"), **SETS)
    with pytest.raises(PeftlabError, match=r"data\.labels are a, c; the model's classes are a, b"):
        load("multilabel", tmp_path, "text,a,c\nx,1,0\n", ("a", "b"), text=["text"], labels=["a", "c"])


@settings(max_examples=40, deadline=None)
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
    one = load("tokens", tmp_path, WORDS)
    assert one.task.labels == ("B-LOC", "B-PER", "O") and one.task.metrics[0] == "entity_f1"
    assert one.splits["validation"]["label"][0] == [1, 2, 2, 0]
    text = "tokens,tags\nAnn was in Bonn,B-PER O O B-LOC\nIt rains,O O\n"
    assert load("tokens", tmp_path, text).fingerprint == one.fingerprint
    named = [{"words": row["tokens"], "ner": row["tags"]} for row in WORDS]
    assert load("tokens", tmp_path, named, text=["words"], label="ner").fingerprint == one.fingerprint
    speech = load("tokens", tmp_path, "tokens,tags\nIt rains,PRON VERB\n")
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
        load("tokens", tmp_path, [*WORDS, row])


def test_a_tag_that_training_did_not_have(tmp_path: Path) -> None:
    with pytest.raises(PeftlabError, match=r"not classes of the model, 'B-LOC'.*in 1 of 2 rows \(line 1\)"):
        load("tokens", tmp_path, WORDS, ("B-PER", "O"))


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


@settings(max_examples=300, deadline=None)
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
    one = load("choice", tmp_path, CHOICES)
    assert one.task.labels == () and one.splits["validation"]["text_pair"][:] == [
        ["four", "five"],
        ["white", "red", "dark"],
    ]
    spelled = [{**row, "label": row["choices"][row["label"]]} for row in CHOICES]
    assert load("choice", tmp_path, spelled).fingerprint == one.fingerprint
    columns = "context,question,a,b,label\nAt night,it is,dark,bright,0\nBy day,it is,dark,bright,bright\n"
    with pytest.raises(PeftlabError, match=r"'label' is '0', neither the place \(0 to 1\) nor the text"):
        load("choice", tmp_path, columns, text=["context", "question"], choices=["a", "b"])
    data = load("choice", tmp_path, columns.replace("0\n", "dark\n"), text=["context", "question"], choices=["a", "b"])
    assert data.splits["validation"][:] == {
        "text": ["At night it is", "By day it is"], "text_pair": [["dark", "bright"]] * 2, "label": [0, 1],
    }  # fmt: skip


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
        load("choice", tmp_path, [*CHOICES, {**CHOICES[1], **row}])


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
        ("text/multilabel", {"data": {"path": "x", "text": ["t"]}}, "data.label: missing; task text/multilabel needs it"),
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
