"""Every file that the architecture page names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_files_of_the_architecture_exist() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.\w+)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / "peftlab" / name).exists() and not (ROOT / name).exists()]
