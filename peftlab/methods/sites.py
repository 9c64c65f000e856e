"""Where a transformer layer's sub-layers end: the leaves whose output the residual connection adds."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from peftlab.errors import PeftlabError
from peftlab.methods.architectures import SITES, Sites
from peftlab.methods.targets import model_type


def sites_of(model: nn.Module) -> Sites:
    """Return the sub-layer ends of a model: its own row of ``SITES``, else the first row that fits.

    A row fits if the layers with an attention end are exactly those with a feed-forward end and those with a
    feed-forward input, one of each per layer.

    Raises:
        PeftlabError: no row fits.
    """
    names = [name for name, _ in model.named_modules()]
    kind = model_type(model)
    rows = [SITES[kind]] if kind in SITES else []
    rows += [sites for sites in SITES.values() if not sites.listed_only]
    for sites in dict.fromkeys(rows):
        ends, starts = find(names, sites.ffn), find(names, sites.ffn_input)
        layers = set(find(names, sites.attention).values())
        if layers and layers == set(ends.values()) == set(starts.values()) and len(ends) == len(layers) == len(starts):
            return sites
    raise PeftlabError(
        f"method houlsby does not know where the sub-layers of {kind} ({type(model).__name__}) end, and no "
        "known architecture is built like it; method lora adapts any linear map, or add a row to "
        "peftlab.methods.architectures.SITES"
    )


def find(names: Iterable[str], patterns: Iterable[str]) -> dict[str, str]:
    """Return those of ``names`` that end in one of ``patterns``, each with the name of its layer."""
    expression = "|".join(_expression(pattern) for pattern in patterns)
    found = {}
    for name in names:
        match = re.fullmatch(rf"(?:.*\.)?(?:{expression})", name)
        if match and match.lastindex:
            found[name] = name[: match.end(match.lastindex)]
    return found


def _expression(pattern: str) -> str:
    layer, _, tail = re.escape(pattern).partition(r"\*")
    return rf"{layer}(\d+){tail}".replace(r"\*", r"\d+")
