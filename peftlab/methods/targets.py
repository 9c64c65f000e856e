"""Which modules of a model a method acts on: the table of architectures, and matching by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from peftlab.errors import PeftlabError, nearest
from peftlab.patterns import matching

ALL_LINEAR = "all-linear"

# model_type -> the attention's query and value projections (the LoRA paper's choice); fused where they are fused.
QUERY_VALUE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "albert", "bert", "camembert", "convbert", "electra", "ernie", "layoutlm", "megatron-bert",
            "rembert", "roberta", "roberta-prelayernorm", "splinter", "xlm-roberta", "xlm-roberta-xl",
        ),
        ("query", "value"),
    ),
    **dict.fromkeys(
        (
            "bart", "blenderbot", "clip", "cohere", "cohere2", "deit", "gemma", "gemma2", "gemma3", "gemma3_text",
            "glm", "gpt_neo", "gptj", "granite", "gpt_oss", "llama", "m2m_100", "marian", "mbart", "mistral", "mixtral",
            "olmo", "olmo2", "olmoe", "opt", "pegasus", "phi", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "siglip",
            "smollm3", "stablelm", "starcoder2", "vit",
            "whisper",
        ),
        ("q_proj", "v_proj"),
    ),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), ("q", "v")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    **dict.fromkeys(("gpt_neox", "bloom", "falcon", "chatglm"), ("query_key_value",)),
    **dict.fromkeys(("deberta-v2",), ("query_proj", "value_proj")),
    "deberta": ("in_proj",),
    "distilbert": ("q_lin", "v_lin"),
    "modernbert": ("Wqkv",),
    "mpnet": ("attn.q", "attn.v"),
    "mpt": ("Wqkv",),
    "phi3": ("qkv_proj",),
}  # fmt: skip


def model_type(model: nn.Module) -> str:
    """Return the ``model_type`` of a transformers model, or its class name in lower case."""
    return getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__.lower()


def default_targets(model: nn.Module, linear: list[str]) -> list[str]:
    """Return the linear maps that LoRA acts on by default: those of the table's row, or the stated fallback.

    Fallback for an architecture that has no row: the attention projections whose last name is one of the
    table's own (``q_proj``, ``query``, ...); where there is none, all of ``linear``.

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


def _stacked(**sizes: int) -> dict[str, Tensor]:
    """One part after the other."""
    edges = torch.tensor([0, *sizes.values()]).cumsum(0).tolist()
    return {part: torch.arange(edges[i], edges[i + 1]) for i, part in enumerate(sizes)}


def _thirds(width: int) -> dict[str, Tensor]:
    return _stacked(q=width, k=width, v=width)


def _by_head(config: Any) -> dict[str, Tensor]:
    """Query, key and value of the first head, then of the second, and so on."""
    heads = config.num_attention_heads
    rows = torch.arange(3 * config.hidden_size).view(heads, 3, config.hidden_size // heads)
    return {part: rows[:, i].flatten() for i, part in enumerate("qkv")}


def _phi3(config: Any) -> dict[str, Tensor]:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_value = config.num_key_value_heads * width
    return _stacked(q=config.num_attention_heads * width, k=key_value, v=key_value)


# model_type -> fused projection -> function from the configuration to the output rows of each part.
FUSED: dict[str, dict[str, Callable[[Any], dict[str, Tensor]]]] = {
    "gpt2": {"attn.c_attn": lambda c: _thirds(c.hidden_size)},
    "gpt_neox": {"query_key_value": _by_head},
    "bloom": {"query_key_value": _by_head},
    "modernbert": {"Wqkv": lambda c: _thirds(c.hidden_size)},
    "phi3": {
        "qkv_proj": _phi3,
        "gate_up_proj": lambda c: _stacked(gate=c.intermediate_size, up=c.intermediate_size),
    },
}


def has_suffix(name: str, suffix: str) -> bool:
    """Whether ``name`` is ``suffix`` or ends in it after a dot."""
    return name == suffix or name.endswith("." + suffix)


def match(names: Iterable[str], targets: list[str] | str, *, what: str = "target_modules") -> list[str]:
    """Return those of ``names`` that ``targets`` picks, in order: a list of suffixes, or one full-match regex.

    Raises:
        PeftlabError: the regex, or any one suffix of the list, picks nothing (the nearest names are given), or
            matching takes too long.
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


def layer_index(name: str) -> int | None:
    """Return the number of the layer a module name lies in: its first all-digit component, or None."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def in_layers(names: Iterable[str], layers: list[int] | int | None) -> list[str]:
    """Return those of ``names`` in the given layers; names every layer that does not exist in the error."""
    names = list(names)
    if layers is None:
        return names
    wanted = [layers] if isinstance(layers, int) else list(layers)
    there = sorted({index for name in names if (index := layer_index(name)) is not None})
    missing = [index for index in wanted if index not in there]
    if missing:
        raise PeftlabError(f"layers_to_transform: no layer {missing[0]}; there are {there[0]} to {there[-1]}"
                           if there else "layers_to_transform: the targets lie in no numbered layer")  # fmt: skip
    return [name for name in names if layer_index(name) in wanted]


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or parameter name is one of ``modules`` or lies below one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _hint(target: str, names: list[str]) -> str:
    # Compare with the last component, with the last two, and with whole names: whichever the user had in mind.
    tails = dict.fromkeys(".".join(name.split(".")[-k:]) for name in names for k in (1, 2))
    close = nearest(target, tails) or list(tails)[:6]
    return f"; nearest: {', '.join(close)}" if close else "; the model has no module it could be"
