"""What a command imports: without a model neither torch nor transformers, with a plain decoder torch alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer

from peftlab.checkpoints.adapter import save_adapter
from peftlab.cli.app import app
from peftlab.methods.inject import inject_lora
from tests.distribution import write_distribution
from tests.gguf_models import tokenizer
from tests.reporting.run_directory import write_run

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch", "torch._dynamo", "torch.distributed.tensor", "transformers", "datasets", "numpy", "scipy", "sklearn", "pandas",
    "sympy", "accelerate", "torchao", "huggingface_hub", "matplotlib", "regex",
)  # fmt: skip
UNIX_MODULES = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "readline", "syslog")
UNIX_NAMES = (
    "O_NONBLOCK", "O_DIRECTORY", "fork", "setpgid", "killpg", "getuid", "pread", "preadv", "pwrite", "fdatasync",
    "copy_file_range", "sched_getaffinity", "getloadavg", "statvfs", "mkfifo", "posix_fadvise",
)  # fmt: skip
COMMANDS = {
    "recipes": ["recipes"],
    "schema": ["schema"],
    **{
        f"validate {name}": ["validate", str(ROOT / "recipes" / f"{name}.yaml")]
        for name in ("glue/cola-lora", "quickstart", "text-classification")
    },
    "validate override": ["validate", "glue/cola-lora", "method=houlsby", "train.lr=1e-4"],
    "predictions of no format": ["predict", "nowhere", "rows.csv", "-o", "rows.xlsx"],
    "a run where something is": ["run", "glue/cola-lora", f"output_dir={ROOT / 'docs'}"],
    "a run of no model": ["run", "glue/cola-lora", "model=package:no-such-package/model"],
    "a wrong recipe": ["validate", "glue/cola-lora", "method.rank=4"],
}


def _modules(code: str, *arguments: str, path: Path = ROOT) -> set[str]:
    """Run ``code`` in a process of its own and return the modules it has imported."""
    code += "\nimport sys\nprint('imported:', *sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, dict.fromkeys([path, ROOT])))}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=True
    )
    return set(done.stdout.splitlines()[-1].removeprefix("imported:").split())


def _imported(code: str, *arguments: str, path: Path = ROOT) -> set[str]:
    """Run ``code`` in a process of its own and return which of ``HEAVY`` it has imported."""
    return _modules(code, *arguments, path=path) & set(HEAVY)


_COMMAND = "from peftlab.cli.app import main\ntry: main()\nexcept SystemExit: pass"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_a_model_imports_none_of_the_heavy_packages(command: str) -> None:
    assert _imported(_COMMAND, *COMMANDS[command]) == set()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama, ``base``, a plain adapter of it, a tiny BERT, ``encoder``, and a finished run."""
    place = tmp_path_factory.mktemp("decoder")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = tokenizer("spm")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=len(tokens)))
    model.save_pretrained(place / "base")
    tokens.save_pretrained(place / "base")
    save_adapter(inject_lora(model, r=2), place / "adapter", base=str(place / "base"))
    transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=40)).save_pretrained(place / "encoder")
    write_run(place / "run")
    return place


# The heavy packages that a command imports, and how many modules beyond those of Python, or of torch where it imports
# that. A number that grows is a command that starts later; one that shrinks by a fifth has to be written down here, so
# that it does not grow again.
COUNTS = {
    "--help": ("", 190),
    "recipes": ("", 320),
    "recipes copy quickstart": ("", 320),
    "schema": ("", 330),
    "env": ("torch numpy", 120),
    "validate glue/cola-lora": ("", 370),
    "runs": ("", 330),
    "report run -o report.html": ("matplotlib numpy", 670),
    "inspect base": ("torch numpy", 250),
    "inspect encoder": ("torch numpy", 250),
    "adapter check adapter": ("torch numpy", 200),
    "merge adapter -o merged": ("torch numpy", 250),
    "merge adapter -o merged.gguf": ("torch numpy", 250),
    "unmerge merged -o again": ("torch numpy", 210),
}


# Verbs that load models, or ask transformers what a class is made of: most of what they import is transformers' choice.
WITH_TRANSFORMERS = {
    "run", "resume", "eval", "predict", "generate", "draft plan", "draft bench", "draft update", "draft export",
    "adapter convert", "adapter extract",
}  # fmt: skip


def test_every_verb_is_counted_or_asks_transformers() -> None:
    def verbs(command: Any, name: str = "") -> set[str]:
        inner = getattr(command, "commands", {})
        found = set().union(*(verbs(one, f"{name} {key}".strip()) for key, one in inner.items()))
        return found if name in ("", "draft", "adapter") else {name, *found}

    known = verbs(typer.main.get_command(app))
    assert known == {verb for verb in known if any(command.startswith(verb) for command in COUNTS)} | WITH_TRANSFORMERS


def test_a_command_imports_no_more_modules_than_it_did(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order, in one directory: what is merged is unmerged."""
    monkeypatch.chdir(decoder)
    start = {name: _modules(f"import {name}" if name else "") for name in ("", "torch")}
    found = {}
    for command, (heavy, _) in COUNTS.items():
        modules = _modules(_COMMAND, *command.split())
        names = " ".join(name for name in HEAVY if name in modules)
        found[command] = (names, len(modules - start["torch" if "torch" in heavy else ""]))
    assert (decoder / "again" / "config.json").exists() and (decoder / "report.html").exists()
    assert {command: names for command, (names, _) in found.items()} == {
        command: " ".join(name for name in HEAVY if name in heavy.split()) for command, (heavy, _) in COUNTS.items()
    }
    counts = {command: (count, COUNTS[command][1]) for command, (_, count) in found.items()}
    assert not {command: both for command, both in counts.items() if not 0.8 * both[1] <= both[0] <= both[1]}


def test_a_command_ends_without_looking_at_all_objects_once_more() -> None:
    """What is alive at the end is frozen, so that the interpreter's last collections do not go through it."""
    code = f"import atexit, gc\natexit.register(lambda: print('frozen', gc.get_freeze_count()))\n{_COMMAND}"
    done = subprocess.run([sys.executable, "-c", code, "recipes"], capture_output=True, text=True, check=True)
    assert int(done.stdout.split("frozen")[-1]) > 10_000


@pytest.mark.long  # four interpreters that are timed; the modules counted above guard the same from day to day
def test_validating_takes_half_the_processor_time_of_importing_torch_at_most() -> None:
    def seconds(code: str, *arguments: str) -> float:
        before = os.times()
        _imported(code, *arguments)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    torch = min(seconds("import torch") for _ in range(2))
    assert min(seconds(_COMMAND, "validate", "glue/cola-lora") for _ in range(2)) <= 0.5 * torch


def test_the_report_of_a_finished_run_imports_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path)
    code = "import sys\nfrom peftlab.reporting.pages import write_report\nfrom pathlib import Path\n"
    assert not {"torch", "transformers"} & _imported(f"{code}write_report(Path(sys.argv[1]))", str(tmp_path))


def test_a_recipe_of_another_distributions_method_imports_its_configuration_alone(tmp_path: Path) -> None:
    files = {
        "toy_row.py": "from peftlab.methods.config import Method\nROW = Method('toy_config:Toy', 'toy_plan:plan')\n",
        "toy_config.py": (
            "from typing import Literal\nfrom peftlab.methods.config import MethodConfig\n"
            "class Toy(MethodConfig):\n    '''A toy.'''\n    name: Literal['toy'] = 'toy'\n"
        ),
        "toy_plan.py": "import torch\n",
    }
    write_distribution(tmp_path, "toys", files, {"peftlab.methods": {"toy": "toy_row:ROW"}})
    assert _imported(_COMMAND, "validate", "glue/cola-lora", "method=toy", path=tmp_path) == set()


@pytest.mark.long  # a process that imports everything
def test_every_module_is_imported_without_what_only_unix_has() -> None:
    """Other packages are imported before: they choose by the system's name and would not do so here."""
    names = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "peftlab").rglob("*.py")
        if path.stem != "__main__"
    )
    code = (
        "import importlib, os, sys, sysconfig\n"
        "import torch, transformers, datasets, accelerate, accelerate.tracking, sklearn.metrics, scipy.stats, typer\n"
        "import rich.progress, transformers.modeling_utils, torch.nn.attention.flex_attention\n"
        f"for name in {UNIX_MODULES}: sys.modules[name] = None\n"
        f"for name in {UNIX_NAMES}: vars(os).pop(name, None)\n"
        "for name in sys.argv[1:]: importlib.import_module(name)"
    )
    assert "torch" in _imported(code, *names)


def test_a_run_measures_its_memory_where_there_is_no_resource_module() -> None:
    code = (
        "import sys, psutil\n"
        "sys.modules['resource'] = None\n"
        "class Info: peak_wset = 3 * 2**20\n"
        "psutil.Process.memory_info = lambda self: Info\n"
        "from peftlab.environment import peak_memory\n"
        "assert peak_memory() == 3.0"
    )
    _imported(code)


def test_torchao_is_imported_by_no_command_that_needs_no_model(tmp_path: Path) -> None:
    """Wherever it is installed, transformers imports it with its models; nothing else may."""
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("raise SystemExit('torchao was imported')\n")
    write_run(tmp_path / "run")
    page = str(tmp_path / "page.html")
    commands = [["validate", "glue/cola-lora"], ["report", str(tmp_path / "run"), "-o", page], ["env"]]
    for command in commands:
        code = f"{_COMMAND}\nimport sys\nassert 'torchao' not in sys.modules"
        _imported(code, *command, path=tmp_path)
