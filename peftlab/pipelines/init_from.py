"""Starting a run from another run's result, as the LoRA paper starts three GLUE tasks from MNLI."""

from __future__ import annotations

from torch import nn

from peftlab.checkpoints.adapter import fill, read_adapter
from peftlab.errors import PeftlabError
from peftlab.methods.injection import injection_of, trainable_parameters
from peftlab.models.architectures import inside, task_head
from peftlab.remote import local_copy

# The keys that change what the same tensors compute; the tensors' names show which modules they belong to.
_MEANING = ("name", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "non_linearity", "placement")


def start_from(model: nn.Module, source: str) -> None:
    """Copy the trained tensors of ``source``, except the task head's, into an injected model of the same method.

    The head keeps its new values: it belongs to the task.

    Args:
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
