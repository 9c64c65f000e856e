"""The page of decoding systems: a row for everything that can be named, commands that exist, tests that exist."""

from __future__ import annotations

import ast
import shlex
from functools import cache
from pathlib import Path

import pytest
import typer

from peftlab.cli.app import app
from peftlab.decoding.table import (
    LOSSY,
    MODEL_FREE,
    POLICIES,
    TREES,
    VERIFIERS,
    lossy,
    model_free,
    policy,
    tree,
    verifier,
)
from peftlab.drafting.base import ONE_PASS, PEARL
from peftlab.drafting.table import DRAFTS as KINDS
from peftlab.environment import Cpu
from peftlab.recipe.load import load_recipe
from tests.benchmarks.measure_systems import PAGE, cells, figures, filled, short_name, words
from tests.benchmarks.systems import DRAFTS, SYSTEMS, System

TESTS = Path(__file__).resolve().parents[1]
BY_NAME = pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def parsed(arguments: list[str]) -> dict[str, object]:
    """Return the parameters of a command as its own parser reads them."""
    command, rest = typer.main.get_command(app), list(arguments)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    return command.make_context("peftlab", rest).params


@BY_NAME
def test_a_rows_command_parses_and_its_test_exists(system: System, tmp_path: Path) -> None:
    file, _, name = system.test.partition("::")
    assert name in functions(file), system.test
    found = parsed(words(system, tmp_path) if system.measured else shlex.split(system.command))
    for each in set(found.get("drafter") or ()) - {PEARL, ONE_PASS}:
        model_free(each)
    for option, read in {"policy": policy, "lossy": lossy, "tree": tree, "verify": verifier}.items():
        if found.get(option):
            read(found[option])
    assert "{" not in str(found.get("draft")), "a draft that no command trains"


def test_every_drafter_rule_and_kind_has_a_row() -> None:
    every = " ".join(system.command for system in SYSTEMS)
    trained = {load_recipe(*_recipe(command)).draft.kind for command in DRAFTS.values()}
    missing = {f"--drafter {name}" for name in MODEL_FREE} | {f"--lossy {name}" for name in LOSSY}
    missing |= {f"--tree {name}" for name in TREES} | {f"--verify {name}" for name in VERIFIERS}
    missing |= {f"--policy {name}" for name in POLICIES if name != "fixed"}  # the default
    assert not {option for option in missing if option not in every}
    assert set(KINDS.built_in) == trained, "give every kind a draft and a row"


def _recipe(command: str) -> tuple[str, list[str]]:
    verb, recipe, *overrides = shlex.split(command)
    assert verb == "run"
    return recipe, [*overrides, "output_dir=runs/x"]


def test_the_page_has_the_rows_and_keeps_what_was_measured() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, {}) == page, "run python -m tests.benchmarks.measure_systems --only"
    first, last = SYSTEMS[0].name, SYSTEMS[-1].name
    of_first, of_last = ("1.50", "1.20 (1.10 to 1.30)", "Some CPU"), ("2.00", "0.50", "Another, AMX")
    once = filled(page, {first: of_first}, {"Some CPU": "today"})
    twice = filled(once, {last: of_last}, {"Another, AMX": "yesterday"})
    assert cells(twice)[first] == of_first and cells(twice)[last] == of_last
    assert "| Some CPU | today |\n| Another, AMX | yesterday |" in twice
    assert filled(twice, {}, {"Some CPU": "now"}).count("Some CPU |") == 2  # its row of the table, and its line
    assert list(cells(twice)) == [system.name for system in SYSTEMS]


def test_a_cpu_has_a_short_name() -> None:
    assert short_name(Cpu("Intel(R) Xeon(R) Processor", ["avx2", "amx_bf16"], 2)) == "Intel Xeon, AMX"
    assert short_name(Cpu("AMD EPYC", ["avx2", "avx512_bf16"], 2)) == "AMD EPYC"


def test_figures_are_read_from_the_commands_result() -> None:
    drafter = {"tau": 1.5, "speedup": 1.2, "speedup_interval": [1.1, 1.3]}
    other = {"tau": 2.0, "speedup": 0.9, "speedup_interval": None}
    pool = {"pooled": {"draft": 90.0}, "static": {"plain": 60.0, "draft": 80.0}}
    result = {"drafter": "draft", "tau": 1.5, "drafters": {"draft": drafter, "suffix+draft": other}, "pool": pool}
    assert figures(System("a", "", ""), result) == ("1.50", "1.20 (1.10 to 1.30)")
    assert figures(System("a", "", "", "suffix+draft"), result) == ("2.00", "0.90")
    assert figures(System("a", "", "", "pool"), result) == ("1.50", "1.50")
