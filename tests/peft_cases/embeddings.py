"""Cases of our own: embeddings and output layers, tied and untied, trained by LoRA or whole, of a grown vocabulary."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.peft_cases.cases import VOCABULARY, Case, token_ids
from tests.peft_cases.variants import build

WHICH = {"embed_tokens": ["embed_tokens"], "lm_head": ["lm_head"], "both": ["embed_tokens", "lm_head"]}


def embeddings() -> list[Case]:
    """Return all combinations of tying, layers, ``ensure_weight_tying`` and a resized vocabulary."""
    cases = []
    for tied, which, ensure, resized, whole, half in itertools.product(
        (True, False), WHICH, (False, True), (False, True), (False, True), (False, True)
    ):
        if half and resized:
            continue
        fields: dict[str, Any] = {"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM", "ensure_weight_tying": ensure}
        fields |= (
            {"target_modules": ["q_proj"], "modules_to_save": WHICH[which]}
            if whole
            else {"target_modules": ["q_proj", *WHICH[which]]}
        )
        words = ["tied" if tied else "untied", which, "whole" if whole else "by LoRA"]
        words += [word for word, on in (("kept tied", ensure), ("resized", resized), ("bf16", half)) if on]
        base = partial(_base, tied, resized, half)
        cases.append(Case("embeddings", ", ".join(words), base, token_ids, fields))
    fields = {"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    cases += [
        Case("embeddings", f"{'tied' if tied else 'untied'}, resized, neither", partial(_base, tied, True, False), token_ids, fields)
        for tied in (True, False)
    ]  # fmt: skip
    return cases


def _base(tied: bool, resized: bool, half: bool) -> nn.Module:
    model: Any = build("llama", tie_word_embeddings=tied)
    if resized:
        torch.manual_seed(5)
        model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    if half:
        for parameter in model.parameters():  # not the buffers: loading computes those anew, in fp32
            parameter.data = parameter.data.to(torch.bfloat16)
        model.config.dtype = torch.bfloat16
    return model
