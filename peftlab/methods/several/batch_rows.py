"""Which adapter each row of a batch uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from peftlab.errors import PeftlabError

# Where a model's call has its batch, after the input that the model itself names.
_INPUTS = ("inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


class BatchRows:
    """The adapters of a batch's rows, for tensors with one entry per row, or several next to each other.

    Attributes:
        adapters: the names that occur, each once; an adapter's number is its position.
        numbers: the number of each row's adapter.
        repeats: how often ``generate`` repeats each row.
        batch: the number of rows of the present call. lengths: the first sizes that a tensor of this batch can have.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.adapters = list(dict.fromkeys(names))
        self.numbers = [self.adapters.index(name) for name in names]
        self.repeats = 1
        self.batch = len(names)
        self.lengths = {self.batch}
        self._known: dict[tuple[int, tuple[int, ...], torch.device], Tensor | slice[int, int, int]] = {}

    def called(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Take the sizes of a call of the model: a forward pre-hook.

        Raises:
            PeftlabError: the batch has another number of rows, or the model is in training mode.
        """
        if model.training:
            raise PeftlabError("adapter_names is for inference; call model.eval() first")
        named = [kwargs.get(key) for key in (getattr(model, "main_input_name", "input_ids"), *_INPUTS)]
        tensors = [value for value in (*args, *named) if isinstance(value, Tensor)]
        if not tensors:
            return
        rows, self.batch = len(self.numbers), tensors[0].shape[0]
        if self.batch not in (rows, rows * self.repeats):
            raise PeftlabError(f"adapter_names has {rows} names, and the batch {self.batch} rows")
        every = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 1]
        tokens = {value.shape[0] * value.shape[1] for value in every if value.shape[0] == self.batch}
        # Some models flatten rows and tokens into one dimension before a linear map.
        self.lengths = {rows, self.batch} | {n for n in tokens if n % rows == 0}

    def length(self, x: Tensor, leaf: str) -> int:
        """Return the first size of ``x``, the input of the module ``leaf``.

        Raises:
            PeftlabError: the size is not one that a tensor of this batch has.
        """
        if x.ndim and x.shape[0] in self.lengths:
            return x.shape[0]
        raise PeftlabError(
            f"adapter_names: {leaf} receives a tensor of shape {tuple(x.shape)}, which does not begin with the "
            f"{self.batch} rows of the batch; run the rows of each adapter by themselves (peftlab.set_adapter)"
        )

    def index(self, length: int, numbers: tuple[int, ...], device: torch.device) -> Tensor | slice[int, int, int]:
        """Return the positions, of ``length``, of these adapters' rows: a slice, if they are one."""
        key = (length, numbers, device)
        if key not in self._known:
            times = length // len(self.numbers)
            mine = [row * times + i for row, n in enumerate(self.numbers) if n in numbers for i in range(times)]
            one = mine[-1] - mine[0] + 1 == len(mine)
            self._known[key] = slice(mine[0], mine[-1] + 1) if one else torch.tensor(mine, device=device)
        return self._known[key]
