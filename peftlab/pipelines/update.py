"""Training a draft further on the requests it has served since (Online Speculative Decoding)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from peftlab.drafting.config import DraftConfig
from peftlab.drafting.table import DRAFTS
from peftlab.errors import PeftlabError
from peftlab.files import claimed, write_text
from peftlab.models.pretrained import load_tokenizer
from peftlab.pipelines.directory import RUN
from peftlab.pipelines.draft import run_draft
from peftlab.pipelines.drafts.draft_results import DraftResults
from peftlab.recipe.load import load_recipe
from peftlab.recipe.schema import DraftRecipe
from peftlab.references import similar_path
from peftlab.registry import resolve
from peftlab.tasks.prompts import Request, read_requests

SETTINGS, STREAM = "settings.json", "stream.json"  # of an update that serves a stream: at its start and at its end


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
    first = draft_run(run)
    with claimed(run, RUN, resume=True):
        update = _update(run, first, logs, size, tuple(overrides))
        return run_draft(update, device=device)


def draft_run(run: Path) -> DraftRecipe:
    """Return the recipe of the run of a draft; ``PeftlabError`` where there is none."""
    if not run.is_dir():
        raise PeftlabError(f"{run}: no such directory{similar_path(str(run))}")
    if not (run / "recipe.yaml").exists():
        raise PeftlabError(f"{run}: no run here (there is no recipe.yaml)")
    first = load_recipe(run / "recipe.yaml")
    if not isinstance(first, DraftRecipe):
        raise PeftlabError(f"{run}: a run of kind {first.kind}; only drafts are updated")
    return first


def updates(run: Path) -> tuple[list[Path], Path | None]:
    """Return the updates of a run, oldest first, and the stream among them that was stopped before its end, if any."""
    places = sorted((run / "updates").glob("[0-9][0-9][0-9][0-9]"))
    stopped = [place for place in places if (place / SETTINGS).exists() and not (place / STREAM).exists()]
    done = [place for place in places if (place / "recipe.yaml").exists() and place not in stopped]
    return done, stopped[-1] if stopped else None  # neither: killed before it began


def continued(first: DraftRecipe, newest: Path, log: str | Path) -> DraftConfig:
    """Return the draft section that continues from the draft of ``newest``."""
    config: DraftConfig = resolve(DRAFTS.find(first.draft.kind).update)(first.draft, newest, log)
    return config


def with_overrides(run: Path, overrides: Iterable[str]) -> DraftRecipe:
    """Return the run's recipe with overrides, which do not make it one of another kind."""
    wanted = load_recipe(run / "recipe.yaml", overrides)
    if not isinstance(wanted, DraftRecipe):
        raise PeftlabError(f"an update is one run of kind draft, and the overrides make it a {wanted.kind}")
    return wanted


def fill_replay(
    run: Path, number: int, tokenizer: PreTrainedTokenizerBase, requests: Sequence[Request], size: int
) -> Path:
    """Write the buffer of update ``number``: the newest ``size`` of these requests and of the earlier updates'."""
    before = run / "updates" / f"replay-{number - 1:04d}.jsonl"
    buffer = [*(read_requests(before, tokenizer) if before.exists() else []), *requests][-size:]
    rows = ({"prompt_ids": r.prompt, "response_ids": r.response} for r in buffer)
    path = run / "updates" / f"replay-{number:04d}.jsonl"
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path


def _update(run: Path, first: DraftRecipe, logs: str | Path, size: int, overrides: tuple[str, ...]) -> DraftRecipe:
    """Write the replay buffer, and return the recipe of the update."""
    done, stopped = updates(run)
    if stopped is not None:
        raise PeftlabError(f"{stopped}: a stream that was stopped; repeat its command, which finishes it, or delete it")
    draft = continued(first, done[-1] if done else run, logs)
    tokenizer, number = load_tokenizer(first.target), len(done) + 1
    replay = fill_replay(run, number, tokenizer, read_requests(logs, tokenizer, chat=first.data.chat), size)
    wanted = with_overrides(run, overrides)
    # Set as values: a path in an override would be read as YAML.
    cache = wanted.data.cache or str(run.parent / "draft-data")
    data = wanted.data.model_copy(update={"replay": str(replay), "cache": cache})
    changes = {"draft": draft, "data": data, "output_dir": str(run / "updates" / f"{number:04d}")}
    return wanted.model_copy(update=changes)
