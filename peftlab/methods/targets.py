"""Which modules of a model a method acts on: the table of architectures, matching by name, the task head."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from peftlab.errors import PeftlabError, nearest

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


def default_targets(model: nn.Module, leaves: Iterable[str]) -> list[str]:
    """Return the default target suffixes of a model: the table's row, or the stated fallback.

    Fallback for an architecture that has no row: the attention projections whose last name is one of the
    table's own (``q_proj``, ``query``, ...); where there is none, every linear map but the output layer.
    """
    names = list(leaves)
    row = QUERY_VALUE.get(model_type(model))
    if row and all(any(has_suffix(name, target) for name in names) for target in row):
        return list(row)
    known = {target for targets in QUERY_VALUE.values() for target in targets if "." not in target}
    found = sorted({name.rpartition(".")[2] for name in names} & known)
    return found or sorted({name.rpartition(".")[2] for name in names})


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
        PeftlabError: the regex, or any one suffix of the list, picks nothing; the nearest names are given.
    """
    names = list(names)
    if isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise PeftlabError(f"{what}: {targets!r} is not a regular expression ({error})") from None
        picked = [name for name in names if pattern.fullmatch(name)]
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


def task_head(model: nn.Module) -> list[str]:
    """Return the names of the task head's modules: those outside the pretrained body, where it has a head.

    A model with output embeddings (a language model) has no task head: its LM head belongs to the body.
    """
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not hasattr(model, prefix):
        return []
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    if outputs is not None:
        return []
    return [name for name, child in model.named_children() if name != prefix and any(True for _ in child.parameters())]


def trained_whole(model: nn.Module, modules_to_save: list[str] | None, *, head: bool = True) -> list[str]:
    """Return the names of the modules trained whole: the task head (if ``head``) and ``modules_to_save``."""
    names = task_head(model) if head else []
    if modules_to_save:
        every = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
        names += [n for n in match(every, modules_to_save, what="modules_to_save") if n not in names]
    return names


def parameters_under(model: nn.Module, modules: Iterable[str]) -> list[str]:
    """Return the names of all parameters below the named modules, in the model's order.

    Raises:
        PeftlabError: a module has no parameter but those that it shares with others, whose names they bear.
    """
    prefixes = tuple(f"{name}." for name in modules)
    if not prefixes:
        return []
    parameters = dict(model.named_parameters())
    for prefix in prefixes:
        own = model.get_submodule(prefix[:-1])
        # On the meta device a model stands for a checkpoint, whose adapter may have parted what the model shares.
        if any(name.startswith(prefix) for name in parameters) or any(p.is_meta for p in own.parameters()):
            continue
        shared = next((name for name, p in parameters.items() if any(p is q for q in own.parameters())), None)
        if shared is not None:
            raise PeftlabError(
                f"modules_to_save: all weights of {prefix[:-1]} are those of {shared.rpartition('.')[0]} (tied); "
                f"name {shared.rpartition('.')[0]}, which trains both"
            )
    return [name for name in parameters if name.startswith(prefixes)]


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or parameter name is one of ``modules`` or lies below one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _hint(target: str, names: list[str]) -> str:
    # Compare with the last component, with the last two, and with whole names: whichever the user had in mind.
    tails = dict.fromkeys(".".join(name.split(".")[-k:]) for name in names for k in (1, 2))
    close = nearest(target, tails) or list(tails)[:6]
    return f"; nearest: {', '.join(close)}" if close else "; the model has no module it could be"
