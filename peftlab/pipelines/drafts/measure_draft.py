"""What a draft is worth on this machine: ``draft bench`` times it, ``draft plan`` measures what it could gain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from peftlab.decoding.analysis import planning
from peftlab.decoding.analysis.benchmark import Question, Settings, bench
from peftlab.decoding.analysis.stopwatch import Stopwatch
from peftlab.decoding.drafters.base import Drafter
from peftlab.decoding.drafters.model_free import PromptLookup, Recycling
from peftlab.drafting.load import BOTH, Pair, drafts_with_heads, make_drafter
from peftlab.errors import PeftlabError
from peftlab.pipelines.drafts.decoding_options import DecodingOptions
from peftlab.tasks.prompts import encode, read_prompts, spread


def benchmark(
    target: str,
    prompts: str | Path,
    draft: str | None = None,
    options: DecodingOptions | None = None,
    *,
    batch_size: int = 1,
    repeats: int = 3,
    max_prompts: int | None = None,
) -> dict[str, Any]:
    """Time plain and speculative decoding in turn on the same prompts.

    The drafters without a model (prompt lookup, token recycling) run beside the draft, or alone without one.

    Args:
        target: reference of the model whose output it is. draft: reference of a model or a directory of heads.
        prompts: file as ``read_prompts`` takes it. max_prompts: the most to use, spread over the categories.
        options: of decoding; None for the defaults.
        batch_size: prompts decoded together. repeats: timed passes over all prompts.

    Returns:
        What ``draft bench --json`` writes: the settings, ``warnings``, and the keys of
        ``peftlab.decoding.analysis.results.BenchmarkResult``.

    Raises:
        PeftlabError: a setting, the prompts, target or draft cannot be used.
    """
    options = options or DecodingOptions()
    settings = Settings(
        max_new_tokens=options.max_new_tokens,
        policy=options.make_policy(),
        sampling=options.sampling(),
        batch_size=batch_size,
        repeats=repeats,
    )
    listed = read_prompts(prompts)
    if max_prompts is not None:
        listed = spread(listed, max_prompts)
    pair = options.load(target, draft)
    settings.eos = pair.eos
    watches = _watched(pair)
    drafters: dict[str, Callable[[], Drafter]] = {"lookup": PromptLookup, "recycling": Recycling}
    if draft is not None:  # the first drafter is the one that the result is about
        drafters = {name: partial(make_drafter, name, pair, options.width) for name in ("draft", BOTH)} | drafters
    questions = [Question(p.id, p.category, encode(pair.tokenizer, p)) for p in listed]
    return {
        "target": target,
        "draft": draft,
        "gamma": options.gamma,
        "width": options.width,
        "policy": options.policy,
        **_dtypes(options),
        "warnings": list(pair.warnings),
        **bench(watches[0], drafters, questions, settings, models=watches).as_json(),
    }


def plan_draft(
    target: str,
    draft: str,
    options: DecodingOptions | None = None,
    *,
    max_gamma: int = 8,
    context: int = 128,
    repeats: int = 9,
) -> dict[str, Any]:
    """Measure the step times of target and draft: whether a draft can make decoding faster, and from what acceptance.

    Args:
        target, draft: references of models; the draft may be untrained. options: only dtypes and ``pack`` count.
        max_gamma: longest draft to consider. context: tokens in the cache meanwhile. repeats: passes of each kind.

    Returns:
        What ``draft plan --json`` writes: the settings, ``warnings``, and the keys of
        ``peftlab.decoding.analysis.planning.MeasuredPlan``.

    Raises:
        PeftlabError: the draft is a directory of heads, which have no step of their own, or cannot be loaded.
    """
    options = options or DecodingOptions()
    planning.check_plan(max_gamma, repeats)
    if drafts_with_heads(draft):
        raise PeftlabError(f"draft {draft}: heads have no step of their own to plan; time them with draft bench")
    pair = options.load(target, draft)
    assert pair.draft is not None
    return {
        "target": target,
        "draft": draft,
        **_dtypes(options),
        "warnings": list(pair.warnings),
        **planning.plan(pair.target, pair.draft, max_gamma=max_gamma, context=context, repeats=repeats).as_json(),
    }


def _watched(pair: Pair) -> list[Stopwatch]:
    """Put stopwatches around the pair's models and return them, the target's first; heads count as the target's."""
    watches = [Stopwatch(pair.target)]
    if pair.draft is not None:
        watches.append(Stopwatch(pair.draft))
        pair.draft = watches[1]
    if pair.heads is not None:
        pair.heads = watches[0].including(pair.heads)
    return watches


def _dtypes(options: DecodingOptions) -> dict[str, str]:
    return {"dtype": options.dtype, "draft_dtype": options.draft_dtype or options.dtype}
