"""Drafts that write several tokens in one pass on disk: a plain model whose configuration names the mask."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from peftlab.decoding.parallel_drafters import Masks
from peftlab.drafting.kinds.stored_drafts import says
from peftlab.drafting.plain_export import check_plain, copy_plain
from peftlab.errors import PeftlabError
from peftlab.files import member, read_object, write_json

_TYPE = "pard"  # the value of spd_type, as its authors write it


def write_masks(directory: Path, masks: Masks) -> None:
    """Name the mask in the configuration of a model, as ``pard_token``, which vLLM reads; and K."""
    config = read_object(directory / "config.json")
    added = {"pard_token": masks.token, "spd_type": _TYPE, "pard_length": masks.length}
    write_json(directory / "config.json", {**config, **added})


def is_pard(directory: str | Path) -> bool:
    """Whether a directory contains a model whose configuration names a mask."""
    return says(directory, "spd_type", _TYPE)


def read_masks(directory: str | Path) -> Masks:
    """Return what ``write_masks`` has written; of the files of others, which name no K, 8 tokens.

    Raises:
        PeftlabError: it is no token of the model, or no number.
    """
    file = Path(directory) / "config.json"
    config = read_object(file)
    token, size = member(config, "pard_token", int, file), member(config, "vocab_size", int, file)
    length = member(config, "pard_length", int, file) if "pard_length" in config else 8
    if not 0 <= token < size or length < 1:
        raise PeftlabError(f"{file}: pard_token {token} and pard_length {length} are not those of {size} tokens")
    return Masks(token, length)


@dataclass(frozen=True)
class PardExport:
    """See ``kinds.base.Exporting``; vLLM alone drafts so.

    Attributes:
        place: the model's directory.
    """

    place: Path

    def write(self, target: str, directory: Path, gamma: int) -> float:
        masks = read_masks(self.place)
        masks.check_gamma(gamma)
        check_plain(self.place, target, "vllm")
        return copy_plain(self.place, directory)

    def command(self, target: str, directory: str, gamma: int) -> str:
        settings = {"method": "draft_model", "model": directory, "num_speculative_tokens": gamma}
        speculative = json.dumps(settings | {"parallel_drafting": True})
        return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(speculative)}"
