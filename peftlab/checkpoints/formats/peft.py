"""Writing peft's adapter format: the configuration of an injected LoRA, and its tensors by peft's keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeGuard

from torch import Tensor, nn

from peftlab.methods.injection import Injection, trainable_parameters
from peftlab.methods.lora.config import LoraConfig
from peftlab.methods.lora.embeddings import OwnCopy, TokenRows
from peftlab.methods.lora.experts import LoraExperts
from peftlab.methods.lora.layers import LoraAttention, LowRank
from peftlab.methods.targets import has_suffix, trained_whole
from peftlab.models.architectures import conv1d, inside, model_type

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
    """
    config = injection.config
    assert isinstance(config, LoraConfig)
    low_rank = [name for name in injection.replaced if isinstance(model.get_submodule(name), LowRank)]
    leaves = [name for name in low_rank if not _of_attention(model, name)]
    matrices = [name for name in leaves if name.rpartition(".")[2] in _treated_as_experts(model)]
    matrices = [] if config.use_dora else matrices
    modules = {name for name, _ in model.named_modules()}
    # peft lists modules there; a single parameter of a head it finds by its key alone.
    whole = [name for name in trained_whole(model, config.modules_to_save, head=config.train_head) if name in modules]
    twins = {name.rpartition(".")[0] for name in _whole_twins(model)}
    whole += sorted(twins - set(whole))
    transposed = any(isinstance(model.get_submodule(name), conv1d()) for name in injection.replaced)
    ranks, alphas = _effective(model, config, leaves, matrices)
    raw: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": _task_type(model, whole),
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
            if _experts(model, name)
            for parameter in vars(model.get_submodule(name))["adapted"]
        ]
        + [f"{name}.weight" for name in matrices],
        # peft (0.21) makes a linear map of whatever is tied to the input embedding: encoder-decoder models, which share
        # it between embeddings, would not run. Without the flag peft computes the same, and trains them apart.
        "ensure_weight_tying": bool(twins) and all(isinstance(model.get_submodule(n), nn.Linear) for n in twins),
        "trainable_token_indices": config.trainable_token_indices,
    }
    return raw | {key: value for key, value in optional.items() if value}


def adapter_tensors(
    model: nn.Module, injection: Injection, others: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the trained tensors of an injected LoRA, and ``others`` by parameter name, by peft's keys.

    A leaf whose update is B·A − B0·A0 (PiSSA, OLoRA), or acts on parts of its rows, is written as the plain LoRA
    of greater rank that it equals. A tensor that is tied to another one is written under both names, as peft does.
    """
    tensors = {name: parameter.detach() for name, parameter in trainable_parameters(model).items()}
    tensors |= {**(others or {}), **{name: model.get_parameter(name).detach() for name in injection.carried}}
    tensors |= {twin: tensors[name] for twin, name in _whole_twins(model).items()}
    for name in injection.replaced:
        leaf = model.get_submodule(name)
        if _rank_grew(leaf):
            factors = [factor.detach() for factor in leaf.factors()]
            tensors |= {f"{name}.{kind}": factor for kind, factor in zip(leaf.names, factors, strict=True)}
    return {to_peft_key(name, model): tensor for name, tensor in tensors.items()}


def tied_twins(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied trained parameters, each with the name that ``trainable_parameters`` uses."""
    known = {id(parameter): name for name, parameter in trainable_parameters(model).items()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: known[id(p)] for name, p in every if id(p) in known and known[id(p)] != name}


def _whole_twins(model: nn.Module) -> dict[str, str]:
    """Return ``tied_twins`` without the rows of tokens, of which peft writes one copy and ties it by itself."""
    return {twin: name for twin, name in tied_twins(model).items() if not has_suffix(name, "token_rows")}


def _task_type(model: nn.Module, whole: list[str]) -> str | None:
    """Return peft's name of a classifier's task, where the model trains what peft then expects in the file."""
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


def _effective(
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


def _experts(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name), LoraExperts)


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
    """
    modules = [name for name, _ in model.named_modules()]
    for names in (sorted({name.rpartition(".")[2] for name in replaced}), list(replaced)):
        if {name for name in modules if any(has_suffix(name, end) for end in names)} == set(replaced):
            return names
    return "|".join(re.escape(name) for name in replaced)
