"""The policy of draft length that a user named, made for the drafters that can follow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from peftlab.decoding.drafter import Drafter
from peftlab.decoding.engine import Engine
from peftlab.decoding.policies import PolicyFactory, PolicyInputs, fixed
from peftlab.decoding.table import DRAWN, HEAD, TIMES, NamedRule
from peftlab.decoding.timing import MeasuredStepTimes, measure_times
from peftlab.drafting.acceptance import load_acceptance_head
from peftlab.errors import PeftlabError
from peftlab.registry import resolve

HEAD_FILE = "acceptance_head.safetensors"


@dataclass(frozen=True)
class Lengths:
    """A policy for each drafter.

    Attributes:
        policies: drafter -> what makes the policy of a sequence. notes: what the user should know.
    """

    policies: Mapping[str, PolicyFactory]
    notes: tuple[str, ...] = ()


def draft_lengths(
    chosen: NamedRule,
    gamma: int,
    target: Engine,
    drafters: Mapping[str, Callable[[], Drafter]],
    *,
    batch: int = 1,
    head: Callable[[Tensor], float] | None = None,
) -> Lengths:
    """Return the chosen policy for the drafters that can follow it, and γ tokens for the others.

    ``goodput`` measures a few steps of the target and of the draft.

    Args:
        gamma: tokens per step, at most or at first.
        drafters: name -> maker; the first is the one that was asked for.
        batch: sequences that are decoded together, at most. head: for ``head``, see ``acceptance_head``.

    Raises:
        PeftlabError: the first drafter cannot follow the policy.
    """
    made = {name: make() for name, make in drafters.items()}
    refused = {name: reason for name, drafter in made.items() if (reason := _obstacle(chosen.row.needs, drafter))}
    first = next(iter(made))
    if first in refused:
        raise PeftlabError(f"policy {chosen.text}: {refused[first]}")
    times: MeasuredStepTimes | None = None
    if chosen.row.needs == TIMES:
        draft = next((drafter.draft_model for drafter in made.values() if drafter.draft_model is not None), None)
        times = measure_times(target, draft, batch, gamma)
    policies: dict[str, PolicyFactory] = {}
    for name, drafter in made.items():
        if name in refused:
            policies[name] = fixed(PolicyInputs(gamma), None)
            continue
        own = times if times is None or drafter.draft_model is not None else replace(times, drafts={})
        policies[name] = resolve(chosen.row.make)(PolicyInputs(gamma, head, own), chosen.value)
    notes = (f"policy {chosen.text}: {', '.join(refused)} draft {gamma} tokens instead",) if refused else ()
    return Lengths(policies, notes)


def acceptance_head(draft: str | None, device: torch.device) -> Callable[[Tensor], float]:
    """Return the acceptance head of the draft run that ``draft`` names, as the policy ``head`` takes it.

    Raises:
        PeftlabError: there is none.
    """
    places = [Path(draft), Path(draft).parent] if draft is not None else []
    place = next((place for place in places if (place / HEAD_FILE).is_file()), None)
    if place is None:
        where = f"{draft} has no {HEAD_FILE}" if draft is not None else "no draft run is named"
        raise PeftlabError(f"policy head: {where}; a draft recipe with acceptance_head: true trains one")
    predictor = torch.nn.Module.to(load_acceptance_head(place / HEAD_FILE), device)
    return lambda hidden: float(predictor(hidden))


_REFUSALS = {
    DRAWN: "stops a chain that is drawn token by token, and {} draws none",
    HEAD: "reads the states of a draft model that drafts a chain, and {} is none",
    TIMES: "needs a chain from a draft model or from copies, and {} is neither",
}


def _obstacle(needs: str, drafter: Drafter) -> str | None:
    """Return why a drafter cannot follow a policy; None where it can."""
    return _REFUSALS[needs].format(drafter.name) if needs and needs not in drafter.provides else None
