"""Networks on the target's states: their parts, training on their own output, and what their files share."""

from __future__ import annotations

import math
import shutil
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from accelerate import PartialState
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import ModelOutput

from peftlab.checkpoints.tensors import map_tensors, write_tensors
from peftlab.decoding.engines import compiled_engine
from peftlab.decoding.flat import FlatEngine, LayerStructure, Norm, Structure
from peftlab.decoding.packed import Linear
from peftlab.decoding.state_drafters import (
    BlockNetwork,
    FeatureDrafter,
    FeatureNetwork,
    mean_of_parts,
    state_drafter,
)
from peftlab.decoding.theory import RankRates
from peftlab.drafting.acceptance import (
    RANKS,
    Acceptance,
    add_rates,
    batches,
    correct_choices,
    greedy_tokens,
    rates_by_depth,
    response_tokens,
    write_ranks,
)
from peftlab.drafting.base import DraftKind, Loss, Pair, SavedDraft, ServedDraft, TargetLoader
from peftlab.drafting.config import StateConfig, UnrolledConfig
from peftlab.drafting.objectives import Objective, chunked_loss, make_objective
from peftlab.drafting.target import (
    IDENTITY_FILE,
    check_target,
    check_tokenizer,
    forward_hidden,
    head_weight,
    identify,
    input_embedding,
    unwrapped,
)
from peftlab.drafting.text import continuation_mask, digest, model_digest
from peftlab.errors import PeftlabError
from peftlab.files import LOCK, Json, locked, replacing, staged_directory, typed_value
from peftlab.methods.base import trainable_dtype
from peftlab.methods.inject import is_injected
from peftlab.methods.merging import merge
from peftlab.models.image_tokens import LIMIT, draft_places, text_id
from peftlab.models.load import eval_mode
from peftlab.progress import counted

CONSUMERS = ("vllm", "sglang", "speculators", "llama.cpp")
"""Programs that eagle3 and dflash drafts are written for."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [b, heads, n, D], keys and values [b, kv_heads, n, D] of new rows -> what they read, [b, heads, n, D]."""


@dataclass(frozen=True)
class NetworkShape:
    """The sizes and flags of a network on the target's states, those of a layer of a Llama.

    Attributes:
        features: layers of the target, rising, whose entering states are fused.
        theta: base of the rotary angles. eps: of the norms. limit: positions of the target.
        norm_before_fc: the target's states are normed together before ``fc``. fc_norm: each is normed on its own.
        norm_before_residual: the residual of the layer is the normed state, which attention reads, too.
        norm_output: the next row reads the output after the final norm, as the LM head does.
        window: how many tokens the layer sees, itself among them; None: all.
        head_norms: queries and keys of each head are normed, as in a Qwen3.
        rope: ``rope_parameters`` of transformers for angles that are scaled; None: they are theta's.
        own_embedding: the embeddings are the network's own, not the target's.
        image_tokens: how many tokens it reads of an image (``decoding.state_drafters.FewerImageTokens``); None: all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    limit: int
    features: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    window: int | None = None
    head_norms: bool = False
    rope: dict[str, Json] | None = None
    own_embedding: bool = False
    image_tokens: int | None = None


def default_features(layers: int) -> tuple[int, ...]:
    """Return the layers whose entering states are read by default: 2, L/2 and L - 3, spread evenly below 7 layers."""
    three = (2, layers // 2, layers - 3) if layers >= 7 else (layers // 4, layers // 2, layers - 1)
    return tuple(sorted(set(three)))


def shape_for(target: PretrainedConfig, features: tuple[int, ...] | None = None) -> NetworkShape:
    """Return a network's sizes for a target: those of the target's layers, where it names them as a Llama does.

    Args:
        target: configuration. features: layers whose entering states are read; None: ``default_features``.
    """
    config = target.get_text_config(decoder=True)
    width = config.hidden_size
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:  # a state-space model, whose ``head_dim`` is not that of an attention
        heads, head_dim = max(1, width // 64), None
    else:
        head_dim = getattr(config, "head_dim", None)
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    return NetworkShape(
        vocab_size=config.vocab_size,
        hidden_size=width,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * width,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim or width // heads,
        eps=float(getattr(config, "rms_norm_eps", None) or 1e-5),
        theta=float(theta),
        limit=getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 2048,
        features=features or default_features(config.num_hidden_layers),
    )


class RMSNorm(nn.Module):
    """Computes h / rms(h) · w, with the root mean square in float32, [..., size] -> [..., size]."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(hidden.dtype)


class LayerAttention(nn.Module):
    """Attention of one layer, whose keys and values ``attend`` stores and reads.

    Args:
        width: of what queries, keys and values are read from. norms: whether queries and keys of each head are normed.
    """

    def __init__(self, shape: NetworkShape, width: int, *, norms: bool = False):
        super().__init__()
        self.head_dim = shape.head_dim
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, wide, bias=False)
        self.k_proj = nn.Linear(width, narrow, bias=False)
        self.v_proj = nn.Linear(width, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(shape.head_dim, shape.eps) if norms else nn.Identity() for _ in ("queries", "keys")
        )

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q = _rotate(self.q_norm(self._heads(self.q_proj, hidden)), *rotation)
        seen = attend(q, *self.keys_and_values(hidden, rotation))
        return self.o_proj(seen.transpose(1, 2).flatten(2))

    def keys_and_values(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys and values [b, kv_heads, n, D] of rows [b, n, width]; ``rotation`` is of their positions."""
        keys = _rotate(self.k_norm(self._heads(self.k_proj, hidden)), *rotation)
        return keys, self._heads(self.v_proj, hidden)

    def _heads(self, project: nn.Linear, hidden: Tensor) -> Tensor:
        return project(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class LayerMLP(nn.Module):
    """Computes down(SiLU(gate h) · up h), [..., H] -> [..., H]."""

    def __init__(self, shape: NetworkShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class StateNetwork(nn.Module):
    """A network that drafts from the target's states with frozen rows of its LM head.

    Args:
        shape: sizes. embedding: the target's, [V, H]. head: rows of the target's LM head, [V_d, H], frozen.
        tokens: whose rows they are, rising, [V_d]; None for all.

    Attributes:
        norm: between an output and the LM head. ranks: how often each choice is right at each depth, as measured; None:
            not measured.
    """

    ranks: RankRates | None = None
    norm: nn.Module

    def __init__(self, shape: NetworkShape, embedding: Tensor, head: Tensor, tokens: Tensor | None = None):
        super().__init__()
        self.shape, self.features, self.vocab_size = shape, shape.features, shape.vocab_size
        self.lm_head = nn.Linear(shape.hidden_size, len(head), bias=False, device="meta")
        self.embedding: Tensor
        self.tokens: Tensor | None
        self.angles: Tensor
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("angles", rotary_angles(shape).to(embedding.device), persistent=False)
        self.register_buffer("tokens", None, persistent=False)
        self.draft_only(head, tokens)

    def draft_only(self, head: Tensor, tokens: Tensor | None) -> None:
        """Restrict the network to drafting ``tokens``.

        Args:
            head: their rows of the LM head, [V_d, H]. tokens: ids, rising, [V_d]; None for all.
        """
        self.lm_head.weight = nn.Parameter(head.detach(), requires_grad=False)
        self.lm_head.out_features = len(head)
        self.tokens = tokens

    def parts_to(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """Convert the layer, its norms and the rows of the LM head; the embeddings stay as the target has them.

        Args:
            dtype: of the weights. device: where they go; None: they stay.
        """
        for part in self.children():
            part.to(device, dtype)

    def round(self) -> None:
        """Convert to bfloat16, in which drafts are stored: their steps then read half the bytes.

        Rows of the LM head that bfloat16 would round stay as the target has them.
        """
        head = self.lm_head.weight.detach()
        self.parts_to(torch.bfloat16)
        if not torch.equal(self.lm_head.weight.to(head.dtype), head):
            self.draft_only(head, self.tokens)

    def get_output_embeddings(self) -> nn.Module:
        """Return the rows of the LM head, so that no method takes them for a linear map of the layer."""
        return self.lm_head

    def draft_ids(self, ids: Tensor) -> Tensor:
        """Return each token id's place among ``tokens``, or -1 if it cannot be drafted, [...] -> [...]."""
        if self.tokens is None:
            return ids
        places = torch.full((self.vocab_size,), -1, device=ids.device)
        places[self.tokens] = torch.arange(len(self.tokens), device=ids.device)
        return places[ids]

    @property
    def device(self) -> torch.device:
        """The device on which it computes."""
        return self.lm_head.weight.device

    def fuse(self, features: Tensor) -> Tensor:
        """Return the states that the layers read, from the target's, [..., F] -> [..., H]."""
        raise NotImplementedError

    def read_by_head(self, states: Tensor) -> Tensor:
        """Return what the LM head reads for these outputs, [..., H] -> [..., H]."""
        return self.norm(states)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of ``tokens``, [..., H] -> [..., V_d]."""
        return self.lm_head(self.read_by_head(states))

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotary angles of positions [b or 1, n], [b or 1, 1, n, D] each."""
        angles = (positions[:, None, :, None].float() * self.angles).repeat(1, 1, 1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class UnrolledNetwork(StateNetwork):
    """A network on the target's states that drafts token by token.

    Row t reads token t + 1 and a state of the target, or in its place the output of row t - 1; its output is the state
    of the next row and gives the logits of token t + 2.
    """

    def layer(self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the outputs of rows that read these embeddings and states, [b, n, H].

        Args:
            embedded: embeddings of the tokens that are read, [b, n, H]. states: [b, n, H].
            rotation: cosines and sines of the positions, [b or 1, 1, n, D] each. attend: see ``Attend``.
        """
        raise NotImplementedError

    def rows(self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the outputs of rows that read these tokens and states, [b, n, H].

        Args:
            tokens: [b, n]. states: [b, n, H]. positions: [b or 1, n]. attend: see ``Attend``.
        """
        embedded = F.embedding(tokens, self.embedding).to(states.dtype)
        return self.layer(embedded, states, self.rotation(positions, states.dtype), attend)


def rotary_angles(shape: NetworkShape) -> Tensor:
    """Return the angle that each pair of numbers turns by from one position to the next, [D / 2]."""
    if shape.rope is None:
        return shape.theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim).float()
    config = LlamaConfig(
        hidden_size=shape.hidden_size, head_dim=shape.head_dim, num_attention_heads=shape.heads,
        max_position_embeddings=shape.limit, rope_parameters=dict(shape.rope),
    )  # fmt: skip
    angles, factor = ROPE_INIT_FUNCTIONS[str(shape.rope["rope_type"])](config, torch.get_default_device())
    assert factor == 1.0, "of the types that read_sizes takes, none scales cosines"
    return angles


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class TargetWithNetwork(nn.Module):
    """A frozen target and the network on its states, as they train together."""

    def __init__(self, trunk: PreTrainedModel, network: StateNetwork):
        super().__init__()
        self.trunk, self.network = trunk, network

    def forward(self, known: Tensor | None = None, **inputs: object) -> ModelOutput | Tensor:
        """Return the target's output, or ``known``: DDP gathers gradients only after a forward pass."""
        return self.trunk(**inputs) if known is None else known

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the target's LM head."""
        return self.trunk.get_output_embeddings()


@dataclass
class StepAttention:
    """Attention of the training-time test, called once for each of its steps.

    Row t of step k sees the keys of step 0 up to its own position, and its own rows of steps 1 to k: what it would see
    when it drafts its k + 1st token after the target has read t tokens. Rows are padded on the right, so that no row of
    a text sees padding.
    """

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what queries read: q [b, heads, n, D], k and v [b, kv_heads, n, D] -> [b, heads, n, D]."""
        groups = q.shape[1] // k.shape[1]
        self.keys.append(k.repeat_interleave(groups, 1))
        self.values.append(v.repeat_interleave(groups, 1))
        first, *own = self.keys
        if not own:
            return F.scaled_dot_product_attention(q, first, self.values[0], is_causal=True)
        n, q = q.shape[2], q * q.shape[-1] ** -0.5
        # Of the keys of steps 1 to k a row sees those at its own place alone: one product each, no n × n scores.
        later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        earlier = (q @ first.mT).masked_fill(later, -torch.inf)  # [b, heads, n, n]
        mine = torch.stack([(q * key).sum(-1) for key in own], -1)  # [b, heads, n, k]
        shares = torch.cat((earlier, mine), -1).softmax(-1, dtype=torch.float32).to(v.dtype)
        seen = shares[..., :n] @ self.values[0]
        for step, value in enumerate(self.values[1:]):
            seen = seen + shares[..., n + step, None] * value
        return seen


def unroll(network: UnrolledNetwork, features: Tensor, ids: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield the outputs [b, n, H] of each step of the training-time test.

    In step k row t reads token t + 1 + k of the text, at position t + k, and its own output of the step before: step 0
    reads the target's states. Its output predicts token t + 2 + k.

    Args:
        features: the target's states, [b, n, F]. ids: the text, [b, n].
    """
    attend, states = StepAttention(), network.fuse(features)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    for k in range(steps):
        tokens = F.pad(ids[:, k + 1 :], (0, min(k + 1, ids.shape[1])))
        states = network.rows(tokens, states, positions + k, attend)
        yield states


def predictions(places: Tensor, ahead: int) -> Tensor:
    """Return which rows of a step count, each compared with the target's row ``ahead`` later, [b, n - ahead].

    Row t is compared with the target's row t + ahead. It counts if that one predicts a token of the continuation, and
    if the first token that row t drafts is one, too: drafting starts after the prompt.

    Args:
        places: which of the target's rows predict a token of the continuation, [b, n].
        ahead: 1 for step 0, and one more for each step after it.
    """
    n = places.shape[1]
    return (places[:, 1 : n - ahead + 1] > 0) & (places[:, ahead:] > 0)


class KnownStates(Protocol):
    """A store of states of texts that were computed before."""

    def read(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return both states of ``target_states``, next to each other, [b, n, F + H].

        Args:
            ids: the batch's texts, [b, n]. mask: 1 where there is text, [b, n].
        """
        ...


def target_states(
    model: nn.Module, ids: Tensor, mask: Tensor, known: KnownStates | None = None
) -> tuple[Tensor, Tensor]:
    """Return the frozen target's states that the network reads, [b, n, F], and those its LM head reads, [b, n, H].

    Gradients are on, as far as they are for the caller: DDP prepares to gather gradients only then.

    Args:
        known: where they are read from; None: the target computes them.
    """
    if known is not None:
        both = model(known=known.read(ids, mask))
        width = head_weight(model).shape[1]
        return both[..., :-width], both[..., -width:]
    with eval_mode(model):
        hidden = forward_hidden(model, ids, mask)
    network = unwrapped(model).network
    return torch.cat([hidden[layer] for layer in network.features], -1).detach(), hidden[-1].detach()


@dataclass(frozen=True)
class ReadTexts:
    """A batch of texts as a network reads them, in which an image may have fewer tokens than for the target.

    Attributes:
        ids: [b, n], of the vocabulary. features: the target's states that the network reads, [b, n, F].
        final: those that its LM head reads, [b, n, H]. marks: further tensors [b, n] of the texts.
    """

    ids: Tensor
    features: Tensor
    final: Tensor
    marks: tuple[Tensor, ...]


def read_texts(
    model: nn.Module, ids: Tensor, mask: Tensor, *marks: Tensor, known: KnownStates | None = None
) -> ReadTexts:
    """Return texts with the target's states, as the network reads them.

    Args:
        model, ids, mask, known: as for ``target_states``.
        marks: which places count, [b, n], zero or false at images.
    """
    features, final = target_states(model, ids, mask, known)
    rows = unwrapped(model).network.shape.image_tokens
    if rows is None or not bool((ids >= LIMIT).any()):
        return ReadTexts(text_id(ids), features, final, marks)
    places = [torch.tensor(draft_places(text, rows), device=ids.device) for text in ids.tolist()]

    def shorter(tensor: Tensor) -> Tensor:
        """Return [b, n, ...] with the mean of each part of an image in its place."""
        wide = tensor.flatten(2) if tensor.dim() > 2 else tensor[..., None]
        parts = [
            mean_of_parts(text.to(text.dtype if text.is_floating_point() else torch.double), place)
            for text, place in zip(wide, places, strict=True)
        ]
        return pad_sequence(parts, batch_first=True).to(tensor.dtype).reshape(len(parts), -1, *tensor.shape[2:])

    return ReadTexts(shorter(text_id(ids)), shorter(features), shorter(final), tuple(map(shorter, marks)))


@dataclass
class FeatureLoss:
    """Computes Σ_k decay^k · (D(p_{t+1+k} ‖ q of step k at row t) + ρ · SmoothL1) over the draftable tokens.

    The target's distribution is restricted to these tokens, and its logits are those of the network's own frozen rows
    of the LM head; for ``ce`` a token of the text that cannot be drafted does not count. SmoothL1 is the mean
    over the numbers of the states that the LM head reads, the network's and the target's: EAGLE-1's regression
    (arXiv 2401.15077).

    Attributes:
        objective: D, what each step minimises. steps: of the training-time test. decay: of their weights.
        regression: ρ. known: the target's states of the training text; None: it computes them.
    """

    objective: Objective
    steps: int
    decay: float
    regression: float = 0.0
    known: KnownStates | None = None

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the sum over tokens and steps."""
        ids, weights = inputs["input_ids"], inputs["weights"]
        texts = read_texts(model, ids, inputs["attention_mask"], weights, continuation_mask(inputs), known=self.known)
        ids, features, final, (weights, drafted) = texts.ids, texts.features, texts.final, texts.marks
        network: UnrolledNetwork = unwrapped(model).network
        head = network.lm_head.weight
        total = head.new_zeros(())
        for k, states in enumerate(unroll(network, features, ids, min(self.steps, ids.shape[1] - 1))):
            ahead = k + 1
            places = predictions(drafted, ahead) & (weights[:, ahead:] > 0)
            mine, theirs = network.read_by_head(states[:, :-ahead][places]), final[:, ahead:][places]
            if self.regression:
                distance = F.smooth_l1_loss(mine, theirs.to(mine.dtype), reduction="sum") / mine.shape[-1]
                total = total + self.decay**k * self.regression * distance
            if self.objective.name == "ce":
                labels = network.draft_ids(F.pad(ids[:, ahead + 1 :], (0, 1))[places])
                mine, target, target_head = mine[labels >= 0], labels[labels >= 0], None
            else:
                target, target_head = theirs.to(head.dtype), head
            mean = chunked_loss(mine, head, target, target_head, self.objective.name, settings=self.objective.settings)
            total = total + self.decay**k * mean * len(mine)  # the mean as a sum: the caller divides by all tokens
        if not total.requires_grad:  # every continuation is too short to look ahead: nothing to learn, but a graph
            total = total + 0 * sum(p.sum() for p in network.parameters())
        return total


@torch.no_grad()
def measure_features(model: TargetWithNetwork, data: Dataset, steps: int, batch_size: int = 16) -> list[Acceptance]:
    """Return the acceptance of each step's predictions by the target, reading the text as in training.

    Args:
        model: target and network. data: rows as ``text.make_dataset`` makes them. steps: of the training-time test.
        batch_size: rows read together.
    """
    network, head = model.network, head_weight(model)
    assert isinstance(network, UnrolledNetwork)
    sums = torch.zeros(steps, 4, len(data), dtype=torch.float64)
    for rows, places, ids, mask in batches(data, batch_size, head.device):
        texts = read_texts(model, ids, mask, places)
        ids, features, final, (places,) = texts.ids, texts.features, texts.final, texts.marks
        for k, states in enumerate(unroll(network, features, ids, min(steps, ids.shape[1] - 1))):
            both = predictions(places, k + 1)
            mine = network.read_by_head(states[:, : -(k + 1)][both])
            which = rows[both.nonzero()[:, 0].cpu()]
            add_rates(sums[k], which, final[:, k + 1 :][both], mine, head, network.lm_head.weight, network.tokens)
    return [Acceptance(*part) for part in sums]


_PART = 32  # texts per file

_BATCH = 8  # texts that the target reads together


class StoredStates:
    """States of texts, mapped from files, so that only those that are read take memory.

    Args:
        states: [n, F + H] in bfloat16 of each text, by its n tokens: the states that the network reads, and the one
            that the LM head reads.
    """

    def __init__(self, states: Mapping[tuple[int, ...], Tensor]):
        self._states = states

    def read(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the states of a batch of these texts, [b, n, F + H]; zeros where the mask is 0.

        Args:
            ids: [b, n]. mask: [b, n], 1 where there is text.
        """
        lines = zip(ids.tolist(), mask.sum(1).tolist(), strict=True)
        found = pad_sequence([self._states[tuple(line[:length])] for line, length in lines], batch_first=True)
        return F.pad(found, (0, 0, 0, ids.shape[1] - found.shape[1])).to(ids.device)


@torch.no_grad()
def store_states(model: TargetWithNetwork, texts: Sequence[Sequence[int]], cache: Path, most: float) -> StoredStates:
    """Compute the states that are not in ``cache`` yet, file by file, and return the states of all texts.

    Args:
        cache: directory of data sets; the states are in one named by a digest of weights and layers, whatever texts
            they were stored with.
        most: GB (1e9 bytes) that they may take.

    Raises:
        PeftlabError: they would take more, or the disk has no room for them.
    """
    named = {digest(text): tuple(text) for text in texts}
    features = model.network.features
    directory = cache / f"states-{digest([model_digest(model.trunk), features])[:16]}"

    def find() -> dict[str, Tensor]:
        files = sorted(directory.glob("part-*.safetensors"))
        return {name: tensor for file in files for name, tensor in map_tensors(file).items() if name in named}

    found = find()
    each = (len(features) + 1) * head_weight(model).shape[1] * torch.bfloat16.itemsize
    all_tokens, missing_tokens = sum(map(len, named.values())), sum(len(named[name]) for name in {*named} - {*found})
    _check_room(cache, each, all_tokens, missing_tokens, most)
    if len(found) < len(named):
        # Cells of a table that start together need the same states: one of them computes, the others wait for it.
        with locked(directory / LOCK, directory, wait=math.inf):
            found = find()
            left = [name for name in named if name not in found]
            parts = [left[start : start + _PART] for start in range(0, len(left), _PART)]
            for part in counted(parts, "storing the target's states", len(parts), "file"):
                with replacing(directory / f"part-{digest(part)[:16]}.safetensors") as temporary:
                    states = _compute_states(model, [named[name] for name in part])
                    write_tensors(temporary, dict(zip(part, states, strict=True)), {})
            found = find()
    return StoredStates({named[name]: states for name, states in found.items()})


def _check_room(cache: Path, each: int, tokens: int, missing: int, most: float) -> None:
    size = f"the target's states of {tokens:,} tokens take {tokens * each / 1e9:.3g} GB ({each:,} bytes per token)"
    if tokens * each > most * 1e9:
        raise PeftlabError(
            f"draft.store_gb: {size}, more than {most:g}; raise it, train on less text, or leave it out to compute the "
            "states anew in every step"
        )
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if missing * each > free:
        raise PeftlabError(f"draft.store_gb: {size}, but {cache} has room for {free / 1e9:.3g} GB")


def _compute_states(model: TargetWithNetwork, texts: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Compute the states of each text, [n, F + H] in bfloat16."""
    device = head_weight(model).device
    found: list[Tensor] = []
    for start in range(0, len(texts), _BATCH):
        some = [torch.tensor(text, device=device) for text in texts[start : start + _BATCH]]
        mask = pad_sequence([torch.ones_like(text) for text in some], batch_first=True)
        states = torch.cat(target_states(model, pad_sequence(some, batch_first=True), mask), -1).bfloat16()
        found += [states[i, : len(text)] for i, text in enumerate(some)]
    return found


@torch.no_grad()
def measure_ranks(model: TargetWithNetwork, data: Dataset, batch_size: int, depth: int) -> RankRates:
    """Return how often the choice of each rank is the target's own greedy token, depth by depth.

    Depth k counts at a place where the right tokens of all depths before were among their choices and are the text's
    own: there a tree can reach it.

    Args:
        data: held-out rows as ``text.make_dataset`` makes them. depth: how many tokens ahead.
    """
    network, head = model.network, head_weight(model)
    assert isinstance(network, UnrolledNetwork)
    weight = network.lm_head.weight
    right = torch.zeros(depth, min(RANKS, len(weight)), dtype=torch.float64)
    tried = torch.zeros(depth, dtype=torch.float64)
    for _, places, ids, mask in batches(data, batch_size, head.device):
        texts = read_texts(model, ids, mask, places)
        ids, features, final, (places,) = texts.ids, texts.features, texts.final, texts.marks
        own, alive = greedy_tokens(final, head), torch.ones_like(places)
        for k, states in enumerate(unroll(network, features, ids, min(depth, ids.shape[1] - 1))):
            n = ids.shape[1] - k - 1
            alive = alive[:, :n] & predictions(places, k + 1)
            if k:  # the token read last is the text's, and must be the one that was right
                alive = alive & (ids[:, k + 1 :] == own[:, k : k + n])
            hits = correct_choices(
                network.read_by_head(states[:, :n][alive]), weight, own[:, k + 1 :][alive], network.tokens
            )
            right[k] += hits.sum(0).cpu().double()
            tried[k] += len(hits)
            alive = alive.masked_scatter(alive, hits.any(-1))  # a tree goes on only below a right choice
    return RankRates.counted(right.tolist(), tried.tolist())


WEIGHTS = "model.safetensors"

FORMAT = "0.9.0"  # of speculators, whose names these are


def token_maps(network: StateNetwork) -> dict[str, Tensor]:
    """Return the tensors that tell which tokens a network drafts; none where it drafts all.

    ``d2t`` is the target's id of each drafted token less its place, ``t2d`` which of the target's tokens are drafted.
    """
    if network.tokens is None:
        return {}
    tokens = network.tokens.cpu()
    drafted = torch.zeros(network.vocab_size, dtype=torch.bool)
    drafted[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": drafted}


def drafted_tokens(tensors: dict[str, Tensor], drafted: int, vocabulary: int, directory: Path) -> Tensor | None:
    """Remove ``token_maps`` from a file's tensors and return the tokens [V_d]; None for all.

    Args:
        tensors: of the file, by name; changed in place. drafted: V_d. vocabulary: V. directory: for messages.

    Raises:
        PeftlabError: they are not a map of ``drafted`` tokens.
    """
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    tokens = None if offsets is None else offsets + torch.arange(len(offsets))
    if (tokens is None) != (drafted == vocabulary) or (tokens is not None and len(tokens) != drafted):
        raise PeftlabError(f"{directory}: d2t is not the map of {drafted} drafted tokens")
    if tokens is not None:
        rising = bool((tokens.diff() > 0).all()) and 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary
        if not rising or (mask is not None and mask.nonzero().flatten().tolist() != tokens.tolist()):
            raise PeftlabError(f"{directory}: d2t and t2d are not the same rising token ids below {vocabulary}")
    return tokens


def stack_linears(*linears: nn.Linear) -> nn.Linear:
    """Return linear maps of the same input as one map, their outputs next to one another."""
    with torch.device("meta"):
        whole = nn.Linear(linears[0].in_features, sum(linear.out_features for linear in linears), bias=False)
    weights = [linear.weight.detach() for linear in linears]
    whole.weight = nn.Parameter(torch.cat(weights) if len(weights) > 1 else weights[0], requires_grad=False)
    return whole


def decoder_structure(
    network: StateNetwork, layers: Sequence[tuple[LayerAttention, LayerMLP, RMSNorm | None, RMSNorm]]
) -> Structure:
    """Return the weights and settings by which the layers of a network run, as those of a decoder.

    Args:
        network: of the layers. layers: attention, MLP and the norms before them; None: what attention reads is given.
    """
    shape = network.shape

    def linears(*modules: nn.Linear) -> tuple[Linear, ...]:
        return tuple(Linear(module.weight.detach()) for module in modules)

    def norm(module: nn.Module | None) -> Norm | None:
        return Norm(module.weight.detach(), shape.eps) if isinstance(module, RMSNorm) else None

    def structure(attention: LayerAttention, mlp: LayerMLP, first: RMSNorm | None, second: RMSNorm) -> LayerStructure:
        return LayerStructure(
            qkv=linears(attention.q_proj, attention.k_proj, attention.v_proj),
            out=linears(attention.o_proj)[0],
            up=linears(mlp.gate_proj, mlp.up_proj),
            down=linears(mlp.down_proj)[0],
            scale=shape.head_dim**-0.5,
            before_attention=norm(first),
            before_mlp=norm(second),
            queries=norm(attention.q_norm),
            keys=norm(attention.k_norm),
            angles="all",
            window=shape.window,
        )

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        both = (positions[..., None] * network.angles).repeat(1, 1, 2)
        return both.cos(), both.sin()

    last = norm(network.norm)
    assert last is not None
    return Structure(
        layers=tuple(structure(*layer) for layer in layers),
        embedding=network.embedding.to(last.weight.dtype),
        norm=last,
        head=linears(network.lm_head)[0],
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        dim=shape.head_dim,
        activation=F.silu,
        gated=True,
        limit=sys.maxsize,
        angles={"all": angles},
    )


def decoder_step(structure: Structure, pack: bool) -> FlatEngine:
    """Return the flattened step of a structure, compiled where it can be.

    Args:
        structure: of a network's layers. pack: pack the weights for the CPU.
    """
    compiled = compiled_engine(structure) if pack else None
    return FlatEngine(structure, pack=pack) if compiled is None else compiled(structure)


class RotaryTable:
    """Cosines and sines of the rotary angles of positions, as ``decoding.flat.rotate`` takes them, computed once.

    Args:
        angles: of one position, [D/2].
    """

    def __init__(self, angles: Tensor):
        self._angles, self._turns = angles, angles.new_empty(0)

    def at(self, positions: Tensor, capacity: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [b or 1, n, 1, D] of positions [b or 1, n] below ``capacity``."""
        if len(self._turns) < capacity:
            angles = torch.arange(capacity, device=self._angles.device)[:, None] * self._angles
            # (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin): the halves are swapped, and the sign is in the sine.
            cos, sin = angles.cos(), angles.sin()
            self._turns = torch.stack((cos, cos, -sin, sin), 1).unflatten(1, (2, 2)).flatten(2).to(dtype)
        cos, sin = self._turns[positions].unbind(2)
        return cos[:, :, None], sin[:, :, None]


def layer_config(shape: NetworkShape, dtype: torch.dtype) -> dict[str, Json]:
    """Return the configuration of a network's layer, as that of a Llama, or of a Qwen3 if it has its norms of heads.

    Args:
        shape: sizes. dtype: of the stored weights.
    """
    layer: dict[str, Json] = {
        "model_type": "qwen3" if shape.head_norms else "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_parameters": shape.rope or {"rope_type": "default", "rope_theta": shape.theta},
        "max_position_embeddings": shape.limit,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if shape.window is not None:
        layer |= {"layer_types": ["sliding_attention"], "sliding_window": shape.window}
        if shape.head_norms:  # without it the configuration of a Qwen3 forgets the window
            layer["use_sliding_window"] = True
    return layer


def decoding_config(algorithm: str, *, target: str, architecture: str, tokens: int) -> dict[str, Json]:
    """Return the section of speculators' layout on how a draft decodes.

    Args:
        algorithm: name of the method. target, architecture, tokens: as for ``eagle.write_eagle``.
    """
    method: dict[str, Json] = {"proposal_type": "greedy", "speculative_tokens": tokens}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": target, "architectures": [architecture]},
    }


def image_tokens_field(shape: NetworkShape) -> dict[str, Json]:
    """Return what a configuration says about images; nothing where the network reads all of their tokens."""
    return {} if shape.image_tokens is None else {"image_tokens": shape.image_tokens}


def read_image_tokens(config: dict[str, Json], file: Path) -> int | None:
    """Return how many tokens of an image a stored network reads; None for all.

    Args:
        config: of the draft. file: which contains it, for messages.
    """
    if config.get("image_tokens") is None:
        return None
    if (count := typed_value(config, "image_tokens", int, file)) < 0:
        raise PeftlabError(f"{file}: image_tokens must be at least 0")
    return count


def check_image_tokens(shape: NetworkShape, place: Path, consumer: str) -> None:
    """Refuse to write a draft for an engine that would give it all tokens of an image.

    Args:
        shape: of the draft. place: its directory. consumer: name of the engine.
    """
    if shape.image_tokens is not None:
        raise PeftlabError(
            f"--for {consumer}: {place} reads {shape.image_tokens} tokens of an image (draft.image_tokens), and "
            f"{consumer} would give it all; train it with image_tokens: null"
        )


def check_written(tensors: dict[str, Tensor], back: dict[str, Tensor], directory: Path) -> None:
    """Raise ``PeftlabError`` where the tensors that were read back are not those that were written.

    Args:
        tensors: written, by name. back: read back. directory: for messages.
    """
    if back.keys() != tensors.keys() or any(not torch.equal(tensor, back[name]) for name, tensor in tensors.items()):
        raise PeftlabError(f"{directory}: what was written is not what was trained; nothing was left behind")


def read_sizes(layer: dict[str, Json], file: Path) -> NetworkShape:
    """Return the sizes of a network from the configuration of its layer, without features.

    Args:
        layer: the configuration. file: which contains it, for messages.

    Raises:
        PeftlabError: they are not those of a layer.
    """
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    v, width, between, heads, kv_heads, dim = (typed_value(layer, name, int, file) for name in names)
    if (
        min(v, width, between, heads, kv_heads, dim) < 1
        or max(v, width, between) >= 2**31
        or heads % kv_heads
        or dim % 2
    ):
        raise PeftlabError(f"{file}: {', '.join(names)} are not those of a layer")
    rope = layer.get("rope_parameters", layer.get("rope_scaling"))
    rope = rope if isinstance(rope, dict) else {}
    theta = rope.get("rope_theta", layer.get("rope_theta", 10000.0))
    eps, limit = layer.get("rms_norm_eps", 1e-6), layer.get("max_position_embeddings", 2048)
    if not isinstance(theta, float | int) or not isinstance(eps, float | int) or not isinstance(limit, int):
        raise PeftlabError(f"{file}: rope_theta, rms_norm_eps and max_position_embeddings must be numbers")
    if (kind := rope.get("rope_type", rope.get("type", "default"))) not in ("default", "linear", "llama3"):
        raise PeftlabError(f"{file}: rope_type {kind!r}; a layer's angles may be default, linear or llama3")
    if (activation := layer.get("hidden_act", "silu")) != "silu":
        raise PeftlabError(f"{file}: hidden_act {activation!r}; a layer's is silu")
    scaled = None if kind == "default" else rope | {"rope_type": kind, "rope_theta": float(theta)}
    sizes = NetworkShape(v, width, between, heads, kv_heads, dim, float(eps), float(theta), limit, features=())
    return replace(sizes, head_norms=layer.get("model_type") == "qwen3", rope=scaled)


def check_embedding(shape: NetworkShape, embedding: Tensor, directory: Path) -> None:
    """Raise ``PeftlabError`` where a target's embeddings [V, H] are not those that a network reads.

    Args:
        shape: of the network. embedding: the target's, [V, H]. directory: of the network, for messages.
    """
    if tuple(embedding.shape) != (shape.vocab_size, shape.hidden_size):
        raise PeftlabError(
            f"{directory}: for states of {shape.hidden_size} and {shape.vocab_size} tokens, but the target has "
            f"{embedding.shape[1]} and {embedding.shape[0]}"
        )


def check_shapes(blank: dict[str, Tensor], tensors: dict[str, Tensor], directory: Path) -> None:
    """Raise ``PeftlabError`` where tensors have other names or shapes than those of an empty network.

    Args:
        blank: state dict of an empty network. tensors: of a file. directory: for messages.
    """
    wanted, found = ({(name, tuple(tensor.shape)) for name, tensor in of.items()} for of in (blank, tensors))
    if wanted != found:
        odd = sorted({name for name, _ in wanted ^ found})
        raise PeftlabError(f"{directory}: tensors that do not fit its configuration: {', '.join(odd[:5])}")


StateT = TypeVar("StateT", bound=StateConfig)


class StateKind(DraftKind[StateT]):
    """A network on the target's states, trained with the target frozen.

    A kind says what a new network is (``new``), how it is read (``read``) and written (``write``), and which module
    computes it while it drafts (``step``).

    Attributes:
        known: the target's states of the training text; None: it computes them.
    """

    own_modules = True
    model: TargetWithNetwork
    known: StoredStates | None = None

    @abstractmethod
    def new(self, target: PreTrainedModel) -> StateNetwork:
        """Return an untrained network."""

    @classmethod
    @abstractmethod
    def read(cls, place: str | Path, target: PreTrainedModel) -> StateNetwork:
        """Return the network in a directory; its own parts are on the CPU, the target's where they are.

        Args:
            place: the directory. target: whose embeddings and LM head it reads.
        """

    @abstractmethod
    def write(self, directory: Path, *, architecture: str, tokens: int) -> None:
        """Write the network into an existing directory.

        Args:
            directory: for its files. architecture, tokens: as for ``eagle.write_eagle``.
        """

    @classmethod
    @abstractmethod
    def step(cls, network: StateNetwork, pack: bool = True) -> FeatureNetwork | BlockNetwork:
        """Return the module that computes a network while it drafts.

        Args:
            network: trained. pack: pack its weights for the CPU.
        """

    @property
    def injected(self) -> nn.Module:
        """The network: a method acts on it, never on the target."""
        return self.model.network

    @property
    def computing(self) -> torch.dtype:
        """The dtype in which the network trains and is measured; it is stored in bfloat16."""
        return trainable_dtype(head_weight(self.target))

    def check(self, target: PretrainedConfig) -> None:
        """Refuse to continue from a draft of another kind."""
        why = f"is no {self.name} draft (config.json, speculators_model_type {self.name})"
        self.check_start(self.config.from_, why)

    def load(self, target: PreTrainedModel) -> None:
        """Put a new network on the target, or the one to continue from; the target's parameters are frozen.

        Raises:
            PeftlabError: the embeddings are not as wide as the states, or the draft to continue from is for another
                target.
        """
        embedding, head = input_embedding(target), head_weight(target)
        if embedding.shape != head.shape:
            raise PeftlabError(
                f"draft.kind {self.name}: the embeddings of {type(target).__name__} are {tuple(embedding.shape)} and "
                f"its LM head {tuple(head.shape)}; the layer needs both for the same tokens and states"
            )
        target.requires_grad_(False)
        start = self.start_directory
        if start is None:
            network = self.new(target)
        else:
            for warning in check_target(Path(start), target, self.tokenizer):
                print(warning)
            network = self.start(start, target)
        network.parts_to(trainable_dtype(head), head.device)
        network.train().draft_only(head.to(trainable_dtype(head)), None)
        self.model, self.adapted, self.target = TargetWithNetwork(target, network), target, target
        self.base = self.recipe.target if self.recipe.method is None or start is None else start

    @property
    def start_directory(self) -> str | None:
        """The stored draft from which training continues; None: from a new one."""
        return None if self.config.from_ is None else self.row().find(self.config.from_)

    def start(self, place: str, target: PreTrainedModel) -> StateNetwork:
        """Return the stored network from which training continues.

        Args:
            place: its directory. target: the model.
        """
        return self.read(place, target)

    def prepare(self, train: Dataset) -> None:
        """Store the target's states if the recipe asks for it; draft only the tokens that the text uses most."""
        if self.config.store_gb is not None:
            with PartialState().main_process_first():
                self.known = store_states(self.model, train["input_ids"], self.cache, self.config.store_gb)
        head, size = head_weight(self.target), self.config.vocabulary
        if size is not None and size < len(head):
            tokens = response_tokens(train, size, self.target)
            assert tokens is not None
            tokens = tokens.to(head.device)
            self.model.network.draft_only(head[tokens].to(trainable_dtype(head)), tokens)

    def save(self, train: Dataset) -> Tensor | None:
        """Write the network, rounded and with an adapter folded into it, with the identity of its target."""
        network = self.model.network
        if is_injected(network):
            merge(network)
        network.round()
        with staged_directory(self.stored, "model", overwrite=True) as staging:
            self.write(staging, architecture=type(self.target).__name__, tokens=self.config.drafted)
            identify(self.recipe.target, self.target, self.tokenizer).write(staging)
        network.parts_to(self.computing)
        return network.tokens

    def drafter(self, saved: SavedDraft | None) -> ServedDraft | None:
        """Return the target with the network read from disk; an untrained one drafts nothing."""
        if saved is None:
            return None
        network = self.read(saved.directory / self.row().folder, self.target).to(self.target.device)
        network.parts_to(self.computing)
        return ServedDraft(self.target, partial(state_drafter, self.step(network)), network.features)

    @classmethod
    def open(cls, place: str, loader: TargetLoader) -> Pair:
        """Read the network and check it against the target: other tokens are refused, other weights are warnings."""
        check_tokenizer(Path(place), loader.tokenizer)  # before any weights are read
        target = loader.target
        warnings = check_target(Path(place), target, loader.tokenizer)
        network = cls.read(place, target).to(target.device)
        network.parts_to(loader.draft_dtype)
        cls.check_layers(place, network, target.config.get_text_config(decoder=True).num_hidden_layers)
        size = sum(parameter.numel() for parameter in network.parameters())
        step = cls.step(network, loader.pack)
        return loader.pair(size, network=step, features=network.features, warnings=warnings)

    @classmethod
    def check_layers(cls, place: str, network: StateNetwork, layers: int) -> None:
        """Raise ``PeftlabError`` where a network reads states that a target of so many layers does not have.

        Args:
            place: of the network, for messages. network: as stored. layers: of the target.
        """
        if (last := max(network.features)) > layers:
            raise PeftlabError(f"{place}: reads the state entering layer {last}; the target has {layers}")

    @classmethod
    def update(cls, config: StateT, newest: Path, log: Path) -> StateT:
        """Return the section that continues from the draft of ``newest``."""
        return config.model_copy(update={"from_": cls.row().newest(newest)})


UnrolledT = TypeVar("UnrolledT", bound=UnrolledConfig)


class UnrolledKind(StateKind[UnrolledT]):
    """A layer that drafts token by token, trained on its own states."""

    def loss(self) -> Loss:
        """Return the weighted sum of the steps' losses."""
        return FeatureLoss(
            make_objective(self.recipe.objective), self.config.steps, self.config.decay, known=self.known
        )

    def score(self, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
        """Return the mean acceptance over the steps, and each step's own."""
        assert isinstance(model, TargetWithNetwork)
        return rates_by_depth(measure_features(model, data, self.config.steps, batch_size))

    def calibrate(self, held_out: Dataset, batch_size: int) -> None:
        """Measure on held-out text how often each choice of the network is right, and store the rates with it."""
        write_ranks(self.stored / IDENTITY_FILE, measure_ranks(self.model, held_out, batch_size, FeatureDrafter.depth))
