"""Dropout by a rule: which elements are kept is a function of a seed and of their places, computed anywhere again.

Sixteen bits decide for each element, four elements a word; the words are SplitMix64's (Steele, Lea and Flood 2014) at
the word's number. Where the bits cannot decide, a further word does: the probability is p to 2⁻⁸⁰.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""From one word's number to the next one's; ``MIXERS``, shifts and factors, make a word of it."""
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
FURTHER = 1 << 63
"""Added to the place of an element: the number of its further word."""

_PART = 1 << 17  # elements decided at a time: their words stay in a core's cache


@dataclass(frozen=True)
class Dropped:
    """What is dropped of a tensor, whose elements are numbered row after row.

    Attributes:
        seed: of 64 bits. p: the probability of a zero, from 0 to below 1.
    """

    seed: int
    p: float

    @classmethod
    def drawn(cls, p: float) -> Dropped:
        """Draw the seed from torch's generator for CPUs."""
        return cls(int(torch.empty((), dtype=torch.int64).random_(-(2**63), None)) % 2**64, p)

    def threshold(self) -> tuple[int, int]:
        """Return ⌊2¹⁶·p⌋, and the share of what is left of it in 2⁶⁴.

        Bits below the first number drop, those above keep. Where they are equal, a further word below the second drops.
        """
        rest, bound = math.modf(self.p * 2**16)
        return int(bound), int(rest * 2**64)

    def kept(self, first: int, count: int) -> NDArray[np.uint8]:
        """Return whether each of ``count`` elements from number ``first`` on, a multiple of 4, is kept: 0 or 1."""
        bound, rest = self.threshold()
        words = np.arange(first // 4, (first + count + 3) // 4, dtype=np.uint64)
        bits = self._mixed(words).view(np.uint16)[:count]
        keep = np.greater_equal(bits, bound).view(np.uint8)
        (undecided,) = np.nonzero(bits == bound)
        if len(undecided):
            numbers = undecided.astype(np.uint64) + np.uint64((first + FURTHER) % 2**64)
            keep[undecided] = self._mixed(numbers) >= np.uint64(rest)
        return keep

    def _mixed(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the words of these numbers, which are overwritten."""
        z = np.multiply(numbers, np.uint64(GOLDEN), out=numbers)
        z += np.uint64(self.seed)
        shifted = np.empty_like(z)
        for shift, factor in MIXERS:
            z ^= np.right_shift(z, np.uint64(shift), out=shifted)
            z *= np.uint64(factor)
        z ^= np.right_shift(z, np.uint64(31), out=shifted)
        return z


def plain_on_cpu(tensor: Tensor) -> bool:
    """Return whether the tensor is a CPU's, of no subclass and not traced by the compiler."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor and not torch.compiler.is_compiling()


def keep_mask(like: Tensor, p: float) -> Tensor:
    """Return a mask of uint8, of the shape of ``like``: 0 with probability p, else 1, each element independently.

    torch's generator alone decides: on CPUs it gives the seed of ``Dropped``; elsewhere it draws for each element, and
    the probability is p to 2⁻²⁴.

    Args:
        like: of any shape; its device is the mask's. p: the probability of a zero.
    """
    if not plain_on_cpu(like):
        return torch.rand(like.shape, device=like.device).ge(p).view(torch.uint8)
    mask, dropped = torch.empty(like.numel(), dtype=torch.uint8), Dropped.drawn(p)
    for part, first in zip(mask.split(_PART), range(0, len(mask), _PART), strict=True):
        part.numpy()[:] = dropped.kept(first, len(part))
    return mask.view(like.shape)


def dropout(x: Tensor, p: float) -> Tensor:
    """Return x with elements zero with probability p, divided by 1 − p; for backward it keeps a byte an element.

    Args:
        x: of any shape. p: the probability of a zero.
    """
    return (x * keep_mask(x, p)).mul_(1 / (1 - p)) if p > 0 else x
