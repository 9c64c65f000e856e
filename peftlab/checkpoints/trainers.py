"""transformers' Trainer and its subclasses: loading the adapter directories that their checkpoints are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from peftlab.checkpoints.adapter import CONFIG_FILE, reload_adapter
from peftlab.methods.injection import is_injected

if TYPE_CHECKING:
    from transformers import TrainerState


class AdapterCheckpoints:
    """A mixin for ``transformers.Trainer`` that loads the checkpoints of an injected model.

    A Trainer writes them by ``model.save_pretrained``, which writes an adapter directory, but loads only whole models
    and peft's wrappers. With this class first among the bases, ``resume_from_checkpoint`` and
    ``load_best_model_at_end`` work too. Other models and checkpoints are loaded as by the Trainer itself.
    """

    model: nn.Module
    state: TrainerState

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._read_adapter(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not self._read_adapter(best):
            super()._load_best_model()  # type: ignore[misc]

    def _read_adapter(self, checkpoint: str) -> bool:
        if not (is_injected(self.model) and (Path(checkpoint) / CONFIG_FILE).exists()):
            return False
        reload_adapter(self.model, checkpoint)
        return True
