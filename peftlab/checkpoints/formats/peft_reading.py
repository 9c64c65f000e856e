"""Reading peft's adapter format: its configuration and keys become ours, or an error names what is not supported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from peftlab.checkpoints.formats.peft import PREFIX
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.methods.lora.config import IGNORED, REFUSED, LoraConfig
from peftlab.methods.targets import ALL_LINEAR, has_suffix
from peftlab.patterns import matching

_FACTOR = re.compile(r"\.(lora_A|lora_B)\.weight$")
_ADDED = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "lora_bias")

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


@dataclass(frozen=True)
class PeftAdapter:
    """A LoRA adapter that peft wrote.

    Attributes:
        config: in our terms. tensors: by our parameter names. notes: what its user should know.
    """

    config: LoraConfig
    tensors: dict[str, Tensor]
    notes: tuple[str, ...] = ()


def read_peft(raw: Mapping[str, object], tensors: Mapping[str, Tensor], path: Path, weights: Path) -> PeftAdapter:
    """Return a peft adapter as ours.

    Args:
        raw: its ``adapter_config.json``, which was read from ``path``. tensors: by peft's keys, from ``weights``.

    Raises:
        PeftlabError: another peft type; an active option or a start that this reader does not know; a value of a
            wrong type; a key of an unknown form, or two keys that mean one parameter and differ.
    """
    config, notes = _config(raw, path)
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
    fitted = _fitted(config, named, matrices)
    lost = {**config.rank_pattern, **config.alpha_pattern}.keys() - {
        **fitted.rank_pattern,
        **fitted.alpha_pattern,
    }.keys()
    if lost and fitted.target_modules == config.target_modules:
        notes = (*notes, f"{path}: rank_pattern, alpha_pattern: {', '.join(sorted(lost))} match nothing: left out")
    if config.ensure_weight_tying and (shared := _transposed(named)):
        pairs = ", ".join(shared)
        note = f"{path}: ensure_weight_tying: peft trains the factors of {pairs} as one; here each trains its own"
        notes = (*notes, note)
    if not any(name.rpartition(".")[2] in _EMBEDDINGS for name in fitted.modules_to_save or []):
        fitted = fitted.model_copy(update={"ensure_weight_tying": False})
    return PeftAdapter(fitted, named, notes)


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


def _config(raw: Mapping[str, object], path: Path) -> tuple[LoraConfig, tuple[str, ...]]:
    """Return the configuration as it is written, and notes."""
    if raw["peft_type"] != "LORA":
        raise PeftlabError(f"{path}: peft_type {raw['peft_type']!r} is not supported; LORA is")
    fields = [key for key in LoraConfig.model_fields if key not in ("name", "loraplus_lr_ratio", "train_head")]
    known = {key: raw[key] for key in fields if key in raw and key not in IGNORED}
    passed_over = IGNORED | _TRAINING.keys()
    unknown = [key for key, value in raw.items() if key not in known and key not in passed_over and value]
    if unknown and unknown[0] in REFUSED:
        raise PeftlabError(f"{path}: {unknown[0]} is not supported: {REFUSED[unknown[0]]}")
    if unknown:
        hint = did_you_mean(unknown[0], fields)
        raise PeftlabError(f"{path}: {unknown[0]}={_shown(raw[unknown[0]])} is not supported{hint}")
    start, notes = _start(raw.get("init_lora_weights", True), path)
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
    # peft's defaults where they differ from ours.
    values = {"lora_alpha": 8, "ensure_weight_tying": False, "init_lora_weights": start} | values
    try:
        return LoraConfig.model_validate(values, strict=True), notes
    except ValidationError as error:
        first = error.errors()[0]
        raise PeftlabError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _start(value: object, path: Path) -> tuple[bool | str, tuple[str, ...]]:
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
    lost = next((reason for kind, reason in _LOST_STARTS.items() if str(name).startswith(kind)), None)
    if lost is not None:
        raise PeftlabError(f"{path}: init_lora_weights={_shown(value)}: {lost}; {_CONVERT}")
    known = [*(start for start in _PLAIN_STARTS if isinstance(start, str)), "olora", "pissa", *_LOST_STARTS]
    raise PeftlabError(f"{path}: init_lora_weights={_shown(value)} is not known{did_you_mean(str(name), known)}")


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
    here = {last for parent, _, last in targets if parent and has_suffix(outer, parent)}
    if "weight" not in here and _experts(outer, config):
        here |= {last for parent, _, last in targets if not parent}
    mine = sorted(here, key=lambda last: "down" in last)  # in every experts module "down" comes last
    if not mine:
        return name
    a = tensors.get(f"{module}.lora_A")
    if mine == ["weight"] and a is not None and a.shape[:1] == (config.rank(f"{outer}.weight"),):
        matrices.add(outer)
        return name
    depth = module.count(".base_layer")
    if depth >= len(mine):
        raise PeftlabError(f"{path}: {name} has no parameter in target_parameters")
    return f"{outer}.{mine[len(mine) - 1 - depth]}_{factor}"


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


def _fitted(config: LoraConfig, tensors: Mapping[str, Tensor], matrices: set[str]) -> LoraConfig:
    """Return the configuration in our terms.

    Of the patterns only those that match something are kept. Matrices that target_parameters names, and modules
    that share their adapter with a tied one, become target modules by their full names, with rank and alpha of
    their own; so do all modules where peft chose them itself.
    """
    modules = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in _ADDED}
    # The output projection of an adapted MultiheadAttention goes with it.
    modules -= {f"{module}.out_proj" for module in modules}
    experts = {name.rpartition("_lora_")[0] for name in tensors if re.search(r"_lora_[AB]$", name)}
    adapted = [*modules, *(e for e in experts if e), *(f"{module}.weight" for module in matrices)]
    changes: dict[str, object] = {
        "rank_pattern": _matched(config.rank_pattern, adapted),
        "alpha_pattern": _matched(config.alpha_pattern, adapted),
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
            "rank_pattern": {name: config.rank(key) for name, key in keys.items() if config.rank(key) != config.r},
            "alpha_pattern": {
                name: config.alpha(key) for name, key in keys.items() if config.alpha(key) != config.lora_alpha
            },
        }
    return config.model_copy(update=changes)


def _matched(patterns: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    names = list(names)
    return {
        pattern: value
        for pattern, value in patterns.items()
        if matching(rf"(.*\.)?({pattern})", names, what="rank_pattern/alpha_pattern")
    }


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
