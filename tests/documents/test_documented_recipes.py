"""Every recipe, and every part of one, that README and docs show is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from peftlab.errors import PeftlabError
from peftlab.recipe.load import load_recipe
from tests.documents.blocks import Block, blocks

ROOT = Path(__file__).resolve().parents[2]
SHOWN = [
    block
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    for block in blocks(str(path.relative_to(ROOT)), path.read_text())
    if block.language == "yaml"
    and not block.text.startswith(("compute_environment:", "task: mine"))  # of accelerate, of lm-eval
]


def whole(shown: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with what is shown and, where that is a part, the rest."""
    if "output_dir" in shown:
        return shown
    rest: dict[str, Any] = {
        "model": "model",
        "task": "text/chat",
        "data": {"path": "chats.jsonl"},
        "method": {"name": "lora"},
    }
    if "draft" in shown:
        rest = {"kind": "draft", "target": "target", "data": {"prompts": "prompts.jsonl"}}
    return rest | {"output_dir": "run"} | shown


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_is_valid(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(whole(yaml.safe_load(block.text))))
    load_recipe(str(file))


def test_a_wrong_key_is_found(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(whole({"train": {"layer": {"from": 3}}})))
    with pytest.raises(PeftlabError, match=r"train\.layer"):
        load_recipe(str(file))
