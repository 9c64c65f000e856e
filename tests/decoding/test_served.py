"""``draft bench --engine``: servers that speak vLLM's and llama.cpp's protocol and decode with the real model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from peftlab.errors import PeftlabError
from peftlab.pipelines.served import Counters, prometheus_counters
from tests.command_line import invoke

GAMMA = 3


class Handler(BaseHTTPRequestHandler):
    """Answers as vLLM or llama.cpp do; each step of GAMMA drafted tokens has as many accepted as ``accepts`` says."""

    model: torch.nn.Module
    protocol = "vllm"
    accepts = (3, 1, 0)  # of the steps in turn
    counted = Counters(0, 0, 0, (0, 0, 0))

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, value: object, status: int = 200) -> None:
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        of = type(self)
        if of.protocol == "llama" and self.path == "/props":
            self.answer({"build_info": "b123"})
        elif of.protocol == "vllm" and self.path == "/version":
            self.answer({"version": "0.32.0"})
        elif of.protocol == "vllm" and self.path == "/v1/models":
            self.answer({"data": [{"id": "stories"}]})
        elif of.protocol == "vllm" and self.path == "/metrics":
            now = of.counted
            lines = [("num_drafts", "", now.steps), ("num_draft_tokens", "", now.drafted)]
            lines += [("num_accepted_tokens", "", now.accepted)]
            lines += [("num_accepted_tokens_per_pos", f',position="{i}"', n) for i, n in enumerate(now.by_position)]
            text = "".join(f'vllm:spec_decode_{name}_total{{engine="0"{label}}} {n}.0\n' for name, label, n in lines)
            self.answer(f"# HELP vllm:x\nvllm:num_requests_running 0\n{text}")
        else:
            self.answer({}, 404)

    def do_POST(self) -> None:
        of = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = torch.tensor([body["prompt"]])
        most = body.get("max_tokens") or body["n_predict"]
        output = of.model.generate(ids, max_new_tokens=most, do_sample=False)[0, ids.shape[1] :].tolist()
        written, step, drafted, accepted, places = 1, 0, 0, 0, [0] * GAMMA
        while written < len(output):
            good = min(of.accepts[step % len(of.accepts)], len(output) - written - 1)
            places = [n + (i < good) for i, n in enumerate(places)]
            written, drafted, accepted, step = written + good + 1, drafted + GAMMA, accepted + good, step + 1
        before = of.counted
        of.counted = Counters(
            before.steps + step,
            before.drafted + drafted,
            before.accepted + accepted,
            tuple(a + b for a, b in zip(before.by_position, places, strict=True)),
        )
        if of.protocol == "vllm":
            self.answer({"choices": [{"token_ids": output}]})
        else:
            self.answer({"tokens": output, "timings": {"draft_n": drafted, "draft_n_accepted": accepted}})


@pytest.fixture
def served(stories: Path) -> Iterator[tuple[str, type[Handler]]]:
    handler = type("Here", (Handler,), {"model": AutoModelForCausalLM.from_pretrained(stories).eval()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("Once upon a time\nLily had a red ball\nThe dog ran to the park\n")
    return file


def run(*arguments: str) -> tuple[int, str]:
    """Return 2 and the message of a user's mistake, or the command's status and output."""
    try:
        done = invoke("draft", "bench", *arguments)
    except PeftlabError as error:
        return 2, str(error)
    return done.exit_code, done.output


@pytest.mark.parametrize("protocol", ["vllm", "llama"])
def test_a_running_server(
    protocol: str, stories: Path, prompts: Path, served: tuple[str, type[Handler]], tmp_path: Path
) -> None:
    """Counters are those of the timed requests alone, outputs are compared, and figures stand side by side."""
    url, handler = served
    handler.protocol = protocol
    out, page = tmp_path / "bench.json", tmp_path / "bench.html"
    target = ["--target", str(stories), "--draft", str(stories), "--prompts", str(prompts), "--max-new-tokens", "12"]
    options = [
        "--gamma",
        str(GAMMA),
        "--repeats",
        "2",
        "--engine",
        f"{url}/v1",
        "--json",
        str(out),
        "--html",
        str(page),
    ]
    status, text = run(*target, *options)
    assert status == 0, text
    found = json.loads(out.read_text())
    there = found["engine"]
    assert there["name"] == {"vllm": "vllm", "llama": "llama.cpp"}[protocol]
    assert there["version"] == {"vllm": "0.32.0", "llama": "b123"}[protocol]
    # Each prompt: the first token, then steps that accept 3, 1, 0 and 3 tokens of 3, which makes 12.
    assert (there["steps"], there["drafted"], there["accepted"]) == (3 * 4, 3 * 12, 3 * 7)
    assert there["tau"] == pytest.approx(1 + 7 / 4) and there["accepted_share"] == pytest.approx(7 / 12)
    if protocol == "vllm":
        assert there["acceptance_by_position"] == pytest.approx([3 / 4, 2 / 3, 1])
        assert there["acceptance"] == pytest.approx(7 / 9)
    else:
        assert there["acceptance_by_position"] == [] and there["acceptance"] is None
    assert there["speedup"] is None and there["lossless"] is None and there["divergences"] == []
    assert set(found["drafters"]) == {"draft", f"draft in {there['name']}"}
    assert found["drafters"]["draft"]["accepted_share_interval"] == [1, 1]
    assert "all outputs are equal to peftlab's plain ones" in text and f"draft in {there['name']}" in page.read_text()


def test_an_output_that_differs_is_listed(
    stories: Path, prompts: Path, served: tuple[str, type[Handler]], tmp_path: Path
) -> None:
    url, handler = served
    with torch.no_grad():  # another model under the same name
        handler.model.model.layers[-1].mlp.down_proj.weight.mul_(-1)
    out = tmp_path / "bench.json"
    target = ["--target", str(stories), "--draft", str(stories), "--prompts", str(prompts), "--max-new-tokens", "12"]
    status, text = run(*target, "--repeats", "1", "--engine", url, "--json", str(out))
    assert status == 0, text
    differing = json.loads(out.read_text())["engine"]["divergences"]
    assert differing and all(of["margin"] > 0 and not of["near_tie"] for of in differing)
    assert "outputs differ from peftlab's plain ones" in text and "margin" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "vlm"], "did you mean 'vllm'"),
        (["--engine", "http://127.0.0.1:9"], "no answer of vLLM"),
        (["--engine", "URL", "--temperature", "1"], "without --temperature"),
        (["--engine", "URL", "--drafter", "suffix", "--batch-size", "2"], "without --drafter, --batch-size"),
    ],
)
def test_what_an_engine_cannot_be_asked(
    options: list[str], message: str, stories: Path, prompts: Path, served: tuple[str, type[Handler]]
) -> None:
    options = [served[0] if option == "URL" else option for option in options]
    shared = ["--prompts", str(prompts), "--max-new-tokens", "4", "--repeats", "1"]
    status, text = run("--target", str(stories), "--draft", str(stories), *shared, *options)
    assert status == 2 and message in " ".join(text.split())


def test_without_a_draft(stories: Path, prompts: Path, served: tuple[str, type[Handler]]) -> None:
    status, text = run("--target", str(stories), "--prompts", str(prompts), "--engine", served[0])
    assert status == 2 and "needs the draft" in text


def test_a_server_that_drafts_nothing(stories: Path, prompts: Path, served: tuple[str, type[Handler]]) -> None:
    url, handler = served
    handler.protocol, handler.do_GET = "vllm", _without_counters(handler.do_GET)
    arguments = ["--target", str(stories), "--draft", str(stories), "--prompts", str(prompts), "--max-new-tokens", "4"]
    status, text = run(*arguments, "--repeats", "1", "--engine", url)
    assert status == 2 and "drafted nothing" in " ".join(text.split())


def _without_counters(get):
    def do_GET(self: Handler) -> None:
        if self.path == "/metrics":
            self.answer("vllm:num_requests_running 0\n")
        else:
            get(self)

    return do_GET


def test_vllm_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, stories: Path, prompts: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("PEFTLAB_ENGINES", raising=False)
    status, text = run("--target", str(stories), "--draft", str(stories), "--prompts", str(prompts), "--engine", "vllm")
    assert status == 2 and "vllm is in neither" in " ".join(text.split())


def test_counters_of_several_engines_add_up() -> None:
    """As in ``/metrics`` of vLLM 0.32, where two engines serve one model; times of creation are no counts."""
    text = """vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 242.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 8.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e9
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 500.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 304.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 163.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 141.0
"""
    assert prometheus_counters(text, "here") == Counters(250, 500, 304, (163, 141))
    assert Counters(5, 10, 7, (4, 3)).since(Counters(1, 2, 1, (1,))) == Counters(4, 8, 6, (3, 3))
