"""Adapters in peft's format: what a file says, how it is read into a model, and how ours are written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeGuard

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.methods.base import fully_trained, has_suffix
from peftlab.methods.config import ALL_LINEAR, PEFT_IGNORED, PEFT_REFUSED, QUERY_AND_VALUE, LoraConfig
from peftlab.methods.inject import Injection, adapter_state, injection_of
from peftlab.methods.lora.layers import LoraAttention, LoraExperts, LowRank, OwnCopy, TokenRows
from peftlab.methods.lora.plan import matching_only, matrices, uncalled_modules
from peftlab.models.architectures import conv1d, embeddings_of, inside, model_type, task_head
from peftlab.models.load import places
from peftlab.patterns import matching

_FACTOR = re.compile(r"\.(lora_A|lora_B)\.weight$")
FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "lora_bias")
_ADDED = (*FACTORS, "token_rows")

_EMBEDDINGS = ("embed_tokens", "lm_head")  # names of modules that peft keeps tied with ensure_weight_tying

# Values of init_lora_weights that leave the base as it is: the factors in the file are the whole update.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_LOST_STARTS = {
    "corda": "CorDA subtracts a part of the base by covariances that are not in the file",
    "loftq": "LoftQ replaces the base by a quantised one that is not in the file",
    "lora_ga": "LoRA-GA subtracts a part of the base by gradients that are not in the file",
}

# Fields that say how peft trains: what they add to the file, which the adapter does not compute with afterwards.
_TRAINING = {"velora_config": ".lora_velora_embed", "monteclora_config": ".lora_monteclora_sampler."}

_CONVERT = (
    "save it with peft's path_initial_model_for_weight_conversion where it was trained, which makes it plain LoRA"
)


def read_peft(
    raw: Mapping[str, object], tensors: Mapping[str, Tensor], path: Path, weights: Path
) -> tuple[LoraConfig, dict[str, Tensor], tuple[str, ...]]:
    """Return a LoRA adapter that peft wrote as ours: its configuration, its tensors by our parameter names, and notes.

    Args:
        raw: its ``adapter_config.json``, which was read from ``path``. tensors: by peft's keys, from ``weights``.

    Raises:
        PeftlabError: another peft type; an active option or a start that this reader does not know; a value of a
            wrong type; a key of an unknown form, or two keys that mean one parameter and differ.
    """
    config, notes = _read_config(raw, path)
    left_out = [".original_module.", *(mark for key, mark in _TRAINING.items() if raw.get(key))]
    kept = {key: tensor for key, tensor in tensors.items() if not any(mark in key for mark in left_out)}
    plain = {_plain_name(key, weights): tensor for key, tensor in kept.items()}
    matrices: set[str] = set()
    named: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        new = _parameter_name(name, plain, config, matrices, weights)
        if new in named and not torch.equal(named[new], tensor):
            raise PeftlabError(f"{weights}: two keys have different values for {new}")
        named[new] = tensor
    fitted = _in_our_terms(config, named, matrices)
    kept_patterns = fitted.rank_pattern.keys() | fitted.alpha_pattern.keys()
    lost = (config.rank_pattern.keys() | config.alpha_pattern.keys()) - kept_patterns
    if lost and fitted.target_modules == config.target_modules:
        notes = (*notes, f"{path}: rank_pattern, alpha_pattern: {', '.join(sorted(lost))} match nothing: left out")
    if config.ensure_weight_tying and (shared := _transposed(named)):
        pairs = ", ".join(shared)
        note = f"{path}: ensure_weight_tying: peft trains the factors of {pairs} as one; here each trains its own"
        notes = (*notes, note)
    by_name = any(name.rpartition(".")[2] in _EMBEDDINGS for name in fitted.modules_to_save or [])
    if not by_name and not _stored_twice(named):
        fitted = fitted.model_copy(update={"ensure_weight_tying": False})
    return fitted, named, notes


def _stored_twice(tensors: Mapping[str, Tensor]) -> bool:
    """Whether an output layer's weight, as peft names it, is equal to another whole one in the file: peft tied them."""
    heads = [name for name in tensors if name.split(".")[-2:-1] == ["lm_head"] and name.endswith(".weight")]
    return any(
        name not in heads and tensor.shape == tensors[head].shape and torch.equal(tensor, tensors[head])
        for head in heads
        for name, tensor in tensors.items()
    )


def _transposed(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return embeddings and output layers whose factors are each other's transposed."""
    embeddings = {name.rpartition(".")[0]: t for name, t in tensors.items() if name.endswith(".lora_embedding_A")}
    others = {name.rpartition(".")[0]: t for name, t in tensors.items() if name.endswith(".lora_B")}
    return [
        f"{embedding} and {other}"
        for embedding, a in embeddings.items()
        for other, b in others.items()
        if a.shape == b.t().shape and torch.equal(a, b.t())
    ]


def _read_config(raw: Mapping[str, object], path: Path) -> tuple[LoraConfig, tuple[str, ...]]:
    """Return the configuration as it is written, and notes."""
    if raw["peft_type"] != "LORA":
        raise PeftlabError(f"{path}: peft_type {raw['peft_type']!r} is not supported; LORA is")
    fields = [key for key in LoraConfig.model_fields if key not in ("name", "loraplus_lr_ratio", "train_head")]
    known = {key: raw[key] for key in fields if key in raw and key not in PEFT_IGNORED}
    passed_over = PEFT_IGNORED | _TRAINING.keys()
    unknown = [key for key, value in raw.items() if key not in known and key not in passed_over and value]
    if unknown and unknown[0] in PEFT_REFUSED:
        raise PeftlabError(f"{path}: {unknown[0]} is not supported: {PEFT_REFUSED[unknown[0]]}")
    if unknown:
        hint = did_you_mean(unknown[0], fields)
        raise PeftlabError(f"{path}: {unknown[0]}={_shown(raw[unknown[0]])} is not supported{hint}")
    start, notes = _read_start(raw.get("init_lora_weights", True), path)
    notes += tuple(
        f"{path}: {key} says how the adapter was trained; it is plain LoRA, and trains on as such"
        for key in _TRAINING
        if raw.get(key)
    )
    absent = {key for key in ("rank_pattern", "alpha_pattern", "ensure_weight_tying") if known.get(key) is None}
    absent |= {
        key
        for key in ("target_modules", "exclude_modules", "target_parameters", "trainable_token_indices")
        if known.get(key) in ([], {}, "")
    }
    values = {key: value for key, value in known.items() if key not in absent}
    for key in ("modules_to_save", "target_parameters"):
        if isinstance(values.get(key), str):
            raise PeftlabError(f"{path}: {key}: {values[key]!r} is not a list of names; peft takes it letter by letter")
    # peft's defaults where they differ from ours.
    values = {"lora_alpha": 8, "ensure_weight_tying": False, "init_lora_weights": start} | values
    if values.get("target_modules") is None and not values.get("target_parameters"):
        values["target_modules"] = QUERY_AND_VALUE
    try:
        return LoraConfig.model_validate(values, strict=True), notes
    except ValidationError as error:
        first = error.errors()[0]
        raise PeftlabError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _read_start(value: object, path: Path) -> tuple[bool | str, tuple[str, ...]]:
    """Return our value of ``init_lora_weights``, which names the part of the base to subtract, if any, and notes."""
    name = value.lower() if isinstance(value, str) else value
    if name == "mica":
        return True, (f"{path}: init_lora_weights=mica: peft trains A alone; here B trains too",)
    if isinstance(name, str | bool | None) and name in _PLAIN_STARTS:
        return True, ()
    if isinstance(name, str) and name in ("olora", "pissa"):
        return name, ()
    if isinstance(name, str) and re.fullmatch(r"pissa_niter_[0-9]{1,9}", name):
        note = (
            f"{path}: init_lora_weights={value} subtracts a part of the base by a randomised SVD, which peft computes "
            f"again, with slightly different results each time; peftlab uses the exact SVD. To be exact, {_CONVERT}"
        )
        return "pissa", (note,)
    if (lost := lost_start(name)) is not None:
        raise PeftlabError(f"{path}: init_lora_weights={_shown(value)}: {lost}; {_CONVERT}")
    known = [*(start for start in _PLAIN_STARTS if isinstance(start, str)), "olora", "pissa", *_LOST_STARTS]
    raise PeftlabError(f"{path}: init_lora_weights={_shown(value)} is not known{did_you_mean(str(name), known)}")


def lost_start(name: object) -> str | None:
    """Return why an adapter with this ``init_lora_weights`` is not all of its update; None where it may be."""
    return next((reason for kind, reason in _LOST_STARTS.items() if str(name).startswith(kind)), None)


def _plain_name(key: str, path: Path) -> str:
    """Return a key without peft's additions; ``base_layer`` is left where experts are nested."""
    if not key.startswith(PREFIX):
        raise PeftlabError(f"{path}: key {key!r} does not start with {PREFIX!r}")
    # The bias of a module within one that is trained whole keeps the adapter's name: modules_to_save.default.dense.bias
    name = re.sub(r"\.modules_to_save\.([^.]+\.(?=[^.]+\.))?", ".", _FACTOR.sub(r".\1", key.removeprefix(PREFIX)))
    name = name.replace(".lora_B.bias", ".lora_bias").replace(".base_layer.out_proj.", ".out_proj.")
    # The whole embedding beside the rows that train, which peft saves where the vocabulary was resized.
    name = name.replace(".token_adapter.base_layer.", ".")
    return name.replace(".base_layer.bias", ".bias").replace(".token_adapter.trainable_tokens_delta", ".token_rows")


def _parameter_name(
    name: str, tensors: Mapping[str, Tensor], config: LoraConfig, matrices: set[str], path: Path
) -> str:
    """Return our name of a parameter; the name of an expert weight's factor includes that weight's.

    peft nests the wrappers of one module's parameters in the order these have in the model. A parameter that is
    the one matrix of a linear map is adapted like any linear map; its module is added to ``matrices``.
    """
    module, _, factor = name.rpartition(".")
    outer = module
    while outer.endswith(".base_layer"):
        outer = outer.removesuffix(".base_layer")
    if factor not in ("lora_A", "lora_B"):
        return name
    targets = [target.rpartition(".") for target in config.target_parameters or []]
    parameters = {last for parent, _, last in targets if parent and has_suffix(outer, parent)}
    if "weight" not in parameters and _experts(outer, config):
        parameters |= {last for parent, _, last in targets if not parent}
    ordered = sorted(parameters, key=lambda last: "down" in last)  # in every experts module "down" comes last
    if not ordered:
        return name
    a = tensors.get(f"{module}.lora_A")
    if ordered == ["weight"] and a is not None and a.shape[:1] == (config.rank(f"{outer}.weight"),):
        matrices.add(outer)
        return name
    depth = module.count(".base_layer")
    if depth >= len(ordered):
        raise PeftlabError(f"{path}: {name} has no parameter in target_parameters")
    return f"{outer}.{ordered[len(ordered) - 1 - depth]}_{factor}"


def _experts(module: str, config: LoraConfig) -> bool:
    """Whether a module with factors is one that target_parameters names by the parameter alone."""
    targets = config.target_modules
    if targets is None:
        return True
    if targets == ALL_LINEAR:
        return has_suffix(module, "experts")
    if isinstance(targets, str):
        return not matching(targets, [module], what="target_modules")
    return not any(has_suffix(module, target) for target in targets)


def _in_our_terms(config: LoraConfig, tensors: Mapping[str, Tensor], matrices: set[str]) -> LoraConfig:
    """Return the configuration in our terms.

    Of the patterns only those that match something are kept. Matrices that target_parameters names, and modules
    that share their adapter with a tied one, become target modules by their full names, with rank and alpha of
    their own; so do all modules where peft chose them itself.
    """
    modules = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in FACTORS}
    # The output projection of an adapted MultiheadAttention goes with it.
    modules -= {f"{module}.out_proj" for module in modules}
    experts = {name.rpartition("_lora_")[0] for name in tensors if re.search(r"_lora_[AB]$", name)}
    adapted = [*modules, *(e for e in experts if e), *(f"{module}.weight" for module in matrices)]
    changes: dict[str, object] = {
        "rank_pattern": _matching_patterns(config.rank_pattern, adapted),
        "alpha_pattern": _matching_patterns(config.alpha_pattern, adapted),
    }
    in_layers = config.layers_to_transform is not None  # whatever peft took for the number of a layer
    if matrices or config.ensure_weight_tying or in_layers or (config.target_modules is None and modules):
        keys = {module: f"{module}.weight" if module in matrices else module for module in sorted(modules)}
        keys |= {name: name for name in sorted(experts) if name}
        changes |= {
            "layers_to_transform": None,
            "layers_pattern": None,
            "target_modules": sorted(modules) or None,
            "target_parameters": sorted(name for name in experts if name) or None,
            **_own_patterns(config, keys),
        }
    return config.model_copy(update=changes)


def _own_patterns(config: LoraConfig, names: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Return ``rank_pattern`` and ``alpha_pattern`` by full names, of modules whose values are not the common ones.

    Args:
        names: each module's new name, and the one by which ``config`` has its rank and alpha.
    """
    return {
        "rank_pattern": {new: config.rank(name) for new, name in names.items() if config.rank(name) != config.r},
        "alpha_pattern": {
            new: config.alpha(name) for new, name in names.items() if config.alpha(name) != config.lora_alpha
        },
    }


def _matching_patterns(patterns: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    names = list(names)
    return {
        pattern: value
        for pattern, value in patterns.items()
        if matching(rf"(.*\.)?({pattern})", names, what="rank_pattern/alpha_pattern")
    }


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def all_names(model: nn.Module) -> set[str]:
    """Return the names of a model's modules, parameters and buffers, all names of what is shared."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name for name, _ in (*model.named_modules(), *tensors)}


def new_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the names in ``model`` of an adapter's tensors that have other ones in its file.

    Renaming is transformers' own for checkpoints: a module has the name that its weight gets, and a whole tensor its
    own. Names that the model has, or that no renaming leads to, are left out.

    Args:
        model: a base model. names: of the adapter's tensors, by our parameter names.
    """
    known = all_names(model)
    weights = {}
    for name in names:
        module, _, last = name.rpartition(".")
        if module not in known and name not in known:
            weights[name] = f"{module}.weight" if last in _ADDED else name
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
            renamed[name] = f"{place.name.rpartition('.')[0]}.{last}" if last in _ADDED else place.name
    return renamed


def _with_new_names(
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
        changes = {"target_modules": sorted(names), "exclude_modules": None, **_own_patterns(config, names)}
    return config.model_copy(update=changes), {renamed.get(name, name): tensor for name, tensor in tensors.items()}


_ADDED_BY_PEFT = ("classifier", "score", "qa_outputs")  # to modules_to_save, by the task type, whatever the model has


def resolve_names(
    model: nn.Module, config: LoraConfig, tensors: Mapping[str, Tensor]
) -> tuple[LoraConfig, dict[str, Tensor], tuple[str, ...]]:
    """Return an adapter as it is in ``model``, a base model: its configuration, its tensors, and notes.

    Names that transformers has changed since are the new ones; names that match nothing are left out. The head trains
    if ``modules_to_save`` names it or the file contains all of it. A matrix in a module that LoRA does not act on, a
    router's for one, is adapted in place of its module.

    Args:
        tensors: by our parameter names.
    """
    config, tensors = _with_new_names(model, config, tensors)
    config, tensors = _matrices(model, _by_full_names(model, config, tensors), tensors)
    config, notes = _head(model, config, set(tensors))
    unused = [name for name in uncalled_modules(model) if f"{name.removesuffix('out_proj')}lora_A" not in tensors]
    # Their factors, that is: the biases train with bias="all".
    without_effect = {key for key in tensors if inside(key, unused) and key.rpartition(".")[2] in FACTORS}
    if uncalled := sorted({key.rpartition(".")[0] for key in without_effect}):
        tensors = {key: tensor for key, tensor in tensors.items() if key not in without_effect}
        reason = "the module above uses its weights and never calls it, so that an addition has no effect"
        notes = (*notes, f"left out {', '.join(uncalled)}: {reason}")
    half = [name for name in uncalled_modules(model) if f"{name}.lora_A" in tensors]
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
    biases = config.bias != "none"  # which the file contains, those of a head too
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


def split_embeddings(
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
    trained, every = adapter_state(model), dict(model.named_parameters(remove_duplicate=False))
    embeddings = _embeddings(model)
    own: dict[str, Tensor] = {}
    saved: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        parameter = every.get(key.replace(".base_layer.", "."))
        name = embeddings.get(id(parameter)) if parameter is not None else None
        if key in trained or parameter is None or (name is None and not _equals(parameter, tensor)):
            own[key] = tensor
        elif name is not None:
            if parameter.shape != tensor.shape:
                raise PeftlabError(
                    f"{source}: {key} has shape {tuple(tensor.shape)}, the model's has {tuple(parameter.shape)}; the "
                    f"adapter was trained with {len(tensor)} tokens: model.resize_token_embeddings({len(tensor)}) first"
                )
            if not torch.equal(saved.setdefault(name, tensor), tensor):
                raise PeftlabError(f"{source}: {name} and {key} are one tied parameter, and their values differ")
    return own, saved


def changed_embeddings(model: nn.Module, saved: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return those of the embeddings in a file that differ from the base model's, and a note on each.

    Args:
        model: with the adapter injected. saved: the embeddings in the file, by parameter name.
    """
    changed: dict[str, Tensor] = {}
    notes = []
    for name, tensor in saved.items():
        parameter = injection_of(model).originals.get(name, model.get_parameter(name).detach())
        if not _equals(parameter, tensor):
            changed[name] = tensor
            differing_rows = (parameter.cpu() != tensor.to(parameter.dtype)).reshape(len(tensor), -1).any(1)
            notes.append(
                f"the adapter contains {name}, and {int(differing_rows.sum())} of its {len(tensor)} rows are not the "
                "base model's: the adapter's values are used"
            )
    return changed, tuple(notes)


def _embeddings(model: nn.Module) -> dict[int, str]:
    """Return the parameters of input and output embeddings, by identity, with the name that comes first."""
    held = {id(p) for layer in embeddings_of(model) if layer is not None for p in layer.parameters()}
    return {id(p): name for name, p in model.named_parameters() if id(p) in held}


def _equals(parameter: Tensor, tensor: Tensor) -> bool:
    if parameter.is_meta or parameter.shape != tensor.shape:
        return False
    return torch.equal(parameter.detach().cpu(), tensor.to(parameter.dtype))


PREFIX = "base_model.model."
_EXPERT = re.compile(r"(.+)_(lora_A|lora_B)")

# Last names of modules that peft treats as the experts' weights (or the router's), by the family of the model's
# conversion, because they were modules before transformers 5.
_TREATED_AS_EXPERTS = {
    "mixtral": ("gate", "w1", "w2", "w3"),
    "qwen2_moe": ("gate", "gate_proj", "up_proj", "down_proj"),
}


def to_peft_key(name: str, model: nn.Module) -> str:
    """Return peft's key of one of our parameters; heads and other plain parameters keep their names.

    ``<module>.lora_A`` becomes ``<module>.lora_A.weight``; weight and bias of an adapted leaf belong to its
    ``base_layer``; of several parameters of one experts module, the last one's factors are outermost and each
    earlier one's a ``base_layer`` deeper.

    Args:
        name: of the parameter. model: with the adapter injected.
    """
    module_name, _, last = name.rpartition(".")
    module = model.get_submodule(module_name)
    expert = _EXPERT.fullmatch(last)
    if expert and isinstance(module, LoraExperts):
        parameters = list(module.adapted)
        depth = len(parameters) - 1 - parameters.index(expert[1])
        return f"{PREFIX}{module_name}{'.base_layer' * depth}.{expert[2]}.weight"
    if _of_attention(model, module_name):
        return f"{PREFIX}{module_name.removesuffix('.out_proj')}.base_layer.out_proj.{last}.weight"
    if last in ("lora_A", "lora_B"):
        return f"{PREFIX}{name}.weight"
    if last == "lora_bias":
        return f"{PREFIX}{module_name}.lora_B.bias"
    if isinstance(module, LowRank) and last in ("weight", "bias"):
        return f"{PREFIX}{module_name}.base_layer.{last}"
    if last == "token_rows":
        return f"{PREFIX}{module_name}.token_adapter.trainable_tokens_delta"
    if isinstance(module, TokenRows) and last == "weight":
        return f"{PREFIX}{module_name}.token_adapter.base_layer.weight"
    if isinstance(module, OwnCopy):
        return f"{PREFIX}{module_name}.{last.removeprefix('own_')}"
    return PREFIX + name


def to_peft_config(model: nn.Module, injection: Injection, reference: str | None) -> dict[str, object]:
    """Return ``adapter_config.json`` for an injected LoRA; defaults are left out where peft allows it.

    In some mixtures of experts peft treats every ``gate_proj`` and the like as expert weights; those that are linear
    maps are named by their matrix, in ``target_parameters``. peft has no dropout there, so none is written. (It has no
    DoRA there either, and refuses such an adapter.)

    Args:
        model: with the adapter injected. injection: of the adapter. reference: of the base model, if known.
    """
    config = injection.config
    assert isinstance(config, LoraConfig)
    low_rank = [name for name in injection.replaced if isinstance(model.get_submodule(name), LowRank)]
    leaves = [name for name in low_rank if not _of_attention(model, name)]
    matrices = [name for name in leaves if name.rpartition(".")[2] in _treated_as_experts(model)]
    matrices = [] if config.use_dora else matrices
    whole, twins = _saved_modules(model, config)
    transposed = any(isinstance(model.get_submodule(name), conv1d()) for name in injection.replaced)
    ranks, alphas = _ranks_and_alphas(model, config, leaves, matrices)
    task, kind = _task_type(model, whole), type(model)
    raw: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": task,
        # By one of the two, peft's ``AutoPeftModel...`` classes know the class of the base model.
        "auto_mapping": None if task else {"base_model_class": kind.__name__, "parent_library": kind.__module__},
        "base_model_name_or_path": reference,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0 if matrices else config.lora_dropout,
        "bias": config.bias,
        "fan_in_fan_out": transposed,
        "target_modules": short_names(model, [name for name in leaves if name not in matrices]),
        "modules_to_save": [end for name in whole for end in _ends(model, name, whole)] or None,
    }
    optional = {
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "lora_bias": config.lora_bias,
        "rank_pattern": ranks | {key: value for key, value in config.rank_pattern.items() if key not in ranks},
        "alpha_pattern": alphas | {key: value for key, value in config.alpha_pattern.items() if key not in alphas},
        "target_parameters": [
            f"{name}.{parameter}"
            for name in injection.replaced
            if isinstance(model.get_submodule(name), LoraExperts)
            for parameter in vars(model.get_submodule(name))["adapted"]
        ]
        + [f"{name}.weight" for name in matrices],
        # peft (0.21) makes a linear map of whatever is tied to the input embedding: encoder-decoder models, which share
        # it between embeddings, would not run. Without the flag peft computes the same, and trains them apart.
        "ensure_weight_tying": twins != []
        and all(name in whole and isinstance(model.get_submodule(name), nn.Linear) for name in twins),
        "trainable_token_indices": config.trainable_token_indices,
    }
    return raw | {key: value for key, value in optional.items() if value}


def adapter_tensors(
    model: nn.Module, injection: Injection, others: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the trained tensors of an injected LoRA, and ``others`` by parameter name, by peft's keys.

    A leaf whose update is B·A − B0·A0 (PiSSA, OLoRA), or acts on parts of its rows, is written as the plain LoRA
    of greater rank that it equals. A tensor that is tied to another one is written under both names, as peft does.
    What is frozen in a module of ``modules_to_save`` is written too: peft expects all of it.

    Args:
        model: with the adapter injected. injection: of the adapter. others: further tensors, by parameter name.
    """
    tensors = {name: parameter.detach() for name, parameter in adapter_state(model).items()}
    tensors |= {**(others or {}), **{name: model.get_parameter(name).detach() for name in injection.frozen}}
    tensors |= {twin: tensors[name] for twin, name in _whole_tied_aliases(model).items()}
    assert isinstance(injection.config, LoraConfig)
    saved, _ = _saved_modules(model, injection.config)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        if inside(name, saved) and name not in tensors and f"{owner}.own_{last}" not in tensors:
            tensors[name] = parameter.detach()
    for name in injection.replaced:
        leaf = model.get_submodule(name)
        if _rank_grew(leaf):
            factors = [factor.detach() for factor in leaf.factors()]
            tensors |= {f"{name}.{kind}": factor for kind, factor in zip(leaf.names, factors, strict=True)}
    return {to_peft_key(name, model): tensor for name, tensor in tensors.items()}


def tied_aliases(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied trained parameters, each with the name that ``adapter_state`` uses."""
    known = {id(parameter): name for name, parameter in adapter_state(model).items()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: known[id(p)] for name, p in every if id(p) in known and known[id(p)] != name}


def _saved_modules(model: nn.Module, config: LoraConfig) -> tuple[list[str], list[str]]:
    """Return the modules of peft's ``modules_to_save``, and the modules that share a trained weight with one of them.

    A single parameter of a head, and a bias that trains by ``bias``, peft finds by its key alone.

    Args:
        model: with the adapter injected. config: of the adapter.
    """
    modules = {name for name, _ in model.named_modules()}
    whole = [name for name in fully_trained(model, config.modules_to_save, head=config.train_head) if name in modules]
    aliases = {
        twin: name
        for twin, name in _whole_tied_aliases(model).items()
        if config.bias == "none" or not has_suffix(twin, "bias")
    }
    within = {t for t, name in aliases.items() if any(inside(t, [one]) and inside(name, [one]) for one in whole)}
    twins = sorted({twin.rpartition(".")[0] for twin in aliases.keys() - within})
    return whole + [name for name in twins if not inside(name, whole)], twins


def _whole_tied_aliases(model: nn.Module) -> dict[str, str]:
    """Return ``tied_aliases`` without the rows of tokens, of which peft writes one copy and ties it by itself."""
    return {twin: name for twin, name in tied_aliases(model).items() if not has_suffix(name, "token_rows")}


def _task_type(model: nn.Module, whole: list[str]) -> str | None:
    """Return peft's name of a decoder's or classifier's task; None for a classifier that leaves out what peft expects.

    Args:
        model: of any class. whole: the modules that train whole.
    """
    if re.search("(ForCausalLM|LMHeadModel)$", type(model).__name__) and hasattr(
        model, "prepare_inputs_for_generation"
    ):
        return "CAUSAL_LM"
    heads = [name for name in ("classifier", "score") if isinstance(getattr(model, name, None), nn.Module)]
    kind = re.search("For(Sequence|Token)Classification$", type(model).__name__)
    if kind is None or not all(inside(name, whole) for name in heads):
        return None
    return "SEQ_CLS" if kind[1] == "Sequence" else "TOKEN_CLS"


def _treated_as_experts(model: nn.Module) -> tuple[str, ...]:
    """Return the last names of modules that peft treats as expert weights in this model."""
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    kind = model_type(model)
    return _TREATED_AS_EXPERTS.get("mixtral" if kind == "mixtral" else _MODEL_TO_CONVERSION_PATTERN.get(kind, ""), ())


def _ranks_and_alphas(
    model: nn.Module, config: LoraConfig, leaves: list[str], matrices: list[str]
) -> tuple[dict[str, int], dict[str, float]]:
    """Return rank and alpha of the leaves for which the configuration's do not hold, by the names peft looks up."""
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name in leaves:
        leaf = model.get_submodule(name)
        key = f"{name}.weight" if name in matrices else name
        rank, alpha = config.rank(name), config.alpha(name)
        if _rank_grew(leaf):
            rank = leaf.factors()[0].shape[0]
            alpha = leaf.scale * (rank**0.5 if config.use_rslora else rank)
        if _rank_grew(leaf) or (key != name and (rank != config.r or config.rank_pattern)):
            ranks[key] = rank
        if _rank_grew(leaf) or (key != name and (alpha != config.lora_alpha or config.alpha_pattern)):
            alphas[key] = alpha
    return ranks, alphas


def _rank_grew(leaf: nn.Module) -> TypeGuard[LowRank]:
    return isinstance(leaf, LowRank) and (leaf.rows is not None or leaf.frozen_A is not None)


def _of_attention(model: nn.Module, name: str) -> bool:
    """Whether a module is the output projection of an adapted ``MultiheadAttention``, which peft names with it."""
    parent, _, last = name.rpartition(".")
    return last == "out_proj" and isinstance(model.get_submodule(parent), LoraAttention)


def _ends(model: nn.Module, name: str, whole: list[str]) -> list[str]:
    """Return what ``modules_to_save`` has to contain for peft to train the module ``name`` and no others.

    peft takes each entry for the end of a name, with or without a dot before it: ``head`` is ``vision.head`` and
    ``lm_head``, too. In place of such a module its children are named, as far as their names end no others.
    """
    module = model.get_submodule(name)
    ambiguous = any(other.endswith(name) and not inside(other, whole) for other, _ in model.named_modules())
    children = [child for child, inner in module.named_children() if any(True for _ in inner.parameters())]
    if not ambiguous or module._parameters or not children:
        return [name]
    return [end for child in children for end in _ends(model, f"{name}.{child}", whole)]


def short_names(model: nn.Module, replaced: list[str]) -> list[str] | str:
    """Return ``target_modules`` that pick exactly ``replaced`` among all modules.

    They are the last components of the names if these do, else the full names; a regular expression where one full
    name is the end of another module's.

    Args:
        model: the base model. replaced: names of the modules with factors.
    """
    modules = [name for name, _ in model.named_modules()]
    for names in (sorted({name.rpartition(".")[2] for name in replaced}), list(replaced)):
        if {name for name in modules if any(has_suffix(name, end) for end in names)} == set(replaced):
            return names
    return "|".join(re.escape(name) for name in replaced)
