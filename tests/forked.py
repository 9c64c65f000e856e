"""Python programs in processes of their own that need not import the libraries: a process that has forks them.

That process is this file run as a program. It imports nothing of peftlab, so each program imports that itself, from
the path and in the environment that it is given. It ends with the process that started it.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = (
    "torch", "torch._dynamo", "transformers", "datasets", "accelerate", "jinja2", "matplotlib.figure",
    "matplotlib.backends.backend_svg", "pydantic", "rich.console", "ruamel.yaml", "safetensors.torch", "scipy.stats",
    "sklearn.metrics", "typer", "huggingface_hub", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama", "torch.distributed.fsdp",
)  # fmt: skip
# What libraries read when they are imported, as peftlab's command line sets it.
_IMPORTING = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

Ended = subprocess.CompletedProcess[str]
_servers: list[subprocess.Popen[str]] = []


def python(
    *arguments: object,
    cwd: Path | None = None,
    text: str = "",
    path: Sequence[Path] = (),
    seconds: float = 180,
    **environment: str,
) -> Ended:
    """Run what ``python ARGUMENTS`` would run and return how it ended.

    Args:
        arguments: a program's file, or ``-m`` and a module, and the program's own.
        text: its stdin. path: comes first in ``sys.path``. seconds: after which it is killed.
        environment: beside the variables of this process.
    """
    return _ask(arguments, [environment], cwd, text, path, seconds)[0]


def two(*arguments: object, seconds: float = 180, **environment: str) -> list[Ended]:
    """Run a program in two processes that know of each other as ``torchrun``'s do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each = [{**environment, **shared, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    return _ask(arguments, each, None, "", (), seconds)


def _ask(
    arguments: Sequence[object],
    environments: Sequence[Mapping[str, str]],
    cwd: Path | None,
    text: str,
    path: Sequence[Path],
    seconds: float,
) -> list[Ended]:
    if not _servers or _servers[0].poll() is not None:
        _servers[:] = [_start()]
    asked, answered = _servers[0].stdin, _servers[0].stdout
    assert asked is not None and answered is not None
    program = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "in").write_text(text)
        request = {
            "program": program, "environments": [{**os.environ, **each} for each in environments],
            "cwd": str(cwd or Path.cwd()), "path": [*map(str, path), str(ROOT)], "place": place, "seconds": seconds,
        }  # fmt: skip
        asked.write(json.dumps(request) + "\n")
        asked.flush()
        answer = answered.readline()
        assert answer, f"the process that forks has ended; python {__file__} may say why"
        codes = json.loads(answer)
        read = [[(Path(place) / f"{name}{i}").read_text() for name in ("out", "err")] for i in range(len(codes))]
    return [Ended(program, code, *said) for code, said in zip(codes, read, strict=True)]


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **_IMPORTING},
    )


def _serve() -> None:
    """Answer each request, a line of JSON on stdin, by the exit codes of its processes."""
    del sys.path[0]  # this folder
    for name in LIBRARIES:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        pids = [_fork(request, number) for number in range(len(request["environments"]))]
        answers.write(json.dumps(_codes(pids, time.monotonic() + request["seconds"])) + "\n")
        answers.flush()


def _codes(pids: Sequence[int], until: float) -> list[int]:
    """Return the exit codes of processes, all of which are killed if one fails or the time is over."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > until or any(codes.values()):
            for left in set(pids) - codes.keys():
                os.kill(left, signal.SIGKILL)
            until += 5  # one that was killed takes a moment
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def _fork(request: Mapping[str, Any], number: int) -> int:
    """Start a process of a request and return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environments"][number])
        place = Path(request["place"])
        for descriptor, name, how in (
            (0, "in", os.O_RDONLY),
            (1, f"out{number}", os.O_RDWR),
            (2, f"err{number}", os.O_RDWR),
        ):
            os.dup2(os.open(place / name, how | os.O_CREAT), descriptor)
        sys.stdin = os.fdopen(0, closefd=False)
        code = _run(request["program"], request["path"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(program: list[str], path: list[str]) -> int:
    """Run a program as ``python`` does and return its exit code."""
    try:
        if program[0] == "-m":
            sys.path[:0] = ["", *path]
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[:0] = [str(Path(program[0]).parent), *path]
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    _serve()
