"""Drafting with a model: a smaller one, the target's own first layers, or one with a reduced vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.decoding.cache import (
    Block,
    Engine,
    EngineWrapper,
    KVCache,
    Output,
    WindowedCache,
    empty_cache,
    prefill,
    right_padded,
    spans,
)
from peftlab.decoding.decode import Drafter, Proposal, Row, TargetState, Verified, draft_chain
from peftlab.decoding.engines import build_engine
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.table import CHAIN, DRAWN, HEAD, Window
from peftlab.errors import PeftlabError
from peftlab.files import read_object, record_file, typed_value, write_json


def check_vocabulary(engine: Engine, state: TargetState) -> None:
    """Raise ``PeftlabError`` if the vocabularies of draft and target differ in size.

    Args:
        engine: of the draft. state: of the target.
    """
    if engine.vocab_size != state.vocab_size:
        raise PeftlabError(
            f"draft: vocabulary of {engine.vocab_size} rows, but the target's has {state.vocab_size}; "
            "if the tokenizers are the same, build both engines with vocabulary=len(tokenizer)"
        )


def context_room(engine: Engine, row: Row, budget: int) -> int:
    """Return the number of tokens that a draft can propose before its own context is full.

    Args:
        engine: of the draft. row: the sequence. budget: tokens asked for.
    """
    return budget if engine.limit is None else max(0, min(budget, engine.limit - len(row.tokens) + 1))


def read_rows(engine: Engine, cache: KVCache, rows: list[Row]) -> None:
    """Read all tokens but the last of each row into a draft's cache, except of rows that exceed its context.

    Args:
        engine, cache: of the draft. rows: the sequences.
    """
    readable = [row for row in rows if context_room(engine, row, 1)]
    if readable:
        prefill(engine, cache, [row.tokens for row in readable], [row.slot for row in readable], last=False)


@dataclass
class ModelDrafter(Drafter):
    """A smaller model, or the target's own first layers.

    Attributes:
        engine: of the draft.
        name: for reports.
        shares_cache: the draft is the target's first layers (``truncate(target, range(k), share=True)``): what
            the target has cached for them is the draft's cache, and nothing is read twice.
        least: a draft ends after a token before which no probability was as large; 0: at its policy's length.
        window: what the draft sees of a text, in a cache of constant size; None for all of it.
    """

    engine: Engine
    name: str = "draft"
    shares_cache: bool = False
    least: float = 0.0
    window: Window | None = None
    provides = frozenset({DRAWN, HEAD, CHAIN})
    has_logits = True
    _cache: KVCache = field(init=False, repr=False)
    _sampling: Sampling = field(init=False, repr=False)
    # Of each row: how many of its tokens are in the cache, and the drafted ones in the slots after them.
    _read: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    _ahead: dict[int, list[int]] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        check_vocabulary(self.engine, state)
        if (self.engine.encoder is None) != (state.cache.context is None):
            raise PeftlabError("draft: of target and draft only one is an encoder-decoder model; both or none must be")
        self._sampling = state.sampling
        self._read, self._ahead = {}, {}
        self._cache = state.cache
        if not self.shares_cache:
            # A block begins at each sequence's own length and is as long as the longest has tokens to read.
            self._cache = self._own_cache(rows, 2 * state.cache.capacity)
        self.join(rows, state)

    def _own_cache(self, rows: list[Row], capacity: int) -> KVCache:
        if self.window is None:
            return empty_cache(self.engine, capacity, [row.source for row in rows])
        if not self.engine.positioned:
            raise PeftlabError("draft_window: the draft does not place its tokens by position, as a window needs")
        return WindowedCache(self.engine.layers, len(rows), capacity, self.window)

    def join(self, rows: list[Row], state: TargetState) -> None:
        self._read |= {row.index: len(row.tokens) - 1 for row in rows}
        if not self.shares_cache:
            read_rows(self.engine, self._cache, rows)

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        budgets = [context_room(self.engine, row, budget) for row, budget in zip(rows, budgets, strict=True)]
        if max(budgets) == 0:
            return Proposal.empty(len(rows), self.engine.device)
        lengths, slots = [len(row.tokens) for row in rows], [row.slot for row in rows]

        def following(x: Tensor, output: Output, drawn: int) -> Output:
            block = self._cache.block(slots, [length + drawn for length in lengths], 1)
            return self.engine.forward(self._cache, x[:, None], block)

        draft = draft_chain(rows, budgets, self._catch_up(rows), following, self._sampling, least=self.least)
        # ``draft_chain`` has lowered the budgets to what was drafted; the last drafted token was not read.
        for row, length, budget, drafted in zip(rows, lengths, budgets, draft.tokens.tolist(), strict=True):
            self._read[row.index], self._ahead[row.index] = length, drafted[: max(0, budget - 1)]
        return draft

    def _catch_up(self, rows: list[Row]) -> Output:
        """Read the tokens added since the last draft; return the output of each row's last one, logits [b, 1, V]."""
        starts = [len(row.tokens) - 1 if self.shares_cache else self._read[row.index] for row in rows]
        new = [row.tokens[start:] for row, start in zip(rows, starts, strict=True)]
        logits: list[Tensor] = [torch.empty(0)] * len(rows)
        hidden = list(logits)
        for places, first, n in spans([len(tokens) for tokens in new], self._cache.most):
            parts = [new[place][first : first + n] for place in places]
            keep = sorted({len(part) - 1 for part in parts})
            block = self._cache.block([rows[i].slot for i in places], [starts[i] + first for i in places], n)
            output = self.engine.forward(self._cache, right_padded(parts, n).to(self.engine.device), block, keep)
            for i, (place, part) in enumerate(zip(places, parts, strict=True)):
                last = keep.index(len(part) - 1)
                logits[place], hidden[place] = output.logits[i, last], output.hidden[i, last]
        return Output(torch.stack(logits)[:, None], torch.stack(hidden)[:, None])

    def accept(self, rows: list[Row], verified: Verified) -> None:
        # Slots past the first token that differs from the output contain rejected tokens; a smaller length is the whole
        # crop. The output may have followed a branch that another drafter proposed.
        for row in rows:
            self._read[row.index] = min(self._read[row.index], len(row.tokens) - 1)
            for token in self._ahead.pop(row.index, ()):
                read = self._read[row.index]
                if read + 1 >= len(row.tokens) or row.tokens[read] != token:
                    break
                self._read[row.index] = read + 1
            if not self.shares_cache:
                self._cache.commit(row.slot, self._read[row.index])

    def select(self, slots: list[int]) -> None:
        if not self.shares_cache:
            self._cache.select(slots)


FILE = "draft_vocabulary.json"  # not safetensors: servers load every such file of a directory as weights


def write_draft_tokens(directory: str | Path, tokens: Tensor) -> None:
    """Write the reduced vocabulary of a draft to its directory.

    Args:
        directory: of the draft. tokens: [V_d], the only ids that it proposes.
    """
    record_file(Path(directory), FILE)
    write_json(Path(directory) / FILE, {"tokens": tokens.tolist()})


def read_draft_tokens(directory: str | Path) -> Tensor | None:
    """Return the reduced vocabulary of the draft in a directory, [V_d]; None where it proposes all tokens."""
    file = Path(directory) / FILE
    if not file.exists():
        return None
    tokens = typed_value(read_object(file), "tokens", list, file)
    if not tokens or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise PeftlabError(f"{file}: tokens must be a list of token ids")
    return torch.tensor(tokens)


class ReducedVocabulary(EngineWrapper):
    """An engine with an LM head for ``tokens`` alone; the logits of all other tokens are -inf.

    The acceptance of what it drafts is at most p(V_d), the target's probability of those tokens.

    Args:
        model: a draft that is not used otherwise; its LM head is replaced. tokens: [V_d], ids below ``vocabulary``.
        vocabulary: V, of the logits given. pack: see ``build_engine``.

    Raises:
        PeftlabError: a token id outside the vocabulary, or what ``build_engine`` raises.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor, vocabulary: int, *, pack: bool = True):
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise PeftlabError(f"{FILE}: token ids outside 0..{vocabulary - 1}, the vocabulary")
        whole = model.get_output_embeddings()
        assert isinstance(whole, nn.Linear)
        head = nn.Linear(whole.in_features, len(tokens), bias=whole.bias is not None, device="meta")
        head.weight = nn.Parameter(whole.weight.detach()[tokens], requires_grad=False)
        if whole.bias is not None:
            head.bias = nn.Parameter(whole.bias.detach()[tokens], requires_grad=False)
        model.set_output_embeddings(head)
        super().__init__(build_engine(model, pack=pack), f", {len(tokens):,} of {vocabulary:,} tokens")
        self.vocab_size = vocabulary
        self._tokens = tokens.to(self.device)

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run this engine on new tokens; see ``Engine.forward``."""
        output = self._engine.forward(cache, tokens, block, keep)
        some = output.logits
        logits = some.new_full((*some.shape[:-1], self.vocab_size), -torch.inf)
        return Output(logits.index_copy_(-1, self._tokens, some), output.hidden)
