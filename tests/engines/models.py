"""A small Llama that has learnt to write, and what several tests ask of an engine's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

PROMPTS = (
    "ROMEO:\nWhat",
    "First Citizen:\nWe are",
    "KING HENRY VI:\nThe",
    "Good my lord, I",
    "GLOUCESTER:\nNow",
    "But if",
)
NEW_TOKENS = 24
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ADAPTERS: dict[str, dict[str, Any]] = {
    "all linear maps": {"target_modules": ALL},
    "query and value": {"target_modules": ["q_proj", "v_proj"]},
    "one projection": {"target_modules": ["k_proj"]},
    "mlp": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "gate alone": {"target_modules": ["gate_proj"]},
    "rank 1": {"target_modules": ALL, "r": 1},
    "rank 3": {"target_modules": ALL, "r": 3},
    "rank 20": {"target_modules": ["q_proj", "v_proj"], "r": 20},
    "rslora": {"target_modules": ALL, "use_rslora": True},
    "rank pattern": {"target_modules": ALL, "rank_pattern": {"q_proj": 8, "down_proj": 2}},
    "alpha pattern": {"target_modules": ALL, "alpha_pattern": {"v_proj": 32, "up_proj": 1}},
    "some layers": {"target_modules": ALL, "layers_to_transform": [0, 3]},
    "output layer": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["v_proj", "embed_tokens"]},
    "dora": {"target_modules": ALL, "use_dora": True},
    "bias": {"target_modules": ALL, "bias": "lora_only"},
    "lora_bias": {"target_modules": ALL, "lora_bias": True},
    "saved module": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "token rows": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7]},
    "pissa": {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "pissa"},
    "replaced layer": {"target_modules": ["q_proj"], "exclude_modules": ["model.layers.1.self_attn.q_proj"]},
}

RECIPE = """kind: draft
target: {target}
draft: {draft}
method: {method}
data: {{prompts: {prompts}, max_prompts: 128, held_out: 8, max_new_tokens: 24, batch_size: 16}}
train: {{max_steps: 60, batch_size: 8, max_length: 96, lr: 3e-3}}
gamma: 3
"""
DRAFTS = {
    "eagle3": ("{kind: eagle3, steps: 2}", "null"),
    "eagle3 of few tokens": ("{kind: eagle3, steps: 2, vocabulary: 256}", "null"),
    "dflash": ("{kind: dflash, block_size: 4}", "null"),
    "dflash of few tokens, in a window": ("{kind: dflash, block_size: 4, vocabulary: 256, window: 16}", "null"),
    "dspark": ("{kind: dflash, block_size: 3, markov: 16, confidence: true}", "null"),
    "model": ("{kind: model, truncate: {layers: [0, 5]}}", "{name: full}"),
    "pard": ("{kind: pard}", "{name: full}"),
    "early_exit": ("{kind: early_exit, exits: [4]}", "{name: full}"),
}


def write_target(directory: Path, tokenizer_of: Path, text: Path) -> Path:
    """Train a Llama of 1.1 million weights, heads of 32, on a text for 150 steps, and write it.

    Args:
        directory: where it goes. tokenizer_of: directory of the tokenizer. text: file to learn.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_of)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.tensor(tokenizer(text.read_text(), add_special_tokens=False)["input_ids"])
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        begin = torch.randint(0, len(ids) - 65, (16,))
        batch = torch.stack([ids[i : i + 64] for i in begin])
        optimiser.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 - step / 150)
        model(input_ids=batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def prompts(directory: Path) -> list[list[int]]:
    """Return the token ids of ``PROMPTS``."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return [list(tokenizer(text)["input_ids"]) for text in PROMPTS]


_NEAR_TIE = 1e-3


@torch.no_grad()
def _shortfall(model: transformers.PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> float:
    """Return by how much the logit of an output token falls short of the largest at its place, at most."""
    logits = model(input_ids=torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())


def assert_greedy(
    model: transformers.PreTrainedModel, prompt: Sequence[int], output: Sequence[int], near: float = _NEAR_TIE
) -> None:
    """Assert that each output token is transformers' greedy choice after those before it, or a near tie with it.

    Args:
        model: in float32. prompt: token ids. output: of the engine. near: what a near tie's logit may fall short by.
    """
    assert output, "nothing was written"
    assert _shortfall(model, prompt, output) < near, "a token is not the most probable one"


def follows(model: transformers.PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> bool:
    """Return whether ``assert_greedy`` holds."""
    return bool(output) and _shortfall(model, prompt, output) < _NEAR_TIE
