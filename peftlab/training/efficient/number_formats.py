"""Number formats of few bits, and gradients of which few are left, as pure functions of fp32 values and noise.

Noise is uniform on [0, 1), of the values' shape: rounding by it is up with the probability of the part that is cut off,
so that the mean over the noise is the value. Noise of ½ everywhere rounds to the nearest.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn import functional as F

NEAREST = 0.5
Noise = Tensor | float


def dorefa_weights(weights: Tensor, bits: int) -> Tensor:
    """Return weights as DoReFa quantises them (arXiv 1606.06160), on the scale of the largest.

    M·(2·q(tanh w / 2M + ½) − 1), M = max |tanh w|, q the nearest of 2^bits levels on [0, 1]; one bit: the sign times
    the mean magnitude. The paper's result is on [−1, 1] whatever the weights; here it is on their own scale, which a
    trained layer needs.
    """
    if bits == 1:
        return weights.sign() * weights.abs().mean()
    squashed = weights.tanh()
    return _levels(squashed, squashed.abs().max(), bits, NEAREST)


def dorefa(values: Tensor, bits: int, noise: Noise = NEAREST) -> Tensor:
    """Return values [rows, ...] as one of 2^bits levels from −M to M, M each row's largest magnitude."""
    largest = values.abs().flatten(1).max(1).values if values.ndim > 1 else values.abs().max()
    return _levels(values, largest.view(-1, *[1] * (values.ndim - 1)) if values.ndim > 1 else largest, bits, noise)


def _levels(values: Tensor, largest: Tensor, bits: int, noise: Noise) -> Tensor:
    steps = 2**bits - 1
    scale = torch.where(largest > 0, largest, 1.0)
    level = ((values / (2 * scale) + 0.5) * steps + noise).floor_().clamp_(0, steps)
    return (level / steps * 2 - 1) * scale * (largest > 0)


def block_floating(values: Tensor, bits: int, tile: int, noise: Noise = NEAREST) -> Tensor:
    """Return values whose blocks of ``tile`` neighbours along the last dimension share an exponent (HBFP).

    A mantissa has ``bits`` bits, its sign included; the exponent is the least with which the block's largest fits.
    """
    last = values.shape[-1]
    blocks = F.pad(values, (0, -last % tile)).unflatten(-1, (-1, tile))
    most = 2 ** (bits - 1) - 1
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest > 0, largest / most, 1.0).log2().ceil()
    step = torch.exp2(exponent)
    if isinstance(noise, Tensor):
        noise = F.pad(noise, (0, -last % tile)).unflatten(-1, (-1, tile))
    rounded = (blocks / step + noise).floor_().clamp_(-most, most) * step
    return rounded.flatten(-2)[..., :last]


def pruned(values: Tensor, threshold: float, noise: Tensor) -> Tensor:
    """Return values of which each below ``threshold`` is ± it with probability |value| / threshold, and else 0.

    The mean over the noise is the value.
    """
    small = values.abs() < threshold
    kept = values.sign() * threshold * (noise * threshold < values.abs())
    return torch.where(small, kept, values)


def pruning_threshold(values: Tensor, sparsity: float) -> float:
    """Return the threshold by which ``pruned`` makes a share ``sparsity`` of log-normal values zero.

    (arXiv 2006.08173.) Zeros among ``values`` are left out. 0 where they have no spread to fit.
    """
    logs = values[values != 0].abs().double().log()
    if logs.numel() < 2 or not bool((sigma := logs.std()) > 0) or not bool(sigma.isfinite()):
        return 0.0
    return math.exp(float(logs.mean()) + _log_threshold(float(sigma), sparsity))


def _log_threshold(sigma: float, sparsity: float) -> float:
    """Return ln a with Φ(ln a/σ) − e^{σ²/2}/a·Φ(ln a/σ − σ) = sparsity, which grows with a, by bisection."""
    normal = NormalDist()
    low, high = -20 * sigma, 20 * sigma + sigma**2 + 20
    for _ in range(80):
        middle = (low + high) / 2
        if sparsity_at(middle, sigma, normal) < sparsity:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def sparsity_at(log_threshold: float, sigma: float, normal: NormalDist) -> float:
    """Return the expected share of zeros among log-normal values of median 1, by the threshold's logarithm."""
    place = log_threshold / sigma
    return normal.cdf(place) - math.exp(sigma**2 / 2 - log_threshold) * normal.cdf(place - sigma)
