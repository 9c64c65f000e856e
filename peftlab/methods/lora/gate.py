"""LoRA's additions on some rows of a batch alone: the other rows are the base model's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from peftlab.errors import PeftlabError

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Places:
    """Rows that get an addition, and the others, by their numbers; ``order``: the place of each row behind both."""

    own: Tensor
    others: Tensor
    order: Tensor


class Gate:
    """Says on which rows the additions of a model act; all leaves of a gated model have the same one.

    It is closed at first: no row gets an addition.
    """

    def __init__(self) -> None:
        self._places: _Places | None = None

    def show(self, rows: Tensor | None) -> None:
        """Let the additions act on these rows of the following passes, booleans of the batch [b, n]; None: on none.

        They stay as they are until the next call: a backward pass that computes layers again needs them, too.
        """
        if rows is None:
            self._places = None
            return
        flat = rows.flatten()
        own, others = flat.nonzero()[:, 0], (~flat).nonzero()[:, 0]
        self._places = _Places(own, others, torch.cat((others, own)).argsort())

    @contextmanager
    def over(self, rows: Tensor) -> Iterator[None]:
        """Within the block the additions act on these rows; afterwards as before."""
        before = self._places
        self.show(rows)
        try:
            yield
        finally:
            self._places = before

    def split(self, x: Tensor, plain: Map, adapted: Map) -> Tensor:
        """Return ``adapted`` of the rows with additions and ``plain`` of the others, for x [b, n, in].

        The others get no gradient: no parameter that trains is computed with before them.

        Raises:
            PeftlabError: x has other rows than the batch.
        """
        if self._places is None:
            return plain(x)
        flat = x.reshape(-1, x.shape[-1])
        self._check(flat, self._places)
        with torch.no_grad():
            others = plain(flat[self._places.others])
        y = torch.cat((others, adapted(flat[self._places.own]).to(others.dtype)))[self._places.order]
        return y.view(*x.shape[:-1], -1)

    def add(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Add x·Aᵀ·Bᵀ to the rows of y [..., out] with additions, in place, for x [..., in]; for inference."""
        if self._places is not None:
            own, flat = self._places.own, x.reshape(-1, x.shape[-1])
            self._check(flat, self._places)
            y.view(-1, y.shape[-1]).index_add_(0, own, flat[own].mm(a.t()).mm(b.t()))
        return y

    @staticmethod
    def _check(flat: Tensor, places: _Places) -> None:
        if len(flat) != len(places.order):
            raise PeftlabError(
                f"a gated addition is given {len(flat)} rows of a batch of {len(places.order)}: its module does not "
                "see one row for each token; take it out of target_modules"
            )
