"""Other tools' and other usual names of a recipe's keys."""

from __future__ import annotations

from collections.abc import Iterable

from peftlab.errors import did_you_mean

SYNONYMS: dict[str, tuple[str, ...]] = {
    "learning_rate": ("lr",),
    "rank": ("r",),
    "lora_r": ("r",),
    "lora_rank": ("r",),
    "alpha": ("lora_alpha", "alpha"),
    "dropout": ("lora_dropout", "dropout"),
    "modules": ("target_modules", "modules_to_save"),
    "targets": ("target_modules",),
    "target": ("target_modules",),
    "peft": ("method",),
    "adapter": ("method",),
    "peft_type": ("name",),
    "type": ("name", "kind"),
    "num_train_epochs": ("epochs",),
    "num_epochs": ("epochs",),
    "n_epochs": ("epochs",),
    "epoch": ("epochs",),
    "steps": ("max_steps",),
    "num_steps": ("max_steps",),
    "num_train_steps": ("max_steps",),
    "max_train_steps": ("max_steps",),
    "bs": ("batch_size",),
    "batch": ("batch_size",),
    "train_batch_size": ("batch_size",),
    "global_batch_size": ("batch_size",),
    "per_device_train_batch_size": ("batch_size",),
    "per_device_eval_batch_size": ("eval_batch_size",),
    "grad_accum": ("gradient_accumulation_steps",),
    "grad_accum_steps": ("gradient_accumulation_steps",),
    "accumulation": ("gradient_accumulation_steps",),
    "accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_accumulation": ("gradient_accumulation_steps",),
    "max_len": ("max_length",),
    "max_seq_len": ("max_length",),
    "max_seq_length": ("max_length",),
    "max_source_length": ("max_length",),
    "seq_len": ("max_length",),
    "warmup_ratio": ("warmup",),
    "warmup_steps": ("warmup",),
    "num_warmup_steps": ("warmup",),
    "lr_scheduler": ("scheduler",),
    "lr_scheduler_type": ("scheduler",),
    "schedule": ("scheduler",),
    "wd": ("weight_decay",),
    "adam_epsilon": ("eps",),
    "epsilon": ("eps",),
    "adam_beta1": ("betas",),
    "adam_beta2": ("betas",),
    "grad_clip": ("max_grad_norm",),
    "clip": ("max_grad_norm",),
    "gradient_clipping": ("max_grad_norm",),
    "bf16": ("precision",),
    "fp16": ("precision",),
    "dtype": ("precision",),
    "mixed_precision": ("precision",),
    "eval_steps": ("eval_every",),
    "early_stopping_patience": ("early_stopping",),
    "patience": ("early_stopping",),
    "save_total_limit": ("keep_checkpoints",),
    "report_to": ("trackers",),
    "random_seed": ("seed",),
    "output": ("output_dir",),
    "out": ("output_dir",),
    "out_dir": ("output_dir",),
    "run_dir": ("output_dir",),
    "base_model": ("model",),
    "model_name": ("model",),
    "model_id": ("model",),
    "model_name_or_path": ("model",),
    "pretrained_model_name_or_path": ("model",),
    "task_name": ("task",),
    "dataset": ("data",),
    "file": ("path",),
    "data_path": ("path",),
    "data_dir": ("path",),
    "train_file": ("path",),
    "text_column": ("text",),
    "columns": ("text",),
    "labels": ("label",),
    "label_column": ("label",),
    "classes": ("bins",),
    "validation_split": ("validation",),
    "val": ("validation",),
    "dev": ("validation",),
    "max_train_samples": ("max_train_examples",),
}


def meant(key: str, keys: Iterable[str]) -> str | None:
    """Return the one of ``keys`` that is ``key`` in another case or under another usual name, if any."""
    keys = set(keys)
    plain = key.lower().replace("-", "_")
    return next((name for name in (plain, *SYNONYMS.get(plain, ())) if name in keys), None)


def suggest(key: str, keys: Iterable[str]) -> str:
    """Return ``" (did you mean 'lr'?)"``, by usual name first, then by spelling; empty if nothing is near."""
    keys = list(keys)
    known = meant(key, keys)
    return f" (did you mean {known!r}?)" if known else did_you_mean(key, keys)
