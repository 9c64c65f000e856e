"""Which units of the target a draft keeps: coefficients that train until their order stands (early-bird tickets).

You et al. 2019 (arXiv 1909.11957), for heads and feed-forward units Chen et al. 2021 (EarlyBERT, arXiv 2101.00063).
Each unit is multiplied by a coefficient, 1 at first, which trains beside the layers' weights with an L1 penalty. Every
few steps a mask takes the smallest coefficients of each layer; once the last five masks hardly differ, their units are
pruned, long before the weights have converged.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.drafting.kinds.model.config import Pruning
from peftlab.drafting.kinds.model.prunable import kept_units, parts, pruned, scaled
from peftlab.drafting.kinds.model.search import Found, Search
from peftlab.drafting.truncation import layer_stack
from peftlab.files import Json

_MASKS = 5  # compared with each other
_EVERY = 8  # steps from one mask to the next: sooner, masks agree because coefficients have hardly moved
_L1 = 1.0  # of the mean coefficient of each part: of a single one, less where there are many that each do little
_WEIGHTS_LR = 2e-5
_COEFFICIENTS_LR = 2e-2

Masks = dict[str, Tensor]
"""By part: [layers, units], true for a unit that stays."""


def choose_units(search: Search, config: Pruning) -> Found:
    """Return the units that stay, [layers, kept] of each part, and the trained weights unless they are rewound.

    With several rounds each prunes the same share of what is left (iterative pruning); ``rewind`` starts each from the
    target's weights, and leaves the draft with them.
    """
    counts = {name: part.units for name, part in parts(search.source.config).items()}
    final = kept_units(search.source.config, config.shares())
    layers = len(layer_stack(search.source))
    alive = {name: torch.ones(layers, counts[name], dtype=torch.bool) for name in final}
    model, coefficients = _start(search.source, alive)
    rounds: list[Json] = []
    for number in range(1, config.rounds + 1):
        if number > 1 and config.rewind:
            model, coefficients = _start(search.source, alive)
        kept = {name: round(counts[name] * (n / counts[name]) ** (number / config.rounds)) for name, n in final.items()}
        alive, record = _round(search, config, model, coefficients, alive, kept)
        rounds.append({"kept": dict(kept), **record})
    units = {name: mask.nonzero()[:, 1].view(layers, -1) for name, mask in alive.items()}
    tensors = dict(units)
    if not config.rewind:
        small = pruned(model, units, {name: c.detach() for name, c in coefficients.items()})
        nn.Module.to(small, search.source.dtype)
        tensors |= {f"weights.{name}": tensor for name, tensor in small.state_dict().items()}
    report: dict[str, Json] = {"kept": dict(final), "of": {name: counts[name] for name in final}, "rounds": rounds}
    return Found(tensors, report)


def pruned_draft(source: PreTrainedModel, tensors: Mapping[str, Tensor]) -> PreTrainedModel:
    """Return the draft of what ``choose_units`` found, in ``source``'s dtype and on the CPU."""
    small = pruned(source, {name: t for name, t in tensors.items() if not name.startswith("weights.")})
    weights = {name.removeprefix("weights."): t for name, t in tensors.items() if name.startswith("weights.")}
    if weights:
        small.load_state_dict(weights)
    return small


def _start(source: PreTrainedModel, alive: Masks) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return a copy of the model in fp32 whose layers train, and coefficients of one."""
    model = copy.deepcopy(source).float()
    model.requires_grad_(False)
    layer_stack(model).requires_grad_(True)
    return model, {
        name: torch.ones(mask.shape, device=source.device, requires_grad=True) for name, mask in alive.items()
    }


def _round(
    search: Search,
    config: Pruning,
    model: PreTrainedModel,
    coefficients: dict[str, Tensor],
    alive: Masks,
    kept: Mapping[str, int],
) -> tuple[Masks, dict[str, Json]]:
    """Train until the masks stand, or ``config.steps`` steps; return the last masks and how that went."""
    masked = {name: mask.to(coefficients[name]) for name, mask in alive.items()}
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": weights, "lr": _WEIGHTS_LR}, {"params": list(coefficients.values()), "lr": _COEFFICIENTS_LR}]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.0)
    latest: deque[Masks] = deque(maxlen=_MASKS)
    distances: list[Json] = []
    masks, step, stable = alive, 0, False
    for step, batch in enumerate(search.batches(config.steps), start=1):
        scales = {name: c * masked[name] for name, c in coefficients.items()}
        with scaled(model, scales):
            loss = search.loss(model, batch)
        (loss + _L1 * sum(scale.abs().mean() for scale in scales.values())).backward()
        optimiser.step()
        optimiser.zero_grad()
        if step % _EVERY and step < config.steps:
            continue
        masks = {name: largest(c.detach().abs().cpu(), alive[name], kept[name]) for name, c in coefficients.items()}
        latest.append(masks)
        furthest = max(distance(masks, other) for other in latest)
        distances.append(furthest)
        if len(latest) == _MASKS and furthest < config.distance:
            stable = True
            break
    return masks, {"steps": step, "distances": distances, "stable": stable}


def largest(scores: Tensor, alive: Tensor, kept: int) -> Tensor:
    """Return the mask of each row's ``kept`` largest scores [layers, units] among those alive; of equals the first."""
    order = scores.masked_fill(~alive, -1.0).sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(alive).scatter_(1, order[:, :kept], True)


def distance(masks: Masks, others: Masks) -> float:
    """Return the share of the units on which two sets of masks differ."""
    differ = sum(int((masks[name] != others[name]).sum()) for name in masks)
    return differ / sum(mask.numel() for mask in masks.values())
