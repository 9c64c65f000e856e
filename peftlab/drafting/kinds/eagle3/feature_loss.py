"""Training-time test: a layer on the target's states drafts several tokens at every position, on its own states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from peftlab.drafting.acceptance import Acceptance, add_rates, batches
from peftlab.drafting.chunked_loss import chunked_loss
from peftlab.drafting.hidden_states import forward_hidden, head_weight, unwrapped
from peftlab.drafting.kinds.eagle3.eagle_network import StateNetwork
from peftlab.drafting.objectives import Objective
from peftlab.drafting.text.continuations import continued
from peftlab.methods.modes import eval_mode


class EagleModel(nn.Module):
    """A frozen target and the network on its states, as they train together."""

    def __init__(self, trunk: PreTrainedModel, network: StateNetwork):
        super().__init__()
        self.trunk, self.network = trunk, network

    def forward(self, known: Tensor | None = None, **inputs: object) -> ModelOutput | Tensor:
        """Return what the target returns, or what is known already: DDP gathers gradients after a forward pass only."""
        return self.trunk(**inputs) if known is None else known

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the target's LM head."""
        return self.trunk.get_output_embeddings()


@dataclass
class StepAttention:
    """Attention of the training-time test, called once for each step.

    Row t of step k sees the keys of step 0 up to its own position, and its own rows of steps 1 to k: what it would see
    when it drafts its k + 1st token after the target has read t tokens. Rows are padded on the right, so that no row of
    a text sees padding.
    """

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b, heads, n, D], k and v [b, kv_heads, n, D] -> [b, heads, n, D]."""
        groups = q.shape[1] // k.shape[1]
        self.keys.append(k.repeat_interleave(groups, 1))
        self.values.append(v.repeat_interleave(groups, 1))
        first, *own = self.keys
        if not own:
            return F.scaled_dot_product_attention(q, first, self.values[0], is_causal=True)
        n, q = q.shape[2], q * q.shape[-1] ** -0.5
        later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        earlier = (q @ first.mT).masked_fill(later, -torch.inf)  # [b, heads, n, n]
        mine = torch.stack([(q * key).sum(-1) for key in own], -1)  # [b, heads, n, k]
        shares = torch.cat((earlier, mine), -1).softmax(-1, dtype=torch.float32).to(v.dtype)
        seen = shares[..., :n] @ self.values[0]
        for step, value in enumerate(self.values[1:]):
            seen = seen + shares[..., n + step, None] * value
        return seen


def unroll(network: StateNetwork, features: Tensor, ids: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield the outputs [b, n, H] of each step of the training-time test.

    In step k row t reads token t + 1 + k of the text, at position t + k, and its own output of the step before: step 0
    reads the target's states. Its output predicts token t + 2 + k.

    Args:
        features: the target's states, [b, n, F]. ids: the text, [b, n].
    """
    attend, states = StepAttention(), network.fuse(features)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    for k in range(steps):
        tokens = F.pad(ids[:, k + 1 :], (0, min(k + 1, ids.shape[1])))
        states = network.rows(tokens, states, positions + k, attend)
        yield states


def predictions(places: Tensor, ahead: int) -> Tensor:
    """Return which rows count of those that are ``ahead`` of the target's, [b, n] -> [b, n - ahead].

    Row t is compared with the target's row t + ahead. It counts if that one predicts a token of the continuation, and
    if the first token that row t drafts is one, too: drafting starts after the prompt.

    Args:
        places: which of the target's rows predict a token of the continuation, [b, n].
    """
    n = places.shape[1]
    return (places[:, 1 : n - ahead + 1] > 0) & (places[:, ahead:] > 0)


class KnownStates(Protocol):
    """States of texts that were computed before."""

    def read(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the states of a batch that ``target_states`` returns, next to each other, [b, n, F + H]."""
        ...


def target_states(
    model: nn.Module, ids: Tensor, mask: Tensor, known: KnownStates | None = None
) -> tuple[Tensor, Tensor]:
    """Return the frozen target's states that the network reads, [b, n, F], and those its LM head reads, [b, n, H].

    Gradients are on, as far as they are for the caller: DDP prepares to gather gradients only then.

    Args:
        known: where they are read from; None: the target computes them.
    """
    if known is not None:
        both = model(known=known.read(ids, mask))
        width = head_weight(model).shape[1]
        return both[..., :-width], both[..., -width:]
    with eval_mode(model):
        hidden = forward_hidden(model, ids, mask)
    network = unwrapped(model).network
    return torch.cat([hidden[layer] for layer in network.features], -1).detach(), hidden[-1].detach()


@dataclass
class FeatureLoss:
    """Σ_k decay^k · (D(p_{t+1+k} ‖ q of step k at row t) + ρ · SmoothL1), over the tokens that the network can draft.

    The target's distribution is restricted to these tokens, and its logits are those of the network's own frozen rows
    of the LM head; for ``ce`` a token of the text that cannot be drafted does not count. SmoothL1 is the mean
    over the numbers of the states that the LM head reads, the network's and the target's: EAGLE-1's regression
    (arXiv 2401.15077).

    Attributes:
        objective: D, what each step minimises. steps: of the training-time test. decay: of their weights.
        regression: ρ. known: the target's states of the training text; None: it computes them.
    """

    objective: Objective
    steps: int
    decay: float
    regression: float = 0.0
    known: KnownStates | None = None

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the sum over tokens and steps."""
        ids, weights = inputs["input_ids"], inputs["weights"]
        features, final = target_states(model, ids, inputs["attention_mask"], self.known)
        network: StateNetwork = unwrapped(model).network
        head, drafted = network.lm_head.weight, continued(inputs)
        total = head.new_zeros(())
        for k, states in enumerate(unroll(network, features, ids, min(self.steps, ids.shape[1] - 1))):
            ahead = k + 1
            places = predictions(drafted, ahead) & (weights[:, ahead:] > 0)
            mine, theirs = network.read_by_head(states[:, :-ahead][places]), final[:, ahead:][places]
            if self.regression:
                distance = F.smooth_l1_loss(mine, theirs.to(mine.dtype), reduction="sum") / mine.shape[-1]
                total = total + self.decay**k * self.regression * distance
            if self.objective.name == "ce":
                labels = network.draft_ids(F.pad(ids[:, ahead + 1 :], (0, 1))[places])
                mine, target, target_head = mine[labels >= 0], labels[labels >= 0], None
            else:
                target, target_head = theirs.to(head.dtype), head
            mean = chunked_loss(mine, head, target, target_head, self.objective.name, settings=self.objective.settings)
            total = total + self.decay**k * mean * len(mine)
        if not total.requires_grad:  # every continuation is too short to look ahead: nothing to learn, but a graph
            total = total + 0 * sum(p.sum() for p in network.parameters())
        return total


@torch.no_grad()
def measure_features(model: EagleModel, data: Dataset, steps: int, batch_size: int = 16) -> list[Acceptance]:
    """Return the acceptance of each step's predictions by the target, as in training: the text is read, not drafted."""
    network, head = model.network, head_weight(model)
    sums = torch.zeros(steps, 4, len(data), dtype=torch.float64)
    for rows, places, ids, mask in batches(data, batch_size, head.device):
        features, final = target_states(model, ids, mask)
        for k, states in enumerate(unroll(network, features, ids, min(steps, ids.shape[1] - 1))):
            both = predictions(places, k + 1)
            mine = network.read_by_head(states[:, : -(k + 1)][both])
            which = rows[both.nonzero()[:, 0].cpu()]
            add_rates(sums[k], which, final[:, k + 1 :][both], mine, head, network.lm_head.weight, network.tokens)
    return [Acceptance(*part) for part in sums]
