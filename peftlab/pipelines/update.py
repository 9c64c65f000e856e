"""Training a draft further on the requests it has served since (Online Speculative Decoding)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from peftlab.drafting.config import DraftConfig
from peftlab.drafting.kinds.table import DRAFTS
from peftlab.errors import PeftlabError
from peftlab.files import write_text
from peftlab.models.pretrained import load_tokenizer
from peftlab.outputs import claimed
from peftlab.pipelines.directory import RUN
from peftlab.pipelines.draft import run_draft
from peftlab.pipelines.drafts.draft_results import DraftResults
from peftlab.recipe.loading import load_recipe
from peftlab.recipe.schema import DraftRecipe
from peftlab.references import similar_path
from peftlab.rows import resolve
from peftlab.tasks.prompts import Request, read_requests


def update_draft(
    run: str | Path, logs: str | Path, *, size: int = 1024, overrides: Iterable[str] = (), device: str = "auto"
) -> DraftResults:
    """Train a run's newest merged draft further on the requests in ``logs``; return the update's results.

    Liu et al. 2023 (arXiv 2310.07177). The update is a run of its own, ``RUN/updates/0001`` and so on, whose
    recipe is the run's, starting from the newest draft. ``updates/replay-0001.jsonl`` holds the newest
    ``size`` requests, this log's and earlier ones': the newest of them are held out, and acceptance on them, before and
    after, is what the update is judged by. It also trains on the text the target wrote for the run.

    Args:
        run: directory of a draft recipe's run.
        logs: served requests, one prompt and response per row.
        size: of the buffer, in requests.
        overrides: as for ``peftlab run``: fewer steps, another learning rate.
        device: as for ``peftlab.run``.

    Raises:
        PeftlabError: no such run, a kind of draft that cannot be updated, no merged draft, or no request in ``logs``.
    """
    run = Path(run)
    if not run.is_dir():
        raise PeftlabError(f"{run}: no such directory{similar_path(str(run))}")
    if not (run / "recipe.yaml").exists():
        raise PeftlabError(f"{run}: no run here (there is no recipe.yaml)")
    first = load_recipe(run / "recipe.yaml")
    if not isinstance(first, DraftRecipe):
        raise PeftlabError(f"{run}: a run of kind {first.kind}; only drafts are updated")
    with claimed(run, RUN, resume=True):
        update = _update(run, first, logs, size, tuple(overrides))
        return run_draft(update, device=device)


def _update(run: Path, first: DraftRecipe, logs: str | Path, size: int, overrides: tuple[str, ...]) -> DraftRecipe:
    """Write the replay buffer, and return the recipe of the update."""
    places = sorted((run / "updates").glob("[0-9][0-9][0-9][0-9]"))
    done = [place for place in places if (place / "recipe.yaml").exists()]  # not: killed before it began
    newest = done[-1] if done else run
    draft: DraftConfig = resolve(DRAFTS.find(first.draft.kind).update)(first.draft, newest, logs)
    tokenizer = load_tokenizer(first.target)
    before = run / "updates" / f"replay-{len(done):04d}.jsonl"
    buffer = read_requests(before, tokenizer) if before.exists() else []
    buffer = [*buffer, *read_requests(logs, tokenizer, chat=first.data.chat)][-size:]
    place = run / "updates" / f"{len(done) + 1:04d}"
    staged = run / "updates" / f"replay-{len(done) + 1:04d}.jsonl"
    write_text(staged, _lines(buffer))
    wanted = load_recipe(run / "recipe.yaml", overrides)
    if not isinstance(wanted, DraftRecipe):
        raise PeftlabError(f"an update is one run of kind draft, and the overrides make it a {wanted.kind}")
    # Set as values: a path in an override would be read as YAML.
    cache = wanted.data.cache or str(run.parent / "draft-data")
    data = wanted.data.model_copy(update={"replay": str(staged), "cache": cache})
    changes = {"draft": draft, "data": data, "output_dir": str(place)}
    return wanted.model_copy(update=changes)


def _lines(requests: list[Request]) -> str:
    rows = ({"prompt_ids": r.prompt, "response_ids": r.response} for r in requests)
    return "".join(json.dumps(row) + "\n" for row in rows)
