"""transformers' Trainer and its descendants: reading back the adapter directories that are their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peftlab.checkpoints.adapter import CONFIG_FILE, load_adapter
from peftlab.methods.injection import is_injected


class AdapterCheckpoints:
    """Mixed into a ``transformers.Trainer``: its checkpoints of an injected model are read as what they are.

    A Trainer writes them through ``model.save_pretrained``, which writes an adapter directory; its own reading knows
    whole models and peft's wrappers alone. With this class first among the bases, ``resume_from_checkpoint`` and
    ``load_best_model_at_end`` work too. Other models and checkpoints are read as the Trainer does.
    """

    model: Any
    state: Any

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._read_adapter(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        if not self._read_adapter(self.state.best_model_checkpoint):
            super()._load_best_model()  # type: ignore[misc]

    def _read_adapter(self, checkpoint: str) -> bool:
        if not (is_injected(self.model) and (Path(checkpoint) / CONFIG_FILE).exists()):
            return False
        load_adapter(self.model, checkpoint)
        return True
