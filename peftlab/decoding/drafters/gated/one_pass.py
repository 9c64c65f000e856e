"""Drafting in the verification pass: behind every token that may be the last accepted one, masks are read with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peftlab.decoding.drafters.base import PossibleDraft, Proposal, Row, TargetState, Verified
from peftlab.decoding.drafters.parallel_drafter import ParallelDrafter
from peftlab.decoding.engines.base import Engine, Output
from peftlab.decoding.engines.cache import Block, KVCache
from peftlab.decoding.trees import shape_of
from peftlab.methods.lora.gate import Gate


@dataclass(kw_only=True)
class OnePass(ParallelDrafter):
    """A gated LoRA whose masks the target reads while it verifies (Samragh et al. 2025, arXiv 2507.11851).

    A step reads the last token, N drafted ones, and k masks behind each of them: (N + 1)(k + 1) rows. Whatever is
    accepted, k tokens are drafted for the next step: the masks behind the last accepted one, the first of which stands
    in the place of the token that verification adds, predict those after it. The first step of a sequence drafts
    nothing.

    Attributes:
        gate: of the target's LoRA. masks: k is one less than its ``length``.
    """

    gate: Gate
    name: str = "one_pass"
    shares_cache: bool = field(default=True, init=False)
    _behind: Output | None = field(init=False, repr=False, default=None)  # of each node's masks: [b, N+1, k, ...]
    _next: dict[int, Output] = field(init=False, repr=False, default_factory=dict)  # of each row's: [k, ...]
    _wanted: int = field(init=False, repr=False, default=1)

    def __post_init__(self) -> None:
        self.masks = replace(self.masks, length=self.masks.length - 1)

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._next = {}
        super().start(rows, state)

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        self._wanted = max(budgets)
        return super().propose(rows, budgets)

    @property
    def _certain(self) -> bool:
        return False

    def _room(self, row: Row) -> int:
        return min(super()._room(row), len(self._next[row.index].logits)) if row.index in self._next else 0

    def _places(self, rows: list[Row], n: int) -> Output:
        """Return what the last step's masks gave for each row; nothing is read."""
        blank = next(iter(self._next.values()))
        each = [self._next.get(row.index, blank) for row in rows]
        logits, hidden = ([getattr(found, name)[:n] for found in each] for name in ("logits", "hidden"))
        return Output(pad_sequence(logits, batch_first=True), pad_sequence(hidden, batch_first=True))

    def read(self, target: Engine, cache: KVCache, inputs: Tensor, draft: Proposal, block: Block) -> Output:
        b, nodes = inputs.shape
        free = cache.capacity - max(block.starts)
        k = min(self.masks.length, self._wanted, free // nodes - 1)
        if k < 1:
            self._behind = None
            return target.forward(cache, inputs, block)
        # Mask m behind node j, of which node 0 is the last known token, is node N + jk + m of the tree.
        behind = [j - 1 if m == 0 else nodes - 2 + j * k + m for j in range(nodes) for m in range(k)]
        tree = shape_of([(*draft.parents_of(i), *behind) for i in range(b)])
        masks = torch.tensor(self.masks.ids(k) * nodes, device=inputs.device).expand(b, -1)
        tokens = torch.cat((inputs, masks), 1)
        gated = torch.arange(tokens.shape[1], device=inputs.device) >= nodes
        with self.gate.over(gated.expand(b, -1)):
            output = target.forward(cache, tokens, replace(block, n=tokens.shape[1], tree=tree))
        logits, hidden = (x[:, nodes:].unflatten(1, (nodes, k)) for x in (output.logits, output.hidden))
        self._behind = Output(logits, hidden)
        features = None if output.features is None else output.features[:, :nodes]
        return Output(output.logits[:, :nodes], output.hidden[:, :nodes], features)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        for i, (row, path) in enumerate(zip(rows, verified.paths, strict=True)):
            self._next.pop(row.index, None)
            if self._behind is not None:
                last = path[-1] + 1 if path else 0
                self._next[row.index] = Output(self._behind.logits[i, last], self._behind.hidden[i, last])

    def possible(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[PossibleDraft]:
        """See ``Drafter.possible``: none, as the time of a step by the number of drafted tokens is not that of them."""
        return []
