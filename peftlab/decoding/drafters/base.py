"""What every drafter is to the decoder, and the drafters that run a model.

A drafter sees sequences as ``Row`` objects. It proposes tokens, is then shown what the target made of them,
and keeps or crops whatever it remembers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from peftlab.decoding.draft_length import Policy
from peftlab.decoding.engines.build import Engine, Output
from peftlab.decoding.engines.cache import Block, KVCache
from peftlab.decoding.verification.sampling import RandomSource, probabilities, sample
from peftlab.decoding.verification.tree import TreeShape
from peftlab.errors import PeftlabError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, by target and draft alike.

    Attributes:
        temperature: 0 is greedy.
        top_k, top_p: cuts, see ``sampling.probabilities``; an error at temperature 0, which ignores them.
        seed: row i of the prompts has its own generator, seeded ``seed + i``.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.probabilities(torch.zeros(1))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """[..., V] -> [..., V]."""
        return probabilities(logits, self.temperature, self.top_k, self.top_p)


@dataclass
class Row:
    """A sequence on its way.

    Attributes:
        place: which of the caller's prompts it is.
        slot: its row in every cache.
        tokens: prompt and output so far; the last one is in no cache yet.
        prompt: length of the prompt.
        policy: its draft length.
        generator: its randomness.
    """

    index: int
    slot: int
    tokens: list[int]
    prompt_length: int
    policy: Policy
    generator: torch.Generator


class RowRandomSource(RandomSource):
    """A RandomSource with one generator a row, so that a row's luck does not depend on its neighbours."""

    def __init__(self, rows: list[Row]):
        super().__init__()
        object.__setattr__(self, "generators", [row.generator for row in rows])

    generators: list[torch.Generator]

    def bernoulli(self, probability: Tensor) -> Tensor:
        """Return booleans [b, ...], row i's from generator i."""
        return torch.stack(
            [RandomSource(g).bernoulli(row) for g, row in zip(self.generators, probability, strict=True)]
        )

    def of(self, i: int) -> RandomSource:
        """Return row i's source alone."""
        return RandomSource(self.generators[i])

    def draw(self, probs: Tensor) -> Tensor:
        """Return one index a row: [b, ..., V] -> [b, ...], row i's from generator i."""
        return torch.stack([sample(row, g) for g, row in zip(self.generators, probs, strict=True)])


@dataclass
class Draft:
    """Proposed tokens for b rows.

    Attributes:
        tokens: [b, N]; -1 where a row has fewer.
        probs: [b, N, V], what each token was drawn from, zeros at -1; None if the draft is deterministic.
        logits: [b, N, V] of the draft model before temperature, for measurements; None without a model.
        shape: the tree the tokens form; None for a chain.
    """

    tokens: Tensor
    probs: Tensor | None = None
    logits: Tensor | None = None
    shape: TreeShape | None = None


@dataclass
class Verified:
    """What the target made of a draft.

    Attributes:
        inputs: [b, N+1], the last known token of each row and the drafted ones, which the target read.
        draft: the draft.
        output: the target's output for the inputs.
        paths: accepted nodes of each row, as indices into the draft.
        next_tokens: the token after each path.
    """

    inputs: Tensor
    draft: Draft
    output: Output
    paths: list[list[int]]
    next_tokens: list[int]


@dataclass
class TargetState:
    """The target's state after it has read all prompts but their last tokens.

    Attributes:
        cache: the target's.
        hidden: last hidden state of each row, [H]; None for a prompt of one token.
        vocab_size: V of the target.
        sampling: how tokens are chosen.
    """

    cache: KVCache
    hidden: list[Tensor | None]
    vocab_size: int
    sampling: Sampling


class Drafter(Protocol):
    """Anything that guesses the next tokens.

    Attributes:
        name: for reports.
    """

    name: str

    def start(self, rows: list[Row], state: TargetState) -> None:
        """Take up new sequences; those before are done."""
        ...

    def propose(self, rows: list[Row], budgets: list[int]) -> Draft:
        """Propose at most ``budgets[i]`` tokens for ``rows[i]``; some budget is at least 1."""
        ...

    def accept(self, rows: list[Row], verified: Verified) -> None:
        """Learn from the verification; ``rows`` hold their new tokens already."""
        ...

    def select(self, slots: list[int]) -> None:
        """Keep only the sequences in these slots, in this order."""
        ...


def block_of(rows: list[Row], cache: KVCache, starts: list[int], n: int, shape: TreeShape | None = None) -> Block:
    """Return where n new tokens of each row go."""
    slots = tuple(row.slot for row in rows)
    tree = None if shape is None else (shape.depths, shape.below)
    return Block(tuple(starts), n, None if slots == tuple(range(cache.batch)) else slots, tree)


def prefill(engine: Engine, cache: KVCache, rows: list[Row]) -> list[Tensor | None]:
    """Read every prompt but its last token; return the hidden states of the last tokens read."""
    lengths = [len(row.tokens) - 1 for row in rows]
    if not any(lengths):
        return [None] * len(rows)
    block = block_of(rows, cache, [0] * len(rows), max(lengths))
    tokens = right_padded([row.tokens[:-1] for row in rows], block.n).to(engine.device)
    keep = sorted({length - 1 for length in lengths if length})
    hidden = engine.forward(cache, tokens, block, keep).hidden
    return [hidden[i, keep.index(n - 1)] if n else None for i, n in enumerate(lengths)]


def right_padded(sequences: list[list[int]], n: int, filler: int = 0) -> Tensor:
    """Return sequences of at most n tokens as [b, n]."""
    return torch.tensor([[*s, *[filler] * (n - len(s))] for s in sequences], dtype=torch.long)


@dataclass
class ModelDrafter:
    """A smaller model, or the target's own first layers.

    Attributes:
        engine: of the draft.
        name: for reports.
        shares_cache: the draft is the target's first layers (``truncate(target, range(k), share=True)``): what
            the target has cached for them is the draft's cache, and nothing is read twice.
    """

    engine: Engine
    name: str = "draft"
    shares_cache: bool = False
    _cache: KVCache = field(init=False, repr=False)
    _sampling: Sampling = field(init=False, repr=False)
    _read: dict[int, int] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        if self.engine.vocab_size != state.vocab_size:
            raise PeftlabError(
                f"draft: vocabulary of {self.engine.vocab_size} rows, but the target's has {state.vocab_size}; "
                "if the tokenizers are the same, build both engines with vocabulary=len(tokenizer)"
            )
        self._sampling = state.sampling
        self._read = {row.index: len(row.tokens) - 1 for row in rows}
        self._cache = state.cache
        if not self.shares_cache:
            self._cache = KVCache(self.engine.layers, len(rows), state.cache.capacity)
            readable = [row for row in rows if self._room(row) >= 0]
            if readable:
                prefill(self.engine, self._cache, readable)

    def _room(self, row: Row) -> int:
        """How many tokens the draft can still propose before its own context is full."""
        return len(row.tokens) if self.engine.limit is None else self.engine.limit - len(row.tokens) + 1

    def propose(self, rows: list[Row], budgets: list[int]) -> Draft:
        budgets = [min(budget, max(0, self._room(row))) for row, budget in zip(rows, budgets, strict=True)]
        gamma = max(budgets)
        if gamma == 0:
            return Draft(torch.full((len(rows), 0), -1, device=self.engine.device))
        random, greedy = RowRandomSource(rows), self._sampling.greedy
        watched = any(row.policy.needs_confidence for row in rows)
        lengths = [len(row.tokens) for row in rows]
        tokens, probs, logits = [], [], []
        drafted = [0] * len(rows)
        output = self._catch_up(rows)
        for i in range(gamma):
            step = output.logits[:, -1]
            q = self._sampling.probabilities(step) if not greedy else step.softmax(-1) if watched else step
            x = step.argmax(-1) if greedy else random.draw(q)
            going = torch.tensor([i < budget for budget in budgets], device=x.device)
            drafted = [i + 1 if i < budget else n for n, budget in zip(drafted, budgets, strict=True)]
            tokens.append(torch.where(going, x, -1))
            logits.append(step)
            if not greedy:
                probs.append(torch.where(going[:, None], q, 0))
            if watched:
                confidence = q.gather(-1, x[:, None])[:, 0].tolist()
                for j, row in enumerate(rows):
                    if i < budgets[j] and not row.policy.should_continue(confidence[j], output.hidden[j, -1]):
                        budgets[j] = i + 1
            if i + 1 >= max(budgets):
                break
            block = block_of(rows, self._cache, [length + i for length in lengths], 1)
            output = self.engine.forward(self._cache, x[:, None], block)
        for row, length, n in zip(rows, lengths, drafted, strict=True):
            self._read[row.index] = length + max(0, n - 1)
        return Draft(torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None, torch.stack(logits, 1))

    def _catch_up(self, rows: list[Row]) -> Output:
        """Read what the target has added since, one token or two; the output is of each row's last token."""
        starts = [len(row.tokens) - 1 if self.shares_cache else self._read[row.index] for row in rows]
        new = [row.tokens[start:] for row, start in zip(rows, starts, strict=True)]
        n = max(map(len, new))
        keep = sorted({len(tokens) - 1 for tokens in new})
        block = block_of(rows, self._cache, starts, n)
        output = self.engine.forward(self._cache, right_padded(new, n).to(self.engine.device), block, keep)
        if len(keep) == 1:
            return output
        last = torch.tensor([keep.index(len(tokens) - 1) for tokens in new], device=self.engine.device)
        each = torch.arange(len(rows), device=self.engine.device)
        return Output(output.logits[each, last][:, None], output.hidden[each, last][:, None])

    def accept(self, rows: list[Row], verified: Verified) -> None:
        # Slots past the first rejection hold another future: forgetting them is the whole crop.
        for row in rows:
            self._read[row.index] = min(self._read[row.index], len(row.tokens) - 1)

    def select(self, slots: list[int]) -> None:
        if not self.shares_cache:
            self._cache.select(slots)
