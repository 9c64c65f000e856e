"""PEARL: draft and target run at the same time (Liu et al. 2024, arXiv 2408.11850).

A phase lasts as long as the slower of one target step and γ draft steps. In each, the draft writes γ tokens further
along the sequence while the target verifies.

- pre-verify: the target reads the prefix and verifies the first of these tokens alone. It yields 1 token: the
  accepted one, after which the γ-1 others await verification, or its correction.
- post-verify: the target reads the tokens that await, and verifies these γ-1 and the first new one, γ in all.
  If all are accepted, it yields γ, and the γ-1 newest await; at the first rejection after n it yields n+1, and the
  schedule is back in pre-verify.
"""

from __future__ import annotations

from peftlab.decoding.analysis.theory import block_efficiency
from peftlab.errors import PeftlabError


def pearl_tokens_per_phase(alpha: float, gamma: int) -> float:
    """Return the expected tokens per phase, Σ_{i<γ} α^i / (1 + α - α^γ), for independent acceptances.

    From one pre-verify to the next, 1/(1-α) tokens come out in 1 + α/(1 - α^γ) phases. At α = 1 it is γ.
    """
    if gamma < 1:
        raise PeftlabError(f"gamma: {gamma} drafts nothing; PEARL needs 1 or more")
    return block_efficiency(alpha, gamma - 1) / (1 + alpha - alpha**gamma)


def pearl_speedup(alpha: float, gamma: int, c: float, step: float = 1.0) -> float:
    """Return the gain over plain decoding, tokens per phase / max(``step``, γc).

    A perfect draft gains min(γ, 1/c) where ``step`` is 1. The two models are taken not to slow each other down, as
    on two devices.

    Args:
        c: a draft step, and ``step``: a target step over γ tokens, both in target steps over one token.
    """
    if not c >= 0:
        raise PeftlabError(f"c: {c} is not a cost ratio >= 0")
    return pearl_tokens_per_phase(alpha, gamma) / max(step, gamma * c)
