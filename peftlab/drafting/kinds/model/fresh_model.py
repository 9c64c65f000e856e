"""A small language model with random weights, over the target's tokens (FastDraft, arXiv 2411.11055)."""

from __future__ import annotations

import copy

import torch
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.drafting.kinds.model.config import NewModel
from peftlab.errors import PeftlabError, reason

FAMILIES = (
    "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3",
    "smollm3",
)  # fmt: skip
"""The model types whose sizes are those that ``fresh_config`` sets."""
_HEAD = 8  # a head size other than the target's is a multiple of it


def fresh_config(target: PretrainedConfig, size: NewModel) -> PretrainedConfig:
    """Return a configuration like the target's with other sizes.

    The heads are as large as the target's if these divide the width, else the largest multiple of 8 below them that
    does. As many query heads share a key-value head as in the target, or the next smaller number that divides the
    heads. The feed-forward width is in proportion, rounded to a multiple of 8. A list with an entry per layer is
    sampled evenly, its last entry included. Vocabulary, tied embeddings and positions are the target's.

    Raises:
        PeftlabError: the target is of another family, or no head size divides the width.
    """
    if target.model_type not in FAMILIES:
        raise PeftlabError(
            f"draft.new: the target is a {target.model_type} model; sizes are derived for {', '.join(FAMILIES)}. "
            "Write draft: {kind: model, from: REF} with a small model over its tokens"
        )
    config = copy.deepcopy(target)
    layers, width = target.num_hidden_layers, target.hidden_size
    dim = getattr(target, "head_dim", None) or width // target.num_attention_heads
    head = next((n for n in (dim, *range(dim // _HEAD * _HEAD, 0, -_HEAD)) if size.width % n == 0), None)
    if head is None:
        near = max(1, round(size.width / dim)) * dim
        raise PeftlabError(f"draft.new.width: {size.width} is no multiple of a head's size; the nearest is {near}")
    heads = size.width // head
    config.num_hidden_layers, config.hidden_size, config.num_attention_heads = size.layers, size.width, heads
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    if getattr(target, "head_dim", None):
        config.head_dim = head
    if getattr(target, "num_key_value_heads", None):
        shared = target.num_attention_heads // target.num_key_value_heads
        config.num_key_value_heads = heads // next(n for n in range(shared, 0, -1) if heads % n == 0)
    inner = "n_inner" if target.model_type == "gpt2" else "intermediate_size"
    if getattr(target, inner) is not None:  # GPT-2's default is four times the width
        setattr(config, inner, max(1, round(getattr(target, inner) * size.width / width / 8)) * 8)
    for name, value in list(vars(target).items()):
        if "layer" in name and isinstance(value, list) and len(value) == layers:
            setattr(config, name, [value[(i + 1) * layers // size.layers - 1] for i in range(size.layers)])
    return config


def fresh_model(target: PreTrainedModel, size: NewModel, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Return a model of the target's class with random weights, the same for the same seed; in eval mode.

    Raises:
        PeftlabError: the class makes no model of these sizes; the library's reason is given.
    """
    config = fresh_config(target.config, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = type(target)._from_config(config, dtype=dtype)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise PeftlabError(f"draft.new: no {type(target).__name__} of these sizes: {reason(error)}") from None
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.eval()
