"""The target's states of the training text, computed once and kept on disk, where every epoch reads them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peftlab.checkpoints.tensors import map_tensors, write_tensors
from peftlab.drafting.hidden_states import head_weight
from peftlab.drafting.kinds.eagle3.feature_loss import EagleModel, target_states
from peftlab.drafting.text.target_text import weights_digest, written_once
from peftlab.errors import PeftlabError
from peftlab.files import replacing

_PART = 32  # texts per file
_BATCH = 8  # texts that the target reads together


class StoredStates:
    """States of texts, mapped from files: what is not read takes no memory.

    Args:
        states: [n, F + H] in bfloat16 of each text, by its n tokens: the states that the network reads, and the one
            that the LM head reads.
    """

    def __init__(self, states: Mapping[tuple[int, ...], Tensor]):
        self._states = states

    def read(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the states of a batch of these texts, [b, n, F + H]; zeros where the mask [b, n] is 0."""
        lines = zip(ids.tolist(), mask.sum(1).tolist(), strict=True)
        found = pad_sequence([self._states[tuple(line[:length])] for line, length in lines], batch_first=True)
        return F.pad(found, (0, 0, 0, ids.shape[1] - found.shape[1])).to(ids.device)


@torch.no_grad()
def store_states(model: EagleModel, texts: Sequence[Sequence[int]], cache: Path, most: float) -> StoredStates:
    """Compute what is not in ``cache`` yet, file by file, each whole; return the states of all texts.

    Args:
        cache: directory of data sets; the states are in one named by a digest of weights, layers and text.
        most: GB (1e9 bytes) that they may take.

    Raises:
        PeftlabError: they would take more, or the disk has no room for them.
    """
    distinct = list(dict.fromkeys(map(tuple, texts)))
    features = model.network.features
    known = json.dumps([weights_digest(model.trunk), features, distinct])
    directory = cache / f"states-{hashlib.sha256(known.encode()).hexdigest()[:16]}"
    parts = {
        directory / f"part-{start // _PART:06d}.safetensors": distinct[start : start + _PART]
        for start in range(0, len(distinct), _PART)
    }
    each = (len(features) + 1) * head_weight(model).shape[1] * torch.bfloat16.itemsize
    missing = {path: part for path, part in parts.items() if not path.exists()}
    _check_room(cache, each, _tokens(parts.values()), _tokens(missing.values()), most)

    def write() -> None:
        for path in [path for path in missing if not path.exists()]:
            with replacing(path) as temporary:
                write_tensors(temporary, _computed(model, missing[path]), {})

    written_once([*parts], write)
    states: dict[tuple[int, ...], Tensor] = {}
    for path, part in parts.items():
        stored = map_tensors(path)
        states |= {text: stored[str(i)] for i, text in enumerate(part)}
    return StoredStates(states)


def _tokens(parts: Iterable[Sequence[tuple[int, ...]]]) -> int:
    return sum(len(text) for part in parts for text in part)


def _check_room(cache: Path, each: int, tokens: int, missing: int, most: float) -> None:
    size = f"the target's states of {tokens:,} tokens take {tokens * each / 1e9:.3g} GB ({each:,} bytes per token)"
    if tokens * each > most * 1e9:
        raise PeftlabError(
            f"draft.store_gb: {size}, more than {most:g}; raise it, train on less text, or leave it out to compute the "
            "states anew in every step"
        )
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if missing * each > free:
        raise PeftlabError(f"draft.store_gb: {size}, but {cache} has room for {free / 1e9:.3g} GB")


def _computed(model: EagleModel, texts: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
    """Return each text's states by its number."""
    device = head_weight(model).device
    found: dict[str, Tensor] = {}
    for start in range(0, len(texts), _BATCH):
        some = [torch.tensor(text, device=device) for text in texts[start : start + _BATCH]]
        mask = pad_sequence([torch.ones_like(text) for text in some], batch_first=True)
        states = torch.cat(target_states(model, pad_sequence(some, batch_first=True), mask), -1).bfloat16()
        found |= {str(start + i): states[i, : len(text)] for i, text in enumerate(some)}
    return found
