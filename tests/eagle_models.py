"""EAGLE-3 and DFlash drafts on a target, for the tests: with random weights, or after learning a little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

import torch

from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.acceptance import frequent_tokens
from peftlab.drafting.block import BlockLoss, BlockStep, DFlash
from peftlab.drafting.block_files import BlockShape
from peftlab.drafting.eagle import Eagle3, EagleStep
from peftlab.drafting.objectives import Objective
from peftlab.drafting.state_network import FeatureLoss, TargetWithNetwork, shape_for
from peftlab.drafting.target import head_weight, input_embedding
from peftlab.drafting.text import Collate, make_dataset
from peftlab.tasks.prompts import Request


def eagle(
    target: Any,
    tokens: torch.Tensor | None = None,
    *,
    seed: int = 0,
    features: tuple[int, ...] | None = None,
    **sizes: Any,
) -> Eagle3:
    """Return a layer on ``target`` with random weights; ``sizes`` are fields of its shape."""
    torch.manual_seed(seed)
    head = head_weight(target).detach()
    shape = replace(shape_for(target.config, features), **sizes)
    network = Eagle3(shape, input_embedding(target), head if tokens is None else head[tokens], tokens)
    return network.to(head.device).eval()


def dflash(target: Any, tokens: torch.Tensor | None = None, *, seed: int = 0, **sizes: Any) -> DFlash:
    """Return a DFlash network on ``target`` with random weights; ``sizes`` are fields of its shape."""
    torch.manual_seed(seed)
    head = head_weight(target).detach()
    shape = BlockShape(**asdict(shape_for(target.config)) | {"head_norms": True, "layers": 2, "block_size": 6} | sizes)
    network = DFlash(shape, input_embedding(target), head if tokens is None else head[tokens], tokens)
    return network.to(head.device).eval()


@lru_cache(maxsize=2)
def trained_eagle(target: Any, steps: int = 50) -> EagleStep:
    """Return an EAGLE-3 layer that has learned from a little of the target's own text."""
    return EagleStep(trained(target, eagle, FeatureLoss(Objective("kl"), 3, 1.0), steps), pack=False)


@lru_cache(maxsize=2)
def trained_block(target: Any, steps: int = 120) -> BlockStep:
    """Return a DFlash network that has learned from a little of the target's own text."""
    return BlockStep(trained(target, dflash, BlockLoss(Objective("kl"), 8, 0.8), steps), pack=False)


@lru_cache(maxsize=2)
def trained_spark(target: Any, steps: int = 50) -> BlockStep:
    """Return a DSpark network that has learned from a little of the target's own text."""
    make = partial(dflash, block_size=5, from_anchor=True, markov_rank=8, markov_head="rnn", confidence=True)
    return BlockStep(trained(target, make, BlockLoss(Objective("kl"), 8, 0.8), steps), pack=False)


def trained(
    target: Any, make: Any, loss: Any, steps: int, prompts: Sequence[Sequence[int]] = ((1,),), length: int = 48
) -> Any:
    """Return a network that drafts three quarters of the target's tokens, with its weights as they are after training.

    Args:
        make: (target, tokens) -> the network. loss: that it trains with. steps: of training.
        prompts: which 32 texts begin with, in turn. length: tokens of each text after its prompt.
    """
    begun = [list(prompts[i % len(prompts)]) for i in range(32)]
    outputs = decode(build_engine(target), begun, StoppingCriteria(length), sampling=Sampling(temperature=0.7))
    data = make_dataset([Request(prompt, o.tokens) for prompt, o in zip(begun, outputs, strict=True)])
    vocabulary = len(head_weight(target))
    network = make(target, frequent_tokens((output.tokens for output in outputs), vocabulary * 3 // 4, vocabulary))
    network.train()
    frozen = [parameter.requires_grad for parameter in target.parameters()]
    target.requires_grad_(False)
    model = TargetWithNetwork(target, network)
    optimiser = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=4e-3)
    for step in range(steps):
        optimiser.zero_grad()
        batch = Collate()([data[(8 * step + i) % 32] for i in range(8)])
        (loss(model, {key: value.to(target.device) for key, value in batch.items()}) / 300).backward()
        optimiser.step()
    for parameter, wanted in zip(target.parameters(), frozen, strict=True):
        parameter.requires_grad_(wanted)
    return network.eval().requires_grad_(False)
