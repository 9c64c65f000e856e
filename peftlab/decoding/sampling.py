"""Sampling: from logits to probabilities to tokens; all randomness of decoding is drawn here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from peftlab.errors import PeftlabError


@dataclass(frozen=True)
class Sampling:
    """The settings by which target and draft choose tokens.

    Attributes:
        temperature: 0 is greedy.
        top_k, top_p: cuts, see ``probabilities``; an error at temperature 0, which ignores them.
        seed: row i of the prompts has its own generator, seeded ``seed + i``.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check_settings(self.temperature, self.top_k, self.top_p)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the distribution of logits under these settings: [..., V] -> [..., V]."""
        return probabilities(logits, self.temperature, self.top_k, self.top_p)


def probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Return the distribution to sample from: softmax(logits / temperature), cut to top-k, then to top-p.

    Target and draft both go through this function, with the same settings: verification is exact only if q is
    the distribution the draft was sampled from, and its output then follows the p computed here.

    Args:
        logits: [..., V], any float dtype; a masked token has logit -inf and gets probability 0.
        temperature: 0 gives a one-hot at the largest logit, ties go to the lowest index.
        top_k: keep the k most probable tokens, exactly k of them: the lowest indices win a tie.
        top_p: of what top-k left (renormalised), keep the fewest most probable tokens whose mass reaches it.

    Returns:
        [..., V], rows sum to 1; float32, or float64 for float64 logits.

    Raises:
        PeftlabError: a negative temperature, ``top_k < 1``, ``top_p`` outside (0, 1], or a cut that
            temperature 0 would ignore.
    """
    _check_settings(temperature, top_k, top_p)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, argmax(logits)[..., None], 1.0)
    # The largest logit is subtracted before the division, so that a tiny temperature cannot overflow.
    probs = (logits - logits.amax(-1, keepdim=True)).div_(temperature).softmax(-1)
    if top_p == 1:
        top_p = None  # else a sum rounded up to 1 would cut the tail
    if top_k is None and top_p is None:
        return probs
    ordered = _sort_descending(probs)
    mass = ordered[..., :top_k].cumsum(-1)
    count = torch.full_like(mass[..., :1], mass.shape[-1], dtype=torch.long)
    if top_p is not None:
        count = torch.minimum(count, torch.searchsorted(mass, top_p * mass[..., -1:]) + 1)
    kept = probs.where(_most_probable(probs, ordered, count), 0)
    return kept / kept.sum(-1, keepdim=True)


def _sort_descending(probs: Tensor) -> Tensor:
    """Return each row's values [..., V] in falling order."""
    if probs.device.type != "cpu":
        return probs.sort(dim=-1, descending=True).values
    # torch's own sort takes 60 times as long: 7 ms for 49,152 tokens, a third of a small model's step.
    return torch.from_numpy(numpy.sort(probs.detach().numpy(), -1)).flip(-1)


def _most_probable(probs: Tensor, ordered: Tensor, count: Tensor) -> Tensor:
    """Return the mask of the ``count`` [..., 1] most probable tokens of each row; the lowest indices win a tie.

    Args:
        probs: [..., V]. ordered: the same values in falling order. count: [..., 1], 1 or more.
    """
    least, following = ordered.gather(-1, count - 1), ordered.gather(-1, count.clamp_max(probs.shape[-1] - 1))
    found = probs >= least
    ties = (following == least) & (count < probs.shape[-1])
    if probs.device.type != "cpu" or ties.any():  # asking a device for ties would wait for it
        above, equal = probs > least, probs == least
        found = above | equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True))
    return found


def argmax(scores: Tensor) -> Tensor:
    """Return the index of the largest score of each row; the lowest index wins a tie: [..., V] -> [...]."""
    # torch's max returns the first index of the largest value; its argmax takes three to five times as long on a CPU.
    return scores.max(-1).indices


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """Return one-hot distributions of deterministic tokens; rows of zeros for -1, "nothing drafted".

    Args:
        tokens: [...].
        like: [..., V], for V and the dtype.

    Returns:
        [..., V].
    """
    rows = like.new_zeros(*tokens.shape, like.shape[-1])
    return rows.scatter_(-1, tokens.clamp_min(0)[..., None], (tokens >= 0).to(like.dtype)[..., None])


def _check_settings(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not temperature >= 0:
        raise PeftlabError(f"temperature: {temperature} is not a number >= 0")
    if top_k is not None and top_k < 1:
        raise PeftlabError(f"top_k: {top_k} keeps no token; give 1 or more, or None for all")
    if top_p is not None and not 0 < top_p <= 1:
        raise PeftlabError(f"top_p: {top_p} is outside (0, 1]")
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise PeftlabError("temperature: 0 is greedy and ignores top_k and top_p; leave them out")


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one index per row, [..., V] -> [...], as argmax(p / E) with E ~ Exp(1) (the exponential form of Gumbel-max).

    Rows need not sum to 1. An index of probability 0 is never drawn from a row that has any mass.

    Args:
        probs: [..., V], not negative.
        generator: on the device of ``probs``.
    """
    return argmax(probs / RandomSource(generator).exponentials(probs))


@dataclass
class RandomSource:
    """A source of the random decisions and draws of drafting and verification.

    Verification decides only through ``bernoulli`` and ``draw``, so a subclass that branches on every decision and draw
    computes a scheme's exact output distribution from the very code that runs.

    Attributes:
        generator: on the device of the probabilities; None is torch's global one.
    """

    generator: torch.Generator | None = None

    def bernoulli(self, probability: Tensor) -> Tensor:
        """Return booleans [...], each True with its probability [...]: never at 0, always at 1."""
        uniform = torch.rand(
            probability.shape, generator=self.generator, dtype=probability.dtype, device=probability.device
        )
        return uniform < probability

    def draw(self, probs: Tensor) -> Tensor:
        """Return one index per row: [..., V] -> [...]."""
        return sample(probs, self.generator)

    def exponentials(self, like: Tensor) -> Tensor:
        """Return positive numbers drawn from the exponential distribution of mean 1, in the shape of ``like``."""
        if like.device.type == "cpu":
            # A third of the time of exponential_; 53 bits, as in fp32 the smallest numbers would be too often 0.
            uniform = torch.rand(like.shape, generator=self.generator, dtype=torch.float64)
            values = uniform.neg_().log1p_().neg_().to(like.dtype)
        else:
            values = torch.empty_like(like).exponential_(generator=self.generator)
        # One of exactly 0 would make 0 / 0 of an impossible index, and an infinity of a logarithm.
        return values.clamp_min_(torch.finfo(values.dtype).tiny)


class TreeRandomSource(RandomSource):
    """A source for the tree of one row: all decisions are seeded by one number, as in ``RowRandomSource``."""

    def __init__(self, generator: torch.Generator):
        super().__init__(generator)
        self._decisions = RandomSource(*fork_generators([generator]))

    def bernoulli(self, probability: Tensor) -> Tensor:
        """Return booleans [...], each True with its probability; see ``RandomSource.bernoulli``."""
        return self._decisions.bernoulli(probability)


class RowRandomSource(RandomSource):
    """A source with one generator per row, so that a row's output does not depend on its neighbours.

    Attributes:
        generators: of each row.
    """

    def __init__(self, generators: Sequence[torch.Generator]):
        super().__init__()
        self.generators = generators

    def bernoulli(self, probability: Tensor) -> Tensor:
        """Return booleans [b, ...], row i's from generator i.

        Each row takes one number from its generator, the seed of its decisions: however far they are padded to the
        length of another row's draft, what the row draws next is the same.
        """
        rows = zip(fork_generators(self.generators), probability, strict=True)
        return torch.stack([RandomSource(generator).bernoulli(row) for generator, row in rows])

    def draw(self, probs: Tensor) -> Tensor:
        """Return one index per row: [b, ..., V] -> [b, ...], row i's from generator i."""
        return torch.stack([sample(row, generator) for generator, row in zip(self.generators, probs, strict=True)])

    def exponentials(self, like: Tensor) -> Tensor:
        """Return exponential numbers [b, ...] (``RandomSource.exponentials``), row i's from generator i."""
        rows = zip(self.generators, like, strict=True)
        return torch.stack([RandomSource(generator).exponentials(row) for generator, row in rows])


def fork_generators(generators: Iterable[torch.Generator], device: torch.device | None = None) -> list[torch.Generator]:
    """Return new generators seeded by one number of each: draws from them do not advance the originals.

    Args:
        generators: the originals; each is advanced by one number.
        device: of the new generators; None: that of the others.
    """
    seeds = [torch.randint(2**62, (), generator=generator, device=generator.device) for generator in generators]
    return [torch.Generator(device or seed.device).manual_seed(int(seed)) for seed in seeds]
