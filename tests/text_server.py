"""Servers of text for tests: `transformers serve` in a process of its own, and one that behaves as it is told."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMAND = "from transformers.cli.transformers import main; main()"


def put_into_cache(cache: Path, name: str, model: Path, *, template: str | None = None, **generation: Any) -> None:
    """Copy a model into a cache of the hub's, from which `transformers serve` serves it as ``name``.

    Args:
        template: its chat template. generation: settings of its ``generation_config.json``.
    """
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        shutil.copyfile(file, snapshot / file.name)
    for file, added in (("generation_config", generation), ("tokenizer_config", {"chat_template": template})):
        path = snapshot / f"{file}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **added}))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)


@contextmanager
def transformers_serve(cache: Path) -> Iterator[str]:
    """Serve the models of a cache, loaded when they are first asked for, and yield the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    arguments = ["serve", "--port", str(port), "--host", "127.0.0.1", "--device", "cpu"]
    with open(cache / "log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
                break
            except OSError:
                assert server.poll() is None, (cache / "log").read_text()
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.kill()  # it would wait for its threads
        server.wait()


@dataclass
class Said:
    """What a told server answers: JSON or bytes; ``cut``: it hangs up before the end."""

    content: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False


@dataclass
class Asked:
    """A request as it came."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    at: float


Behaviour = Callable[[Asked, int], Said]


@contextmanager
def told_server(behave: Behaviour, models: tuple[str, ...] = ("told",)) -> Iterator[tuple[str, list[Asked]]]:
    """Yield a server's address and the completions that it is asked for.

    Args:
        behave: returns the answer to a request that has come so many times before.
    """
    asked: list[Asked] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(Said({"object": "list", "data": [{"id": name} for name in models]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request = Asked(self.path, body, dict(self.headers), time.monotonic())
            with lock:
                before = sum(one.path == self.path and one.body == body for one in asked)
                asked.append(request)
            self.answer(behave(request, before))

        def answer(self, said: Said) -> None:
            content = said.content if isinstance(said.content, bytes) else json.dumps(said.content).encode()
            self.send_response(said.status)
            for name, value in said.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if said.cut else content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


def completion(text: str, prompt: int | None, finish: str = "length", **more: Any) -> Said:
    """Return a completion.

    Args:
        prompt: tokens of the prompt, as the server counts them; None: it counts none.
    """
    usage = {"usage": {"prompt_tokens": prompt}} if prompt is not None else {}
    return Said({"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}], **usage})


def forwarded(url: str, asked: Asked) -> Said:
    """Return what another server answers to the same request."""
    content = json.dumps(asked.body).encode()
    request = urllib.request.Request(
        url.removesuffix("/v1") + asked.path, content, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as response:
            return Said(response.read())
    except urllib.error.HTTPError as error:
        return Said(error.read(), error.code)
