"""How often each choice of a draft is right at each depth, on held-out text: what a tree is made or planned from."""

from __future__ import annotations

from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from peftlab.decoding.trees import RankRates
from peftlab.drafting.hidden_states import logits_of
from peftlab.errors import PeftlabError

RANKS = 8
"""Choices that are counted at each place."""
KEY = "rank_acceptance"
"""The name of the rates on disk."""
_CHUNK = 256  # places whose logits live at a time


def greedy_tokens(hidden: Tensor, head: Tensor) -> Tensor:
    """Return the most probable next token after each state: [b, n, H] -> [b, n]."""
    flat = hidden.flatten(0, 1)
    return torch.cat([logits_of(part, head).argmax(-1) for part in flat.split(_CHUNK)]).reshape(hidden.shape[:2])


def right_choices(states: Tensor, weight: Tensor, right: Tensor, ids: Tensor | None) -> Tensor:
    """Return which of the best choices are right: [T, H], [V_d, H], [T] -> booleans [T, at most RANKS].

    Args:
        ids: [V_d], the token of each row of ``weight``; None: its own number.
    """
    width = min(RANKS, len(weight))
    best = torch.cat([logits_of(part, weight).topk(width, -1).indices for part in states.split(_CHUNK)])
    return (best if ids is None else ids[best]) == right[:, None]


def rates_on_disk(ranks: RankRates) -> list[list[float]]:
    """Return rates as ``read_rates`` takes them."""
    return [list(each) for each in ranks.rates]


def read_rates(stored: object, where: Path) -> RankRates | None:
    """Return the rates that a file contains; None for None.

    Raises:
        PeftlabError: they are not lists of one length, positive and falling.
    """
    if stored is None:
        return None
    rates = tuple(tuple(each) for each in stored) if isinstance(stored, list) and all(map(_is_list, stored)) else ()
    valid = all(isinstance(rate, float) and 0 < rate <= 1 for each in rates for rate in each)
    falling = all(list(each) == sorted(each, reverse=True) for each in rates) if valid else False
    if not rates or not falling or len({len(each) for each in rates}) > 1 or not rates[0]:
        raise PeftlabError(f"{where}: {KEY} is not, for each depth, rates that fall from rank to rank")
    return RankRates(rates)


def _is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)
