"""The weights that a quantised base computes with, computed again from the checkpoint it was quantised from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from peftlab.checkpoints.quantised.int8 import int8_codes, int8_values
from peftlab.checkpoints.quantised.nf4 import BLOCK, nf4_codes, nf4_values
from peftlab.errors import PeftlabError
from peftlab.models.base_format import BaseFormat, digest, is_linear, is_transposed
from peftlab.models.dtypes import DTYPES


class TrainingWeights:
    """The values of a base's weights after quantisation, by parameter.

    A weight may have been converted to another dtype before it was quantised, which gives other codes: peftlab
    quantises what is stored, ``from_pretrained(dtype=...)`` what it converted. The codes of one weight tell which.

    Args:
        model: the base, on the meta device, injected or not. how: its format in training.
        read: name to the stored weight; None where it is not stored by itself.
        source: the adapter's path, for messages.

    Raises:
        PeftlabError: a format that is not computed here, or the codes are not those of training.
    """

    def __init__(self, model: nn.Module, how: BaseFormat, read: Callable[[str], Tensor | None], source: str) -> None:
        known = how.dtype == "int8" or (how.dtype == "nf4" and how.block == BLOCK)
        if not known:
            blocks = f" in blocks of {how.block}" if how.block not in (0, BLOCK) else ""
            raise PeftlabError(
                f"{source}: its base was quantised to {how.dtype}{blocks}, which is not computed again here; "
                "--into original adds the update to the weights as they are stored"
            )
        self.how = how
        self.transposed = {
            f"{name}.weight": is_transposed(module)
            for name, module in model.named_modules()
            if is_linear(module) and name not in how.left
        }
        self.loaded = self._loaded(read, source)

    def __contains__(self, name: str) -> bool:
        return name in self.transposed

    def values(self, name: str, weight: Tensor) -> Tensor:
        """Return what the model computed with in place of ``weight`` as it is stored; in fp32."""
        matrix, compute = self._matrix(name, weight, self.loaded), DTYPES[self.how.compute]
        if self.how.dtype == "int8":
            found = int8_values(matrix, dtype=compute)
        else:
            found = nf4_values(matrix, double=self.how.double_quant, dtype=compute)
        return found.t().contiguous() if self.transposed[name] else found

    def _matrix(self, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
        matrix = weight.to(dtype)
        return matrix.t() if self.transposed[name] else matrix

    def _loaded(self, read: Callable[[str], Tensor | None], source: str) -> torch.dtype:
        """Return the dtype that the weights had when they were quantised."""
        name = f"{self.how.first}.weight"
        weight = read(name)
        if not self.how.digest or weight is None:
            return torch.float32
        if name in self.transposed:
            codes = int8_codes if self.how.dtype == "int8" else nf4_codes
            for dtype in DTYPES.values():
                if digest(codes(self._matrix(name, weight, dtype))) == self.how.digest:
                    return dtype
        raise PeftlabError(
            f"{source}: {name} of this base does not have the codes that it had in training, so it is another base (or "
            "was quantised by other code); --into original adds the update to its weights as they are stored"
        )
