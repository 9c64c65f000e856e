"""How the weights of target and draft are stored while they decode, for results: it decides how fast a step is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peftlab.drafting.load import Pair
from peftlab.pipelines.drafts.decoding_options import DecodingOptions


@dataclass(frozen=True)
class StoredWeights:
    """How the weights of a model are stored while it decodes.

    Attributes:
        dtype: of the model. packed: in what ways its products have them, beside the model's own or in place of them:
            in 16 bits, by oneDNN, as codes; empty: as the model has them.
    """

    dtype: str
    packed: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(self.packed) or 'as loaded'})"


def stored_weights(pair: Pair, options: DecodingOptions) -> dict[str, StoredWeights]:
    """Return it of the ``target``, and of the ``draft`` if that is a model."""
    stored = {"target": StoredWeights(options.dtype, pair.target.packed)}
    if pair.draft is not None:
        stored["draft"] = StoredWeights(options.draft_dtype or options.dtype, pair.draft.packed)
    return stored


def weights_line(stored: Mapping[str, StoredWeights]) -> str:
    """Return it as a line of text."""
    return "weights: " + "; ".join(f"{name} in {how}" for name, how in stored.items())
