"""How often a target would accept a draft, measured on text; reduced vocabularies; heads that predict acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeGuard

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F

from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.decoding.theory import RankRates, acceptance_rate, vocabulary_cap
from peftlab.drafting.target import frozen_hidden, head_weight, logits_of
from peftlab.drafting.text import Collate
from peftlab.errors import PeftlabError
from peftlab.files import read_object, replacing, write_json
from peftlab.tasks.batches import eval_batches

_CHUNK = 256  # tokens whose two distributions live at a time


class Acceptance(NamedTuple):
    """The sums over each example's predictions, all [n] in float64.

    Attributes:
        tokens: how many predictions. overlap: Σ α, α = Σ_x min(p, q) = 1 - TV(p, q): the acceptance of sampling at
            temperature 1. agreement: predictions where both have the same largest token: the acceptance of
            greedy decoding. certain: Σ p(argmax q): sampling from p, drafting greedily.
    """

    tokens: Tensor
    overlap: Tensor
    agreement: Tensor
    certain: Tensor

    def rates(self) -> dict[str, float]:
        """Return the pooled rates: sums over all examples, divided by all predictions."""
        total = max(1.0, float(self.tokens.sum()))
        return {
            "acceptance": float(self.overlap.sum()) / total,
            "agreement": float(self.agreement.sum()) / total,
            "target_probability": float(self.certain.sum()) / total,
        }


def rates_by_depth(measured: Iterable[Acceptance]) -> dict[str, float]:
    """Return the mean acceptance over several tokens ahead, and the rates of each, numbered from 1."""
    rates = [each.rates() for each in measured]
    each = {f"{key}_{k}": of[key] for k, of in enumerate(rates, start=1) for key in ("acceptance", "agreement")}
    return {"acceptance": sum(of["acceptance"] for of in rates) / len(rates), **each}


@torch.no_grad()
def measure(target: nn.Module, draft: nn.Module, data: Dataset, batch_size: int = 16) -> Acceptance:
    """Return the acceptance of ``draft`` by ``target`` on the continuations of ``data``, both reading the text.

    Args:
        target, draft: causal language models over the same vocabulary, on one device.
        data: rows as ``text.make_dataset`` makes them.
    """
    sums = torch.zeros(4, len(data), dtype=torch.float64)
    heads = head_weight(target), head_weight(draft)
    for rows, places, ids, mask in batches(data, batch_size, heads[0].device):
        own, other = (frozen_hidden(model, ids, mask)[places] for model in (target, draft))
        add_rates(sums, rows[places.nonzero()[:, 0].cpu()], own, other, *heads)
    return Acceptance(*sums)


@torch.no_grad()
def states_and_rates(
    target: nn.Module, draft: nn.Module, data: Dataset, batch_size: int = 16
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, for a few predictions at a time, the draft's states [t, H], their α [t] and agreement [t].

    Args:
        target, draft: causal language models over the same vocabulary, on one device.
        data: rows as ``text.make_dataset`` makes them. batch_size: rows read together.
    """
    heads = head_weight(target), head_weight(draft)
    for _, places, ids, mask in batches(data, batch_size, heads[0].device):
        own, other = (frozen_hidden(model, ids, mask)[places] for model in (target, draft))
        for mine, theirs in zip(own.split(_CHUNK), other.split(_CHUNK), strict=True):
            p, q = (logits_of(h, w).float().softmax(-1) for h, w in zip((mine, theirs), heads, strict=True))
            yield theirs, acceptance_rate(p, q), p.argmax(-1) == q.argmax(-1)


@torch.no_grad()
def target_states(target: nn.Module, data: Dataset, batch_size: int = 16) -> Iterator[Tensor]:
    """Yield the target's states [t, H] at a few of the predictions that count at a time.

    Args:
        target: a causal language model. data: rows as ``text.make_dataset`` makes them. batch_size: rows read together.
    """
    for _, places, ids, mask in batches(data, batch_size, head_weight(target).device):
        yield from frozen_hidden(target, ids, mask)[places].split(_CHUNK)


def batches(data: Dataset, batch_size: int, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """Yield row numbers [b], which predictions count [b, n], token ids [b, n] and their mask [b, n].

    Args:
        data: rows as ``text.make_dataset`` makes them.
        batch_size: b, rows of similar length. device: where all but the row numbers are put.
    """
    collate = Collate()
    keys = ("input_ids", "prompt", "length")
    for batch in eval_batches(data["length"], batch_size):
        inputs = collate([{key: row[key] for key in keys} for row in data.__getitems__(batch)])
        inputs = {key: value.to(device) for key, value in inputs.items()}
        yield torch.tensor(batch), inputs["weights"] > 0, inputs["input_ids"], inputs["attention_mask"]


def add_rates(
    sums: Tensor,
    rows: Tensor,
    target: Tensor,
    draft: Tensor,
    target_head: Tensor,
    draft_head: Tensor,
    tokens: Tensor | None = None,
) -> None:
    """Add each token's rates to its row's sums, in chunks, so that few distributions over V exist at a time.

    Args:
        sums: [4, rows of the data], in the order of ``Acceptance``; changed in place.
        rows: [T], the row of each token.
        target, draft: the hidden states [T, Ht] and [T, H] behind the two predictions of each token.
        target_head, draft_head: LM heads [V, Ht] and [V_d, H].
        tokens: [V_d], the ids for which ``draft_head`` has rows, other ids having probability 0; None: V_d is V.
    """
    for part in torch.arange(len(rows)).split(_CHUNK):
        p = logits_of(target[part], target_head).float().softmax(-1)
        q = logits_of(draft[part], draft_head).float().softmax(-1)
        if tokens is not None:
            q = torch.zeros_like(p).index_copy_(-1, tokens, q)  # [t, V]: other tokens are never drafted
        best = q.argmax(-1)
        certain = p.gather(-1, best[:, None]).squeeze(-1)
        for total, rate in zip(
            sums, (torch.ones_like(certain), acceptance_rate(p, q), p.argmax(-1) == best, certain), strict=True
        ):
            total.index_add_(0, rows[part], rate.cpu().double())


RANKS = 8
"""Number of a draft's most probable tokens that are counted at each place."""

KEY = "rank_acceptance"
"""The key of the rates by rank in a file."""


def greedy_tokens(hidden: Tensor, head: Tensor) -> Tensor:
    """Return the most probable next token after each state: [b, n, H] -> [b, n].

    Args:
        hidden: [b, n, H]. head: the LM head, [V, H].
    """
    flat = hidden.flatten(0, 1)
    return torch.cat([logits_of(part, head).argmax(-1) for part in flat.split(_CHUNK)]).reshape(hidden.shape[:2])


def correct_choices(states: Tensor, weight: Tensor, right: Tensor, ids: Tensor | None) -> Tensor:
    """Return which of the best choices are right: [T, H], [V_d, H], [T] -> booleans [T, at most RANKS].

    Args:
        ids: [V_d], the token of each row of ``weight``; None: its own number.
    """
    width = min(RANKS, len(weight))
    best = torch.cat([logits_of(part, weight).topk(width, -1).indices for part in states.split(_CHUNK)])
    return (best if ids is None else ids[best]) == right[:, None]


def write_ranks(file: Path, ranks: RankRates) -> None:
    """Store in a JSON object how often the target accepts each choice of the draft beside it.

    Args:
        file: contains the object. ranks: the measured rates.
    """
    write_json(file, {**read_object(file), KEY: [list(each) for each in ranks.rates]})


def read_ranks(file: Path) -> RankRates | None:
    """Return the rates that ``write_ranks`` has stored in a file; None where it has none, or is not there.

    Raises:
        PeftlabError: they are not lists of one length, positive and falling.
    """
    stored: object = read_object(file).get(KEY) if file.exists() else None
    if stored is None:
        return None
    rates = tuple(tuple(each) for each in stored) if isinstance(stored, list) and all(map(_is_list, stored)) else ()
    valid = all(isinstance(rate, float) and 0 < rate <= 1 for each in rates for rate in each)
    falling = all(list(each) == sorted(each, reverse=True) for each in rates) if valid else False
    if not rates or not falling or len({len(each) for each in rates}) > 1 or not rates[0]:
        raise PeftlabError(f"{file}: {KEY} is not, for each depth, rates that fall from rank to rank")
    return RankRates(rates)


def _is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def frequent_tokens(texts: Iterable[Sequence[int]], size: int, vocab_size: int) -> Tensor:
    """Return the ``size`` most frequent token ids of ``texts``, rising; among equals the lower ids win.

    Ids that never occur fill up what is left, the lowest first.

    Args:
        texts: token ids of each text. size: V_d, how many to return. vocab_size: V.

    Raises:
        PeftlabError: ``size`` outside 1..``vocab_size``.
    """
    if not 1 <= size <= vocab_size:
        raise PeftlabError(f"vocabulary: {size} is outside 1..{vocab_size}, the target's vocabulary")
    counts = Counter(token for text in texts for token in text)
    # The id as second key makes the choice the same for the same text, whatever the order of counting.
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def response_tokens(data: Dataset, size: int | None, target: nn.Module) -> Tensor | None:
    """Return the ``size`` most frequent tokens of the continuations in ``data``; None for ``size`` None.

    Args:
        data: rows as ``text.make_dataset`` makes them. size: V_d. target: gives V, the rows of its LM head.
    """
    if size is None:
        return None
    return frequent_tokens((row["input_ids"][row["prompt"] :] for row in data), size, len(head_weight(target)))


@torch.no_grad()
def ceiling(target: nn.Module, data: Dataset, tokens: Tensor) -> float:
    """Return the mean of p(V_d) over the predictions of ``data``, which bounds any draft restricted to ``tokens``.

    See ``theory.vocabulary_cap``.

    Args:
        target: gives p. data: rows as ``text.make_dataset`` makes them. tokens: V_d, ids [V_d].
    """
    mass, count = 0.0, 0
    for hidden in target_states(target, data):
        p = F.linear(hidden, head_weight(target)).float().softmax(-1)
        mass += float(vocabulary_cap(p, tokens.to(p.device)).cpu().double().sum())
        count += len(p)
    return mass / max(1, count)


def reduce_heads(tensors: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """Return heads' tensors with only the rows of ``tokens`` in those that give logits, and ``token_map``.

    Args:
        tensors: by name, logit-giving ones [V, ...]. tokens: ids of the rows that stay, [V_d], stored as ``token_map``.
    """
    rows = ("lm_heads.", "markov_head.markov_w2.")
    some = {name: t[tokens].clone() if name.startswith(rows) else t for name, t in tensors.items()}
    return some | {"token_map": tokens}


@dataclass(frozen=True)
class ReliabilityBin:
    """The tokens whose estimated acceptance is in one tenth of [0, 1].

    Attributes:
        tokens: how many. confidence: the mean estimate. acceptance: the mean probability that sampling accepts them.
        agreement: the share that greedy decoding accepts.
    """

    tokens: int
    confidence: float
    acceptance: float
    agreement: float


@dataclass(frozen=True)
class Reliability:
    """How well a draft's estimates of acceptance agree with what the target accepts.

    Attributes:
        error: the expected calibration error, Σ over bins of their share · |confidence - acceptance|.
        greedy_error: the same with ``agreement``. bins: those with a token, by rising confidence.
    """

    error: float
    greedy_error: float
    bins: list[ReliabilityBin]

    def line(self) -> str:
        """Return the errors as a line for people."""
        return f"confidence head: calibration error {self.error:.3f}, {self.greedy_error:.3f} in greedy decoding"


def reliability(confidence: Tensor, acceptance: Tensor, agreement: Tensor) -> Reliability:
    """Return the reliability of estimates over ten bins of equal width.

    Args:
        confidence: the estimates [T], in [0, 1]. acceptance: Σ min(p, q) of each token. agreement: whether the largest
            of p and q is the same token.
    """
    places = (confidence * 10).long().clamp(0, 9)
    bins = []
    for place in places.unique().tolist():
        of = [each[places == place].double() for each in (confidence, acceptance, agreement)]
        bins.append(ReliabilityBin(len(of[0]), *(float(each.mean()) for each in of)))
    total = max(1, len(confidence))
    error = sum(each.tokens * abs(each.confidence - each.acceptance) for each in bins) / total
    greedy = sum(each.tokens * abs(each.confidence - each.agreement) for each in bins) / total
    return Reliability(error, greedy, bins)


class AcceptancePredictor(nn.Module):
    """p̂ = σ(w2·SiLU(W1·h + b1) + b2), [..., H] -> [...]: the probability that a token drafted from state h is accepted.

    Huang et al. 2024 (arXiv 2405.19715). ``decoding.policies.AcceptanceHead`` takes it as its ``head``.
    """

    def __init__(self, hidden_size: int, width: int = 64):
        super().__init__()
        self.inner = nn.Linear(hidden_size, width)
        self.outer = nn.Linear(width, 1)

    def logit(self, hidden: Tensor) -> Tensor:
        """Return the log-odds, [..., H] -> [...]."""
        return self.outer(F.silu(self.inner(hidden.to(self.inner.weight.dtype)))).squeeze(-1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logit(hidden).sigmoid()


def train_acceptance_head(
    target: nn.Module,
    draft: nn.Module,
    train: Dataset,
    held_out: Dataset,
    *,
    greedy: bool = False,
    epochs: int = 20,
    batch_size: int = 256,
    lr: float = 1e-3,
    seed: int = 0,
) -> tuple[AcceptancePredictor, dict[str, float]]:
    """Fit a head on a finished draft's hidden states; target and draft stay as they are.

    Binary cross-entropy against the exact probability that a token is accepted: α = Σ min(p, q) for sampling at
    temperature 1, or whether both have the same largest token for greedy decoding.

    Args:
        train, held_out: rows as ``text.make_dataset`` makes them.

    Returns:
        The head, and on the held-out text: ``brier``, the mean squared error of p̂, and ``brier_constant``, that
        of the training text's mean probability.
    """
    states, probabilities = _states_and_acceptance(target, draft, train, greedy)
    with torch.random.fork_rng([states.device] if states.is_cuda else []):
        torch.manual_seed(seed)
        head = AcceptancePredictor(states.shape[-1]).to(states.device)
        optimiser = torch.optim.AdamW(head.parameters(), lr=lr)
        for _ in range(epochs):
            for rows in torch.randperm(len(states)).to(states.device).split(batch_size):
                loss = F.binary_cross_entropy_with_logits(head.logit(states[rows]), probabilities[rows])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    unseen, truth = _states_and_acceptance(target, draft, held_out, greedy)
    with torch.no_grad():
        error = float((head(unseen) - truth).square().mean())
        constant = float((probabilities.mean() - truth).square().mean())
    return head.eval(), {"brier": error, "brier_constant": constant}


def save_acceptance_head(head: AcceptancePredictor, path: Path) -> None:
    """Write a head to a safetensors file.

    Args:
        head: a trained head. path: the file, replaced as a whole.
    """
    with replacing(path) as temporary:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
        write_tensors(temporary, tensors, {"format": "pt"})


def load_acceptance_head(path: str | Path) -> AcceptancePredictor:
    """Read a head that ``save_acceptance_head`` wrote.

    Raises:
        PeftlabError: the file contains something else.
    """
    tensors, _ = read_tensors(Path(path))
    if set(tensors) != {"inner.weight", "inner.bias", "outer.weight", "outer.bias"}:
        raise PeftlabError(f"{path}: no acceptance head; it contains {', '.join(sorted(tensors)[:5])}")
    inner = tensors["inner.weight"]
    if inner.ndim != 2:
        raise PeftlabError(f"{path}: inner.weight has shape {tuple(inner.shape)}, which is no matrix")
    head = AcceptancePredictor(inner.shape[1], inner.shape[0])
    for name, parameter in head.state_dict().items():
        if tensors[name].shape != parameter.shape:
            raise PeftlabError(f"{path}: {name} has shape {tuple(tensors[name].shape)}, not {tuple(parameter.shape)}")
    head.load_state_dict(tensors)
    return head.eval()


def _states_and_acceptance(target: nn.Module, draft: nn.Module, data: Dataset, greedy: bool) -> tuple[Tensor, Tensor]:
    """Return the draft's hidden states [T, H] and the acceptance probability of each [T]."""
    parts = [(hidden, agree if greedy else alpha) for hidden, alpha, agree in states_and_rates(target, draft, data)]
    states, probabilities = (torch.cat(column) for column in zip(*parts, strict=True))
    return states.float(), probabilities.float()
