"""LoRA (Hu et al. 2021, arXiv 2106.09685): h = W0·x + (α/r)·B·A·x with W0 frozen.

The plan: which modules the method acts on, and the leaves that it puts there.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from peftlab.errors import PeftlabError
from peftlab.methods.base import (
    Plan,
    adapted_class,
    fully_trained,
    has_suffix,
    layer_index,
    match,
    nearest_modules,
    parameters_under,
    recast,
    trainable_dtype,
)
from peftlab.methods.config import ALL_LINEAR, QUERY_AND_VALUE, LoraConfig
from peftlab.methods.lora.layers import (
    LowRank,
    TokenRows,
    adapt_experts,
    has_own_forward,
    leaves,
    with_unshared_parameters,
)
from peftlab.models.architectures import (
    CALLED_WITHOUT_KERNELS,
    FUSED,
    QUERY_VALUE,
    UNCALLED,
    conv1d,
    embeddings_of,
    generates_text,
    inside,
    language_part,
    model_type,
)
from peftlab.models.quantised import is_quantised, weight_shape
from peftlab.patterns import matching
from peftlab.untyped import Attributes

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
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
    modules = adaptable(model)
    body = [name for name in modules if not inside(name, whole)]
    if _target_modules(model, config) == ALL_LINEAR and not config.target_parameters:
        _note_other_weights(model)
    parts = _targets(model, config, body)
    experts = _expert_targets(model, config, parts)
    copied = {} if config.ensure_weight_tying else leaves_shared_elsewhere(model, whole)
    adapted = [*parts, *(f"{module}.{name}" for module, names in experts.items() for name in names)]
    for key, patterns in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for pattern in patterns:
            if not matching(rf"(.*\.)?({pattern})", adapted, what=key):
                raise PeftlabError(f"{key}: {pattern!r} matches no adapted module{nearest_modules(pattern, adapted)}")
    replace: dict[str, Callable[[nn.Module], nn.Module]] = {}
    for name, rows in parts.items():
        rank = _rank(config, name)
        _check(modules[name], name, rank, rows, config)
        scale = config.scale(name)
        replace[name] = partial(_adapt, rank=rank, scale=scale, rows=rows, config=config)
        if isinstance(modules[name], nn.MultiheadAttention):
            # peft (0.21) adds the update of the output projection twice, in the forward and in a merge.
            replace[f"{name}.out_proj"] = partial(_adapt, rank=rank, scale=2 * scale, rows=None, config=config)
    for module, names in experts.items():
        ranks = {name: _rank(config, f"{module}.{name}") for name in names}
        scales = {name: config.scale(f"{module}.{name}") for name in names}
        replace[module] = partial(
            adapt_experts, ranks=ranks, scales=scales, init=lambda a, rank: _fill_a(a, config, rank)
        )
    replace |= {name: partial(with_unshared_parameters, shared=shared) for name, shared in copied.items()}
    tokens = token_targets(model, config) if config.trainable_token_indices else {}
    twice = next((name for name in tokens if name in replace or inside(name, whole)), None)
    if twice:
        raise PeftlabError(
            f"trainable_token_indices: {twice} is adapted or trained whole too, by target_modules or modules_to_save; "
            "name it in one of them"
        )
    replace |= tokens
    # A module whose parameters are all copied has none to train in place; another one has its bias, say.
    rest = [n for n in whole if n not in copied or len(list(model.get_submodule(n).parameters())) > len(copied[n])]
    in_place = parameters_under(model, rest)
    own = {f"{leaf}.{name}" for leaf, names in copied.items() for name in names}
    in_place = [name for name in in_place if name not in own]
    _refuse_trained_weights(model, parts, in_place)
    return Plan(replace, in_place + _biases(model, config, list(parts), whole))


def _refuse_trained_weights(model: nn.Module, leaves: Iterable[str], in_place: Iterable[str]) -> None:
    """Refuse a low-rank addition to a weight that trains itself, under another name: only its own use would train."""
    trained = {id(model.get_parameter(name)): name for name in in_place}
    for leaf in leaves:
        for parameter in model.get_submodule(leaf).parameters(recurse=False):
            if (name := trained.get(id(parameter))) is not None:
                raise PeftlabError(
                    f"target_modules: {leaf} shares its weight with {name}, which trains whole (modules_to_save); name "
                    "one of the two, or set ensure_weight_tying: false"
                )


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


def _targets(model: nn.Module, config: LoraConfig, body: list[str]) -> dict[str, list[Tensor] | None]:
    """Return the leaves to adapt: all of a leaf (None), or the output rows of the parts that were named."""
    parts = fused_parts(model, body)
    names = _chosen(model, config, body)
    if config.exclude_modules:
        excluded = set(match(names, config.exclude_modules, what="exclude_modules"))
        names = [name for name in names if name not in excluded]
    names += [name for name in _named_by_weight(model, config, body) if name not in names]
    names = in_layers(names, config.layers_to_transform, config.layers_pattern, _expert_names(model, config))
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


def _target_modules(model: nn.Module, config: LoraConfig) -> list[str] | str | None:
    """Return ``target_modules``, by default the word for what such a model gets; None: ``target_parameters`` alone."""
    if config.target_modules is not None or config.target_parameters:
        return config.target_modules
    return ALL_LINEAR if generates_text(model) else QUERY_AND_VALUE


def _chosen(model: nn.Module, config: LoraConfig, body: list[str]) -> list[str]:
    """Return the leaves, and parts of leaves, that ``target_modules`` names, before any are excluded."""
    chosen = _target_modules(model, config)
    if chosen is None:
        return []
    if chosen not in (ALL_LINEAR, QUERY_AND_VALUE):
        parts = fused_parts(model, body)
        names = _explicit(model, chosen, [*body, *parts])
        # An expression that matches a whole leaf means the leaf, and not its parts too.
        whole = {name for name in names if name not in parts} if isinstance(chosen, str) else set()
        return [name for name in names if not (name in parts and name.rpartition(".")[0] in whole)]
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [n for n in body if isinstance(model.get_submodule(n), (nn.Linear, *conv1d()))]
    by_name = CALLED_WITHOUT_KERNELS.get(model_type(model), ())
    linear = [n for n in linear if model.get_submodule(n) is not outputs and n.rpartition(".")[2] not in by_name]
    if config.target_modules is None and (language := language_part(model)):  # its images are seen as they were
        linear = [name for name in linear if inside(name, [language])]
    names = query_and_value(model, linear) if chosen == QUERY_AND_VALUE else linear
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
                        f"{why_not_adaptable(model, name)}"
                    ) from None
        raise


def query_and_value(model: nn.Module, linear: list[str]) -> list[str]:
    """Return the linear maps of the attention's query and value: those of the table's row, or of the fallback.

    Fallback for an architecture that has no row: the linear maps whose last name occurs in the table (``q_proj``,
    ``query``, ...); if there are none, all of ``linear``.

    Args:
        linear: names of the linear maps outside the task head and the output layer.

    Raises:
        PeftlabError: a module that the row names is no linear map LoRA knows, but another kind.
    """
    row = QUERY_VALUE.get(model_type(model), ())
    missing = [target for target in row if not any(has_suffix(name, target) for name in linear)]
    for name, module in model.named_modules():
        if any(has_suffix(name, target) for target in missing):
            raise PeftlabError(
                f"target_modules: {name}, the query or value projection of {model_type(model)}, is a "
                f"{type(module).__name__} of {type(module).__module__.partition('.')[0]}, not an nn.Linear; "
                "name other modules"
            )
    if row and not missing:
        return match(linear, list(row))
    known = {target for targets in QUERY_VALUE.values() for target in targets if "." not in target}
    return [name for name in linear if name.rpartition(".")[2] in known] or linear


def fused_parts(model: nn.Module, modules: Iterable[str]) -> dict[str, Tensor]:
    """Return the parts of a model's fused projections: ``<leaf>.<part>`` to the output rows it has.

    So ``target_modules=["c_attn.q", "c_attn.v"]`` acts on GPT-2's query and value alone.

    Args:
        model: whose configuration says how wide each part is. modules: names of its linear maps.
    """
    config = getattr(model, "config", None)
    parts: dict[str, Tensor] = {}
    for suffix, split in FUSED.get(model_type(model), {}).items():
        for name in modules:
            if has_suffix(name, suffix):
                parts |= {f"{name}.{part}": rows for part, rows in split(config).items()}
    return parts


def in_layers(
    names: Iterable[str],
    layers: list[int] | int | None,
    pattern: list[str] | str | None = None,
    others: Iterable[str] = (),
) -> list[str]:
    """Return those of ``names`` in the given layers; a layer that does not exist is an error.

    Args:
        names: of modules or parameters. layers: numbers of layers; None: all.
        pattern: names or regular expressions of the list that the numbers count (``layers_pattern``); None: the first.
        others: further names, in whose layers a number may be, too.
    """
    if layers is None:
        return list(names)
    patterns = [pattern] if isinstance(pattern, str) else pattern or []
    numbers = {name: layer_index(name, patterns) for name in names}
    wanted = [layers] if isinstance(layers, int) else list(layers)
    elsewhere = (layer_index(name, patterns) for name in others)
    present = sorted({number for number in (*numbers.values(), *elsewhere) if number is not None})
    missing = [number for number in wanted if number not in present]
    if missing:
        raise PeftlabError(f"layers_to_transform: no layer {missing[0]}; there are {present[0]} to {present[-1]}"
                           if present else "layers_to_transform: the targets are in no numbered layer")  # fmt: skip
    return [name for name, number in numbers.items() if number in wanted]


def _expert_names(model: nn.Module, config: LoraConfig) -> list[str]:
    """Return the parameters outside of linear maps that ``target_parameters`` names."""
    if not config.target_parameters:
        return []
    outside, linear = _parameters(model), [f"{name}.weight" for name in _linear(model, adaptable(model))]
    named = match([*outside, *linear], config.target_parameters, what="target_parameters")
    return [name for name in named if name in set(outside)]


def _expert_targets(model: nn.Module, config: LoraConfig, modules: Iterable[str]) -> dict[str, list[str]]:
    """Return the parameters to adapt by the module that holds them; ``modules``: adapted, in whose layers as well."""
    named = _expert_names(model, config)
    if not named:
        return {}
    found: dict[str, list[str]] = {}
    for name in in_layers(named, config.layers_to_transform, config.layers_pattern, modules):
        module, _, parameter = name.rpartition(".")
        found.setdefault(module, []).append(parameter)
    if config.lora_dropout or config.use_dora:
        raise PeftlabError("target_parameters: expert weights take neither lora_dropout nor use_dora")
    if config.start:
        raise PeftlabError(f"target_parameters: expert weights take no init_lora_weights={config.start}")
    return found


def _named_by_weight(model: nn.Module, config: LoraConfig, body: list[str]) -> list[str]:
    """Return the linear maps whose weights ``target_parameters`` names: they are adapted like any linear map."""
    wanted = config.target_parameters
    if not wanted:
        return []
    return [n for n in _linear(model, body) if any(has_suffix(f"{n}.weight", parameter) for parameter in wanted)]


def _linear(model: nn.Module, names: Iterable[str]) -> list[str]:
    modules = dict(model.named_modules())
    return [name for name in names if isinstance(modules[name], nn.Linear)]


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


def _biases(model: nn.Module, config: LoraConfig, targets: list[str], whole: list[str]) -> list[str]:
    if config.bias == "none":
        return []
    biases = [name for name, _ in model.named_parameters() if has_suffix(name, "bias") and not inside(name, whole)]
    if config.bias == "lora_only":
        owners = {f"{name}.bias" for name in targets}
        biases = [name for name in biases if name in owners]
    return biases


def token_targets(model: nn.Module, config: LoraConfig) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Return the leaves whose tokens' rows train, with the functions that make them.

    As in peft, a list of tokens belongs to the input embedding, and modules that share the input embedding's weight
    train the same rows, unless several of them are named with different tokens. So do modules that share it by the
    configuration alone, where the checkpoint has a matrix of its own for each.

    Args:
        model: before injection. config: with ``trainable_token_indices``.

    Raises:
        PeftlabError: a name that matches nothing, or not one embedding or linear map; a token out of range.
    """
    wanted = config.trainable_token_indices
    assert wanted
    named = {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding | nn.Linear) and leaf_kind(m)}
    inputs, _ = embeddings_of(model)
    embedding = next((name for name, leaf in named.items() if leaf is inputs), None)
    if not isinstance(wanted, dict):
        if embedding is None:
            raise PeftlabError(
                f"trainable_token_indices: {type(model).__name__} names no input embedding; write {{module: tokens}}"
            )
        wanted = {embedding: wanted}
    tokens = {
        name: tuple(numbers)
        for target, numbers in wanted.items()
        for name in match(named, [target], what="trainable_token_indices")
    }
    for name, numbers in tokens.items():
        weight = named[name].weight
        wrong = next((token for token in numbers if not 0 <= token < len(weight)), None)
        if wrong is not None:
            raise PeftlabError(
                f"trainable_token_indices: {name} has {len(weight)} tokens, none with the number {wrong}"
            )
        if len(set(numbers)) < len(numbers):
            raise PeftlabError(f"trainable_token_indices: a token occurs twice for {name}")
        if type(weight.data) is not Tensor:
            raise PeftlabError(f"trainable_token_indices: {name} holds a quantised weight")
    if embedding not in tokens:
        return {name: partial(_with_rows, rows=_Rows(numbers)) for name, numbers in tokens.items()}
    shares = _tied_by_configuration(model, f"{embedding}.weight")
    tied = {
        name: tokens[embedding]
        for name, leaf in named.items()
        if leaf.weight is named[embedding].weight or f"{name}.weight" in shares
    }
    if any(tokens[name] != numbers for name, numbers in tied.items() if name in tokens):
        tied = {}
    shared = _Rows(tokens[embedding])
    return {
        name: partial(_with_rows, rows=shared if name in tied else _Rows(numbers))
        for name, numbers in (tokens | tied).items()
    }


def _tied_by_configuration(model: nn.Module, weight: str) -> set[str]:
    """Return the weights that the model's configuration ties to an embedding's, itself among them."""
    expanded = getattr(model, "get_expanded_tied_weights_keys", None)
    pairs: dict[str, str] = expanded(all_submodels=True) if expanded is not None else {}
    origin = pairs.get(weight, weight)
    return {origin, *(twin for twin, other in pairs.items() if other == origin)}


def leaves_shared_elsewhere(model: nn.Module, modules: Iterable[str]) -> dict[str, list[str]]:
    """Return the leaves below ``modules`` that hold parameters of modules elsewhere, with the names of those.

    Args:
        model: before injection. modules: names of modules that train whole.
    """
    every = dict(model.named_modules())
    users: dict[int, list[str]] = defaultdict(list)
    for name, module in every.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)].append(name)
    found: dict[str, list[str]] = {}
    for container in modules:
        if container not in every:  # a parameter of a head, not a module
            continue
        for name, leaf in every[container].named_modules(prefix=container):
            keys = [
                key
                for key, parameter in leaf._parameters.items()
                if parameter is not None and not all(inside(user, [container]) for user in users[id(parameter)])
            ]
            if keys:
                found[name] = keys
    return found


def matching_only(model: nn.Module, config: LoraConfig) -> tuple[LoraConfig, dict[str, list[str]]]:
    """Return ``config`` without the names that match nothing in ``model``, and those names by field.

    ``target_modules`` stays as it is if nothing that it names is there, and nothing else is named.

    Args:
        model: before injection. config: as an adapter of another model or version states it.
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
    if config.target_modules not in (
        ALL_LINEAR,
        QUERY_AND_VALUE,
    ):  # what names another kind of module stays, and is refused with its reason
        without_effect = [*whole, *uncalled_modules(model)]
        others = [name for name, _ in model.named_modules() if name and not inside(name, without_effect)]
        config = without("target_modules", [*others, *fused_parts(model, body)])
    if config.exclude_modules:
        config = without("exclude_modules", _chosen(model, config, body))
    return config, lost


def adaptable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the leaves that LoRA can act on, by name."""
    passed_over = [*uncalled_modules(model), *_fast_path_parts(model)]
    return {
        name: module
        for name, module in model.named_modules()
        if leaf_kind(module) is not None and not inside(name, passed_over)
    }


def uncalled_modules(model: nn.Module) -> list[str]:
    """Return the modules whose weights another one uses without calling them.

    They are the output projections of ``MultiheadAttention``, and those of the table by model type (``UNCALLED``).
    """
    own = UNCALLED.get(model_type(model), ())
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            found.append(f"{name}.out_proj".lstrip("."))
        elif any(has_suffix(name, suffix) for suffix in own):
            found.append(name)
    return found


def _fast_path_parts(model: nn.Module) -> list[str]:
    """Return what torch passes over where there is no gradient: an encoder layer then uses its parts' weights."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.TransformerEncoderLayer)]
    return [f"{name}.{part}".lstrip(".") for name in layers for part in ("self_attn", "linear1", "linear2")]


def why_not_adaptable(model: nn.Module, name: str) -> str:
    """Return why LoRA does not act on the module ``name``."""
    if inside(name, uncalled_modules(model)):
        attention = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention)
        what = "attention" if attention else "the module above it"
        return f"{what} uses its weights and never calls it" + "; name the MultiheadAttention" * attention
    if inside(name, _fast_path_parts(model)):
        return "without gradients torch's TransformerEncoderLayer uses its weights and does not call it"
    acts_on = f"LoRA acts on {', '.join(kind.__name__ for kind in leaves())} outside the task head"
    return why_unsupported(model.get_submodule(name)) or acts_on


def leaf_kind(module: nn.Module) -> type[LowRank] | None:
    """Return the leaf that adapts ``module``, or None: it is of no class in ``leaves()``, or of a subclass that
    computes something else with its weight (``why_unsupported``)."""
    known = leaves()
    kind = next((known[base] for base in type(module).__mro__ if base in known), None)
    return kind if kind is not None and not why_unsupported(module) else None


def why_unsupported(module: nn.Module) -> str:
    """Return why LoRA cannot act on an instance of a class in ``leaves()``, or of a subclass; "" for other modules."""
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is None:
        return "its queries, keys and values have different widths"
    if not isinstance(module, tuple(known := leaves())):
        return ""
    own, weight = has_own_forward(type(module)), module._parameters.get("weight")
    if weight is None and type(module) is not nn.MultiheadAttention:
        return "its weight is computed of other parameters"
    if weight is None or type(module) in known or is_quantised(module):
        return ""
    if weight.dtype not in _SUMMABLE:
        return f"its weight is stored as {str(weight.dtype).removeprefix('torch.')}"
    if own and isinstance(module, CONVOLUTIONS):
        return "its forward is not that of a plain convolution"
    if any(name in vars(module) for name in LowRank.added):
        return "it has attributes that are called as LoRA's"
    if own and (module._modules or module._parameters.keys() - {"weight", "bias"}):
        return "its forward uses other parameters too"
    if own and isinstance(module, nn.Linear) and not _maps_rows(module):
        return "its forward returns something other than W·x"
    return ""


def _maps_rows(module: nn.Linear) -> bool:
    """Whether the module's forward returns (..., out) of (..., in), by shapes alone."""
    empty = recast(type(module), module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            empty._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    try:
        y = empty.forward(torch.empty(2, module.in_features, dtype=module.weight.dtype, device="meta"))
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return isinstance(y, Tensor) and y.shape == (2, module.out_features)


def _rank(config: LoraConfig, name: str) -> int:
    """Return the rank of the module or parameter ``name``; raises ``PeftlabError`` if it is too large."""
    rank = config.rank(name)
    if rank > MOST_RANK:
        raise PeftlabError(f"r={rank} of {name} is larger than {MOST_RANK}")
    return rank


def _check(leaf: nn.Module, name: str, rank: int, rows: list[Tensor] | None, config: LoraConfig) -> None:
    """Raise ``PeftlabError`` if the leaf ``name`` cannot have the low-rank addition that ``config`` describes."""
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
    """Return ``leaf`` with its low-rank addition; of a fused projection, on the output ``rows`` of each named part."""
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
    """Draw the starting values of A (r, in), in place."""
    if a.is_meta:  # it has no values, but drawing them would take time
        return
    if config.init_lora_weights == "gaussian":
        nn.init.normal_(a, std=1 / rank)
    else:
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))


class _Rows:
    """The rows of ``tokens``, which the leaves that are made with this object share."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self.parameter: nn.Parameter | None = None

    def of(self, weight: Tensor) -> nn.Parameter:
        if self.parameter is None:
            start = weight.detach()[torch.tensor(self.tokens, device=weight.device)]
            self.parameter = nn.Parameter(start.to(trainable_dtype(weight)))
        return self.parameter


def _with_rows(leaf: nn.Module, *, rows: _Rows) -> nn.Module:
    new = recast(adapted_class(TokenRows, type(leaf)), leaf)
    new.tokens = rows.tokens
    new.register_parameter("token_rows", rows.of(new.weight))
    places = torch.full((len(new.weight),), -1, device=new.weight.device)
    places[torch.tensor(rows.tokens, device=places.device)] = torch.arange(len(rows.tokens), device=places.device)
    new.register_buffer("places", places, persistent=False)
    return new
