"""Hydra heads on disk."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from peftlab.drafting.kinds.hydra.hydra_heads import HydraHeads
from peftlab.drafting.kinds.medusa.head_files import read_heads, write_heads
from peftlab.drafting.kinds.medusa.head_stack import HeadStack, ReducedHeads
from peftlab.errors import PeftlabError
from peftlab.files import Json


def write_hydra(heads: HydraHeads, out: Path, *, tokens: Tensor | None = None, overwrite: bool = False) -> Path:
    """Write heads without the target's embeddings; arguments as for ``medusa.head_files.write_heads``."""
    config: dict[str, Json] = {
        "architectures": ["HydraModel"],
        "model_type": "hydra",
        "embedding_size": heads.embedding.shape[1],
    }
    return write_heads(
        heads, config, out, lambda place: read_hydra(place, heads.embedding), tokens=tokens, overwrite=overwrite
    )


def read_hydra(directory: str | Path, embedding: Tensor) -> HeadStack | ReducedHeads:
    """Return the heads in a directory; see ``medusa.head_files.read_heads``.

    Args:
        embedding: the target's, [V, D].

    Raises:
        PeftlabError: they read embeddings of another width or vocabulary.
    """

    def make(config: dict[str, Json], blank: Tensor, count: int, shared: bool, vocabulary: int) -> HydraHeads:
        stored = (vocabulary, config.get("embedding_size"))
        if stored != tuple(embedding.shape):
            raise PeftlabError(
                f"{directory}: heads that read embeddings of {stored[0]} tokens and width {stored[1]}, but the target "
                f"has {embedding.shape[0]} of {embedding.shape[1]}"
            )
        return HydraHeads(blank, count, embedding, shared)

    return read_heads(directory, "hydra", make)
