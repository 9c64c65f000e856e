"""``peftlab adapter extract``: the difference of two checkpoints as a LoRA adapter, tensor by tensor."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from peftlab.checkpoints.adapter import save_adapter
from peftlab.checkpoints.extract.factoring import Goal, LowRankFactors, factored
from peftlab.checkpoints.extract.named_weights import NamedWeights
from peftlab.checkpoints.formats.peft import short_names
from peftlab.checkpoints.merge.base import base_directory, quantisation
from peftlab.errors import PeftlabError
from peftlab.files import staged_directory
from peftlab.methods.injection import inject, trainable_parameters
from peftlab.methods.lora.config import LoraConfig
from peftlab.methods.lora.kinds import leaf_kind
from peftlab.methods.lora.layers import LowRank
from peftlab.methods.targets import inside
from peftlab.methods.task_head import task_head
from peftlab.models.pretrained import load_config
from peftlab.models.skeleton import empty_model

_WAY_OUT = "an adapter cannot express that; keep the finetuned checkpoint itself"


@dataclass(frozen=True)
class ExtractedModule:
    """One weight whose difference became factors.

    Attributes:
        name: the module; of experts, the parameter. rank: of the factors; of experts, each one's.
        ratio: ‖ΔW‖ / ‖W‖. error: ‖ΔW − B·A‖ / ‖ΔW‖, Frobenius norms, measured.
        exact: whether the error is the least possible for the rank; a randomised factorisation's may be larger.
    """

    name: str
    rank: int
    ratio: float
    error: float
    exact: bool


@dataclass(frozen=True)
class Extraction:
    """What ``extract_adapter`` wrote.

    Attributes:
        out, finetuned, base: the directories. architecture: the class of the finetuned model.
        rank, energy: what was asked for; one is None.
        modules: the factored weights, in the model's order.
        whole: modules whose tensors are stored whole (``modules_to_save``). biases: how many biases are stored.
        unchanged: how many of the model's tensors are equal in both.
        error: that of all factored differences together. notes: what the reader should know.
        bytes: size of the adapter's weights. seconds: wall time.
    """

    out: str
    finetuned: str
    base: str
    architecture: str
    rank: int | None
    energy: float | None
    modules: list[ExtractedModule]
    whole: list[str]
    biases: int
    unchanged: int
    error: float
    notes: list[str]
    bytes: int
    seconds: float


@dataclass
class _Findings:
    """What the comparison of the checkpoints found; ``Extraction`` describes the fields of the same names.

    Attributes:
        factors: A and B by the adapted weight's name. leaves, experts: the adapted modules and 3-D parameters.
        biased: whether a bias differs.
        missed, total: the squared norms of what the factors miss, and of all their differences.
    """

    factors: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    leaves: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    rows: list[ExtractedModule] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    biased: bool = False
    unchanged: int = 0
    missed: float = 0.0
    total: float = 0.0
    notes: list[str] = field(default_factory=list)


def extract_adapter(
    finetuned: str | Path,
    base: str | Path,
    out: str | Path,
    *,
    rank: int | None = None,
    energy: float | None = None,
    overwrite: bool = False,
) -> Extraction:
    """Write the difference of two checkpoints as a LoRA adapter in peft's format, and return its errors.

    Each matrix that differs becomes the factors of its best approximation with that rank, or with the least rank that
    keeps a share of ‖ΔW‖². What differs and is no matrix of a linear map, an embedding, a convolution or experts
    (norms, a task head, tied embeddings, a vocabulary that has grown) is stored whole; biases are stored as biases.
    Neither model is in memory: it takes the adapter and a few tensors.

    Args:
        finetuned, base: references of the two models. rank: the highest rank. energy: in (0, 1], instead of it.
        overwrite: replace an adapter that peftlab wrote.

    Raises:
        PeftlabError: both or neither of ``rank`` and ``energy``; the checkpoints are equal, quantised or of different
            models; a tensor differs that an adapter cannot express, which is named; or ``out`` exists.
    """
    started = time.perf_counter()
    goal = _goal(rank, energy)
    tuned_place, base_place = base_directory(str(finetuned), "finetuned model"), base_directory(str(base))
    model = _task_class(tuned_place, base_place)
    tuned, plain = NamedWeights(tuned_place, model), NamedWeights(base_place, model)
    inputs = {"the finetuned model": tuned_place, "the base model": base_place}
    try:
        found = _compared(model, tuned, plain, goal)
        with no_init_weights():  # tensors on the meta device have no values to initialise
            inject(model, _config(model, found))
        values = _values(model, found, tuned)
        with staged_directory(out, "adapter", overwrite=overwrite, inputs=inputs) as staging:
            save_adapter(model, staging, base=str(base), state_dict=values)
    finally:
        tuned.close()
        plain.close()
    biases = [name for name in trainable_parameters(model) if name.endswith(".bias") and not inside(name, found.whole)]
    return Extraction(
        out=str(out),
        finetuned=str(finetuned),
        base=str(base),
        architecture=type(model).__name__,
        rank=rank,
        energy=energy,
        modules=found.rows,
        whole=found.whole,
        biases=len(biases) if found.biased else 0,
        unchanged=found.unchanged,
        error=math.sqrt(found.missed / found.total) if found.total else 0.0,
        notes=found.notes,
        bytes=sum(tensor.nbytes for tensor in values.values()),
        seconds=time.perf_counter() - started,
    )


def _goal(rank: int | None, energy: float | None) -> Goal:
    if (rank is None) == (energy is None):
        raise PeftlabError("extract: name a rank (--rank 16) or a share of the difference to keep (--energy 0.99)")
    if rank is not None and rank < 1:
        raise PeftlabError(f"extract: rank {rank} is below 1")
    if energy is not None and not 0 < energy <= 1:
        raise PeftlabError(f"extract: energy {energy} is not in (0, 1]")
    return Goal(rank, energy)


def _task_class(finetuned: Path, base: Path) -> PreTrainedModel:
    """Return the finetuned model on the meta device."""
    config, other = load_config(str(finetuned)), load_config(str(base))
    for place, each in ((finetuned, config), (base, other)):
        if method := quantisation(each):
            raise PeftlabError(f"{place} is quantised ({method}); the difference of plain weights is needed")
    if config.model_type != other.model_type:
        raise PeftlabError(f"{finetuned} is {config.model_type!r}, {base} is {other.model_type!r}: not one model")
    name = (config.architectures or ["AutoModelForCausalLM"])[0]
    return empty_model(name, config, finetuned)


def _compared(model: PreTrainedModel, tuned: NamedWeights, plain: NamedWeights, goal: Goal) -> _Findings:
    """Compare the checkpoints tensor by tensor, and factor what differs and can be factored."""
    found = _Findings()
    head = task_head(model)
    for names, parameter in _tensors(model):
        _compare(model, names, parameter, head, tuned, plain, goal, found)
        _release()
    left = [key for key in tuned.left_out if key not in plain.left_out]
    if left:
        raise PeftlabError(f"the finetuned model's {left[0]} is no parameter of {type(model).__name__}; {_WAY_OUT}")
    if not found.leaves and not found.experts:
        what = "they are equal" if not found.whole and not found.biased else "only tensors that are stored whole differ"
        raise PeftlabError(f"no matrix of the finetuned model differs from the base's ({what}): nothing to extract")
    return found


def _release() -> None:
    """Give freed memory back to the system: glibc keeps what lies below a small tensor, such as a factor."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _compare(
    model: PreTrainedModel,
    names: list[str],
    parameter: Tensor,
    head: list[str],
    tuned: NamedWeights,
    plain: NamedWeights,
    goal: Goal,
    found: _Findings,
) -> None:
    """Compare one tensor, which has these names, and factor the difference or decide what becomes of it.

    At most one copy of it is held beside the difference, which is in fp32.
    """
    name, other = (next((name for name in names if name in weights), None) for weights in (tuned, plain))
    if name is None:
        raise PeftlabError(f"the finetuned model has no {names[0]}, which {type(model).__name__} needs")
    if other is not None and tuned.same(name, plain, other):
        found.unchanged += 1
        return
    if inside(names[0], head):
        found.whole += [each for each in head if inside(names[0], [each]) and each not in found.whole]
        return
    before = plain.read(other) if other is not None else None
    owner = names[0].rpartition(".")[0]
    role = _role(model, names, parameter, before, found)
    if before is None or role is None:
        return
    norm, stored = _norm(before), before.dtype
    delta = before.to(torch.promote_types(stored, torch.float32))
    del before
    after = tuned.read(name)
    if after.dtype != stored:
        kinds = [str(dtype).removeprefix("torch.") for dtype in (stored, after.dtype)]
        _note(found, f"stored as {kinds[0]} in the base and {kinds[1]} in the finetuned model: the difference includes "
                     "what that rounds")  # fmt: skip
    delta = delta.neg_().add_(after).float()
    del after
    if not delta.any():  # 0 and -0 are not the same bytes
        found.unchanged += 1
        return
    (found.leaves if role == "leaf" else found.experts).append(owner if role == "leaf" else names[0])
    _factor(model.get_submodule(owner), found, delta, norm, goal, experts=role == "experts")


def _norm(tensor: Tensor) -> float:
    """Return the Frobenius norm, without a copy of the tensor in fp32."""
    return math.sqrt(sum(float(block.double().square().sum()) for block in tensor.flatten().split(1 << 20)))


def _tensors(model: PreTrainedModel) -> Iterator[tuple[list[str], Tensor]]:
    """Yield each parameter and stored buffer once, with all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield names[key], tensor


def _role(
    model: PreTrainedModel, names: list[str], parameter: Tensor, before: Tensor | None, found: _Findings
) -> Literal["leaf", "experts"] | None:
    """Return how a tensor that differs is factored; None if it is stored whole or as a bias. Refuse any other."""
    name = names[0]
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    if not isinstance(parameter, nn.Parameter) or (before is not None and not before.is_floating_point()):
        raise PeftlabError(f"{name} differs and is no trained parameter; {_WAY_OUT}")
    comparable = before is not None and before.shape == parameter.shape
    kind = leaf_kind(module)
    if comparable and len(names) == 1:
        if kind is not None and kind.matrix == last and getattr(module, "groups", 1) == 1:
            return "leaf"
        # A convolution's weight may have three dimensions, too.
        if parameter.ndim == 3 and not isinstance(module, nn.Conv1d):
            return "experts"
    if comparable and last == "bias" and kind is not None:
        found.biased = True
        return None
    grown = isinstance(module, nn.Embedding) or module is model.get_output_embeddings()
    if before is not None and not comparable:
        shapes = f"{tuple(parameter.shape)}, the base's has {tuple(before.shape)}"
        if not grown:
            raise PeftlabError(f"{name} has shape {shapes}; {_WAY_OUT}")
        _note(found, f"{name} has shape {shapes}: it is stored whole; the tokenizer is the finetuned model's")
    if not owner or any(True for _ in module.children()):
        raise PeftlabError(f"{name} differs and belongs to no layer of its own; {_WAY_OUT}")
    if owner not in found.whole:
        found.whole.append(owner)
    return None


def _note(found: _Findings, text: str) -> None:
    if text not in found.notes:
        found.notes.append(text)


def _factor(module: nn.Module, found: _Findings, delta: Tensor, norm: float, goal: Goal, *, experts: bool) -> None:
    """Factor the difference of the weight that was named last, and record its figures."""
    name = (found.experts if experts else found.leaves)[-1]
    size = _norm(delta)
    if not math.isfinite(size + norm):
        raise PeftlabError(f"{name}: contains NaN or infinity")
    parts = [_matrix(module, each, experts) for each in (delta if experts else [delta])]
    results = [factored(part, goal) for part in parts]
    rank = max(result.a.shape[0] for result in results)
    a, b = zip(*(_padded(result, rank) for result in results), strict=True)
    if experts:
        found.factors[name] = torch.cat(a), torch.stack(b, dim=2).flatten(1)
    else:
        trailing = tuple(delta.shape[2:])
        found.factors[name] = a[0].reshape(rank, -1, *trailing), b[0].reshape(-1, rank, *(1 for _ in trailing))
    missed = sum((result.error * _norm(part)) ** 2 for result, part in zip(results, parts, strict=True))
    found.missed += missed
    found.total += size**2
    error = math.sqrt(missed) / size if size else 0.0
    found.rows.append(
        ExtractedModule(name, rank, size / norm if norm else math.inf, error, all(result.exact for result in results))
    )


def _matrix(module: nn.Module, delta: Tensor, experts: bool) -> Tensor:
    """Return a difference as a matrix (out, in)."""
    kind = leaf_kind(module)
    transposed = experts and getattr(module, "is_transposed", False)
    return delta.t() if transposed or (kind is not None and kind.transposed) else delta.flatten(1)


def _padded(result: LowRankFactors, rank: int) -> tuple[Tensor, Tensor]:
    missing = rank - result.a.shape[0]
    return F.pad(result.a, (0, 0, 0, missing)), F.pad(result.b, (0, missing))


def _config(model: PreTrainedModel, found: _Findings) -> LoraConfig:
    """Return the configuration with scaling 1: alpha is the rank, everywhere."""
    ranks = {row.name: row.rank for row in found.rows}
    r = max(ranks.values())
    other = {name: rank for name, rank in ranks.items() if rank != r}
    head = task_head(model)
    if both := [name for name in found.whole if name in found.leaves]:
        raise PeftlabError(f"{both[0]} differs in its matrix, and the base lacks another tensor of it; {_WAY_OUT}")
    return LoraConfig(
        r=r,
        lora_alpha=r,
        target_modules=short_names(model, found.leaves) if found.leaves else None,
        target_parameters=found.experts or None,
        rank_pattern=other,
        alpha_pattern={name: float(rank) for name, rank in other.items()},
        bias="all" if found.biased else "none",
        modules_to_save=[name for name in found.whole if name not in head] or None,
    )


def _values(model: PreTrainedModel, found: _Findings, tuned: NamedWeights) -> dict[str, Tensor]:
    """Return the adapter's parameters: factors, and the finetuned model's tensors that are stored whole."""
    values: dict[str, Tensor] = {}
    for name in found.leaves:
        leaf = model.get_submodule(name)
        assert isinstance(leaf, LowRank)
        values |= {f"{name}.{side}": factor for side, factor in zip(leaf.names, found.factors[name], strict=True)}
    for name in found.experts:
        values |= {f"{name}_lora_{side}": factor for side, factor in zip("AB", found.factors[name], strict=True)}
    for name, parameter in trainable_parameters(model).items():
        if name not in values:
            values[name] = tuned.read(next(each for each in _aliases(model, parameter) if each in tuned))
    return values


def _aliases(model: PreTrainedModel, parameter: nn.Parameter) -> Iterable[str]:
    return (name for name, each in model.named_parameters(remove_duplicate=False) if each is parameter)
