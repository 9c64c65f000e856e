"""What every verb has in common: ``--json``, ``--quiet``, exit statuses, help and completion."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner, Result

import peftlab
from peftlab.cli.app import app
from peftlab.errors import PeftlabError
from tests.training import tiny

ROOT = Path(__file__).resolve().parents[2]


def verbs(command: click.Command, name: str = "peftlab") -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that do something, by their full name."""
    below = getattr(command, "commands", {})
    if not below or name == "peftlab recipes":
        yield name, command
    for each, inner in below.items():
        yield from verbs(inner, f"{name} {each}")


VERBS = dict(verbs(typer.main.get_command(app)))


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, rows and a recipe over them."""
    directory = tmp_path_factory.mktemp("output")
    model, rows = tiny.save_model(directory / "bert"), tiny.save_rows(directory / "rows.csv", n=16)
    values = tiny.recipe(model, rows, directory / "run", epochs=1)
    tiny.write_recipe({**values, "data": {**values["data"], "validation": 4}}, directory / "recipe.yaml")
    return directory


@pytest.fixture(scope="module")
def trained(place: Path) -> Result:
    """What a run with ``--json -`` printed."""
    return invoke("run", place / "recipe.yaml", "--json", "-", "--device", "cpu")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_json_and_quiet(verb: str) -> None:
    command = VERBS[verb]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {"--json", "--quiet"} <= options
    usage = command.get_usage(click.Context(command, info_name=verb))
    assert "[[" not in usage and "]...]" not in usage, usage


def test_json_on_stdout_is_one_object_and_the_rest_is_on_stderr(trained: Result, place: Path) -> None:
    assert trained.exit_code == 0, trained.exception
    printed = json.loads(trained.stdout)
    assert printed == json.loads((place / "run" / "results.json").read_text())
    assert set(printed["cpu"]) == {"name", "features", "threads"}
    assert "trainable" in trained.stderr and "run directory" in trained.stderr
    assert json.loads((place / "run" / "provenance.json").read_text())["device"] == "cpu"


@pytest.mark.usefixtures("trained")
def test_the_json_of_a_verb_is_what_its_function_returns(place: Path) -> None:
    run, file = place / "run", place / "found.json"
    done = invoke("eval", run, "--json", file, "--quiet")
    assert (done.exit_code, done.output) == (0, "")
    assert json.loads(file.read_text()) == peftlab.evaluate(run, device="cpu")
    texts = ["good film", "dull plot"]
    (place / "new.csv").write_text("text\n" + "".join(f"{text}\n" for text in texts))
    found = json.loads(invoke("predict", run, place / "new.csv", "-o", place / "out.csv", "--json", "-").stdout)
    expected = peftlab.predict(run, texts)
    assert found["answers"] == expected.answers and found["classes"] == ["neg", "pos"]
    assert expected.probabilities is not None
    assert [each[0] for each in found["probabilities"]] == pytest.approx(expected.probabilities[:, 0])
    recipe = json.loads(invoke("validate", place / "recipe.yaml", "--json", "-").stdout)
    assert recipe == peftlab.validate(place / "recipe.yaml").as_json() and recipe["method"]["name"] == "lora"


@pytest.mark.usefixtures("trained")
def test_quiet_prints_nothing_but_what_a_filter_is_for(place: Path) -> None:
    for arguments in (["env"], ["validate", place / "recipe.yaml"], ["inspect", place / "bert"]):
        assert invoke(*arguments, "--quiet").output == ""
    (place / "one.csv").write_text("text\ngood film\n")
    done = invoke("predict", place / "run", place / "one.csv", "--quiet")
    assert json.loads(done.stdout)["text"] == "good film" and done.stderr == ""


def test_a_json_file_that_cannot_be_written_is_found_before_anything_runs(tmp_path: Path) -> None:
    for arguments, said in (
        (["env", "--json", tmp_path], "is a directory"),
        (["recipes", "--json", "x", "copy", "quickstart"], "behind its name"),
    ):
        found = invoke(*arguments).exception
        assert isinstance(found, PeftlabError) and said in str(found)


def main(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, after ``code``."""
    return subprocess.run(
        [sys.executable, "-c", f"{code}\nfrom peftlab.cli.app import main\nmain()", *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


_STUB = "import os, signal, peftlab.recipe.library as library\ndef shipped(): {}\nlibrary.shipped = shipped"


@pytest.mark.parametrize(
    ("code", "arguments", "status"),
    [
        ("", ("recipes",), 0),
        (_STUB.format("1 / 0"), ("recipes",), 1),
        ("", ("recipes", "copy", "quikstart"), 2),
        ("", ("recipes", "--qiet"), 2),
        (_STUB.format("os.kill(os.getpid(), signal.SIGINT)"), ("recipes",), 130),
        (_STUB.format("os.kill(os.getpid(), signal.SIGTERM)"), ("recipes",), -signal.SIGTERM),  # 143 in a shell
    ],
)
def test_exit_statuses(code: str, arguments: tuple[str, ...], status: int) -> None:
    done = main(f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{code}", *arguments)
    assert done.returncode == status, done.stderr
    assert ("Traceback" in done.stderr) == (status == 1)


def test_the_shell_completes_verbs() -> None:
    asked = {"_PEFTLAB_COMPLETE": "complete_bash", "COMP_WORDS": "peftlab val", "COMP_CWORD": "1"}
    code = f"import os, sys\nos.environ.update({asked})\nsys.argv[0] = 'peftlab'"
    done = main(code)
    assert done.stdout.split() == ["validate"], done.stderr
