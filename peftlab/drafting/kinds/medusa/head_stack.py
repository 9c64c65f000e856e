"""Heads that each draft one token further ahead: what Medusa's have in common with others, and how they train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from peftlab.decoding.trees import Path, RankRates


class HeadStack(nn.Module):
    """K heads; head i (from 0) predicts token t+2+i from the state at t: a block, and W2 [V, H] on its output.

    Parameters are ``blocks.i...`` and ``lm_heads.i.weight``; where W2 is shared, ``lm_heads.0.weight`` is the only one.

    Args:
        lm_head: the target's LM head [V, H], with which each W2 starts.
        blocks: of each head.
        shared: all heads have one W2, ``lm_head`` itself, which must be a parameter, and not a copy: multi-token
            prediction's shared unembedding (Gloeckle et al. 2024, arXiv 2404.19737). Whether it trains is left
            to its owner.

    Attributes:
        ranks: how often each head's choices are right, as measured; None: not measured.
    """

    def __init__(self, lm_head: Tensor, blocks: Sequence[nn.Module], shared: bool):
        super().__init__()
        self.ranks: RankRates | None = None
        vocab_size, hidden_size = lm_head.shape
        self.blocks = nn.ModuleList(blocks)
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden_size, vocab_size, bias=False, device="meta") for _ in range(1 if shared else len(blocks))
        )
        for head in self.lm_heads:
            head.weight = lm_head if shared else nn.Parameter(lm_head.detach().clone())

    def __iter__(self) -> Iterator[tuple[nn.Module, Tensor]]:
        """Yield each head's block and W2 [V, H]."""
        weights = [head.get_parameter("weight") for head in self.lm_heads]
        return zip(self.blocks, cycle(weights), strict=False)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.lm_heads[0].get_parameter("weight").shape[0]

    @property
    def depth(self) -> int:
        """K."""
        return len(self.blocks)

    def states(self, head: int, hidden: Tensor, before: Tensor) -> Tensor:
        """Return what a head's W2 reads, [..., H].

        Args:
            hidden: [..., H], the states that the target's LM head reads.
            before: [..., head + 1], the tokens between these and those that are predicted.
        """
        raise NotImplementedError

    def addend(self, before: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return factors [T, r] and [V, r] of what is added to a head's logits after these tokens; None: nothing."""
        return None

    def product(self, head: int, hidden: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [T, F] and weights [V, F] whose product is a head's logits; arguments as for ``states``."""
        features, weight, addend = self.states(head, hidden, before), [*self][head][1], self.addend(before)
        if addend is None:
            return features, weight
        return torch.cat((features, addend[0]), -1), torch.cat((weight, addend[1]), -1)

    def tokens(self, hidden: Tensor, last: Tensor, tree: Sequence[Path], ids: Tensor | None = None) -> Tensor:
        """Return the tokens of a tree, see ``decoding.state_drafters.Heads.tokens``: [b, H], [b] -> [b, N].

        Args:
            ids: the token of each row of W2, [V]; None: its own number.
        """
        raise NotImplementedError


def as_parameters(block: nn.Module, states: Tensor) -> Tensor:
    """Return states in the dtype of a block's parameters: those that train on a 16-bit target are in fp32."""
    dtype = next((parameter.dtype for parameter in block.parameters()), states.dtype)
    return states.to(dtype)


class HeadedModel(nn.Module):
    """A language model and the heads on its last hidden state, as they train together.

    The forward pass is the language model's own; the loss applies the heads to the hidden states.
    """

    def __init__(self, trunk: PreTrainedModel, heads: HeadStack):
        super().__init__()
        self.trunk, self.heads = trunk, heads

    def forward(self, **inputs: object) -> ModelOutput:
        """Return what the language model returns."""
        return self.trunk(**inputs)

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the language model's LM head."""
        return self.trunk.get_output_embeddings()


class ReducedHeads(nn.Module):
    """Heads over some of the vocabulary; they draft no other token.

    Args:
        heads: with ``len(tokens)`` rows a head. tokens: their ids, [V_d]. vocab_size: V.
    """

    def __init__(self, heads: HeadStack, tokens: Tensor, vocab_size: int):
        super().__init__()
        self.heads, self.vocab_size = heads, vocab_size
        self.kept: Tensor
        self.register_buffer("kept", tokens, persistent=False)

    @property
    def depth(self) -> int:
        """K."""
        return self.heads.depth

    @property
    def ranks(self) -> RankRates | None:
        """How often each head's choices are right, as measured; None: not measured."""
        return self.heads.ranks

    def tokens(self, hidden: Tensor, last: Tensor, tree: Sequence[Path]) -> Tensor:
        """Return the tokens of a tree, see ``Heads.tokens``: [b, H], [b] -> [b, N]."""
        return self.heads.tokens(hidden, last, tree, self.kept)
