"""Methods that add nothing to a model and train parameters of its own: BitFit, full finetuning and the linear probe."""

from __future__ import annotations

from torch import nn

from peftlab.errors import PeftlabError
from peftlab.methods.base import Plan, find, fully_trained, match, parameters_under, sites_of
from peftlab.methods.config import BitFitConfig, FullConfig, HeadConfig
from peftlab.models.architectures import QUERIES, inside, model_type, unread_parameters


def plan_bitfit(model: nn.Module, config: BitFitConfig) -> Plan:
    """Return the plan of BitFit (Ben Zaken et al. 2021, arXiv 2106.10199): biases and the task head train.

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
        middles = list(find(owners, sites_of(model).ffn_input))
        queries = [name for name in owners if name.endswith(tuple(f".{query}" for query in QUERIES))]
        if not middles or not queries:
            what = "FFN's first map" if queries else "query projection"
            raise PeftlabError(
                f"biases: sparse needs a bias of the {what} alone, and {model_type(model)} has none "
                "(absent, or fused with others); choose all, or name the modules"
            )
        chosen = queries + middles
    else:
        chosen = match(owners, config.biases, what="biases")
    train = {name for owner in chosen for name in owners[owner]} | set(parameters_under(model, whole))
    return Plan(train=[name for name, _ in model.named_parameters() if name in train])


def is_bias(name: str) -> bool:
    """Whether a parameter of this name is a bias: ``bias``, or a part of one such as ``q_bias``."""
    last = name.rpartition(".")[2]
    return last == "bias" or last.endswith("_bias")


def plan_full(model: nn.Module, config: FullConfig) -> Plan:
    """Return the plan of full finetuning: every parameter trains that the model's task reads.

    Raises:
        PeftlabError: ``modules_to_save`` names a module that does not exist.
    """
    fully_trained(model, config.modules_to_save)
    unread = unread_parameters(model)
    return Plan(train=[name for name, _ in model.named_parameters() if name not in unread])


def plan_head(model: nn.Module, config: HeadConfig) -> Plan:
    """Return the plan of the linear probe: the task head trains, and what ``modules_to_save`` names.

    Raises:
        PeftlabError: the model has no task head and no module is named.
    """
    whole = fully_trained(model, config.modules_to_save)
    if not whole:
        raise PeftlabError(f"method head: {model_type(model)} has no task head; name modules_to_save")
    return Plan(train=parameters_under(model, whole))
