"""A tiny target for the tests of draft training, and text it has written."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peftlab.drafting.config import MedusaDraft
from peftlab.drafting.heads import HeadedModel, MedusaKind
from peftlab.methods.inject import inject, make_config
from peftlab.tasks.prompts import Request

VOCAB = 40


def tiny(seed: int = 0, *, layers: int = 2, width: int = 16, vocab: int = VOCAB) -> Any:
    """Return a random Llama in eval mode, its logits spread out enough for choices to differ."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model.eval()


def requests(count: int = 6, *, prompt: int = 3, response: int = 8, seed: int = 0) -> list[Request]:
    """Return random prompts and responses; the last token of each response is the end of sequence."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(3, VOCAB, (n,), generator=generator).tolist()

    return [Request(draw(prompt + i % 3), [*draw(response - i % 4), 2]) for i in range(count)]


def medusa(model: Any = None, *, trunk: dict[str, Any] | None = None, **fields: Any) -> HeadedModel:
    """Return a model with new Medusa heads; ``trunk``: the fields of a LoRA that is injected into the model itself."""
    headed = MedusaKind.attach_heads(model if model is not None else tiny(0), MedusaDraft(**fields))
    if trunk is not None:
        inject(headed.trunk, make_config("lora", **trunk))
    return headed
