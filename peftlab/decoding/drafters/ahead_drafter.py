"""PEARL: the draft model works while the target does (Liu et al. 2024, arXiv 2408.11850).

In each phase the target reads the tokens that await verification, and a second thread drafts the γ after them. The
first of these needs no further step of the target, which has the distribution for it: it is verified at once. If it and
all before it are accepted, the other γ - 1 await verification in the next phase (post-verify), else nothing does, and
the next phase verifies the first new token alone (pre-verify). ``analysis/pearl.py`` has the expected tokens.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peftlab.decoding.drafters.base import Accept, Proposal, Row, TargetState, Verified
from peftlab.decoding.drafters.model_drafter import ModelDrafter
from peftlab.decoding.engines.base import Output
from peftlab.decoding.engines.recurrent.state_cache import StateCache
from peftlab.errors import PeftlabError


@dataclass(frozen=True)
class _Chain:
    """Drafted tokens of a row [n], what they were drawn from and the logits, [n, V] each; None as in ``Proposal``."""

    tokens: Tensor
    probs: Tensor | None
    logits: Tensor | None

    def part(self, begin: int, end: int | None = None) -> _Chain:
        """Return the tokens from ``begin`` up to ``end``."""
        probs, logits = (None if z is None else z[begin:end] for z in (self.probs, self.logits))
        return _Chain(self.tokens[begin:end], probs, logits)

    def and_then(self, other: _Chain) -> _Chain:
        """Return both, one after the other."""
        if not len(self.tokens) or not len(other.tokens):
            return self if len(self.tokens) else other
        pairs = (self.tokens, other.tokens), (self.probs, other.probs), (self.logits, other.logits)
        tokens, probs, logits = (None if a is None or b is None else torch.cat((a, b)) for a, b in pairs)
        assert tokens is not None
        return _Chain(tokens, probs, logits)


@dataclass
class AheadDrafter(ModelDrafter):
    """A smaller model that drafts in a thread of its own while the target verifies; see the module's text.

    Drafted tokens are drawn as ever, and verified against what they were drawn from, so that the output is exact.
    """

    name: str = "pearl"
    _thread: ThreadPoolExecutor = field(init=False, repr=False)
    _drafting: Future[Proposal] | None = field(init=False, repr=False, default=None)
    _waiting: dict[int, _Chain] = field(init=False, repr=False, default_factory=dict)
    _new: dict[int, _Chain] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._drafting, self._waiting, self._new = None, {}, {}
        super().start(rows, state)
        if isinstance(self._cache, StateCache):
            raise PeftlabError("drafter pearl: takes tokens back that it has read; a state-space draft cannot")

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        """Return the tokens that await verification; begin to draft those after them."""
        waiting = [self._waiting.pop(row.index, self._nothing()) for row in rows]
        ahead = [
            replace(row, tokens=row.tokens + chain.tokens.tolist()) for row, chain in zip(rows, waiting, strict=True)
        ]
        room = self._cache.capacity - max(len(row.tokens) for row in ahead)
        self._drafting = self._thread.submit(self._draft, ahead, [max(0, min(budget, room)) for budget in budgets])
        return _proposal(waiting)

    def _nothing(self) -> _Chain:
        return _Chain(torch.zeros(0, dtype=torch.long, device=self.engine.device), None, None)

    def _draft(self, rows: list[Row], budgets: list[int]) -> Proposal:
        with torch.inference_mode():  # which is a thread's own
            return super().propose(rows, budgets)

    @property
    def at_once(self) -> bool:
        return True

    def verify(self, rows: list[Row], inputs: Tensor, draft: Proposal, output: Output, accepted: Accept) -> Verified:
        """Wait for the new tokens, and verify the first of each row with those that awaited it."""
        if self._drafting is None:
            return super().verify(rows, inputs, draft, output, accepted)
        new, self._drafting = self._drafting.result(), None
        chains, read = [], (draft.tokens >= 0).sum(1).tolist()
        for i, row in enumerate(rows):
            self._new[row.index] = _of_row(new, i)
            chains.append(_of_row(draft, i).and_then(self._new[row.index].part(0, 1)))
        every = _proposal(chains)
        # No token follows one that was not read: what is drawn after it from this repeated place is not used.
        last = output.logits[:, -1:]
        padded = Output(torch.cat((output.logits, last), 1)[:, : every.tokens.shape[1] + 1], output.hidden)
        paths, following = accepted(every, padded)
        ahead = [len(path) > count for path, count in zip(paths, read, strict=True)]
        for i, path in enumerate(paths):
            if ahead[i]:
                following[i] = int(every.tokens[i, path.pop()])
        return Verified(inputs, every, padded, paths, following, ahead)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        known = []
        for i, row in enumerate(rows):
            new = self._new.pop(row.index, self._nothing())
            waiting = new.part(1) if verified.ahead and verified.ahead[i] else self._nothing()
            self._waiting[row.index] = waiting
            known.append(replace(row, tokens=row.tokens + waiting.tokens.tolist()))
        super().accept(known, verified)


def _of_row(proposal: Proposal, row: int) -> _Chain:
    tokens = proposal.tokens[row]
    n = int((tokens >= 0).sum())
    probs, logits = (None if z is None else z[row, :n] for z in (proposal.probs, proposal.logits))
    return _Chain(tokens[:n], probs, logits)


def _proposal(chains: list[_Chain]) -> Proposal:
    """Return chains of several lengths side by side."""
    tokens = pad_sequence([chain.tokens for chain in chains], batch_first=True, padding_value=-1)
    if not tokens.shape[1]:
        return Proposal(tokens)
    some = next(chain for chain in chains if len(chain.tokens))
    return Proposal(
        tokens,
        _side_by_side([chain.probs for chain in chains], some.probs),
        _side_by_side([chain.logits for chain in chains], some.logits),
    )


def _side_by_side(values: list[Tensor | None], like: Tensor | None) -> Tensor | None:
    if like is None:
        return None
    return pad_sequence([like[:0] if value is None else value for value in values], batch_first=True)
