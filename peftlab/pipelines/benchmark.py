"""What a draft is worth on this machine: ``draft bench`` times it, ``draft plan`` measures what it could gain.

``DecodingOptions`` are also those of generating text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from peftlab.decoding import planning
from peftlab.decoding.benchmark import (
    DraftedText,
    Question,
    Settings,
    bench,
    check_pool,
    drafted_text,
    fitting_questions,
    measure_pool,
)
from peftlab.decoding.cache import CacheMemory, Engine, cache_memory
from peftlab.decoding.decode import Drafter, Fixed, PolicyFactory, PolicyInputs, fixed
from peftlab.decoding.measurements import (
    BenchmarkResult,
    EngineResult,
    MeasuredStepTimes,
    Stopwatch,
    drafting_times,
    target_times,
    timed_calls,
)
from peftlab.decoding.sampled_trees import GrowthFactory
from peftlab.decoding.sampling import TRAVERSAL, LossyRule, Sampling, Verifier
from peftlab.decoding.table import (
    CHAIN,
    DRAWN,
    HEAD,
    MODEL_FREE,
    NamedRule,
    lossy,
    model_free,
    policy,
    tree,
    verifier,
    window,
)
from peftlab.drafting.acceptance import load_acceptance_head
from peftlab.drafting.base import (
    ONE_PASS,
    PEARL,
    SUFFIX,
    SUFFIX_AND_DRAFT,
    Pair,
    check_tree,
    draft_costs,
    load_pair,
    make_drafter,
    needs_draft,
)
from peftlab.drafting.table import find_draft
from peftlab.drafting.text import index_corpus, read_documents
from peftlab.environment import __version__
from peftlab.errors import PeftlabError
from peftlab.files import to_json
from peftlab.models.quantised import torch_dtype
from peftlab.pipelines.served import OWN, check_engine, measure_in_engine, step_seconds_in_engine
from peftlab.progress import Phase, plural
from peftlab.registry import resolve
from peftlab.tasks.prompts import check_tokens, encode, has_images, read_prompts, spread


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Settings of speculative decoding.

    Attributes:
        max_new_tokens: length of the longest output.
        gamma: tokens drafted for one target step; the first number for the policy ``heuristic``, the most for others.
        width: choices of each Medusa head in a tree of ``gamma`` tokens, or children of an eagle3 layer's node; 1 is a
            chain, None the best tree as measured for heads, else a chain.
        policy: how the draft length is chosen, NAME or NAME:X of ``decoding.table.POLICIES``.
        temperature: 0 is greedy. top_k, top_p: restrict sampling; None does not. seed: of sampling.
        dtype: of the target: ``fp32``, ``bf16`` or ``fp16``. draft_dtype: of the draft; None: the target's.
        device: where the models run: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        pack: store the weights in the layout of fast kernels (CPU).
        corpus: file of texts that ``suffix`` copies from, as ``read_documents`` takes it.
        lossy: NAME or NAME:X of ``decoding.table.LOSSY``: accept drafted tokens by it, so that the output is no longer
            the target's; None: exactly.
        tree: NAME:W of ``decoding.table.TREES``: a tree of ``gamma`` nodes drawn from a draft model; None: a chain.
        verify: NAME of ``decoding.table.VERIFIERS``, how sampled drafts are verified; None: ``traversal``.
        draft_window: SINKS:LAST, the first and the last tokens that the draft sees; None: all.
    """

    max_new_tokens: int = 64
    gamma: int = 4
    width: int | None = None
    policy: str = "fixed"
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    dtype: str = "fp32"
    draft_dtype: str | None = None
    pack: bool = True
    corpus: str | None = None
    device: str = "auto"
    lossy: str | None = None
    tree: str | None = None
    verify: str | None = None
    draft_window: str | None = None

    def sampling(self) -> Sampling:
        """Return the rule by which tokens are chosen."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)

    def length(self) -> NamedRule:
        """Return the rule of draft length.

        Raises:
            PeftlabError: no such rule, one that drafts more than ``gamma``, or a ``gamma`` that drafts nothing.
        """
        Fixed(self.gamma)
        return policy(self.policy, self.gamma)

    def lossy_rule(self) -> NamedRule | None:
        """Return the rule of lossy verification; None verifies exactly.

        Raises:
            PeftlabError: no such rule.
        """
        return None if self.lossy is None else lossy(self.lossy)

    def grow(self) -> GrowthFactory | None:
        """Return what makes the growth of drawn trees; None drafts in the draft's own way.

        Raises:
            PeftlabError: no such tree.
        """
        if self.tree is None:
            return None
        chosen = tree(self.tree)
        made: GrowthFactory = resolve(chosen.row.make)(chosen.value)
        return made

    def verifier(self) -> Verifier:
        """Return the function that verifies sampled drafts.

        Raises:
            PeftlabError: no such verifier, or one with nothing to verify: greedily, beside a lossy rule, or without the
                tree that it needs.
        """
        if self.verify is None:
            return TRAVERSAL
        chosen = verifier(self.verify)
        if self.sampling().greedy:
            raise PeftlabError(f"verify {self.verify}: temperature 0 is greedy, where all verify alike; leave it out")
        if self.lossy is not None:
            raise PeftlabError(f"verify {self.verify}: lossy {self.lossy} takes its place; give one of them")
        if chosen.row.needs and (self.tree is None or tree(self.tree).name != chosen.row.needs):
            raise PeftlabError(f"verify {self.verify}: verifies independent drafts; give tree {chosen.row.needs}:W")
        found: Verifier = resolve(chosen.row.make)
        return found

    def check_draft(self, draft: str | None) -> None:
        """Raise ``PeftlabError`` for settings of a draft where none is given.

        Args:
            draft: its reference; None: none is given.
        """
        if draft is None and self.draft_window is not None:
            raise PeftlabError(f"draft_window {self.draft_window}: no draft is given to see it")
        if draft is None and self.draft_dtype is not None:
            raise PeftlabError(f"draft_dtype {self.draft_dtype}: no draft is given whose weights would have it")

    def check_drafters(self, names: Collection[str]) -> None:
        """Raise ``PeftlabError`` for a corpus that no drafter reads, and for a lossy rule that one cannot follow.

        Args:
            names: of the drafters, NAME or NAME:X.
        """
        if self.corpus is not None and not {n.partition(":")[0] for n in names} & {SUFFIX, SUFFIX_AND_DRAFT, "ngram"}:
            raise PeftlabError(f"corpus {self.corpus}: only drafter {SUFFIX} copies from it, and ngram counts it")
        if self.lossy is not None and PEARL in names:
            raise PeftlabError(f"lossy {self.lossy}: drafter {PEARL} verifies exactly only; leave one of them out")

    def load(self, target: str, draft: str | None) -> Pair:
        """Load target and draft in their dtypes, after checking that the tree fits the draft.

        Args:
            target: reference. draft: reference as ``find_draft`` takes it; None for none.
        """
        heads = draft is not None and find_draft(draft)[0].heads
        check_tree(self.width, self.tree is not None, drafted=draft is not None, heads=heads)
        seen = None if self.draft_window is None else window(self.draft_window)
        dtype = torch_dtype(self.dtype)
        draft_dtype = dtype if self.draft_dtype is None else torch_dtype(self.draft_dtype, "draft_dtype")
        self.check_draft(draft)
        documents = None if self.corpus is None else read_documents(self.corpus)
        pair = load_pair(target, draft, dtype=dtype, draft_dtype=draft_dtype, device=self.device, pack=self.pack)
        pair.window = seen
        if documents is not None:
            pair.corpus = index_corpus(documents, pair.tokenizer)
        return pair


@dataclass(frozen=True)
class StoredWeights:
    """How the weights of a model are stored while it decodes.

    Attributes:
        dtype: of the model. packed: in what ways its products have them, beside the model's own or in place of them:
            in 16 bits, by oneDNN, as codes; empty: as the model has them.
    """

    dtype: str
    packed: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(self.packed) or 'as loaded'})"


def stored_weights(pair: Pair, options: DecodingOptions) -> dict[str, StoredWeights]:
    """Return how the weights of the ``target``, and of the ``draft`` if that is a model, are stored.

    Args:
        pair: the loaded models. options: which name the dtypes.
    """
    stored = {"target": StoredWeights(options.dtype, pair.target.packed)}
    if pair.draft is not None:
        stored["draft"] = StoredWeights(options.draft_dtype or options.dtype, pair.draft.packed)
    return stored


def weights_line(stored: Mapping[str, StoredWeights]) -> str:
    """Return how the weights are stored as a line of text."""
    return "weights: " + "; ".join(f"{name} in {how}" for name, how in stored.items())


HEAD_FILE = "acceptance_head.safetensors"


@dataclass(frozen=True)
class Lengths:
    """Policies of draft length, one for each drafter.

    Attributes:
        policies: drafter -> what makes the policy of a sequence. notes: what the user should know.
    """

    policies: Mapping[str, PolicyFactory]
    notes: tuple[str, ...] = ()


def draft_lengths(
    chosen: NamedRule,
    gamma: int,
    target: Engine,
    drafters: Mapping[str, Callable[[], Drafter]],
    *,
    batch: int = 1,
    head: Callable[[], Callable[[Tensor], float]] | None = None,
) -> Lengths:
    """Return the chosen policy for the drafters that can follow it, and a fixed γ for the others.

    ``goodput`` measures a few steps of the target and of each drafter.

    Args:
        gamma: tokens per step, at most or at first.
        drafters: name -> maker; the first is the one that was asked for.
        batch: sequences that are decoded together, at most.
        head: reads the head for policy ``head`` of a draft that has none of its own; see ``acceptance_head``.

    Raises:
        PeftlabError: the first drafter cannot follow the policy, or drafts no chains as long as the policy asks for.
    """
    made = {name: make() for name, make in drafters.items()}
    refused = {name: reason for name, drafter in made.items() if (reason := _obstacle(chosen.row.needs, drafter))}
    first = next(iter(made))
    if first in refused:
        raise PeftlabError(f"policy {chosen.text}: {refused[first]}")
    targets = target_times(target, batch, gamma) if chosen.row.needs == CHAIN else {}
    policies: dict[str, PolicyFactory] = {}
    for name, drafter in made.items():
        if name in refused:
            policies[name] = fixed(PolicyInputs(gamma), None)
            continue
        times: MeasuredStepTimes | None = None
        if targets:
            times = MeasuredStepTimes(targets, drafting_times(target, drafters[name], targets, gamma))
        estimate = drafter.acceptance if chosen.row.needs == HEAD else None
        if chosen.row.needs == HEAD and estimate is None and head is not None:
            estimate = head()
        policies[name] = resolve(chosen.row.make)(PolicyInputs(gamma, estimate, times), chosen.value)
    most = gamma if targets else policies[first]().budget(batch)
    if (longest := made[first].chain_limit) is not None and most > longest:
        raise PeftlabError(f"gamma {most}: the draft was trained to draft {longest} tokens in a pass; give {longest}")
    notes = (f"policy {chosen.text}: {', '.join(refused)} draft {gamma} tokens instead",) if refused else ()
    return Lengths(policies, notes)


def acceptance_head(draft: str | None, device: torch.device) -> Callable[[Tensor], float]:
    """Return the acceptance head of a draft run as the policy ``head`` takes it.

    Args:
        draft: reference of the run, or of a directory in it. device: where the draft's states are.

    Raises:
        PeftlabError: there is none.
    """
    places = [Path(draft), Path(draft).parent] if draft is not None else []
    place = next((place for place in places if (place / HEAD_FILE).is_file()), None)
    if place is None:
        where = f"{draft} has no {HEAD_FILE}" if draft is not None else "no draft run is named"
        raise PeftlabError(f"policy head: {where}; a draft recipe with acceptance_head: true trains one")
    predictor = torch.nn.Module.to(load_acceptance_head(place / HEAD_FILE), device)
    return lambda hidden: float(predictor(hidden))


_REFUSALS = {
    DRAWN: "stops a chain that is drawn token by token, and {} draws none",
    HEAD: "reads the states of a draft model that drafts a chain, and {} is none",
    CHAIN: "needs a chain whose length it can choose by measured times, and {} drafts none",
}


def _obstacle(needs: str, drafter: Drafter) -> str | None:
    """Return why a drafter cannot follow a policy, or None if it can."""
    if not needs or needs in drafter.provides:
        return None
    width = getattr(drafter, "width", None) or 1
    return _REFUSALS[needs].format(drafter.name + (f" of width {width}" if width > 1 else ""))


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
        engine: the same prompts and draft inside the engine that serves them; None: in peftlab alone.
    """

    gamma: int
    width: int | None
    policy: str
    tree: str | None
    verify: str | None
    weights: dict[str, StoredWeights]
    example: DraftedText
    result: BenchmarkResult
    engine: EngineResult | None = None

    def as_json(self) -> dict[str, object]:
        """Return the settings and the keys of the result in one object; ``drafters`` has the engine's figures, too."""
        values: dict[str, object] = self.settings() | self.result.as_json()
        if self.engine is None:
            return values | {"engine": {"name": OWN, "version": __version__}}
        drafters = to_json(self.result.drafters) | {self.engine.title: to_json(self.engine)}
        return values | {"engine": to_json(self.engine), "drafters": drafters}

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
            f"{plural(len(of.prompts), 'prompt')}, {of.batch_size} at a time, up to "
            f"{plural(of.max_new_tokens, 'new token')}, {greedy}; "
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
        memory: bytes of the caches at the context measured and at the target's limit, 4,096 tokens without one; of an
            engine that serves, none.
    """

    alpha: float
    memory: list[CacheMemory]
    result: planning.MeasuredPlan | planning.MeasuredAdvice | planning.EnginePlan

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
    engine: str = OWN,
) -> DraftBenchmark:
    """Time plain and speculative decoding in turn on the same prompts.

    Args:
        target: reference of the model whose output it is. draft: reference of a model or a directory of heads.
        prompts: file as ``read_prompts`` takes it. max_prompts: the most to use, spread over the categories.
        options: of decoding; None for the defaults. batch_size: prompts decoded together. repeats: timed passes.
        drafters: those without a model, as ``decoding.table.MODEL_FREE`` names them; none: one of each. ``pearl`` is
            the draft at work beside the target, ``one_pass`` a gated LoRA in the target's own steps.
        pool: also time ``batch_size`` sequences in a pool that takes the next prompt as soon as one ends.
        engine: ``peftlab``; or ``vllm``, ``llama.cpp`` or the URL of a running server: the draft alone is measured,
            here and there.

    Raises:
        PeftlabError: a setting, the prompts, target or draft cannot be used.
    """
    options = options or DecodingOptions()

    # Refuse settings that cannot work before anything is loaded.
    length, relaxation = options.length(), options.lossy_rule()
    if engine != OWN:
        _check_for_engine(engine, draft, drafters, options, batch_size, pool)
    for name in drafters:
        needs_draft(name, draft)
    names = [name if name in (PEARL, ONE_PASS) else model_free(name).text for name in drafters or MODEL_FREE]
    options.check_drafters([*names, *([] if draft is None else [SUFFIX_AND_DRAFT])])
    settings = Settings(
        max_new_tokens=options.max_new_tokens,
        sampling=options.sampling(),
        batch_size=batch_size,
        verifier=options.verifier(),
        repeats=repeats,
    )
    if pool:
        check_pool(batch_size)
    chosen_prompts = read_prompts(prompts) if max_prompts is None else spread(read_prompts(prompts), max_prompts)
    if engine != OWN and any(map(has_images, chosen_prompts)):
        raise PeftlabError(f"--engine {engine}: is asked by token ids alone, and prompts have images; leave it out")

    # Load target and draft; the drafters are those of the draft, and beside it the named ones, each once.
    with Phase("loading target and draft"):
        pair = options.load(target, draft)
    if pool and pair.target.encoder is not None:
        raise PeftlabError(f"pool: {target} is an encoder-decoder model, which reads all prompts at once; leave it out")
    watches = attach_stopwatches(pair)
    names = [*(("draft", SUFFIX_AND_DRAFT) if pair.drafts else ()), *dict.fromkeys(names)]
    names = names if engine == OWN else ["draft"]
    made: dict[str, Callable[[], Drafter]] = {
        name: partial(make_drafter, name, pair, options.width, options.grow()) for name in names
    }
    head = partial(acceptance_head, draft, pair.target.device)
    lengths = draft_lengths(length, options.gamma, pair.target, made, batch=batch_size, head=head)
    settings.eos, settings.policies = pair.eos, lengths.policies
    settings.lossy = None if relaxation is None else LossyRule.of(relaxation, pair.embedding)

    # Time plain decoding and the drafters in turn; then decode one prompt more for the page.
    questions = []
    for prompt in chosen_prompts:
        ids = encode(pair.tokenizer, prompt, images=pair.images)
        check_tokens(prompt, ids, pair.target.vocab_size)
        questions.append(Question(prompt.id, prompt.category, ids))
    with Phase(f"decoding {plural(len(questions), 'prompt')}, {1 + repeats} times by each way to draft"):
        result = bench(watches[0], made, questions, settings, models=watches)
    first, make = next(iter(made.items()))
    if pool:
        with Phase("decoding in a pool"):
            result = replace(result, pool=measure_pool(pair.target, first, make, questions, settings))
    fitting = fitting_questions(pair.target, questions)
    served = None
    if engine != OWN and draft is not None:
        served = measure_in_engine(
            engine, target=target, draft=draft, dtype=options.dtype, gamma=options.gamma, questions=fitting,
            max_new_tokens=options.max_new_tokens, repeats=repeats, own=pair.target,
            plain={prompt.id: prompt.baseline_ids for prompt in result.prompts},
        )  # fmt: skip
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
        example=drafted_text(pair.target, settings, first, make(), fitting[0], pair.tokenizer),
        result=result,
        engine=served,
    )


def _check_for_engine(
    engine: str, draft: str | None, drafters: Sequence[str], options: DecodingOptions, batch_size: int, pool: bool
) -> None:
    """Refuse an engine that is not there, and settings that it cannot follow: greedy chains of gamma alone."""
    check_engine(engine)
    if draft is None:
        raise PeftlabError(f"--engine {engine}: needs the draft that it serves; give --draft")
    default, chain = DecodingOptions(), replace(options, width=None if options.width == 1 else options.width)
    names = ("temperature", "top_k", "top_p", "policy", "width", "tree", "verify", "lossy", "draft_window", "corpus")
    given = [name for name in names if getattr(chain, name) != getattr(default, name)]
    given += ["drafter"] * bool(drafters) + ["batch_size"] * (batch_size != 1) + ["pool"] * pool
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise PeftlabError(f"--engine {engine}: decodes greedily, one prompt at a time, in chains; without {flags}")


_CHOSEN_WHILE_DECODING = {
    "del": "chooses among the exits, whose steps cost different amounts,",
    "swift": "searches for the sublayers to skip, and would be measured with none skipped,",
}


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
    engine: str = OWN,
) -> MeasuredDraftPlan:
    """Measure whether a draft can make decoding faster, and from what acceptance.

    Args:
        target: reference of a model. draft: of a model, which may be untrained; None: the target alone is timed, and
            the kinds of drafts are compared by the weights that they read.
        options: only dtypes and ``pack`` count. alpha: the acceptance to recommend for.
        max_gamma: longest draft to consider. context: tokens in the cache meanwhile. repeats: passes of each kind.
        batches: how many sequences are decoded together; the plan is for the first, the cost curve and the best draft
            length for all.
        engine: ``peftlab``, or ``vllm`` or ``llama.cpp``, started here for each draft length: the steps are theirs.

    Raises:
        PeftlabError: the draft is a directory of heads, eagle3 or pard, which have no step for each token here, or
            ``del`` or ``swift``, whose step is chosen while decoding, or cannot be loaded, or the engine is not
            installed or does not serve it.
    """
    options = options or DecodingOptions()
    planning.check_plan(max_gamma, repeats, batches, context)
    if not 0 <= alpha <= 1:
        raise PeftlabError(f"alpha: {alpha} is not a probability")
    if engine != OWN:
        if "://" in engine:
            raise PeftlabError(f"--engine {engine}: drafts one length; draft plan starts vllm or llama.cpp for each")
        if list(batches) != [1]:
            raise PeftlabError(f"--engine {engine}: one sequence at a time is planned for; without --batch")
        _check_for_engine(engine, draft, (), options, batch_size=1, pool=False)
        assert draft is not None
        name, steps = step_seconds_in_engine(
            engine, target=target, draft=draft, dtype=options.dtype, max_gamma=max_gamma, context=context,
            repeats=repeats,
        )  # fmt: skip
        served = planning.plan_from_engine(name, steps, context)
        return MeasuredDraftPlan(
            target=target, draft=draft, dtype=options.dtype, draft_dtype=options.dtype, warnings=[], alpha=alpha,
            memory=[], result=served,
        )  # fmt: skip
    if draft is not None and find_draft(draft)[0].heads:
        raise PeftlabError(f"draft {draft}: such drafts have no step for each token to plan; use draft bench")
    if draft in _CHOSEN_WHILE_DECODING:
        raise PeftlabError(f"draft {draft}: {_CHOSEN_WHILE_DECODING[draft]} while decoding; use draft bench, or exit:K")
    with Phase("loading target and draft"):
        pair = options.load(target, draft)
    result: planning.MeasuredPlan | planning.MeasuredAdvice
    how = {"max_gamma": max_gamma, "context": context, "repeats": repeats}
    with Phase("timing steps of the models"):
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


def attach_stopwatches(pair: Pair) -> list[Stopwatch]:
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
        block = hasattr(pair.network, "block_size")
        calls = ("read", "draft") if block else ("fuse", "advance", "logits")
        pair.network = timed_calls(pair.network, watches[0], *calls)
    return watches
