"""The page of engines: what ``make test-engines`` served in them, from the rows that it wrote.

``python docs/engines_page.py`` writes ``docs/reference/engines.md``.
"""

from __future__ import annotations

import json
from pathlib import Path

from peftlab.files import write_text

FOLDER = Path(__file__).with_name("reference")
TEXT = """\
# Engines

<!-- Written by `python docs/engines_page.py` from engines.json, which `make test-engines` writes. -->

What was exported by peftlab, served by the released engine and compared. "Tokens" are 24 to 40 greedy ones after each
prompt, equal to the first near tie; a draft's figure is the share of its tokens that the engine accepted by its own
counters, beside the 95 % interval of the share in peftlab on the same prompts. transformers has no counters: its own
`generate(assistant_model=...)` is counted. For speculators, whose classes train drafts but do not decode, logits are
compared in float32, and files that it wrote are read here.

The target is a Llama of 1.1 million weights with heads of 32. vLLM for CPUs has no attention for smaller ones: it takes
heads of 32, 64, 80, 96, 112, 128, 160, 192, 224, 256 and 512, and refuses the stories Llama, whose heads have 8. In
llama.cpp each class is a random model of its own.

    make test-engines

| engine | served | result | run |
| --- | --- | --- | --- |
{rows}

CPU: {cpus}.
"""


def main() -> None:
    """Write the page."""
    stored = json.loads((FOLDER / "engines.json").read_text())
    rows = [f"| {row['engine']} {row['version']} | {row['what']} | {row['figure']} | {row['date']} |" for row in stored]
    cpus = "; ".join(dict.fromkeys(row["cpu"] for row in stored))
    write_text(FOLDER / "engines.md", TEXT.format(rows="\n".join(rows), cpus=cpus))


if __name__ == "__main__":
    main()
