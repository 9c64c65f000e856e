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
    from peftlab.checkpoints.merge import merge_checkpoint as merge_checkpoint
    from peftlab.checkpoints.portable import export_adapter as export_adapter
    from peftlab.checkpoints.trainers import AdapterCheckpoints as AdapterCheckpoints
    from peftlab.checkpoints.unmerge import unmerge_checkpoint as unmerge_checkpoint
    from peftlab.errors import PeftlabError as PeftlabError
    from peftlab.methods import disabled as disabled
    from peftlab.methods import inject as inject
    from peftlab.methods import inject_bitfit as inject_bitfit
    from peftlab.methods import inject_houlsby as inject_houlsby
    from peftlab.methods import inject_lora as inject_lora
    from peftlab.methods import merge as merge
    from peftlab.methods import print_trainable_parameters as print_trainable_parameters
    from peftlab.methods import remove as remove
    from peftlab.methods import trainable_parameters as trainable_parameters
    from peftlab.methods import unmerge as unmerge
    from peftlab.methods.bitfit import BitFitConfig as BitFitConfig
    from peftlab.methods.houlsby import HoulsbyConfig as HoulsbyConfig
    from peftlab.methods.lora import LoraConfig as LoraConfig

_HOME = {
    "AdapterCheckpoints": "peftlab.checkpoints.trainers",
    "PeftlabError": "peftlab.errors",
    "BitFitConfig": "peftlab.methods.bitfit",
    "HoulsbyConfig": "peftlab.methods.houlsby",
    "LoraConfig": "peftlab.methods.lora",
    "disabled": "peftlab.methods",
    "export_adapter": "peftlab.checkpoints.portable",
    "inject": "peftlab.methods",
    "inject_bitfit": "peftlab.methods",
    "inject_houlsby": "peftlab.methods",
    "inject_lora": "peftlab.methods",
    "load_adapter": "peftlab.checkpoints.adapter",
    "merge": "peftlab.methods",
    "merge_checkpoint": "peftlab.checkpoints.merge",
    "print_trainable_parameters": "peftlab.methods",
    "remove": "peftlab.methods",
    "save_adapter": "peftlab.checkpoints.adapter",
    "trainable_parameters": "peftlab.methods",
    "unmerge": "peftlab.methods",
    "unmerge_checkpoint": "peftlab.checkpoints.unmerge",
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'peftlab' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
