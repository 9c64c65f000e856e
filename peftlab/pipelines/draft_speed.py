"""How fast a draft recipe's result decodes: the benchmark of ``draft bench``, on a few held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peftlab.decoding.analysis.benchmark import Question, Settings, compare
from peftlab.decoding.draft_length import Fixed
from peftlab.decoding.drafters.base import Drafter
from peftlab.decoding.drafters.head_drafter import MedusaDrafter, read_medusa
from peftlab.decoding.drafters.model_drafter import ModelDrafter
from peftlab.decoding.engines.build import build_engine
from peftlab.drafting.load import draft_engine
from peftlab.drafting.truncation import truncate
from peftlab.recipe.schema import DraftRecipe

_DECODED = 8  # held-out prompts that are decoded, one at a time


def drafting_with_a_model(draft: Any, tokens: torch.Tensor | None = None) -> Callable[[], Drafter]:
    """Return the maker of a drafter by a second model, confined to ``tokens`` [V_d] if they are given."""
    return partial(ModelDrafter, draft_engine(draft, tokens=tokens))


def drafting_with_an_exit(served: Any, layers: int) -> Callable[[], Drafter]:
    """Return the maker of a drafter by the first layers of the model that is served."""
    return partial(ModelDrafter, build_engine(truncate(served, range(layers), share=True)))


def drafting_with_heads(directory: Path, device: torch.device) -> Callable[[], Drafter]:
    """Return the maker of a drafter by the Medusa heads in a directory."""
    return partial(MedusaDrafter, read_medusa(directory).to(device))


def decoding_speed(
    recipe: DraftRecipe,
    served: Any,
    drafter: Callable[[], Drafter],
    prompts: Sequence[list[int]],
    eos: frozenset[int],
    *,
    repeats: int,
) -> dict[str, Any]:
    """Return block efficiency (tokens a target step) and tokens per second, plain and with the draft.

    Greedy decoding, one prompt at a time, on the engine that ``draft bench`` takes.

    Args:
        served: the model whose output it is. drafter: makes a new drafter for each pass.
        prompts: token ids, of which the first few are decoded. eos: ids that end an output.
        repeats: timed passes over them.
    """
    questions = [Question(str(i + 1), "held out", ids) for i, ids in enumerate(prompts[:_DECODED])]
    settings = Settings(recipe.data.max_new_tokens, eos, partial(Fixed, recipe.gamma), repeats=repeats)
    run = compare(build_engine(served), {"draft": drafter}, questions, settings)
    found = run.result("draft")
    return {
        "block_efficiency": found.statistics.tau,
        "accepted": found.statistics.acceptance,
        "plain_tokens_per_second": round(found.baseline_tokens_per_second, 2),
        "tokens_per_second": round(found.tokens_per_second, 2),
        "speed_up": round(found.speedup, 3),
        "speed_up_interval": found.speedup_interval,
        "lossless": found.lossless,
        "verdict": found.verdict,
        "kernel": run.target.kind,
        "conditions": run.conditions.as_json(),
    }
