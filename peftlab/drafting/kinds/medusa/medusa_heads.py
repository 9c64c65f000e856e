"""Medusa heads: guesses at the tokens after the next one from the target's last hidden state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from peftlab.decoding.drafters.head_drafter import tree_tokens
from peftlab.decoding.verification.tree import Path, RankRates


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


class MedusaHeads(nn.Module):
    """K heads; head i (from 0) predicts position t+2+i: softmax(W2(SiLU(W1 h) + h)), h the state at t.

    Medusa (Cai et al. 2024, arXiv 2401.10774). Parameters are named as in the files of heads:
    ``blocks.i.layers.0.weight`` (and ``.bias``), ``lm_heads.i.weight``; where W2 is shared, ``lm_heads.0.weight``
    is the only one.

    Args:
        lm_head: the target's LM head [V, H], with which each W2 starts; W1 starts at 0, so that an untrained
            head repeats the target's own next-token distribution.
        heads: K.
        bias: whether W1 has a bias.
        shared: all heads have one W2, ``lm_head`` itself, which must be a parameter, and not a copy: multi-token
            prediction's shared unembedding (Gloeckle et al. 2024, arXiv 2404.19737). Whether it trains is left
            to its owner.
        markov: rank of a ``MarkovBias``, one for all heads, whose parameters are ``markov_head.markov_w1.weight`` and
            ``markov_head.markov_w2.weight``; None: no bias.
        vocabulary: tokens of the text, where ``lm_head`` has fewer rows; None: V.

    Attributes:
        ranks: how often each head's choices are right, as measured; None: not measured.
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
        super().__init__()
        self.ranks: RankRates | None = None
        vocab_size, hidden_size = lm_head.shape
        self.blocks = nn.ModuleList(MedusaBlock(hidden_size, bias) for _ in range(heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden_size, vocab_size, bias=False, device="meta") for _ in range(1 if shared else heads)
        )
        for block in self.blocks:
            for parameter in block.parameters():
                nn.init.zeros_(parameter)
        for head in self.lm_heads:
            head.weight = lm_head if shared else nn.Parameter(lm_head.detach().clone())
        self.markov_head = MarkovBias(vocabulary or vocab_size, vocab_size, markov) if markov is not None else None

    def __iter__(self) -> Iterator[tuple[nn.Module, Tensor]]:
        """Yield each head's block and W2 [V, H]."""
        weights = [head.get_parameter("weight") for head in self.lm_heads]
        return zip(self.blocks, cycle(weights), strict=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of every head without the Markov bias: [..., H] -> [K, ..., V]."""
        if len(self.lm_heads) == 1:  # one product reads a shared W2 once, not K times
            return self.lm_heads[0](torch.stack([block(hidden) for block in self.blocks]))
        return torch.stack([F.linear(block(hidden), weight) for block, weight in self])

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.lm_heads[0].get_parameter("weight").shape[0]

    @property
    def depth(self) -> int:
        """K."""
        return len(self.blocks)

    def product(self, head: int, hidden: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [T, F] and weights [V, F] whose product is a head's logits, the bias included.

        Args:
            hidden: [T, H], the states it reads. before: [T], the tokens before those that it predicts.
        """
        features, weight = self.blocks[head](hidden), [*self][head][1]
        if self.markov_head is None:
            return features, weight
        bias = self.markov_head
        return torch.cat((features, bias.markov_w1(before)), -1), torch.cat((weight, bias.markov_w2.weight), -1)

    def tokens(self, hidden: Tensor, last: Tensor, tree: Sequence[Path]) -> Tensor:
        """Return the tokens of a tree, see ``Heads.tokens``: [b, H], [b] -> [b, N]."""
        return tree_tokens(self(hidden), last, tree, self.markov_head)


class MedusaModel(nn.Module):
    """A language model and the heads on its last hidden state, as they train together.

    The forward pass is the language model's own; the loss applies the heads to the hidden states.
    """

    def __init__(self, trunk: PreTrainedModel, heads: MedusaHeads):
        super().__init__()
        self.trunk, self.heads = trunk, heads

    def forward(self, **inputs: object) -> ModelOutput:
        """Return what the language model returns."""
        return self.trunk(**inputs)

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the language model's LM head."""
        return self.trunk.get_output_embeddings()


class ReducedHeads(nn.Module):
    """Medusa heads over some of the vocabulary; the logits of all other tokens are -inf.

    Args:
        heads: with ``len(tokens)`` rows a head. tokens: their ids, [V_d]. vocab_size: V.
    """

    def __init__(self, heads: MedusaHeads, tokens: Tensor, vocab_size: int):
        super().__init__()
        self.heads, self.vocab_size = heads, vocab_size
        self.kept: Tensor
        self.register_buffer("kept", tokens, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of every head without the Markov bias: [..., H] -> [K, ..., V]."""
        some = self.heads(hidden)
        everything = some.new_full((*some.shape[:-1], self.vocab_size), -torch.inf)
        everything[..., self.kept] = some
        return everything

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
        return tree_tokens(self.heads(hidden), last, tree, self.heads.markov_head, self.kept)
