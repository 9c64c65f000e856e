"""Every option that a page names for ``peftlab`` is one that the command line has."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
import typer

from peftlab.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
# Paragraphs and lines about other programs.
OTHER_PARAGRAPHS = re.compile(r"python -m tests")
OTHERS = re.compile(
    r"accelerate launch|ray start|torchrun|--multi_gpu|pip install|vllm|llama-|convert_|lm_eval|--include_path"
)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def options(command: click.Command) -> set[str]:
    """Return the options of a command and of those below it."""
    found = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return found.union({"--help"}, *(options(one) for one in getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_options_exist(page: Path) -> None:
    known = options(typer.main.get_command(app))
    paragraphs = [text for text in re.split(r"\n\s*\n", page.read_text()) if not OTHER_PARAGRAPHS.search(text)]
    lines = [line for text in paragraphs for line in text.splitlines() if not OTHERS.search(line)]
    assert not {name for line in lines for name in OPTION.findall(line)} - known
