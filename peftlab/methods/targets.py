"""Which modules of a model a method acts on: by default for its architecture, or matched by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from peftlab.errors import PeftlabError, nearest
from peftlab.methods.architectures import FUSED, QUERY_VALUE
from peftlab.patterns import matching

ALL_LINEAR = "all-linear"


def model_type(model: nn.Module) -> str:
    """Return the ``model_type`` of a transformers model, or its class name in lower case."""
    return getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__.lower()


def embeddings_of(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the modules that the model names as its input and its output embeddings; None where it names none."""
    found: list[nn.Module | None] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            layer = getattr(model, getter, lambda: None)()
        except NotImplementedError:  # transformers' answer for models without tokens
            layer = None
        found.append(layer if isinstance(layer, nn.Module) else None)
    return found[0], found[1]


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


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or parameter name is one of ``modules`` or is below one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _hint(target: str, names: list[str]) -> str:
    # Compare with the last component, with the last two, and with whole names: the user may have meant any of them.
    tails = dict.fromkeys(".".join(name.split(".")[-k:]) for name in names for k in (1, 2))
    close = nearest(target, tails) or list(tails)[:6]
    return f"; nearest: {', '.join(close)}" if close else "; the model has no module of a similar name"
