"""EAGLE-3 layers on a target, for the tests: one with random weights, one that has learned a little."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.acceptance import frequent_tokens
from peftlab.drafting.eagle import Eagle3, EagleStep
from peftlab.drafting.objectives import Objective
from peftlab.drafting.state_network import FeatureLoss, TargetWithNetwork, shape_for
from peftlab.drafting.target import head_weight, input_embedding
from peftlab.drafting.text import Collate, make_dataset
from peftlab.tasks.prompts import Request


def eagle(
    target: Any, tokens: torch.Tensor | None = None, *, seed: int = 0, features: tuple[int, ...] | None = None
) -> Eagle3:
    """Return a layer on ``target`` with random weights."""
    torch.manual_seed(seed)
    head = head_weight(target).detach()
    network = Eagle3(
        shape_for(target.config, features), input_embedding(target), head if tokens is None else head[tokens], tokens
    )
    return network.to(head.device).eval()


@lru_cache(maxsize=2)
def trained_eagle(target: Any, steps: int = 50) -> EagleStep:
    """Return a layer that has learned from a little of the target's own text, over three quarters of its tokens.

    It drafts as it is after training, with its weights as they are.
    """
    outputs = decode(build_engine(target), [[1]] * 32, StoppingCriteria(48), sampling=Sampling(temperature=0.7))
    data = make_dataset([Request([1], output.tokens) for output in outputs])
    vocabulary = len(head_weight(target))
    tokens = frequent_tokens((output.tokens for output in outputs), vocabulary * 3 // 4, vocabulary)
    network = eagle(target, tokens).train()
    frozen = [parameter.requires_grad for parameter in target.parameters()]
    target.requires_grad_(False)
    model, loss = TargetWithNetwork(target, network), FeatureLoss(Objective("kl"), 3, 1.0)
    optimiser = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=4e-3)
    for step in range(steps):
        optimiser.zero_grad()
        batch = Collate()([data[(8 * step + i) % 32] for i in range(8)])
        (loss(model, {key: value.to(target.device) for key, value in batch.items()}) / 300).backward()
        optimiser.step()
    for parameter, wanted in zip(target.parameters(), frozen, strict=True):
        parameter.requires_grad_(wanted)
    return EagleStep(network.eval().requires_grad_(False), pack=False)
