"""What a peft file leaves to the model that it is loaded into: the head, names that match nothing, the embeddings.

The file decides what the adapter is: a head that it does not contain keeps the base's values, and embeddings that peft
saved beside the adapter replace the base's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from peftlab.checkpoints.formats.peft_renaming import FACTORS, with_new_names
from peftlab.errors import PeftlabError
from peftlab.methods.injection import injection_of, trainable_parameters
from peftlab.methods.lora.config import LoraConfig
from peftlab.methods.lora.layers import never_called
from peftlab.methods.lora.plan import matching_only, matrices
from peftlab.methods.targets import has_suffix
from peftlab.models.architectures import embeddings_of, inside, task_head

BASE_LAYER = ".base_layer."  # in peft's keys of weights below an adapted module
_ADDED_BY_PEFT = ("classifier", "score", "qa_outputs")  # to modules_to_save, by the task type, whatever the model has


def settled(
    model: nn.Module, config: LoraConfig, tensors: Mapping[str, Tensor]
) -> tuple[LoraConfig, dict[str, Tensor], tuple[str, ...]]:
    """Return an adapter as it is in ``model``, a base model: its configuration, its tensors, and notes.

    Names that transformers has changed since are the new ones; names that match nothing are left out. The head trains
    if ``modules_to_save`` names it or the file contains all of it. A matrix in a module that LoRA does not act on, a
    router's for one, is adapted in place of its module.

    Args:
        tensors: by our parameter names.
    """
    config, tensors = with_new_names(model, config, tensors)
    config, tensors = _matrices(model, _by_full_names(model, config, tensors), tensors)
    config, notes = _head(model, config, set(tensors))
    unused = [name for name in never_called(model) if f"{name.removesuffix('out_proj')}lora_A" not in tensors]
    # Their factors, that is: the biases train with bias="all".
    without_effect = {key for key in tensors if inside(key, unused) and key.rpartition(".")[2] in FACTORS}
    if uncalled := sorted({key.rpartition(".")[0] for key in without_effect}):
        tensors = {key: tensor for key, tensor in tensors.items() if key not in without_effect}
        notes = (*notes, f"left out {', '.join(uncalled)}: attention never calls it, so that it has no effect")
    half = [name for name in never_called(model) if f"{name}.lora_A" in tensors]
    if half:
        notes = (
            *notes,
            f"peft trains the factors of {', '.join(half)} by half of their gradient, peftlab by all of it",
        )
    config, unmatched = matching_only(model, config)
    unmatched["modules_to_save"] = [n for n in unmatched.get("modules_to_save", []) if n not in _ADDED_BY_PEFT]
    lists = "; ".join(f"{field}: {', '.join(names)}" for field, names in unmatched.items() if names)
    if lists:
        notes = (*notes, f"names in adapter_config.json that match nothing are left out: {lists}")
    return config, tensors, notes


def _by_full_names(model: nn.Module, config: LoraConfig, tensors: Mapping[str, Tensor]) -> LoraConfig:
    """Return the configuration with full names where peft takes a name for the end of one, ``norm`` for
    ``input_layernorm``: of the modules that the file contains."""
    owners = {name.rpartition(".")[0] for name in tensors}
    saved = {".".join(parts[:i]) for parts in (owner.split(".") for owner in owners) for i in range(1, len(parts) + 1)}
    every = [name for name, _ in model.named_modules() if name]
    held = [name for name in every if name in saved]

    def full(end: str) -> list[str]:
        found = [name for name in held if name.endswith(end) and not has_suffix(name, end)]
        outermost = [name for name in found if not any(name != other and inside(name, [other]) for other in found)]
        kept = [end] if not outermost or any(has_suffix(name, end) for name in every) else []
        return kept + outermost

    whole, tokens = config.modules_to_save, config.trainable_token_indices
    changes: dict[str, object] = {
        "modules_to_save": whole and list(dict.fromkeys(n for end in whole for n in full(end)))
    }
    if isinstance(tokens, dict):
        changes["trainable_token_indices"] = {name: rows for end, rows in tokens.items() for name in full(end)}
    return config.model_copy(update=changes)


def _head(model: nn.Module, config: LoraConfig, names: set[str]) -> tuple[LoraConfig, tuple[str, ...]]:
    """Return the configuration, without the task head where the file does not contain it, and a note of that."""
    heads = task_head(model) if config.train_head else []
    every = [name for name, _ in model.named_modules() if name]
    chosen = [name for name in every if any(has_suffix(name, last) for last in config.modules_to_save or [])]
    head = [name for name, _ in model.named_parameters() if inside(name, heads) and not inside(name, chosen)]
    absent = [name for name in head if name not in names]
    biases = config.bias == "all"  # which the file contains, those of a head too
    if not absent or any(name in names and not (biases and has_suffix(name, "bias")) for name in head):
        return config, ()
    note = f"the adapter does not contain {', '.join(absent)}: the base model's values are used and do not train"
    return config.model_copy(update={"train_head": False}), (note,)


def _matrices(model: nn.Module, config: LoraConfig, tensors: dict[str, Tensor]) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Return an adapter with the factors of matrices in modules that are no linear maps by the matrices' names."""
    targets = config.target_modules if isinstance(config.target_modules, list) else []
    found = matrices(model) if targets else set()
    routers = [name for name in targets if f"{name}.weight" in found]
    if not routers:
        return config, tensors
    renamed = {f"{name}.lora_{side}": f"{name}.weight_lora_{side}" for name in routers for side in "AB"}
    changes: dict[str, object] = {
        "target_modules": [name for name in targets if name not in routers] or None,
        "target_parameters": [*(config.target_parameters or []), *(f"{name}.weight" for name in routers)],
    }
    for field in ("rank_pattern", "alpha_pattern"):
        values = getattr(config, field).items()
        changes[field] = {f"{name}.weight" if name in routers else name: value for name, value in values}
    return config.model_copy(update=changes), {renamed.get(name, name): t for name, t in tensors.items()}


def divided(
    model: nn.Module, tensors: Mapping[str, Tensor], *, source: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return an adapter's tensors apart from the embeddings that peft saved with it, and those by parameter name.

    peft saves input and output embeddings if LoRA acts on them or the vocabulary has been resized: then they contain
    rows that the base does not have. A copy of another weight of the base is in neither.

    Args:
        tensors: by the parameter names of the injected ``model``, as far as it has them.

    Raises:
        PeftlabError: an embedding of another size, or two values of one.
    """
    trained, every = trainable_parameters(model), dict(model.named_parameters(remove_duplicate=False))
    embeddings = _embeddings(model)
    own: dict[str, Tensor] = {}
    carried: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        parameter = every.get(key.replace(BASE_LAYER, "."))
        name = embeddings.get(id(parameter)) if parameter is not None else None
        if key in trained or parameter is None or (name is None and not _repeats(parameter, tensor)):
            own[key] = tensor
        elif name is not None:
            if parameter.shape != tensor.shape:
                raise PeftlabError(
                    f"{source}: {key} has shape {tuple(tensor.shape)}, the model's has {tuple(parameter.shape)}; the "
                    f"adapter was trained with {len(tensor)} tokens: model.resize_token_embeddings({len(tensor)}) first"
                )
            if not torch.equal(carried.setdefault(name, tensor), tensor):
                raise PeftlabError(f"{source}: {name} and {key} are one tied parameter, and their values differ")
    return own, carried


def changed_embeddings(model: nn.Module, carried: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return those of the embeddings in a file that differ from the base model's, and a note on each."""
    changed: dict[str, Tensor] = {}
    notes = []
    for name, tensor in carried.items():
        parameter = injection_of(model).originals.get(name, model.get_parameter(name).detach())
        if not _repeats(parameter, tensor):
            changed[name] = tensor
            apart = (parameter.cpu() != tensor.to(parameter.dtype)).reshape(len(tensor), -1).any(1)
            notes.append(
                f"the adapter contains {name}, and {int(apart.sum())} of its {len(tensor)} rows are not the base "
                "model's: the adapter's values are used"
            )
    return changed, tuple(notes)


def _embeddings(model: nn.Module) -> dict[int, str]:
    """Return the parameters of input and output embeddings, by identity, with the name that comes first."""
    held = {id(p) for layer in embeddings_of(model) if layer is not None for p in layer.parameters()}
    return {id(p): name for name, p in model.named_parameters() if id(p) in held}


def _repeats(parameter: Tensor, tensor: Tensor) -> bool:
    if parameter.is_meta or parameter.shape != tensor.shape:
        return False
    return torch.equal(parameter.detach().cpu(), tensor.to(parameter.dtype))
