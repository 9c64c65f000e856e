"""``--push-to-hub`` against a server that speaks the hub's protocol: what arrives is the merged directory."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from models import adapt, build, save_base


class Hub(ThreadingHTTPServer):
    """Remembers the repositories made and the files committed; ``refuses`` makes commits fail."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created: list[dict[str, object]] = []
        self.files: dict[str, bytes] = {}
        self.refuses = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer({"url": f"{self.server.url}/me/merged", "id": "me/merged"})
        elif self.path.endswith("/preupload/main"):
            files = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": f, "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif self.path.endswith("/commit/main") and self.server.refuses:
            self.answer({"error": "no room left"}, 403)
        elif self.path.endswith("/commit/main"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.server.url}/me/merged/commit/0"})
        else:
            self.answer({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        self.answer({"id": "me/merged", "sha": "0" * 40, "siblings": []})

    def answer(self, content: dict[str, object], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def push(hub: Hub, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    model = build("llama")
    base = save_base(model, tmp_path / "base")
    adapter = adapt(model, tmp_path / "adapter", method="lora", target_modules="all-linear")
    command = [sys.executable, "-m", "peftlab", "merge", adapter, "--base", base, "-o", tmp_path / "merged"]
    command += ["--push-to-hub", "me/merged"]
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
    return subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=120, check=False)


def test_what_arrives_is_the_directory(hub: Hub, tmp_path: Path) -> None:
    done = push(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    made = hub.created[0]
    assert made["name"] == "merged" and (made.get("private") or made.get("visibility") == "private"), made
    merged = tmp_path / "merged"
    assert hub.files == {p.relative_to(merged).as_posix(): p.read_bytes() for p in merged.rglob("*") if p.is_file()}
    assert "model.safetensors" in hub.files


def test_a_refused_upload_leaves_the_result_and_says_so(hub: Hub, tmp_path: Path) -> None:
    hub.refuses = True
    done = push(hub, tmp_path)
    assert done.returncode == 2 and "is complete, but was not uploaded to 'me/merged'" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr and (tmp_path / "merged" / "model.safetensors").exists()
