"""The reference page of ``results.json``, made from the docstrings of the dataclasses that it contains.

``python docs/results_page.py`` writes ``docs/reference/results.md``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from peftlab.checkpoints.merge_steps import MergeReport, TensorReport
from peftlab.decoding.benchmark import DraftedText, Piece
from peftlab.decoding.measurements import (
    AcceptanceStatistics,
    BenchmarkResult,
    CategoryResult,
    DrafterResult,
    LossyResult,
    PoolResult,
)
from peftlab.decoding.planning import plan
from peftlab.files import write_text
from peftlab.pipelines.benchmark import DraftBenchmark, MeasuredDraftPlan
from peftlab.pipelines.draft import DecodingSpeed, DraftResults
from peftlab.pipelines.finetune import FinetuneResults
from peftlab.pipelines.inspect import Inspection
from peftlab.pipelines.preview import CheckedData, CheckedMethod, DeepCheck

PAGE = Path(__file__).with_name("reference") / "results.md"
TEXT = """\
# Results

<!-- Written by `python docs/results_page.py` from the docstrings of the results' dataclasses. -->

`results.json` in a run directory is one JSON object. NaN and infinite values are written as `NaN` and `Infinity`.
`report.html`, model cards and tables are made from it. A table's own results are the rows of `table.csv`: see
[tables and sweeps](../guide/tables.md).

## Every run

{common}

## `kind: finetune`

{finetune}

## `kind: draft`

{draft}

Of `decoding`, `before` and `after` have the fields of

{decoding}

## `merge.json`

`peftlab merge` writes one beside the merged weights: the fields of

{merge}

## JSON of each verb

Every verb takes `--json PATH` (`-`: one object on stdout, and everything else goes to stderr) and `--quiet`. The object
is what the function in Python returns: `run`, `resume` and `draft update` give the keys above (a table: `cells` and
`table`; `draft update --prompts`: the fields of `StreamResults`), `validate` the recipe (with `--deep` also `deep`,
with `--show` also `examples`), `eval` {{split: {{metric: value}}}}, `predict` `answers`, `classes` and `probabilities`,
`inspect`, `merge` (`report`, `check`), `adapter` and `draft export` the fields of what they return, `generate` one
output (`--chat`: `answers`), and verbs that only write say where as `out`.

Each of `validate`'s `examples` has a `title` and `parts`: `text`, and whether it is `trained`. `deep` has the fields of

{deep}

## `draft bench --json` and `draft plan --json`

{bench}
```{{eval-rst}}
.. autofunction:: {plan}
   :no-index:
```

Before these keys come the settings: `target`, `draft`, `dtype`, `draft_dtype`, `warnings`, and for `bench` `gamma`,
`width`, `policy`, `weights` and `example`. `weights` has, of `target` and, where it is a model of its own, `draft`, the
`dtype` and how they are `packed` for the products (in 16 bits, by oneDNN, as codes of blocks; an empty list: as the
model has them). `example` is an output with its drafted tokens. In Python,
`peftlab.benchmark` and `peftlab.plan_draft` return them as

{python}
"""


def described(results: type) -> dict[str, str]:
    """Return the description of each attribute in a dataclass's docstring, one to a line with lines of its own."""
    docstring = inspect.cleandoc(results.__doc__ or "")
    attributes = docstring.partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n      .*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for name, text in entries}


def page() -> str:
    """Return the page in Markdown."""
    finetune, draft = described(FinetuneResults), described(DraftResults)
    shared = {field.name for field in fields(DraftResults)} - draft.keys()
    return TEXT.format(
        common=_table(finetune, [name for name in finetune if name in shared]),
        finetune=_table(finetune, [name for name in finetune if name not in shared]),
        draft=_table(draft, draft),
        decoding=_classes(DecodingSpeed),
        merge=_classes(MergeReport, TensorReport),
        deep=_classes(DeepCheck, CheckedData, CheckedMethod, Inspection),
        bench=_classes(
            BenchmarkResult, DrafterResult, CategoryResult, LossyResult, PoolResult, AcceptanceStatistics, DraftedText,
            Piece,
        ),
        plan=f"{plan.__module__}.{plan.__name__}",
        python=_classes(DraftBenchmark, MeasuredDraftPlan),
    )  # fmt: skip


def _table(descriptions: dict[str, str], names: Iterable[str]) -> str:
    rows = [f"| `{name}` | {descriptions[name].replace('``', '`')} |" for name in names]
    return "\n".join(["| key | meaning |", "| --- | --- |", *rows])


def _classes(*classes: type) -> str:
    """Return the directive that shows the docstrings of dataclasses."""
    lines = [f".. autoclass:: {each.__module__}.{each.__name__}\n   :exclude-members: __init__" for each in classes]
    return "\n".join(["```{eval-rst}", *lines, "```"])


if __name__ == "__main__":
    write_text(PAGE, page())
