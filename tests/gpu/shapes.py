"""Models of well-known shapes with random weights: what a step costs does not depend on the weights' values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    LlamaConfig,
    RobertaConfig,
)

from peftlab.models.quantised import quantise


def _llama(
    hidden: int, inner: int, layers: int, heads: int, vocabulary: int = 128256, tied: bool = False
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 4, vocab_size=vocabulary, max_position_embeddings=8192, rope_theta=5e5,
        tie_word_embeddings=tied,
    )  # fmt: skip


def _roberta(hidden: int, layers: int) -> RobertaConfig:
    return RobertaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64, intermediate_size=4 * hidden,
        vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip


CONFIGS = {
    "roberta-base": partial(_roberta, 768, 12),
    "llama-1b": partial(_llama, 2048, 8192, 16, 32, tied=True),
    "llama-8b": partial(_llama, 4096, 14336, 32, 32),
    "roberta-tiny": partial(_roberta, 64, 2),
    "llama-tiny": partial(_llama, 64, 128, 2, 8, 512),
}


@dataclass(frozen=True)
class Work:
    """A training step.

    Attributes:
        name: a key of ``CONFIGS``.
        batch, length: rows of a batch, and tokens of each. texts: as many examples share a row.
        r, targets: of the LoRA.
        nf4: the base is stored in 4 bits; else in bf16 if it generates, in fp32 if it classifies.
        checkpointing: activations are computed again in backward.
    """

    name: str
    batch: int
    length: int
    r: int
    targets: str | list[str]
    texts: int = 1
    nf4: bool = False
    checkpointing: bool = False

    @property
    def generates(self) -> bool:
        """Whether it is a language model."""
        return self.name.startswith("llama")

    def model(self, device: torch.device) -> Any:
        """Return the model on the device, in training mode."""
        torch.manual_seed(0)
        auto, dtype = AutoModelForSequenceClassification, torch.float32
        if self.generates:
            auto, dtype = AutoModelForCausalLM, torch.bfloat16
        with device:
            model = auto.from_config(CONFIGS[self.name](), dtype=dtype)
        if self.nf4:
            how = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_skip_modules=["lm_head"],
            )  # fmt: skip
            quantise(model, how)
        if self.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model.train()

    def inputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return a batch: ids, and labels; for a language model the positions of each row's examples, too."""
        generator = torch.Generator().manual_seed(0)
        vocabulary = CONFIGS[self.name]().vocab_size
        ids = torch.randint(5, vocabulary, (self.batch, self.length), generator=generator)
        if not self.generates:
            return {"input_ids": ids.to(device), "labels": (torch.arange(self.batch) % 2).to(device)}
        places = torch.arange(self.length // self.texts).repeat(self.texts).expand(self.batch, -1)
        labels = ids.where(places > 0, -100)
        return {"input_ids": ids.to(device), "position_ids": places.to(device), "labels": labels.to(device)}


WORKS = {
    "roberta": Work("roberta-base", 32, 128, 8, ["query", "value"]),
    **{
        f"{name}{'-nf4' if nf4 else ''}": Work(name, 1, 2048, 16, "all-linear", 4, nf4, True)
        for nf4 in (False, True)
        for name in ("llama-1b", "llama-8b")
    },
}
TINY = {
    "roberta": Work("roberta-tiny", 4, 16, 8, ["query", "value"]),
    "llama-1b": Work("llama-tiny", 1, 64, 4, "all-linear", 4, False, True),
    "llama-1b-nf4": Work("llama-tiny", 1, 64, 4, "all-linear", 4, True, True),
}
