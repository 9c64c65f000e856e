"""``peftlab adapter convert``: the directory that one engine reads as the adapter was trained.

Each B is multiplied by its module's scaling and all factors are padded with zeros to one rank, so that with
``lora_alpha`` = ``r`` the one scaling is 1: rank and alpha patterns, rsLoRA and parts of fused projections become plain
LoRA. What an engine needs beside that is added: factors of 0 for projections it reads only together, or factors
expert by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from peftlab.checkpoints.adapter import CONFIG_FILE, WEIGHTS_FILE, Adapter, read_adapter
from peftlab.checkpoints.consumers.contents import read_contents
from peftlab.checkpoints.consumers.fit import Fit, fit
from peftlab.checkpoints.consumers.lorax import absent_layers, padded_rank
from peftlab.checkpoints.consumers.sglang import lone_projections
from peftlab.checkpoints.consumers.single_experts import NAMES, by_expert, one_expert
from peftlab.checkpoints.consumers.table import CONSUMERS, engine
from peftlab.checkpoints.formats.peft import PREFIX
from peftlab.checkpoints.io.tensorfiles import write_tensors
from peftlab.errors import PeftlabError
from peftlab.files import staged_directory, write_json
from peftlab.methods.lora.config import LoraConfig
from peftlab.methods.lora.plan import NEEDS_BASE
from peftlab.registry import resolve

Factors = dict[str, tuple[Tensor, Tensor]]
"""A (r, in) and B (out, r) with the scaling in it, by module."""

_READS_EMBEDDINGS = ("vllm", "sglang", "llama.cpp")
_SUFFIXES = ("_lora_A", ".lora_A", ".lora_embedding_A")


@dataclass(frozen=True)
class Conversion:
    """What ``convert_adapter`` wrote.

    Attributes:
        out: the directory. engine: whom it is for. rank: of all factors. modules: how many have factors.
        added: modules that got factors of 0. serve: how the engine is told to use it.
        checked: what the engine's rule says of the result.
    """

    out: str
    engine: str
    rank: int
    modules: int
    added: list[str]
    serve: str
    checked: str


def convert_adapter(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    base: str | None = None,
    lora_alpha: float | None = None,
    overwrite: bool = False,
) -> Conversion:
    """Write a LoRA adapter as an engine reads it, and check the result by that engine's rule (``check_adapter``).

    Args:
        source: an adapter of peft's, peftlab's or AdapterHub's, or loralib's file.
        to: ``"vllm"``, ``"sglang"``, ``"llama.cpp"`` or ``"lorax"``.
        base: reference of the base model; default: the one that the adapter names. Without a base that is here,
            nothing is added and the result is not checked.
        lora_alpha: α of a loralib file, which does not contain it.

    Raises:
        PeftlabError: the adapter contains what the engine does not read (DoRA, a module trained whole, biases, ...),
            named; or ``out`` exists. Nothing is written.
    """
    name = engine(to)
    adapter = read_adapter(source, lora_alpha=lora_alpha)
    config = _expressible(adapter, name, source)
    found = _beside_base(source, base or adapter.base_reference, given=base is not None)
    factors, experts = _scaled(adapter, config, source)
    if not factors and not experts:
        raise PeftlabError(f"{source} contains no factors")
    factors |= _experts(experts, name, found, source)
    added = _partners(factors, name, found)
    rank = max(a.shape[0] for a, _ in factors.values())
    rank = padded_rank(rank) if name == "lorax" else rank
    inputs = {"the adapter": Path(source), "the base model": found.base if found else None}
    with staged_directory(out, "adapter", overwrite=overwrite, inputs=inputs) as staging:
        _write(staging, factors | added, rank, adapter, found)
        checked = "unchecked: the base model is not here; name it with --base"
        if found is not None:
            verdict = resolve(CONSUMERS[name].rule)(fit(read_contents(staging), str(found.base)))
            if verdict.loads is False:
                raise PeftlabError(f"{source} cannot be written for {name}: {verdict.reason}; merge it instead")
            checked = "unchecked: " + verdict.reason if verdict.loads == "unknown" else verdict.reason
    serve = CONSUMERS[name].note.format(rank=rank)
    return Conversion(str(out), name, rank, len(factors) + len(added), sorted(added), serve, checked)


def _expressible(adapter: Adapter, name: str, source: str | Path) -> LoraConfig:
    """Return the configuration of an adapter that is plain factors; refuse any other."""
    config = adapter.config
    if not isinstance(config, LoraConfig):
        raise PeftlabError(f"{source}: {name} reads only LoRA, not method {config.name}; merge it instead")
    if config.use_dora:
        raise PeftlabError(f"{source}: {name} cannot express use_dora; merge the adapter instead")
    if config.start:
        raise PeftlabError(f"{source}: {name} cannot express init_lora_weights={config.start}: {NEEDS_BASE}")
    for tensor in adapter.tensors:
        factor = tensor.endswith((*_SUFFIXES, "_lora_B", ".lora_B", ".lora_embedding_B"))
        copied = ".base_layer." in tensor  # a value of the base
        embedding = "lora_embedding_" in tensor and name not in _READS_EMBEDDINGS
        if not (factor or copied) or embedding:
            raise PeftlabError(f"{source}: {name} cannot express {tensor}; merge the adapter instead")
    return config


def _beside_base(source: str | Path, reference: str | None, *, given: bool) -> Fit | None:
    """Return the adapter beside its base; None if no base was named and the adapter's own is not here."""
    if not reference:
        return None
    try:
        found = fit(read_contents(source), reference)
    except PeftlabError:
        if given:
            raise
        return None
    if found.misfits:
        raise PeftlabError(f"{source} does not fit {reference}: {next(iter(found.misfits.values()))}")
    return found


def _scaled(adapter: Adapter, config: LoraConfig, source: str | Path) -> tuple[Factors, Factors]:
    """Return the factors of modules, and those of parameters of experts, in fp32 with the scaling in B."""
    modules: Factors = {}
    experts: Factors = {}
    for name, a in adapter.tensors.items():
        suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
        if suffix is None:
            continue
        owner = name.removesuffix(suffix)
        b = adapter.tensors.get(name.removesuffix("A") + "B")
        if b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise PeftlabError(f"{source}: {owner} has no two matrices B and A that could be multiplied")
        kind = experts if suffix == "_lora_A" else modules
        rank = config.rank(owner) if kind is experts else a.shape[0]
        kind[owner] = a.float(), (b.double() * config.scale(owner, rank)).float()
    return modules, experts


def _experts(experts: Factors, name: str, found: Fit | None, source: str | Path) -> Factors:
    """Return the factors of all experts' parameters expert by expert."""
    if not experts:
        return {}
    first = next(iter(experts))
    if found is None:
        raise PeftlabError(f"{source}: {first} has experts, which are named as the base needs it; name it with --base")
    if found.architecture not in NAMES or name == "lorax":
        raise PeftlabError(
            f"{source}: {name} reads no factors of {first} of {found.architecture} that this knows to write; merge the "
            "adapter instead"
        )
    split: Factors = {}
    for parameter, (a, b) in experts.items():
        count = found.shapes[parameter][0]
        split |= by_expert(found.architecture, parameter, a, b, count)
    return split


def _partners(factors: Factors, name: str, found: Fit | None) -> Factors:
    """Return factors of 0 for the modules without which the engine does not read others."""
    if found is None:
        return {}
    wanted: list[str] = []
    if name == "sglang":
        wanted = [f"{module.rpartition('.')[0]}.{partner}" for module, partner in lone_projections(factors)]
    elif name == "lorax":
        wanted = absent_layers(found.modules, factors)
    added: Factors = {}
    for module in wanted:
        if module not in found.modules:
            continue
        d_out, d_in = (int(size) for size in found.modules[module].weight.shape)  # type: ignore[union-attr]
        added[module] = torch.zeros(1, d_in), torch.zeros(d_out, 1)
    return added


def _targets(factors: Factors, found: Fit | None) -> list[str]:
    """Return the last names of modules where these pick the modules with factors and no others, else full names.

    Matrices of single experts have only last names, by which peft knows them.
    """
    single = {module for module in factors if found is not None and one_expert(found.architecture, module)}
    last = {module.rpartition(".")[2] for module in factors}
    if found is not None:
        picked = {name for name in found.modules if name.rpartition(".")[2] in last}
        if picked == set(factors) - single:
            return sorted(last)
    return sorted({module.rpartition(".")[2] for module in single} | (set(factors) - single))


def _write(directory: Path, factors: Factors, rank: int, adapter: Adapter, found: Fit | None) -> None:
    tensors: dict[str, Tensor] = {}
    embeddings = {name.removesuffix(".lora_embedding_A") for name in adapter.tensors if "lora_embedding_A" in name}
    for module, (a, b) in sorted(factors.items()):
        missing = rank - a.shape[0]
        names = ("lora_embedding_A", "lora_embedding_B") if module in embeddings else ("lora_A.weight", "lora_B.weight")
        padded = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
        for side, factor in zip(names, padded, strict=True):
            tensors[f"{PREFIX}{module}.{side}"] = factor.contiguous()
    raw: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": adapter.task_type,
        "base_model_name_or_path": adapter.base_reference,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _targets(factors, found),
    }
    write_tensors(directory / WEIGHTS_FILE, tensors, {})
    write_json(directory / CONFIG_FILE, raw)
