"""BitFit (Ben Zaken et al. 2021, arXiv 2106.10199): the biases train in place, every weight is frozen."""

from __future__ import annotations

from torch import nn

from peftlab.errors import PeftlabError
from peftlab.methods.config import BitFitConfig
from peftlab.methods.targets import Plan, find, fully_trained, match, parameters_under, sites_of
from peftlab.models.architectures import QUERIES, inside, model_type


def plan(model: nn.Module, config: BitFitConfig) -> Plan:
    """Decide which biases train; the task head trains whole.

    Raises:
        PeftlabError: the model has no biases outside its head, or not those that were asked for.
    """
    whole = fully_trained(model, config.modules_to_save)
    owners: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        if is_bias(name) and not inside(name, whole):
            owners.setdefault(name.rpartition(".")[0], []).append(name)
    if not owners:
        raise PeftlabError(
            f"method bitfit: {model_type(model)} ({type(model).__name__}) has no biases to train; "
            "methods lora and houlsby work with any architecture, method head trains the task head alone"
        )
    if config.biases == "all":
        chosen = list(owners)
    elif config.biases == "sparse":
        chosen = _sparse(model, list(owners))
    else:
        chosen = match(owners, config.biases, what="biases")
    train = {name for owner in chosen for name in owners[owner]} | set(parameters_under(model, whole))
    return Plan(train=[name for name, _ in model.named_parameters() if name in train])


def is_bias(name: str) -> bool:
    """Whether a parameter of this name is a bias: ``bias``, or a part of one such as ``q_bias``."""
    last = name.rpartition(".")[2]
    return last == "bias" or last.endswith("_bias")


def _sparse(model: nn.Module, owners: list[str]) -> list[str]:
    middles = list(find(owners, sites_of(model).ffn_input))
    queries = [name for name in owners if name.endswith(tuple(f".{query}" for query in QUERIES))]
    if not middles or not queries:
        what = "FFN's first map" if queries else "query projection"
        raise PeftlabError(
            f"biases: sparse needs a bias of the {what} alone, and {model_type(model)} has none "
            "(absent, or fused with others); choose all, or name the modules"
        )
    return queries + middles
