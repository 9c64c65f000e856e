"""A checkpoint's tensors by the names that a model has for them, read one at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from peftlab.checkpoints.tensors import DTYPES, PickleShard, Shard, open_shards, read_at
from peftlab.errors import PeftlabError
from peftlab.models.skeleton import Place, converted, places

_PART = 8 << 20  # bytes of a file that are compared at a time


class NamedWeights:
    """The weights of a model directory.

    Args:
        directory: it. model: on the meta device; its names are used.

    Attributes:
        left_out: the keys that the model has no parameter for.
    """

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        self._model, self._shards = model, open_shards(directory)
        self._sources: dict[str, list[tuple[Shard, str, Place]]] = {}
        self.left_out: list[str] = []
        where = places(model, [key for shard in self._shards for key in shard.entries])
        for shard in self._shards:
            for key in shard.entries:
                place = where[key]
                if place is None:
                    self.left_out.append(key)
                    continue
                for name in place.names:
                    self._sources.setdefault(name, []).append((shard, key, place))

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def same(self, name: str, other: NamedWeights, other_name: str) -> bool:
        """Return whether another checkpoint's tensor is equal to this one's.

        Two tensors that are stored alike are compared in parts, as bytes.
        """
        mine, theirs = self._sources[name][0], other._sources[other_name][0]
        (shard, key, place), (their_shard, their_key, their_place) = mine, theirs
        whole = place.converter is None and their_place.converter is None
        if not whole or isinstance(shard, PickleShard) or isinstance(their_shard, PickleShard):
            a, b = self.read(name), other.read(other_name)
            return a.shape == b.shape and torch.equal(a, b)
        entry, their_entry = shard.entries[key], their_shard.entries[their_key]
        if (entry.dtype, entry.shape) != (their_entry.dtype, their_entry.shape):
            return False
        starts = range(0, entry.nbytes, _PART)
        return all(
            read_at(shard.descriptor, min(_PART, entry.nbytes - start), entry.offset + start)
            == read_at(their_shard.descriptor, min(_PART, entry.nbytes - start), their_entry.offset + start)
            for start in starts
        )

    def read(self, name: str) -> Tensor:
        """Return a tensor by the model's name; experts stored one by one become one tensor.

        Raises:
            PeftlabError: it is stored as codes of a quantisation.
        """
        sources = sorted(self._sources[name], key=lambda source: dot_natural_key(source[1]))
        for shard, key, _ in sources:
            dtype = DTYPES[shard.entries[key].dtype]
            if dtype.is_floating_point and dtype.itemsize < 2:
                raise PeftlabError(
                    f"{shard.path}: {key!r} is stored as {shard.entries[key].dtype}, not as plain weights"
                )
        shard, key, place = sources[0]
        if place.converter is None:
            return shard.read(key)
        parts = [((each.name, each.bare, each.pattern), file.read(one)) for file, one, each in sources]
        return converted(place.converter, parts, self._model)[name]

    def close(self) -> None:
        """Close the files."""
        for shard in self._shards:
            shard.close()
