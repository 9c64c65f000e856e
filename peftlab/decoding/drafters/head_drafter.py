"""Drafting with Medusa heads, as a chain or as a tree; reading them from a directory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from peftlab.checkpoints.io.tensorfiles import read_tensors
from peftlab.decoding.drafters.base import Draft, Row, TargetState, Verified
from peftlab.decoding.verification.tree import best_tree, tree_shape
from peftlab.errors import PeftlabError
from peftlab.files import member, read_object
from peftlab.methods.medusa_heads import MedusaHeads, ReducedHeads


class Heads(Protocol):
    """What a drafter needs of Medusa heads.

    Attributes:
        vocab_size: V.
    """

    @property
    def vocab_size(self) -> int: ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights; their dtype and device are those of the computation."""
        ...

    def best(self, hidden: Tensor, width: int) -> Tensor:
        """Return each head's ``width`` most probable tokens, the best first: [..., H] -> [K, ..., width]."""
        ...


@dataclass
class MedusaDrafter:
    """Candidates from heads on the target's last hidden state; the draft has no cache and runs no model.

    γ counts drafted tokens: a chain takes the first choice of γ heads, a tree the γ most probable nodes over
    the heads' best choices. Candidates are the heads' top tokens, so verification treats them as deterministic.

    Attributes:
        heads: head i predicts i + 2 positions ahead.
        width: choices of a head that a tree may use; 1 is a chain.
        name: for reports.
    """

    heads: Heads
    width: int = 1
    name: str = "medusa"
    _hidden: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        states = zip(rows, state.hidden, strict=True)
        self._hidden = {row.index: hidden for row, hidden in states if hidden is not None}
        self._vocab = state.vocab_size

    @torch.inference_mode()
    def propose(self, rows: list[Row], budgets: list[int]) -> Draft:
        weight = next(self.heads.parameters())
        device = weight.device
        # A prompt of one token has no hidden state yet: nothing is drafted for it in the first step.
        budgets = [b if row.index in self._hidden else 0 for row, b in zip(rows, budgets, strict=True)]
        if not any(budgets):
            return Draft.empty(len(rows), device)
        blank = torch.zeros_like(next(iter(self._hidden.values())))
        hidden = torch.stack([self._hidden.get(row.index, blank) for row in rows])
        if self.heads.vocab_size != self._vocab:
            raise PeftlabError(f"medusa: vocabulary of {self.heads.vocab_size}, but the target's has {self._vocab}")
        best = self.heads.best(hidden.to(weight.dtype), self.width)  # [K, b, width]
        tree = best_tree(max(budgets), len(best), self.width)
        tokens = torch.stack([best[len(path) - 1, :, path[-1]] for path in tree], 1)
        allowed = torch.arange(len(tree), device=device) < torch.tensor(budgets, device=device)[:, None]
        return Draft(torch.where(allowed, tokens, -1), shape=tree_shape(tree) if self.width > 1 else None)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        # The state from which a row's newest token was chosen: that of the last accepted node, or of the root.
        for i, (row, path) in enumerate(zip(rows, verified.paths, strict=True)):
            self._hidden[row.index] = verified.output.hidden[i, path[-1] + 1 if path else 0]

    def select(self, slots: list[int]) -> None:
        pass


def is_medusa(directory: str | Path) -> bool:
    """Whether a directory contains Medusa heads as ``drafting.head_files.write_medusa`` writes them."""
    config = Path(directory) / "config.json"
    return config.is_file() and read_object(config).get("model_type") == "medusa"


def read_medusa(directory: str | Path) -> MedusaHeads | ReducedHeads:
    """Return the heads in a directory that ``write_medusa`` wrote; every key is used exactly once.

    Raises:
        PeftlabError: the configuration is of another type, or a key is missing or unknown.
    """
    directory = Path(directory)
    config = read_object(directory / "config.json")
    if config.get("model_type") != "medusa":
        raise PeftlabError(f"{directory}: model_type is {config.get('model_type')!r}, not medusa")
    tensors, _ = read_tensors(directory / "model.safetensors")
    sizes = ("truncated_vocab_size", "hidden_size", "num_heads", "vocab_size")
    rows, width, count, vocabulary = (member(config, key, int, directory / "config.json") for key in sizes)
    if min(rows, width) < 1 or max(rows, width) >= 2**31 or not 1 <= count <= len(tensors):
        raise PeftlabError(f"{directory / 'config.json'}: {', '.join(sizes[:3])} are not those of the heads beside it")
    with torch.device("meta"):
        blank = nn.Parameter(torch.empty(rows, width))
        bias, shared = (bool(config.get(key, False)) for key in ("medusa_fc_bias", "original_lm_head"))
        heads = MedusaHeads(blank, count, bias, shared)
    reduced = rows < vocabulary
    expected = set(heads.state_dict()) | ({"token_map"} if reduced else set())
    if expected != set(tensors):
        odd = sorted(expected ^ set(tensors))
        raise PeftlabError(f"{directory}: keys that do not fit its configuration: {', '.join(odd[:5])}")
    tokens = tensors.pop("token_map", None)
    for name, parameter in heads.state_dict().items():
        if tensors[name].shape != parameter.shape:
            shapes = f"{tuple(tensors[name].shape)}, its configuration says {tuple(parameter.shape)}"
            raise PeftlabError(f"{directory}: {name} has shape {shapes}")
    heads.load_state_dict(tensors, assign=True)
    return heads.eval() if tokens is None else ReducedHeads(heads, tokens, vocabulary).eval()
