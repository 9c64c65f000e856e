"""Medusa heads on a language model (Cai et al. 2024, arXiv 2401.10774): frozen trunk, or with LoRA on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from peftlab.errors import PeftlabError
from peftlab.methods.leaf import FOLDING, Adapted, Folding, recast, trainable_dtype
from peftlab.methods.lora import plan as lora
from peftlab.methods.medusa_config import MedusaConfig
from peftlab.methods.medusa_heads import MedusaHeads
from peftlab.methods.plan import Plan
from peftlab.methods.targets import model_type


class MedusaHead(Adapted, nn.Linear):
    """An LM head that computes what it did before, and carries the Medusa heads."""

    base_class = nn.Linear
    added = ("medusa_heads",)
    medusa_heads: MedusaHeads

    def fold(self, how: Folding = FOLDING) -> dict[str, Tensor]:
        """Return nothing: the heads are beside the LM head, not in it."""
        return {}


def plan(model: nn.Module, config: MedusaConfig) -> Plan:
    """Put the heads on the LM head; with ``trunk`` also LoRA into the body.

    Raises:
        PeftlabError: the model has no plain linear LM head, or ``modules_to_save`` names something.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    name = next((n for n, module in model.named_modules() if module is head), None)
    if name is None or type(head) is not nn.Linear:
        raise PeftlabError(
            f"method medusa: {model_type(model)} ({type(model).__name__}) has no linear LM head; the heads sit on a "
            "causal language model's"
        )
    if config.modules_to_save:
        raise PeftlabError("method medusa: modules_to_save belongs to trunk, the LoRA on the model itself")
    trunk = lora.plan(model, config.trunk) if config.trunk is not None else Plan()
    if name in trunk.replace:
        raise PeftlabError(f"method medusa: trunk adapts {name}, which carries the heads; exclude it")
    trained = next((n for n in trunk.train if model.get_parameter(n) is head.weight), None)
    if trained is not None:
        raise PeftlabError(
            f"method medusa: trunk.modules_to_save trains {trained}, the LM head's weight, by which the heads are "
            "taught; take it out"
        )
    replace: dict[str, Callable[[nn.Module], nn.Module]] = {**trunk.replace, name: partial(_adapt, config=config)}
    return Plan(replace, trunk.train)


def lr_ratio(config: MedusaConfig) -> dict[str, float]:
    """Return the trunk's learning-rate multiples."""
    return lora.lr_ratio(config.trunk) if config.trunk is not None else {}


def _adapt(leaf: nn.Module, config: MedusaConfig) -> nn.Module:
    weight: Any = leaf.weight
    dtype = trainable_dtype(weight)
    new = recast(MedusaHead, leaf)
    start = weight if config.shared_head else weight.to(dtype)
    new.medusa_heads = MedusaHeads(start, config.heads, config.bias, config.shared_head)
    new.medusa_heads.blocks.to(weight.device, dtype)  # W2 lies where the LM head does, or is it
    return new.train(leaf.training)
