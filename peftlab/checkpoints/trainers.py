"""transformers' Trainer and its subclasses: loading the adapter directories that their checkpoints are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from peftlab.checkpoints.adapter import CONFIG_FILE, reload_adapter
from peftlab.methods.injection import is_injected

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # the methods come from the Trainer that the class is mixed into


class AdapterCheckpoints(Trainer):
    """A mixin for ``transformers.Trainer`` that loads the checkpoints of an injected model.

    A Trainer writes them by ``model.save_pretrained``, which writes an adapter directory, but loads only whole models
    and peft's wrappers. With this class first among the bases, ``resume_from_checkpoint`` and
    ``load_best_model_at_end`` work too. Other models and checkpoints are loaded as by the Trainer itself.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._read_adapter(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not self._read_adapter(best):
            super()._load_best_model()

    def _read_adapter(self, checkpoint: str) -> bool:
        model = self.model
        if model is None or not is_injected(model) or not (Path(checkpoint) / CONFIG_FILE).exists():
            return False
        reload_adapter(model, checkpoint)
        return True
