"""Files that are broken, endless or no files: one message that names them, status 2, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import tensors
from tests.fuzz import world as worlds
from tests.fuzz.running import in_process

DEEP, DIGITS = "[" * 100_000 + "]" * 100_000, "9" * 5000


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> worlds.World:
    return worlds.build(tmp_path_factory.mktemp("broken") / "world")


@pytest.fixture
def base(world: worlds.World, tmp_path: Path) -> Path:
    return shutil.copytree(world.base, tmp_path / "base")


@pytest.fixture
def adapter(world: worlds.World, tmp_path: Path) -> Path:
    return shutil.copytree(world.adapter("lora"), tmp_path / "adapter")


def in_shards(base: Path, world: worlds.World) -> None:
    """Store the base in several files: beside a single one, no index is read."""
    (base / "model.safetensors").unlink()
    shutil.copytree(world.sharded, base, dirs_exist_ok=True)


def refused(folder: Path, *arguments: str) -> str:
    """Return the message of a command that is refused, and check that it wrote nothing."""
    before = sorted(folder.rglob("*"))
    outcome = in_process(arguments, folder)
    assert not outcome.fault, outcome.fault
    assert outcome.status == 2, outcome.out + outcome.err
    assert sorted(folder.rglob("*")) == before
    return outcome.err


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
            f"b{i}: &b{i} [{', '.join([f'*b{i - 1}' if i else '*a'] * 10)}]\n" for i in range(20)), "aliases expanded"),
        (f"model: {DEEP}\n", "nested too deeply"),
        ("model: " + "[" * 60 + "]" * 60 + "\n", "nested too deeply"),
        (f"model: a\ntask: glue/cola\noutput_dir: b\ntrain: {{seed: {DIGITS}}}\n", "5000 digits"),
        (f"model: {DIGITS}\ntask: glue/cola\noutput_dir: b\n", "5000 digits"),
    ],
)  # fmt: skip
def test_recipes_that_would_take_all_memory(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    message = refused(tmp_path, "validate", "x.yaml")
    assert "x.yaml" in message and said in message and len(message) < 1000


@pytest.mark.parametrize("text", ["[1, 2]", "null", '"text"', DEEP, DIGITS, '{"a": "\\ud800"}', "{", "", "\xff"])
@pytest.mark.parametrize(
    "file",
    ["adapter/adapter_config.json", "base/config.json", "merged/merge.json", "base/model.safetensors.index.json"],
)
def test_json_that_is_no_object(file: str, text: str, world: worlds.World, adapter: Path, base: Path) -> None:
    folder = base.parent
    if file.startswith("merged"):
        shutil.copytree(world.merge, folder / "merged")
    if file.endswith("index.json"):
        in_shards(base, world)
    (folder / file).write_bytes(text.encode("latin-1"))
    merge = ("merge", "adapter", "--base", "base", "-o", "out")
    message = refused(folder, *(("unmerge", "merged", "-o", "out") if file.startswith("merged") else merge))
    assert file in message and len(message) < 1000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_labels": 10**9}, "num_labels"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"num_hidden_layers": 1_001}, "num_hidden_layers"),
        ({"num_attention_heads": -1}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "base"),
        ({"vocab_size": 10**9}, "parameters"),
        ({"hidden_size": 10**8}, "parameters"),
        ({"max_position_embeddings": 10**9}, "parameters"),
        ({"intermediate_size": 10**30}, "cannot be made"),
        ({"intermediate_size": 10**18}, "base"),
        ({"hidden_size": "x"}, "hidden_size"),
        ({"hidden_act": "nothing"}, "nothing"),
    ],
)
@pytest.mark.parametrize("verb", ["inspect", "eval"])
def test_a_configuration_of_sizes_that_the_weights_do_not_have(
    changes: dict[str, Any], said: str, verb: str, world: worlds.World, base: Path
) -> None:
    edited(base / "config.json", **changes)
    command = ["inspect", "base"] if verb == "inspect" else ["eval", str(world.run), f"model={base}"]
    message = refused(base.parent, *command)
    assert said in message and "base" in message


@pytest.mark.parametrize("value", ['[["BertForSequenceClassification"]]', "Infinity", "[null]", '{"a": 1}', '"Bert"'])
@pytest.mark.parametrize("verb", ["merge", "extract", "inspect"])
def test_a_configuration_whose_classes_are_no_names(
    value: str, verb: str, world: worlds.World, base: Path, adapter: Path
) -> None:
    tensors.write(adapter / "adapter_model.safetensors", *_without_metadata(adapter / "adapter_model.safetensors"))
    edited(base / "config.json", architectures="@")
    text = (base / "config.json").read_text()
    (base / "config.json").write_text(text.replace('"@"', value))
    commands = {"merge": ["merge", "adapter", "--base", "base", "-o", "out"], "inspect": ["inspect", "base"],
                "extract": ["adapter", "extract", "base", "--base", str(world.base), "-o", "out", "--rank", "1"]}  # fmt: skip
    assert "config.json: architectures is not a list of class names" in refused(base.parent, *commands[verb])


def _without_metadata(path: Path) -> tuple[str, bytes]:
    header, data = tensors.header_and_data(path)
    header.pop("__metadata__")  # which only peftlab's own adapters have
    return json.dumps(header), data


@pytest.mark.parametrize(("identity", "said"), [(10**9, "there are 17 tokens"), (17, "embeddings of 17 tokens")])
def test_token_ids_that_the_model_does_not_have(identity: int, said: str, world: worlds.World, base: Path) -> None:
    written = json.loads((base / "tokenizer.json").read_text())
    written["model"]["vocab"]["good"] = identity
    (base / "tokenizer.json").write_text(json.dumps(written))
    message = refused(base.parent, "eval", str(world.run), f"model={base}")
    assert str(identity) in message and "'good'" in message and said in message


def test_a_padding_token_that_the_model_does_not_have(world: worlds.World, base: Path) -> None:
    edited(base / "tokenizer_config.json", pad_token="[NEW]")
    assert "'[NEW]' the id 17" in refused(base.parent, "eval", str(world.run), f"model={base}")


@pytest.mark.parametrize("changes", [{"num_labels": 10**9}, {"num_hidden_layers": 10**6}])
@pytest.mark.parametrize("place", ["base", "adapter"])
def test_merging_sizes_that_no_model_has(changes: dict[str, int], place: str, adapter: Path, base: Path) -> None:
    if place == "base":
        edited(base / "config.json", **changes)
    else:  # the configuration that our adapters carry in their header
        header, content = tensors.header_and_data(adapter / "adapter_model.safetensors")
        ours = json.loads(header["__metadata__"]["peftlab"])
        ours["base"]["config"] |= changes
        header["__metadata__"]["peftlab"] = json.dumps(ours)
        tensors.write(adapter / "adapter_model.safetensors", json.dumps(header), content)
    message = refused(base.parent, "merge", "adapter", "--base", "base", "-o", "out")
    assert next(iter(changes)) in message and place in message


def test_a_class_that_is_no_model(base: Path) -> None:
    edited(base / "config.json", architectures=["PreTrainedTokenizerFast"])
    assert "PreTrainedTokenizerFast is not a class of models" in refused(base.parent, "inspect", "base")


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "loop"])
@pytest.mark.parametrize(
    "file",
    ["x.yaml", "adapter/adapter_config.json", "adapter/adapter_model.safetensors", "base/config.json",
     "base/model.safetensors", "base/model.safetensors.index.json"],
)  # fmt: skip
def test_what_is_no_file(kind: str, file: str, world: worlds.World, adapter: Path, base: Path) -> None:
    path = base.parent / file
    if file.endswith("index.json"):
        in_shards(base, world)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "loop" else "/dev/zero")
    merge = ("merge", "adapter", "--base", "base", "-o", "out")
    message = refused(base.parent, *(("validate", "x.yaml") if file == "x.yaml" else merge))
    assert Path(file).parts[0] in message


@pytest.mark.parametrize("verb", ["merge", "unmerge", "copy"])
@pytest.mark.parametrize("out", ["file/out", "n" * 300, "loop/out"])
def test_places_that_cannot_be_written(verb: str, out: str, world: worlds.World, adapter: Path, base: Path) -> None:
    folder = base.parent
    (folder / "file").write_text("")
    (folder / "loop").symlink_to("loop")
    commands = {
        "merge": ["merge", "adapter", "--base", "base", "-o", out],
        "unmerge": ["unmerge", str(world.merge), "--base", "base", "-o", out],
        "copy": ["recipes", "copy", "quickstart", "--to", out],
    }
    assert out.split("/")[0][:50] in refused(folder, *commands[verb])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_heads": 10**6}, "num_heads"),
        ({"num_heads": "2"}, "num_heads must be a number, not a string"),
        ({"hidden_size": 10**9}, "states of 1000000000"),
        ({"truncated_vocab_size": -1}, "truncated_vocab_size"),
        ({"truncated_vocab_size": 5}, "token_map"),
        ({"truncated_vocab_size": 18}, "shape"),
        ({"vocab_size": None}, "None tokens"),
    ],
)
def test_heads_of_other_sizes_than_their_file(
    changes: dict[str, Any], said: str, world: worlds.World, tmp_path: Path
) -> None:
    heads = shutil.copytree(world.heads, tmp_path / "heads")
    edited(heads / "config.json", **changes)
    message = refused(tmp_path, "generate", "--target", str(world.llama), "--draft", "heads", "--prompt", "a")
    assert "heads" in message and said in message


@pytest.mark.parametrize("content", [b"model: \xff", None])
def test_a_run_whose_recipe_is_no_text(content: bytes | None, world: worlds.World, tmp_path: Path) -> None:
    run = shutil.copytree(world.run, tmp_path / "run")
    (run / "recipe.yaml").unlink()
    if content is None:
        os.mkfifo(run / "recipe.yaml")
    else:
        (run / "recipe.yaml").write_bytes(content)
    for command in (["merge", "run", "-o", "out"], ["eval", "run"], ["resume", "run"]):
        assert "recipe.yaml" in refused(tmp_path, *command)


def test_directories_made_for_a_file_that_fails_are_removed(tmp_path: Path) -> None:
    refused(tmp_path, "recipes", "copy", "quickstart", "--to", "new/deep/..")


def test_a_file_name_that_is_not_utf_8(adapter: Path, base: Path) -> None:
    message = refused(base.parent, "merge", "adapter", "--base", "base", "-o", os.fsdecode(b"\xffout"))
    assert "\\udcffout" in message and "not UTF-8" in message


def test_ctrl_c_is_130(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model: a\n")
    code = (
        "import signal, sys\n"
        "def hook(event, arguments):\n"
        "    if event == 'open' and str(arguments[0]).endswith('x.yaml'): signal.raise_signal(signal.SIGINT)\n"
        "sys.argv = ['peftlab', 'validate', 'x.yaml']\n"
        "from peftlab.cli.app import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        "sys.addaudithook(hook)\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
