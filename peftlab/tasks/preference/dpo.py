"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290).

The reward of an answer is β (log π − log ρ), with π the model and ρ the reference; with z the reward of the chosen less
that of the rejected answer, the loss of a pair is −log σ(z). Log-probabilities are summed over an answer's tokens.

ρ never changes, so its log-probabilities are computed once, before the first step, by the model as it is then: the base
model with a fresh adapter, or the state that ``init_from`` put there. There is never a second model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F

from peftlab.methods.modes import eval_mode
from peftlab.tasks.batches import eval_batches
from peftlab.tasks.evaluation_turns import over_processes
from peftlab.tasks.language.examples import collate
from peftlab.tasks.language.likelihood import token_nll
from peftlab.tasks.preference.pairs import SIDES
from peftlab.tasks.tokens import Row

REFERENCE = "reference"
"""The column with the reference's log-probabilities of the chosen and the rejected answer."""


def collate_pairs(rows: Sequence[Row], *, pad: int) -> dict[str, Tensor]:
    """Return b pairs as one batch of 2b sequences: all that were chosen, then all that were rejected.

    ``reference`` [2b] is absent as long as the rows do not have it.
    """
    sides = [{"input_ids": row[f"{s}_ids"], "trained": row[f"{s}_trained"]} for s in SIDES for row in rows]
    inputs = collate(sides, pad=pad)
    if REFERENCE in rows[0]:
        inputs[REFERENCE] = torch.tensor([row[REFERENCE] for row in rows]).T.flatten()
    return inputs


def answer_log_probs(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return log p(answer | what comes before it) of each sequence, [2b], in fp32: the sum over its trained tokens."""
    counts = inputs["trained"][:, 1:].sum(1).tolist()
    inputs = {key: value for key, value in inputs.items() if key != REFERENCE}
    return -torch.stack([part.sum() for part in token_nll(model, inputs).split(counts)])


def preference_loss(model: nn.Module, inputs: Mapping[str, Tensor], *, beta: float) -> Tensor:
    """Return Σ −log σ(z) over the pairs of a batch of ``collate_pairs``."""
    rewards = beta * (answer_log_probs(model, inputs) - inputs[REFERENCE])
    chosen, rejected = rewards.chunk(2)
    return -F.logsigmoid(chosen - rejected).sum()


@dataclass(frozen=True)
class PreferenceEvaluation:
    """How pairs are scored.

    Attributes:
        splits: tokenised pairs by split name; they are scored once they have a column ``reference``.
        pad: the id that fills batches. batch_size: pairs per batch and process.
    """

    splits: Mapping[str, Dataset]
    pad: int
    batch_size: int
    beta: float

    def score(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Return per split the mean loss, and of the rewards the accuracy (share of pairs with z > 0), the margin
        (mean of z) and the mean of each side.

        Every process must call it, and each gets the same result.
        """
        scores = {}
        for split, data in self.splits.items():
            reference = torch.tensor(list(data[REFERENCE]), dtype=torch.float64)
            chosen, rejected = (self.beta * (self.log_probs(model, data) - reference)).unbind(1)
            margin = chosen - rejected
            means = {
                "loss": -F.logsigmoid(margin), "reward_accuracy": (margin > 0).double(), "reward_margin": margin,
                "chosen_reward": chosen, "rejected_reward": rejected,
            }  # fmt: skip
            scores[split] = {name: float(values.mean()) for name, values in means.items()}
        return scores

    def refer(self, model: nn.Module, data: Dataset) -> Dataset:
        """Return pairs with ``model`` as their reference; every process must call it."""
        with eval_mode(model):
            return data.add_column(REFERENCE, self.log_probs(model, data).tolist())

    def log_probs(self, model: nn.Module, data: Dataset) -> Tensor:
        """Return the log-probabilities of both answers, [n, 2] in fp64, in the order of ``data``."""
        batches = eval_batches(data["length"], self.batch_size)
        together = partial(collate_pairs, pad=self.pad)
        found = over_processes(data, batches, together, lambda inputs: answer_log_probs(model, inputs).tolist())
        result = torch.empty(len(data), 2, dtype=torch.float64)
        for batch, values in zip(batches, found, strict=True):
            result[batch] = torch.tensor(values, dtype=torch.float64).view(2, -1).T
        return result
