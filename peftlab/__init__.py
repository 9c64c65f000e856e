"""peftlab: parameter-efficient finetuning of pretrained transformers.

The public API is imported on first use, so that ``import peftlab`` alone loads neither torch nor transformers.
"""

from __future__ import annotations

import ast
import inspect
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from peftlab.version import __version__

# The public API, each name once: type checkers read these imports, and `_public` reads them at run time.
if TYPE_CHECKING:
    from peftlab.checkpoints.adapter import load_adapter as load_adapter
    from peftlab.checkpoints.adapter import save_adapter as save_adapter
    from peftlab.checkpoints.combine import add_weighted_adapter as add_weighted_adapter
    from peftlab.checkpoints.engines import check_adapter as check_adapter
    from peftlab.checkpoints.engines import convert_adapter as convert_adapter
    from peftlab.checkpoints.extract import extract_adapter as extract_adapter
    from peftlab.checkpoints.merge.config import MergeOptions as MergeOptions
    from peftlab.checkpoints.merge.run import merge_checkpoint as merge_checkpoint
    from peftlab.checkpoints.merge.run import unmerge_checkpoint as unmerge_checkpoint
    from peftlab.checkpoints.trainers import AdapterCheckpoints as AdapterCheckpoints
    from peftlab.decoding.decode import decode as decode
    from peftlab.drafting.export import export_draft as export_draft
    from peftlab.drafting.load import load_pair as load_pair
    from peftlab.errors import PeftlabError as PeftlabError
    from peftlab.methods.bitfit.config import BitFitConfig as BitFitConfig
    from peftlab.methods.houlsby.config import HoulsbyConfig as HoulsbyConfig
    from peftlab.methods.injection import disabled as disabled
    from peftlab.methods.injection import inject as inject
    from peftlab.methods.injection import inject_bitfit as inject_bitfit
    from peftlab.methods.injection import inject_houlsby as inject_houlsby
    from peftlab.methods.injection import inject_lora as inject_lora
    from peftlab.methods.injection import print_trainable_parameters as print_trainable_parameters
    from peftlab.methods.injection import remove as remove
    from peftlab.methods.injection import trainable_parameters as trainable_parameters
    from peftlab.methods.lora.config import LoraConfig as LoraConfig
    from peftlab.methods.merging import merge as merge
    from peftlab.methods.merging import unmerge as unmerge
    from peftlab.methods.several.adapters import delete_adapter as delete_adapter
    from peftlab.methods.several.adapters import loaded_adapters as loaded_adapters
    from peftlab.methods.several.adapters import set_adapter as set_adapter
    from peftlab.methods.several.mixed_batch import adapter_names as adapter_names
    from peftlab.pipelines import resume as resume
    from peftlab.pipelines import run as run
    from peftlab.pipelines import validate as validate
    from peftlab.pipelines.drafts.decoding_options import DecodingOptions as DecodingOptions
    from peftlab.pipelines.drafts.generate import generate as generate
    from peftlab.pipelines.drafts.live import update_live as update_live
    from peftlab.pipelines.drafts.measure_draft import benchmark as benchmark
    from peftlab.pipelines.drafts.measure_draft import plan_draft as plan_draft
    from peftlab.pipelines.inspect import inspect_model as inspect_model
    from peftlab.pipelines.merge import run_merge as run_merge
    from peftlab.pipelines.trained.evaluate import evaluate as evaluate
    from peftlab.pipelines.trained.predict import predict as predict
    from peftlab.pipelines.update import update_draft as update_draft
    from peftlab.reporting.comparison import report as report


def _public() -> dict[str, str]:
    """Return the module of each public name, read from the imports above."""
    body = ast.parse(inspect.getsource(sys.modules[__name__])).body
    block = next(node for node in body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_HOME = _public()
_FORMER = {"export_adapter": "convert_adapter(source, out, to)"}
__all__ = ["__version__", *_HOME]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> object:
    if name not in _HOME:
        now = f"; it is {_FORMER[name]} now" if name in _FORMER else ""
        raise AttributeError(f"module 'peftlab' has no attribute {name!r}{now}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
