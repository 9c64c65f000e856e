"""A finetune recipe from start to end: data and model, injection, training, adapter, merge, report."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from peftlab.checkpoints.adapter import fill, load_model, read_adapter, save_adapter
from peftlab.checkpoints.merge import check_merge, merge_checkpoint
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.checkpoints.tensors import write_tensors
from peftlab.decoding.generation import answer_inputs, answering
from peftlab.drafting.target import eos_ids
from peftlab.environment import Cpu
from peftlab.errors import PeftlabError, prefix_errors
from peftlab.files import (
    MERGE_INPUTS,
    Claim,
    Json,
    read_object,
    replacing,
    scratch_directory,
    staged_directory,
    to_json,
    write_json,
    write_text,
)
from peftlab.methods.base import Adapted
from peftlab.methods.config import METHODS, MethodConfig, lr_ratio
from peftlab.methods.inject import (
    adapted_line,
    count_parameters,
    inject,
    injection_of,
    is_injected,
    trainable_parameters,
)
from peftlab.methods.lora.layers import OwnCopy
from peftlab.methods.merging import merge, unmerge
from peftlab.models.architectures import inside, task_head
from peftlab.models.config import BaseConfig, Into, measures_latency, merge_into, verifies_merge
from peftlab.models.costs import Cost
from peftlab.models.load import eval_mode, load_base, load_config, save_processor
from peftlab.pipelines.directory import (
    begin_or_compare,
    provenance,
    run_directory,
    stored_results,
    write_and_print_results,
)
from peftlab.pipelines.merge import COMPARING, EXAMPLES, TIMING, Latency, MergeCheck, merge_latency, verify_merge
from peftlab.progress import Phase, counted
from peftlab.recipe.load import dump_recipe
from peftlab.recipe.schema import FinetuneRecipe, injected_method
from peftlab.references import local_copy
from peftlab.registry import resolve
from peftlab.reporting.facts import (
    CardInfo,
    adapter_card,
    as_float,
    data_lines,
    found_lines,
    trainable_line,
    training_section,
)
from peftlab.tasks.batches import Row, SplitRows, eval_batches, model_inputs
from peftlab.tasks.data import listed
from peftlab.tasks.generated import Answer, Contexts, check_packages, score
from peftlab.tasks.images import prompt_inputs
from peftlab.tasks.labelled_rows import MISSING
from peftlab.tasks.language_examples import TOO_LONG, UNTRAINED, tokenizer_of
from peftlab.tasks.metrics import ClassScores, HardExample
from peftlab.tasks.problem import (
    ModelSource,
    RowSharing,
    Scores,
    TaskOptions,
    TaskProblem,
    TrainingProblem,
    refuse_no_training,
)
from peftlab.tasks.table import GenerateConfig, find_task
from peftlab.training.config import TrainConfig
from peftlab.training.distributed import AsTrained, check_trackers, make_accelerator
from peftlab.training.loop import memory_advice, train, widen_to_fp32
from peftlab.training.recomputation import recompute_activations
from peftlab.training.state import SelectionResult
from peftlab.untyped import Unwrapped


@dataclass
class FinetuneResults:
    """The results of a finetune run; ``results.json`` contains these fields in this order.

    Attributes:
        task: the task, or ``draft of TARGET``.
        method: how parameters trained.
        model: reference of the base model, or of the draft before training.
        metric: name of the deciding metric.
        score: its value at the best evaluation, on the first split.
        metrics: all metrics at the best evaluation, by split.
        last_metrics: all metrics at the last evaluation, by split.
        best_step: optimiser step of the best evaluation.
        steps: optimiser steps of the run.
        baseline_score: the deciding metric of the baseline: the majority class, the mean, or the model before
            training; null where that was not scored (``train.eval_before: false``).
        baseline_metrics: all metrics of the baseline.
        trainable_parameters: parameters that required a gradient.
        total_parameters: all parameters, the adapter's included.
        train_seconds: wall time of training, without evaluations.
        examples_per_second: training examples per second.
        tokens_per_second: training tokens per second, without padding.
        padding_share: share of the tokens in training batches that were padding.
        peak_rss_mb: largest main memory in MiB.
        peak_gpu_mb: largest GPU memory in MiB; null without a GPU.
        lr: the peak learning rate: ``train.lr``, or the method's own.
        cpu: the processor: ``name``, ``features`` (instruction sets), ``threads``.
        seed: ``train.seed``.
        classes: class name to its number of examples by split; empty for regression.
        dropped_rows: rows left out because a text or label was missing, or because they were too long.
        left_out: all rows left out, by reason.
        splits: split to the ``rows`` that are trained on or scored, those ``left_out`` for their length by reason,
            those ``truncated`` to ``train.max_length``, and the tokens of the ``longest`` before that (of images 0).
        seen_examples: examples of all training batches.
        seen_tokens: their tokens without padding.
        trained_tokens: language tasks: the tokens of an epoch that the loss counts: of the answers, or as
            ``data.train_on`` says; absent elsewhere.
        total_seconds: wall time of the run up to its results, generated answers included. Of the processes before the
            last, where a run was resumed, it has the seconds of training alone.
        merge: merged model against adapter: ``max_logit_difference``, ``argmax_agreement`` and ``examples``;
            only where a merge was verified.
        latency: forward pass relative to the base model's: of the ``merged`` model, and ``unmerged``, of base
            and adapter; only where the recipe asks for it (``merge: {latency: true}``).
        merge_losses: after training on a base in int8 or nf4: loss on the first evaluation split of the
            ``live`` model and of both merges, ``dequantised`` and ``original``; absent elsewhere.
        sample: what a language model answers to a held-out input, ``before`` training and ``after``; absent
            elsewhere.
        by_class: class name to ``precision``, ``recall``, ``f1`` and ``support`` on the first split;
            ``text/tokens``: by type of entity (by tag, where tags have none), ``text/choice``: by place of the
            choice; absent for regression.
        confusion: examples of that split by [class of the label][class predicted], in the order of
            ``by_class``; absent where an example has several answers (``text/multilabel``, entities).
        points: regression: [label, prediction] of at most 500 examples of that split.
        hardest: the ten examples of that split with the largest loss: ``row``, ``text``, ``text_pair``,
            ``label``, ``predicted``, ``probability`` (of the label), ``loss``.
        generate: metric of generated answers to its value (``generate.metrics``, means with a 95 % interval as
            ``NAME_low``, ``NAME_high``; ``ended``: share that ended before ``max_new_tokens``; ``contexts``:
            how many); absent elsewhere.
        generate_before: the same of the model before training.
        cost: of all training steps, scoring of examples included: ``forward_flops``, ``backward_flops``
            (products and attention; a multiplication and an addition are 2; from 64 tokens on, a batch whose length
            is at most 16 from both a shorter and a longer one that are known costs what lies between them); of the
            largest step ``kept_bytes`` (for backward, parameters apart) and ``optimizer_bytes`` (gradients and
            AdamW's averages);
            ``kv_bytes_per_token`` of a model that generates; absent with many processes or ``train.compile``.
        selection: what ``train.sample`` chose by a score: ``rounds``, ``examples``, ``scored_examples``
            (forward passes that this took) and their ``scoring_flops``; absent where no score chooses.
    """

    task: str
    method: str
    model: str
    metric: str
    score: float | None
    metrics: Scores
    last_metrics: Scores
    best_step: int
    steps: int
    baseline_score: float | None
    baseline_metrics: dict[str, float]
    trainable_parameters: int
    total_parameters: int
    train_seconds: float
    examples_per_second: float
    tokens_per_second: float
    padding_share: float
    peak_rss_mb: float
    peak_gpu_mb: float | None
    lr: float
    cpu: Cpu
    seed: int
    classes: dict[str, dict[str, int]]
    dropped_rows: int
    left_out: dict[str, int]
    splits: dict[str, SplitRows]
    seen_examples: int
    seen_tokens: int
    trained_tokens: int | None = None
    total_seconds: float = 0.0
    merge: MergeCheck | None = None
    latency: Latency | None = None
    merge_losses: dict[str, float] | None = None
    sample: dict[str, str] | None = None
    by_class: dict[str, ClassScores] | None = None
    confusion: list[list[int]] | None = None
    points: list[list[float]] | None = None
    hardest: list[HardExample] | None = None
    generate: dict[str, float] | None = None
    generate_before: dict[str, float] | None = None
    cost: Cost | None = None
    selection: SelectionResult | None = None

    def as_json(self) -> dict[str, Json]:
        """Return the fields as ``results.json`` has them: without the optional ones that are None or empty."""
        optional = {"merge", "latency", "merge_losses", "sample", "by_class", "confusion", "points", "hardest"}
        optional |= {"generate", "generate_before", "cost", "selection", "trained_tokens"}
        values = to_json(vars(self))
        return {key: value for key, value in values.items() if key not in optional or value not in (None, [], {})}


def run_finetune(
    recipe: FinetuneRecipe, *, overwrite: bool = False, resume: bool = False, device: str = "auto"
) -> FinetuneResults:
    """Run ``recipe`` on a device (``environment.resolve_device``) and return its results.

    Args:
        recipe: what to run.
        overwrite: replace a finished run in the directory.
        resume: continue from the newest checkpoint.
        device: as ``environment.resolve_device`` takes it.

    Raises:
        PeftlabError: any mistake in recipe, data or model; the run directory changes only after both were loaded.
    """
    with run_directory(recipe, overwrite=overwrite, resume=resume) as directory:
        return _run(recipe, directory, resume, device)


def _run(recipe: FinetuneRecipe, directory: Claim, resume: bool, device: str) -> FinetuneResults:
    """Run the recipe from its checks to the report, one stage after the other."""
    began, run_dir, settings = time.perf_counter(), directory.path, recipe.train
    folds = METHODS[recipe.method.name].folds

    # Refuse what cannot work before data and model are read.
    check_trackers(list(settings.trackers))
    if recipe.merge is True and not folds:
        raise PeftlabError(f"merge: method {recipe.method.name} has no linear fold; set merge: false")
    accelerator = make_accelerator(settings, run_dir, device)
    if recipe.base.quantised and accelerator.is_fsdp2:
        raise PeftlabError(
            f"base.dtype: {recipe.base.dtype} weights cannot be sharded by FSDP; use plain processes (DDP)"
        )

    # Load data and model, and inject the method.
    set_seed(settings.seed)
    with Phase("reading data and model"):
        task = load_task(recipe)
    _score_examples(task, recipe, accelerator)
    if task.task.found:  # the run's own recipe names the columns
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=dict(task.task.found))})
    about = data_lines(task.classes, task.left_out, task.repeated, task.splits, settings.max_length)
    if not task.classes:  # whose counts would say it
        about.insert(0, "rows: " + ", ".join(f"{split} {each.rows:,}" for split, each in task.splits.items()))
    for line in [*found_lines(task.task.found), *about]:
        accelerator.print(line)
    if task.fresh:
        accelerator.print(f"newly initialised: {listed(task.fresh)}")
    if settings.emulate is not None:
        accelerator.print("train.emulate: slower than training without; scores in training are those of such hardware")
    model = inject(task.model, _method_for(recipe, task))
    merging: MergeOptions | None = None
    if folds and recipe.merge is not False:
        merging = MergeOptions(
            into=merge_into(recipe.merge),
            trust_remote_code=recipe.trust_remote_code,
            revision=recipe.revision,
            overwrite=True,
        )
        with prefix_errors("merge"):  # what would stop the merge stops the run before it has trained
            check_merge(model, recipe.model, run_dir / "merged", merging)
    if recipe.init_from:  # of a resumed run too, whose scores may compare with the state it started from
        start_from(model, recipe.init_from)
    before = task.sample(task.model) if task.sample is not None and accelerator.is_main_process else None
    if settings.gradient_checkpointing:
        if not task.model.supports_gradient_checkpointing:
            raise PeftlabError(f"train.gradient_checkpointing: {type(task.model).__name__} has none; set it to false")
        recompute_activations(model, selective=settings.gradient_checkpointing == "selective")
    trainable, total = count_parameters(model)
    for line in filter(None, (trainable_line(trainable, total), adapted_line(model))):
        accelerator.print(line)
    accelerator.print(f"learning rate: {settings.peak_lr:g}")
    share_rows(task, settings, accelerator)
    if task.sharing is not None:  # a run that is continued on another device has the same batches
        settings = settings.model_copy(update={"packing": packs(settings, accelerator)})
        recipe = recipe.model_copy(update={"train": settings})
    if accelerator.mixed_precision in ("bf16", "fp16") and settings.weights is None:
        widen_to_fp32(model)

    # Measure the model before training.
    scored_before = task.baseline is None and settings.eval_before
    if task.refer is not None or scored_before:
        as_trained = AsTrained(model, accelerator, settings.precision)
    if task.refer is not None:
        with Phase("scoring the examples by the model before training, the reference"):
            task.compare_with(as_trained)
    baseline = task.baseline or {}
    if scored_before:
        with Phase("scoring the model before training", note="one evaluation; skip: train.eval_before=false"):
            baseline = next(iter(task.evaluate(as_trained).values()))
    answers = answer_scorer(task, recipe.generate, accelerator)
    answers_before = answers(model) if answers is not None and recipe.generate and recipe.generate.before else None

    # Begin the run directory, last before training, so that a failure before it leaves none behind.
    if accelerator.is_main_process:
        directory.begin()
        begin_or_compare(run_dir, recipe, task.fingerprint, resume=resume)
        write_text(run_dir / "recipe.yaml", dump_recipe(recipe))
        origin = provenance(settings.seed, task.fingerprint, accelerator.num_processes, accelerator.device)
        write_json(run_dir / "provenance.json", origin)
        if folds:  # for `peftlab merge RUN`, which then needs neither the data nor the recipe's task
            with replacing(run_dir / MERGE_INPUTS) as file:
                write_tensors(file, sample_inputs(task, EXAMPLES)[0], {})
        directory.completed()
    accelerator.wait_for_everyone()

    # Train.
    if settings.trackers:
        accelerator.init_trackers("peftlab")
    if accelerator.num_processes > 1:  # each draws masks of its own; a resumed run has its own state again
        set_seed(settings.seed, device_specific=True)
    try:
        progress = train(task, settings, accelerator, run_dir, resume=resume, saved=directory.completed)
    finally:
        for tracker in accelerator.trackers:  # end_training() would destroy the process group as well
            tracker.finish()
    results = FinetuneResults(
        task=task.task.name,
        method=recipe.method.name,
        model=recipe.model,
        metric=task.deciding,
        baseline_score=baseline.get(task.deciding),
        baseline_metrics=dict(baseline),
        trainable_parameters=trainable,
        total_parameters=total,
        padding_share=round(1 - progress.tokens / max(1, progress.padded_tokens), 4),
        classes=task.classes,
        dropped_rows=sum(task.left_out.get(why, 0) for why in (MISSING, TOO_LONG, UNTRAINED)),
        left_out=task.left_out,
        splits=task.splits,
        seen_examples=progress.examples,
        seen_tokens=progress.tokens,
        **progress.figures(settings, task.model, accelerator.device),
    )

    # Analyse the trained model's predictions and answers.
    if task.analyse is not None and not accelerator.is_fsdp2:
        with Phase("analysing the predictions"), eval_mode(task.model):
            results = replace(results, **vars(task.analyse(task.model)))
    if answers is not None:
        results.generate, results.generate_before = answers(task.model), answers_before
    if "trained_tokens" in task.train.column_names:
        results.trained_tokens = sum(task.train["trained_tokens"])
    results.total_seconds = round(progress.earlier_seconds + time.perf_counter() - began, 1)
    if resume and progress.seconds == progress.earlier_seconds and (run_dir / "results.json").exists():
        finished = as_float(read_object(run_dir / "results.json").get("total_seconds"))
        results.total_seconds = results.total_seconds if finished is None else finished

    # Save the adapter, merge it, and write the report.
    if accelerator.is_main_process:
        if task.sample is not None and before is not None and not accelerator.is_fsdp2:
            with _autocast_where_mixed(task.model, accelerator):
                results.sample = {"before": before, "after": task.sample(task.model)}
        _write_run(recipe, task, run_dir, results, merging)
    accelerator.wait_for_everyone()
    return results


def _write_run(
    recipe: FinetuneRecipe, task: TaskProblem, run_dir: Path, results: FinetuneResults, merging: MergeOptions | None
) -> None:
    """Write adapter, merged model if there is to be one, results and report; compare merged and unmerged.

    The comparison is added to ``results``.
    """
    model, trusted = task.model, recipe.trust_remote_code
    card = CardInfo(
        name=run_dir.name,
        base_model=recipe.model,
        results=results.as_json(),
        recipe=dump_recipe(recipe),
        revision=recipe.revision,
        labels=task.task.labels if task.task.labelled and not task.task.choices else None,
        split=next(iter(task.held_out)),
        auto_class=task.auto_class,
        pipeline=task.pipeline,
    )
    with staged_directory(run_dir / "adapter", "adapter", overwrite=True) as staging:
        save_adapter(model, staging, base=recipe.model, revision=recipe.revision)
        save_processor(task.processor, staging)
        write_text(staging / "README.md", adapter_card(card))
    if merging is not None:
        options = replace(merging, recipe=dump_recipe(recipe), training=training_section(card))
        with Phase("merging"):
            merge_checkpoint(run_dir / "adapter", recipe.model, run_dir / "merged", options)
        with stored_results(run_dir, results.as_json()):
            what = (run_dir / "adapter", recipe.model, run_dir / "merged", sample_inputs(task, EXAMPLES))
            # On the CPU: beside the trained model, a device may lack the memory for another.
            if verifies_merge(recipe.merge):
                with Phase(COMPARING, note="loads both; skip: merge.verify=false"):
                    results.merge = verify_merge(*what, trust_remote_code=trusted)
            if measures_latency(recipe.merge):
                device = next(model.parameters()).device
                with Phase(TIMING, note="loads two; skip: merge.latency=false"):
                    results.latency = merge_latency(*what, trust_remote_code=trusted, device=device)
            if recipe.base.quantised:
                with Phase("merging into the other weights, and scoring both merged models"):
                    results.merge_losses = _merge_losses(task, model, run_dir, recipe.model, merging)
    write_and_print_results(run_dir, results.as_json())


def load_task(recipe: FinetuneRecipe, classes: Sequence[str] | None = None, *, train: bool = True) -> TaskProblem:
    """Load the data and the model that ``recipe`` names; nothing is injected yet.

    Args:
        recipe: what to load.
        classes: a trained model's class names in label order; None: those of task and data.
        train: whether there is to be something to train on.

    Raises:
        PeftlabError: anything wrong with data or model, or nothing to train on.
    """
    task, settings = find_task(recipe.task), recipe.train
    options = TaskOptions(
        max_length=settings.max_length,
        batch_size=settings.eval_batch_size,
        train=train,
        classes=classes,
        objective=recipe.objective,
        label_smoothing=settings.label_smoothing,
        class_weights=settings.class_weights,
    )
    problem: TaskProblem = resolve(task.prepare)(task, recipe.data, model_source(recipe), options)
    if train:
        refuse_no_training(recipe.task, len(problem.train), recipe.data.validation)
    problem.lr_ratio = lr_ratio(recipe.method)
    return problem


def model_source(recipe: FinetuneRecipe) -> ModelSource:
    """Return where the recipe's model comes from."""
    precision = recipe.train.precision
    return ModelSource(recipe.model, recipe.revision, recipe.trust_remote_code, recipe.base, precision, load_model)


def _method_for(recipe: FinetuneRecipe, task: TaskProblem) -> MethodConfig:
    """Return the recipe's method, which also trains every body module that the checkpoint does not contain."""
    method = injected_method(recipe.method, recipe.train)
    head = task_head(task.model)
    owners = {name.rpartition(".")[0] for name in task.fresh if not inside(name, head)}
    if not owners:
        return method
    listed = [*(method.modules_to_save or []), *sorted(owners)]
    return method.model_copy(update={"modules_to_save": list(dict.fromkeys(listed))})


def sample_inputs(task: TaskProblem, n: int) -> list[dict[str, torch.Tensor]]:
    """Return up to ``n`` examples of the first evaluation split as batches of 16 without labels.

    Args:
        task: its first evaluation split is read.
        n: examples at most.
    """
    data = next(iter(task.held_out.values()))
    rows = [data[i] for i in range(min(n, len(data)))]
    return [model_inputs(task.collate(rows[i : i + 16])) for i in range(0, len(rows), 16)]


def _score_examples(task: TaskProblem, recipe: FinetuneRecipe, accelerator: Accelerator) -> None:
    """Let ``train.sample.scorer`` say how confident it is of each example, where the recipe names one.

    Raises:
        PeftlabError: the scorer cannot be loaded, or was not trained for this task.
    """
    sample = recipe.train.sample
    if sample is None or sample.scorer is None:
        return
    named = {"model": sample.scorer, "revision": None, "base": BaseConfig()}
    own = load_task(recipe.model_copy(update=named), task.task.labels)
    if own.fresh or own.confidence is None:
        reason = f"was not trained for {recipe.task}; new in it: {listed(own.fresh)}"
        raise PeftlabError(f"train.sample.scorer: {sample.scorer} {reason}")
    confidence, waiting = own.confidence, [own.model]

    def score(_: nn.Module, indices: list[int]) -> Sequence[float]:
        model = AsTrained(waiting.pop(), accelerator, recipe.train.precision)  # used once: its memory is free after it
        with eval_mode(model):
            return confidence(model, indices)

    task.confidence = score


# The keys that change what the same tensors compute; the tensors' names show which modules they belong to.
_MEANING = ("name", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "non_linearity", "placement")


def start_from(model: nn.Module, source: str) -> None:
    """Copy the trained tensors of ``source``, except the task head's, into an injected model of the same method.

    The head keeps its new values: it belongs to the task.

    Args:
        model: the injected model.
        source: a run or its URL, an adapter directory, or a loralib file (whose alpha is taken to be the model's).

    Raises:
        PeftlabError: the method or a shape differs, or the two do not train the same modules.
    """
    config = injection_of(model).config
    adapter = read_adapter(local_copy(source), lora_alpha=getattr(config, "lora_alpha", None))
    for key in _MEANING:
        here, there = getattr(config, key, None), getattr(adapter.config, key, None)
        if here != there:
            raise PeftlabError(f"init_from {source}: its method has {key} {there}, this run's {here}")
    head = task_head(model)
    own = {name: value for name, value in trainable_parameters(model).items() if inside(name, head)}
    body = {name: value for name, value in adapter.tensors.items() if not inside(name, head)}
    fill(model, {**own, **body}, source=f"init_from {source}")


_TRIED = 4  # examples that the model is tried on
_ONE_ROW = sys.maxsize


def packs(settings: TrainConfig, accelerator: Accelerator) -> bool:
    """Return whether examples are to share rows: where the recipe does not say, on GPUs.

    Args:
        settings: the recipe's ``train`` section. accelerator: devices.
    """
    return settings.packing if settings.packing is not None else accelerator.device.type == "cuda"


def share_rows(problem: TrainingProblem, settings: TrainConfig, accelerator: Accelerator) -> None:
    """Let several examples share a row, where that is wanted and the model computes the same.

    By default it is wanted on GPUs: on a CPU attention over a whole row costs more than padding batches of similar
    lengths. flash-attention, where it is installed and the precision is its own, takes each batch as one row. A
    model that does not keep the examples of a row apart is trained on padded batches, and a message says so.

    Args:
        problem: its ``row_tokens`` are set, and its attention with flash-attention.
        settings: the recipe's ``train`` section.
        accelerator: devices and processes.
    """
    wanted = packs(settings, accelerator)
    sharing = problem.sharing
    if sharing is None or not wanted:
        if settings.packing:
            accelerator.print("train.packing: rows with images do not share a row; training on padded batches instead")
        return
    examples = [problem.train[i] for i in range(min(_TRIED, len(problem.train)))]
    model: Unwrapped = nn.Module.to(problem.model, accelerator.device)  # transformers' own refuses weights in 8 bits
    flash = accelerator.device.type == "cuda" and settings.precision in ("bf16", "fp16") and is_flash_attn_2_available()
    if flash and _flash_attends(model, sharing, examples, accelerator):
        problem.row_tokens = _ONE_ROW
    else:
        with accelerator.autocast():
            fault = sharing.fault(model, examples)
        if fault is not None:
            accelerator.print(f"train.packing: {fault}; training on padded batches of similar lengths instead")
            return
        problem.row_tokens = settings.max_length


def _flash_attends(model: Unwrapped, sharing: RowSharing, examples: list[Row], accelerator: Accelerator) -> bool:
    """Let the model attend by flash-attention if it can and keeps the examples of a row apart; return whether."""
    before = model.config._attn_implementation
    try:
        # Not every model or kernel supports it, and only a trial shows whether examples of a row stay apart.
        model.set_attn_implementation("flash_attention_2")
        with accelerator.autocast():
            if sharing.fault(model, examples) is None:
                return True
    except (ImportError, ValueError):  # a model without it
        pass
    model.set_attn_implementation(before)
    return False


def answer_scorer(
    task: TaskProblem, settings: GenerateConfig | None, accelerator: Accelerator
) -> Callable[[nn.Module], dict[str, float]] | None:
    """Return the function that scores a model by its generated answers; None where the recipe asks for none.

    Args:
        task: its held-out prompts are answered.
        settings: the recipe's ``generate`` section.
        accelerator: devices and processes.

    Raises:
        PeftlabError: a metric's package is not installed, no prompt can be used, or parameters are sharded.
    """
    if settings is None or task.contexts is None:
        return None
    check_packages(settings.metrics)
    if accelerator.is_fsdp2:
        raise PeftlabError("generate: not under FSDP; leave it out (generate=null), then give it to `peftlab eval RUN`")
    return partial(_score, task, task.contexts(settings.examples), settings, accelerator)


def _score(
    task: TaskProblem, contexts: Contexts, settings: GenerateConfig, accelerator: Accelerator, model: nn.Module
) -> dict[str, float]:
    """Answer the prompts and return the metrics, in every process; the processes share the batches.

    Beside the metrics: ``ended``, the share of answers that ended before ``max_new_tokens``, and ``contexts``.
    """
    left_out = f" ({contexts.too_long} longer than train.max_length are left out)" if contexts.too_long else ""
    ids = [context.ids for context in contexts.items]
    batches = eval_batches([*map(len, ids)], settings.batch_size)
    # Under mixed precision accelerate wraps the forward pass in autocast; answers are those of the stored weights.
    bare: PreTrainedModel = accelerator.unwrap_model(model, keep_fp32_wrapper=False).to(accelerator.device)
    ends = contexts.ends | eos_ids(bare)
    tokenizer = tokenizer_of(task.processor)
    pad = tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else next(iter(ends), 0)
    found: list[tuple[int, list[int]]] = []
    advice = memory_advice("while answering", [f"generate.batch_size={max(1, settings.batch_size // 2)}"])
    with advice, eval_mode(bare), _merged_for_decoding(bare), _autocast_where_mixed(bare, accelerator):
        sees = any(context.images for context in contexts.items)
        answer = None if sees else answering(bare, settings, ends, pad)
        mine = batches[accelerator.process_index :: accelerator.num_processes]
        for batch in counted(mine, f"answering {len(ids)} held-out prompts{left_out}", len(mine), "batch"):
            if answer is not None:
                replies = answer([ids[place] for place in batch])
            else:
                asked = [contexts.items[place] for place in batch]
                inputs = prompt_inputs(task.processor, [each.prompt for each in asked], [each.images for each in asked])
                replies = answer_inputs(bare, settings, ends, pad, inputs)
            found += zip(batch, replies, strict=True)
    tokens = dict(gather_object(found))
    answers = [
        Answer(
            str(tokenizer.decode(tokens[place], skip_special_tokens=True)).strip(),
            context.prompt,
            context.references,
        )
        for place, context in enumerate(contexts.items)
    ]
    ended = [bool(out) and out[-1] in ends for out in tokens.values()]
    return {**score(settings.metrics, answers), "ended": fmean(ended), "contexts": len(answers)}


def _autocast_where_mixed(model: nn.Module, accelerator: Accelerator) -> AbstractContextManager[None]:
    """Return autocast for a model that cannot compute without: parameters of its base train in fp32 beside others."""
    plain = (module for module in model.modules() if not isinstance(module, Adapted) or isinstance(module, OwnCopy))
    floating = (p.dtype for module in plain for p in module.parameters(recurse=False) if p.is_floating_point())
    return accelerator.autocast() if len({*floating}) > 1 else nullcontext()


@contextmanager
def _merged_for_decoding(model: PreTrainedModel) -> Iterator[None]:
    """Fold an injected model's adapter into its weights for the block, if it can be: plain layers decode faster."""
    injected = is_injected(model)
    if injected:
        try:
            merge(model, keep=True)
        except PeftlabError:  # no linear fold, or a quantised weight: the adapter is computed beside it
            injected = False
    try:
        yield
    finally:
        if injected:
            unmerge(model)


def _merge_losses(
    task: TaskProblem, live: nn.Module, run_dir: Path, base: str, merging: MergeOptions
) -> dict[str, float]:
    """Return the mean loss on the first evaluation split of the live model and of both merges.

    Args:
        live: base and adapter as they were trained.
        merging: how ``run_dir / "merged"`` was merged; the other merge
            is made beside it and removed again.
    """
    into: Into = merging.into or "dequantised"
    other: Into = "original" if into == "dequantised" else "dequantised"
    device = next(live.parameters()).device
    with scratch_directory(run_dir / "merged", "other") as scratch:
        merge_checkpoint(run_dir / "adapter", base, scratch / other, replace(merging, into=other))
        data = next(iter(task.held_out.values()))
        found = {
            "live": task.mean_loss(live, data),
            into: task.mean_loss(_load_merged(run_dir / "merged", task.auto_class, device), data),
            other: task.mean_loss(_load_merged(scratch / other, task.auto_class, device), data),
        }
    return {name: found[name] for name in ("live", "dequantised", "original")}


def _load_merged(directory: Path, auto_class: str, device: torch.device) -> nn.Module:
    dtype = load_config(str(directory)).dtype
    stored = dtype if isinstance(dtype, torch.dtype) else torch.float32
    model, _ = load_base(str(directory), auto_class, dtype=stored)
    return nn.Module.to(model, device)
