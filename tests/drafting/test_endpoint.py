"""Text by a server: `transformers serve`, and servers that misbehave as networks do."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draft_models import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from peftlab.drafting import endpoint
from peftlab.drafting.config import DraftData
from peftlab.drafting.endpoint import (
    RateLimiter,
    ServedPrompt,
    Server,
    Target,
    most_probable,
    served_continuations,
    served_model,
    tokenisations,
)
from peftlab.drafting.text import WritingSettings, write_continuations
from peftlab.errors import PeftlabError
from peftlab.pipelines.draft import with_served_model
from peftlab.recipe.load import load_recipe, read_source
from peftlab.recipe.schema import DraftRecipe
from peftlab.tasks.conversations import Message, chat_ids
from peftlab.tasks.prompts import Request, read_conversations, read_prompt_ids
from tests.byte_tokens import byte_tokenizer
from tests.command_line import invoke
from tests.forked import python
from tests.text_server import (
    Asked,
    Said,
    completion,
    forwarded,
    put_into_cache,
    told_server,
    transformers_serve,
)

TEXTS = [
    "Once upon a time",
    "One day, a little girl",
    "Tom had a big dog",
    "The sun was very hot",
    "In the park, a boy",
]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
KEY = "sk-0123456789"
SMALL = ["data.samples=1", "data.temperature=0", "data.max_new_tokens=8", "train.max_length=48", "train.max_steps=2"]


@pytest.fixture(scope="module")
def target(stories: Path) -> Target:
    model = AutoModelForCausalLM.from_pretrained(stories).eval()
    return Target(model, AutoTokenizer.from_pretrained(stories), frozenset({2}))


@pytest.fixture(scope="module")
def server(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name, reason="`transformers serve` needs transformers[serving]")
    cache = tmp_path_factory.mktemp("cache")
    put_into_cache(cache, "local/stories", stories)
    put_into_cache(cache, "local/chatty", stories, template=TEMPLATE, do_sample=True)
    with transformers_serve(cache) as url:
        yield url


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.01)


def prompts(target: Target, texts: list[str] = TEXTS) -> list[ServedPrompt]:
    return [ServedPrompt(ids, None) for ids in read_prompt_ids(texts, target.tokenizer)]


def data(url: str, model: str | None = "told", **fields: Any) -> DraftData:
    return DraftData(prompts=TEXTS, endpoint=url, endpoint_model=model, **fields)


def lines(cache: Path) -> list[dict[str, Any]]:
    (file,) = cache.glob("*/answers.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


class TestTransformersServe:
    """A real server, which takes texts alone, adds the BOS token and decodes an answer without its prompt."""

    def test_greedy_text_is_what_the_target_writes_here(self, server: str, target: Target, tmp_path: Path) -> None:
        asked, writing = prompts(target), WritingSettings(12)
        _, ours = write_continuations(target.model, [p.ids for p in asked], writing, tmp_path / "here", target.eos)
        theirs, served = served_continuations(data(server, "local/stories"), target, asked, writing, tmp_path / "there")
        assert theirs == ours
        assert served.forms == {"completions of text": len(TEXTS)} and not served.dropped

    def test_conversations_where_the_server_has_only_chat(self, server: str, target: Target, tmp_path: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(target.tokenizer.name_or_path)
        tokenizer.chat_template = TEMPLATE
        chatty = Target(target.model, tokenizer, target.eos)
        said = read_conversations(TEXTS, tokenizer)
        asked = [ServedPrompt(chat_ids(tokenizer, messages or [], ""), messages) for messages in said]
        _, ours = write_continuations(
            target.model, [p.ids for p in asked], WritingSettings(12), tmp_path / "here", target.eos
        )

        def gateway(request: Asked, _: int) -> Said:
            return forwarded(server, request) if request.path == "/v1/chat/completions" else Said({}, 404)

        rendered, served = served_continuations(
            data(server, "local/chatty"), chatty, asked, WritingSettings(12), tmp_path / "text"
        )
        assert rendered == ours and served.forms == {"completions of text": len(TEXTS)}
        with told_server(gateway) as (url, _):
            theirs, served = served_continuations(
                data(url, "local/chatty"), chatty, asked, WritingSettings(12), tmp_path
            )
            assert theirs == ours and served.forms == {"chat completions": len(TEXTS)}
            with pytest.raises(PeftlabError, match="chat completions: the prompt cannot be sent to this server"):
                served_continuations(data(url, "local/chatty"), target, prompts(target), WritingSettings(2), tmp_path)

    def test_samples_differ(self, server: str, target: Target, tmp_path: Path) -> None:
        writing = WritingSettings(8, temperature=1.0, samples=3)
        _, served = served_continuations(data(server, "local/chatty"), target, prompts(target), writing, tmp_path)
        assert served.answers == 3 * len(TEXTS) and served.repeated < len(TEXTS)

    def test_a_recipe_by_the_command_line(
        self, server: str, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STORIES_KEY", KEY)
        out, cache = tmp_path / "run", tmp_path / "text"
        recipe = ["draft/ci", f"target={stories}", *SMALL, f"data.cache={cache}", f"output_dir={out}"]
        recipe += [f"data.endpoint={server}", "data.endpoint_key=STORIES_KEY"]
        with pytest.raises(PeftlabError, match="lists 2 models: local/"):
            invoke("run", *recipe)
        assert not out.exists()
        done = invoke("run", *recipe, "data.endpoint_model=local/stories")
        assert done.exit_code == 0, done.output
        results = json.loads((out / "results.json").read_text())
        assert results["served"]["model"] == "local/stories" and results["served"]["answers"] == 10
        assert "text by local/stories: 10 answers (10 by completions of text)" in done.output
        assert read_source(out / "recipe.yaml").data["data"]["endpoint_model"] == "local/stories"
        written = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert written and not [path for path in written if KEY.encode() in path.read_bytes()]
        assert KEY not in done.output


class TestNetwork:
    """What goes wrong between two machines."""

    def test_every_answer_is_stored_once_whatever_fails_first(self, target: Target, tmp_path: Path) -> None:
        failures = [
            Said({"error": "slow down"}, 429, {"Retry-After": "0.3"}),
            Said(b"<html>", 502),
            Said({"choices": [{"text": "there was a dog"}]}, cut=True),
            Said(b"null"),
            Said({"choices": []}),
            Said({"choices": [{"text": 7}]}),
        ]

        def behave(request: Asked, before: int) -> Said:
            mine = request.body["prompt"][-1] % len(failures)
            if before == 0:
                return failures[mine]
            return completion(" there was", len(request.body["prompt"]))

        with told_server(behave) as (url, asked):
            found, served = served_continuations(data(url), target, prompts(target), WritingSettings(2), tmp_path)
        assert [request.response for request in found if request] == [[383, 286]] * len(TEXTS)
        assert served_continuations(data(url), target, prompts(target), WritingSettings(2), tmp_path) == (found, served)
        assert served.dropped == {} and served.forms == {"completions of token ids": len(TEXTS)}
        assert sorted(line["row"] for line in lines(tmp_path)) == list(range(len(TEXTS)))
        assert len(asked) == 2 * len(TEXTS) and {request.body["model"] for request in asked} == {"told"}

    def test_a_torn_file_is_completed(self, target: Target, tmp_path: Path) -> None:
        """Two answers and a half are on the disk: three are asked for, with the form of those before."""
        with told_server(lambda request, _: completion(" there", len(request.body["prompt"]))) as (url, asked):
            whole, _ = served_continuations(data(url), target, prompts(target), WritingSettings(2), tmp_path)
            (file,) = tmp_path.glob("*/answers.jsonl")
            stored = file.read_bytes().splitlines(keepends=True)
            file.write_bytes(b"".join(stored[:2]) + stored[2][:9])
            rows = {json.loads(line)["row"] for line in stored[:2]}
            asked.clear()
            assert served_continuations(data(url), target, prompts(target), WritingSettings(2), tmp_path)[0] == whole
        assert file.read_bytes().splitlines(keepends=True)[:2] == stored[:2]
        again = [request.body["prompt"] for request in asked]
        assert sorted(again) == sorted(p.ids for row, p in enumerate(prompts(target)) if row not in rows)

    @pytest.mark.parametrize("header", ["0.4", "Mon, 01 Jan 2001 00:00:00 GMT", "soon"])
    def test_retry_after_is_waited_for(self, target: Target, tmp_path: Path, header: str) -> None:
        def behave(request: Asked, before: int) -> Said:
            refused = Said({}, 429, {"Retry-After": header})
            return refused if before == 0 else completion(" there", len(request.body["prompt"]))

        with told_server(behave) as (url, asked):
            served_continuations(data(url), target, prompts(target, TEXTS[:1]), WritingSettings(1), tmp_path)
        assert len(asked) == 2 and (header != "0.4" or asked[1].at - asked[0].at >= 0.4)

    def test_nothing_is_sent_beyond_the_limits(self) -> None:
        for requests_per_minute, tokens_per_minute, tokens in ((6000, None, 1), (None, 60_000, 10)):
            began = time.monotonic()
            pace = RateLimiter(requests_per_minute, tokens_per_minute)
            for _ in range(6):
                pace.wait(tokens)
            assert time.monotonic() - began >= 5 * 0.01

    def test_a_refused_key_is_not_shown(self, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TOLD_KEY", f"{KEY}\n")
        with told_server(lambda request, _: Said({"error": f"no such key: {KEY}"}, 401)) as (url, asked):
            with pytest.raises(PeftlabError, match=r"does not take the key.*no such key: \*\*\*") as caught:
                served_continuations(
                    data(url, endpoint_key="TOLD_KEY"), target, prompts(target), WritingSettings(2), tmp_path
                )
            assert KEY not in str(caught.value) and not list(tmp_path.iterdir()), "nothing is left behind"
            assert [request.headers["Authorization"] for request in asked] == [f"Bearer {KEY}"]
            with pytest.raises(PeftlabError, match=r"no variable of that name \(did you mean 'TOLD_KEY'"):
                served_model(data(url, None, endpoint_key="TOLD_KEI"))

    def test_the_key_does_not_follow_a_redirect(self, target: Target, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("TOLD_KEY", KEY)
        with told_server(lambda request, _: completion(" there", None)) as (elsewhere, stolen):
            moved = Said({}, 302, {"Location": f"{elsewhere}/completions"})
            with told_server(lambda request, _: moved) as (url, _), pytest.raises(PeftlabError, match="HTTP 302"):
                served_continuations(
                    data(url, endpoint_key="TOLD_KEY"), target, prompts(target), WritingSettings(2), tmp_path
                )
            assert not stolen

    def test_no_server_and_no_model(self) -> None:
        with pytest.raises(PeftlabError, match=r"127\.0\.0\.1:9/v1/models: no answer after 3 attempts \(.*refused"):
            served_model(data("http://127.0.0.1:9/v1", None))
        with told_server(lambda request, _: Said({})) as (url, _):
            assert served_model(data(url, None)) == "told"
        with pytest.raises(PeftlabError, match=r"data\.endpoint: .* is no URL"):
            Server(data("http://1.2.3.400/v1"))
        none = pytest.raises(PeftlabError, match=r"data\.endpoint_model: missing; .* lists no model")
        with told_server(lambda request, _: Said({}), models=()) as (url, _), none:
            served_model(data(url, None))

    def test_a_proxy_of_another_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ALL_PROXY", "gopher://127.0.0.1:9")
        with pytest.raises(PeftlabError, match=r"data\.endpoint: the environment's proxy cannot be used .*gopher"):
            Server(data("http://127.0.0.1:9/v1"))

    @pytest.mark.parametrize(
        "url",
        ["localhost:8000/v1", "ftp://host/v1", "http://", "http://user:secret@host/v1", "http://host/v1?key=secret"],
    )
    def test_addresses_that_are_none_or_contain_a_key(self, url: str) -> None:
        with pytest.raises(PeftlabError, match=r"data\.endpoint: must "):
            load_recipe("draft/ci", [f"data.endpoint={url}"])


class TestAnswers:
    """What is kept of an answer."""

    def test_what_cannot_be_the_targets_text_is_dropped_and_counted(self, target: Target, tmp_path: Path) -> None:
        answers = [
            lambda n: completion(" there was", n),
            lambda n: completion(" ther\ufffdwas" if n % 2 else " there\ud800", n),
            lambda n: completion(" there was", n + 1),
            lambda n: completion(" there was", n, "content_filter"),
            lambda n: completion("", n, "stop", stop_reason=2),
        ]
        order = {tuple(prompt.ids): i for i, prompt in enumerate(prompts(target))}

        def behave(request: Asked, _: int) -> Said:
            ids = request.body["prompt"]
            return answers[order[tuple(ids)]](len(ids))

        with told_server(behave) as (url, _):
            found, served = served_continuations(data(url), target, prompts(target), WritingSettings(4), tmp_path)
        assert [request.response if request else None for request in found] == [[383, 286], None, None, None, [2]]
        assert served.dropped == {
            "the text does not decode back": 1,
            "the server read another number of prompt tokens": 1,
            "it ends with 'content_filter'": 1,
        }
        assert "dropped: 1 because" in served.line()

    def test_text_without_its_chain_of_thought_is_dropped(self, target: Target, tmp_path: Path) -> None:
        """A server with a reasoning parser returns what the model wrote first in another field."""
        message = {"role": "assistant", "content": " there", "reasoning_content": " was"}

        def behave(request: Asked, _: int) -> Said:
            if "messages" not in request.body:
                return Said({"error": "chats only"}, 404)
            choice = {"message": message, "finish_reason": "stop"}
            return Said({"choices": [choice], "usage": {"prompt_tokens": len(asked[0].ids)}})

        messages: list[Message] = [{"role": "user", "content": TEXTS[0]}]
        asked = [ServedPrompt(prompts(target, TEXTS[:1])[0].ids, messages)]
        with told_server(behave) as (url, _):
            found, served = served_continuations(data(url), target, asked, WritingSettings(4), tmp_path)
        reason = "the server keeps its reasoning apart (start it without a reasoning parser)"
        assert found == [None] and served.dropped == {reason: 1}

    def test_another_model_setting_or_target_is_another_data_set(self, target: Target, tmp_path: Path) -> None:
        changed = Target(tiny(0, vocab=512), target.tokenizer, target.eos)
        asked = prompts(target, TEXTS[:1])
        with told_server(lambda request, _: completion(" there", len(asked[0].ids))) as (url, _):
            for model, here, tokens in (("a", target, 4), ("b", target, 4), ("a", target, 5), ("a", changed, 4)):
                served_continuations(data(url, model), here, asked, WritingSettings(tokens), tmp_path)
        assert len(list(tmp_path.glob("*/answers.jsonl"))) == 4

    def test_a_damaged_line_is_named(self, target: Target, tmp_path: Path) -> None:
        asked = prompts(target, TEXTS[:1])
        with told_server(lambda request, _: completion(" there", len(asked[0].ids))) as (url, _):
            served_continuations(data(url), target, asked, WritingSettings(4), tmp_path)
            (file,) = tmp_path.glob("*/answers.jsonl")
            file.write_text(file.read_text() * 2)
            with pytest.raises(PeftlabError, match=r"answers\.jsonl:2: damaged \(row 0 is one too many\)"):
                served_continuations(data(url), target, asked, WritingSettings(4), tmp_path)

    def test_a_cut_answer_may_end_in_the_middle_of_a_character(self, target: Target, tmp_path: Path) -> None:
        def behave(request: Asked, _: int) -> Said:
            return completion(" there\ufffd", len(request.body["prompt"]))

        with told_server(behave) as (url, _):
            found, _ = served_continuations(data(url), target, prompts(target, TEXTS[:1]), WritingSettings(4), tmp_path)
        assert found == [Request(prompts(target)[0].ids, [383])]

    def test_the_space_before_an_answer(self, target: Target) -> None:
        """Llama's tokenizer drops it where the answer is decoded alone, and keeps it behind a prompt."""
        tokenizer, prompt = target.tokenizer, prompts(target)[0].ids
        here, spaced = tokenisations(tokenizer, prompt, ", there was")
        assert tokenizer.convert_ids_to_tokens(here) == [",", "▁there", "▁was"]
        assert tokenizer.convert_ids_to_tokens(spaced) == ["▁", ",", "▁there", "▁was"]
        assert (
            most_probable(target.model, prompt, [here, spaced])
            == most_probable(target.model, prompt, [spaced, here])
            == here
        )
        bytes_ = byte_tokenizer(None, [], bos="<s>", eos="</s>")
        assert len(tokenisations(tokenizer, prompt, " there was")) == 1
        start = bytes_("Once").input_ids
        for text in (" there", "there", "\n\nthere", "  x"):
            assert tokenisations(bytes_, start, text) == [bytes_(text).input_ids], "bytes have one reading"


PROGRAM = """
import os, runpy, signal, sys, threading, time
from pathlib import Path

def watch():  # killed like a machine that loses its power, in the middle of a line
    while True:
        for file in Path({cache!r}).glob("*/answers.jsonl"):
            if file.read_bytes().count(b"\\n") >= 4:
                with open(file, "ab") as torn:
                    torn.write(b'{{"row": 7, "form": "comp')
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)

threading.Thread(target=watch, daemon=True).start()
sys.argv = ["peftlab", *sys.argv[1:]]
runpy.run_module("peftlab", run_name="__main__")
"""


@pytest.mark.long
def test_killed_and_resumed_asks_for_nothing_twice(stories: Path, tmp_path: Path) -> None:
    """Four answers come and then none, until the run is killed; its rerun asks for the other rows alone."""
    cache, killed, lock = tmp_path / "text", threading.Event(), threading.Lock()
    given: list[tuple[int, ...]] = []

    def behave(request: Asked, _: int) -> Said:
        with lock:
            if len(given) < 4:
                given.append(tuple(request.body["prompt"]))
                return completion(" there was a dog", len(request.body["prompt"]))
        killed.wait(120)
        return completion(" there was a cat", len(request.body["prompt"]))

    (tmp_path / "killed.py").write_text(PROGRAM.format(cache=str(cache)))
    out = tmp_path / "run"
    with told_server(behave) as (url, asked):
        recipe = ["draft/ci", f"target={stories}", *SMALL, "data.concurrency=3", f"data.endpoint={url}"]
        recipe += [f"data.cache={cache}", f"output_dir={out}"]
        first = python(tmp_path / "killed.py", "run", *recipe)
        assert first.returncode == -9, first.stderr
        before, stored = len(asked), lines_before_the_torn(cache)
        assert len(stored) == 4 and before <= 4 + 3
        killed.set()
        again = invoke("run", *recipe)
    assert again.exit_code == 0, again.output
    assert lines(cache)[:4] == stored, "nothing that was stored is written again"
    assert sorted(line["row"] for line in lines(cache)) == list(range(10))
    counts = Counter(tuple(request.body["prompt"]) for request in asked[before:])
    assert sum(counts.values()) == 6 and set(counts.values()) == {1} and not counts.keys() & set(given)
    assert "4 of 10 answers are stored" in again.output
    stored_recipe = load_recipe(out / "recipe.yaml")
    assert isinstance(stored_recipe, DraftRecipe)
    assert with_served_model(stored_recipe) == stored_recipe, "with no server: it has the model's id"
    (tmp_path / "log.jsonl").write_text('{"prompt": "The cat", "response": " sat on a mat"}\n' * 6)
    updated = invoke("draft", "update", out, "--requests", tmp_path / "log.jsonl", "train.max_steps=1")
    assert updated.exit_code == 0, "with no server: the text is stored"
    assert json.loads((out / "updates" / "0001" / "results.json").read_text())["served"]["answers"] == 10


def lines_before_the_torn(cache: Path) -> list[dict[str, Any]]:
    (file,) = cache.glob("*/answers.jsonl")
    *whole, torn = file.read_text().split("\n")
    assert torn
    return [json.loads(line) for line in whole]
