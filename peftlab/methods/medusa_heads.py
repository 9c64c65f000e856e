"""Medusa heads: guesses at the tokens after the next one from the target's last hidden state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MedusaBlock(nn.Module):
    """h -> h + SiLU(W1 h), [..., H] -> [..., H]."""

    def __init__(self, hidden_size: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden_size, hidden_size, bias=bias)])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class MedusaHeads(nn.Module):
    """K heads; head i (from 0) predicts position t+2+i: softmax(W2(SiLU(W1 h) + h)), h the state at t.

    Medusa (Cai et al. 2024, arXiv 2401.10774). Parameters are named as in the serving format:
    ``blocks.i.layers.0.weight`` (and ``.bias``), ``lm_heads.i.weight``.

    Args:
        lm_head: the target's LM head [V, H], with which each W2 starts; W1 starts at 0, so that an untrained
            head repeats the target's own next-token distribution.
        heads: K.
        bias: whether W1 has a bias.
    """

    def __init__(self, lm_head: Tensor, heads: int, bias: bool = False):
        super().__init__()
        vocab_size, hidden_size = lm_head.shape
        self.blocks = nn.ModuleList(MedusaBlock(hidden_size, bias) for _ in range(heads))
        self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(heads))
        for block in self.blocks:
            for parameter in block.parameters():
                nn.init.zeros_(parameter)
        for head in self.lm_heads:
            head.weight = nn.Parameter(lm_head.detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of every head: [..., H] -> [K, ..., V]."""
        return torch.stack([head(block(hidden)) for block, head in zip(self.blocks, self.lm_heads, strict=True)])
