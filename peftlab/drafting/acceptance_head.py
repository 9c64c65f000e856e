"""A head that predicts whether a drafted token will be accepted, so that drafting stops in time (SpecDec++)."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F

from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.drafting.acceptance import each_token
from peftlab.errors import PeftlabError
from peftlab.files import replacing


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
        train, held_out: rows as ``continuations.make_dataset`` makes them.

    Returns:
        The head, and on the held-out text: ``brier``, the mean squared error of p̂, and ``brier_constant``, that
        of the training text's mean probability.
    """
    states, probabilities = _states(target, draft, train, greedy)
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
    unseen, truth = _states(target, draft, held_out, greedy)
    with torch.no_grad():
        error = float((head(unseen) - truth).square().mean())
        constant = float((probabilities.mean() - truth).square().mean())
    return head.eval(), {"brier": error, "brier_constant": constant}


def save_acceptance_head(head: AcceptancePredictor, path: Path) -> None:
    """Write a head to a safetensors file."""
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


def _states(target: nn.Module, draft: nn.Module, data: Dataset, greedy: bool) -> tuple[Tensor, Tensor]:
    """Return the draft's hidden states [T, H] and the acceptance probability of each [T]."""
    parts = [(hidden, agree if greedy else alpha) for hidden, alpha, agree in each_token(target, draft, data)]
    states, probabilities = (torch.cat(column) for column in zip(*parts, strict=True))
    return states.float(), probabilities.float()
