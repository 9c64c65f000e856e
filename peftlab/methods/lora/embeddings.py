"""Leaves whose weights others share, as embeddings do: rows of tokens that train, and a copy that trains whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peftlab.errors import PeftlabError
from peftlab.methods.leaf import FOLDING, AnyLeaf, Folding, adapted_class, recast, trainable_dtype, with_weight
from peftlab.methods.lora.config import LoraConfig
from peftlab.methods.lora.fold import FOLD_BLOCK
from peftlab.methods.lora.layers import leaf_kind
from peftlab.methods.targets import match
from peftlab.models.architectures import embeddings_of, inside


class TokenRows(AnyLeaf):
    """An embedding or a linear map that computes with ``token_rows`` in place of some rows of its weight.

    Attributes:
        tokens: the numbers of those rows. token_rows: their trained values (tokens, width).
        places: for each row of the weight its place in ``token_rows``, or −1.
    """

    added = ("token_rows", "tokens", "places")
    tokens: tuple[int, ...]
    token_rows: nn.Parameter
    places: Tensor
    weight: Tensor
    bias: nn.Parameter | None

    def forward(self, input: Tensor) -> Tensor:
        base = self.base_class.forward(self, input)
        if not self.enabled:
            return base
        if isinstance(self, nn.Embedding):
            place = self.places[input]
            table = with_weight(self, self.token_rows)
            assert isinstance(table, nn.Embedding)
            table.padding_idx = None  # a row of the whole weight
            rows = self.base_class.forward(table, place.clamp_min(0))
            return torch.where((place >= 0)[..., None], rows.to(base.dtype), base)
        index = torch.tensor(self.tokens, device=base.device)
        rows = F.linear(input, self.token_rows.to(input.dtype), None if self.bias is None else self.bias[index])
        return base.index_copy(-1, index, rows.to(base.dtype))

    def fold(self, how: Folding = FOLDING) -> dict[str, Tensor]:
        weight, rows = self.weight.detach(), self.token_rows.detach()
        folded = weight if how.in_place else torch.empty_like(weight, dtype=how.stored)
        if folded.is_meta:
            return {"weight": folded}
        index = torch.tensor(self.tokens, device=folded.device)
        step = max(1, FOLD_BLOCK // weight.shape[1])
        for start in range(0, len(weight), step):
            old, new = weight[start : start + step], folded[start : start + step]
            own = (index >= start) & (index < start + step)
            before = old.to(how.precision, copy=True)
            if not how.in_place:
                new.copy_(old)
            new[index[own] - start] = rows[own].to(new.dtype)
            if how.watch is not None:
                after = before.clone()
                after[index[own] - start] = rows[own].to(how.precision)
                how.watch(before, after - before, after, new)
        return {"weight": folded}


def token_targets(model: nn.Module, config: LoraConfig) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Return the leaves whose tokens' rows train, with the functions that make them.

    As in peft, a list of tokens belongs to the input embedding, and modules that share the input embedding's weight
    train the same rows, unless several of them are named with different tokens. So do modules that share it by the
    configuration alone, where the checkpoint has a matrix of its own for each.

    Raises:
        PeftlabError: a name that matches nothing, or not one embedding or linear map; a token out of range.
    """
    wanted = config.trainable_token_indices
    assert wanted
    leaves = {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding | nn.Linear) and leaf_kind(m)}
    inputs, _ = embeddings_of(model)
    embedding = next((name for name, leaf in leaves.items() if leaf is inputs), None)
    if not isinstance(wanted, dict):
        if embedding is None:
            raise PeftlabError(
                f"trainable_token_indices: {type(model).__name__} names no input embedding; write {{module: tokens}}"
            )
        wanted = {embedding: wanted}
    tokens = {
        name: tuple(numbers)
        for target, numbers in wanted.items()
        for name in match(leaves, [target], what="trainable_token_indices")
    }
    for name, numbers in tokens.items():
        _check(name, leaves[name], numbers)
    if embedding not in tokens:
        return {name: partial(_with_rows, rows=_Rows(numbers)) for name, numbers in tokens.items()}
    shares = _tied_by_configuration(model, f"{embedding}.weight")
    tied = {
        name: tokens[embedding]
        for name, leaf in leaves.items()
        if leaf.weight is leaves[embedding].weight or f"{name}.weight" in shares
    }
    if any(tokens[name] != numbers for name, numbers in tied.items() if name in tokens):
        tied = {}
    shared = _Rows(tokens[embedding])
    return {
        name: partial(_with_rows, rows=shared if name in tied else _Rows(numbers))
        for name, numbers in (tokens | tied).items()
    }


def _tied_by_configuration(model: nn.Module, weight: str) -> set[str]:
    """Return the weights that the model's configuration ties to an embedding's, itself among them."""
    expanded = getattr(model, "get_expanded_tied_weights_keys", None)
    pairs: dict[str, str] = expanded(all_submodels=True) if expanded is not None else {}
    origin = pairs.get(weight, weight)
    return {origin, *(twin for twin, other in pairs.items() if other == origin)}


class _Rows:
    """The rows of ``tokens``, which the leaves that are made with this object share."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self.parameter: nn.Parameter | None = None

    def of(self, weight: Tensor) -> nn.Parameter:
        if self.parameter is None:
            start = weight.detach()[torch.tensor(self.tokens, device=weight.device)]
            self.parameter = nn.Parameter(start.to(trainable_dtype(weight)))
        return self.parameter


def _with_rows(leaf: nn.Module, *, rows: _Rows) -> nn.Module:
    new = recast(adapted_class(TokenRows, type(leaf)), leaf)
    new.tokens = rows.tokens
    new.register_parameter("token_rows", rows.of(new.weight))
    places = torch.full((len(new.weight),), -1, device=new.weight.device)
    places[torch.tensor(rows.tokens, device=places.device)] = torch.arange(len(rows.tokens), device=places.device)
    new.register_buffer("places", places, persistent=False)
    return new


def _check(name: str, leaf: nn.Embedding | nn.Linear, tokens: tuple[int, ...]) -> None:
    weight = leaf.weight
    wrong = next((token for token in tokens if not 0 <= token < len(weight)), None)
    if wrong is not None:
        raise PeftlabError(f"trainable_token_indices: {name} has {len(weight)} tokens, none with the number {wrong}")
    if len(set(tokens)) < len(tokens):
        raise PeftlabError(f"trainable_token_indices: a token occurs twice for {name}")
    if type(weight.data) is not Tensor:
        raise PeftlabError(f"trainable_token_indices: {name} holds a quantised weight")


class OwnCopy(AnyLeaf):
    """A leaf that computes with ``own_<name>``, its trained copy of each parameter ``<name>`` that others share.

    Attributes:
        shared: names of those parameters; they stay W0, which the other modules use.
    """

    shared: tuple[str, ...]

    @property
    def added(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of what the adapted form has beside the base's."""
        return (*(f"own_{name}" for name in self.shared), "shared")

    def forward(self, *args: object, **kwargs: object) -> object:
        forward = super().forward
        if not self.enabled:
            return forward(*args, **kwargs)
        all_of_it = self._parameters
        self._parameters = {**all_of_it, **{name: all_of_it[f"own_{name}"] for name in self.shared}}
        try:
            return forward(*args, **kwargs)
        finally:
            self._parameters = all_of_it

    def fold(self, how: Folding = FOLDING) -> dict[str, Tensor]:
        return {name: getattr(self, f"own_{name}").detach().clone() for name in self.shared}


def shared_outside(model: nn.Module, modules: Iterable[str]) -> dict[str, list[str]]:
    """Return the leaves below ``modules`` that hold parameters of modules elsewhere, with the names of those."""
    here = dict(model.named_modules())
    users: dict[int, list[str]] = defaultdict(list)
    for name, module in here.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)].append(name)
    found: dict[str, list[str]] = {}
    for container in modules:
        if container not in here:  # a parameter of a head, not a module
            continue
        for name, leaf in here[container].named_modules(prefix=container):
            keys = [
                key
                for key, parameter in leaf._parameters.items()
                if parameter is not None and not all(inside(user, [container]) for user in users[id(parameter)])
            ]
            if keys:
                found[name] = keys
    return found


def with_own_copy(leaf: nn.Module, shared: list[str]) -> nn.Module:
    """Return ``leaf`` with a copy of its own of the parameters named ``shared``."""
    new = recast(adapted_class(OwnCopy, type(leaf)), leaf)
    new.shared = tuple(shared)
    for name in shared:
        new.register_parameter(f"own_{name}", nn.Parameter(getattr(leaf, name).detach().clone()))
    return new
