"""Hydra heads: what Medusa's read, and the embeddings of the tokens drafted before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peftlab.decoding.state_drafters import grown_tokens
from peftlab.decoding.trees import Path
from peftlab.drafting.kinds.medusa.head_stack import HeadStack, as_parameters


class HydraBlock(nn.Module):
    """x -> R x + SiLU(A x), [..., H + W] -> [..., H]: x is a state [H] and embeddings [W] behind it.

    R starts as the map to the state, and A at 0: an untrained block returns the state, as an untrained Medusa block.
    """

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.residual = nn.Linear(hidden_size + width, hidden_size, bias=False)
        self.layers = nn.ModuleList([nn.Linear(hidden_size + width, hidden_size, bias=False)])
        nn.init.eye_(self.residual.weight)
        nn.init.zeros_(self.layers[0].get_parameter("weight"))

    def forward(self, both: Tensor) -> Tensor:
        hidden = self.residual(both)
        for layer in self.layers:
            hidden = hidden + F.silu(layer(both))
        return hidden


class HydraHeads(HeadStack):
    """K heads; head i (from 0) predicts token t+2+i from x = [h_t; E(x_{t+1}); ...; E(x_{t+1+i})]: W2(R x + SiLU(A x)).

    Hydra (Ankner et al. 2024, arXiv 2402.05109). Parameters are ``blocks.i.residual.weight``,
    ``blocks.i.layers.0.weight`` and ``lm_heads.i.weight``; the embeddings are the target's and no parameter.

    Args:
        lm_head, shared: see ``HeadStack``. heads: K.
        embedding: the target's, [V, D]; it is not copied.
    """

    def __init__(self, lm_head: Tensor, heads: int, embedding: Tensor, shared: bool = False):
        width, wide = lm_head.shape[1], embedding.shape[1]
        super().__init__(lm_head, [HydraBlock(width, (i + 1) * wide) for i in range(heads)], shared)
        self.embedding: Tensor
        self.register_buffer("embedding", embedding.detach(), persistent=False)

    def states(self, head: int, hidden: Tensor, before: Tensor) -> Tensor:
        """See ``HeadStack``."""
        embedded = F.embedding(before, self.embedding).flatten(-2).to(hidden.dtype)
        return self.blocks[head](as_parameters(self.blocks[head], torch.cat((hidden, embedded), -1)))

    def tokens(self, hidden: Tensor, last: Tensor, tree: Sequence[Path], ids: Tensor | None = None) -> Tensor:
        """See ``HeadStack``; each node's children follow from the tokens on its path."""

        def following(level: int, before: Tensor) -> Tensor:
            every = hidden[:, None].expand(-1, before.shape[1], -1)
            return self.lm_heads[level % len(self.lm_heads)](self.states(level, every, before))

        return grown_tokens(following, last, tree, ids)
