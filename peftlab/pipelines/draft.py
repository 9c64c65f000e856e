"""A draft recipe's whole way: preflight, text by the target, training, merge, acceptance before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed

from peftlab.checkpoints.adapter import Adapter, read_adapter, save_adapter
from peftlab.checkpoints.merge.options import MergeOptions
from peftlab.checkpoints.merge.run import merge_checkpoint
from peftlab.checkpoints.merge.verify import verify_merge
from peftlab.decoding.engines.reduced_vocabulary import write_tokens
from peftlab.drafting.acceptance_head import save_foresight, train_foresight
from peftlab.drafting.examples import Collate
from peftlab.drafting.head_files import write_medusa
from peftlab.drafting.hidden_states import head_weight
from peftlab.drafting.truncation import truncate
from peftlab.drafting.vocabulary import ceiling, frequent_tokens
from peftlab.errors import PeftlabError
from peftlab.files import to_json, write_json, write_text
from peftlab.methods.injection import count_parameters, inject, remove
from peftlab.methods.medusa_config import MedusaConfig
from peftlab.methods.table import METHODS, lr_ratio
from peftlab.models.pretrained import load_base
from peftlab.outputs import Claim, staged_directory
from peftlab.pipelines.conclude import conclude, write_results
from peftlab.pipelines.directory import run_directory
from peftlab.pipelines.draft_parts import (
    Models,
    Sets,
    load_models,
    make_losses,
    make_objective,
    make_score,
    make_sets,
    read_text,
)
from peftlab.pipelines.draft_speed import (
    decoding_speed,
    drafting_with_a_model,
    drafting_with_an_exit,
    drafting_with_heads,
)
from peftlab.pipelines.provenance import provenance
from peftlab.recipe.loading import dump_recipe
from peftlab.recipe.schema import DraftRecipe, Truncation
from peftlab.reporting.console import trainable_line
from peftlab.training.distributed import make_accelerator
from peftlab.training.loop import train
from peftlab.training.spec import TrainingSpec
from peftlab.training.state import Progress
from peftlab.training.trackers import check_trackers


def run_draft(recipe: DraftRecipe, *, overwrite: bool = False, resume: bool = False) -> dict[str, Any]:
    """Run ``recipe`` and return what ``results.json`` holds.

    Raises:
        PeftlabError: anything the user can mend; the run directory changes only once target, draft and data fit.
    """
    with run_directory(recipe, overwrite=overwrite, resume=resume) as directory:
        return _run(recipe, directory, resume)


def _run(recipe: DraftRecipe, directory: Claim, resume: bool) -> dict[str, Any]:
    run_dir, settings = directory.path, recipe.train
    folds = METHODS[recipe.method.name].folds
    if recipe.merge and not folds:
        raise PeftlabError(f"merge: method {recipe.method.name} has no linear fold; set merge: false")
    if recipe.vocabulary is not None and not folds and recipe.method.name != "medusa":
        raise PeftlabError(f"vocabulary: lies beside the merged weights, and {recipe.method.name} has no linear fold")
    check_trackers(list(settings.trackers))
    text = read_text(recipe)
    accelerator = make_accelerator(settings, run_dir)
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise PeftlabError(
            "kind: draft trains on one device or under DDP; accelerate's configuration asks for "
            f"{accelerator.distributed_type.value}"
        )
    set_seed(settings.seed)
    models = load_models(recipe, text, run_dir, accelerator.device)
    cache = Path(recipe.data.cache or run_dir.parent / "draft-data")
    sets = make_sets(recipe, text, models, cache, accelerator.main_process_first())
    before_speed = _speed_before(recipe, models, sets) if accelerator.is_main_process else {}
    accelerator.wait_for_everyone()
    inject(models.student, recipe.method)
    trainable, total = count_parameters(models.student)
    accelerator.print(trainable_line(trainable, total))
    spec = _spec(recipe, models, sets)
    before = spec.score(models.student)
    accelerator.print(f"before: {_line(before)}")
    if settings.gradient_checkpointing:
        models.student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if accelerator.is_main_process:
        _start(recipe, directory, models, text.tokenizer, sets, accelerator)
    accelerator.wait_for_everyone()
    if settings.trackers:
        accelerator.init_trackers("peftlab")
    try:
        progress = train(spec, settings, accelerator, run_dir, resume=resume)
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
    models.student = spec.model
    results = _results(recipe, progress, sets, before, (trainable, total), accelerator)
    if accelerator.is_main_process:
        _write_out(recipe, models, spec, sets, run_dir, results, before_speed)
    accelerator.wait_for_everyone()
    return results


def _start(
    recipe: DraftRecipe, directory: Claim, models: Models, tokenizer: Any, sets: Sets, accelerator: Accelerator
) -> None:
    """Make the run directory, last before training, so that what fails before leaves none behind.

    A draft cut from the target becomes a plain model in it, the adapter's base.
    """
    directory.begin()
    run_dir = directory.path
    write_text(run_dir / "recipe.yaml", dump_recipe(recipe))
    write_json(run_dir / "provenance.json", provenance(recipe.train.seed, sets.fingerprint, accelerator.num_processes))
    if models.base == str(run_dir / "base") and not (run_dir / "base" / "config.json").exists():
        assert isinstance(recipe.draft, Truncation)
        with staged_directory(run_dir / "base", "model", overwrite=True) as staging:
            truncate(models.target, recipe.draft.truncate.layers, share=True).save_pretrained(staging)
            tokenizer.save_pretrained(staging)


def _spec(recipe: DraftRecipe, models: Models, sets: Sets) -> TrainingSpec:
    objective, losses = make_objective(recipe), make_losses(recipe, models)
    kept = [objective.kept(tokens) for tokens in sets.train["kept"]]
    return TrainingSpec(
        model=models.student,
        train=sets.train,
        collate=Collate(),
        loss=lambda model, inputs: losses(model, inputs).sum(),
        denominator=lambda batch: sum(kept[i] for i in batch),
        score=make_score(recipe, models, sets),
        deciding="acceptance",
        lr_ratio=lr_ratio(recipe.method),
    )


def _results(
    recipe: DraftRecipe,
    progress: Progress,
    sets: Sets,
    before: dict[str, dict[str, float]],
    parameters: tuple[int, int],
    accelerator: Accelerator,
) -> dict[str, Any]:
    split = next(iter(sets.held_out))
    objective = make_objective(recipe)
    counts = sets.train["kept"]
    seconds = max(progress.seconds, 1e-9)
    gpu = torch.cuda.max_memory_allocated() / 2**20 if accelerator.device.type == "cuda" else None
    return {
        "task": f"draft of {recipe.target}",
        "method": recipe.method.name,
        "model": str(recipe.draft) if isinstance(recipe.draft, str) else recipe.target,
        "objective": recipe.objective.name,
        "metric": "acceptance",
        "score": progress.best_score,
        "metrics": progress.best_metrics,
        "last_metrics": progress.last_metrics,
        "best_step": progress.best_step,
        "steps": progress.step,
        "baseline_score": before[split]["acceptance"],
        "baseline_metrics": before,
        "trainable_parameters": parameters[0],
        "total_parameters": parameters[1],
        "train_seconds": round(progress.seconds, 3),
        "examples_per_second": round(progress.examples / seconds, 2),
        "tokens_per_second": round(progress.tokens / seconds, 2),
        "train_examples": len(sets.train),
        "learnt_tokens": sum(counts),
        "kept_share": sum(objective.kept(n) for n in counts) / sum(counts),
        "peak_gpu_mb": round(gpu, 1) if gpu is not None else None,
        "seed": recipe.train.seed,
    }


def _write_out(
    recipe: DraftRecipe,
    models: Models,
    spec: TrainingSpec,
    sets: Sets,
    run_dir: Path,
    results: dict[str, Any],
    before_speed: dict[str, Any],
) -> None:
    """Write adapter, merged model or heads, and results; then measure what is on disk, and write that as well."""
    with staged_directory(run_dir / "adapter", "adapter", overwrite=True) as staging:
        save_adapter(models.student, staging, base=models.base)
    folded = METHODS[recipe.method.name].folds and recipe.merge is not False
    if folded:
        options = MergeOptions(recipe=dump_recipe(recipe), overwrite=True)
        merge_checkpoint(run_dir / "adapter", models.base, run_dir / "merged", options)
    tokens = _vocabulary(recipe, models, sets)
    if tokens is not None and folded:
        write_tokens(run_dir / "merged", tokens)
    if recipe.method.name == "medusa":
        write_medusa(models.student, run_dir / "heads", tokens=tokens, overwrite=True)
        _merge_trunk(recipe, models, run_dir)
    write_results(run_dir, results)
    merged: Any = None
    if folded:
        check = verify_merge(run_dir / "adapter", models.base, run_dir / "merged", _samples(sets))
        results["merge"] = to_json(check)
        merged, _ = load_base(str(run_dir / "merged"), "AutoModelForCausalLM")
        merged.to(models.target.device)
        if not recipe.early_exit:
            results["merged_metrics"] = spec.score(merged)
    if tokens is not None:
        held = next(iter(sets.held_out.values()))
        results["vocabulary"] = {"tokens": len(tokens), "ceiling": ceiling(models.target, held, tokens)}
    if recipe.acceptance_head:
        draft, unseen = merged or models.student, next(iter(sets.held_out.values()))
        greedy = recipe.data.temperature == 0
        head, results["acceptance_head"] = train_foresight(models.target, draft, sets.train, unseen, greedy=greedy)
        save_foresight(head, run_dir / "acceptance_head.safetensors")
    after_speed = _speed_after(recipe, models, sets, run_dir, merged, tokens)
    results["decoding"] = {"before": before_speed, "after": after_speed, "gamma": recipe.gamma}
    conclude(run_dir, results)
    print(f"acceptance {results['baseline_score']:.4f} before, {results['score']:.4f} after")
    print(_verdict(before_speed, after_speed))


def _vocabulary(recipe: DraftRecipe, models: Models, sets: Sets) -> torch.Tensor | None:
    """Return the reduced vocabulary of draft or heads, or None."""
    if recipe.vocabulary is None:
        return None
    texts = (row["input_ids"][row["prompt"] :] for row in sets.train)
    return frequent_tokens(texts, recipe.vocabulary, len(head_weight(models.target)))


def _merge_trunk(recipe: DraftRecipe, models: Models, run_dir: Path) -> None:
    """Medusa-2: write the target with the trunk's LoRA folded in; the heads belong to that model."""
    assert isinstance(recipe.method, MedusaConfig)
    if recipe.method.trunk is None or recipe.merge is False:
        return
    whole = read_adapter(run_dir / "adapter")
    tensors = {name: tensor for name, tensor in whole.tensors.items() if ".medusa_heads." not in name}
    trunk = Adapter(recipe.method.trunk, tensors, whole.base, whole.base_reference)
    options = MergeOptions(recipe=dump_recipe(recipe), overwrite=True)
    merge_checkpoint(trunk, models.base, run_dir / "merged", options)


def _samples(sets: Sets) -> list[dict[str, torch.Tensor]]:
    """Return up to 16 held-out examples as model inputs."""
    data = next(iter(sets.held_out.values()))
    batch = Collate()([data[i] for i in range(min(16, len(data)))])
    return [{key: batch[key] for key in ("input_ids", "attention_mask")}]


def _speed_before(recipe: DraftRecipe, models: Models, sets: Sets) -> dict[str, Any]:
    """Return how fast the untrained draft decodes; untrained heads are no draft."""
    if recipe.method.name == "medusa":
        return {}
    if models.exit is not None:
        drafter = drafting_with_an_exit(models.target, models.exit.layers)
    else:
        drafter = drafting_with_a_model(models.student)
    return decoding_speed(recipe, models.target, drafter, sets.prompts, models.eos, repeats=1)


def _speed_after(
    recipe: DraftRecipe, models: Models, sets: Sets, run_dir: Path, merged: Any, tokens: torch.Tensor | None
) -> dict[str, Any]:
    """Return how fast decoding is with what was trained, read from disk where it can be.

    Args:
        merged: the trained draft as read from disk; None: the one in memory, with its adapter.
        tokens: what a draft model is confined to; None for the whole vocabulary.
    """
    served = models.target
    if isinstance(recipe.method, MedusaConfig):
        if recipe.method.trunk is None:
            served = remove(models.student)  # the target as it is served, on its fastest engine
        elif recipe.merge is not False:
            served = load_base(str(run_dir / "merged"), "AutoModelForCausalLM")[0].to(served.device)
        drafter = drafting_with_heads(run_dir / "heads", models.target.device)
    elif models.exit is not None:
        served = merged if merged is not None else models.student
        drafter = drafting_with_an_exit(served, models.exit.layers)
    else:
        drafter = drafting_with_a_model(merged if merged is not None else models.student, tokens)
    return decoding_speed(recipe, served, drafter, sets.prompts, models.eos, repeats=2)


def _line(scores: dict[str, dict[str, float]]) -> str:
    return "; ".join(
        f"{split} " + ", ".join(f"{name} {value:.4f}" for name, value in rates.items())
        for split, rates in scores.items()
    )


def _verdict(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the measured speed in a sentence."""
    earlier = f", {before['block_efficiency']:.2f} before training" if before else ""
    rates = f"{after['tokens_per_second']:.1f} against {after['plain_tokens_per_second']:.1f} tokens/s"
    return (
        f"greedy decoding with the draft: {after['verdict']}; {rates}, {after['block_efficiency']:.2f} tokens a target "
        f"step{earlier}"
    )
