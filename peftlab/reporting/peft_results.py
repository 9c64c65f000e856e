"""A finetuning run on GSM8K as peft's method_comparison (MetaMathQA) stores its experiments.

The keys are those of peft's stored results, so that its ``processing.py`` reads the file. What a run here does not
measure is null: accuracy and times of each evaluation, forgetting, and the hub's dates of model and data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from peftlab.environment import __version__
from peftlab.errors import PeftlabError
from peftlab.files import Json, parse_json, read_object, read_text
from peftlab.recipe.load import load_recipe
from peftlab.recipe.schema import FinetuneRecipe
from peftlab.reporting import facts
from peftlab.tasks.conversations import Conversation
from peftlab.tasks.language_examples import template_of

_ACCURACIES = ("gsm8k_peft", "gsm8k")  # peft's own parser where it was asked for
_PACKAGES = ("transformers", "peft", "datasets", "bitsandbytes", "torch")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8", "nf4": "int4"}
_ADAPTER = "adapter_model.safetensors"


def peft_results(run_dir: Path) -> dict[str, Json]:
    """Return the contents of such a file for a run.

    ``accelerator_memory_*`` are the run's one peak, of the GPU or else of the main memory, and ``pytorch_info`` is that
    of the machine that writes the report.

    Raises:
        PeftlabError: it is no finished finetuning run, or its answers were not scored as GSM8K's.
    """
    results, provenance = (read_object(run_dir / name) for name in ("results.json", "provenance.json"))
    recipe = load_recipe(run_dir / "recipe.yaml")
    if not isinstance(recipe, FinetuneRecipe):
        raise PeftlabError(f"{run_dir}: a run of kind {recipe.kind}; peft's results are of finetuned models")
    answers = results.get("generate")
    scores = answers if isinstance(answers, dict) else {}
    accuracy = next((scores[name] for name in _ACCURACIES if name in scores), None)
    if accuracy is None:
        raise PeftlabError(
            f"{run_dir / 'results.json'}: no accuracy on GSM8K; run with generate.metrics=[gsm8k_peft], as the recipe "
            "gsm8k does"
        )
    return {
        "run_info": {
            "created_at": provenance.get("created_at"),
            "total_time": results.get("total_seconds"),
            "experiment_name": f"{recipe.method.name}/{run_dir.resolve().name}",
            "peft_branch": f"peftlab {__version__}",
            "peft_worktree_is_dirty": provenance.get("git_dirty"),
            "train_config": _train_config(recipe, results, run_dir),
            "peft_config": _peft_config(recipe, run_dir),
            "error_msg": "",
        },
        "train_info": _train_info(results, run_dir, accuracy),
        "meta_info": _meta_info(recipe, provenance),
    }


def _train_config(recipe: FinetuneRecipe, results: facts.Results, run_dir: Path) -> dict[str, Json]:
    train = recipe.train
    generation = recipe.generate.model_dump(exclude={"metrics", "examples", "before"}) if recipe.generate else {}
    return {
        "model_id": recipe.model,
        "dtype": _DTYPES[recipe.base.dtype],
        "max_seq_length": train.max_length,
        "batch_size": train.batch_size,
        "batch_size_eval": train.eval_batch_size,
        "max_steps": int(facts.required(results, "steps")),
        "eval_steps": train.eval_every,
        "compile": train.compile,
        "use_gc": bool(train.gradient_checkpointing),
        "query_template": _query_template(recipe, run_dir),
        "seed": train.seed,
        "grad_norm_clip": train.max_grad_norm or 0,
        "optimizer_type": "AdamW",
        "optimizer_kwargs": {
            "lr": train.lr, "weight_decay": train.weight_decay, "betas": list(train.betas), "eps": train.eps,
        },
        "lr_scheduler": train.scheduler,
        "use_amp": train.precision in ("bf16", "fp16"),
        "autocast_adapter_dtype": True,
        "generation_kwargs": generation,
        "attn_implementation": None,
        "init_kv_cache_prefix": None,
    }  # fmt: skip


def _query_template(recipe: FinetuneRecipe, run_dir: Path) -> str:
    """Return what the model reads before its answer to ``{query}``."""
    if recipe.task != "text/chat":
        return "{query}" + (recipe.data.separator or "")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run_dir / "adapter")
    turns = [{"role": "user", "content": "{query}"}]
    return template_of(Conversation(turns, str(run_dir)), tokenizer)(list, turns, True)


def _peft_config(recipe: FinetuneRecipe, run_dir: Path) -> Json:
    """Return the adapter's configuration; None where all parameters were trained, as in peft's results."""
    if recipe.method.name == "full":
        return None
    config = read_object(run_dir / "adapter" / "adapter_config.json")
    return {"peft_type": recipe.method.name.upper(), **config}


def _train_info(results: facts.Results, run_dir: Path, accuracy: Json) -> dict[str, Json]:
    gpu, main = (facts.as_float(results.get(key)) for key in ("peak_gpu_mb", "peak_rss_mb"))
    memory = round((gpu or main or 0) * 2**20)
    evaluations = _evaluations(results, run_dir)
    last = evaluations[-1] if evaluations else {}
    return {
        "accelerator_memory_reserved_avg": memory,
        "accelerator_memory_max": memory,
        "accelerator_memory_reserved_99th": memory,
        "train_time": facts.required(results, "train_seconds"),
        "file_size": (run_dir / "adapter" / _ADAPTER).stat().st_size,
        "num_trainable_params": int(facts.required(results, "trainable_parameters")),
        "num_total_params": int(facts.required(results, "total_parameters")),
        "status": "success",
        "metrics": [
            *evaluations,
            {
                "step": int(facts.required(results, "steps")),
                "test accuracy": accuracy,
                "train loss": last.get("train loss"),
                "train samples": int(facts.required(results, "seen_examples")),
                "train total tokens": int(facts.required(results, "seen_tokens")),
                "forgetting": None,
            },
        ],
    }


def _evaluations(results: facts.Results, run_dir: Path) -> list[dict[str, Json]]:
    """Return one entry for each evaluation: the mean loss of the steps since the one before, and the examples seen."""
    per_step = facts.required(results, "seen_examples") / max(1, facts.required(results, "steps"))
    entries: list[dict[str, Json]] = []
    losses: list[float] = []
    for line in read_text(run_dir / "metrics.jsonl").splitlines():
        values = parse_json(line)
        if not isinstance(values, dict):
            continue
        step, loss = facts.as_float(values.get("step")), facts.as_float(values.get("loss"))
        if loss is not None:
            losses.append(loss)
        elif "eval" in values and step is not None and losses:  # of several splits the first
            entries.append(
                {
                    "step": int(step),
                    "valid accuracy": None,
                    "train loss": sum(losses) / len(losses),
                    "train samples": round(step * per_step),
                    "train time": None,
                    "eval time": None,
                    "tokens / sec": facts.as_float(results.get("tokens_per_second")),
                    "mem allocated avg": None,
                    "mem reserved avg": None,
                    "elapsed time": None,
                }
            )
            losses = []
    return entries


def _meta_info(recipe: FinetuneRecipe, provenance: Mapping[str, Json]) -> dict[str, Json]:
    import torch

    versions = provenance.get("versions")
    found = versions if isinstance(versions, dict) else {}
    packages: dict[str, Json] = {}
    for name in _PACKAGES:
        packages |= {f"{name}-version": found.get(name), f"{name}-commit-hash": None}
    system = provenance.get("system")
    nowhere: dict[str, Json] = {"sha": None, "created_at": None}
    return {
        "model_info": {"sha": recipe.revision, "created_at": None},
        "dataset_info": {"metamath": dict(nowhere), "gsm8k": dict(nowhere)},
        "package_info": packages,
        "system_info": {**(system if isinstance(system, dict) else {}), "accelerator": provenance.get("device")},
        "pytorch_info": torch.__config__.show(),
    }
