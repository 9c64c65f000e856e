"""Keys that a reader of papers may try and that are refused, each with the reason.

The figures are in docs/guide/efficiency.md.
"""

from __future__ import annotations

from peftlab.files import Json

_UNSTRUCTURED = (
    "single zeros in a weight save no time: with half of them a product took 5.1 times as long as the dense on a CPU; "
    "fewer trained layers (train.layers) do"
)
_TWO_OF_FOUR = (
    "2:4 sparsity needs a GPU's sparse products, which torch refuses on CPUs, and the largest gradients are biased; "
    "train.emulate.prune shows what an unbiased kind does to the score"
)
_GATES = (
    "gates that depend on the input make the rows of a batch disagree and break caches of keys and values; choices "
    "of train.layers are the same for all rows"
)
_SIGNS = (
    "predictive sign gradients save only on hardware that computes leading bits first, and signs are biased; "
    "train.emulate.gradients shows few bits with an unbiased rounding"
)
_LOCAL_BLOCKS = (
    "blocks with exits of their own train another objective, and fewer bytes come with the same gradients: set "
    "train.gradient_accumulation_steps, or gradient_checkpointing"
)
_REASONS = {
    ("train", "sparsity"): _UNSTRUCTURED,
    ("train", "gates"): _GATES,
    ("train", "layers", "gates"): _GATES,
    ("train", "sign_gradients"): _SIGNS,
    ("train", "local_blocks"): _LOCAL_BLOCKS,
}


def refusal(keys: tuple[str, ...], value: Json) -> str | None:
    """Return why the key at ``keys`` is refused, whatever its value; None for a key that is merely unknown."""
    if keys == ("train", "sparsity") and value == "2:4":
        return _TWO_OF_FOUR
    return _REASONS.get(keys)
