"""A draft recipe from beginning to end: checks, text by the target, training, merge, acceptance before and after."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from transformers import PreTrainedModel

from peftlab.checkpoints.adapter import save_adapter
from peftlab.checkpoints.folded import load_model
from peftlab.checkpoints.merge.config import MergeOptions, into, times
from peftlab.checkpoints.merge.run import check_merge, merge_checkpoint
from peftlab.checkpoints.merge.verify import merge_latency, verify_merge
from peftlab.drafting.acceptance import ceiling, save_acceptance_head, train_acceptance_head
from peftlab.drafting.base import Draft, DraftJob, Loss, Saved, ScheduledLoss
from peftlab.drafting.checks import check_head, check_method
from peftlab.drafting.config import DraftConfig
from peftlab.drafting.objectives import make_objective
from peftlab.drafting.table import DRAFTS, DraftKind
from peftlab.drafting.text import Collate, repetition, weights_digest
from peftlab.errors import PeftlabError, about
from peftlab.files import Claim, staged_directory, write_json, write_text
from peftlab.hardware import describe_cpu
from peftlab.methods.injection import count_parameters, inject, is_injected
from peftlab.methods.table import lr_ratio
from peftlab.models.pretrained import storage
from peftlab.pipelines.conclude import conclude, write_results
from peftlab.pipelines.directory import run_directory
from peftlab.pipelines.drafts.draft_lengths import HEAD_FILE, acceptance_head
from peftlab.pipelines.drafts.draft_parts import (
    Sets,
    has_fold,
    make_job,
    make_sets,
    model_options,
    read_text,
    with_served_model,
)
from peftlab.pipelines.drafts.draft_results import Decoding, DecodingSpeed, DraftResults, HeldOutRates
from peftlab.pipelines.drafts.draft_speed import decoding_speed
from peftlab.pipelines.provenance import peak_memory, provenance
from peftlab.recipe.load import dump_recipe
from peftlab.recipe.schema import DraftRecipe, injected_method
from peftlab.registry import resolve
from peftlab.reporting.console import trainable_line
from peftlab.tasks.problem import Scores, TrainingProblem
from peftlab.training.distributed import check_trackers, make_accelerator
from peftlab.training.loop import train
from peftlab.training.state import Progress

_BEFORE, _AFTER = 4, 24  # held-out prompts that are decoded before and after training, one at a time


def run_draft(
    recipe: DraftRecipe, *, overwrite: bool = False, resume: bool = False, device: str = "auto"
) -> DraftResults:
    """Run ``recipe`` on a device (``hardware.resolve_device``) and return its results.

    Raises:
        PeftlabError: a mistake of the user's; the run directory changes only once target, draft and data fit.
    """
    with run_directory(recipe, overwrite=overwrite, resume=resume) as directory:
        return _run(with_served_model(recipe), directory, resume, device)


def _run(recipe: DraftRecipe, directory: Claim, resume: bool, device: str) -> DraftResults:
    run_dir, settings = directory.path, recipe.train
    kind = DRAFTS.find(recipe.draft.kind)
    if recipe.merge is True and recipe.method is not None and not has_fold(recipe):
        raise PeftlabError(f"merge: method {recipe.method.name} has no linear fold; set merge: false")
    check_trackers(list(settings.trackers))
    text = read_text(recipe)
    accelerator = _accelerator(recipe, run_dir, device)
    job = make_job(recipe, text, run_dir, accelerator.device)
    resolve(kind.check)(job, text.config)
    set_seed(settings.seed)
    draft = _load(recipe, kind, job)
    digest = weights_digest(draft.target)
    sets = make_sets(recipe, text, draft, job.cache, accelerator.main_process_first())
    if sets.served is not None:
        accelerator.print(sets.served.line())
    if kind.prepare:
        resolve(kind.prepare)(job, draft, sets.train)
    before_speed: DecodingSpeed | None = None
    if accelerator.is_main_process:
        untrained = resolve(kind.drafter)(draft, None)
        if untrained is not None:
            before_speed = decoding_speed(recipe, untrained, sets.prompts[:_BEFORE], draft.eos)
    accelerator.wait_for_everyone()
    if recipe.method is not None:
        inject(draft.injected, injected_method(recipe.method, recipe.train))
    if job.folds and draft.base_model is None:  # what would stop the merge stops the run before it has trained
        with about("merge"):
            check_merge(draft.injected, draft.base, run_dir / "merged", MergeOptions(into=into(recipe.merge)))
    trainable, total = count_parameters(draft.model)
    accelerator.print(f"{trainable_line(trainable, total)}\nlearning rate: {recipe.train.peak_lr:g}")
    spec = training_spec(recipe, kind, job, draft, sets)
    before = spec.score(draft.model)
    accelerator.print(f"before: {_line(before)}")
    if settings.gradient_checkpointing:
        draft.adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if accelerator.is_main_process:
        _start(recipe, directory, job, draft, sets, accelerator, digest)
    accelerator.wait_for_everyone()
    progress = _train(spec, recipe, accelerator, directory, resume)
    results = _results(recipe, draft, progress, sets, before, (trainable, total), accelerator)
    if accelerator.is_main_process:
        tokens = save_draft(recipe, kind, job, draft, sets)
        write_results(run_dir, results.as_json())
        saved = _read_back(job, draft, tokens)
        results.held_out = _held_out(kind, draft, sets)
        _measure(recipe, draft, spec, sets, saved, results)
        served = resolve(kind.drafter)(draft, saved)
        head = acceptance_head(str(run_dir), accelerator.device) if recipe.acceptance_head else None
        after_speed = decoding_speed(recipe, served, sets.prompts[:_AFTER], draft.eos, head, job.tokenizer)
        results.decoding = Decoding(before_speed, after_speed, recipe.gamma)
        conclude(run_dir, results.as_json())
        print(results.repetition.line())
        print(f"acceptance {results.baseline_score:.4f} before, {results.score:.4f} after")
        print(_verdict(before_speed, after_speed))
    accelerator.wait_for_everyone()
    return results


def _accelerator(recipe: DraftRecipe, run_dir: Path, device: str) -> Accelerator:
    accelerator = make_accelerator(recipe.train, run_dir, device)
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise PeftlabError(
            "kind: draft trains on one device or under DDP; accelerate's configuration asks for "
            f"{accelerator.distributed_type.value}"
        )
    return accelerator


def _load(recipe: DraftRecipe, kind: DraftKind, job: DraftJob[DraftConfig]) -> Draft:
    """Load target and draft, check that they fit each other and the method, and put them on the device."""
    target = load_target(recipe, job.device)
    draft: Draft = resolve(kind.load)(job, target)
    if recipe.method is not None:
        check_method(draft.injected, recipe.method)
    return draft


def load_target(recipe: DraftRecipe, device: torch.device) -> PreTrainedModel:
    """Load the target as the recipe stores it, frozen, and check that its logits are those of its LM head."""
    stored = storage(recipe.base, recipe.train.precision)
    target = load_model(recipe.target, "AutoModelForCausalLM", **model_options(recipe), **stored)[0]
    torch.nn.Module.to(target, device).requires_grad_(False)
    check_head(target, "target")
    return target


def _train(
    spec: TrainingProblem, recipe: DraftRecipe, accelerator: Accelerator, directory: Claim, resume: bool
) -> Progress:
    if recipe.train.trackers:
        accelerator.init_trackers("peftlab")
    try:
        return train(spec, recipe.train, accelerator, directory.path, resume=resume, saved=directory.completed)
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()


def _start(
    recipe: DraftRecipe,
    directory: Claim,
    job: DraftJob[DraftConfig],
    draft: Draft,
    sets: Sets,
    accelerator: Accelerator,
    digest: str,
) -> None:
    """Make the run directory, last before training, so that what fails before leaves none behind.

    A draft cut from the target becomes a plain model in it, the adapter's base. ``digest``: of the target's weights.
    """
    directory.begin()
    run_dir = directory.path
    write_text(run_dir / "recipe.yaml", dump_recipe(recipe))
    origin = provenance(recipe.train.seed, sets.fingerprint, accelerator.num_processes, accelerator.device)
    # A run that is the target may be repeated: the digest says which weights this draft was trained for.
    origin["target"] = {"reference": recipe.target, "weights": digest}
    write_json(run_dir / "provenance.json", origin)
    if draft.base_model is not None and not (run_dir / "base" / "config.json").exists():
        with staged_directory(run_dir / "base", "model", overwrite=True) as staging:
            draft.base_model().save_pretrained(staging)
            job.tokenizer.save_pretrained(staging)
    directory.completed()


def training_spec(
    recipe: DraftRecipe, kind: DraftKind, job: DraftJob[DraftConfig], draft: Draft, sets: Sets
) -> TrainingProblem:
    """Return what is trained: the draft on ``sets.train``; its acceptance on the first held-out split decides."""
    objective = make_objective(recipe.objective)
    kept = [objective.kept(tokens) for tokens in sets.train["kept"]]
    score_split = resolve(kind.score)
    loss: Loss = resolve(kind.loss)(job, draft)

    def score(model: torch.nn.Module) -> Scores:
        bare, size = getattr(model, "module", model), recipe.train.eval_batch_size
        return {name: score_split(draft, bare, data, size) for name, data in sets.held_out.items()}

    def acceptance(model: torch.nn.Module, indices: list[int]) -> list[float]:
        bare = getattr(model, "module", model)
        return [score_split(draft, bare, sets.train.select([i]), 1)["acceptance"] for i in indices]

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
        confidence=acceptance,
    )


def _results(
    recipe: DraftRecipe,
    draft: Draft,
    progress: Progress,
    sets: Sets,
    before: Scores,
    parameters: tuple[int, int],
    accelerator: Accelerator,
) -> DraftResults:
    split = next(iter(sets.held_out))
    objective = make_objective(recipe.objective)
    counts = sets.train["kept"]
    seconds = max(progress.seconds, 1e-9)
    gpu = torch.cuda.max_memory_allocated() / 2**20 if accelerator.device.type == "cuda" else None
    return DraftResults(
        task=f"draft of {recipe.target}",
        draft=recipe.draft.kind,
        method=recipe.method.name if recipe.method is not None else None,
        model=draft.base if draft.base_model is None else recipe.target,
        objective=recipe.objective.name,
        metric="acceptance",
        score=progress.best_score,
        metrics=progress.best_metrics,
        last_metrics=progress.last_metrics,
        best_step=progress.best_step,
        steps=progress.step,
        baseline_score=before[split]["acceptance"],
        baseline_metrics=before,
        trainable_parameters=parameters[0],
        total_parameters=parameters[1],
        train_seconds=round(progress.seconds, 3),
        examples_per_second=round(progress.examples / seconds, 2),
        tokens_per_second=round(progress.tokens / seconds, 2),
        train_examples=len(sets.train),
        learnt_tokens=sum(counts),
        kept_share=sum(objective.kept(n) for n in counts) / sum(counts),
        peak_rss_mb=round(peak_memory(), 1),
        peak_gpu_mb=round(gpu, 1) if gpu is not None else None,
        lr=recipe.train.peak_lr,
        cpu=describe_cpu(),
        seed=recipe.train.seed,
        repetition=repetition(sets.train, sets.held_out[split]),
        chosen=draft.chosen,
        cost=progress.cost(draft.model),
        selection=progress.selection(),
        served=sets.served,
    )


def _held_out(kind: DraftKind, draft: Draft, sets: Sets) -> HeldOutRates:
    """Return the acceptance of the trained draft on each example of the first held-out split."""
    score, data = resolve(kind.score), next(iter(sets.held_out.values()))
    rates = [score(draft, draft.model, data.select([i]), 1)["acceptance"] for i in range(len(data))]
    digest = sha256(json.dumps([[row["prompt"], row["input_ids"]] for row in data]).encode()).hexdigest()
    return HeldOutRates(digest, list(data["kept"]), [round(rate, 6) for rate in rates])


def save_draft(
    recipe: DraftRecipe, kind: DraftKind, job: DraftJob[DraftConfig], draft: Draft, sets: Sets
) -> torch.Tensor | None:
    """Write adapter, merged model and what else such drafts consist of; return the reduced vocabulary, if any."""
    run_dir = job.directory
    if is_injected(draft.injected):
        with staged_directory(run_dir / "adapter", "adapter", overwrite=True) as staging:
            save_adapter(draft.injected, staging, base=draft.base)
    if job.folds:
        options = MergeOptions(recipe=dump_recipe(recipe), into=into(recipe.merge), overwrite=True)
        merge_checkpoint(run_dir / "adapter", draft.base, run_dir / "merged", options)
    tokens: torch.Tensor | None = resolve(kind.save)(job, draft, run_dir, sets.train)
    if kind.calibrate is not None:
        held_out = next(iter(sets.held_out.values()))
        resolve(kind.calibrate)(draft, run_dir, held_out, recipe.train.eval_batch_size)
    return tokens


def _read_back(job: DraftJob[DraftConfig], draft: Draft, tokens: torch.Tensor | None) -> Saved:
    merged: PreTrainedModel | None = None
    if job.folds:
        merged = load_model(str(job.directory / "merged"), "AutoModelForCausalLM", dtype=draft.adapted.dtype)[0]
        torch.nn.Module.to(merged, job.device)
    return Saved(job.directory, merged, tokens)


def _measure(
    recipe: DraftRecipe, draft: Draft, spec: TrainingProblem, sets: Sets, saved: Saved, results: DraftResults
) -> None:
    """Add to ``results`` what is measured on the finished draft, merged where it is."""
    run_dir, held_out = saved.directory, next(iter(sets.held_out.values()))
    if saved.merged is not None:
        what = (run_dir / "adapter", draft.base, run_dir / "merged", _samples(sets))
        # On the CPU: beside what was trained, a device may lack the memory for two models more.
        results.merge = verify_merge(*what)
        results.latency = merge_latency(*what, device=saved.merged.device) if times(recipe.merge) else None
        if draft.separate:
            results.merged_metrics = spec.score(saved.merged)
    if saved.tokens is not None:
        results.vocabulary = {
            "tokens": len(saved.tokens),
            "ceiling": ceiling(draft.target, held_out, saved.tokens),
        }
    if recipe.acceptance_head:
        model, greedy = saved.merged or draft.adapted, recipe.data.temperature == 0
        head, results.acceptance_head = train_acceptance_head(draft.target, model, sets.train, held_out, greedy=greedy)
        save_acceptance_head(head, run_dir / HEAD_FILE)


def _samples(sets: Sets) -> list[dict[str, torch.Tensor]]:
    """Return up to 16 held-out examples as model inputs."""
    data = next(iter(sets.held_out.values()))
    batch = Collate()([data[i] for i in range(min(16, len(data)))])
    return [{key: batch[key] for key in ("input_ids", "attention_mask")}]


def _line(scores: Scores) -> str:
    return "; ".join(
        f"{split} " + ", ".join(f"{name} {value:.4f}" for name, value in rates.items())
        for split, rates in scores.items()
    )


def _verdict(before: DecodingSpeed | None, after: DecodingSpeed) -> str:
    """Return the measured speed, where the time went, and the draft's best length, a line each."""
    earlier = f", {before.block_efficiency:.2f} before training" if before else ""
    rates = f"{after.tokens_per_second:.1f} against {after.plain_tokens_per_second:.1f} tokens/s"
    sentence = (
        f"greedy decoding with the draft: {after.verdict}; {rates}, {after.block_efficiency:.2f} tokens per "
        f"target step{earlier}"
    )
    beside = ", ".join(f"{name} {rate:.2f}x" for name, rate in after.beside.items())
    sentence += f"\nwithout the draft, and with both: {beside}"
    return "\n".join([sentence, *(part.line() for part in (after.time, after.gain) if part is not None)])
