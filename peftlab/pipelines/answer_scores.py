"""A task's held-out prompts, answered by a model and scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import fmean

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from transformers import PreTrainedModel

from peftlab.decoding.generation import answering
from peftlab.drafting.checks import eos_ids
from peftlab.errors import PeftlabError
from peftlab.methods.injection import is_injected
from peftlab.methods.merging import merge, unmerge
from peftlab.models.pretrained import eval_mode
from peftlab.tasks.batches import eval_batches
from peftlab.tasks.config import GenerateConfig
from peftlab.tasks.generated import Answer, Contexts, check_packages, score
from peftlab.tasks.problem import TaskProblem
from peftlab.training.faults import memory_advice


def asked_answers(
    task: TaskProblem, settings: GenerateConfig | None, accelerator: Accelerator
) -> Callable[[nn.Module], dict[str, float]] | None:
    """Return what scores a model by its answers, as ``settings`` say; None where there are none.

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
    accelerator.print(f"answering {len(contexts.items)} held-out prompts{left_out}")
    ids = [context.ids for context in contexts.items]
    batches = eval_batches([*map(len, ids)], settings.batch_size)
    # Under mixed precision accelerate wraps the forward pass in autocast; answers are those of the stored weights.
    bare: PreTrainedModel = accelerator.unwrap_model(model, keep_fp32_wrapper=False).to(accelerator.device)
    ends = contexts.ends | eos_ids(bare)
    pad = task.tokenizer.pad_token_id if task.tokenizer.pad_token_id is not None else next(iter(ends), 0)
    found: list[tuple[int, list[int]]] = []
    advice = memory_advice("while answering", [f"generate.batch_size={max(1, settings.batch_size // 2)}"])
    with advice, eval_mode(bare), folded(bare):
        answer = answering(bare, settings, ends, pad)
        for batch in batches[accelerator.process_index :: accelerator.num_processes]:
            found += zip(batch, answer([ids[place] for place in batch]), strict=True)
    tokens = dict(gather_object(found))
    answers = [
        Answer(
            str(task.tokenizer.decode(tokens[place], skip_special_tokens=True)).strip(),
            context.prompt,
            context.references,
        )
        for place, context in enumerate(contexts.items)
    ]
    ended = [bool(out) and out[-1] in ends for out in tokens.values()]
    return {**score(settings.metrics, answers), "ended": fmean(ended), "contexts": len(answers)}


@contextmanager
def folded(model: PreTrainedModel) -> Iterator[None]:
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
