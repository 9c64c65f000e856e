"""The leaves of LoRA: a model's own leaves with a low-rank addition, and those with trained rows or copies beside them.

In the layout of a linear map, W is (out, in), A (r, in), B (out, r) and the update scale·B·A. GPT-2's ``Conv1D``
and embeddings store Wᵀ; convolutions are linear maps over flattened windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from peftlab.errors import PeftlabError
from peftlab.methods.base import (
    FOLDING,
    Adapted,
    AnyLeaf,
    BatchRows,
    Folding,
    Variant,
    adapted_class,
    added_parameters,
    recast,
    trainable_dtype,
    with_weight,
)
from peftlab.methods.config import Start
from peftlab.methods.lora.dropout import dropout
from peftlab.methods.lora.functional import (
    FOLD_BLOCK,
    Weight,
    expert_factors,
    fold_bias,
    fold_weight,
    frozen_linear,
    leading_part,
    low_rank_linear,
    one_thread,
    row_norms,
)
from peftlab.models.architectures import conv1d
from peftlab.models.quantised import dequantised, is_quantised, weight_shape
from peftlab.untyped import Attributes, Function, Parameters

Map = Callable[[Tensor], Tensor]


class LowRank(AnyLeaf):
    """Base of all low-rank leaves.

    Attributes:
        lora_A, lora_B (``lora_embedding_A``, ``lora_embedding_B`` in embeddings): the trained factors.
        lora_magnitude_vector: DoRA's trained row norms (out), (1, out, 1, ...) for a convolution; or None.
        lora_bias: what is added to B·A·x before it is scaled (out), or None.
        start: PiSSA or OLoRA, where the factors start from W; None otherwise.
        frozen_A, frozen_B: the starting values where there is such a start; the update is B·A − B0·A0, so that
            W keeps its values. None otherwise.
        rows: with targets that are parts of a fused projection, the output rows of each part, one part after
            the other; B then holds those rows alone, and A one factor a part. None otherwise.
        sizes: the number of rows of each part.
        scale: the factor of B·A. lora_dropout: on the low-rank branch's input.
        lora_gate: on which rows of a batch a linear map's update acts; None: on all.
        matrix: name of the parameter W.
    """

    added = (
        "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "lora_bias", "frozen_A",
        "frozen_B", "start", "rows", "sizes", "scale", "lora_dropout", "lora_gate",
    )  # fmt: skip
    names = ("lora_A", "lora_B")
    matrix = "weight"
    transposed = False
    weight: Tensor
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude_vector: nn.Parameter | None
    lora_bias: nn.Parameter | None
    start: Start | None
    frozen_A: Tensor | None
    frozen_B: Tensor | None
    rows: Tensor | None
    sizes: tuple[int, ...]
    scale: float
    lora_dropout: float
    lora_gate: Gate | None = None

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A and B of the whole leaf: parts put in their rows, starting values subtracted."""
        a, b = (getattr(self, name) for name in self.names)
        if self.rows is not None:
            b = spread(b, self.rows, self.sizes, out=self.width())
        if self.frozen_A is not None and self.frozen_B is not None:
            a, b = torch.cat([a, self.frozen_A]), torch.cat([b, -self.frozen_B], dim=1)
        return a, b

    def update_start(self) -> None:
        if self.start is None:
            return
        rank, dtype = self.lora_A.shape[0], self.lora_A.dtype
        with one_thread():
            factors = leading_part(self.weight, rank, self.scale, self.start, transposed=self.transposed)
        self.frozen_A, self.frozen_B = (factor.to(dtype) for factor in factors)

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: object) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}{self.matrix}" in state_dict:
            self.update_start()

    def width(self) -> int:
        """Return the number of output features."""
        return weight_shape(self)[1 if self.transposed else 0]

    def active_dropout(self) -> float:
        """Return the dropout that applies now."""
        return self.lora_dropout if self.training else 0.0

    def norms(self) -> Tensor:
        """Return the norms of the rows of W + scale·B·A (out), without a gradient (DoRA)."""
        a, b = (factor.flatten(1) for factor in self.factors())
        weight = dequantised(self, b.dtype) if is_quantised(self) else self.weight
        return row_norms(weight.t() if self.transposed else weight.flatten(1), a, b, self.scale)

    def total_bias(self) -> Tensor | None:
        """Return the base's bias with the scaled ``lora_bias`` added to it."""
        bias: Tensor | None = getattr(self, "bias", None)
        if self.lora_bias is None:
            return bias
        return self.lora_bias * self.scale if bias is None else bias + self.lora_bias * self.scale

    def unfoldable(self) -> str:
        if self.lora_bias is not None and getattr(self, "bias", None) is None:
            return "its base has no bias that lora_bias could be added to"
        return ""

    @classmethod
    def batched_variant(
        cls, leaf: nn.Module, name: str, variants: Sequence[Variant], rows: BatchRows
    ) -> nn.Module | None:
        additions = []
        for variant, numbers in variants:
            if any(variant._parameters[key] is not parameter for key, parameter in leaf._parameters.items()):
                return None
            if isinstance(variant, LoraLinear | LoraConv1D) and added_parameters(variant).keys() == set(variant.names):
                additions.append((numbers[0], variant))
            elif type(variant) is not type(leaf):
                return None
        new = recast(adapted_class(MixedLinear, type(leaf)), leaf)
        new.additions, new.rows, new.name = additions, rows, name
        return new

    def fold(self, how: Folding = FOLDING) -> dict[str, Tensor]:
        folded = {}
        if how.only in (None, self.matrix):
            (a, b), weight = self.factors(), getattr(self, self.matrix)
            magnitude, transposed = self.lora_magnitude_vector, self.transposed
            folded[self.matrix] = fold_weight(
                weight, a, b, self.scale, transposed=transposed, magnitude=magnitude, how=how
            )
        if self.lora_bias is not None and how.only in (None, "bias"):
            folded["bias"] = fold_bias(getattr(self, "bias"), self.lora_bias, self.scale, how)  # noqa: B009
        return folded


class LoraLinear(LowRank, nn.Linear):
    """``nn.Linear`` with a low-rank addition, DoRA's norm included."""

    base_class: type[nn.Module] = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        if self.lora_gate is not None and self.enabled:
            return self.lora_gate.split(x, self.plain, self.adapted)
        return self.adapted(x) if self.enabled else self.plain(x)

    def plain(self, x: Tensor) -> Tensor:
        """Return what the base leaf computes."""
        if is_quantised(self):  # bitsandbytes' own product in 8 bits differs between training and evaluation
            return frozen_linear(x, partial(dequantised, self), self.bias, self.width())
        return self.base_class.forward(self, x)

    def adapted(self, x: Tensor) -> Tensor:
        """Return what the base leaf computes, with the addition."""
        weight: Weight = self.weight.t() if self.transposed else self.weight
        p = self.active_dropout()
        quantised = is_quantised(self)
        if quantised:
            weight = partial(dequantised, self)
        a, b = self.factors()
        if self.lora_magnitude_vector is not None:
            gain = (self.lora_magnitude_vector / self.norms()).to(x.dtype)
            return _dora(x, weight, self.bias, a, b, self.scale, p, gain)
        if not quantised and (is_traceable_wrapper_subclass(self.weight.data) or has_own_forward(self.base_class)):
            # Quantised by torchao, or a subclass: the base leaf computes as it is made to; only the addition is ours.
            low = F.linear(F.linear(dropout(x, p), a.to(x.dtype)), b.to(x.dtype))
            low = low if self.lora_bias is None else low + self.lora_bias.to(x.dtype)
            return self.base_class.forward(self, x) + low * self.scale
        return low_rank_linear(x, weight, self.total_bias(), a, b, self.scale, p)


class LoraConv1D(LowRank):
    """GPT-2's ``Conv1D``, a linear map that stores its weight as (in, out), with a low-rank addition.

    ``adapted_class`` adds the base, which transformers defines.
    """

    transposed = True
    forward, plain, adapted = LoraLinear.forward, LoraLinear.plain, LoraLinear.adapted


class LoraEmbedding(LowRank, nn.Embedding):
    """``nn.Embedding`` with a low-rank addition: A (r, tokens) starts at zero, B (width, r) is normal."""

    base_class: type[nn.Module] = nn.Embedding
    names = ("lora_embedding_A", "lora_embedding_B")
    transposed = True

    def forward(self, input: Tensor, *args: object, **kwargs: object) -> Tensor:
        base = self.base_class.forward(self, input, *args, **kwargs)
        if not self.enabled:
            return base
        a, b = self.factors()
        if has_own_forward(self.base_class):  # which scales what it looks up, or computes where to look
            rows = self.base_class.forward(with_weight(self, a.t()), input, *args, **kwargs)
        else:
            # Without max_norm, which would shrink columns of A in place, and sparse: Aᵀ's gradient has to be dense.
            rows = F.embedding(input, a.t(), self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        low = (rows @ b.t()).to(base.dtype) * self.scale
        if self.lora_magnitude_vector is None:
            return base + low
        return (base + low) * (self.lora_magnitude_vector / self.norms()).to(base.dtype)


class LowRankConv(LowRank):
    """Convolutions with a low-rank addition: A (r, in, h, w) convolves as the base does, B (out, r, 1, 1) follows.

    In a grouped convolution, as in peft, A connects all input channels, and B (out, r / groups, 1, 1) has the groups.
    """

    convolve: Function[Tensor]
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int

    def forward(self, input: Tensor) -> Tensor:
        base = self.base_class.forward(self, input)
        if not self.enabled:
            return base
        p = self.active_dropout()
        x = dropout(input, p)
        a, b = (factor.to(x.dtype) for factor in self.factors())
        low = self.convolve(self.convolve(x, a, None, self.stride, self.padding, self.dilation), b, groups=self.groups)
        if self.lora_bias is not None:
            low = low + _by_channel(self.lora_bias.to(x.dtype), low)
        if self.lora_magnitude_vector is None:
            return base + low * self.scale
        gain = _by_channel((self.lora_magnitude_vector.flatten() / self.norms()).to(x.dtype), base)
        kept = self.base_class.forward(self, x) if p > 0 else base
        if self.bias is not None:
            kept = kept - _by_channel(self.bias, kept)
        return base + (gain - 1) * kept + gain * low * self.scale

    def norms(self) -> Tensor:
        if self.groups == 1:
            return super().norms()
        # Not the norms of the rows that the forward adds up, but what peft divides its gain by.
        with torch.no_grad():
            a, b = self.factors()
            update = (b.reshape(-1, len(a)) @ a.flatten(1)).view(self.weight.shape)
            return (self.weight + self.scale * update).flatten(1).norm(dim=1)

    def unfoldable(self) -> str:
        if self.groups > 1:
            return "its update connects all channels, a grouped convolution only those of one group"
        return super().unfoldable()


class LoraConv1d(LowRankConv, nn.Conv1d):
    """``nn.Conv1d`` with a low-rank addition."""

    base_class: type[nn.Module] = nn.Conv1d
    convolve = staticmethod(F.conv1d)


class LoraConv2d(LowRankConv, nn.Conv2d):
    """``nn.Conv2d`` with a low-rank addition."""

    base_class: type[nn.Module] = nn.Conv2d
    convolve = staticmethod(F.conv2d)


class LoraConv3d(LowRankConv, nn.Conv3d):
    """``nn.Conv3d`` with a low-rank addition."""

    base_class: type[nn.Module] = nn.Conv3d
    convolve = staticmethod(F.conv3d)


class LoraAttention(LowRank, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with a low-rank addition to its input projection, and to the leaf ``out_proj``.

    Its forward is the base's own, run on W + scale·B·A of both: it uses the weights of ``out_proj`` and never calls it.
    As in peft there is no dropout.
    """

    base_class: type[nn.Module] = nn.MultiheadAttention
    matrix = "in_proj_weight"

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        own: Parameters = self._parameters
        children = self._modules
        if self.enabled:
            out = self.out_proj
            assert isinstance(out, LowRank)
            weights = {self.matrix: _effective(self, self.in_proj_weight)}
            self._parameters, self._modules = (
                own | weights,
                children | {"out_proj": with_weight(out, _effective(out, out.weight))},
            )
        try:
            return self.base_class.forward(self, *args, **kwargs)
        finally:
            self._parameters, self._modules = own, children


def _effective(leaf: LowRank, weight: Tensor) -> Tensor:
    a, b = (factor.to(weight.dtype) for factor in leaf.factors())
    return torch.addmm(weight, b, a, alpha=leaf.scale)


_TORCHS: dict[type[nn.Module], type[LowRank]] = {
    kind.base_class: kind for kind in (LoraLinear, LoraEmbedding, LoraConv1d, LoraConv2d, LoraConv3d, LoraAttention)
}


def leaves() -> dict[type[nn.Module], type[LowRank]]:
    """Return the classes of modules that LoRA acts on, each with the leaf that adapts it."""
    return {**_TORCHS, **dict.fromkeys(conv1d(), LoraConv1D)}


def has_own_forward(kind: type[nn.Module]) -> bool:
    """Whether a subclass of a class in ``leaves()`` has another forward than that."""
    return not any(kind.forward is base.forward for base in leaves())


def spread(b: Tensor, rows: Tensor, sizes: tuple[int, ...], out: int) -> Tensor:
    """Return the dense B (out, parts·r) of a fused projection from its parts' rows (Σ sizes, r).

    Args:
        b: (Σ sizes, r). rows: the output row of each row of ``b`` (Σ sizes).
        sizes: the number of rows of each part. out: the number of output features.
    """
    blocks = torch.block_diag(*b.split(list(sizes)))
    return b.new_zeros(out, blocks.shape[1]).index_copy(0, rows, blocks)


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    """Return values of the output channels in the shape that broadcasts to ``like``, (..., out, length, ...)."""
    return values.view(-1, *[1] * (like.ndim - 2))


def _dora(
    x: Tensor, weight: Weight, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, p: float, gain: Tensor
) -> Tensor:
    """Return gain ⊙ (W + s·B·A)·x + bias; dropout acts on what is added to the base's W·x."""
    if p == 0:
        y = low_rank_linear(x, weight, None, a, b, scale) * gain
    else:
        dropped = dropout(x, p)
        base, kept = (frozen_linear(each, weight, None, len(b)) for each in (x, dropped))
        y = base + low_rank_linear(dropped, weight, None, a, b, scale) * gain - kept
    return y if bias is None else y + bias


class LoraExperts(AnyLeaf):
    """A module whose parameters carry a low-rank addition: experts one each, a matrix (out, in) one.

    Its forward is the base module's own, run on W + scale·B·A. For each adapted parameter ``p`` it holds
    ``p_lora_A`` (experts·r, in) and ``p_lora_B`` (out, r·experts), in peft's layout.
    """

    adapted: dict[str, float]

    @property
    def added(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the parameters and attributes that the adapted form alone has."""
        return (*(f"{p}_lora_{side}" for p in self.adapted for side in "AB"), "adapted")

    def factors(self, parameter: str) -> tuple[Tensor, Tensor]:
        """Return A and B of one adapted parameter."""
        return getattr(self, f"{parameter}_lora_A"), getattr(self, f"{parameter}_lora_B")

    def forward(self, *args: object, **kwargs: object) -> object:
        forward = super().forward
        if not self.enabled:
            return forward(*args, **kwargs)
        own: Parameters = self._parameters
        effective: Parameters = {name: self._effective(own[name], name) for name in self.adapted}
        self._parameters = {**own, **effective}
        try:
            return forward(*args, **kwargs)
        finally:
            self._parameters = own

    def _effective(self, weight: Tensor, name: str) -> Tensor:
        if weight.ndim == 2:
            a, b = (t.to(weight.dtype) for t in self.factors(name))
            return torch.addmm(weight, b, a, alpha=self.adapted[name])
        a, b = (t.to(weight.dtype) for t in expert_factors(*self.factors(name), weight.shape[0]))
        left, right = (a.mT, b.mT) if stored_transposed(self, weight) else (b, a)
        return torch.baddbmm(weight, left, right, alpha=self.adapted[name])

    def fold(self, how: Folding = FOLDING) -> dict[str, Tensor]:
        return {
            name: fold_weight(weight, *self.factors(name), scale, transposed=stored_transposed(self, weight), how=how)
            for name, scale in self.adapted.items()
            if how.only in (None, name)
            for weight in [getattr(self, name)]
        }


def stored_transposed(module: nn.Module, weight: Tensor) -> bool:
    """Whether an experts module stores a weight as (experts, in, out)."""
    return weight.ndim == 3 and bool(getattr(module, "is_transposed", False))


def adapt_experts(
    module: nn.Module, ranks: dict[str, int], scales: dict[str, float], init: Callable[[Tensor, int], None]
) -> nn.Module:
    """Return ``module`` with a low-rank addition on the parameters named in ``ranks``.

    Args:
        module: whose parameters ``ranks`` names. ranks, scales: rank and factor of B·A by the parameter's name.
        init: function that fills A, of a rank, in place; B starts at zero.
    """
    new = recast(adapted_class(LoraExperts, type(module)), module)
    new.adapted = dict(scales)
    for name, rank in ranks.items():
        weight = getattr(module, name)
        experts, d_out, d_in = (1, *weight.shape)[-3:]
        if stored_transposed(module, weight):
            d_out, d_in = d_in, d_out
        like: Attributes = {"device": weight.device, "dtype": trainable_dtype(weight)}
        a = torch.empty(rank * experts, d_in, **like)
        init(a, rank)
        new.register_parameter(f"{name}_lora_A", nn.Parameter(a))
        new.register_parameter(f"{name}_lora_B", nn.Parameter(torch.zeros(d_out, rank * experts, **like)))
    return new


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


class OwnCopy(AnyLeaf):
    """A leaf that computes with ``own_<name>``, its trained copy of each parameter ``<name>`` that others share.

    Attributes:
        shared: names of those parameters; they stay W0, which the other modules use.
    """

    shared: tuple[str, ...]

    @property
    def added(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the parameters and attributes that the adapted form alone has."""
        return (*(f"own_{name}" for name in self.shared), "shared")

    def forward(self, *args: object, **kwargs: object) -> object:
        forward = super().forward
        if not self.enabled:
            return forward(*args, **kwargs)
        before = self._parameters
        self._parameters = before | {name: before[f"own_{name}"] for name in self.shared}
        try:
            return forward(*args, **kwargs)
        finally:
            self._parameters = before

    def fold(self, how: Folding = FOLDING) -> dict[str, Tensor]:
        return {name: getattr(self, f"own_{name}").detach().clone() for name in self.shared}


def with_unshared_parameters(leaf: nn.Module, shared: list[str]) -> nn.Module:
    """Return ``leaf`` with a copy of its own of the parameters named ``shared``.

    Args:
        leaf: a module with parameters of its own. shared: names of those that other modules use too.
    """
    new = recast(adapted_class(OwnCopy, type(leaf)), leaf)
    new.shared = tuple(shared)
    for name in shared:
        new.register_parameter(f"own_{name}", nn.Parameter(getattr(leaf, name).detach().clone()))
    return new


class LowRankAddition(Protocol):
    """A leaf with the update scale·B·A, as ``MixedLinear`` uses it."""

    scale: float

    def factors(self) -> tuple[Tensor, Tensor]: ...


class MixedLinear(AnyLeaf):
    """A linear map with the low-rank additions of several adapters: W0·x for all rows at once, s·B·A·x for its own.

    The additions are computed as one adapter alone computes them (``LowRankLinear``), in the same order, on the rows of
    each, and added in place.

    Attributes:
        additions: of each adapter that changes the leaf, its number and its adapted form.
        rows: which adapter each row uses. name: the leaf's name in the model.
    """

    added = ("additions", "rows", "name")
    additions: Sequence[tuple[int, LowRankAddition]]
    rows: BatchRows
    name: str

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self, nn.Linear) and is_quantised(self):
            y = frozen_linear(x, partial(dequantised, self), self.bias, self.out_features)
        else:
            y = super().forward(x)
        length = self.rows.length(x, self.name)
        y = y.contiguous()
        with torch.autocast(x.device.type, enabled=False):
            for number, addition in self.additions:
                index = self.rows.index(length, (number,), x.device)
                a, b = (factor.detach().to(y.dtype) for factor in addition.factors())
                low = x[index].to(y.dtype).reshape(-1, x.shape[-1]).mm(a.t())  # (tokens of these rows, r)
                mine = y[index]  # a view, where the rows are next to each other
                mine.view(-1, y.shape[-1]).addmm_(low, b.t(), alpha=addition.scale)
                if isinstance(index, Tensor):
                    y[index] = mine
        return y


@dataclass(frozen=True)
class _Places:
    """Rows that get an addition, and the others, by their numbers; ``order``: the place of each row behind both."""

    own: Tensor
    others: Tensor
    order: Tensor


class Gate:
    """The rows of a batch on which the additions of a model act; all leaves of a gated model have the same gate.

    It is closed at first: no row gets an addition.
    """

    def __init__(self) -> None:
        self._places: _Places | None = None

    def show(self, rows: Tensor | None) -> None:
        """Let the additions act on these rows of the following passes, booleans of the batch [b, n]; None: on none.

        They stay as they are until the next call: a backward pass that computes layers again needs them, too.
        """
        if rows is None:
            self._places = None
            return
        flat = rows.flatten()
        own, others = flat.nonzero()[:, 0], (~flat).nonzero()[:, 0]
        self._places = _Places(own, others, torch.cat((others, own)).argsort())

    @contextmanager
    def over(self, rows: Tensor) -> Iterator[None]:
        """Within the block the additions act on these rows; afterwards as before."""
        before = self._places
        self.show(rows)
        try:
            yield
        finally:
            self._places = before

    def split(self, x: Tensor, plain: Map, adapted: Map) -> Tensor:
        """Return ``adapted`` of the rows with additions and ``plain`` of the others, for x [b, n, in].

        The others get no gradient: no parameter that trains is computed with before them.

        Args:
            x: [b, n, in]. plain, adapted: functions of rows [m, in] to rows [m, out].

        Raises:
            PeftlabError: x has other rows than the batch.
        """
        if self._places is None:
            return plain(x)
        flat = x.reshape(-1, x.shape[-1])
        self._check(flat, self._places)
        with torch.no_grad():
            others = plain(flat[self._places.others])
        y = torch.cat((others, adapted(flat[self._places.own]).to(others.dtype)))[self._places.order]
        return y.view(*x.shape[:-1], -1)

    def add(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Add x·Aᵀ·Bᵀ to the rows of y [..., out] with additions, in place, for x [..., in]; for inference.

        Args:
            y: [..., out]. x: [..., in]. a: (r, in). b: (out, r), scaled.
        """
        if self._places is not None:
            own, flat = self._places.own, x.reshape(-1, x.shape[-1])
            self._check(flat, self._places)
            y.view(-1, y.shape[-1]).index_add_(0, own, flat[own].mm(a.t()).mm(b.t()))
        return y

    @staticmethod
    def _check(flat: Tensor, places: _Places) -> None:
        if len(flat) != len(places.order):
            raise PeftlabError(
                f"a gated addition is given {len(flat)} rows of a batch of {len(places.order)}: its module does not "
                "see one row for each token; take it out of target_modules"
            )


def set_gate(model: nn.Module, gate: Gate) -> None:
    """Let ``gate`` say on which rows of a batch the additions of an injected model act.

    Args:
        model: injected with LoRA. gate: of all its leaves.

    Raises:
        PeftlabError: an adapted module that cannot act on some rows alone; nothing is changed.
    """
    leaves: list[LowRank] = []
    for name, leaf in model.named_modules():
        if isinstance(leaf, LoraLinear | LoraConv1D):
            leaves.append(leaf)
        elif isinstance(leaf, Adapted):
            raise PeftlabError(
                f"{name} ({leaf.base_class.__name__}) cannot take an addition on some rows of a batch alone, as linear "
                "maps can; take it out of target_modules"
            )
    for leaf in leaves:
        leaf.lora_gate = gate


def unregister_factors(model: nn.Module) -> int:
    """Take the factors of LoRA leaves out of the parameters of a model that only computes from here on.

    Its parameters and its state dict are then the base's.

    Returns:
        How many numbers they have.
    """
    count = 0
    for leaf in model.modules():
        if isinstance(leaf, LowRank):
            for name in added_parameters(leaf):
                factor = leaf._parameters.pop(name)
                assert factor is not None
                vars(leaf)[name] = factor.detach()
                count += factor.numel()
    return count
