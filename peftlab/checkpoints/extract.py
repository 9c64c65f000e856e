"""``peftlab adapter extract``: the difference of two checkpoints as a LoRA adapter, tensor by tensor.

Each matrix ΔW that differs becomes the factors of its best approximation B·A (``low_rank_factors``); what is no matrix
of a layer that LoRA acts on is stored whole or, if it is a bias, as a bias.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key
from transformers.initialization import no_init_weights

from peftlab.checkpoints.adapter import save_adapter
from peftlab.checkpoints.merge import quantisation
from peftlab.checkpoints.peft_format import short_names
from peftlab.checkpoints.tensors import DTYPES, PickleShard, Shard, open_shards, read_at
from peftlab.errors import PeftlabError
from peftlab.files import staged_directory
from peftlab.methods.config import LoraConfig
from peftlab.methods.inject import adapter_state, inject
from peftlab.methods.lora.layers import LowRank
from peftlab.methods.lora.plan import leaf_kind
from peftlab.models.architectures import inside, task_head
from peftlab.models.config import base_directory
from peftlab.models.load import Place, converted, empty_model, load_config, places

_INSTEAD = "an adapter cannot express that; keep the finetuned checkpoint itself"
_COMPARED = 8 << 20  # bytes of a file that are compared at a time

# A matrix whose smaller side is at least this, and eight times the rank, is factored by a randomised range finder:
# the whole spectrum of a matrix of 4,096 columns takes a minute, the leading part a second.
RANDOMISED_SIDE = 1024
_OVERSAMPLING = 16  # directions besides the wanted ones
_ITERATIONS = 3  # of the subspace; each sharpens the leading directions
_BLOCK = 1 << 20  # elements computed with at a time
_ROUNDING = 1e-12  # of the whole energy: below it, a singular value is what rounding left


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
        finetuned, base: references of the two models.
        out: the directory to write.
        rank: the highest rank. energy: in (0, 1], instead of it.
        overwrite: replace an adapter that peftlab wrote.

    Raises:
        PeftlabError: both or neither of ``rank`` and ``energy``; the checkpoints are equal, quantised or of different
            models; a tensor differs that an adapter cannot express, which is named; or ``out`` exists.
    """
    started = time.perf_counter()
    if (rank is None) == (energy is None):
        raise PeftlabError("extract: name a rank (--rank 16) or a share of the difference to keep (--energy 0.99)")
    if rank is not None and rank < 1:
        raise PeftlabError(f"extract: rank {rank} is below 1")
    if energy is not None and not 0 < energy <= 1:
        raise PeftlabError(f"extract: energy {energy} is not in (0, 1]")
    tuned_path, base_path = base_directory(str(finetuned), "finetuned model"), base_directory(str(base))
    model = _finetuned_model(tuned_path, base_path)
    found = _Comparison(model, _Checkpoint(tuned_path, model), _Checkpoint(base_path, model), rank, energy)
    inputs = {"the finetuned model": tuned_path, "the base model": base_path}
    try:
        found.run()
        with no_init_weights():  # tensors on the meta device have no values to initialise
            inject(model, found.config())
        values = found.values()
        with staged_directory(out, "adapter", overwrite=overwrite, inputs=inputs) as staging:
            save_adapter(model, staging, base=str(base), state_dict=values)
    finally:
        found.tuned.close()
        found.plain.close()
    biases = [name for name in adapter_state(model) if name.endswith(".bias") and not inside(name, found.whole)]
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


def _finetuned_model(finetuned: Path, base: Path) -> PreTrainedModel:
    """Return the finetuned model on the meta device."""
    config, other = load_config(str(finetuned)), load_config(str(base))
    for path, each in ((finetuned, config), (base, other)):
        if method := quantisation(each):
            raise PeftlabError(f"{path} is quantised ({method}); the difference of plain weights is needed")
    if config.model_type != other.model_type:
        raise PeftlabError(f"{finetuned} is {config.model_type!r}, {base} is {other.model_type!r}: not one model")
    name = (config.architectures or ["AutoModelForCausalLM"])[0]
    return empty_model(name, config, finetuned)


@dataclass
class _Comparison:
    """Two checkpoints compared tensor by tensor; ``Extraction`` describes the fields of the same names.

    Attributes:
        model: on the meta device. tuned, plain: the finetuned checkpoint and the base. rank, energy: what is kept.
        factors: A and B by the adapted weight's name. leaves, experts: the adapted modules and 3-D parameters.
        rows: the figures of each. biased: whether a bias differs.
        missed, total: the squared norms of what the factors miss, and of all their differences.
    """

    model: PreTrainedModel
    tuned: _Checkpoint
    plain: _Checkpoint
    rank: int | None
    energy: float | None
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

    def run(self) -> None:
        """Compare all tensors, and factor what differs and can be factored."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
        head = task_head(self.model)
        for names, parameter in _named_tensors(self.model):
            self._compare(names, parameter, head)
            if trim is not None:  # give freed memory back: glibc keeps what lies below a small tensor, as a factor is
                trim(0)
        left = [key for key in self.tuned.left_out if key not in self.plain.left_out]
        if left:
            cls = type(self.model).__name__
            raise PeftlabError(f"the finetuned model's {left[0]} is no parameter of {cls}; {_INSTEAD}")
        changed = [key for key in self.tuned.left_out if not self.tuned.same(key, self.plain, key)]
        if changed:
            cls = type(self.model).__name__
            raise PeftlabError(
                f"{len(changed)} tensors that {cls} has no parameter for differ, {changed[0]} for one; {_INSTEAD}"
            )
        self.unchanged += len(self.tuned.left_out)
        if lost := [key for key in self.plain.left_out if key not in self.tuned.left_out]:
            self.notes.append(
                f"the finetuned model lacks {len(lost)} tensors of the base that {type(self.model).__name__} has no "
                f"parameter for, {lost[0]} for one: merging the adapter into the base keeps them"
            )
        if not self.leaves and not self.experts:
            equal = not self.whole and not self.biased
            what = "they are equal" if equal else "only tensors that are stored whole differ"
            raise PeftlabError(f"no matrix of the finetuned model differs from the base's ({what}): nothing to extract")

    def _compare(self, names: list[str], parameter: Tensor, head: list[str]) -> None:
        """Compare one tensor, which has these names, and factor the difference or decide what becomes of it.

        At most one copy of it is held besides the difference, which is in fp32.
        """
        tuned_name = next((name for name in names if name in self.tuned), None)
        plain_name = next((name for name in names if name in self.plain), None)
        if tuned_name is None:
            raise PeftlabError(f"the finetuned model has no {names[0]}, which {type(self.model).__name__} needs")
        if plain_name is not None and self.tuned.same(tuned_name, self.plain, plain_name):
            self.unchanged += 1
            return
        if inside(names[0], head):
            self.whole += [each for each in head if inside(names[0], [each]) and each not in self.whole]
            return
        before = self.plain.read(plain_name) if plain_name is not None else None
        role = self._role(names, parameter, before)
        if before is None or role is None:
            return
        norm, stored = _norm(before), before.dtype
        delta = before.to(torch.promote_types(stored, torch.float32))
        del before
        after = self.tuned.read(tuned_name)
        if after.dtype != stored:
            base_dtype, tuned_dtype = (str(dtype).removeprefix("torch.") for dtype in (stored, after.dtype))
            self._note(
                f"stored as {base_dtype} in the base and {tuned_dtype} in the finetuned model: the difference includes "
                "what that rounds"
            )
        delta = delta.neg_().add_(after).float()
        del after
        if not delta.any():  # 0 and -0 are not the same bytes
            self.unchanged += 1
            return
        owner = names[0].rpartition(".")[0]
        if role == "leaf":
            self.leaves.append(owner)
        else:
            self.experts.append(names[0])
        self._factor(owner if role == "leaf" else names[0], self.model.get_submodule(owner), delta, norm, role)

    def _role(self, names: list[str], parameter: Tensor, before: Tensor | None) -> Literal["leaf", "experts"] | None:
        """Return how a tensor that differs is factored; None if it is stored whole or as a bias. Refuse any other.

        Args:
            names: its names in the model. parameter: its parameter there. before: its value in the base.
        """
        name = names[0]
        owner, _, last = name.rpartition(".")
        module = self.model.get_submodule(owner)
        if not isinstance(parameter, nn.Parameter) or (before is not None and not before.is_floating_point()):
            raise PeftlabError(f"{name} differs and is no trained parameter; {_INSTEAD}")
        same_shape = before is not None and before.shape == parameter.shape
        kind = leaf_kind(module)
        if same_shape and len(names) == 1:
            if kind is not None and kind.matrix == last and getattr(module, "groups", 1) == 1:
                return "leaf"
            # A convolution's weight may have three dimensions, too.
            if parameter.ndim == 3 and not isinstance(module, nn.Conv1d):
                return "experts"
        if same_shape and last == "bias" and kind is not None:
            self.biased = True
            return None
        if before is not None and not same_shape:
            shapes = f"{tuple(parameter.shape)}, the base's has {tuple(before.shape)}"
            if not isinstance(module, nn.Embedding) and module is not self.model.get_output_embeddings():
                raise PeftlabError(f"{name} has shape {shapes}; {_INSTEAD}")
            self._note(f"{name} has shape {shapes}: it is stored whole; the tokenizer is the finetuned model's")
        if not owner or any(True for _ in module.children()):
            raise PeftlabError(f"{name} differs and belongs to no layer of its own; {_INSTEAD}")
        if owner not in self.whole:
            self.whole.append(owner)
        return None

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _factor(self, name: str, module: nn.Module, delta: Tensor, norm: float, role: str) -> None:
        """Factor the difference of one weight, and record its figures.

        Args:
            name: of the adapted module, or of experts' parameter. module: the layer that has the weight.
            delta: the difference, in the weight's shape. norm: the Frobenius norm of the base's weight.
            role: ``"leaf"`` or ``"experts"``.
        """
        size = _norm(delta)
        if not math.isfinite(size + norm):
            raise PeftlabError(f"{name}: contains NaN or infinity")
        experts = role == "experts"
        kind = leaf_kind(module)
        transposed = getattr(module, "is_transposed", False) if experts else kind is not None and kind.transposed
        parts = [part.t() if transposed else part.flatten(1) for part in (delta if experts else [delta])]  # (out, in)
        results = [low_rank_factors(part, rank=self.rank, energy=self.energy) for part in parts]
        rank = max(result.a.shape[0] for result in results)
        missing = [rank - result.a.shape[0] for result in results]
        a = [F.pad(result.a, (0, 0, 0, rows)) for result, rows in zip(results, missing, strict=True)]
        b = [F.pad(result.b, (0, columns)) for result, columns in zip(results, missing, strict=True)]
        if experts:  # peft's order: A (experts·r, in), B (out, r·experts)
            self.factors[name] = torch.cat(a), torch.stack(b, dim=2).flatten(1)
        else:
            trailing = tuple(delta.shape[2:])
            self.factors[name] = a[0].reshape(rank, -1, *trailing), b[0].reshape(-1, rank, *(1 for _ in trailing))
        missed = sum((result.error * _norm(part)) ** 2 for result, part in zip(results, parts, strict=True))
        self.missed += missed
        self.total += size**2
        error, ratio = math.sqrt(missed) / size if size else 0.0, size / norm if norm else math.inf
        self.rows.append(ExtractedModule(name, rank, ratio, error, all(result.exact for result in results)))

    def config(self) -> LoraConfig:
        """Return the configuration with scaling 1: alpha is the rank, everywhere."""
        ranks = {row.name: row.rank for row in self.rows}
        r = max(ranks.values())
        other = {name: rank for name, rank in ranks.items() if rank != r}
        head = task_head(self.model)
        if both := [name for name in self.whole if name in self.leaves]:
            raise PeftlabError(f"{both[0]} differs in its matrix, and the base lacks another tensor of it; {_INSTEAD}")
        return LoraConfig(
            r=r,
            lora_alpha=r,
            target_modules=short_names(self.model, self.leaves) if self.leaves else None,
            target_parameters=self.experts or None,
            rank_pattern=other,
            alpha_pattern={name: float(rank) for name, rank in other.items()},
            bias="all" if self.biased else "none",
            modules_to_save=[name for name in self.whole if name not in head] or None,
        )

    def values(self) -> dict[str, Tensor]:
        """Return the injected model's parameters: factors, and the finetuned tensors that are stored whole."""
        values: dict[str, Tensor] = {}
        for name in self.leaves:
            leaf = self.model.get_submodule(name)
            assert isinstance(leaf, LowRank)
            values |= {f"{name}.{side}": factor for side, factor in zip(leaf.names, self.factors[name], strict=True)}
        for name in self.experts:
            values |= {f"{name}_lora_{side}": factor for side, factor in zip("AB", self.factors[name], strict=True)}
        named = list(self.model.state_dict(keep_vars=True).items())
        for name, parameter in adapter_state(self.model).items():
            if name not in values:
                names = [each for each, other in named if other is parameter]
                values[name] = self.tuned.read(next(each for each in names if each in self.tuned))
        return values


def _norm(tensor: Tensor) -> float:
    """Return the Frobenius norm, without a copy of the tensor in fp32."""
    return math.sqrt(sum(float(block.double().square().sum()) for block in tensor.flatten().split(1 << 20)))


def _named_tensors(model: PreTrainedModel) -> Iterator[tuple[list[str], Tensor]]:
    """Yield each parameter and stored buffer once, with all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield names[key], tensor


class _Checkpoint:
    """A model directory's tensors by the names that a model has for them, read one at a time.

    Args:
        directory: the model directory. model: on the meta device; its names are used.

    Attributes:
        left_out: the keys that the model has no parameter for.
    """

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        self._model, self._shards = model, open_shards(directory)
        self._sources: dict[str, list[tuple[Shard, str, Place]]] = {}
        self.left_out: list[str] = []
        where = places(model, [key for shard in self._shards for key in shard.entries])
        for shard in self._shards:
            for key in shard.entries:
                place = where[key]
                if place is None:
                    self.left_out.append(key)
                    place = Place(key, key)
                for name in place.names:
                    self._sources.setdefault(name, []).append((shard, key, place))

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def same(self, name: str, other: _Checkpoint, other_name: str) -> bool:
        """Return whether another checkpoint's tensor is equal to this one's.

        Two tensors that are stored alike are compared in parts, as bytes.
        """
        mine, theirs = self._sources[name][0], other._sources[other_name][0]
        (shard, key, place), (their_shard, their_key, their_place) = mine, theirs
        whole = place.converter is None and their_place.converter is None
        if not whole or isinstance(shard, PickleShard) or isinstance(their_shard, PickleShard):
            a, b = self.read(name), other.read(other_name)
            return a.shape == b.shape and torch.equal(a, b)
        entry, their_entry = shard.entries[key], their_shard.entries[their_key]
        if (entry.dtype, entry.shape) != (their_entry.dtype, their_entry.shape):
            return False
        starts = range(0, entry.nbytes, _COMPARED)
        return all(
            read_at(shard.descriptor, min(_COMPARED, entry.nbytes - start), entry.offset + start)
            == read_at(their_shard.descriptor, min(_COMPARED, entry.nbytes - start), their_entry.offset + start)
            for start in starts
        )

    def read(self, name: str) -> Tensor:
        """Return a tensor by the model's name; experts stored one by one become one tensor.

        Raises:
            PeftlabError: it is stored as codes of a quantisation.
        """
        sources = sorted(self._sources[name], key=lambda source: dot_natural_key(source[1]))
        for shard, key, _ in sources:
            dtype = DTYPES[shard.entries[key].dtype]
            if dtype.is_floating_point and dtype.itemsize < 2:
                raise PeftlabError(
                    f"{shard.path}: {key!r} is stored as {shard.entries[key].dtype}, not as plain weights"
                )
        shard, key, place = sources[0]
        if place.converter is None:
            return shard.read(key)
        parts = [((each.name, each.bare, each.pattern), file.read(one)) for file, one, each in sources]
        return converted(place.converter, parts, self._model)[name]

    def close(self) -> None:
        """Close the files."""
        for shard in self._shards:
            shard.close()


@dataclass(frozen=True)
class LowRankFactors:
    """A low-rank approximation B·A of a matrix M.

    Attributes:
        a: (k, in). b: (out, k). error: ‖M − B·A‖ / ‖M‖, Frobenius norms, measured on these factors.
        exact: whether the whole spectrum was computed; else the error may exceed the best possible by a little.
    """

    a: Tensor
    b: Tensor
    error: float
    exact: bool


def low_rank_factors(matrix: Tensor, *, rank: int | None = None, energy: float | None = None) -> LowRankFactors:
    """Return factors of an fp32 matrix (out, in): its leading singular vectors, each with the root of its value.

    The eigenvectors come from the Gram matrix of the smaller side in fp64, so that the memory besides the matrix is
    that of its smaller side squared; where only the leading ones of a large matrix are wanted, from a randomised
    subspace iteration (arXiv 0909.4061). The error is measured on the result in either case.

    Args:
        matrix: (out, in). rank: the highest rank. energy: instead, the share of ‖M‖² to keep, in (0, 1].
    """
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.t()
    if rank is not None and tall.shape[1] >= max(RANDOMISED_SIDE, 8 * rank):
        exact, v = False, _leading_subspace(tall, rank)
    else:
        exact, v = True, _leading_vectors(tall, rank, energy)
    left = tall @ v  # (out, k), columns as long as the singular values
    root = left.square().sum(0).double().sqrt().sqrt().float()
    left, right = left / root.clamp_min(torch.finfo(torch.float32).tiny), (v * root).t()
    error = _relative_error(tall, left, right)
    if tall is matrix:
        return LowRankFactors(right.contiguous(), left.contiguous(), error, exact)
    return LowRankFactors(left.t().contiguous(), right.t().contiguous(), error, exact)


def _blocks(tall: Tensor) -> tuple[Tensor, ...]:
    return tall.split(max(1, _BLOCK // tall.shape[1]))


def _leading_vectors(tall: Tensor, rank: int | None, energy: float | None) -> Tensor:
    """Return the leading right singular vectors (in, k), most important first."""
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64)
    for block in _blocks(tall):
        wide = block.double()
        gram.addmm_(wide.t(), wide)
    values, vectors = torch.linalg.eigh(gram)
    kept = values.flip(0).clamp_min(0).cumsum(0)
    total = float(kept[-1])
    if rank is not None:
        k = min(rank, len(values))
    else:
        k = 1 + int((kept < (energy or 1.0) * total - _ROUNDING * total).sum())
    return vectors.flip(1)[:, : min(k, len(values))].float()


def _leading_subspace(tall: Tensor, rank: int) -> Tensor:
    """Return nearly the leading right singular vectors (in, rank) by a randomised subspace iteration."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tall.shape[1], rank + _OVERSAMPLING, generator=generator)
    for _ in range(_ITERATIONS):
        q = torch.linalg.qr(tall.t() @ torch.linalg.qr(tall @ q).Q).Q
    return q @ torch.linalg.svd(tall @ q, full_matrices=False).Vh[:rank].t()


def _relative_error(tall: Tensor, left: Tensor, right: Tensor) -> float:
    """Return ‖M − left·right‖ / ‖M‖, Frobenius norms, of a tall matrix M."""
    missed = whole = 0.0
    for block, rows in zip(_blocks(tall), left.split(len(_blocks(tall)[0])), strict=True):
        whole += float(block.double().square().sum())
        missed += float(torch.addmm(block, rows, right, alpha=-1).double().square().sum())
    return math.sqrt(missed / whole) if whole else 0.0
