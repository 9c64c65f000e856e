"""A draft recipe from beginning to end: checks, text by the target, training, merge, acceptance before and after."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from datasets import Dataset
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from peftlab.checkpoints.adapter import load_model, save_adapter
from peftlab.checkpoints.merge import check_merge, merge_checkpoint
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.decoding.benchmark import DraftedText, Question, Settings, compare, drafted_text
from peftlab.decoding.decode import Drafter
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import Conditions, Interval, MeasuredGain, PromptDivergence, TimeShares
from peftlab.decoding.model_free import SuffixLookup, with_copies
from peftlab.decoding.table import HEAD, Window, policy, window
from peftlab.drafting.acceptance import Reliability, ceiling, save_acceptance_head, train_acceptance_head
from peftlab.drafting.base import (
    SUFFIX,
    SUFFIX_AND_DRAFT,
    DraftKind,
    SavedDraft,
    ScheduledLoss,
    ServedDraft,
    in_mixed_precision,
    with_window,
)
from peftlab.drafting.config import DraftConfig
from peftlab.drafting.endpoint import ServedPrompt, ServedText, Target, served_continuations, served_model
from peftlab.drafting.objectives import make_objective
from peftlab.drafting.table import DRAFTS
from peftlab.drafting.target import check_head, check_method
from peftlab.drafting.text import (
    Collate,
    Repetition,
    WritingSettings,
    check_room,
    make_dataset,
    model_digest,
    repetition,
    stored_topk,
    write_continuations,
)
from peftlab.environment import Cpu
from peftlab.errors import PeftlabError, prefix_errors
from peftlab.files import Claim, Json, staged_directory, to_json, write_json, write_text
from peftlab.methods.config import lr_ratio
from peftlab.methods.inject import adapted_line, count_parameters, inject, is_injected
from peftlab.models.config import measures_latency, merge_into, verifies_merge
from peftlab.models.costs import Cost
from peftlab.models.image_tokens import LIMIT
from peftlab.models.load import language_model_class, load_config, load_tokenizer, max_positions, sees_images, storage
from peftlab.pipelines.benchmark import HEAD_FILE, acceptance_head, draft_lengths
from peftlab.pipelines.directory import (
    begin_or_compare,
    provenance,
    run_directory,
    stored_results,
    write_and_print_results,
)
from peftlab.pipelines.merge import COMPARING, TIMING, Latency, MergeCheck, merge_latency, verify_merge
from peftlab.progress import Phase
from peftlab.recipe.load import dump_recipe
from peftlab.recipe.schema import DraftRecipe, injected_method
from peftlab.registry import resolve
from peftlab.reporting.facts import trainable_line
from peftlab.tasks.batches import seeded_subset
from peftlab.tasks.image_prompts import ImagePrompts
from peftlab.tasks.problem import Scores, TrainingProblem
from peftlab.tasks.prompts import Request, read_conversations, read_prompt_ids, read_requests
from peftlab.training.distributed import check_trackers, make_accelerator
from peftlab.training.loop import train
from peftlab.training.recomputation import recompute_activations
from peftlab.training.state import Progress, SelectionResult
from peftlab.untyped import Attributes

_BEFORE, _AFTER = 4, 24  # held-out prompts that are decoded before and after training, one at a time


@dataclass(frozen=True)
class DecodingSpeed:
    """Greedy decoding of a few held-out prompts, plain and with the draft.

    Attributes:
        block_efficiency: tokens per target step.
        tau_without_bonus: the drafted ones among them, without the one that the target itself adds.
        accepted: accepted share of the drafted tokens that were tried.
        acceptance_by_position: the same for the first, second, ... token of a step.
        accepted_runs: drafted tokens accepted one after the other in a step -> steps.
        plain_tokens_per_second: of plain decoding.
        tokens_per_second: of decoding with the draft.
        speed_up: the ratio of the two.
        speed_up_interval: its 95 % interval.
        lossless: whether every output is plain decoding's, with every drafter.
        divergences: the outputs that differ, with any drafter.
        verdict: the speed-up in words.
        beside: speed-up of the drafters that were timed in turn with it: copying what followed a repeated suffix
            (``suffix``), and both in one tree (``suffix+draft``).
        time: shares of target, draft and the time outside the models; None where not measured.
        gain: the speed-up by its parts (tau, verification C(n), drafting D), and the best draft length; None where not
            measured.
        kernel: how the target's step is computed.
        conditions: of the machine.
        example: one output with what was drafted for it; None before training.
    """

    block_efficiency: float | None
    tau_without_bonus: float | None
    accepted: float | None
    acceptance_by_position: list[float | None]
    accepted_runs: dict[str, int]
    plain_tokens_per_second: float
    tokens_per_second: float
    speed_up: float
    speed_up_interval: Interval
    lossless: bool
    divergences: list[PromptDivergence]
    verdict: str
    beside: dict[str, float]
    time: TimeShares | None
    gain: MeasuredGain | None
    kernel: str
    conditions: Conditions
    example: DraftedText | None


@dataclass(frozen=True)
class Decoding:
    """Speed of decoding with target and draft together.

    Attributes:
        before: before training; None where nothing could draft yet, an empty object in ``results.json``.
        after: after training.
        gamma: tokens drafted per target step.
    """

    before: DecodingSpeed | None
    after: DecodingSpeed
    gamma: int

    def as_json(self) -> dict[str, Json]:
        """Return the attributes; ``before`` is an empty object where nothing could draft yet."""
        return to_json(vars(self)) | ({"before": {}} if self.before is None else {})


@dataclass(frozen=True)
class HeldOutRates:
    """The draft's acceptance on each held-out example, to compare runs in pairs.

    The examples are the target's continuations of ``data.prompts``, or requests where there are no prompts: runs with
    and without ``data.replay`` compare, too.

    Attributes:
        text: digest of the examples, in order. tokens: of each continuation. acceptance: of each, after training.
    """

    text: str
    tokens: list[int]
    acceptance: list[float]


@dataclass
class DraftResults:
    """What a draft run ends with; ``results.json`` contains these fields in this order.

    Those that default to None are measured on the finished draft, after a first ``results.json`` was written. Fields
    that are not described here mean what they do in ``FinetuneResults``.

    Attributes:
        draft: the kind of draft, ``draft.kind``.
        objective: ``objective.name``.
        train_examples: training examples.
        learnt_tokens: tokens of the target's text in them.
        kept_share: share of those tokens that the loss counted (``objective.selective``).
        repetition: of the held-out answers: share of the 8-grams ``seen`` in the training text, share of the
            4-grams ``repeated`` within an answer.
        merged_metrics: acceptance of the merged draft, read from disk.
        vocabulary: ``tokens`` of a reduced vocabulary, and the ``ceiling`` that it puts on acceptance.
        confidence: how right a draft's own estimates of acceptance are on held-out text, as ``Reliability``.
        acceptance_head: squared error of the acceptance head on held-out text, and that of a constant.
        decoding: speed ``before`` and ``after`` training, as ``DecodingSpeed``, and ``gamma``, tokens drafted per
            target step.
        chosen: how the parts of a draft were found on the target's text. By gates: the ``layers`` kept, the
            ``probabilities`` that each layer's gate is open, how many are ``expected`` open, the ``price`` of
            one, ``steps``. Pruned: units ``kept`` ``of`` how many per layer, and of each of the ``rounds`` its
            ``steps``, the largest of the ``distances`` of each mask from those before it, and whether they were
            ``stable``. Absent elsewhere.
        served: text by ``data.endpoint``: the ``model`` id there, stored ``answers``, form of the request ->
            answers (``forms``), reason -> answers that were left out (``dropped``), answers with the text of an
            earlier sample of their prompt (``repeated``); absent elsewhere.
        held_out: ``acceptance`` of each example of the first held-out split, its ``tokens``, and a digest of
            the ``text``: ``peftlab report A B`` compares runs on the same text in pairs by them.
    """

    task: str
    draft: str
    method: str | None
    model: str
    objective: str
    metric: str
    score: float | None
    metrics: Scores
    last_metrics: Scores
    best_step: int
    steps: int
    baseline_score: float | None
    baseline_metrics: Scores
    trainable_parameters: int
    total_parameters: int
    train_seconds: float
    examples_per_second: float
    tokens_per_second: float
    train_examples: int
    learnt_tokens: int
    kept_share: float
    peak_rss_mb: float
    peak_gpu_mb: float | None
    lr: float
    cpu: Cpu
    seed: int
    repetition: Repetition
    merge: MergeCheck | None = None
    latency: Latency | None = None
    merged_metrics: Scores | None = None
    vocabulary: dict[str, float] | None = None
    acceptance_head: dict[str, float] | None = None
    confidence: Reliability | None = None
    decoding: Decoding | None = None
    chosen: Mapping[str, Json] | None = None
    cost: Cost | None = None
    selection: SelectionResult | None = None
    served: ServedText | None = None
    held_out: HeldOutRates | None = None

    def as_json(self) -> dict[str, Json]:
        """Return the fields as ``results.json`` has them, without what was not measured."""
        optional = {name.name for name in fields(self) if name.default is None}
        return {key: value for key, value in to_json(vars(self)).items() if value is not None or key not in optional}


def run_draft(
    recipe: DraftRecipe, *, overwrite: bool = False, resume: bool = False, device: str = "auto"
) -> DraftResults:
    """Run ``recipe`` and return its results.

    Args:
        recipe: of kind draft. overwrite: replace an earlier run. resume: continue one that was stopped.
        device: as ``environment.resolve_device`` takes it.

    Raises:
        PeftlabError: a mistake of the user's; the run directory changes only once target, draft and data fit.
    """
    with run_directory(recipe, overwrite=overwrite, resume=resume) as directory:
        return _run(with_served_model(recipe), directory, resume, device)


def _run(recipe: DraftRecipe, directory: Claim, resume: bool, device: str) -> DraftResults:
    """Run the recipe from its checks to the report, one stage after the other."""
    run_dir, settings = directory.path, recipe.train

    # Refuse what cannot work before any weights are read.
    check_trackers(list(settings.trackers))
    with Phase("reading the prompts"):
        text = read_text(recipe)
    accelerator = _accelerator(recipe, run_dir, device)
    draft = make_draft(recipe, text, run_dir, accelerator.device)
    if recipe.merge is True and recipe.method is not None and not draft.has_fold:
        raise PeftlabError(f"merge: method {recipe.method.name} has no linear fold; set merge: false")
    draft.check(text.config)

    # Load target and draft; the target writes the text.
    set_seed(settings.seed)
    with Phase("loading target and draft"):
        draft.load(load_target(recipe, text, accelerator.device))
    if recipe.method is not None:
        check_method(draft.injected, recipe.method)
    digest = model_digest(draft.target)
    targets = [draft.target, *draft.others]
    sets = make_sets(recipe, text, targets, draft.eos, draft.cache, accelerator.main_process_first())
    if sets.served is not None:
        accelerator.print(sets.served.line())
    draft.prepare(sets.train)

    # Measure the draft before training.
    before_speed: DecodingSpeed | None = None
    if accelerator.is_main_process and settings.eval_before:
        untrained = draft.drafter(None)
        if untrained is not None:
            with Phase(f"decoding {min(_BEFORE, len(sets.prompts))} held-out prompts with the draft before training"):
                before_speed = decoding_speed(recipe, untrained, sets.prompts[:_BEFORE], draft.eos)
    accelerator.wait_for_everyone()
    if recipe.method is not None:
        inject(draft.injected, injected_method(recipe.method, recipe.train))
    if draft.folds and draft.base_model is None:  # what would stop the merge stops the run before it has trained
        with prefix_errors("merge"):
            check_merge(draft.injected, draft.base, run_dir / "merged", _merge_options(recipe, draft))
    trainable, total = count_parameters(draft.model)
    for line in filter(None, (trainable_line(trainable, total), adapted_line(draft.injected))):
        accelerator.print(line)
    accelerator.print(f"learning rate: {recipe.train.peak_lr:g}")
    problem = training_problem(recipe, draft, sets)
    before: Scores = {}
    if settings.eval_before:
        with Phase("scoring the draft before training", note="one evaluation; skip: train.eval_before=false"):
            before = problem.score(draft.model)
        accelerator.print(f"before: {_scores_line(before)}")

    # Train.
    if settings.gradient_checkpointing:
        recompute_activations(draft.adapted, selective=settings.gradient_checkpointing == "selective")
    if accelerator.is_main_process:
        _start_run_directory(recipe, directory, draft, sets, accelerator, digest, resume=resume)
    accelerator.wait_for_everyone()
    if settings.trackers:
        accelerator.init_trackers("peftlab")
    if accelerator.num_processes > 1:  # each draws masks of its own; a resumed run has its own state again
        set_seed(settings.seed, device_specific=True)
    try:
        progress = train(problem, settings, accelerator, run_dir, resume=resume, saved=directory.completed)
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
    results = _results(recipe, draft, progress, sets, before, (trainable, total), accelerator)

    # Store the draft, read it back, and measure it.
    if accelerator.is_main_process:
        with Phase("merging and writing the draft" if draft.folds else "writing the draft"):
            tokens = save_draft(recipe, draft, sets)
        with stored_results(run_dir, results.as_json()):
            saved = _read_back(draft, tokens, recipe.trust_remote_code)
            with Phase("scoring the draft on each held-out answer"):
                results.held_out = _held_out(draft, sets)
            _measure(recipe, draft, problem, sets, saved, results)
            served = draft.drafter(saved)
            assert served is not None  # it has been saved
            head = partial(acceptance_head, str(run_dir), accelerator.device) if recipe.acceptance_head else None
            with Phase(f"decoding {min(_AFTER, len(sets.prompts))} held-out prompts, plain and with the draft"):
                after_speed = decoding_speed(recipe, served, sets.prompts[:_AFTER], draft.eos, head, draft.tokenizer)
            results.decoding = Decoding(before_speed, after_speed, recipe.gamma)
        if results.confidence is not None:
            print(results.confidence.line())
        write_and_print_results(run_dir, results.as_json())
    accelerator.wait_for_everyone()
    return results


def _accelerator(recipe: DraftRecipe, run_dir: Path, device: str) -> Accelerator:
    """Return accelerate's object for training, or refuse a way of training that drafts do not have."""
    accelerator = make_accelerator(recipe.train, run_dir, device)
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise PeftlabError(
            "kind: draft trains on one device or under DDP; accelerate's configuration asks for "
            f"{accelerator.distributed_type.value}"
        )
    return accelerator


@dataclass
class SourceText:
    """Prompts and requests of a recipe, before the target has written anything.

    Attributes:
        config, tokenizer: the target's. prompts: token ids, the held-out ones last. requests: served ones, newest last.
        longest: tokens of the longest example, with all that the target may write.
        images: those of the prompts and requests; None: there are none.
    """

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    prompts: list[list[int]]
    requests: list[Request]
    longest: int
    images: ImagePrompts | None = None


@dataclass
class ExampleSets:
    """Tokenised examples: the training set, and held-out ones by split, the deciding split first.

    Attributes:
        prompts: held-out prompts to decode, token ids. fingerprint: digest of the training text.
        served: how the endpoint answered; None where the target wrote here.
    """

    train: Dataset
    held_out: dict[str, Dataset]
    prompts: list[list[int]]
    fingerprint: str
    served: ServedText | None


def with_served_model(recipe: DraftRecipe) -> DraftRecipe:
    """Return ``recipe`` with the endpoint's model id, under which its text is stored and found without the server.

    Raises:
        PeftlabError: the endpoint cannot be reached, or lists several models.
    """
    if recipe.data.endpoint is None:
        return recipe
    data = recipe.data.model_copy(update={"endpoint_model": served_model(recipe.data)})
    return recipe.model_copy(update={"data": data})


def read_text(recipe: DraftRecipe) -> SourceText:
    """Read prompts and requests and check them against the target's context and tokenizer, without its weights."""
    data, options = recipe.data, model_options(recipe)
    config = load_config(recipe.target, **options)
    if config.is_encoder_decoder:
        raise PeftlabError(
            f"target: {recipe.target} is an encoder-decoder model, which no recipe trains a draft for; generate and "
            "draft bench decode it with copies of its prompt, or with a smaller model of its kind as --draft"
        )
    tokenizer = load_tokenizer(recipe.target, **options)
    limit = max_positions(config.get_text_config(decoder=True))
    images = ImagePrompts(recipe.target, options) if sees_images(config) else None
    prompts: list[list[int]] = []
    if data.prompts is not None:
        prompts = read_prompt_ids(
            data.prompts, tokenizer, field=data.field, chat=data.chat, most=data.max_prompts, images=images
        )
    requests: list[Request] = []
    if data.replay is not None:
        requests = read_requests(data.replay, tokenizer, chat=data.chat, images=images)
    vocabulary = max(len(tokenizer), config.get_text_config(decoder=True).vocab_size)
    read = ((data.prompts, prompts), (data.replay, [[*request.prompt, *request.response] for request in requests]))
    for source, rows in read:
        if len(rows) == 1:
            raise PeftlabError(f"{source}: a single request cannot be both trained on and held out; give 2 or more")
        for number, ids in enumerate(rows, start=1):
            if wrong := [token for token in ids if token < 0 or vocabulary <= token < LIMIT]:
                raise PeftlabError(
                    f"{source}: row {number} has token id {wrong[0]}; the target's vocabulary has {vocabulary:,} tokens"
                )
    if data.prompts is not None and len(prompts) <= data.held_out:
        raise PeftlabError(
            f"data.held_out: {data.held_out} leaves none of {len(prompts)} prompts to train on; give more prompts or "
            "hold out fewer"
        )
    lengths = [len(prompt) + data.max_new_tokens for prompt in prompts]
    lengths += [len(request.prompt) + len(request.response) for request in requests]
    check_room(lengths, limit, "the target's context; shorten the prompts or data.max_new_tokens")
    check_room(lengths, recipe.train.max_length, "train.max_length; raise it, or shorten data.max_new_tokens")
    texts = [*prompts, *(request.prompt for request in requests)]
    images = images if any(max(text) >= LIMIT for text in texts) else None
    if images is not None:
        _check_image_keys(recipe)
    return SourceText(config, tokenizer, prompts, requests, max(lengths), images)


def _check_image_keys(recipe: DraftRecipe) -> None:
    """Refuse the keys of a recipe that do not go with prompts that have images."""
    if not recipe.draft.reads_images:
        raise PeftlabError(
            f"draft.kind: {recipe.draft.kind} drafts for text alone, and data.prompts has images; eagle3 and dflash "
            "read them"
        )
    if recipe.data.endpoint is not None or recipe.data.targets:
        key = "targets" if recipe.data.targets else "endpoint"
        raise PeftlabError(
            f"data.{key}: not with images in data.prompts, which the target itself answers; leave it out"
        )


def make_draft(recipe: DraftRecipe, text: SourceText, directory: Path, device: torch.device) -> DraftKind[DraftConfig]:
    """Return the draft that a recipe describes, before it is loaded.

    Args:
        recipe: of kind draft. text: gives the tokenizer and the longest example. directory: of the run.
        device: where it trains.
    """
    kind: type[DraftKind[DraftConfig]] = resolve(DRAFTS.find(recipe.draft.kind).kind)
    return kind(recipe, text.tokenizer, directory, device, text.longest)


def load_target(recipe: DraftRecipe, text: SourceText, device: torch.device) -> PreTrainedModel:
    """Load the target as the recipe stores it, frozen, and check its logits against its LM head.

    Args:
        recipe: of kind draft. text: whose images it reads. device: where it runs.
    """
    stored = storage(recipe.base, recipe.train.precision)
    options = model_options(recipe)
    kind = language_model_class(load_config(recipe.target, **options))
    target = load_model(recipe.target, kind, **options, **stored)[0]
    torch.nn.Module.to(target, device).requires_grad_(False)
    check_head(target, "target")
    if text.images is not None:
        text.images.attach(target)
    return target


def model_options(recipe: DraftRecipe) -> Attributes:
    """Return the keyword arguments with which the target is loaded."""
    options: Attributes = {"trust_remote_code": recipe.trust_remote_code}
    return options | ({"revision": recipe.revision} if recipe.revision else {})


def make_sets(
    recipe: DraftRecipe,
    text: SourceText,
    targets: Sequence[PreTrainedModel],
    eos: frozenset[int],
    cache: Path,
    first: AbstractContextManager[object],
) -> ExampleSets:
    """Let each target write what it has not written yet, and split the text; served requests are split by age.

    Args:
        targets: the target, and those of ``data.targets``. eos: ids that end their output.
        cache: directory of data sets. first: within it the main process works and the others wait for it.
    """
    data = recipe.data
    served: ServedText | None = None
    train: list[Request] = []
    held: dict[str, list[Request]] = {}
    with first:
        if text.requests:
            # The newest fifth at most is held out: a draft is judged by the traffic that comes after its text.
            newest = min(data.held_out, max(1, len(text.requests) // 5))
            train += text.requests[:-newest]
            held["requests"] = text.requests[-newest:]
        if text.prompts:
            written, served = _continuations(recipe, text, targets[0], eos, cache)
            train += _without_dropped(written[: -data.held_out * data.samples], served)
            held["prompts"] = _without_dropped(written[-data.held_out * data.samples :], served)
        teachers, writers = [0] * len(train), {"requests": 0, "prompts": 0}
        for number, reference in enumerate(data.targets or [], start=1):
            written = _continuations(recipe, text, targets[number], eos, cache)[0]
            mine = _without_dropped(written[: -data.held_out * data.samples], None)
            train, teachers = train + mine, teachers + [number] * len(mine)
            held[f"prompts, {reference}"] = _without_dropped(written[-data.held_out * data.samples :], None)
            writers[f"prompts, {reference}"] = number
        some = seeded_subset(len(train), data.max_train_examples, data.seed)
        if some is not None:
            train, teachers = [train[i] for i in some], [teachers[i] for i in some]
        stored = stored_topk(targets[0], train, data.top_k, cache) if data.top_k is not None else None
    digest = sha256(json.dumps([[r.prompt, r.response] for r in train]).encode()).hexdigest()
    prompts = [*text.prompts[-data.held_out :]] if text.prompts else [r.prompt for r in held["requests"]]
    several = bool(data.targets)
    splits = {
        name: make_dataset(requests, teachers=[writers[name]] * len(requests) if several else None)
        for name, requests in held.items()
    }
    examples = make_dataset(train, stored, teachers=teachers if several else None)
    return ExampleSets(examples, splits, prompts, digest, served)


def _continuations(
    recipe: DraftRecipe, text: SourceText, model: PreTrainedModel, eos: frozenset[int], cache: Path
) -> tuple[Sequence[Request | None], ServedText | None]:
    """Return the continuations of the target, here or by the endpoint, with None for a dropped answer."""
    data = recipe.data
    writing = WritingSettings(
        data.max_new_tokens, data.temperature, data.top_p, data.samples, data.seed, data.batch_size
    )
    if data.endpoint is None or data.prompts is None:
        return write_continuations(model, text.prompts, writing, cache, eos)[1], None
    target = Target(model, text.tokenizer, eos)
    said = read_conversations(data.prompts, text.tokenizer, field=data.field, chat=data.chat, most=data.max_prompts)
    prompts = [ServedPrompt(ids, messages) for ids, messages in zip(text.prompts, said, strict=True)]
    return served_continuations(data, target, prompts, writing, cache)


def _without_dropped(written: Sequence[Request | None], served: ServedText | None) -> list[Request]:
    """Return the continuations that were not dropped."""
    kept = [request for request in written if request is not None]
    if not kept and served is not None:
        raise PeftlabError(f"data.endpoint: none of {len(written)} answers can be used; {served.line()}")
    return kept


def training_problem(recipe: DraftRecipe, draft: DraftKind[DraftConfig], sets: ExampleSets) -> TrainingProblem:
    """Return the problem that trains the draft; acceptance on the first held-out split selects its checkpoint.

    Args:
        recipe: of kind draft. draft: loaded, with its method injected. sets: its examples.
    """
    objective = make_objective(recipe.objective)
    kept = [objective.kept(tokens) for tokens in sets.train["kept"]]
    loss = in_mixed_precision(draft.loss(), recipe.train) if draft.own_modules else draft.loss()

    def score(model: torch.nn.Module) -> Scores:
        bare, size = getattr(model, "module", model), recipe.train.eval_batch_size
        return {name: draft.score(bare, data, size) for name, data in sets.held_out.items()}

    def acceptance(model: torch.nn.Module, indices: list[int]) -> list[float]:
        bare = getattr(model, "module", model)
        return [draft.score(bare, sets.train.select([i]), 1)["acceptance"] for i in indices]

    return TrainingProblem(
        model=draft.model,
        train=sets.train,
        collate=Collate(),
        loss=loss,
        at_step=loss.at_step if isinstance(loss, ScheduledLoss) else None,
        denominator=lambda batch: sum(kept[i] for i in batch),
        score=score,
        deciding="acceptance",
        lr_ratio=lr_ratio(recipe.method) if recipe.method is not None else {},
        optimizer=recipe.draft.usual_optimizer if recipe.method is None else "adamw",
        confidence=acceptance,
    )


def _start_run_directory(
    recipe: DraftRecipe,
    directory: Claim,
    draft: DraftKind[DraftConfig],
    sets: ExampleSets,
    accelerator: Accelerator,
    digest: str,
    *,
    resume: bool,
) -> None:
    """Create the run directory, last before training, so that a failure before it leaves none behind.

    A draft cut from the target becomes a plain model in it, the adapter's base. ``digest``: of the target's weights.
    """
    directory.begin()
    run_dir = directory.path
    begin_or_compare(run_dir, recipe, sets.fingerprint, resume=resume)
    write_text(run_dir / "recipe.yaml", dump_recipe(recipe))
    origin = provenance(recipe.train.seed, sets.fingerprint, accelerator.num_processes, accelerator.device)
    # A run that is the target may be repeated: the digest says which weights this draft was trained for.
    origin["target"] = {"reference": recipe.target, "weights": digest}
    write_json(run_dir / "provenance.json", origin)
    if draft.base_model is not None and not (run_dir / "base" / "config.json").exists():
        with staged_directory(run_dir / "base", "model", overwrite=True) as staging:
            draft.base_model().save_pretrained(staging)
            draft.tokenizer.save_pretrained(staging)
    directory.completed()


def _base_revision(recipe: DraftRecipe, draft: DraftKind[DraftConfig]) -> str | None:
    """Return the git revision of the draft's base if that is the target; the recipe names none for another base."""
    return recipe.revision if draft.base == recipe.target else None


def _merge_options(recipe: DraftRecipe, draft: DraftKind[DraftConfig]) -> MergeOptions:
    return MergeOptions(
        recipe=dump_recipe(recipe),
        into=merge_into(recipe.merge),
        revision=_base_revision(recipe, draft),
        trust_remote_code=recipe.trust_remote_code,
        overwrite=True,
    )


def save_draft(recipe: DraftRecipe, draft: DraftKind[DraftConfig], sets: ExampleSets) -> torch.Tensor | None:
    """Write adapter, merged model and the draft's own files; return the reduced vocabulary [V_d] or None.

    Args:
        recipe: of kind draft. draft: trained. sets: its examples.
    """
    run_dir = draft.directory
    if is_injected(draft.injected):
        with staged_directory(run_dir / "adapter", "adapter", overwrite=True) as staging:
            save_adapter(draft.injected, staging, base=draft.base, revision=_base_revision(recipe, draft))
    if draft.folds:
        merge_checkpoint(run_dir / "adapter", draft.base, run_dir / "merged", _merge_options(recipe, draft))
    tokens = draft.save(sets.train)
    draft.calibrate(next(iter(sets.held_out.values())), recipe.train.eval_batch_size)
    return tokens


def _read_back(draft: DraftKind[DraftConfig], tokens: torch.Tensor | None, trusted: bool) -> SavedDraft:
    """Return the saved draft, with the merged model as read from disk."""
    merged: PreTrainedModel | None = None
    if draft.folds:
        options: Attributes = {"dtype": draft.adapted.dtype, "trust_remote_code": trusted}
        merged = load_model(str(draft.directory / "merged"), "AutoModelForCausalLM", **options)[0]
        torch.nn.Module.to(merged, draft.device)
    return SavedDraft(draft.directory, merged, tokens)


def _results(
    recipe: DraftRecipe,
    draft: DraftKind[DraftConfig],
    progress: Progress,
    sets: ExampleSets,
    before: Scores,
    parameters: tuple[int, int],
    accelerator: Accelerator,
) -> DraftResults:
    """Return the results of training; those of the finished draft are added by ``_measure``."""
    split = next(iter(sets.held_out))
    objective = make_objective(recipe.objective)
    counts = sets.train["kept"]
    return DraftResults(
        task=f"draft of {recipe.target}",
        draft=recipe.draft.kind,
        method=recipe.method.name if recipe.method is not None else None,
        model=draft.base if draft.base_model is None else recipe.target,
        objective=recipe.objective.name,
        metric="acceptance",
        baseline_score=before.get(split, {}).get("acceptance"),
        baseline_metrics=before,
        trainable_parameters=parameters[0],
        total_parameters=parameters[1],
        train_examples=len(sets.train),
        learnt_tokens=sum(counts),
        kept_share=sum(objective.kept(n) for n in counts) / sum(counts),
        repetition=repetition(sets.train, sets.held_out[split]),
        chosen=draft.chosen,
        served=sets.served,
        **progress.figures(recipe.train, draft.model, accelerator.device),
    )


def _held_out(draft: DraftKind[DraftConfig], sets: ExampleSets) -> HeldOutRates:
    """Return the trained draft's acceptance on each held-out continuation of a prompt, else of a request."""
    data = sets.held_out.get("prompts") or next(iter(sets.held_out.values()))
    rates = [draft.score(draft.model, data.select([i]), 1)["acceptance"] for i in range(len(data))]
    digest = sha256(json.dumps([[row["prompt"], row["input_ids"]] for row in data]).encode()).hexdigest()
    return HeldOutRates(digest, list(data["kept"]), [round(rate, 6) for rate in rates])


def _measure(
    recipe: DraftRecipe,
    draft: DraftKind[DraftConfig],
    spec: TrainingProblem,
    sets: ExampleSets,
    saved: SavedDraft,
    results: DraftResults,
) -> None:
    """Add to ``results`` what is measured on the finished draft, on its merged model where there is one."""
    run_dir, held_out = saved.directory, next(iter(sets.held_out.values()))
    if saved.merged is not None:
        what = (run_dir / "adapter", draft.base, run_dir / "merged", _samples(sets))
        # On the CPU: beside what was trained, a device may lack the memory for another model.
        if verifies_merge(recipe.merge):
            with Phase(COMPARING, note="loads both; skip: merge.verify=false"):
                results.merge = verify_merge(*what, trust_remote_code=recipe.trust_remote_code)
        if measures_latency(recipe.merge):
            with Phase(TIMING, note="loads two; skip: merge.latency=false"):
                trusted, where = recipe.trust_remote_code, saved.merged.device
                results.latency = merge_latency(*what, trust_remote_code=trusted, device=where)
        if draft.separate:
            with Phase("scoring the merged draft"):
                results.merged_metrics = spec.score(saved.merged)
    if saved.tokens is not None:
        results.vocabulary = {
            "tokens": len(saved.tokens),
            "ceiling": ceiling(draft.target, held_out, saved.tokens),
        }
    results.confidence = draft.reliability(held_out, recipe.train.eval_batch_size)
    if recipe.acceptance_head:
        model, greedy = saved.merged or draft.adapted, recipe.data.temperature == 0
        with Phase("training the acceptance head"):
            head, results.acceptance_head = train_acceptance_head(
                draft.target, model, sets.train, held_out, greedy=greedy
            )
        save_acceptance_head(head, run_dir / HEAD_FILE)


def _samples(sets: ExampleSets) -> list[dict[str, torch.Tensor]]:
    """Return up to 16 held-out examples as model inputs."""
    data = next(iter(sets.held_out.values()))
    batch = Collate()([data[i] for i in range(min(16, len(data)))])
    return [{key: batch[key] for key in ("input_ids", "attention_mask")}]


def decoding_speed(
    recipe: DraftRecipe,
    served: ServedDraft,
    prompts: Sequence[list[int]],
    eos: frozenset[int],
    head: Callable[[], Callable[[Tensor], float]] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> DecodingSpeed:
    """Decode greedily, one prompt at a time, on the engine that ``draft bench`` takes.

    Copying what followed a repeated suffix takes part, alone and in one tree with the draft: it trains nothing, so a
    draft that it beats does not pay.

    Args:
        served: what decodes.
        prompts: token ids. eos: ids that end an output.
        head: as for ``draft_lengths``; None: not trained yet, and drafts without a head of their own have ``gamma``
            tokens.
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
    if length.row.needs == HEAD and head is None and drafter().acceptance is None:  # before training
        length = policy("fixed")
    lengths = draft_lengths(length, recipe.gamma, engine, drafters, head=head)
    settings = Settings(recipe.data.max_new_tokens, eos, policies=lengths.policies, repeats=1)
    run = compare(engine, drafters, questions, settings)
    found = run.result("draft")
    differing = [at for name in drafters for at in run.result(name).divergences]
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
        lossless=not differing,
        divergences=differing,
        verdict=found.verdict,
        beside={name: round(run.result(name).speedup, 3) for name in (SUFFIX, SUFFIX_AND_DRAFT)},
        time=found.time,
        gain=run.gain("draft", drafter()),
        kernel=run.target.kind,
        conditions=run.conditions,
        example=example,
    )


def _drafter(served: ServedDraft, seen: Window | None) -> Drafter:
    """Return a new drafter that sees the recipe's window of a text."""
    return with_window(served.drafter(), seen)


def _scores_line(scores: Scores) -> str:
    """Return the scores of all splits as one line."""
    return "; ".join(
        f"{split} " + ", ".join(f"{name} {value:.4f}" for name, value in rates.items())
        for split, rates in scores.items()
    )
