"""How fast a draft recipe's result decodes: the benchmark of ``draft bench``, on a few held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from peftlab.decoding.benchmark import Question, Settings, compare, drafted_text
from peftlab.decoding.drafter import Drafter
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_free import SuffixLookup, with_copies
from peftlab.decoding.table import HEAD, Window, policy, window
from peftlab.drafting.base import Served
from peftlab.drafting.load import SUFFIX, SUFFIX_AND_DRAFT, with_window
from peftlab.pipelines.drafts.draft_lengths import draft_lengths
from peftlab.pipelines.drafts.draft_results import DecodingSpeed
from peftlab.recipe.schema import DraftRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def decoding_speed(
    recipe: DraftRecipe,
    served: Served,
    prompts: Sequence[list[int]],
    eos: frozenset[int],
    head: Callable[[Tensor], float] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> DecodingSpeed:
    """Decode greedily, one prompt at a time, on the engine that ``draft bench`` takes.

    Copying what followed a repeated suffix takes part, alone and in one tree with the draft: it trains nothing, so a
    draft that it beats does not pay.

    Args:
        served: what decodes.
        prompts: token ids. eos: ids that end an output.
        head: for the policy ``head``; None: not trained yet, and drafts have ``gamma`` tokens.
        tokenizer: for the text of ``example``; None: without one.
    """
    questions = [Question(str(i + 1), "held out", ids) for i, ids in enumerate(prompts)]
    engine = build_engine(served.model, features=served.features)
    drafter = partial(_drafter, served, None if recipe.draft_window is None else window(recipe.draft_window))
    drafters: dict[str, Callable[[], Drafter]] = {
        "draft": drafter,
        SUFFIX: SuffixLookup,
        SUFFIX_AND_DRAFT: lambda: with_copies(drafter()),
    }
    length = policy(recipe.policy)
    if length.row.needs == HEAD and head is None:
        length = policy("fixed")
    lengths = draft_lengths(length, recipe.gamma, engine, drafters, head=head)
    settings = Settings(recipe.data.max_new_tokens, eos, policies=lengths.policies, repeats=1)
    run = compare(engine, drafters, questions, settings)
    found = run.result("draft")
    example = None
    if tokenizer is not None:
        example = drafted_text(engine, settings, "draft", drafter(), questions[0], tokenizer)
    return DecodingSpeed(
        block_efficiency=found.statistics.tau,
        tau_without_bonus=found.statistics.tau_without_bonus,
        accepted=found.statistics.acceptance,
        acceptance_by_position=found.statistics.acceptance_by_position,
        accepted_runs=found.statistics.accepted_runs,
        plain_tokens_per_second=round(found.baseline_tokens_per_second, 2),
        tokens_per_second=round(found.tokens_per_second, 2),
        speed_up=round(found.speedup, 3),
        speed_up_interval=found.speedup_interval,
        lossless=all(run.result(name).lossless for name in drafters),
        verdict=found.verdict,
        beside={name: round(run.result(name).speedup, 3) for name in (SUFFIX, SUFFIX_AND_DRAFT)},
        time=found.time,
        gain=run.gain("draft", drafter()),
        kernel=run.target.kind,
        conditions=run.conditions,
        example=example,
    )


def _drafter(served: Served, seen: Window | None) -> Drafter:
    return with_window(served.drafter(), seen)
