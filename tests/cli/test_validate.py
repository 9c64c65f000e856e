"""``peftlab validate`` checks what ``run`` would find: data and columns, and with ``--deep`` labels, targets and space."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import peftlab
from peftlab.errors import PeftlabError
from peftlab.pipelines.preview import deep_check, deep_lines
from peftlab.recipe import library
from tests.command_line import invoke
from tests.training import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model") / "bert")


def write(
    tmp_path: Path, model: Path, rows: str = "text,label\ngood,a\nbad,b\nfine,a\ndull,b\n", **changes: Any
) -> Path:
    (tmp_path / "rows.csv").write_text(rows)
    values = tiny.recipe(model, tmp_path / "rows.csv", tmp_path / "run")
    values["data"]["validation"] = 1
    return tiny.write_recipe({**values, **changes}, tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.path": "{}/row.csv"}, r"row\.csv'?: no such file or directory \(did you mean 'rows\.csv'\?\)"),
        ({"data.label": "labl"}, r"rows\.csv: no column 'labl' \(data\.label\) \(did you mean 'label'\?\); columns: text, label"),
        ({"data.text": "[txt]"}, r"no column 'txt' \(data\.text\)"),
        ({"data.validation": "null"}, r"rows\.csv: no validation file\. Give data\.path a directory with train\.\* and .* a number of rows \(200\)"),
        ({"task": "text/tokens", "data.text": "null", "data.label": "null"}, r"no column 'tokens' \(data\.text\); columns"),
        ({"task": "text/choice", "data.text": "null", "data.label": "null"}, r"no column 'choices' \(data\.choices\)"),
        ({"task": "text/multilabel", "data.label": "null", "data.labels": "[x, y]"}, r"no column 'x' \(data\.labels\)"),
        ({"task": "text/completion", "data.text": "null", "data.label": "null"}, r"no column 'prompt' \(data\.prompt\)"),
        ({"task": "text/plain", "data.text": "[body]", "data.label": "null"}, r"no column 'body' \(data\.text\)"),
        ({"task": "text/preference", "data.text": "null", "data.label": "null"}, r"no column 'chosen'"),
        ({"task": "glue/cola", "data.path": "{}", "data.text": "null", "data.label": "null", "data.validation": "null"}, "contains neither a folder 'CoLA'"),
    ],
)  # fmt: skip
def test_missing_data_and_columns_are_found(tmp_path: Path, model: Path, changes: dict[str, str], message: str) -> None:
    file = write(tmp_path, model)
    with pytest.raises(PeftlabError, match=message):
        peftlab.validate(file, [f"{key}={value.format(tmp_path)}" for key, value in changes.items()])


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{}/bart", r"no such file or directory \(did you mean 'bert'\?\)"),
        ("package:pytest/no-model", "package 'pytest' has no 'no-model'"),
        ("package:no-such-package/model", "package 'no-such-package' is not installed"),
        ("{}", "has no config.json"),
    ],
)
def test_a_model_that_is_not_there_is_found(tmp_path: Path, model: Path, reference: str, message: str) -> None:
    file = write(tmp_path, model)
    with pytest.raises(PeftlabError, match=message):
        peftlab.validate(file, [f"model={reference.format(model.parent)}"])
    assert peftlab.validate(file, ["model=an-organisation/a-model-of-the-hub"])


def test_a_misspelt_directory_is_no_hub_id_where_the_hub_is_not_asked(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, model)
    monkeypatch.chdir(model.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert peftlab.validate(file, ["model=bertt"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PeftlabError, match=r"model 'bertt': no such directory \(did you mean 'bert'\?\)"):
        peftlab.validate(file, ["model=bertt"])


def test_columns_of_a_table_s_cells_and_of_split_files(tmp_path: Path, model: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("text,label\ngood,a\nbad,b\n")
    (tmp_path / "data" / "validation.csv").write_text("text,mood\ngood,a\n")
    (tmp_path / "data" / "test.csv").write_text("text\ngood\n")
    table = {
        "kind": "table", "model": str(model), "tasks": ["text/classification"], "rows": {"one": {}}, "output_dir": str(tmp_path / "t"),
        "data": {"path": str(tmp_path / "data"), "text": ["text"], "label": "label"}, "train": {"max_length": 32},
    }  # fmt: skip
    file = tmp_path / "table.yaml"
    file.write_text(json.dumps(table))
    with pytest.raises(PeftlabError, match=r"validation\.csv: no column 'label' \(data\.label\)"):
        peftlab.validate(file)
    (tmp_path / "data" / "validation.csv").write_text("text,label\ngood,a\n")
    lines = deep_lines(deep_check(peftlab.validate(file)))
    assert [line.split()[0] for line in lines] == [
        "data",
        "class",
        "a",
        "b",
        *["warning:"] * 2,
        "method",
        "checkpoints",
    ]
    assert lines[5] == "warning: validation rows with the text of a training row: 1; scores may be too high"


def test_deep_reads_labels_finds_targets_and_compares_space(tmp_path: Path, model: Path, monkeypatch: Any) -> None:
    file = write(tmp_path, model)
    lines = deep_lines(deep_check(peftlab.validate(file)))
    assert lines[0] == "data of text/classification: train 3, validation 1 (columns: text, label)"
    assert lines[1:4] == ["class  train  validation", "a          1           1", "b          2           0"]
    assert lines[4] == "warning: fewer than 5 training rows: a (1), b (2)"
    assert "method lora trains" in lines[5] and "BertForSequenceClassification" in lines[5] and "query (2)" in lines[5]
    assert lines[6].startswith("checkpoints and models need 0.")
    lines = deep_lines(deep_check(peftlab.validate(file, ["train.max_length=3"])))
    assert "truncated" not in "".join(lines)
    (tmp_path / "plain.csv").write_text("text\ngood film\ndull plot\n")
    plain = ["task=text/plain", f"data.path={tmp_path / 'plain.csv'}", "~data.text", "~data.label"]
    lines = deep_lines(deep_check(peftlab.validate(file, plain)))
    assert lines[0] == "data of text/plain: train 1, validation 1 (columns: text)" and lines[1].startswith(
        "method lora"
    )
    long = write(tmp_path, model, "text,label\n" + "a good film,a\nbad,b\n" * 3)
    lines = deep_lines(deep_check(peftlab.validate(long, ["train.max_length=4"])))
    assert re.search(r"truncated: \d of 5 training rows.* \(4 tokens\); the longest has 5", "\n".join(lines))
    with pytest.raises(PeftlabError, match="single class"):
        deep_check(peftlab.validate(write(tmp_path, model, "text,label\ngood,a\nbad,a\n")))
    with pytest.raises(PeftlabError, match="'qery' matches no module; nearest: query"):
        deep_check(peftlab.validate(write(tmp_path, model), ["method.target_modules=[qery]"]))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(PeftlabError, match=r"output_dir: checkpoints and models need 0\.\d MB in .*; 0 MB are free"):
        deep_check(peftlab.validate(file))


CHAT = '{"messages": [{"role": "user", "content": "a film"}, {"role": "assistant", "content": "good"}]}\n' * 3


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        (
            None,
            ["data.validation=all"],
            r"text/classification: there is no training split; data\.validation=all is for",
        ),
        (None, ["train.max_length=33"], r"train\.max_length is 33; .*bert has positions for 32 tokens"),
        (CHAT, [], r"rows\.jsonl:\d: a chat, but the model's tokenizer has no chat template"),
    ],
)
def test_deep_refuses_what_the_run_refuses(
    tmp_path: Path, model: Path, rows: str | None, overrides: list[str], message: str
) -> None:
    file = write(tmp_path, model)
    if rows is not None:
        (tmp_path / "rows.jsonl").write_text(rows)
        chat = ["task=text/chat", f"data.path={tmp_path / 'rows.jsonl'}", "~data.text", "~data.label"]
        overrides = [*chat, *overrides]
    checked = peftlab.validate(file, overrides)
    for refuse in (lambda: deep_check(checked), lambda: peftlab.run(file, overrides)):
        with pytest.raises(PeftlabError, match=message):
            refuse()


def test_what_deep_and_show_found_is_in_the_json(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path, model)
    found = json.loads(invoke("validate", file, "--deep", "--show", "1", "--json", "-").stdout)
    recipe = peftlab.validate(file).as_json()
    assert {key: found[key] for key in recipe} == recipe and found.keys() - recipe.keys() == {"deep", "examples"}
    (data,), (method,) = found["deep"]["data"], found["deep"]["methods"]
    assert (data["task"], data["columns"]) == ("text/classification", ["text", "label"])
    assert data["rows"] == {"train": 3, "validation": 1}
    assert data["classes"] == {"a": {"train": 1, "validation": 1}, "b": {"train": 2, "validation": 0}}
    assert method["method"] == "lora" and method["found"]["architecture"] == "BertForSequenceClassification"
    assert {name.rpartition(".")[2]: n for name, n in method["found"]["matches"].items()}["query"] == 2
    assert found["deep"]["directory"] == recipe["output_dir"]
    assert 0 < found["deep"]["needed_bytes"] < found["deep"]["free_bytes"]
    assert [part["trained"] for part in found["examples"][0]["parts"]] == [False, True]


def test_deep_counts_the_parameters_of_a_head_for_the_classes_of_the_data(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, model, "text,label\ngood,a\nbad,b\nfine,a\ndull,b\nplot,c\nfilm,c\n")
    (method,) = deep_check(peftlab.validate(file)).methods
    results = peftlab.run(file, ["train.max_steps=1", "~data.text", "~data.label"])
    assert (
        "data.text: not given; column text is used\ndata.label: not given; column label is used"
        in capsys.readouterr().out
    )
    stored = peftlab.validate(tmp_path / "run" / "recipe.yaml").data
    assert (stored.text, stored.label) == (["text"], "label")
    assert (method.found.trainable, method.found.total) == (results.trainable_parameters, results.total_parameters)


def test_where_targets_came_from_is_said_of_defaults_alone(model: Path) -> None:
    fields = ({}, {"target_modules": "all-linear"})
    assert [peftlab.inspect_model(model, "lora", each).targets for each in fields] == ["table", "given"]
    assert peftlab.inspect_model(model, "houlsby").targets == "given"


TINY: dict[str, dict[str, Any]] = {  # encoders with no row in the table of query and value projections
    "nystromformer": {"num_landmarks": 64, "segment_means_seq_len": 64},
    "squeezebert": {"embedding_size": 16, "q_groups": 2, "k_groups": 2, "v_groups": 2, "post_attention_groups": 1, "intermediate_groups": 2, "output_groups": 2},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16, "num_feedforward_networks": 1},
    "roformer": {"embedding_size": 16},
    "canine": {"num_hash_buckets": 40, "local_transformer_stride": 16},  # characters are hashed: no table of tokens
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "pooler_hidden_size": 16},
    "xlm": {"emb_dim": 16, "n_layers": 2, "n_heads": 2},
    "funnel": {"block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24},
}  # fmt: skip
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("kind", TINY)
def test_the_template_trains_any_encoder(kind: str, tmp_path: Path, model: Path) -> None:
    torch.manual_seed(0)
    own = TINY[kind]
    sizes = {} if "d_model" in own or "emb_dim" in own else SIZES
    config = AutoConfig.for_model(kind, vocab_size=len(tiny.WORDS) + 5, pad_token_id=0, **{**sizes, **own})
    AutoModelForSequenceClassification.from_config(config).base_model.save_pretrained(tmp_path / "encoder")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "encoder")
    rows = tiny.save_rows(tmp_path / "reviews.csv", 30)
    template = library.recipes_root() / "text-classification.yaml"
    overrides = [
        f"model={tmp_path / 'encoder'}", f"data.path={rows}", f"output_dir={tmp_path / 'run'}",
        "train.max_length=16", "train.max_steps=2",
    ]  # fmt: skip
    (targets,) = [
        line for line in deep_lines(deep_check(peftlab.validate(template, overrides))) if line.startswith("method")
    ]
    # SqueezeBERT's maps but the pooler's are grouped convolutions, which no merge could fold an update into.
    assert ("attention" in targets) == (kind != "squeezebert")
    results = peftlab.run(template, overrides)
    assert f"{results.trainable_parameters:,} of {results.total_parameters:,}" in targets
    assert results.merge is not None and results.merge.argmax_agreement == 1
    assert (
        len(peftlab.predict(tmp_path / "run" / "merged", ["good film"], tmp_path / "run" / "recipe.yaml").answers) == 1
    )
