"""A finetuning recipe's whole way: data and model, injection, training, adapter, merge, report."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, InitProcessGroupKwargs, set_seed
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.checkpoints.adapter import save_adapter
from peftlab.checkpoints.merge.run import merge_checkpoint, verify_merge
from peftlab.errors import PeftlabError
from peftlab.files import write_json, write_text
from peftlab.methods.injection import count_parameters, inject
from peftlab.methods.table import METHODS, lr_ratio
from peftlab.methods.targets import inside
from peftlab.methods.task_head import task_head
from peftlab.models.positions import position_limit
from peftlab.models.pretrained import load_base, load_tokenizer
from peftlab.outputs import Claim, staged_directory
from peftlab.pipelines.conclude import conclude, write_results
from peftlab.pipelines.directory import run_directory
from peftlab.pipelines.init_from import start_from
from peftlab.pipelines.provenance import provenance
from peftlab.recipe.loading import dump_recipe
from peftlab.recipe.schema import FinetuneRecipe
from peftlab.reporting.card import adapter_card, merged_card
from peftlab.reporting.classes import data_lines
from peftlab.reporting.console import trainable_line
from peftlab.tasks.data import TaskData, load_task_data
from peftlab.tasks.metrics import majority_baseline
from peftlab.tasks.scoring import Evaluation, summed_loss
from peftlab.tasks.text import MISSING
from peftlab.tasks.tokens import Collate, largest_id, tokenise
from peftlab.training.config import TrainConfig
from peftlab.training.loop import train
from peftlab.training.spec import TrainingSpec
from peftlab.training.state import Progress
from peftlab.training.trackers import check_trackers
from peftlab.training.zero import zero_plugin

VERIFY_EXAMPLES = 64  # real inputs that merged and unmerged are compared on


@dataclass
class LoadedTask:
    """What a recipe's model, tokenizer and data come to before anything is injected."""

    data: TaskData
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    fresh: list[str]
    collate: Collate

    def tokens(self, split: str, recipe: FinetuneRecipe) -> Dataset:
        """Return a split, tokenised; ``PeftlabError`` where the model has no embedding of a token."""
        tokens = tokenise(self.data.splits[split], self.tokenizer, recipe.train.max_length)
        embeddings: Any = self.model.get_input_embeddings()
        largest, embedded = max(largest_id(tokens), self.collate.fill["input_ids"]), len(embeddings.weight)
        if largest >= embedded:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise PeftlabError(
                f"{recipe.model}: its tokenizer gives {token!r} the id {largest}, and the model has embeddings of "
                f"{embedded} tokens"
            )
        return tokens


def run_finetune(recipe: FinetuneRecipe, *, overwrite: bool = False, resume: bool = False) -> dict[str, Any]:
    """Run ``recipe`` and return what ``results.json`` holds.

    Raises:
        PeftlabError: anything the user can mend; the run directory changes only once model and data fit.
    """
    with run_directory(recipe, overwrite=overwrite, resume=resume) as directory:
        return _run(recipe, directory, resume)


def _run(recipe: FinetuneRecipe, directory: Claim, resume: bool) -> dict[str, Any]:
    run_dir = directory.path
    check_trackers(list(recipe.train.trackers))
    if recipe.merge and not METHODS[recipe.method.name].folds:
        raise PeftlabError(f"merge: method {recipe.method.name} has no linear fold; set merge: false")
    settings = recipe.train
    accelerator = make_accelerator(settings, run_dir)
    set_seed(settings.seed)
    task = load_task(recipe)
    if "train" not in task.data.splits:
        whole = "; data.validation=all is for peftlab eval" if recipe.data.validation == "all" else ""
        raise PeftlabError(f"task {recipe.task}: there is no training split{whole}")
    for line in data_lines(task.data.class_counts(), task.data.left_out):
        accelerator.print(line)
    model = inject(task.model, _method_for(recipe, task))
    if recipe.init_from and not resume:
        start_from(model, recipe.init_from)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainable, total = count_parameters(model)
    accelerator.print(trainable_line(trainable, total))
    evaluation = make_evaluation(recipe, task)
    spec = make_spec(recipe, task, evaluation)

    if accelerator.is_main_process:
        directory.begin()
        write_text(run_dir / "recipe.yaml", dump_recipe(recipe))
        origin = provenance(settings.seed, task.data.fingerprint, accelerator.num_processes)
        write_json(run_dir / "provenance.json", origin)
    accelerator.wait_for_everyone()
    if settings.trackers:
        accelerator.init_trackers("peftlab")
    try:
        progress = train(spec, settings, accelerator, run_dir, resume=resume)
    finally:
        for tracker in accelerator.trackers:  # end_training() would part the processes as well
            tracker.finish()

    results = _results(recipe, task, progress, trainable, total, accelerator)
    if accelerator.is_main_process:
        _write_out(recipe, task, spec.model, evaluation, run_dir, results)
    accelerator.wait_for_everyone()
    return results


def make_accelerator(settings: TrainConfig, run_dir: Path) -> Accelerator:
    """Return accelerate's handle on devices and processes, as the ``train`` section wants it.

    Raises:
        PeftlabError: the device cannot do ``settings.precision``, or accelerate was told to use FSDP 1
            or what ``zero_plugin`` refuses.
    """
    torch.set_float32_matmul_precision("high" if settings.precision == "tf32" else "highest")
    AcceleratorState._reset_state()  # of an earlier run in this process, perhaps in another precision
    zero, on_cpu = zero_plugin(settings), not torch.accelerator.is_available()
    autocast = settings.precision in ("bf16", "fp16") and zero is None  # zero brings its own
    try:
        accelerator = Accelerator(
            # Without cpu=True processes without a GPU do not find each other; with it DeepSpeed is passed over,
            # so that there the backend must be named.
            cpu=on_cpu and zero is None,
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if on_cpu and zero is not None else None,
            deepspeed_plugin=zero,
            mixed_precision=settings.precision if autocast else "no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=settings.gradient_accumulation_steps, sync_with_dataloader=False
            ),
            log_with=list(settings.trackers) or None,
            project_dir=run_dir,
        )
    except ValueError as error:
        raise PeftlabError(f"train.precision={settings.precision}: {error}") from None
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise PeftlabError("accelerate's configuration asks for FSDP 1; set fsdp_version: 2 in it")
    return accelerator


def load_task(recipe: FinetuneRecipe, classes: Sequence[str] | None = None) -> LoadedTask:
    """Load what ``recipe`` names: data first, since it is cheap and most often wrong.

    Args:
        classes: a trained model's class names in label order; None: those of task and data.
    """
    data = load_task_data(recipe.task, recipe.data, classes)
    options: dict[str, Any] = {"trust_remote_code": recipe.trust_remote_code}
    if recipe.revision:
        options["revision"] = recipe.revision
    tokenizer = load_tokenizer(recipe.model, **options)
    labels = data.task.labels
    names: dict[str, Any] = {
        "id2label": dict(enumerate(labels)),
        "label2id": {name: i for i, name in enumerate(labels)},
    }
    model, fresh = load_base(
        recipe.model,
        num_labels=len(labels) or 1,
        problem_type="regression" if data.task.regression else "single_label_classification",
        **(names if labels else {}),
        **options,
    )
    limit = position_limit(model)
    if limit is not None and recipe.train.max_length > limit:
        raise PeftlabError(
            f"train.max_length is {recipe.train.max_length}; {recipe.model} has positions for {limit} tokens"
        )
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    return LoadedTask(data, tokenizer, model, fresh, Collate(tokenizer, data.task.regression))


def make_evaluation(recipe: FinetuneRecipe, task: LoadedTask) -> Evaluation:
    """Return the tokenised evaluation splits with the task's metrics; ``PeftlabError`` if there is no such split."""
    spec, splits = task.data.task, task.data.splits
    names = [split for split in spec.evaluation if split in splits]
    if not names:
        raise PeftlabError(
            f"task {spec.name}: no labelled split to evaluate on; there is {', '.join(splits) or 'none'}"
        )
    tokens = {split: task.tokens(split, recipe) for split in names}
    return Evaluation(spec, tokens, task.collate, recipe.train.eval_batch_size)


def make_spec(recipe: FinetuneRecipe, task: LoadedTask, evaluation: Evaluation) -> TrainingSpec:
    """Return the training problem of classification or regression."""
    return TrainingSpec(
        model=task.model,
        train=task.tokens("train", recipe),
        collate=task.collate,
        loss=partial(summed_loss, regression=task.data.task.regression),
        denominator=len,
        score=evaluation.score,
        deciding=task.data.task.metrics[0],
        lr_ratio=lr_ratio(recipe.method),
    )


def _method_for(recipe: FinetuneRecipe, task: LoadedTask) -> Any:
    """Return the recipe's method, which also trains whatever body module the checkpoint did not hold."""
    head = task_head(task.model)
    owners = {name.rpartition(".")[0] for name in task.fresh if not inside(name, head)}
    if not owners:
        return recipe.method
    listed = [*(recipe.method.modules_to_save or []), *sorted(owners)]
    return recipe.method.model_copy(update={"modules_to_save": list(dict.fromkeys(listed))})


def _results(
    recipe: FinetuneRecipe,
    task: LoadedTask,
    progress: Progress,
    trainable: int,
    total: int,
    accelerator: Accelerator,
) -> dict[str, Any]:
    spec, splits = task.data.task, task.data.splits
    deciding = next(split for split in spec.evaluation if split in splits)
    baseline = majority_baseline(spec, splits["train"]["label"], splits[deciding]["label"])
    seconds = max(progress.seconds, 1e-9)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    gpu = torch.cuda.max_memory_allocated() / 2**20 if accelerator.device.type == "cuda" else None
    return {
        "task": spec.name,
        "method": recipe.method.name,
        "model": recipe.model,
        "metric": spec.metrics[0],
        "score": progress.best_score,
        "metrics": progress.best_metrics,
        "last_metrics": progress.last_metrics,
        "best_step": progress.best_step,
        "steps": progress.step,
        "baseline_score": baseline[spec.metrics[0]],
        "baseline_metrics": baseline,
        "trainable_parameters": trainable,
        "total_parameters": total,
        "train_seconds": round(progress.seconds, 3),
        "examples_per_second": round(progress.examples / seconds, 2),
        "tokens_per_second": round(progress.tokens / seconds, 2),
        "padding_share": round(1 - progress.tokens / max(1, progress.padded_tokens), 4),
        "peak_rss_mb": round(peak, 1),
        "peak_gpu_mb": round(gpu, 1) if gpu is not None else None,
        "seed": recipe.train.seed,
        "classes": task.data.class_counts(),
        "dropped_rows": task.data.left_out.get(MISSING, 0),
        "left_out": task.data.left_out,
    }


def _write_out(
    recipe: FinetuneRecipe,
    task: LoadedTask,
    model: nn.Module,
    evaluation: Evaluation,
    run_dir: Path,
    results: dict[str, Any],
) -> None:
    """Write adapter, merged model if the method has one, results and report; then compare merged and unmerged."""
    card = {
        "name": run_dir.name,
        "base_model": recipe.model,
        "results": results,
        "recipe": dump_recipe(recipe),
        "revision": recipe.revision,
        "labels": list(task.data.task.labels),
        "split": next(iter(evaluation.splits)),
    }
    with staged_directory(run_dir / "adapter", "adapter", overwrite=True) as staging:
        save_adapter(model, staging, base=recipe.model)
        task.tokenizer.save_pretrained(staging)
        write_text(staging / "README.md", adapter_card(card))
    folds = METHODS[recipe.method.name].folds
    if folds and recipe.merge is not False:
        merge_checkpoint(run_dir / "adapter", recipe.model, run_dir / "merged", card=merged_card(card), overwrite=True)
        write_results(run_dir, results)
        results["merge"] = verify_merge(
            run_dir / "adapter", recipe.model, run_dir / "merged", sample_inputs(evaluation, VERIFY_EXAMPLES)
        )
    conclude(run_dir, results)


def sample_inputs(evaluation: Evaluation, n: int) -> list[dict[str, torch.Tensor]]:
    """Return up to ``n`` examples of the first evaluation split as batches of 16 without labels."""
    data = next(iter(evaluation.splits.values()))
    rows = [data[i] for i in range(min(n, len(data)))]
    batches = [evaluation.collate(rows[i : i + 16]) for i in range(0, len(rows), 16)]
    return [{key: value for key, value in batch.items() if key != "labels"} for batch in batches]
