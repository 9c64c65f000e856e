"""Small models of every family the merge knows, and adapters with values in them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import nn

import peftlab
from peftlab.checkpoints.adapter import save_adapter
from peftlab.methods.inject import inject, make_config, trainable_parameters

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
LLAMA = SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": True}


def build(family: str, **changes: object) -> transformers.PreTrainedModel:
    """Return a small, seeded model of a family, in eval mode."""
    torch.manual_seed(0)
    T = transformers
    makers = {
        "bert": lambda: T.BertForSequenceClassification(T.BertConfig(**(SMALL | {"num_labels": 3} | changes))),
        "roberta": lambda: T.RobertaForSequenceClassification(
            T.RobertaConfig(**(SMALL | {"num_labels": 3, "max_position_embeddings": 40} | changes))
        ),
        "gpt2": lambda: T.GPT2LMHeadModel(
            T.GPT2Config(**({"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 40} | changes))
        ),
        "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**(LLAMA | changes))),
        "phi3": lambda: T.Phi3ForCausalLM(
            T.Phi3Config(
                **(SMALL | {"num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": False} | changes)
            )
        ),
        "mixtral": lambda: T.MixtralForCausalLM(
            T.MixtralConfig(
                **(SMALL | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2} | changes)
            )
        ),
    }
    model = makers[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


def save_base(model: transformers.PreTrainedModel, directory: Path, **options: object) -> Path:
    """Save a base checkpoint and return its directory."""
    model.save_pretrained(directory, **options)
    return directory


def load(cls: type, directory: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """Load a model and check that the checkpoint holds exactly its parameters."""
    model, info = cls.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def stir(model: nn.Module, std: float = 0.02) -> None:
    """Move all trained parameters, as training would."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(torch.randn_like(parameter), alpha=std)


def adapt(model: transformers.PreTrainedModel, directory: Path, method: str = "lora", **fields: object) -> Path:
    """Inject a method, stir it, save the adapter, and return its directory; the model stays injected."""
    inject(model, make_config(method, **fields))
    stir(model)
    return save_adapter(model, directory)


def reference(model: transformers.PreTrainedModel, directory: Path, **options: object) -> Path:
    """Save what ``peftlab.merge(model)`` and ``save_pretrained`` make of an injected model."""
    peftlab.merge(model).save_pretrained(directory, **options)
    return directory


def weight_files(directory: Path) -> dict[str, bytes]:
    """Return the bytes of a directory's weight files and index, by name."""
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir()) if ".safetensors" in p.name}


def assert_rounded_once(stored: torch.Tensor, exact: torch.Tensor, slack: float) -> None:
    """Assert that each number is within half a step of its dtype of the exact one (fp64), and of ``slack``: what the
    sum that was rounded may itself be off by, which differs from CPU to CPU."""
    info = torch.finfo(stored.dtype)
    half_a_step = info.eps / 2 * exact.abs().clamp_min(info.tiny)
    assert ((stored.double() - exact).abs() <= half_a_step + slack).all()
