"""What a method changes in a model, as a plan, and which modules that is: by architecture, or by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from peftlab.errors import PeftlabError, nearest
from peftlab.models.architectures import FUSED, QUERY_VALUE, SITES, Sites, inside, model_type, prefixes, task_head
from peftlab.patterns import matching


@dataclass
class Plan:
    """What a method would change in a model, decided before anything is touched.

    Attributes:
        replace: name of a leaf module to the function that makes its replacement, which shares the leaf's parameters;
            the function must not change the leaf.
        train: names of the model's own parameters that are to be trained in place.
    """

    replace: dict[str, Callable[[nn.Module], nn.Module]] = field(default_factory=dict)
    train: list[str] = field(default_factory=list)


def from_layer(model: nn.Module, plan: Plan, first: int, whole: Iterable[str]) -> Plan:
    """Return the part of ``plan`` in the layers from number ``first`` on, and in the modules ``whole``.

    What belongs to no numbered layer (embeddings, pooler, final norm) stays as it is, so that backward ends at the
    input of layer ``first``.

    Args:
        whole: the modules that train in any case: the task head, and what ``modules_to_save`` names.

    Raises:
        PeftlabError: there is no such layer, or the method trains nothing in these layers.
    """
    whole = list(whole)
    names = [name for name, _ in model.named_parameters() if not inside(name, whole)]
    there = sorted({number for name in names if (number := layer_index(name)) is not None})
    if first not in there:
        numbers = f"there are {there[0]} to {there[-1]}" if there else "the model has no numbered layers"
        raise PeftlabError(f"train.layers.from (first_layer): no layer {first}; {numbers}")

    def trains(name: str) -> bool:
        number = layer_index(name)
        return inside(name, whole) or (number is not None and number >= first)

    part = Plan({n: make for n, make in plan.replace.items() if trains(n)}, [n for n in plan.train if trains(n)])
    if all(inside(name, whole) for name in (*part.replace, *part.train)):
        raise PeftlabError(
            f"train.layers.from (first_layer): the method trains nothing in layers {first} to {there[-1]}"
        )
    return part


ALL_LINEAR = "all-linear"


def default_targets(model: nn.Module, linear: list[str]) -> list[str]:
    """Return the linear maps that LoRA acts on by default: those of the table's row, or of the fallback.

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
                f"target_modules: {name}, which LoRA acts on by default in {model_type(model)}, is a "
                f"{type(module).__name__} of {type(module).__module__.partition('.')[0]}, not an nn.Linear; "
                "name other modules"
            )
    if row and not missing:
        return match(linear, list(row))
    known = {target for targets in QUERY_VALUE.values() for target in targets if "." not in target}
    return [name for name in linear if name.rpartition(".")[2] in known] or linear


def fused_parts(model: nn.Module, leaves: Iterable[str]) -> dict[str, Tensor]:
    """Return the parts of a model's fused projections: ``<leaf>.<part>`` to the output rows it has.

    So ``target_modules=["c_attn.q", "c_attn.v"]`` acts on GPT-2's query and value alone.
    """
    config = getattr(model, "config", None)
    parts: dict[str, Tensor] = {}
    for suffix, split in FUSED.get(model_type(model), {}).items():
        for name in leaves:
            if has_suffix(name, suffix):
                parts |= {f"{name}.{part}": rows for part, rows in split(config).items()}
    return parts


def has_suffix(name: str, suffix: str) -> bool:
    """Whether ``name`` is ``suffix`` or ends in it after a dot."""
    return name == suffix or name.endswith("." + suffix)


def match(names: Iterable[str], targets: list[str] | str, *, what: str = "target_modules") -> list[str]:
    """Return those of ``names`` that ``targets`` matches, in order: a list of suffixes, or one full-match regex.

    Raises:
        PeftlabError: the regex, or any one suffix of the list, matches nothing (the nearest names are in the
            message), or matching takes too long.
    """
    names = list(names)
    if isinstance(targets, str):
        picked = matching(targets, names, what=what)
        if not picked:
            raise PeftlabError(f"{what}: the regular expression {targets!r} matches no module{_hint(targets, names)}")
        return picked
    for target in targets:
        if not any(has_suffix(name, target) for name in names):
            raise PeftlabError(f"{what}: {target!r} matches no module{_hint(target, names)}")
    return [name for name in names if any(has_suffix(name, target) for target in targets)]


def layer_index(name: str, patterns: Sequence[str] = ()) -> int | None:
    """Return the number of the layer that a module belongs to, or None.

    It is the first component of its name that is a number; with ``patterns``, the first that follows a list that one of
    these regular expressions matches.
    """
    parts = name.split(".")
    lists = {".".join(parts[:i]): int(part) for i, part in enumerate(parts) if part.isdigit()}
    if not patterns:
        return next(iter(lists.values()), None)
    found = [m for pattern in patterns for m in matching(rf"(.*\.)?({pattern})", lists, what="layers_pattern")]
    return lists[found[0]] if found else None


def in_layers(
    names: Iterable[str], layers: list[int] | int | None, pattern: list[str] | str | None = None
) -> list[str]:
    """Return those of ``names`` in the given layers; a layer that does not exist is an error."""
    if layers is None:
        return list(names)
    patterns = [pattern] if isinstance(pattern, str) else pattern or []
    numbers = {name: layer_index(name, patterns) for name in names}
    wanted = [layers] if isinstance(layers, int) else list(layers)
    there = sorted({number for number in numbers.values() if number is not None})
    missing = [number for number in wanted if number not in there]
    if missing:
        raise PeftlabError(f"layers_to_transform: no layer {missing[0]}; there are {there[0]} to {there[-1]}"
                           if there else "layers_to_transform: the targets are in no numbered layer")  # fmt: skip
    return [name for name, number in numbers.items() if number in wanted]


def _hint(target: str, names: list[str]) -> str:
    # Compare with the last component, with the last two, and with whole names: the user may have meant any of them.
    tails = dict.fromkeys(".".join(name.split(".")[-k:]) for name in names for k in (1, 2))
    close = nearest(target, tails) or list(tails)[:6]
    return f"; nearest: {', '.join(close)}" if close else "; the model has no module of a similar name"


def sites_of(model: nn.Module) -> Sites:
    """Return the sub-layer ends of a model: its own row of ``SITES``, else the first row that fits.

    A row fits if the layers with an attention end are exactly those with a feed-forward end and those with a
    feed-forward input, one of each per layer.

    Raises:
        PeftlabError: no row fits.
    """
    names = [name for name, _ in model.named_modules()]
    kind = model_type(model)
    rows = [SITES[kind]] if kind in SITES else []
    rows += [sites for sites in SITES.values() if not sites.listed_only]
    for sites in dict.fromkeys(rows):
        ends, starts = find(names, sites.ffn), find(names, sites.ffn_input)
        layers = set(find(names, sites.attention).values())
        if layers and layers == set(ends.values()) == set(starts.values()) and len(ends) == len(layers) == len(starts):
            return sites
    raise PeftlabError(
        f"method houlsby does not know where the sub-layers of {kind} ({type(model).__name__}) end, and no "
        "known architecture is built like it; method lora adapts any linear map, or add a row to "
        "peftlab.models.architectures.SITES"
    )


def find(names: Iterable[str], patterns: Iterable[str]) -> dict[str, str]:
    """Return those of ``names`` that end in one of ``patterns``, each with the name of its layer."""
    expression = "|".join(_expression(pattern) for pattern in patterns)
    found = {}
    for name in names:
        match = re.fullmatch(rf"(?:.*\.)?(?:{expression})", name)
        if match and match.lastindex:
            found[name] = name[: match.end(match.lastindex)]
    return found


def _expression(pattern: str) -> str:
    layer, _, tail = re.escape(pattern).partition(r"\*")
    return rf"{layer}(\d+){tail}".replace(r"\*", r"\d+")


def fully_trained(model: nn.Module, modules_to_save: list[str] | None, *, head: bool = True) -> list[str]:
    """Return the names of what is trained whole: the task head (if ``head``) and ``modules_to_save``."""
    names = task_head(model) if head else []
    if modules_to_save:
        every = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
        names += [n for n in match(every, modules_to_save, what="modules_to_save") if n not in names]
    return names


def parameters_under(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of all parameters that are, or are below, one of ``names``, in the model's order.

    Raises:
        PeftlabError: a module has no parameter but those that it shares with others, which are not named.
    """
    wanted = set(names)
    parameters = dict(model.named_parameters())
    found = {name: wanted.intersection(prefixes(name)) for name in parameters}
    for name in wanted.difference(*found.values()):
        own = list(model.get_submodule(name).parameters())
        shared = next((other for other, p in parameters.items() if any(p is q for q in own)), None)
        if shared is not None and not found[shared]:
            raise PeftlabError(
                f"modules_to_save: all weights of {name} are those of {shared.rpartition('.')[0]} (tied); "
                f"name {shared.rpartition('.')[0]}, which trains both"
            )
    return [name for name, under in found.items() if under]
