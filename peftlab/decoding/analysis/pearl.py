"""PEARL: draft and target run at the same time (Liu et al. 2024, arXiv 2408.11850).

A phase lasts as long as the slower of one target step and γ draft steps: max(1, γc) target steps. In each,
the draft writes γ tokens further along the sequence while the target verifies.

- pre-verify: the target reads the prefix and verifies the first of these tokens alone. It yields 1 token: the
  accepted one, after which the γ-1 others await verification, or its correction.
- post-verify: the target reads the tokens that await, and verifies these γ-1 and the first new one, γ in all.
  If all are accepted, it yields γ, and the γ-1 newest await; at the first rejection after n it yields n+1, and the
  schedule is back in pre-verify.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from peftlab.decoding.analysis.theory import block_efficiency
from peftlab.errors import PeftlabError


def pearl_schedule(accepted: Iterable[bool], gamma: int) -> Iterator[tuple[str, int]]:
    """Yield ("pre" | "post", tokens emitted) for each phase, until ``accepted`` runs out.

    Args:
        accepted: whether each verified token is accepted, in the order of verification.
        gamma: tokens drafted per phase, at least 1.
    """
    if gamma < 1:
        raise PeftlabError(f"gamma: {gamma} drafts nothing; PEARL needs 1 or more")
    coins = iter(accepted)
    mode = "pre"
    while True:
        window = 1 if mode == "pre" else gamma
        accepted_now = 0
        for coin in coins:
            if not coin:
                break
            accepted_now += 1
            if accepted_now == window:
                break
        else:
            return
        all_accepted = accepted_now == window
        yield mode, accepted_now if all_accepted else accepted_now + 1
        mode = "post" if all_accepted else "pre"


def pearl_tokens_per_phase(alpha: float, gamma: int) -> float:
    """Return the expected tokens per phase, Σ_{i<γ} α^i / (1 + α - α^γ), for independent acceptances.

    From one pre-verify to the next, 1/(1-α) tokens come out in 1 + α/(1 - α^γ) phases. At α = 1 it is γ.
    """
    if gamma < 1:
        raise PeftlabError(f"gamma: {gamma} drafts nothing; PEARL needs 1 or more")
    return block_efficiency(alpha, gamma - 1) / (1 + alpha - alpha**gamma)


def pearl_speedup(alpha: float, gamma: int, c: float) -> float:
    """Return the gain over plain decoding, tokens per phase / max(1, γc).

    A perfect draft gains min(γ, 1/c). The two models are taken not to slow each other down.
    """
    if not c >= 0:
        raise PeftlabError(f"c: {c} is not a cost ratio >= 0")
    return pearl_tokens_per_phase(alpha, gamma) / max(1.0, gamma * c)
