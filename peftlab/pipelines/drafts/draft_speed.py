"""How fast a draft recipe's result decodes: the benchmark of ``draft bench``, on a few held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from peftlab.decoding.analysis.benchmark import Question, Settings, compare
from peftlab.decoding.draft_length import Fixed
from peftlab.decoding.engines.build import build_engine
from peftlab.drafting.kinds.base import Served
from peftlab.pipelines.drafts.draft_results import DecodingSpeed
from peftlab.recipe.schema import DraftRecipe

_DECODED = 8  # held-out prompts that are decoded, one at a time


def decoding_speed(
    recipe: DraftRecipe,
    served: Served,
    prompts: Sequence[list[int]],
    eos: frozenset[int],
    *,
    repeats: int,
) -> DecodingSpeed:
    """Decode greedily, one prompt at a time, on the engine that ``draft bench`` takes.

    Args:
        served: what decodes.
        prompts: token ids, of which the first few are decoded. eos: ids that end an output.
        repeats: timed passes over them.
    """
    questions = [Question(str(i + 1), "held out", ids) for i, ids in enumerate(prompts[:_DECODED])]
    settings = Settings(recipe.data.max_new_tokens, eos, partial(Fixed, recipe.gamma), repeats=repeats)
    engine = build_engine(served.model, features=served.features)
    run = compare(engine, {"draft": served.drafter}, questions, settings)
    found = run.result("draft")
    return DecodingSpeed(
        block_efficiency=found.statistics.tau,
        accepted=found.statistics.acceptance,
        plain_tokens_per_second=round(found.baseline_tokens_per_second, 2),
        tokens_per_second=round(found.tokens_per_second, 2),
        speed_up=round(found.speedup, 3),
        speed_up_interval=found.speedup_interval,
        lossless=found.lossless,
        verdict=found.verdict,
        time=found.time,
        gain=run.gain("draft", served.drafter()),
        kernel=run.target.kind,
        conditions=run.conditions,
    )
