"""The readers that are there to be asked: peftlab itself, and peft where it is installed."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

from peftlab.checkpoints.adapter import Adapter, load_adapter, read_adapter
from peftlab.checkpoints.consumers.features import shortened
from peftlab.checkpoints.consumers.fit import Fit
from peftlab.checkpoints.consumers.table import Verdict
from peftlab.checkpoints.merge.options import MergeOptions
from peftlab.checkpoints.merge.plan import plan_merge
from peftlab.checkpoints.merge.task_model import task_model
from peftlab.errors import PeftlabError, reason
from peftlab.methods.table import METHODS
from peftlab.untyped import LoadedKeys


def peftlab_rule(fit: Fit) -> Verdict:
    """Plan what ``peftlab merge`` would do; load into the empty model what does not merge."""
    path, source = fit.contents.path, str(fit.contents.path)
    # alpha scales a loralib file and decides nothing here.
    alpha = 1.0 if fit.contents.format == "loralib" else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapter = read_adapter(path, lora_alpha=alpha)
            try:
                unmerged = _unmerged(adapter, fit, source)
            except PeftlabError as error:
                unmerged = str(error)
            if unmerged:
                load_adapter(task_model(adapter, fit.base, source=source), adapter)
    except PeftlabError as error:
        return Verdict(False, str(error))
    return Verdict(True, "; ".join(("loads and merges" if not unmerged else f"loads; {unmerged}", *adapter.notes)))


def _unmerged(adapter: Adapter, fit: Fit, source: str) -> str:
    """Return why the adapter's method does not merge, or an empty text once the merge is planned."""
    if not METHODS[adapter.config.name].folds:
        return f"method {adapter.config.name} does not merge"
    plan_merge(adapter, fit.base, MergeOptions(), source=source).close()
    return ""


def peft_rule(fit: Fit) -> Verdict:
    """Load the adapter into the empty model with the installed peft."""
    if importlib.util.find_spec("peft") is None:
        return Verdict("unknown", "peft is not installed")
    if fit.contents.format != "peft":
        return Verdict(False, f"peft reads its own format alone, not {fit.contents.format}'s")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            missing, unexpected = _loaded(fit, fit.contents.path)
    except Exception as error:  # peft raises anything for what it does not expect
        return Verdict(False, f"peft refuses it: {reason(error)}")
    if unexpected:
        return Verdict(False, f"peft leaves out, silently: {shortened(unexpected)}")
    if missing:
        return Verdict(False, f"peft leaves as they start: {shortened(missing)}")
    return Verdict(True, "every tensor has its place")


def _loaded(fit: Fit, path: Path) -> tuple[list[str], list[str]]:
    """Return the adapter's parameters that the file lacks, and the file's keys that peft has no place for."""
    import peft

    config = peft.PeftConfig.from_pretrained(str(path))
    if isinstance(getattr(config, "init_lora_weights", None), str):
        # Such a start needs the base's weights, which are not here; names and shapes do not depend on it.
        config.init_lora_weights = True
    model = peft.get_peft_model(fit.fresh_model(), config, low_cpu_mem_usage=True)
    weights = peft.utils.load_peft_weights(str(path), device="cpu")
    found: LoadedKeys = peft.set_peft_model_state_dict(model, weights, low_cpu_mem_usage=True)
    missing = [key for key in found.missing_keys if "lora_" in key or ".modules_to_save." in key]
    return missing, list(found.unexpected_keys)
