"""The parts of a layer that can be left out of a plain checkpoint: feed-forward units and groups of heads.

A group is a key-value head with the query heads that read it (grouped-query attention); a unit is a number between the
two halves of the feed-forward part. ``config.json`` has one width for all layers, so each layer loses equally many.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from peftlab.drafting.truncation import layer_stack
from peftlab.errors import PeftlabError


@dataclass(frozen=True)
class Part:
    """One kind of unit in each layer.

    Attributes:
        units: how many a layer has.
        writers: the maps whose outputs are the units', each with the numbers per unit. reader: the map that reads them.
        per_unit: numbers of a unit that ``reader`` reads.
        sizes: keys of the configuration that say how many there are, each with a unit's share.
    """

    units: int
    writers: Mapping[str, int]
    reader: str
    per_unit: int
    sizes: Mapping[str, int]


_GATED = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
_FFN: dict[str, tuple[tuple[str, ...], str, str]] = {
    **dict.fromkeys(_GATED, (("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "intermediate_size")),
    "gpt2": (("mlp.c_fc",), "mlp.c_proj", "n_inner"),
    "gpt_neox": (("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h", "intermediate_size"),
}
"""Model type to the maps before and after the feed-forward units, and the key that says how many there are."""
_HEADS = tuple(family for family in _GATED if family != "olmo2")  # which normalises all heads as one
"""The model types whose number of heads is free: the size of a head is a key of its own."""


def parts(config: PretrainedConfig) -> dict[str, Part]:
    """Return what can be pruned in a model of this configuration, by its key in ``draft.prune``; empty: nothing."""
    found = {}
    if config.model_type in _FFN:
        writers, reader, key = _FFN[config.model_type]
        units = getattr(config, key) or 4 * config.hidden_size  # GPT-2's default
        found["ffn"] = Part(units, dict.fromkeys(writers, 1), reader, 1, {key: 1})
    if config.model_type in _HEADS:
        groups = config.num_key_value_heads or config.num_attention_heads
        queries = config.num_attention_heads // groups
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        projections = {"self_attn.q_proj": queries * dim, "self_attn.k_proj": dim, "self_attn.v_proj": dim}
        sizes = {"num_attention_heads": queries, "num_key_value_heads": 1}
        found["kv_groups"] = Part(groups, projections, "self_attn.o_proj", queries * dim, sizes)
    return found


def kept_units(config: PretrainedConfig, shares: Mapping[str, float]) -> dict[str, int]:
    """Return how many units of each part a layer keeps.

    Args:
        shares: of the units that are pruned, by part; 0 leaves a part whole.

    Raises:
        PeftlabError: the architecture has no such part, or a share is less than one unit or leaves none.
    """
    known, kept = parts(config), {}
    for name, share in shares.items():
        if not share:
            continue
        if name not in known:
            fit = ", ".join(sorted(_HEADS if name == "kv_groups" else _FFN))
            why = "its number of heads follows from its width, or all are normalised as one" if known else "unknown"
            raise PeftlabError(f"draft.prune.{name}: {config.model_type} ({why}) is not among {fit}")
        units = known[name].units
        kept[name] = units - round(share * units)
        if not 0 < kept[name] < units:
            rest = "none of them" if kept[name] else "all of them"
            raise PeftlabError(f"draft.prune.{name}: {share:g} of {units} is {rest}")
    return kept


@contextmanager
def scaled(model: PreTrainedModel, scales: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the block, multiply what each unit gives by its scale, [layers, units] of each part; 0 masks it."""
    known, handles = parts(model.config), []
    for name, scale in scales.items():
        part = known[name]
        for number, layer in enumerate(layer_stack(model)):

            def multiply(
                module: nn.Module, inputs: tuple[Tensor, ...], row: Tensor = scale[number], width: int = part.per_unit
            ) -> tuple[Tensor, ...]:
                return (inputs[0] * row.repeat_interleave(width).to(inputs[0].dtype), *inputs[1:])

            handles.append(layer.get_submodule(part.reader).register_forward_pre_hook(multiply))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def pruned(
    model: PreTrainedModel, units: Mapping[str, Tensor], scales: Mapping[str, Tensor] | None = None
) -> PreTrainedModel:
    """Return a plain model of the same class with these units alone, on the CPU and in eval mode.

    It computes what ``model`` computes with all other units masked.

    Args:
        units: the numbers of those kept, [layers, kept] and rising, of each part.
        scales: as in ``scaled``: folded into the maps that read the units.
    """
    config, tensors = copy.deepcopy(model.config), {name: t.detach() for name, t in model.state_dict().items()}
    known, stack = parts(model.config), layer_stack(model)
    place = next(name for name, module in model.named_modules() if module is stack)
    for name, kept in units.items():
        part = known[name]
        for key, share in part.sizes.items():
            setattr(config, key, share * kept.shape[1])
        if name == "kv_groups":
            config.head_dim = part.writers["self_attn.k_proj"]
        for number, layer in enumerate(stack):
            at = f"{place}.{number}."
            for writer, width in part.writers.items():
                rows = _places(kept[number], width)
                _select(tensors, at + writer, rows, 1 if isinstance(layer.get_submodule(writer), Conv1D) else 0)
                if (bias := tensors.get(f"{at}{writer}.bias")) is not None:
                    tensors[f"{at}{writer}.bias"] = bias[rows.to(bias.device)]
            along = 0 if isinstance(layer.get_submodule(part.reader), Conv1D) else 1
            _select(tensors, at + part.reader, _places(kept[number], part.per_unit), along)
            if scales is not None:
                weight = tensors[f"{at}{part.reader}.weight"]
                row = scales[name][number][kept[number]].repeat_interleave(part.per_unit).to(weight)
                tensors[f"{at}{part.reader}.weight"] = weight * (row if along else row[:, None])
    with torch.random.fork_rng(devices=[]), no_init_weights():
        small = type(model)._from_config(config, dtype=model.dtype)
        small.tie_weights()  # which comes with the initialisation left out
    small.load_state_dict(tensors)
    small.generation_config = copy.deepcopy(model.generation_config)
    return small.eval()


def _places(kept: Tensor, width: int) -> Tensor:
    """Return the rows of units that have ``width`` numbers each, one after the other."""
    return (kept[:, None] * width + torch.arange(width, device=kept.device)).flatten()


def _select(tensors: dict[str, Tensor], module: str, rows: Tensor, along: int) -> None:
    weight = tensors[f"{module}.weight"]
    tensors[f"{module}.weight"] = weight.index_select(along, rows.to(weight.device))
