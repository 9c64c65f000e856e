"""A checkpoint's tensors by the names that a model has for them, read one at a time."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from peftlab.checkpoints.io.shards import Shard, open_shards
from peftlab.checkpoints.io.tensorfiles import DTYPES
from peftlab.errors import PeftlabError
from peftlab.models.skeleton import Place, converted, places


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
