"""peftlab: parameter-efficient finetuning of pretrained transformers.

The public API is imported on first use, so that ``import peftlab`` alone loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from peftlab.checkpoints.adapter import load_adapter as load_adapter
    from peftlab.checkpoints.adapter import save_adapter as save_adapter
    from peftlab.checkpoints.formats.portable import export_adapter as export_adapter
    from peftlab.checkpoints.merge.run import merge_checkpoint as merge_checkpoint
    from peftlab.checkpoints.merge.unmerge import unmerge_checkpoint as unmerge_checkpoint
    from peftlab.checkpoints.trainers import AdapterCheckpoints as AdapterCheckpoints
    from peftlab.errors import PeftlabError as PeftlabError
    from peftlab.methods.bitfit.config import BitFitConfig as BitFitConfig
    from peftlab.methods.houlsby.config import HoulsbyConfig as HoulsbyConfig
    from peftlab.methods.injection import disabled as disabled
    from peftlab.methods.injection import inject as inject
    from peftlab.methods.injection import inject_bitfit as inject_bitfit
    from peftlab.methods.injection import inject_houlsby as inject_houlsby
    from peftlab.methods.injection import inject_lora as inject_lora
    from peftlab.methods.injection import merge as merge
    from peftlab.methods.injection import print_trainable_parameters as print_trainable_parameters
    from peftlab.methods.injection import remove as remove
    from peftlab.methods.injection import trainable_parameters as trainable_parameters
    from peftlab.methods.injection import unmerge as unmerge
    from peftlab.methods.lora.config import LoraConfig as LoraConfig

_HOME = {
    "AdapterCheckpoints": "peftlab.checkpoints.trainers",
    "PeftlabError": "peftlab.errors",
    "BitFitConfig": "peftlab.methods.bitfit.config",
    "HoulsbyConfig": "peftlab.methods.houlsby.config",
    "LoraConfig": "peftlab.methods.lora.config",
    "disabled": "peftlab.methods.injection",
    "export_adapter": "peftlab.checkpoints.formats.portable",
    "inject": "peftlab.methods.injection",
    "inject_bitfit": "peftlab.methods.injection",
    "inject_houlsby": "peftlab.methods.injection",
    "inject_lora": "peftlab.methods.injection",
    "load_adapter": "peftlab.checkpoints.adapter",
    "merge": "peftlab.methods.injection",
    "merge_checkpoint": "peftlab.checkpoints.merge.run",
    "print_trainable_parameters": "peftlab.methods.injection",
    "remove": "peftlab.methods.injection",
    "save_adapter": "peftlab.checkpoints.adapter",
    "trainable_parameters": "peftlab.methods.injection",
    "unmerge": "peftlab.methods.injection",
    "unmerge_checkpoint": "peftlab.checkpoints.merge.unmerge",
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'peftlab' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
