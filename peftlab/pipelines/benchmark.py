"""What a draft is worth on this machine: ``draft bench`` times it, ``draft plan`` measures what it could gain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from peftlab.decoding import planning
from peftlab.decoding.benchmark import (
    DraftedText,
    Question,
    Settings,
    bench,
    check_pool,
    drafted_text,
    fits,
    measure_pool,
)
from peftlab.decoding.cache import CacheMemory, cache_memory
from peftlab.decoding.decode import Drafter
from peftlab.decoding.measurements import BenchmarkResult, Stopwatch, timed_calls
from peftlab.decoding.table import HEAD, MODEL_FREE, model_free
from peftlab.drafting.base import (
    ONE_PASS,
    PEARL,
    SUFFIX_AND_DRAFT,
    Pair,
    draft_costs,
    make_drafter,
    needs_draft,
)
from peftlab.drafting.table import find_draft
from peftlab.errors import PeftlabError
from peftlab.files import to_json
from peftlab.pipelines.generate import (
    DecodingOptions,
    StoredWeights,
    acceptance_head,
    draft_lengths,
    stored_weights,
    weights_line,
)
from peftlab.tasks.prompts import Prompt, encode, read_prompts, spread


@dataclass(frozen=True)
class MeasurementSettings:
    """The settings that a benchmark and a plan have in common.

    Attributes:
        target, draft: references. dtype, draft_dtype: of their weights.
        warnings: what loading them gave rise to.
    """

    target: str
    draft: str | None
    dtype: str
    draft_dtype: str
    warnings: list[str]

    def settings(self) -> dict[str, object]:
        """Return all attributes but the result, as JSON has them."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "result"}


@dataclass(frozen=True)
class DraftBenchmark(MeasurementSettings):
    """A benchmark of a target and its draft.

    Attributes:
        gamma, width, policy, tree: how tokens were drafted. verify: how they were verified; None: the default.
        weights: of the ``target`` and of the ``draft``, if that is a model of its own.
        example: the first prompt's output, with the tokens that the first drafter drafted for it.
        result: plain decoding and drafters on the same prompts.
    """

    gamma: int
    width: int | None
    policy: str
    tree: str | None
    verify: str | None
    weights: dict[str, StoredWeights]
    example: DraftedText
    result: BenchmarkResult

    def as_json(self) -> dict[str, object]:
        """Return the settings and the keys of the result in one object."""
        return self.settings() | self.result.as_json()

    def lines(self) -> list[str]:
        """Return a line each about models, settings and the storage of weights."""
        of = self.result
        models = f"{self.result.drafter} for {self.target} in {self.dtype}"
        if self.draft is not None:
            models += f", draft {self.draft} in {self.draft_dtype}"
        shape = "" if self.width is None else f", width {self.width}"
        greedy = "greedy" if not of.temperature else f"temperature {of.temperature:g}"
        return [
            models,
            f"{len(of.prompts)} prompts, {of.batch_size} at a time, up to {of.max_new_tokens} new tokens, {greedy}; "
            f"gamma {self.gamma}{shape}, policy {self.policy}",
            self.where(),
        ]

    def where(self) -> str:
        """Return a line about the processor or device and the storage of weights."""
        of = self.result
        return f"{of.cpu if of.device == 'cpu' else of.device}; {weights_line(self.weights)}"


@dataclass(frozen=True)
class MeasuredDraftPlan(MeasurementSettings):
    """A measured plan for a target and a draft model, or for the kinds of drafts where none is given.

    Attributes:
        alpha: the acceptance asked about.
        memory: bytes of the caches at the context measured and at the target's limit, 4,096 tokens without one.
    """

    alpha: float
    memory: list[CacheMemory]
    result: planning.MeasuredPlan | planning.MeasuredAdvice

    def as_json(self) -> dict[str, object]:
        """Return the settings and the keys of the result in one object."""
        return self.settings() | {"memory": to_json(self.memory)} | to_json(self.result)


def benchmark(
    target: str,
    prompts: str | Path,
    draft: str | None = None,
    options: DecodingOptions | None = None,
    *,
    drafters: Sequence[str] = (),
    batch_size: int = 1,
    repeats: int = 3,
    max_prompts: int | None = None,
    pool: bool = False,
) -> DraftBenchmark:
    """Time plain and speculative decoding in turn on the same prompts.

    Args:
        target: reference of the model whose output it is. draft: reference of a model or a directory of heads.
        prompts: file as ``read_prompts`` takes it. max_prompts: the most to use, spread over the categories.
        options: of decoding; None for the defaults. batch_size: prompts decoded together. repeats: timed passes.
        drafters: those without a model, as ``decoding.table.MODEL_FREE`` names them; none: one of each. ``pearl`` is
            the draft at work beside the target, ``one_pass`` a gated LoRA in the target's own steps.
        pool: also time ``batch_size`` sequences in a pool that takes the next prompt as soon as one ends.

    Raises:
        PeftlabError: a setting, the prompts, target or draft cannot be used.
    """
    options = options or DecodingOptions()
    length = options.length()
    beside = _requested_drafters(drafters or [*MODEL_FREE], draft)
    settings = _settings(options, batch_size, repeats)
    if pool:
        check_pool(batch_size)
    asked = _select_prompts(prompts, max_prompts)
    pair = options.load(target, draft)
    watches = watched(pair)
    made = _drafters(pair, beside, options)
    head = acceptance_head(draft, pair.target.device) if length.row.needs == HEAD else None
    lengths = draft_lengths(length, options.gamma, pair.target, made, batch=batch_size, head=head)
    settings.eos, settings.policies = pair.eos, lengths.policies
    questions = [Question(p.id, p.category, encode(pair.tokenizer, p)) for p in asked]
    result = bench(watches[0], made, questions, settings, models=watches)
    first = next(iter(made.items()))
    if pool:
        result = replace(result, pool=measure_pool(pair.target, *first, questions, settings))
    return DraftBenchmark(
        target=target,
        draft=draft,
        dtype=options.dtype,
        draft_dtype=options.draft_dtype or options.dtype,
        warnings=[*pair.warnings, *lengths.notes],
        gamma=options.gamma,
        width=options.width,
        policy=options.policy,
        tree=options.tree,
        verify=options.verify,
        weights=stored_weights(pair, options),
        example=_example(pair, *first, questions, settings),
        result=result,
    )


def _select_prompts(file: str | Path, most: int | None) -> list[Prompt]:
    """Return the file's prompts, or ``most`` of them spread over its categories."""
    prompts = read_prompts(file)
    return prompts if most is None else spread(prompts, most)


def _example(
    pair: Pair, name: str, make: Callable[[], Drafter], questions: Sequence[Question], settings: Settings
) -> DraftedText:
    """Return one output of the first prompt that fits the target's context, with its drafted tokens."""
    asked = next(question for question in questions if fits(pair.target, question))
    return drafted_text(pair.target, settings, name, make(), asked, pair.tokenizer)


def _requested_drafters(names: Sequence[str], draft: str | None) -> list[str]:
    """Return the names of the drafters that are timed beside the draft, each once, or refuse one without its draft."""
    for name in names:
        needs_draft(name, draft)
    return [name if name in (PEARL, ONE_PASS) else model_free(name).text for name in dict.fromkeys(names)]


def _drafters(pair: Pair, free: Sequence[str], options: DecodingOptions) -> dict[str, Callable[[], Drafter]]:
    """Return what makes each drafter: those of the pair's draft if there is one, and those named."""
    names = [*(("draft", SUFFIX_AND_DRAFT) if pair.drafts else ()), *free]
    return {name: partial(make_drafter, name, pair, options.width, options.grow()) for name in names}


def _settings(options: DecodingOptions, batch_size: int, repeats: int) -> Settings:
    """Return the settings of the benchmark's decoding."""
    return Settings(
        max_new_tokens=options.max_new_tokens,
        sampling=options.sampling(),
        batch_size=batch_size,
        lossy=options.lossy_rule(),
        verifier=options.verifier(),
        repeats=repeats,
    )


def plan_draft(
    target: str,
    draft: str | None = None,
    options: DecodingOptions | None = None,
    *,
    alpha: float = 0.5,
    max_gamma: int = 8,
    context: int = 128,
    repeats: int = 9,
    batches: Sequence[int] = (1,),
) -> MeasuredDraftPlan:
    """Measure whether a draft can make decoding faster, and from what acceptance.

    Args:
        target: reference of a model. draft: of a model, which may be untrained; None: the target alone is timed, and
            the kinds of drafts are compared by the weights that they read.
        options: only dtypes and ``pack`` count. alpha: the acceptance to recommend for.
        max_gamma: longest draft to consider. context: tokens in the cache meanwhile. repeats: passes of each kind.
        batches: how many sequences are decoded together; the plan is for the first, the cost curve and the best draft
            length for all.

    Raises:
        PeftlabError: the draft is a directory of heads, eagle3 or pard, which have no step for each token, or cannot be
            loaded.
    """
    options = options or DecodingOptions()
    planning.check_plan(max_gamma, repeats, batches)
    if not 0 <= alpha <= 1:
        raise PeftlabError(f"alpha: {alpha} is not a probability")
    if draft is not None and find_draft(draft)[0].heads:
        raise PeftlabError(f"draft {draft}: such drafts have no step for each token to plan; use draft bench")
    pair = options.load(target, draft)
    result: planning.MeasuredPlan | planning.MeasuredAdvice
    how = {"max_gamma": max_gamma, "context": context, "repeats": repeats}
    if pair.draft is None:
        result = planning.compare_kinds(pair.target, draft_costs(pair.weights), alpha, batches=batches, **how)
    else:
        result = planning.plan(pair.target, pair.draft, batches=batches, **how)
    return MeasuredDraftPlan(
        target=target,
        draft=draft,
        dtype=options.dtype,
        draft_dtype=options.draft_dtype or options.dtype,
        warnings=list(pair.warnings),
        alpha=alpha,
        memory=cache_memory(pair.target, pair.draft, batches, (context, pair.target.limit or 4096), pair.window),
        result=result,
    )


def watched(pair: Pair) -> list[Stopwatch]:
    """Put stopwatches around the pair's models and return them, the target's first; heads count as the target."""
    watches = [Stopwatch(pair.target)]
    if pair.draft is not None:
        watches.append(Stopwatch(pair.draft))
        if pair.whole is not None and pair.own is not None:
            watches.append(Stopwatch(pair.whole))
        pair.draft, pair.whole = watches[1], watches[-1] if pair.whole is not None else None
    if pair.heads is not None:
        pair.heads = timed_calls(pair.heads, watches[0], "tokens")
    if pair.network is not None:
        pair.network = timed_calls(pair.network, watches[0], "fuse", "advance", "logits")
    return watches
