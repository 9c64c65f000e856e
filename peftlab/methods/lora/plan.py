"""LoRA (Hu et al. 2021, arXiv 2106.09685): h = W0·x + (α/r)·B·A·x with W0 frozen."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from peftlab.errors import PeftlabError
from peftlab.methods.leaf import adapted_class, recast, trainable_dtype
from peftlab.methods.lora.config import LoraConfig
from peftlab.methods.lora.embeddings import shared_outside, token_targets, with_own_copy
from peftlab.methods.lora.experts import adapt_experts
from peftlab.methods.lora.layers import CONVOLUTIONS, adaptable, leaf_kind, never_called, reason_against
from peftlab.methods.targets import (
    ALL_LINEAR,
    Plan,
    default_targets,
    fully_trained,
    fused_parts,
    has_suffix,
    in_layers,
    match,
    parameters_under,
)
from peftlab.models.architectures import conv1d, inside
from peftlab.models.quantised import is_quantised, weight_shape
from peftlab.patterns import matching
from peftlab.untyped import Attributes

MOST_RANK = 1 << 16  # far above any side where a low rank makes sense: factors of more could fill the memory

# Why an adapter of another tool that starts from the base (``LoraConfig.start``) means nothing without it.
NEEDS_BASE = (
    "its update is what its factors differ by from those that the base's weights give; peftlab.load_adapter into the "
    "base and peftlab.save_adapter make it a plain LoRA"
)


def lr_ratio(config: LoraConfig) -> dict[str, float]:
    """Return LoRA+'s learning-rate multiple of B (arXiv 2402.12354), by parameter name."""
    ratio = config.loraplus_lr_ratio
    return {"lora_B": ratio, "lora_embedding_B": ratio} if ratio is not None else {}


def plan(model: nn.Module, config: LoraConfig) -> Plan:
    """Decide which leaves get a low-rank addition and which parameters train beside it."""
    whole = fully_trained(model, config.modules_to_save, head=config.train_head)
    leaves = adaptable(model)
    body = [name for name in leaves if not inside(name, whole)]
    if config.target_modules == ALL_LINEAR and not config.target_parameters:
        _note_other_weights(model)
    parts = _targets(model, config, body)
    experts = _expert_targets(model, config)
    copied = {} if config.ensure_weight_tying else shared_outside(model, whole)
    adapted = [*parts, *(f"{module}.{name}" for module, names in experts.items() for name in names)]
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        match(adapted, rf"(.*\.)?({pattern})", what="rank_pattern/alpha_pattern")
    replace: dict[str, Callable[[nn.Module], nn.Module]] = {}
    for name, rows in parts.items():
        rank = _rank(config, name)
        _check(leaves[name], name, rank, rows, config)
        scale = config.scale(name)
        replace[name] = partial(_adapt, rank=rank, scale=scale, rows=rows, config=config)
        if isinstance(leaves[name], nn.MultiheadAttention):
            # peft (0.21) adds the update of the output projection twice, in the forward and in a merge.
            replace[f"{name}.out_proj"] = partial(_adapt, rank=rank, scale=2 * scale, rows=None, config=config)
    for module, names in experts.items():
        ranks = {name: _rank(config, f"{module}.{name}") for name in names}
        scales = {name: config.scale(f"{module}.{name}") for name in names}
        replace[module] = partial(
            adapt_experts, ranks=ranks, scales=scales, init=partial(_fill_a, config=config, rank=config.r)
        )
    replace |= {name: partial(with_own_copy, shared=shared) for name, shared in copied.items()}
    tokens = token_targets(model, config) if config.trainable_token_indices else {}
    twice = next((name for name in tokens if name in replace or inside(name, whole)), None)
    if twice:
        raise PeftlabError(
            f"trainable_token_indices: {twice} is adapted or trained whole too, by target_modules or modules_to_save; "
            "name it in one of them"
        )
    replace |= tokens
    in_place = parameters_under(model, [name for name in whole if name not in copied])
    own = {f"{leaf}.{name}" for leaf, names in copied.items() for name in names}
    return Plan(replace, [n for n in in_place if n not in own] + _biases(model, config, list(parts), whole))


def _note_other_weights(model: nn.Module) -> None:
    """Warn of experts' and routers' weights, which are in no linear map, so that ``all-linear`` leaves them out."""
    routers = (".gate.weight", ".router.weight")
    # A class token or positions (1, n, width) are no experts.
    names = [n for n, p in _outside_leaves(model) if (p.ndim == 3 and len(p) > 1) or n.endswith(routers)]
    ends = sorted({".".join(name.split(".")[-2:]) for name in names})
    if ends:
        warnings.warn(
            f"target_modules: all-linear means linear maps, and {', '.join(ends)} are in none: they stay as they are; "
            "target_parameters names those to adapt (peft takes some of them with all-linear)",
            stacklevel=2,
        )


def matching_only(model: nn.Module, config: LoraConfig) -> tuple[LoraConfig, dict[str, list[str]]]:
    """Return ``config`` without the names that match nothing in ``model``, and those names by field.

    ``target_modules`` stays as it is if nothing that it names is there, and nothing else is named.
    """
    lost: dict[str, list[str]] = {}

    def without(field: str, among: list[str]) -> LoraConfig:
        wanted = getattr(config, field)
        found: list[str] | str | None = None
        if isinstance(wanted, str):
            found = wanted if matching(wanted, among, what=field) else None
        else:
            found = [name for name in wanted or [] if any(has_suffix(other, name) for other in among)] or None
        if found == wanted or (field == "target_modules" and not found and not config.target_parameters):
            return config
        lost[field] = [wanted] if isinstance(wanted, str) else [name for name in wanted if name not in (found or [])]
        return config.model_copy(update={field: found})

    config = without("modules_to_save", [name for name, _ in model.named_modules() if name])
    config = without("target_parameters", _parameters(model))
    whole = fully_trained(model, config.modules_to_save, head=config.train_head)
    body = [name for name in adaptable(model) if not inside(name, whole)]
    if config.target_modules != ALL_LINEAR:  # what names another kind of module stays, and is refused with its reason
        without_effect = [*whole, *never_called(model)]
        others = [name for name, _ in model.named_modules() if name and not inside(name, without_effect)]
        config = without("target_modules", [*others, *fused_parts(model, body)])
    if config.exclude_modules:
        config = without("exclude_modules", _chosen(model, config, body))
    return config, lost


def _biases(model: nn.Module, config: LoraConfig, targets: list[str], whole: list[str]) -> list[str]:
    if config.bias == "none":
        return []
    biases = [name for name, _ in model.named_parameters() if has_suffix(name, "bias") and not inside(name, whole)]
    if config.bias == "lora_only":
        owners = {f"{name}.bias" for name in targets}
        biases = [name for name in biases if name in owners]
    return biases


def _targets(model: nn.Module, config: LoraConfig, body: list[str]) -> dict[str, list[Tensor] | None]:
    """Return the leaves to adapt: all of a leaf (None), or the output rows of the parts that were named."""
    parts = fused_parts(model, body)
    names = _chosen(model, config, body)
    if config.exclude_modules:
        excluded = set(match(names, config.exclude_modules, what="exclude_modules"))
        names = [name for name in names if name not in excluded]
    names += [name for name in _named_by_weight(model, config, body) if name not in names]
    names = in_layers(names, config.layers_to_transform, config.layers_pattern)
    if not names and not config.target_parameters:
        narrowing = "exclude_modules" if config.exclude_modules else "layers_to_transform"
        raise PeftlabError(f"target_modules: nothing is left to train after {narrowing}")
    chosen_parts: dict[str, list[Tensor] | None] = {name: None for name in names if name not in parts}
    for name in names:
        if name in parts:
            leaf = name.rpartition(".")[0]
            rows = chosen_parts.setdefault(leaf, [])
            if rows is None:
                raise PeftlabError(f"target_modules: {leaf} is named as a whole and by its part {name}")
            rows.append(parts[name])
    return chosen_parts


def _chosen(model: nn.Module, config: LoraConfig, body: list[str]) -> list[str]:
    """Return the leaves, and parts of leaves, that ``target_modules`` names, before any are excluded."""
    chosen = config.target_modules
    if chosen is None and config.target_parameters:
        return []
    if chosen is not None and chosen != ALL_LINEAR:
        parts = fused_parts(model, body)
        names = _explicit(model, chosen, [*body, *parts])
        # An expression that matches a whole leaf means the leaf, and not its parts too.
        whole = {name for name in names if name not in parts} if isinstance(chosen, str) else set()
        return [name for name in names if not (name in parts and name.rpartition(".")[0] in whole)]
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [n for n in body if isinstance(model.get_submodule(n), (nn.Linear, *conv1d()))]
    linear = [name for name in linear if model.get_submodule(name) is not outputs]
    names = default_targets(model, linear) if chosen is None else linear
    if not names:
        raise PeftlabError(
            f"target_modules: {type(model).__name__} has no nn.Linear or Conv1D outside its output layer and "
            "task head; name target_modules"
        )
    return names


def _explicit(model: nn.Module, chosen: list[str] | str, names: list[str]) -> list[str]:
    try:
        return match(names, chosen)
    except PeftlabError:
        # Say what it is, where the name exists but is no leaf that LoRA can act on.
        for target in [chosen] if isinstance(chosen, str) else chosen:
            for name, module in model.named_modules():
                if has_suffix(name, target) and not any(has_suffix(leaf, target) for leaf in names):
                    raise PeftlabError(
                        f"target_modules: {target!r} is a {type(module).__name__} ({name}); "
                        f"{reason_against(model, name)}"
                    ) from None
        raise


def _expert_targets(model: nn.Module, config: LoraConfig) -> dict[str, list[str]]:
    """Return the parameters to adapt by the module that holds them."""
    if not config.target_parameters:
        return {}
    here, lines = _parameters(model), [f"{name}.weight" for name in _linear(model, adaptable(model))]
    named = [n for n in match([*here, *lines], config.target_parameters, what="target_parameters") if n in set(here)]
    found: dict[str, list[str]] = {}
    for name in in_layers(named, config.layers_to_transform, config.layers_pattern):
        module, _, parameter = name.rpartition(".")
        found.setdefault(module, []).append(parameter)
    if config.lora_dropout or config.use_dora:
        raise PeftlabError("target_parameters: expert weights take neither lora_dropout nor use_dora")
    if config.start:
        raise PeftlabError(f"target_parameters: expert weights take no init_lora_weights={config.start}")
    return found


def _named_by_weight(model: nn.Module, config: LoraConfig, body: list[str]) -> list[str]:
    """Return the linear maps whose weights ``target_parameters`` names: they are adapted like any linear map."""
    wanted = config.target_parameters or []
    return [n for n in _linear(model, body) if any(has_suffix(f"{n}.weight", parameter) for parameter in wanted)]


def _linear(model: nn.Module, names: Iterable[str]) -> list[str]:
    return [name for name in names if isinstance(model.get_submodule(name), nn.Linear)]


def _parameters(model: nn.Module) -> list[str]:
    """Return the experts' weights and the matrices that are in no leaf: what ``target_parameters`` can name."""
    return [name for name, parameter in _outside_leaves(model) if parameter.ndim in (2, 3)]


def matrices(model: nn.Module) -> set[str]:
    """Return the names of the matrices that are in no leaf."""
    return {name for name, parameter in _outside_leaves(model) if parameter.ndim == 2}


def _outside_leaves(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters whose module is no leaf, in the model's order; a shared one belongs to its first module."""
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        own = {f"{prefix}{n}": p for n, p in module._parameters.items() if p is not None and id(p) not in seen}
        seen |= {id(parameter) for parameter in own.values()}
        if own and leaf_kind(module) is None:
            yield from own.items()


def _rank(config: LoraConfig, name: str) -> int:
    rank = config.rank(name)
    if rank > MOST_RANK:
        raise PeftlabError(f"r={rank} of {name} is larger than {MOST_RANK}")
    return rank


def _check(leaf: nn.Module, name: str, rank: int, rows: list[Tensor] | None, config: LoraConfig) -> None:
    if isinstance(leaf, nn.MultiheadAttention) and (config.use_dora or config.lora_bias):
        raise PeftlabError(f"target_modules: {name} is a MultiheadAttention, which has neither use_dora nor lora_bias")
    matrix = str(getattr(leaf_kind(leaf), "matrix", "weight"))
    weight, shape = getattr(leaf, matrix), weight_shape(leaf, matrix)
    limit = min(shape[0], math.prod(shape[1:]))
    if config.start and is_quantised(leaf):
        raise PeftlabError(
            f"init_lora_weights={config.start}: {name} is stored in 4 or 8 bits, and the start needs the full weight"
        )
    if config.start and rank > limit:
        raise PeftlabError(
            f"init_lora_weights={config.start}: r={rank} is larger than the smaller side ({limit}) of {name}"
        )
    if config.start and rows is not None:
        raise PeftlabError(f"init_lora_weights={config.init_lora_weights}: name {name} as a whole, not by its parts")
    if config.start and not isinstance(leaf, (nn.Linear, *conv1d(), nn.Embedding)):
        raise PeftlabError(
            f"init_lora_weights={config.init_lora_weights}: {name} is a {type(leaf).__name__}, not linear"
        )
    if isinstance(leaf, CONVOLUTIONS):
        if rank % leaf.groups:
            raise PeftlabError(f"r={rank}: {name} is a convolution of {leaf.groups} groups, which must divide r")
        if leaf.padding_mode != "zeros" or (isinstance(leaf.padding, str) and set(leaf.dilation) != {1}):
            raise PeftlabError(
                f"target_modules: {name} pads with other values than zeros, or by {leaf.padding!r} and dilation; peft, "
                "whose format an adapter has, would compute another update there"
            )
    if config.lora_bias and (config.use_dora or config.start or rows is not None or isinstance(leaf, nn.Embedding)):
        raise PeftlabError(
            f"lora_bias: at {name}; it goes neither with embeddings nor with parts of a fused projection, use_dora, "
            "pissa or olora"
        )
    if config.use_dora and type(weight.data) is not Tensor:
        raise PeftlabError(f"use_dora: {name} holds a quantised weight, whose norms DoRA would need")


def _adapt(leaf: nn.Module, *, rank: int, scale: float, rows: list[Tensor] | None, config: LoraConfig) -> nn.Module:
    kind = leaf_kind(leaf)
    assert kind is not None
    new = recast(adapted_class(kind, type(leaf)), leaf)
    weight = getattr(leaf, kind.matrix)
    like: Attributes = {"device": weight.device, "dtype": trainable_dtype(weight)}
    parts, groups = len(rows) if rows is not None else 1, getattr(leaf, "groups", 1)
    shape = tuple(weight_shape(leaf, kind.matrix))
    out_in = shape[1::-1] if kind.transposed else shape
    out_in = (out_in[0], out_in[1] * groups, *out_in[2:])
    a = torch.empty(rank * parts, *out_in[1:], **like)
    d_out = sum(len(part) for part in rows) if rows is not None else out_in[0]
    b = torch.zeros(d_out, rank // groups, *([1] * (len(out_in) - 2)), **like)
    new.scale, new.lora_dropout = scale, config.lora_dropout
    new.sizes = tuple(len(part) for part in rows) if rows is not None else ()
    for name in ("rows", "frozen_A", "frozen_B"):
        new.register_buffer(name, None, persistent=False)
    if rows is not None:
        new.rows = torch.cat(rows).to(weight.device)
    if isinstance(leaf, nn.Embedding):
        nn.init.zeros_(a)
        nn.init.normal_(b)
    else:
        _fill_a(a, config, rank)
    for name, factor in zip(kind.names, (a, b), strict=True):
        new.register_parameter(name, nn.Parameter(factor))
    new.start = config.start if isinstance(leaf, (nn.Linear, *conv1d())) else None
    if new.start is not None:
        new.update_start()
        assert new.frozen_A is not None and new.frozen_B is not None
        new.lora_A.data, new.lora_B.data = new.frozen_A.clone(), new.frozen_B.clone()
    new.register_parameter("lora_magnitude_vector", None)
    new.register_parameter("lora_bias", nn.Parameter(torch.zeros(d_out, **like)) if config.lora_bias else None)
    if config.use_dora:
        shape = (1, -1, *[1] * (weight.ndim - 2)) if weight.ndim > 2 else (-1,)  # peft's
        new.lora_magnitude_vector = nn.Parameter(new.norms().to(**like).view(shape))
    return new


def _fill_a(a: Tensor, config: LoraConfig, rank: int) -> None:
    if config.init_lora_weights == "gaussian":
        nn.init.normal_(a, std=1 / rank)
    else:
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
