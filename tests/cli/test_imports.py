"""What needs no model starts without torch and transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distribution import write_distribution
from tests.reporting.run_directory import write_run

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "datasets", "numpy", "scipy", "sklearn", "accelerate", "huggingface_hub")
COMMANDS = {
    "recipes": ["recipes"],
    "schema": ["schema"],
    **{
        f"validate {name}": ["validate", str(ROOT / "recipes" / f"{name}.yaml")]
        for name in ("glue/cola-lora", "quickstart", "text-classification")
    },
    "validate override": ["validate", "glue/cola-lora", "method=houlsby", "train.lr=1e-4"],
    "a wrong recipe": ["validate", "glue/cola-lora", "method.rank=4"],
}


def _imported(code: str, *arguments: str, path: Path = ROOT) -> set[str]:
    """Run ``code`` in a process of its own and return which of ``HEAVY`` it has imported."""
    code += f"\nimport sys\nprint('imported:', *(name for name in {HEAVY} if name in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, dict.fromkeys([path, ROOT])))}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=True
    )
    return set(done.stdout.splitlines()[-1].removeprefix("imported:").split())


_COMMAND = "from peftlab.cli.app import main\ntry: main()\nexcept SystemExit: pass"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_a_model_imports_none_of_the_heavy_packages(command: str) -> None:
    assert _imported(_COMMAND, *COMMANDS[command]) == set()


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
    code = "import sys\nfrom peftlab.reporting.html import write_report\nfrom pathlib import Path\n"
    assert not {"torch", "transformers"} & _imported(f"{code}write_report(Path(sys.argv[1]))", str(tmp_path))


def test_a_recipe_of_another_distributions_method_imports_its_configuration_alone(tmp_path: Path) -> None:
    files = {
        "toy_row.py": "from peftlab.methods.table import Method\nROW = Method('toy_config:Toy', 'toy_plan:plan')\n",
        "toy_config.py": (
            "from typing import Literal\nfrom peftlab.methods.config import MethodConfig\n"
            "class Toy(MethodConfig):\n    '''A toy.'''\n    name: Literal['toy'] = 'toy'\n"
        ),
        "toy_plan.py": "import torch\n",
    }
    write_distribution(tmp_path, "toys", files, {"peftlab.methods": {"toy": "toy_row:ROW"}})
    assert _imported(_COMMAND, "validate", "glue/cola-lora", "method=toy", path=tmp_path) == set()
