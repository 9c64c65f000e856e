"""YAML 1.2 with lines, overrides, and what each mistake says."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

import pytest

from peftlab.errors import PeftlabError
from peftlab.recipe.load import load_recipe

BASE = """\
model: FacebookAI/roberta-base
task: glue/cola
output_dir: runs/x
"""


@pytest.fixture(autouse=True)
def _in_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str) -> str:
    Path("recipes").mkdir(exist_ok=True)
    Path("recipes/x.yaml").write_text(text, encoding="utf-8")
    return "recipes/x.yaml"


def complaint(text: str, *overrides: str) -> list[str]:
    with pytest.raises(PeftlabError) as caught:
        load_recipe(write(text), list(overrides))
    return str(caught.value).splitlines()


@pytest.mark.parametrize("seed", [-1, 2**32, 10**18, 10**400])
def test_a_seed_is_one_that_all_generators_take(seed: int) -> None:
    assert "train.seed" in complaint(BASE, f"train.seed={seed}")[0]
    assert load_recipe(write(BASE), ["train.seed=4294967295"]).train.seed == 2**32 - 1


def test_yaml_is_version_1_2() -> None:
    text = BASE + "revision: no\ntrain:\n  lr: 1e-4\n  max_steps: 010\n"
    recipe = load_recipe(write(text))
    assert recipe.revision == "no"
    assert recipe.train.lr == 1e-4
    assert recipe.train.max_steps == 10
    assert load_recipe(write(BASE + "revision: 2024-01-01")).revision == "2024-01-01"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.lr=1e-4", "train.lr", 1e-4),
        ("model=package:x/y=z", "model", "package:x/y=z"),
        ("method.target_modules=[query,value]", "method.target_modules", ["query", "value"]),
        ("method={name: lora, r: 3}", "method.r", 3),
        ("method=head", "method.name", "head"),
        ("data.path=null", "data.path", None),
        ("revision='1'", "revision", "1"),
        ("~train", "train.lr", 5e-4),
        ("~train.lr", "train.lr", 5e-4),
    ],
)
def test_override(override: str, path: str, value: object) -> None:
    text = BASE + "data:\n  path: a\nmethod:\n  name: lora\ntrain:\n  lr: 2\n"
    recipe = load_recipe(write(text), [override])
    found: object = recipe
    for key in path.split("."):
        found = getattr(found, key)
    assert found == value


def test_a_text_stands_for_a_list_of_one() -> None:
    own = BASE.replace("glue/cola", "text/classification") + "data: {path: a.csv, text: review, label: mood}\n"
    recipe = load_recipe(write(own), ["train.trackers=wandb", "method=lora", "method.modules_to_save=pooler"])
    assert (recipe.data.text, recipe.train.trackers, recipe.method.modules_to_save) == (
        ["review"],
        ["wandb"],
        ["pooler"],
    )
    assert load_recipe(write(own), ["data.text=[review, reply]"]).data.text == ["review", "reply"]


def test_overrides_apply_in_order() -> None:
    recipe = load_recipe(write(BASE), ["train.lr=1", "train.lr=2", "method=lora", "method.r=5", "~train.lr"])
    assert (recipe.train.lr, recipe.method.r) == (5e-4, 5)


def test_overriding_one_alias_leaves_the_other() -> None:
    text = BASE + "data:\n  path: &p a\nrevision: *p\n"
    recipe = load_recipe(write(text), ["data.path=b"])
    assert (recipe.data.path, recipe.revision) == ("b", "a")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.learning_rate", "lr"),
        ("train.num_train_epochs", "epochs"),
        ("train.num_epochs", "epochs"),
        ("train.per_device_train_batch_size", "batch_size"),
        ("train.bs", "batch_size"),
        ("train.max_seq_length", "max_length"),
        ("train.max_len", "max_length"),
        ("train.warmup_ratio", "warmup"),
        ("train.warmup_steps", "warmup"),
        ("train.lr_scheduler_type", "scheduler"),
        ("train.early_stopping_patience", "early_stopping"),
        ("train.grad_accum", "gradient_accumulation_steps"),
        ("train.grad_accumulation", "gradient_accumulation_steps"),
        ("train.Weight-Decay", "weight_decay"),
        ("train.epocs", "epochs"),
        ("method.rank", "r"),
        ("method.alpha", "lora_alpha"),
        ("method.dropout", "lora_dropout"),
        ("method.modules", "target_modules"),
        ("output", "output_dir"),
        ("base_model", "model"),
        ("model_name_or_path", "model"),
        ("dataset", "data"),
        ("lr", "train.lr"),
        ("learning_rate", "train.lr"),
        ("rank", "method.r"),
        ("train.path", "data.path"),
        ("data.seed", "train.seed"),
    ],
)
def test_unknown_key_names_the_right_one(key: str, meant: str) -> None:
    section, _, name = key.rpartition(".")
    body = f"{section}:\n  {name}: 1\n" if section else f"{name}: 1\n"
    line = 5 if section else 4
    if section == "method":
        body, line = body + "  name: lora\n", 5
    assert complaint(BASE + body) == [f"recipes/x.yaml:{line}: {key}: unknown key (did you mean '{meant}'?)"]
    assert complaint(BASE, "method=lora", f"{key}=1") == [
        f"override '{key}=1': {key}: unknown key (did you mean '{meant}'?)"
    ]


def test_unknown_key_of_the_top_level_and_of_nowhere() -> None:
    assert complaint(BASE + "train:\n  output: a") == [
        "recipes/x.yaml:5: train.output: unknown key (did you mean 'output_dir' at the top level?)"
    ]
    (line,) = complaint(BASE, "zzz=1")
    assert line.startswith("override 'zzz=1': zzz: unknown key; keys here: kind, model, revision, ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("train:\n  lr: fast", "5: train.lr: expected number above 0 or null, got 'fast'"),
        ("train:\n  lr: -1", "5: train.lr: expected number above 0 or null, got -1"),
        ("train:\n  lr: .inf", "5: train.lr: expected number above 0 or null, got '.inf'"),
        ("train:\n  lr: true", "5: train.lr: expected number above 0 or null, got true"),
        ("train:\n  max_steps: 1.5", "5: train.max_steps: expected whole number from 1 or null, got 1.5"),
        (
            "train:\n  scheduler: linaer",
            "5: train.scheduler: expected linear, cosine or constant, got 'linaer' (did you mean 'linear'?)",
        ),
        (
            "train:\n  trackers: [wandb, tensorbord]",
            "5: train.trackers: expected list of tensorboard, wandb or trackio, "
            'got ["wandb", "tensorbord"] (did you mean \'tensorboard\'?)',
        ),
        ("train:\n  betas: [0.9,\n    1]", "6: train.betas: expected [number from 0 below 1, "
         "number from 0 below 1], got [0.9, 1]"),
        ("merge: no", "4: merge: expected true or false or section or null, got 'no' (did you mean false?)"),
        ("data: {path:rows.csv}", "4: data.path:rows.csv: unknown key (did you mean 'path: rows.csv', with a blank after the colon?)"),
        ("merge: {inot: original}", "4: merge.inot: unknown key (did you mean 'into'?)"),
        ("merge: {into: orignal}", "4: merge.into: expected dequantised or original, got 'orignal' "
         "(did you mean 'original'?)"),
        ("revision: 1234567", "4: revision: expected text or null, got 1234567 (put it in quotes)"),
        ("data:\n  text: 3", "5: data.text: expected text or list of text (1 to 2 entries) or null, got 3"),
        ("data:\n  text: [a, b, c]", "5: data.text: expected text or list of text (1 to 2 entries) or null, "
         'got ["a", "b", "c"]'),
        ("data:\n  labels: a", "5: data.labels: expected list of text (2 or more entries) or null, got 'a' "
         "(did you mean [a]?)"),
        ("data: a.csv", "4: data: expected keys below it, got 'a.csv'"),
        ("train:", "4: train: expected keys below it, got null"),
        ("method: head", "4: method: expected keys below it, got 'head' (write {name: head})"),
        ("kind: finetun", "4: kind: unknown kind 'finetun' (did you mean 'finetune'?); one of finetune, draft, table, draft_table"),
        ("train:\n  lr: 1\n  seed: 2\n  lr: 3", "7: train.lr: duplicate key, first on line 5"),
        ("revision: !secret x", "4: revision: unknown tag !secret"),
        ("data: &a\n  path: *a", "5: data.path: an alias refers to a value that contains it"),
        ("[a, b]: 1", "4: a key is one word, not a list or a mapping"),
        ("train:\n\tlr: 1", "5: not valid YAML: while scanning for the next token "
         "found character '\\t' that cannot start any token"),
        ("train: [1, 2\n", "5: not valid YAML: while parsing a flow sequence expected ',' or ']', "
         "but got '<stream end>'"),
        ("a: \x07", "4: not valid YAML: character U+0007 is not allowed"),
        ("---\nmodel: b", "4: not valid YAML: expected a single document in the stream "
         "but found another document"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_its_line(body: str, message: str) -> None:
    assert complaint(BASE + body) == [f"recipes/x.yaml:{message}"]


def test_all_problems_come_at_once_in_reading_order() -> None:
    text = "model: 3\ntask: glue/cole\nlr: 1\ntrain:\n  bs: 1\n  seed: x\n"
    lines = complaint(text, "train.epocs=1", "~train.lr", "method.r=0")
    assert [line.split(": ")[0] for line in lines] == [
        "recipes/x.yaml",  # output_dir
        "recipes/x.yaml:1",
        "recipes/x.yaml:2",
        "recipes/x.yaml:3",
        "recipes/x.yaml:5",
        "recipes/x.yaml:6",
        "override 'train.epocs=1'",
        "override '~train.lr'",
        "override 'method.r=0'",
    ]
    assert lines[0].startswith("recipes/x.yaml: output_dir: missing. The run directory")
    assert lines[2].startswith("recipes/x.yaml:2: task: unknown task 'glue/cole' (did you mean 'glue/cola'?)")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr", "write key=value, section.key=value, or ~section.key to remove one"),
        ("=3", "write key=value, section.key=value, or ~section.key to remove one"),
        ("train..lr=3", "write key=value, section.key=value, or ~section.key to remove one"),
        ("train.lr=", "train.lr: no value; write null or '' if that is meant"),
        ("model.name=3", "model: has no keys below it"),
        ("~train.learning_rate", "train.learning_rate: no such key to remove (did you mean 'lr'?)"),
        ("~trian.lr", "trian: no such key (did you mean 'train'?)"),
        ("train.betas=[0.9", "not valid YAML: while parsing a flow sequence expected ',' or ']', "
         "but got '<stream end>'"),
        ("data={path: a, path: b}", "data.path: duplicate key"),
    ],
)  # fmt: skip
def test_a_malformed_override(override: str, message: str) -> None:
    assert complaint(BASE + "train:\n  lr: 1\n", override) == [f"override {override!r}: {message}"]


def test_changing_the_method_says_what_to_do_with_the_old_keys() -> None:
    text = BASE + "method:\n  name: lora\n  r: 4\n"
    assert complaint(text, "method.name=head") == [
        "recipes/x.yaml:6: method.r: no key of method head; remove it by '~method.r', or write 'method={name: head}'"
    ]
    assert load_recipe(write(text), ["method.name=head", "~method.r"]).method.name == "head"
    assert load_recipe(write(text), ["method=head"]).method.name == "head"
    assert complaint(BASE, "method=head", "method.r=4") == [
        "override 'method.r=4': method.r: unknown key; it belongs to method lora, not head"
    ]


def test_unknown_and_missing_method() -> None:
    (line,) = complaint(BASE + "method:\n  name: lara\n  r: 4\n")
    assert line.startswith("recipes/x.yaml:5: method: unknown method 'lara' (did you mean 'lora'?); one of lora, ")
    (line,) = complaint(BASE + "method:\n  rank: 4\n")
    assert line.startswith("recipes/x.yaml:4: method.name: missing; write method={name: lora, ...}; one of lora, ")
    (line,) = complaint(BASE, "method.bottleneck=4")
    assert line.startswith("override 'method.bottleneck=4': method.name: missing; write method={name: houlsby, ...}; ")


def test_a_method_without_a_name_is_lora() -> None:
    for recipe in (load_recipe(write(BASE), ["method.r=4"]), load_recipe(write(BASE + "method:\n  r: 4\n"))):
        assert (recipe.method.name, recipe.method.r) == ("lora", 4)
    (line,) = complaint(BASE, "method.r=0")
    assert line == "override 'method.r=0': method.r: expected whole number from 1, got 0"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("method=qlora", "write base.dtype=nf4 method=lora"),
        ("method=dora", "write method={name: lora, use_dora: true}"),
        ("base.dtype=4bit", "did you mean 'nf4'?"),
        ("method={name: lora, task_type: CAUSAL_LM}", "leave it out: the task says it"),
        ("train.logging_steps=1", "leave it out: metrics.jsonl has a line for each step"),
        ("lora_target_modules=[q_proj]", "did you mean 'method.target_modules'?"),
        ("task=sft", "write task=text/chat, or text/completion"),
        ("task=dpo", "write task=text/preference"),
        ("task=causal_lm", "write task=text/plain"),
    ],
)
def test_settings_of_other_tools_are_told_in_the_words_of_recipes(override: str, hint: str) -> None:
    (line,) = complaint(BASE, override)
    assert hint in line


def _other_names() -> list[tuple[str, str, list[str]]]:
    """Return the names of TRL and axolotl in the guide's table, each with a value and the keys of its row."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "language_models.md").read_text(encoding="utf-8")
    rows = text.split("| TRL (", 1)[1].splitlines()[2:]
    found = []
    for row in takewhile(lambda line: line.startswith("|"), rows):
        *others, ours = row.strip("|").split(" | ")
        keys = [code.partition(":")[0].strip() for code in re.findall(r"`([^`]+)`", ours)]
        for code in re.findall(r"`([^`]+)`", " ".join(others)):
            name, value = re.fullmatch(r"(\w+)[:=]?\s*(.*)", code).groups()
            found.append((name, value if value and code[len(name)] in ":=" else "1", keys))
    return found


@pytest.mark.parametrize(("name", "value", "keys"), _other_names())
def test_the_names_of_the_guide_s_table_are_answered_with_the_keys_of_their_row(name, value, keys) -> None:
    (line,) = complaint(BASE, f"{name}={value}")
    hint = line.partition("unknown key")[2]
    assert any(key in hint for key in keys)


def test_fields_that_contradict_each_other() -> None:
    assert complaint(BASE + "data:\n  label: a\n  text: [b]\n") == [
        "recipes/x.yaml:5: data.label: belongs to one's own task (text/...); glue/cola has its own columns and splits",
        "recipes/x.yaml:6: data.text: belongs to one's own task (text/...); glue/cola has its own columns and splits",
    ]
    own = BASE.replace("glue/cola", "text/regression")
    assert complaint(own + "data:\n  path: a\n  bins: {a: [null, 0], b: [1, null]}\n") == [
        "recipes/x.yaml:6: data.bins: makes classes, but task text/regression learns a number",
    ]
    assert complaint(BASE, "task=glue/ax") == [
        "override 'task=glue/ax': task: glue/ax has no training split; it can only be predicted"
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.bins={a: [1, 2], b: [2, 4]}", "data.bins: a and b overlap (both ends of a bin belong to it)"),
        (
            "data.bins={a: [1, null], b: [4, 5]}",
            "data.bins: a and b overlap (both ends of a bin belong to it)",
        ),
        ("data.bins={a: [3, 2], b: [4, 5]}", "data.bins: a: its lowest value is above its highest"),
        (
            "data.validation=1.5",
            "data.validation: a share is below 1 and a number of examples is whole, got 1.5",
        ),
        ("data.validation=al", "data.validation: expected a number of rows (200), a share (0.1), or all, got 'al'"),
        (
            "data.validation=val.csv",
            "data.validation: expected a number of rows (200), a share (0.1), or all, got 'val.csv'; a file stands in a "
            "directory beside the training file: data.path=DIR with train.* and val.*",
        ),
    ],
)
def test_bins_and_the_held_out_part(override: str, message: str) -> None:
    own = BASE.replace("glue/cola", "text/classification") + "data: {path: a, text: [b], label: c}\n"
    assert complaint(own, override) == [f"override '{override}': {message}"]


def test_files_that_are_no_recipe() -> None:
    write("")
    cases = {
        "recipes/x.yaml": "recipes/x.yaml: the recipe is empty",
        "recipes": "recipes is a directory, not a recipe; recipes in it: x.yaml",
        "recipes/y.yaml": "recipes/y.yaml: no such file and no shipped recipe of that name "
        "(did you mean 'recipes/x.yaml'?)",
        "glue/colalora": "glue/colalora: no such file and no shipped recipe of that name "
        "(did you mean 'glue/cola-lora'?)",
    }
    for name, message in cases.items():
        with pytest.raises(PeftlabError) as caught:
            load_recipe(name)
        assert str(caught.value) == message
    assert complaint("- a\n- b\n") == [
        "recipes/x.yaml: a recipe is a mapping of keys such as model and task, not a list"
    ]
    Path("recipes/x.yaml").write_bytes(b"model: \xff")
    with pytest.raises(PeftlabError, match=r"^recipes/x\.yaml:1: not UTF-8"):
        load_recipe("recipes/x.yaml")


def test_a_default_that_depends_on_a_wrong_key_is_no_second_problem(tmp_path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("kind: draft\ntarget: 5\ndraft: {kind: medusa}\ndata: {prompts: x.txt}\noutput_dir: out\n")
    with pytest.raises(PeftlabError) as found:
        load_recipe(file, [])
    assert str(found.value).splitlines() == ["x.yaml:2: target: expected text, got 5 (put it in quotes)"]


@pytest.mark.parametrize("text", ['{"\\ud8dc\\udc9f": null}', '{"data": {"\\ud8dc": 1}}'])
def test_a_key_that_is_no_text_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(PeftlabError, match=r"unknown key|hex escape"):
        load_recipe(tmp_path / "recipe.yaml")
