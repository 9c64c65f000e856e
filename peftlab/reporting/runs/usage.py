"""The commands and the Python that use what a run has made, for its report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from peftlab.tasks.table import TASKS

_PROMPT = "Once upon a time"


def usage(recipe: Mapping[str, object]) -> dict[str, str]:
    """Return lines for a shell and lines of Python that use the run of a resolved recipe, by language."""
    place = str(recipe.get("output_dir", "RUN"))
    if recipe.get("kind") == "draft":
        return _generating(str(recipe.get("target")), draft=place)
    name = str(recipe.get("task"))
    if name in TASKS and not TASKS[name].labelled:
        return _generating(place, chat=name == "text/chat")
    lines = ["import peftlab", "", f"found = peftlab.predict({json.dumps(place)}, [{_row(name, recipe)}])"]
    return {
        "sh": f"peftlab predict {shlex.quote(place)} new.csv -o labelled.csv",
        "python": "\n".join([*lines, "print(found.answers, found.probabilities)"]),
    }


def _generating(target: str, draft: str | None = None, *, chat: bool = False) -> dict[str, str]:
    command = ["peftlab", "generate", "--target", target, *(["--draft", draft] if draft else [])]
    arguments = [target, _PROMPT, *([draft] if draft else [])]
    call = ", ".join([*map(json.dumps, arguments), *(["chat=True"] if chat else [])])
    return {
        "sh": shlex.join([*command, *(["--chat"] if chat else ["--prompt", _PROMPT])]),
        "python": f"import peftlab\n\nprint(peftlab.generate({call}).text)",
    }


def _row(name: str, recipe: Mapping[str, object]) -> str:
    """Return a row as Python has it: a text, a pair, or a text with its choices."""
    task, data = TASKS.get(name), recipe.get("data")
    if task is not None and task.choices:
        return '("a question", ["an answer", "another"])'
    named = data.get("text") if isinstance(data, Mapping) else None
    columns = named if isinstance(named, list) else task.text if task is not None else ()
    return '("a text", "its pair")' if len(columns) == 2 else '"a text"'
