"""What several engines' rules ask of an adapter in peft's format."""

from __future__ import annotations

import math
from collections.abc import Iterable

from peftlab.checkpoints.consumers.fit import Fit
from peftlab.checkpoints.consumers.table import Verdict

# Values of init_lora_weights with which the file's factors are the whole update.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica", "lora_ga")

# Last names of the linear maps in models of Llama's form.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LLAMA = frozenset((*ATTENTION, *MLP))
FUSED = frozenset(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))


def foreign(fit: Fit, engine: str) -> Verdict | None:
    """Return the verdict on what is no LoRA of peft's, or does not fit the base."""
    contents = fit.contents
    if contents.format != "peft":
        return Verdict(False, f"{engine} reads peft's format alone, not {contents.format}'s")
    if contents.raw.get("peft_type") != "LORA":
        return Verdict(False, f"{engine} reads LoRA alone, not peft_type {contents.raw.get('peft_type')}")
    if fit.misfits:
        return Verdict(False, f"the base does not fit: {shortened(fit.misfits.values())}")
    return None


def changed_meaning(fit: Fit, engine: str, keys: Iterable[str]) -> Verdict | None:
    """Return the verdict on options that change what the factors mean and that ``engine`` does not look at."""
    raw = fit.contents.raw
    for key in keys:
        if raw.get(key):
            return Verdict(False, f"{engine} does not look at {key}, so the model would compute something else")
    start = raw.get("init_lora_weights", True)
    name = start.lower() if isinstance(start, str) else start
    if not any(name is plain or name == plain for plain in PLAIN_STARTS):
        return Verdict(
            False,
            f"{engine} does not look at init_lora_weights={start!r}, which subtracts a part of the base",
        )
    return None


def incomplete_experts(fit: Fit) -> str:
    """Return an experts module of which not all matrices of all experts have factors, or an empty text."""
    found: dict[str, set[tuple[int, int]]] = {}
    for pair in fit.contents.pairs:
        if one := fit.single(pair):
            found.setdefault(one.container, set()).add((one.expert, one.matrix))
    for container, each in found.items():
        if len(each) < 3 * fit.shapes[f"{container}.down_proj"][0]:
            return container
    return ""


def other_scale(fit: Fit, engine: str, applied: dict[int, float] | None = None) -> Verdict | None:
    """Return the verdict where the engine's one scaling is not the one each module was trained with.

    Args:
        applied: the engine's scaling by the module's rank; default: ``lora_alpha / r`` for all.
    """
    contents = fit.contents
    for pair in contents.pairs:
        rank = contents.rank(pair)
        one = contents.lora_alpha / contents.r if applied is None else applied[rank]
        own = contents.scale(pair)
        if not math.isclose(one, own, rel_tol=1e-6):
            return Verdict(False, f"{engine} would scale {pair.module} by {one:g}, it was trained with {own:g}")
    return None


def shortened(names: Iterable[str], n: int = 3) -> str:
    """Return the first few of a list, and how many more there are."""
    every = list(names)
    return ", ".join(every[:n]) + (f", and {len(every) - n} more" if len(every) > n else "")
