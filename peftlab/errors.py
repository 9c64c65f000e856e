"""The one kind of error that a user reads, and the sentences in it."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

_TYPED = 200  # characters: a longer name was not typed by hand
_COMPARED = 10_000  # names at most that a misspelt one is compared with


class PeftlabError(Exception):
    """A mistake in a recipe, a file or a call, in one message.

    The message names the file, key or module at fault, the reason, and the nearest right spelling where
    there is one. The command line prints it without a traceback and exits with ``status``.
    """

    status = 2


@contextmanager
def prefix_errors(where: str | Path) -> Iterator[None]:
    """Put the file or key ``where`` before the message of an error that is raised in the block."""
    try:
        yield
    except PeftlabError as error:
        raise PeftlabError(f"{where}: {error}") from None


def nearest(name: str, candidates: Iterable[str], n: int = 3) -> list[str]:
    """Return those of ``candidates`` that are spelled most like ``name``, best first, case ignored.

    Comparing two names takes time proportional to the product of their lengths, so a very long one, such as a text
    where a name is expected, has no neighbours.

    Args:
        name: as it was written.
        candidates: the right spellings.
        n: how many to return at most.
    """
    if len(name) > _TYPED:
        return []
    by_lower = {c.lower(): c for c in islice(candidates, _COMPARED) if len(c) <= _TYPED}
    return [by_lower[m] for m in difflib.get_close_matches(name.lower(), by_lower, n=n, cutoff=0.5)]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest candidate, or an empty string."""
    matches = nearest(name, candidates, n=1)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


# What other tools call a setting, and what is written here.


def suggest(key: str, keys: Iterable[str]) -> str:
    """Return ``" (did you mean 'lr'?)"``, by usual name first, then by spelling; empty if nothing is near.

    Args:
        key: as it was written.
        keys: the right spellings.
    """
    keys = list(keys)
    known = same_setting(key, keys)
    return f" (did you mean {known!r}?)" if known else did_you_mean(key, keys)


def same_setting(key: str, keys: Iterable[str]) -> str | None:
    """Return the one of ``keys`` that is ``key`` in another case or under another usual name, if any.

    Args:
        key: as it was written.
        keys: the right spellings.
    """
    keys = set(keys)
    plain = _plain(key)
    names = (plain, *(name for name, others in _USUAL_NAMES.items() if plain in others.split()))
    return next((name for name in names if name in keys), None)


def usual_form(word: object) -> str:
    """Return ``" (write base.dtype=nf4)"`` for a key or value of other tools that no single key here stands for."""
    form = _USUAL_FORMS.get(_plain(word)) if isinstance(word, str) else None
    return f" ({form})" if form else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")


_USUAL_NAMES = {
    "lr": "learning_rate",
    "r": "rank lora_r lora_rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "modules targets target lora_target_modules",
    "modules_to_save": "modules lora_modules_to_save",
    "method": "peft adapter peft_config",
    "name": "peft_type type",
    "kind": "type",
    "epochs": "num_train_epochs num_epochs n_epochs epoch",
    "max_steps": "steps num_steps num_train_steps max_train_steps",
    "batch_size": "bs batch train_batch_size global_batch_size per_device_train_batch_size micro_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "gradient_accumulation_steps": "grad_accum grad_accum_steps accumulation accumulation_steps gradient_accumulation",
    "max_length": "max_len max_seq_len max_seq_length max_source_length seq_len sequence_len",
    "packing": "sample_packing",
    "warmup": "warmup_ratio warmup_steps num_warmup_steps",
    "scheduler": "lr_scheduler lr_scheduler_type schedule",
    "optimizer": "optim",
    "weight_decay": "wd",
    "eps": "adam_epsilon epsilon",
    "betas": "adam_beta1 adam_beta2",
    "max_grad_norm": "grad_clip clip gradient_clipping",
    "precision": "bf16 fp16 tf32 dtype mixed_precision",
    "eval_every": "eval_steps",
    "save_every": "save_steps",
    "early_stopping": "early_stopping_patience patience earlystoppingcallback",
    "keep_checkpoints": "save_total_limit",
    "trackers": "report_to",
    "seed": "random_seed",
    "output_dir": "output out out_dir run_dir",
    "model": "base_model model_name model_id model_name_or_path pretrained_model_name_or_path",
    "double_quant": "bnb_4bit_use_double_quant",
    "nf4": "4bit 4_bit int4 fp4",
    "int8": "8bit 8_bit",
    "task": "task_name",
    "data": "dataset",
    "path": "file data_path data_dir train_file train_dataset datasets",
    "text": "text_column columns dataset_text_field field",
    "label": "labels label_column",
    "bins": "classes",
    "train_on": "assistant_only_loss completion_only_loss train_on_inputs roles_to_train",
    "validation": "validation_split val dev val_set_size",
    "max_train_examples": "max_train_samples",
}
"""The names that other tools have for a recipe's keys and values."""
_NF4 = "write base.dtype=nf4"
_SPLIT_FILES = "write data.path=DIR, a directory with train.* and validation.*"
_USUAL_FORMS = {
    "load_in_4bit": _NF4,
    "bitsandbytesconfig": _NF4,
    "quantization_config": _NF4,
    "load_in_8bit": "write base.dtype=int8",
    "model_init_kwargs": "write base.dtype=bf16",
    "qlora": f"method lora on a base in 4 bits: {_NF4} method=lora",
    "dora": "write method={name: lora, use_dora: true}",
    "rslora": "write method={name: lora, use_rslora: true}",
    "pissa": "write method={name: lora, init_lora_weights: pissa}",
    "lora_target_linear": "write method.target_modules=all-linear",
    "task_type": "leave it out: the task says it",
    "eval_dataset": _SPLIT_FILES,
    "test_datasets": _SPLIT_FILES,
    "wandb_project": "write train.trackers=[wandb]",
    "logging_steps": "leave it out: metrics.jsonl has a line for each step",
    "sft": "write task=text/chat, or text/completion for rows of a prompt and a completion",
    "dpo": "write task=text/preference",
    "causal_lm": "write task=text/plain, or text/chat for conversations",
}
"""What is written for keys and values of other tools that no single key here stands for."""


def os_error_text(error: OSError) -> str:
    """Return the message of a system error, the file's name first."""
    names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{names}: {reason(error)}" if names else reason(error)


def reason(error: BaseException) -> str:
    """Return the first line of an error's message; of a system error's, without number and path."""
    text = (getattr(error, "strerror", None) or str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


def quiet_libraries() -> None:
    """Let libraries that warn of parts of their own log errors alone; call it before they are imported.

    transformers imports torchao if it is there, whose warnings concern no run.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
