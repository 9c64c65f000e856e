"""A draft that learns while it serves: a stream whose second half is of another kind, stopped and continued."""

from __future__ import annotations

import json
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from peftlab.cli.app import app
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.drafting.base import load_pair
from peftlab.drafting.config import ModelDraft
from peftlab.errors import PeftlabError
from peftlab.pipelines import update
from peftlab.pipelines.recipes import run_recipe
from peftlab.pipelines.update import continued_section, draft_run, update_draft, update_live, updates
from peftlab.recipe.load import load_recipe

SMALL = [
    "data.samples=2",
    "data.max_prompts=9",
    "data.held_out=1",
    "data.max_new_tokens=16",
    "train.max_steps=6",
    "train.max_length=64",
    "train.eval_every=6",
]
FAST = ("train.batch_size=4", "train.epochs=2")
STORIES = [f"{name} went to the {place} and" for place in ("park", "house") for name in ("Lily", "Tom", "Ben", "Sue")]
COUNTS = [f"{a}, {b}, {a}, {b}, {a}," for a, b in permutations(["1", "2", "3", "4", "5"], 2)]
STREAM = STORIES[:4] + COUNTS[:16]


def write(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


@pytest.fixture(scope="module")
def run(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("live") / "run"
    run_recipe(load_recipe("draft/ci", [f"target={stories}", *SMALL, f"output_dir={place}"]))
    return place


@pytest.fixture(scope="module")
def served(run: Path) -> tuple[Path, dict[str, Any]]:
    """A window of stories and four of numbers, from the command line."""
    place = shutil.copytree(run, run.with_name("served"))
    stream = write(place.with_name("stream.jsonl"), STREAM)
    arguments = ["draft", "update", str(place), "--prompts", str(stream), "--every", "4", *FAST]
    done = CliRunner().invoke(app, [*arguments, "--json", str(place / "found.json")])
    assert done.exit_code == 0, done.output
    assert "window 5, requests 17 to 20: acceptance" in done.output and "with the frozen draft" in done.output
    return place, json.loads((place / "found.json").read_text())


def weights(place: Path) -> dict[str, Any]:
    return load_file(place / "merged" / "model.safetensors")


def windows(place: Path) -> list[dict[str, Any]]:
    """What the windows contain but for the time that they took."""
    found = [json.loads(path.read_text()) for path in sorted((place / "windows").iterdir())]
    return [{key: value for key, value in each.items() if not key.endswith("seconds")} for each in found]


def test_acceptance_recovers_after_the_shift(served: tuple[Path, dict[str, Any]]) -> None:
    place, found = served
    live_rates, frozen = ([w[name]["acceptance"] for w in found["windows"]] for name in ("live", "frozen"))
    assert live_rates[0] == frozen[0], "nothing has been learnt yet"
    assert live_rates[-1] > live_rates[1] + 0.1, "it learns the numbers"
    assert live_rates[-1] > frozen[-1] + 0.1, "which the frozen draft does not"
    assert found["gain"] > 0 and found["gain_interval"][0] > 0
    assert found["gain"] == pytest.approx(found["live"]["acceptance"] - found["frozen"]["acceptance"])
    assert found["updates"] == 5 and found["requests"] == 20
    assert (
        min(w["update_seconds"] for w in found["windows"]) > 0
        and min(w["decoding_seconds"] for w in found["windows"]) > 0
    )
    assert found["update_seconds"] == pytest.approx(sum(w["update_seconds"] for w in found["windows"]), abs=0.01)
    page = (place / "updates" / "0001" / "stream.html").read_text()
    assert page.count("<svg") == 2 and "frozen" in page
    assert json.loads((place / "updates" / "0001" / "stream.json").read_text()) == found


def test_the_answers_are_the_targets_own_while_the_draft_changes(
    served: tuple[Path, dict[str, Any]], stories: Path
) -> None:
    place, found = served
    assert found["unequal"] == 0
    pair, tokenizer = load_pair(str(stories), found["draft"]), AutoTokenizer.from_pretrained(stories)
    answers = [row for window in windows(place / "updates" / "0001") for row in window["requests"]]
    prompts = [tokenizer(text)["input_ids"] for text in STREAM]
    assert [row["prompt_ids"] for row in answers] == prompts
    plain = decode(pair.target, prompts, StoppingCriteria(16, pair.eos))
    assert [row["response_ids"] for row in answers] == [output.tokens for output in plain]


def test_the_next_update_continues_from_the_stream(served: tuple[Path, dict[str, Any]]) -> None:
    place, found = served
    replay = [json.loads(line) for line in (place / "updates" / "replay-0001.jsonl").read_text().splitlines()]
    answers = [row for window in windows(place / "updates" / "0001") for row in window["requests"]]
    assert replay == [{key: row[key] for key in ("prompt_ids", "response_ids")} for row in answers]
    done, stopped = updates(place)
    assert [*map(str, done)] == [found["draft"]] and stopped is None
    draft = continued_section(draft_run(place), done[-1], "log.jsonl")
    assert isinstance(draft, ModelDraft) and draft.from_ == f"{found['draft']}/merged"


def test_a_stream_that_was_killed_ends_as_one_that_was_not(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an update, before the window that it belongs to is stored: the window is decoded anew."""
    stream, topk = write(tmp_path / "s.jsonl", STORIES[:4]), ("objective.name=topk_kl", "data.top_k=4", *FAST)
    whole, cut = (shutil.copytree(run, tmp_path / name) for name in ("whole", "cut"))
    update_live(whole, stream, every=2, size=3, overrides=topk)

    def killed(path: Path, text: str) -> None:
        if Path(path).name == "0002.json":
            raise KeyboardInterrupt
        write_text(path, text)

    write_text = update.write_text
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(update, "write_text", killed)
        update_live(cut, stream, every=2, size=3, overrides=topk)
    assert len(windows(cut / "updates" / "0001")) == 1
    with pytest.raises(PeftlabError, match="a stream that was stopped, with other every; repeat its command"):
        update_live(cut, stream, every=3, size=3, overrides=topk)
    with pytest.raises(PeftlabError, match="a stream that was stopped; repeat its command"):
        update_draft(cut, tmp_path / "log.jsonl")
    update_live(cut, stream, every=2, size=3, overrides=topk)
    places = [place / "updates" / "0001" for place in (whole, cut)]
    assert windows(places[0]) == windows(places[1])
    first, second = map(weights, places)
    assert all(first[name].equal(second[name]) for name in first)
    assert not all(first[name].equal(tensor) for name, tensor in weights(run).items())
    assert not (places[1] / "drafts").exists()


def test_mistakes_are_told_and_leave_nothing(run: Path, tmp_path: Path) -> None:
    stream = write(tmp_path / "s.jsonl", STORIES[:3])
    for overrides, message in (
        (("data.on_policy=0.5",), "data.on_policy: a stream teaches"),
        (("data.max_new_tokens=600",), "the target's context"),
        (("method={name: houlsby}",), "method houlsby has no linear fold"),
    ):
        with pytest.raises(PeftlabError, match=message):
            update_live(run, stream, overrides=overrides)
    with pytest.raises(PeftlabError, match="no such file"):
        update_live(run, tmp_path / "none.jsonl")
    for options in ([], ["--requests", "a", "--prompts", "b"], ["--requests", "a", "--every", "2"]):
        done = CliRunner().invoke(app, ["draft", "update", str(run), *options])
        assert isinstance(done.exception, PeftlabError) and "--prompts" in str(done.exception)
    assert not (run / "updates").exists()
