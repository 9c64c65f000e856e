"""How many tokens a model has positions for, measured on the model itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from peftlab.untyped import Function

_TOKENS = 4
_PRODUCTS = frozenset({F.linear, torch.addmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__})


def position_limit(model: PreTrainedModel) -> int | None:
    """Return how many tokens ``model`` has positions for; None where nothing limits them.

    The configuration's ``max_position_embeddings`` is not that number everywhere: RoBERTa and its relatives count
    positions from the padding token's id + 1, BART's table has two more rows. So a few tokens are embedded and the
    tables that are read at consecutive rows are recorded: one of n rows whose first token reads row k has positions
    for n - k tokens. Without such a table the configuration's number is used.

    Args:
        model: on the CPU, in eval mode; it is not changed.
    """
    declared = getattr(model.config, "max_position_embeddings", None) or 0  # XLNet, which has no limit, has -1
    limits = [declared] * (declared > 0) + [rows - first for rows, first in _tables(model)]
    return min(limits, default=None)


class _EmbeddingsDone(Exception):
    """Raised at the first matrix product: the embeddings are complete."""


class _Lookups(TorchFunctionMode):
    """Notes the embedding tables that are read at consecutive rows: number of rows, and the first that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int]] = []

    def __torch_function__(
        self,
        func: Function[object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in _PRODUCTS:
            raise _EmbeddingsDone
        if func is F.embedding:
            match args:
                case [Tensor() as ids, Tensor() as table, *_]:
                    self._note(ids, table)
        return func(*args, **(kwargs or {}))

    def _note(self, ids: Tensor, table: Tensor) -> None:
        if ids.dim() == 0 or ids.shape[-1] < _TOKENS:
            return
        rows = ids.reshape(-1, ids.shape[-1])[:, :_TOKENS]  # more where a model pads to a window's width
        first = int(rows[0, 0])
        if torch.equal(rows, torch.arange(first, first + _TOKENS, device=rows.device).expand_as(rows)):
            self.found.append((table.shape[0], first))


def _tables(model: PreTrainedModel) -> Iterable[tuple[int, int]]:
    pad = getattr(model.config, "pad_token_id", None)
    size = model.config.get_text_config().vocab_size
    ids = [token for token in range(min(size, 2 * _TOKENS)) if token != pad][:_TOKENS]
    if len(ids) < _TOKENS:
        return []
    with torch.no_grad(), _Lookups() as lookups:
        try:
            model(input_ids=torch.tensor([ids[::-1]], device=model.device))  # decreasing: not mistaken for positions
        except _EmbeddingsDone:
            pass
        except Exception:  # four tokens alone are no valid input for this model: its configuration is used
            return []
    return lookups.found
