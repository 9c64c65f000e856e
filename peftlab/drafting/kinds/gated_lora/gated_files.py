"""Gated LoRAs on disk: a LoRA adapter in peft's format, and beside it what its masks read and its target's identity."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from peftlab.checkpoints.adapter import WEIGHTS_FILE, read_adapter
from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.decoding.parallel_drafters import Masks
from peftlab.errors import PeftlabError
from peftlab.files import member, read_object, write_json
from peftlab.methods.lora.config import LoraConfig
from peftlab.models.finetuned import CONFIG_FILE, GATED_FILE
from peftlab.models.pretrained import load_config

FOLDER = "adapter"  # of a run
_PROJECTIONS = re.compile(
    r"base_model\.model\.model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.lora_[AB]\.weight"
)


def is_gated(directory: str | Path) -> bool:
    """Whether a directory contains a gated LoRA."""
    return (Path(directory) / GATED_FILE).is_file()


def write_masks_of_gate(directory: Path, masks: Masks) -> None:
    """Write what the masks read beside an adapter."""
    write_json(directory / GATED_FILE, {"mask_token": masks.token, "length": masks.length, "noise": masks.noise})


def read_masks_of_gate(directory: str | Path, vocabulary: int | None = None) -> Masks:
    """Return what ``write_masks_of_gate`` has written.

    Args:
        vocabulary: of the target; None: not compared.

    Raises:
        PeftlabError: a value is missing, or is none that masks can have.
    """
    file = Path(directory) / GATED_FILE
    values = read_object(file)
    token, length = member(values, "mask_token", int, file), member(values, "length", int, file)
    noise = member(values, "noise", bool, file)
    most = token if vocabulary is None else vocabulary - (not noise)
    if not 0 <= token <= most or length < 2:
        raise PeftlabError(f"{file}: mask_token {token} and length {length} are not those of {vocabulary} tokens")
    return Masks(token, length, noise)


@dataclass(frozen=True)
class UnoExport:
    """A gated LoRA in the layout of Uno (arXiv 2609.04010), which SGLang reads; see ``kinds.base.Exporting``.

    Attributes:
        place: the adapter's directory.
    """

    place: Path

    def write(self, target: str, directory: Path, gamma: int) -> float:
        masks = read_masks_of_gate(self.place)
        if not masks.noise:
            raise PeftlabError(
                f"--for sglang: {self.place} was trained with a mask token, and SGLang's masks read tokens drawn at "
                "random; train it with draft: {kind: gated_lora, noise: true}"
            )
        masks.check_gamma(gamma)
        self._check(target)
        tensors, header = read_tensors(self.place / WEIGHTS_FILE)
        odd = next((name for name in tensors if not _PROJECTIONS.fullmatch(name)), None)
        if odd is not None:
            raise PeftlabError(
                f"--for sglang: {odd} is no factor of a Llama's q, k, v, o, gate, up or down projection, which alone "
                "SGLang reads"
            )
        write_tensors(directory / WEIGHTS_FILE, tensors, header)
        write_json(directory / CONFIG_FILE, read_object(self.place / CONFIG_FILE) | {"base_model_name_or_path": target})
        mine, back = (read_adapter(place).tensors for place in (self.place, directory))
        return max(float((tensor - back[name]).abs().max()) for name, tensor in mine.items())

    def _check(self, target: str) -> None:
        adapter = read_adapter(self.place)
        config = adapter.config
        assert isinstance(config, LoraConfig)
        if config.use_dora or config.lora_bias or config.start is not None:
            raise PeftlabError(f"--for sglang: {self.place} has use_dora, lora_bias or a start of W, which Uno has not")
        theirs = load_config(target)
        known = member(adapter.base, "config", dict, self.place) if adapter.base else {}
        for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
            here = getattr(theirs, key, None)
            if key in known and known[key] != here:
                raise PeftlabError(f"{self.place}: trained for a target with {key} {known[key]}; {target} has {here}")

    def command(self, target: str, directory: str, gamma: int) -> str:
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm UNO "
            f"--uno-lora-path {shlex.quote(directory)} --speculative-num-draft-tokens {gamma}"
        )
