"""Combining several LoRA adapters into one by weights: what peft's ``add_weighted_adapter`` computes, on files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from numbers import Real
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from peftlab.checkpoints.adapter import CONFIG_FILE, WEIGHTS_FILE, Adapter, load_adapter
from peftlab.checkpoints.peft_format import adapter_tensors, read_peft, to_peft_config
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json
from peftlab.methods.config import LoraConfig
from peftlab.methods.inject import active_only, adapter_state, injection_of
from peftlab.methods.lora.plan import NEEDS_BASE

Items = list[tuple[Tensor, Tensor, float]]
"""The factors of one module in several adapters: A (experts, r, in), B (experts, out, r) and the weight."""

Combination = Literal["linear", "cat", "svd", "ties", "dare_linear", "dare_ties"]
_A = re.compile(r"(.*)([._])(lora|lora_embedding)_A")


def combine(
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    method: str = "cat",
    *,
    rank: int | None = None,
    density: float = 0.5,
    seed: int = 0,
) -> Adapter:
    """Return one adapter made of several; negative weights subtract.

    With wᵢ the weight times adapter i's own scale, and ΔWᵢ = BᵢAᵢ:

    - ``cat``: ΔW = Σ wᵢ ΔWᵢ exactly; the ranks add up.
    - ``svd``: the best approximation of that sum with the given rank.
    - ``linear``: A = Σ ±√|wᵢ| Aᵢ and B = Σ √|wᵢ| Bᵢ, which keeps the rank but also adds the products
      of one adapter's A with another's B.
    - ``ties`` (arXiv 2306.01708): ``linear``, with only the largest ``density`` of each factor kept, and where
      the adapters' signs disagree only the majority's.
    - ``dare_linear``, ``dare_ties`` (arXiv 2311.03099): instead of the largest a random ``density`` is kept, and
      divided by it.

    The result has α = r, so its scale is 1, and each tensor the widest of the adapters' dtypes. A module that only some
    of the adapters change combines those. Tensors trained whole (a task head) must be equal wherever they occur.

    Args:
        adapters: the adapters. weights: one per adapter.
        method: one of the above.
        rank: of the result of ``svd``; default: the largest of the adapters'.
        density: in (0, 1]. seed: of the random choice.

    Raises:
        PeftlabError: another method than LoRA, DoRA, ranks or sizes that differ, whole tensors that differ, an A
            without its B, or ``rank`` with another method than ``svd``.
    """
    methods = get_args(Combination)
    if method not in methods:
        hint = did_you_mean(method, methods)
        raise PeftlabError(f"adapters cannot be combined by {method!r}{hint}: one of {', '.join(methods)}")
    if not adapters or len(adapters) != len(weights):
        raise PeftlabError(f"{len(adapters)} adapters need as many weights, not {len(weights)}")
    for weight in weights:
        if not isinstance(weight, Real) or not math.isfinite(weight):
            raise PeftlabError(f"the weight of an adapter is a finite number, not {weight!r}")
    if not 0 < density <= 1:
        raise PeftlabError(f"density is {density}, not in (0, 1]")
    if rank is not None and (method != "svd" or rank < 1):
        raise PeftlabError(f"rank is {rank}: {'it must be at least 1' if rank < 1 else f'{method} has none, svd does'}")
    configs = [_plain_lora(adapter) for adapter in adapters]
    generator = torch.Generator().manual_seed(seed)
    tensors = _tensors_besides_factors(adapters)
    pairs = _pairs(adapters, configs, weights)
    if not pairs:
        raise PeftlabError("the adapters contain no LoRA factors to combine")
    ranks = {a.shape[1] for items in pairs.values() for a, _, _ in items}
    summed = sum(max(_ranks(adapter), default=0) for adapter in adapters)
    new = {"cat": summed, "svd": rank or max(ranks)}.get(method, max(ranks))
    for name, items in pairs.items():
        if method == "cat":
            a, b = _cat(items)
        elif method == "svd":
            a, b = _svd(items, new)
        else:
            if len(differ := sorted({a.shape[1] for a, _, _ in items})) > 1:
                raise PeftlabError(f"{method}: {name}: the adapters' ranks differ ({differ}); use cat or svd")
            a, b = _elementwise(items, method, density, generator)
        missing = new - a.shape[1]  # of adapters that do not act on this module, or have a lower rank in it
        a, b = torch.nn.functional.pad(a, (0, 0, 0, missing)), torch.nn.functional.pad(b, (0, missing))
        own = [adapter.tensors[name] for adapter in adapters if name in adapter.tensors]
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in own))
        factors = _join_experts(a, b, own[0].shape[1:])
        tensors[name], tensors[f"{name[:-1]}B"] = (factor.to(dtype) for factor in factors)
    base, notes = _base(adapters)
    named = next((adapter for adapter in adapters if adapter.base_reference), adapters[0])
    return replace(named, config=_config(configs, pairs, new), tensors=tensors, base=base, notes=notes)


def _base(adapters: Sequence[Adapter]) -> tuple[dict[str, Json], tuple[str, ...]]:
    """Return the first adapter's description of its base, and all notes; without the format where they have several."""
    first, notes = adapters[0], [note for adapter in adapters for note in adapter.notes]
    references = list(dict.fromkeys(adapter.base_reference for adapter in adapters if adapter.base_reference))
    if len(references) > 1:
        notes.append(f"the adapters name different base models: {', '.join(references)}")
    base = dict(first.base)
    if any(adapter.base.get("format") != first.base.get("format") for adapter in adapters):
        base.pop("format", None)
        notes.append("the adapters' bases were stored in different ways: the update is added to the original weights")
    return base, tuple(dict.fromkeys(notes))


def add_weighted_adapter(
    model: nn.Module,
    names: Sequence[str],
    weights: Sequence[float],
    name: str,
    method: Combination = "cat",
    *,
    rank: int | None = None,
    density: float = 0.5,
    seed: int = 0,
) -> None:
    """Make one adapter of several that are in ``model``, in place; it becomes the active one.

    With the default, ``cat``, the model computes W0 + Σ wᵢ ΔWᵢ: all of them at once, with weights. The new adapter has
    its own tensors. An adapter that is called ``name`` is replaced.

    Args:
        names: of the adapters. name: of the new one.
        weights, method, rank, density, seed: as for ``combine``.

    Raises:
        PeftlabError: as ``combine`` (DoRA, ranks that differ, heads that differ); or a name that is not loaded.
    """
    adapters = [_adapter_of(model, one) for one in names]
    combined = combine(adapters, weights, method, rank=rank, density=density, seed=seed)
    load_adapter(model, combined, name=name)


def _adapter_of(model: nn.Module, name: str) -> Adapter:
    """Return a copy of the adapter ``name`` of ``model``, as saving and reading it would give it."""
    with active_only(model, name):
        injection = injection_of(model)
        adapter = Adapter(injection.config, {**adapter_state(model)})
        if isinstance(injection.config, LoraConfig):
            raw, tensors = to_peft_config(model, injection, None), adapter_tensors(model, injection)
            config, tensors, _ = read_peft(raw, tensors, Path(name) / CONFIG_FILE, Path(name) / WEIGHTS_FILE)
            adapter = Adapter(config, tensors)
        copies = {key: tensor.detach().to("cpu", copy=True) for key, tensor in adapter.tensors.items()}
        return replace(adapter, tensors=copies)


def _pairs(adapters: Sequence[Adapter], configs: Sequence[LoraConfig], weights: Sequence[float]) -> dict[str, Items]:
    """Return the factors of each A's name, one item per adapter that has them; the weight includes the scale."""
    pairs: dict[str, Items] = {}
    for adapter, config, weight in zip(adapters, configs, weights, strict=True):
        for name in adapter.tensors:
            if found := _A.fullmatch(name):
                a, b = adapter.tensors[name], adapter.tensors.get(f"{name[:-1]}B")
                if b is None or b.flatten(1).shape[1] != len(a):
                    rank = "no" if b is None else f"a rank of {b.flatten(1).shape[1]}, not {len(a)}, in"
                    raise PeftlabError(f"{name}: the adapter has {rank} {name[:-1]}B")
                module = config.name_in_patterns(found[1], adapter.tensors)
                r = config.rank(module)
                pairs.setdefault(name, []).append((*_by_expert(a, b, r), weight * config.scale(module, r)))
    for name, items in pairs.items():
        sizes = {(len(a), b.shape[1], a.shape[2]) for a, b, _ in items}
        if len(sizes) > 1:
            shown = " and ".join(f"{out} × {into}" + f" of {n} experts" * (n > 1) for n, out, into in sorted(sizes))
            raise PeftlabError(f"{name}: the adapters are for weights of different sizes, {shown}")
    return pairs


def _plain_lora(adapter: Adapter) -> LoraConfig:
    config = adapter.config
    if not isinstance(config, LoraConfig):
        raise PeftlabError(f"only LoRA adapters can be combined, not {config.name}")
    if config.use_dora:
        raise PeftlabError("DoRA adapters cannot be combined: their update is not linear in the factors")
    if config.lora_bias:
        raise PeftlabError("adapters with lora_bias cannot be combined: their biases have scales of their own")
    if config.start:
        raise PeftlabError(f"an adapter with init_lora_weights={config.start} cannot be combined: {NEEDS_BASE}")
    return config


def _ranks(adapter: Adapter) -> set[int]:
    config = _plain_lora(adapter)
    modules = [found[1] for name in adapter.tensors if (found := _A.fullmatch(name))]
    return {config.rank(config.name_in_patterns(module, adapter.tensors)) for module in modules}


def _tensors_besides_factors(adapters: Sequence[Adapter]) -> dict[str, Tensor]:
    """Return the tensors that are not factors: equal in all adapters that have them."""
    found: dict[str, Tensor] = {}
    for adapter in adapters:
        for name, tensor in adapter.tensors.items():
            if re.search(r"[._]lora_(embedding_)?[AB]$", name):
                continue
            if name in found and not torch.equal(found[name], tensor):
                raise PeftlabError(
                    f"{name} is trained whole in several adapters and differs: weights have no meaning for it"
                )
            found[name] = tensor
    return found


def _by_expert(a: Tensor, b: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Return A as (experts, r, in) and B as (experts, out, r), in fp32; a module that is not one of experts has 1."""
    experts = a.shape[0] // r
    a, b = a.float().flatten(1), b.float().flatten(1)
    return a.reshape(experts, r, -1), b.reshape(b.shape[0], r, experts).permute(2, 0, 1)


def _join_experts(a: Tensor, b: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Undo ``_by_expert``: A (experts·r, *shape), B (out, r·experts), with a convolution's trailing ones."""
    experts, r, _ = a.shape
    b = b.permute(1, 2, 0).reshape(b.shape[1], r * experts, *([1] * (len(shape) - 1)))
    return a.reshape(experts * r, *shape).contiguous(), b.contiguous()


def _cat(items: Items) -> tuple[Tensor, Tensor]:
    """Return A (experts, Σ rᵢ, in) and B (experts, out, Σ rᵢ) with B·A = Σ wᵢ BᵢAᵢ."""
    return torch.cat([weight * a for a, _, weight in items], dim=1), torch.cat([b for _, b, _ in items], dim=2)


def _svd(items: Items, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors of the best approximation of Σ wᵢ BᵢAᵢ with a rank."""
    delta = torch.stack([(b @ a) * weight for a, b, weight in items]).sum(0)
    if rank > min(delta.shape[1:]):
        raise PeftlabError(f"svd: rank {rank} is larger than the smaller side of a weight, {min(delta.shape[1:])}")
    u, s, vh = torch.linalg.svd(delta, full_matrices=False)
    return vh[:, :rank], u[:, :, :rank] * s[:, None, :rank]


def _elementwise(items: Items, method: str, density: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sums of the factors themselves, Σ ±√|wᵢ| Aᵢ and Σ √|wᵢ| Bᵢ, after each was pruned."""
    roots = [math.sqrt(abs(weight)) for _, _, weight in items]
    signed = [math.copysign(root, weight) for root, (_, _, weight) in zip(roots, items, strict=True)]
    prune: Callable[[Tensor], Tensor] = {
        "linear": lambda t: t,
        "ties": lambda t: _keep_largest(t, density),
        "dare_linear": lambda t: _keep_random(t, density, generator),
        "dare_ties": lambda t: _keep_random(t, density, generator),
    }[method]
    merged = []
    for factors, scales in (([a for a, _, _ in items], signed), ([b for _, b, _ in items], roots)):
        stack = torch.stack([prune(factor) for factor in factors])
        weighted = stack * torch.tensor(scales).view(-1, 1, 1, 1)
        if method.endswith("ties"):
            majority = torch.where(stack.sum(0) >= 0, 1, -1)
            agree = stack.sign() == majority
            merged.append((weighted * agree).sum(0) / agree.sum(0).clamp(min=1.0))
        else:
            merged.append(weighted.sum(0))
    return merged[0], merged[1]


def _keep_largest(tensor: Tensor, density: float) -> Tensor:
    """Return the tensor with only its largest values, a share ``density`` of them; the others are 0."""
    if density == 1:
        return tensor
    flat = tensor.reshape(-1)
    kept = torch.topk(flat.abs(), int(density * flat.numel())).indices
    return torch.zeros_like(flat).index_copy(0, kept, flat[kept]).view(tensor.shape)


def _keep_random(tensor: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Return the tensor with a random share ``density`` of its values, divided by it; the others are 0."""
    if density == 1:
        return tensor
    return tensor * torch.bernoulli(torch.full_like(tensor, density), generator=generator) / density


_OF_WHOLE_TENSORS = ("bias", "trainable_token_indices", "ensure_weight_tying")


def _config(configs: Sequence[LoraConfig], pairs: dict[str, Items], rank: int) -> LoraConfig:
    for field in _OF_WHOLE_TENSORS:
        tying = field == "ensure_weight_tying"  # is about modules that train whole
        values = [getattr(config, field) for config in configs if config.modules_to_save or not tying]
        if differing := [value for value in values if value != values[0]]:
            raise PeftlabError(f"the adapters have different {field}: {values[0]} and {differing[0]}")
    saved = dict.fromkeys(name for config in configs for name in config.modules_to_save or [])
    matches = [found for name in pairs if (found := _A.fullmatch(name))]
    modules = [found[1] for found in matches if found[2] == "."]
    experts = [found[1] for found in matches if found[2] == "_"]
    changes: dict[str, object] = {
        "r": rank,
        "lora_alpha": float(rank),
        "target_modules": modules or None,
        "target_parameters": experts or None,
        "exclude_modules": None,
        "layers_to_transform": None,
        "first_layer": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "modules_to_save": list(saved) or None,
        "train_head": any(config.train_head for config in configs),
    }
    return configs[0].model_copy(update=changes)
