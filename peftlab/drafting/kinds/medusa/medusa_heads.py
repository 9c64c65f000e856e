"""Medusa heads: guesses at the tokens after the next one from the target's last hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peftlab.decoding.state_drafters import tree_tokens
from peftlab.decoding.trees import Path
from peftlab.drafting.kinds.medusa.head_stack import HeadStack, as_parameters


class MedusaBlock(nn.Module):
    """h -> h + SiLU(W1 h), [..., H] -> [..., H]."""

    def __init__(self, hidden_size: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden_size, hidden_size, bias=bias)])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class MarkovBias(nn.Module):
    """W2 W1[x], x the token before: a bias of rank r on the next token's logits, [...] -> [..., V].

    Successive heads draft without knowing what the head before has chosen; this tells them (DSpark's Markov head). W2
    starts at 0.

    Args:
        vocabulary: tokens x. rows: V, the tokens that are drafted. rank: r.
    """

    def __init__(self, vocabulary: int, rows: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, rows, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, before: Tensor) -> Tensor:
        return self.markov_w2(self.markov_w1(before))


class MedusaHeads(HeadStack):
    """K heads; head i (from 0) predicts position t+2+i: softmax(W2(SiLU(W1 h) + h)), h the state at t.

    Medusa (Cai et al. 2024, arXiv 2401.10774). Parameters are named as in the files of heads:
    ``blocks.i.layers.0.weight`` (and ``.bias``), ``lm_heads.i.weight``.

    Args:
        lm_head, shared: see ``HeadStack``. W1 starts at 0, so that an untrained head repeats the target's own
            next-token distribution.
        heads: K.
        bias: whether W1 has a bias.
        markov: rank of a ``MarkovBias``, one for all heads, whose parameters are ``markov_head.markov_w1.weight`` and
            ``markov_head.markov_w2.weight``; None: no bias.
        vocabulary: tokens of the text, where ``lm_head`` has fewer rows; None: V.
    """

    def __init__(
        self,
        lm_head: Tensor,
        heads: int,
        bias: bool = False,
        shared: bool = False,
        markov: int | None = None,
        vocabulary: int | None = None,
    ):
        vocab_size, hidden_size = lm_head.shape
        super().__init__(lm_head, [MedusaBlock(hidden_size, bias) for _ in range(heads)], shared)
        for block in self.blocks:
            for parameter in block.parameters():
                nn.init.zeros_(parameter)
        self.markov_head = MarkovBias(vocabulary or vocab_size, vocab_size, markov) if markov is not None else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of every head without the Markov bias: [..., H] -> [K, ..., V]."""
        if len(self.lm_heads) == 1:  # one product reads a shared W2 once, not K times
            return self.lm_heads[0](torch.stack([block(hidden) for block in self.blocks]))
        return torch.stack([head(block(hidden)) for block, head in zip(self.blocks, self.lm_heads, strict=True)])

    def states(self, head: int, hidden: Tensor, before: Tensor) -> Tensor:
        """See ``HeadStack``; the tokens before are not read."""
        return self.blocks[head](as_parameters(self.blocks[head], hidden))

    def addend(self, before: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the factors of the Markov bias after the last of these tokens; None for heads without one."""
        markov = self.markov_head
        return None if markov is None else (markov.markov_w1(before[:, -1]), markov.markov_w2.weight)

    def tokens(self, hidden: Tensor, last: Tensor, tree: Sequence[Path], ids: Tensor | None = None) -> Tensor:
        """See ``HeadStack``."""
        return tree_tokens(self(hidden), last, tree, self.markov_head, ids)
