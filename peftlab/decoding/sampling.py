"""Speculative sampling: from logits to probabilities to tokens, and the drafted tokens that the target accepts.

All randomness of decoding is drawn here. Verification is exact (``accept``), or accepts what the target finds plausible
(``accept_lossy``). p is the target's distribution, q the draft's, γ the number of drafted tokens, N that of a tree's
nodes, V the vocabulary. A step emits the accepted tokens and then the next token, so n_accepted + 1 in all; cutting at
an end-of-sequence token is left to the caller. Chains are verified for a batch: leading dimensions are free, and each
row has its own number of accepted tokens. Trees are verified one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from peftlab.decoding.table import EMBEDDING, NamedRule
from peftlab.errors import PeftlabError
from peftlab.registry import resolve


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
    if temperature != 1:
        # The largest logit is subtracted before the division, so that a tiny temperature cannot overflow.
        logits = (logits - logits.amax(-1, keepdim=True)).div_(temperature)
    probs = logits.softmax(-1)
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
    """Draw one index per row, [..., V] -> [...], by inversion: see ``index_at``.

    Args:
        probs: [..., V], not negative; rows need not sum to 1.
        generator: on the device of ``probs``.
    """
    uniform = torch.rand(probs.shape[:-1], generator=generator, dtype=torch.float64, device=probs.device)
    return index_at(probs, uniform)


_BLOCK = 128  # indices whose sums are looked through first: so a row is read once, and its sum runs over few of them


def index_at(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the index at which a row's running sum first exceeds a share of its whole sum.

    That is a draw from the rows if the shares are uniform in [0, 1). An index of probability 0 is never returned
    for a row that has any mass. Sums are float64.

    Args:
        probs: [..., V], not negative; rows need not sum to 1. uniform: [...], float64.

    Returns:
        [...].
    """
    vocabulary = probs.shape[-1]
    rows = F.pad(probs.reshape(-1, vocabulary), (0, -vocabulary % _BLOCK)).unflatten(-1, (-1, _BLOCK))

    def place(masses: Tensor, at: Tensor) -> Tensor:
        """Return the first place where the running masses [R, n] exceed ``at`` [R, 1], or, if rounded up, its limit."""
        limit = torch.nextafter(masses[:, -1:], masses.new_zeros(()))
        return torch.searchsorted(masses, torch.minimum(at, limit), right=True).clamp_max(masses.shape[-1] - 1)

    masses = rows.sum(-1, dtype=torch.float64).cumsum(-1)
    at = uniform.reshape(-1, 1) * masses[:, -1:]
    block = place(masses, at)
    before = F.pad(masses, (1, 0)).gather(-1, block)
    inside = rows[torch.arange(len(rows), device=rows.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
    found = block * _BLOCK + place(inside, at - before)
    return found.clamp_max(vocabulary - 1).reshape(uniform.shape)


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
        shape, device = probs.shape[1:-1], probs.device
        rows = [torch.rand(shape, generator=each, dtype=torch.float64, device=device) for each in self.generators]
        return index_at(probs, torch.stack(rows))

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


def acceptance_probability(p_x: Tensor, q_x: Tensor) -> Tensor:
    """Return min(1, p(x) / q(x)), and 0 where q(x) = 0.

    A token that the draft could not have drawn is rejected. So a row of zeros in q means "nothing was drafted
    here": it is always rejected, its residual is p, and ragged drafts can be padded with it.

    Args:
        p_x: [...], target probability of the drafted token.
        q_x: [...], draft probability of the same token.
    """
    return torch.where(q_x > 0, (p_x / q_x).clamp_max(1), 0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return norm(max(0, p - q)), the distribution after a rejection; p itself where that has no mass.

    It has no mass when p and q agree to rounding, and then a rejection has probability 0 to rounding as well.

    Args:
        p: [..., V].
        q: [..., V].
    """
    excess = (p - q).clamp_min(0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, p)


def verify_chain(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, random: RandomSource
) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens in turn with min(1, p/q); after a rejection sample the residual, else sample p.

    Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). Lossless if each token was
    drawn from its row of ``draft_probs``.

    Args:
        target_probs: [..., γ+1, V]; row i follows the first i drafted tokens.
        draft_probs: [..., γ, V]; row i is what token i was drawn from. A row of zeros ends a shorter draft.
        tokens: [..., γ].
        random: what decides and what draws.

    Returns:
        n_accepted [...] in 0..γ and next_token [...].

    Raises:
        PeftlabError: shapes that do not fit together, as when the vocabularies differ in size.
    """
    _check_shapes(target_probs, draft_probs, tokens)
    accept = acceptance_probability(_gather(target_probs[..., :-1, :], tokens), _gather(draft_probs, tokens))
    n_accepted = _count_leading(random.bernoulli(accept))
    if not tokens.shape[-1]:  # the residual is p, as below, and no row is to be gathered
        p = target_probs.squeeze(-2)
        return n_accepted, random.draw(p / p.sum(-1, keepdim=True))
    # Nothing was drafted after the last token, so there the residual against a row of zeros is p.
    p = _gather_row(target_probs, n_accepted)
    q = _gather_row(F.pad(draft_probs, (0, 0, 0, 1)), n_accepted)
    return n_accepted, random.draw(residual(p, q))


def verify_block(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, random: RandomSource
) -> tuple[Tensor, Tensor]:
    """Verify a drafted chain as a whole: accepts at least as many tokens as ``verify_chain``, in expectation.

    Block verification (Sun et al. 2024, arXiv 2403.10444). With P_0 = 1, P_i = min(1, P_{i-1}·p(x_i)/q(x_i)) and
    S_i = Σ_x max(0, P_i·p(x) - q(x)) over the distributions after i tokens, token i passes with
    h_i = S_i / (S_i + 1 - P_i), on its own; the chain is accepted up to the last token that passes, and
    norm(max(0, P_i·p - q)) is drawn there. Lossless as ``verify_chain``. After the last drafted token q is a row of
    zeros, which makes h = P and the draw one from p.

    Args:
        target_probs: [..., γ+1, V]. draft_probs: [..., γ, V]. tokens: [..., γ]. random: decides and draws.

    Returns:
        n_accepted [...] in 0..γ and next_token [...].
    """
    _check_shapes(target_probs, draft_probs, tokens)
    drafted = F.pad(draft_probs, (0, 0, 0, 1))  # [..., γ+1, V]
    p_x, q_x = _gather(target_probs[..., :-1, :], tokens), _gather(draft_probs, tokens)
    ratios = torch.where(q_x > 0, p_x / q_x, 0)
    path = [torch.ones_like(ratios[..., 0])] if ratios.shape[-1] else []
    for ratio in ratios.unbind(-1):
        path.append((path[-1] * ratio).clamp_max(1))
    kept = torch.stack(path, -1) if path else target_probs.new_ones(target_probs.shape[:-1])  # P, [..., γ+1]
    surplus = (kept[..., None] * target_probs - drafted).clamp_min(0).sum(-1)  # S, [..., γ+1]
    room = surplus + (1 - kept)  # in this order: exactly S where P = 1, and so h = 1
    passed = random.bernoulli(torch.where(room > 0, surplus / room, 1)[..., 1:])
    places = torch.arange(1, tokens.shape[-1] + 1, device=tokens.device)
    n_accepted = F.pad(passed * places, (1, 0)).amax(-1)
    p = _gather_row(kept[..., None] * target_probs, n_accepted)
    return n_accepted, random.draw(residual(p, _gather_row(drafted, n_accepted)))


def verify_onehot(target_probs: Tensor, tokens: Tensor, random: RandomSource) -> tuple[Tensor, Tensor]:
    """Verify a deterministic draft (greedy, n-gram): accept x with p(x), else sample p without x.

    This is ``verify_chain`` with q one-hot at each token; a token of -1 ends a shorter draft.

    Args:
        target_probs: [..., γ+1, V].
        tokens: [..., γ].
        random: what decides and what draws.

    Returns:
        n_accepted [...] and next_token [...].
    """
    return verify_chain(target_probs, one_hot(tokens, target_probs), tokens.clamp_min(0), random)


def verify_greedy(target_argmax: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Accept tokens while they are the target's own greedy choice; then emit that choice.

    Args:
        target_argmax: [..., γ+1]; entry i follows the first i drafted tokens.
        tokens: [..., γ]; a token of -1 ends a shorter draft.

    Returns:
        n_accepted [...] and next_token [...].
    """
    if target_argmax.shape[-1] != tokens.shape[-1] + 1:
        raise PeftlabError(f"target_argmax {tuple(target_argmax.shape)}: must be one longer than {tuple(tokens.shape)}")
    n_accepted = _count_leading(tokens == target_argmax[..., :-1])
    return n_accepted, _gather(target_argmax, n_accepted)


def walk_greedy(choices: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[int], int]:
    """Follow the target's own choices down a tree as far as they were drafted.

    Args:
        choices: N+1 greedy tokens; entry 0 follows the root, entry i+1 follows node i.
        tokens: of the N nodes; -1 where nothing was drafted.
        parents: of the N nodes.

    Returns:
        The accepted path as node indices, and the next token after it.
    """
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path: list[int] = []
    node = -1
    while (below := children.get((node, choices[node + 1]))) is not None:
        path.append(below)
        node = below
    return path, choices[node + 1]


def _check_shapes(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> None:
    *lead, gamma, vocab = draft_probs.shape
    if target_probs.shape[-1] != vocab:
        raise PeftlabError(
            f"draft_probs: vocabulary of {vocab}, but the target's has {target_probs.shape[-1]}; "
            "cut both to the tokenizer's size before the softmax"
        )
    if tuple(tokens.shape) != (*lead, gamma) or tuple(target_probs.shape) != (*lead, gamma + 1, vocab):
        raise PeftlabError(
            f"shapes do not fit: target_probs {tuple(target_probs.shape)} must be [..., γ+1, V], "
            f"draft_probs {tuple(draft_probs.shape)} [..., γ, V], tokens {tuple(tokens.shape)} [..., γ]"
        )


def _gather(values: Tensor, index: Tensor) -> Tensor:
    """Return values[..., index]: [..., V], [...] -> [...]."""
    return values.gather(-1, index[..., None]).squeeze(-1)


def _gather_row(values: Tensor, index: Tensor) -> Tensor:
    """Return values[..., index, :]: [..., N, V], [...] -> [..., V]."""
    rows = values.reshape(-1, *values.shape[-2:])  # whole rows are copied, which a gather of each number is slower than
    return rows[torch.arange(len(rows), device=index.device), index.reshape(-1)].reshape(*index.shape, values.shape[-1])


def _count_leading(accepted: Tensor) -> Tensor:
    """Return the number of leading True along the last dimension: [..., γ] -> [...]."""
    return accepted.long().cumprod(-1).sum(-1)


def verify_drafts(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, random: RandomSource
) -> tuple[int | None, int]:
    """Try k drafts for one position in turn: accept x_i with min(1, p/q_i), else p ← norm(max(0, p - q_i)).

    Lossless if x_i was drawn from row i given the drafts before it. Equal rows are drafts with replacement
    (SpecInfer, arXiv 2305.09781); rows that lose each drawn token are recursive rejection sampling without
    replacement (RSD, arXiv 2402.14160), which accepts at least as often; rows may come from different models.

    Args:
        target_probs: [V].
        draft_probs: [k, V]; k may be 0, and then the token is a plain draw from p.
        tokens: [k].
        random: what decides and what draws.

    Returns:
        The index of the accepted draft, or None, and the emitted token.
    """
    p = target_probs
    for i, x in enumerate(tokens.tolist()):
        q = draft_probs[i]
        if random.bernoulli(acceptance_probability(p[x], q[x])):
            return i, x
        p = residual(p, q)
    return None, int(random.draw(p))


VerifyDrafts = Callable[[Tensor, Tensor, Tensor, RandomSource], tuple[int | None, int]]
"""Verifies several drafts for one position, as ``verify_drafts`` does."""


def verify_tree(
    target_probs: Tensor,
    draft_probs: Tensor,
    tokens: Tensor,
    parents: Sequence[int],
    random: RandomSource,
    verify: VerifyDrafts = verify_drafts,
) -> tuple[list[int], int]:
    """Walk down a token tree: ``verify`` each node's children, in order, until none is accepted.

    SpecInfer's multi-step verification (arXiv 2305.09781). With ``verify_drafts`` it is lossless if each node's token
    was drawn from its row given its elder siblings. A chain is the tree in which each node has one child.

    Args:
        target_probs: [N+1, V]; row 0 follows the prefix (the root), row i+1 follows node i.
        draft_probs: [N, V]; row i is what node i's token was drawn from.
        tokens: [N]; -1 where nothing was drafted, which takes no random number: a row's output does not depend on how
            far its tree is padded.
        parents: N parent nodes, -1 for the root; a parent comes before its children.
        random: what decides and what draws.
        verify: verifies the drafts of one position.

    Returns:
        The accepted path as node indices from the root down, and the next token after it.

    Raises:
        PeftlabError: a parent that does not come before its child.
    """
    children = children_of(tokens, parents)
    path: list[int] = []
    node = -1
    while True:
        below = children.get(node, [])
        accepted, token = verify(target_probs[node + 1], draft_probs[below], tokens[below], random)
        if accepted is None:
            return path, token
        node = below[accepted]
        path.append(node)


def children_of(tokens: Tensor, parents: Sequence[int]) -> dict[int, list[int]]:
    """Return the children of each node that has some, in order, -1 for the root; a node of token -1 is no child.

    Args:
        tokens: [N], -1 where nothing was drafted. parents: N parent nodes.

    Raises:
        PeftlabError: a parent that does not come before its child.
    """
    children: dict[int, list[int]] = {}
    for node, (parent, token) in enumerate(zip(parents, tokens.tolist(), strict=True)):
        if not -1 <= parent < node:
            raise PeftlabError(f"parents[{node}]: {parent} is neither -1 (the root) nor an earlier node")
        if token >= 0:
            children.setdefault(parent, []).append(node)
    return children


def verify_traversal(
    target_probs: Tensor,
    draft_probs: Tensor,
    tokens: Tensor,
    parents: Sequence[int],
    random: RandomSource,
) -> tuple[list[int], int]:
    """Accept or reject whole paths, leaves first; on a chain this is ``verify_block``.

    Traversal verification (Weng et al. 2025, arXiv 2505.12398). The root has a = 1, a child that was drawn from q has
    min(1, a·p(x)/q(x)) with its parent's a and p. A leaf is accepted with a, and with it the path to it; the next token
    is then drawn from its p. A child that is rejected with all that is below it leaves its parent with
    p ← norm(max(0, a·p - q)) and a ← S / (S + 1 - a), S the sum of max(0, a·p - q), for the next child; a parent
    without further children is a leaf. A node is accepted with its a, whatever is below it: the output follows p.

    Lossless if each node's token was drawn from its row given its elder siblings and what is below them.

    Args:
        target_probs, draft_probs, tokens, parents, random: as for ``verify_tree``.

    Returns:
        The accepted path as node indices from the root down, and the next token after it.
    """
    children, drafted = children_of(tokens, parents), tokens.tolist()

    def accept(node: int, kept: Tensor) -> tuple[list[int], int] | None:
        """Return the accepted path below a node, and the token after it; None where the node itself is rejected."""
        p = target_probs[node + 1]
        for child in children.get(node, []):
            x, q = drafted[child], draft_probs[child]
            ratio = torch.where(q[x] > 0, kept * p[x] / q[x], 0)
            if (below := accept(child, ratio.clamp_max(1))) is not None:
                return [child, *below[0]], below[1]
            excess = (kept * p - q).clamp_min(0).sum()
            room = excess + (1 - kept)  # in this order: exactly the excess where a = 1, which then stays 1
            p, kept = residual(kept * p, q), torch.where(room > 0, excess / room, 1)
        # The root's a stays 1, and a tree of nothing takes no number but that of the draw, however far it is padded.
        return ([], int(random.draw(p))) if node < 0 or random.bernoulli(kept) else None

    found = accept(-1, target_probs.new_ones(()))
    assert found is not None
    return found


Accepted = tuple[list[list[int]], list[int]]
"""Accepted nodes of each row, as indices into its draft, and the token after them."""


@dataclass(frozen=True)
class Verifier:
    """A pair of lossless functions that verify sampled drafts.

    Attributes:
        chain: a function such as ``verify_chain``. tree: a function such as ``verify_tree``.
    """

    chain: Callable[[Tensor, Tensor, Tensor, RandomSource], tuple[Tensor, Tensor]]
    tree: Callable[[Tensor, Tensor, Tensor, Sequence[int], RandomSource], tuple[list[int], int]]


TRAVERSAL = Verifier(verify_block, verify_traversal)
TOKENS = Verifier(verify_chain, verify_tree)


def accept(
    logits: Tensor,
    tokens: Tensor,
    probs: Tensor | None,
    parents: Sequence[Sequence[int]] | None,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    verifier: Verifier = TRAVERSAL,
) -> Accepted:
    """Accept drafted chains, or one path of each row's tree.

    Args:
        logits: [b, N+1, V] of the target, after the last known token and each drafted one.
        tokens: [b, N], -1 where a row has fewer.
        probs: [b, N, V], what each token was drawn from; None if the draft is deterministic.
        parents: of the N nodes of each row, -1 for the root; None: all are chains.
        sampling: how the target's tokens are chosen.
        generators: one per row.
        verifier: of drafts that were drawn. One that is deterministic is verified token by token: none accepts more.
    """
    if parents is None:
        return _accept_chains(logits, tokens, probs, sampling, generators, verifier)
    if sampling.greedy:
        rows = zip(argmax(logits).tolist(), tokens.tolist(), parents, strict=True)
        walks = [walk_greedy(*row) for row in rows]
    else:
        p = sampling.probabilities(logits)
        walks = []
        for i, (drafted, tree, generator) in enumerate(zip(tokens, parents, generators, strict=True)):
            q, verify = (one_hot(drafted, p[i]), verify_tree) if probs is None else (probs[i], verifier.tree)
            walks.append(verify(p[i], q, drafted, tree, TreeRandomSource(generator)))
    return [path for path, _ in walks], [token for _, token in walks]


def _accept_chains(
    logits: Tensor,
    tokens: Tensor,
    probs: Tensor | None,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    verifier: Verifier,
) -> Accepted:
    if sampling.greedy:
        counts, following = verify_greedy(argmax(logits), tokens)
    else:
        p, random = sampling.probabilities(logits), RowRandomSource(generators)
        if probs is None:
            counts, following = verify_onehot(p, tokens, random)
        else:
            counts, following = verifier.chain(p, probs, tokens.clamp_min(0), random)
    lengths, following_tokens = torch.stack((counts, following)).tolist()
    return [list(range(n)) for n in lengths], following_tokens


# LOSSY verification: a drafted token is accepted if the target finds it plausible, whatever it was drawn from. The
# output no longer follows the target's distribution p. How far it departs is known exactly at every position: the law
# of the emitted token follows from p, the tokens that a rule accepts, and what the drafted tokens were drawn from.


class Relaxed(Protocol):
    """A lossy rule that weighs p against q, as exact verification does, where tokens are drawn."""

    def allowed(self, p: Tensor) -> Tensor:
        """Return which tokens are accepted at temperature 0, p that at temperature 1: [..., V] -> [..., V]."""
        ...

    def verify(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, random: RandomSource
    ) -> tuple[int | None, int]:
        """Verify the drafts for one position; arguments and result are those of ``verify_drafts``."""
        ...

    def law(self, p: Tensor, drawn_from: Sequence[Tensor]) -> Tensor:
        """Return the distribution of the token that is emitted, [V]; arguments as of ``emitted_distribution``."""
        ...


@dataclass(frozen=True)
class LossyRule:
    """A rule that decides which drafted tokens are accepted.

    Attributes:
        name: for reports. allowed: p [..., V] -> whether each token is accepted if it is drafted.
        relaxed: decides where tokens are drawn; None: by ``allowed``, whatever they were drawn from.
    """

    name: str
    allowed: Callable[[Tensor], Tensor]
    relaxed: Relaxed | None = None

    @classmethod
    def of(cls, chosen: NamedRule, embedding: Tensor | None = None) -> LossyRule:
        """Return the rule that a user named.

        Args:
            chosen: the rule. embedding: the target's token embeddings [V, H], which some rules need.
        """
        rule, x = resolve(chosen.row.make), chosen.value
        if chosen.row.needs != EMBEDDING:
            return cls(chosen.text, lambda p: rule(p, x))
        if embedding is None or not isinstance(x, tuple):
            raise PeftlabError(f"lossy {chosen.text}: needs the target's token embeddings")
        relaxed: Relaxed = rule(embedding, *x)
        return cls(chosen.text, relaxed.allowed, relaxed)

    def distribution_and_mask(self, logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Return p, from which tokens are drawn, and the mask of tokens that are accepted, [..., V] each.

        At temperature 0, p is 1 at the largest logit, and the rule judges by the distribution at temperature 1.

        Args:
            logits: [..., V]. sampling: how tokens are chosen.
        """
        if not sampling.greedy:
            p = sampling.probabilities(logits)
            return p, self.allowed(p)
        whole = logits.softmax(-1)
        return one_hot(argmax(logits), whole), self.allowed(whole)


def typical(p: Tensor, epsilon: float) -> Tensor:
    """Return where p(x) > min(ε, √ε·exp(-H(p))), H the entropy in nats: [..., V] -> [..., V].

    Medusa's typical acceptance (Cai et al. 2024, arXiv 2401.10774). The most probable token is always accepted.

    Args:
        p: [..., V]. epsilon: ε in (0, 1).
    """
    threshold = (epsilon**0.5 * torch.exp(-torch.special.entr(p).sum(-1, keepdim=True))).clamp_max(epsilon)
    return p > threshold


def accept_k(p: Tensor, k: float) -> Tensor:
    """Return where a token is among the k most probable ones and has p > 0: [..., V] -> [..., V].

    ``verifier_accept_k`` of vLLM's library speculators.

    Args:
        p: [..., V]. k: a whole number.
    """
    best = p.topk(min(int(k), p.shape[-1]), -1).indices
    return torch.zeros_like(p, dtype=torch.bool).scatter(-1, best, True) & (p > 0)


def verify_lossy(
    target_probs: Tensor, allowed: Tensor, tokens: Tensor, parents: Sequence[int], random: RandomSource
) -> tuple[list[int], int]:
    """LOSSY: walk down a tree by the first child that is allowed; then draw from p.

    Args:
        target_probs: [N+1, V]; row 0 follows the root, row i+1 follows node i. allowed: [N+1, V].
        tokens: [N], -1 where nothing was drafted. parents: N parent nodes, -1 for the root; a chain is -1, 0, 1, ...
        random: the draw; acceptance is deterministic.

    Returns:
        The accepted path as node indices from the root down, and the next token after it.
    """
    drafted, path = tokens.tolist(), list[int]()
    for node, (parent, token) in enumerate(zip(parents, drafted, strict=True)):
        # A parent comes before its children, and a younger child is not looked at once the path has left its parent.
        if parent == (path[-1] if path else -1) and token >= 0 and bool(allowed[parent + 1, token]):
            path.append(node)
    return path, int(random.draw(target_probs[(path[-1] if path else -1) + 1]))


def accept_lossy(
    rule: LossyRule,
    logits: Tensor,
    tokens: Tensor,
    probs: Tensor | None,
    parents: Sequence[Sequence[int]],
    sampling: Sampling,
    generators: Sequence[torch.Generator],
) -> tuple[list[list[int]], list[int]]:
    """Accept one path of each row's draft by a lossy rule.

    Args:
        rule: decides. logits, tokens, probs, sampling, generators: as for ``accept``. parents: of each row's nodes.

    Returns:
        The accepted nodes of each row, and the token after them.
    """
    if rule.relaxed is not None and not sampling.greedy:
        p = sampling.probabilities(logits)
        q = one_hot(tokens, p) if probs is None else probs
        drafts = zip(p, q, tokens, parents, map(TreeRandomSource, generators), strict=True)
        walks = [verify_tree(*draft, rule.relaxed.verify) for draft in drafts]
    else:
        p, allowed = rule.distribution_and_mask(logits, sampling)
        rows = zip(p, allowed, tokens, parents, map(RandomSource, generators), strict=True)
        walks = [verify_lossy(*row) for row in rows]
    return [path for path, _ in walks], [token for _, token in walks]
