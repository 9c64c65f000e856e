"""Drafting with a model: a smaller one, or the target's own first layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from peftlab.decoding.drafters.base import Draft, Row, TargetState, Verified
from peftlab.decoding.engines.base import Engine, Output
from peftlab.decoding.engines.cache import KVCache
from peftlab.decoding.engines.prefill import prefill, right_padded
from peftlab.decoding.verification.sampling import RowRandomSource, Sampling, forked
from peftlab.errors import PeftlabError


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
    # Of each row: how many of its tokens are in the cache, and the drafted ones in the slots after them.
    _read: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    _ahead: dict[int, list[int]] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        if self.engine.vocab_size != state.vocab_size:
            raise PeftlabError(
                f"draft: vocabulary of {self.engine.vocab_size} rows, but the target's has {state.vocab_size}; "
                "if the tokenizers are the same, build both engines with vocabulary=len(tokenizer)"
            )
        self._sampling = state.sampling
        self._read = {row.index: len(row.tokens) - 1 for row in rows}
        self._ahead = {}
        self._cache = state.cache
        if not self.shares_cache:
            self._cache = KVCache(self.engine.layers, len(rows), state.cache.capacity)
            readable = [row for row in rows if self._room(row) >= 0]
            if readable:
                prefill(self.engine, self._cache, [row.tokens for row in readable], [row.slot for row in readable])

    def _room(self, row: Row) -> int:
        """How many tokens the draft can still propose before its own context is full."""
        return len(row.tokens) if self.engine.limit is None else self.engine.limit - len(row.tokens) + 1

    def propose(self, rows: list[Row], budgets: list[int]) -> Draft:
        budgets = [min(budget, max(0, self._room(row))) for row, budget in zip(rows, budgets, strict=True)]
        gamma = max(budgets)
        if gamma == 0:
            return Draft.empty(len(rows), self.engine.device)
        # A row draws as long as the longest draft of the batch, which must not change what it draws afterwards.
        random, greedy = RowRandomSource(forked(row.generator for row in rows)), self._sampling.greedy
        watched = any(row.policy.needs_confidence for row in rows)  # only then is a greedy q worth its softmax
        lengths, slots = [len(row.tokens) for row in rows], [row.slot for row in rows]
        tokens, probs, logits = [], [], []
        output = self._catch_up(rows)
        for i in range(gamma):
            step = output.logits[:, -1]
            q = self._sampling.probabilities(step) if not greedy else step.softmax(-1) if watched else step
            x = step.argmax(-1) if greedy else random.draw(q)
            active = torch.tensor([i < budget for budget in budgets], device=x.device)
            tokens.append(torch.where(active, x, -1))
            logits.append(step)
            if not greedy:
                probs.append(torch.where(active[:, None], q, 0))
            if watched:
                confidence = q.gather(-1, x[:, None])[:, 0].tolist()
                for j, row in enumerate(rows):
                    if i < budgets[j] and not row.policy.should_continue(confidence[j], output.hidden[j, -1]):
                        budgets[j] = i + 1
            if i + 1 >= max(budgets):
                break
            block = self._cache.block(slots, [length + i for length in lengths], 1)
            output = self.engine.forward(self._cache, x[:, None], block)
        drafted = torch.stack(tokens, 1)
        # Each row has drafted its budget by now, and the last of these tokens was not read.
        for row, length, budget, ahead in zip(rows, lengths, budgets, drafted.tolist(), strict=True):
            self._read[row.index], self._ahead[row.index] = length, ahead[: max(0, budget - 1)]
        return Draft(drafted, torch.stack(probs, 1) if probs else None, torch.stack(logits, 1))

    def _catch_up(self, rows: list[Row]) -> Output:
        """Read the tokens that the last steps added; return the output of each row's last token."""
        starts = [len(row.tokens) - 1 if self.shares_cache else self._read[row.index] for row in rows]
        new = [row.tokens[start:] for row, start in zip(rows, starts, strict=True)]
        n = max(map(len, new))
        keep = sorted({len(tokens) - 1 for tokens in new})
        block = self._cache.block([row.slot for row in rows], starts, n)
        output = self.engine.forward(self._cache, right_padded(new, n).to(self.engine.device), block, keep)
        if len(keep) == 1:
            return output
        last = torch.tensor([keep.index(len(tokens) - 1) for tokens in new], device=self.engine.device)
        each = torch.arange(len(rows), device=self.engine.device)
        return Output(output.logits[each, last][:, None], output.hidden[each, last][:, None])

    def accept(self, rows: list[Row], verified: Verified) -> None:
        # Slots past the first token that differs from the output contain rejected tokens; a smaller length is the whole
        # crop. The output may have followed a branch that another drafter proposed.
        for row in rows:
            for token in self._ahead.pop(row.index, ()):
                read = self._read[row.index]
                if read + 1 >= len(row.tokens) or row.tokens[read] != token:
                    break
                self._read[row.index] = read + 1

    def select(self, slots: list[int]) -> None:
        if not self.shares_cache:
            self._cache.select(slots)
