"""Names of modules that transformers has changed since an adapter was saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from peftlab.methods.lora.config import LoraConfig
from peftlab.models.skeleton import places

FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "lora_bias")
ADDED = (*FACTORS, "token_rows")


def new_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the names in ``model`` of an adapter's tensors that have other ones in its file.

    Renaming is transformers' own for checkpoints: a module has the name that its weight gets, and a whole tensor its
    own. Names that the model has, or that no renaming leads to, are left out.
    """
    known = {name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))}
    weights = {}
    for name in names:
        module, _, last = name.rpartition(".")
        if module not in known and name not in known:
            weights[name] = f"{module}.weight" if last in ADDED else name
    if not weights:
        return {}
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return {}
    found = places(model, dict.fromkeys(weights.values()))
    renamed = {}
    for name, weight in weights.items():
        place, last = found[weight], name.rpartition(".")[2]
        if place is not None and place.converter is None and place.name != weight:
            renamed[name] = f"{place.name.rpartition('.')[0]}.{last}" if last in ADDED else place.name
    return renamed


def with_new_names(
    model: nn.Module, config: LoraConfig, tensors: Mapping[str, Tensor]
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Return an adapter by the names that its modules have in ``model``.

    Where one has another name, the file's modules become the targets, with rank and alpha of their own.
    """
    renamed = new_names(model, tensors)
    factors = [name for name in tensors if name.rpartition(".")[2] in FACTORS]
    changes: dict[str, object] = {}
    if renamed.keys() & factors:
        names = {renamed.get(name, name).rpartition(".")[0]: name.rpartition(".")[0] for name in factors}
        changes = {
            "target_modules": sorted(names),
            "exclude_modules": None,
            "rank_pattern": {new: config.rank(name) for new, name in names.items() if config.rank(name) != config.r},
            "alpha_pattern": {
                new: config.alpha(name) for new, name in names.items() if config.alpha(name) != config.lora_alpha
            },
        }
    return config.model_copy(update=changes), {renamed.get(name, name): tensor for name, tensor in tensors.items()}
