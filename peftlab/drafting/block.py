"""Layers that draft a block of tokens in one pass, over the target's states: DFlash and DSpark.

A block is the last known token, the anchor, and masks behind it. Its rows attend to keys and values that each layer
makes of the target's states of all tokens before the anchor, and to one another: every token of the block is drafted at
once, without knowing the others (DFlash, arXiv 2602.06036). DSpark (arXiv 2607.05147) adds a bias by the token drafted
before (``MarkovHead``), and a head that estimates whether a token will be accepted (``ConfidenceHead``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from peftlab.checkpoints.tensors import write_tensors
from peftlab.decoding.cache import Block, KVCache, Output, WholeBlock
from peftlab.decoding.flat import rotate, structure_of, without_torch_function
from peftlab.decoding.packed import pack_linears
from peftlab.decoding.state_drafters import output_at
from peftlab.decoding.theory import RankRates, acceptance_rate
from peftlab.drafting.acceptance import (
    RANKS,
    Acceptance,
    Reliability,
    add_rates,
    batches,
    correct_choices,
    greedy_tokens,
    rates_by_depth,
    read_ranks,
    reliability,
    write_ranks,
)
from peftlab.drafting.base import DraftExporter, Loss
from peftlab.drafting.block_files import (
    BlockExport,
    BlockShape,
    read_block_shape,
    read_block_tensors,
    speculators_layout,
)
from peftlab.drafting.config import DflashDraft, Markov
from peftlab.drafting.heads import MarkovBias
from peftlab.drafting.objectives import Objective, chunked_loss, make_objective
from peftlab.drafting.pard import unused_token
from peftlab.drafting.state_network import (
    CONSUMERS,
    WEIGHTS,
    Attend,
    KnownStates,
    LayerAttention,
    LayerMLP,
    NetworkShape,
    RMSNorm,
    RotaryTable,
    StateKind,
    StateNetwork,
    TargetWithNetwork,
    check_embedding,
    check_shapes,
    check_written,
    decoder_step,
    decoder_structure,
    drafted_tokens,
    read_texts,
    shape_for,
    stack_linears,
    token_maps,
)
from peftlab.drafting.target import IDENTITY_FILE, head_weight, input_embedding, logits_of, unwrapped
from peftlab.drafting.text import continuation_mask
from peftlab.errors import PeftlabError
from peftlab.files import write_json


class BlockLayer(nn.Module):
    """A decoder layer of a Qwen3 over the rows of blocks."""

    def __init__(self, shape: NetworkShape):
        super().__init__()
        self.self_attn, self.mlp = LayerAttention(shape, shape.hidden_size, norms=True), LayerMLP(shape)
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(shape.hidden_size, shape.eps) for _ in range(2))

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class MarkovHead(MarkovBias):
    """A bias W2 f on the logits of a token, f read from w = W1[x], x the token before, and from the state h.

    ``vanilla``: f = w. ``gated``: f = σ(G[h; w] + b) ⊙ w. ``rnn``: with [z_g, z_c, z_o] = J[s; w; h] + b, the memory s
    becomes σ(z_g) s + (1 - σ(z_g)) tanh(z_c), and f = tanh(z_o); s is 0 at the start of a block.

    Args:
        kind: of these. vocabulary, rows, rank: as for ``MarkovBias``. width: of h.
    """

    def __init__(self, kind: str, vocabulary: int, rows: int, rank: int, width: int):
        super().__init__(vocabulary, rows, rank)
        self.kind, self.rank = kind, rank
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def factor(self, before: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return f [..., r] and the memory for the next token.

        Args:
            before: the tokens before, [...]. states: h, [..., H]. memory: [..., r]; None: zero, or there is none.
        """
        w = self.markov_w1(before)
        if self.kind == "gated":
            return self.gate_proj(torch.cat((states, w), -1)).sigmoid() * w, None
        if self.kind != "rnn":
            return w, None
        memory = torch.zeros_like(w) if memory is None else memory
        keep, new, out = self.joint_proj(torch.cat((memory, w, states), -1)).chunk(3, -1)
        keep = keep.sigmoid()
        return out.tanh(), keep * memory + (1 - keep) * new.tanh()

    def factors(self, before: Tensor, states: Tensor) -> Tensor:
        """Return f of all tokens of blocks, [..., P, r]: ``before`` [..., P] and ``states`` [..., P, H]."""
        if self.kind != "rnn":
            return self.factor(before, states, None)[0]
        memory, found = None, []
        for k in range(before.shape[-1]):
            one, memory = self.factor(before[..., k], states[..., k, :], memory)
            found.append(one)
        return torch.stack(found, -2)


class ConfidenceHead(nn.Module):
    """σ(u·[h; w] + b): the probability that a token is accepted if those before it are; without a token σ(u·h + b)."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """Return the log-odds, [..., H + r] -> [...]; what is behind the width that it reads is not read."""
        return self.proj(states[..., : self.proj.in_features].to(self.proj.weight.dtype)).squeeze(-1)


class DFlash(StateNetwork):
    """Layers over [E(x_a), E(mask), ..., E(mask)], with keys and values of C = norm(fc[h_a; h_b; h_c]) in each.

    C is the same for all layers: the target's states have no residual stream of the draft's. Parameters are named as in
    the files of speculators' ``dflash``; the embeddings are the target's and no parameter.
    """

    norm: RMSNorm
    shape: BlockShape

    def __init__(self, shape: BlockShape, embedding: Tensor, head: Tensor, tokens: Tensor | None = None):
        super().__init__(shape, embedding, head, tokens)
        self.fc = nn.Linear(len(shape.features) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm, self.norm = (RMSNorm(shape.hidden_size, shape.eps) for _ in range(2))
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.layers))
        if rank := shape.markov_rank:
            self.markov_head = MarkovHead(shape.markov_head, shape.vocab_size, len(head), rank, shape.hidden_size)
        if shape.confidence:
            self.confidence_head = ConfidenceHead(shape.hidden_size + rank * shape.confidence_sees_token)

    def draft_only(self, head: Tensor, tokens: Tensor | None) -> None:
        """Restrict the network to drafting ``tokens``; the bias of a token that it did not draft before is 0."""
        if hasattr(self, "markov_head"):
            w2 = self.markov_head.markov_w2
            rows = w2.weight.new_zeros(self.vocab_size, self.shape.markov_rank)
            rows[slice(None) if self.tokens is None else self.tokens] = w2.weight.detach()
            w2.weight = nn.Parameter(rows if tokens is None else rows[tokens])
            w2.out_features = len(w2.weight)
        super().draft_only(head, tokens)

    def fuse(self, features: Tensor) -> Tensor:
        """Return C, the fused and normed states of the target, [..., F] -> [..., H]."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def drafts(self, features: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
        """Return the states from which the tokens after each anchor are drafted, before the final norm, [b, n, P, H].

        Args:
            features: the target's states of texts, [b, T, F]. ids: the texts, [b, T].
            anchors: place of each block's known token, [b, n]; a block sees the states of the tokens before it.
        """
        shape, (b, n) = self.shape, anchors.shape
        context = self.fuse(features)
        tokens = torch.full((b, n, shape.block_size), shape.mask_token, device=ids.device)
        tokens[:, :, 0] = ids.gather(1, anchors)
        hidden = F.embedding(tokens.flatten(1), self.embedding).to(context.dtype)
        places = anchors[..., None] + torch.arange(shape.block_size, device=ids.device)  # [b, n, B]
        here = self.rotation(places.flatten(1), context.dtype)
        before = self.rotation(torch.arange(ids.shape[1], device=ids.device)[None], context.dtype)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            keys, values = layer.self_attn.keys_and_values(context, before)
            hidden = layer(hidden, here, BlockAttention(keys, values, places, shape.window))
        return hidden.unflatten(1, (n, shape.block_size))[:, :, -shape.length :]

    def scored(self, states: Tensor, before: Tensor) -> Tensor:
        """Return what ``score_weight`` turns into logits: the normed states, and beside them f of a Markov head.

        Args:
            states: of all tokens of blocks, [b, n, P, H]. before: the token before each of them, [b, n, P].
        """
        normed = self.read_by_head(states)
        if not self.shape.markov_rank:
            return normed
        return torch.cat((normed, self.markov_head.factors(before, normed)), -1)

    @property
    def score_weight(self) -> Tensor:
        """[V_d, H], or [V_d, H + r] with a Markov head."""
        head = self.lm_head.weight
        return (
            torch.cat((head, self.markov_head.markov_w2.weight.to(head.dtype)), 1) if self.shape.markov_rank else head
        )


@dataclass
class BlockAttention:
    """Attention of blocks to the states before their anchors and to their own rows.

    No scores between different blocks are computed.

    Attributes:
        keys, values: of the text, [b, kv_heads, T, D]. places: of the rows, [b, n, B], the first of each block its
            anchor. window: see ``BlockShape``.
    """

    keys: Tensor
    values: Tensor
    places: Tensor
    window: int | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what queries read: q [b, heads, n·B, D], k and v [b, kv_heads, n·B, D] -> [b, heads, n·B, D]."""
        (b, heads, _, dim), (n, size), kv = q.shape, self.places.shape[1:], k.shape[1]
        length = self.keys.shape[2]
        # Query heads that share a key head become further queries of it.
        q = (q * dim**-0.5).reshape(b, kv, -1, dim)  # [b, kv, groups · n · B, D]
        blocks = b, kv, heads // kv, n, size, dim
        text = torch.arange(length, device=q.device)
        seen = (text < self.places[:, :, :1])[:, :, None]  # [b, n, 1, T]
        if self.window is not None:
            seen = seen & (text > self.places[..., None] - self.window)
        far = (q @ self.keys.mT).view(*blocks[:-1], length).masked_fill(~seen[:, None, None], -torch.inf)
        own_k, own_v = (x.view(b, kv, 1, n, size, dim) for x in (k, v))
        near = q.view(blocks) @ own_k.mT  # [b, kv, groups, n, B, B]
        if self.window is not None:
            behind = torch.arange(size, device=q.device)[:, None] - torch.arange(size, device=q.device)
            near = near.masked_fill((behind < 0) | (behind >= self.window), -torch.inf)
        shares = torch.cat((far, near), -1).softmax(-1, dtype=torch.float32).to(v.dtype)
        context = (shares[..., :length].reshape(b, kv, -1, length) @ self.values).view(blocks)
        return (context + shares[..., length:] @ own_v).reshape(b, heads, n * size, dim)


def draw_anchors(places: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Draw at most ``most`` of the places of each text, in order, and return them and which are drawn, [b, n] each.

    Randomness comes from torch's global generator, whose state checkpoints contain.

    Args:
        places: from which to draw, [b, T] booleans. most: of each text.
    """
    n = max(1, min(most, int(places.sum(1).max())))
    drawn = torch.rand(places.shape).to(places.device).masked_fill(~places, -1).topk(n, 1)
    anchors, order = drawn.indices.masked_fill(drawn.values < 0, 0).sort(1)
    return anchors, (drawn.values >= 0).gather(1, order)


def predicted_places(anchors: Tensor, counted: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the places after which the tokens of each block come, and which of these tokens count, [b, n, P] each.

    The k-th token of a block (from 0) comes after place a + k, and is compared with what the target predicts there.

    Args:
        anchors: [b, n]. counted: after which places a token counts, [b, T] booleans. length: P, tokens of a block.
    """
    places = anchors[..., None] + torch.arange(length, device=anchors.device)
    inside, places = places < counted.shape[1], places.clamp_max(counted.shape[1] - 1)
    return places, inside & counted.gather(1, places.flatten(1)).view_as(inside)


def dpace_weights(probabilities: Tensor, counted: Tensor, alpha: float) -> Tensor:
    """Return each token's weight by D-PACE (arXiv 2605.18810), [..., P]: Σ_{j≥k} Π_{i≤j} s_i, s = (1-α) q + α.

    It is the part of the expected accepted length that depends on token k.

    Args:
        probabilities: q of each token, [..., P]. counted: which tokens count, [..., P]; α: smooths q.
    """
    smoothed = torch.where(counted, (1 - alpha) * probabilities + alpha, 1.0)
    reached = smoothed.cumprod(-1) * counted
    return reached.flip(-1).cumsum(-1).flip(-1)


@dataclass
class BlockLoss:
    """Computes the objective over the tokens of blocks at drawn anchors, weighted by their place in the block.

    The target's distribution is restricted to the draftable tokens, as by ``state_network.FeatureLoss``. The loss is
    the weighted mean over all drafted tokens, times how many tokens of the text count.

    Attributes:
        objective: what is minimised. anchors: blocks of a text, at most. decay: a token weighs decay^(k-1).
        dpace: α of D-PACE, in place of ``decay``; None: not used.
        known: the target's states of the training text; None: it computes them.
    """

    objective: Objective
    anchors: int
    decay: float
    dpace: float | None = None
    known: KnownStates | None = None

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the weighted mean, times the tokens of the batch."""
        ids, weights = inputs["input_ids"], inputs["weights"]
        texts = read_texts(model, ids, inputs["attention_mask"], weights, continuation_mask(inputs), known=self.known)
        ids, features, final, (weights, drafted) = texts.ids, texts.features, texts.final, texts.marks
        network: DFlash = unwrapped(model).network
        head, length = network.lm_head.weight, network.shape.length
        anchors, drawn = draw_anchors(drafted, self.anchors)
        states = network.drafts(features, ids, anchors)
        places, counted = predicted_places(anchors, weights > 0, length)
        counted = counted & drawn[..., None]
        text = ids.gather(1, places.flatten(1)).view_as(places)  # the token before each drafted one
        labels = network.draft_ids(F.pad(ids[:, 1:], (0, 1)).gather(1, places.flatten(1)).view_as(places))
        if self.objective.name == "ce":
            counted = counted & (labels >= 0)
        row = torch.arange(len(ids), device=ids.device)[:, None, None].expand_as(places)[counted]
        theirs, labels = final[row, places[counted]].to(head.dtype), labels[counted]
        mine = network.scored(states, text)[counted]
        share = self._weights(counted, network, mine, labels)
        ce = self.objective.name == "ce"
        factors = mine[:, head.shape[1] :]
        mean = chunked_loss(
            mine[:, : head.shape[1]],
            head,
            labels if ce else theirs,
            None if ce else head,
            self.objective.name,
            share,
            settings=self.objective.settings,
            addend=(factors, network.markov_head.markov_w2.weight) if network.shape.markov_rank else None,
        )
        if network.shape.confidence:
            right = overlaps(mine.detach(), network.score_weight.detach(), theirs, head)
            odds = network.confidence_head(confidence_inputs(network, mine, text[counted]))
            decayed = self._decayed(counted)
            error = F.binary_cross_entropy_with_logits(odds.float(), right, reduction="none")
            mean = mean + (decayed * error).sum() / decayed.sum().clamp_min(1e-8)
        return mean * (weights > 0).sum()

    def _decayed(self, counted: Tensor) -> Tensor:
        """Return decay^(k-1) of each token that counts, [T]."""
        places = torch.arange(counted.shape[-1], device=counted.device)
        return (self.decay**places).expand(counted.shape)[counted]

    def _weights(self, counted: Tensor, network: DFlash, mine: Tensor, labels: Tensor) -> Tensor:
        """Return the weight of each token that counts, [T], ``counted`` [b, n, P] saying which these are."""
        if self.dpace is None:
            return self._decayed(counted)
        known = token_probabilities(mine.detach(), network.score_weight.detach(), labels)
        probabilities = torch.ones(counted.shape, device=mine.device).masked_scatter(counted, known)
        return dpace_weights(probabilities, counted, self.dpace)[counted]


def confidence_inputs(network: DFlash, scored: Tensor, before: Tensor) -> Tensor:
    """Return [h; w] of tokens, [T, H + r], from ``DFlash.scored`` of them [T, H or H + r] and the tokens before [T]."""
    states = scored[:, : network.shape.hidden_size]
    return torch.cat((states, network.markov_head.markov_w1(before)), -1) if network.shape.markov_rank else states


@torch.no_grad()
def overlaps(mine: Tensor, weight: Tensor, theirs: Tensor, head: Tensor) -> Tensor:
    """Return Σ min(p, q) of each token, [T], p restricted to the drafted tokens.

    Args:
        mine: [T, H + r], with ``weight`` [V_d, H + r] of q. theirs: [T, H], with ``head`` [V_d, H] of p.
    """
    parts = zip(mine.split(256), theirs.split(256), strict=True)
    pairs = ((logits_of(b, head).float().softmax(-1), logits_of(a, weight).float().softmax(-1)) for a, b in parts)
    return torch.cat([acceptance_rate(p, q).clamp(0, 1) for p, q in pairs])


@torch.no_grad()
def token_probabilities(states: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Return the probability of each token, [T]: states [T, H] and a head [V_d, H]; 0 for a label below 0."""
    found = []
    for part, each in zip(states.split(256), labels.split(256), strict=True):
        q = logits_of(part, head).float().softmax(-1)
        found.append(q.gather(-1, each.clamp_min(0)[:, None])[:, 0] * (each >= 0))
    return torch.cat(found)


_MEASURED = 16  # blocks of each held-out text


@torch.no_grad()
def held_out_blocks(
    model: TargetWithNetwork, data: Dataset, batch_size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yield, for a few texts, blocks at anchors spread over each.

    Args:
        model: target and network. data: rows as ``text.make_dataset`` makes them. batch_size: rows read together.

    Yields:
        Row numbers [b], token ids [b, T], the states that the target's LM head reads [b, T, H], ``DFlash.scored`` of
        the blocks [b, n, P, H or H + r], and ``predicted_places``.
    """
    network = model.network
    assert isinstance(network, DFlash)
    for rows, drafted, ids, mask in batches(data, batch_size, head_weight(model).device):
        texts = read_texts(model, ids, mask, drafted)
        ids, features, final, (drafted,) = texts.ids, texts.features, texts.final, texts.marks
        count = drafted.sum(1, keepdim=True)  # of consecutive places
        n = max(1, min(_MEASURED, int(count.max())))
        apart = torch.arange(n, device=ids.device) * count // n
        anchors = drafted.int().argmax(1, keepdim=True) + apart
        once = F.pad(apart.diff(dim=1) > 0, (1, 0), value=True)  # a short text has fewer than n
        states = network.drafts(features, ids, anchors)
        places, counted = predicted_places(anchors, drafted, network.shape.length)
        before = ids.gather(1, places.flatten(1)).view_as(places)
        yield rows, ids, final, network.scored(states, before), places, counted & once[..., None]


@torch.no_grad()
def measure_blocks(model: TargetWithNetwork, data: Dataset, batch_size: int = 16) -> list[Acceptance]:
    """Return the acceptance of each token of a block by the target, reading the text as in training.

    Args:
        model: target and network. data: rows as ``text.make_dataset`` makes them. batch_size: rows read together.
    """
    network, head = model.network, head_weight(model)
    assert isinstance(network, DFlash)
    weight = network.score_weight
    sums = torch.zeros(network.shape.length, 4, len(data), dtype=torch.float64)
    for rows, _, final, states, places, counted in held_out_blocks(model, data, batch_size):
        for k in range(network.shape.length):
            text, block = counted[..., k].nonzero().unbind(1)
            theirs, mine = final[text, places[text, block, k]], states[text, block, k]
            add_rates(sums[k], rows[text.cpu()], theirs, mine, head, weight, network.tokens)
    return [Acceptance(*part) for part in sums]


@torch.no_grad()
def measure_block_ranks(model: TargetWithNetwork, data: Dataset, batch_size: int) -> RankRates:
    """Return how often the choice of each rank is the target's own greedy token, place by place in the block.

    Place k counts where the text has the target's own tokens up to it, and each of them was among the choices of its
    place: there a tree can reach it.

    Args:
        model: target and network. data: held-out rows as ``text.make_dataset`` makes them.
        batch_size: rows read together.
    """
    network, head = model.network, head_weight(model)
    assert isinstance(network, DFlash)
    weight, length = network.score_weight, network.shape.length
    right = torch.zeros(length, min(RANKS, len(weight)), dtype=torch.float64)
    tried = torch.zeros(length, dtype=torch.float64)
    for _, ids, final, states, places, counted in held_out_blocks(model, data, batch_size):
        own = greedy_tokens(final, head)
        alive = torch.ones_like(counted[..., 0])
        for k in range(length):
            alive = alive & counted[..., k]
            wanted = own.gather(1, places[..., k])
            hits = correct_choices(states[:, :, k][alive], weight, wanted[alive], network.tokens)
            right[k] += hits.sum(0).cpu().double()
            tried[k] += len(hits)
            alive = alive.masked_scatter(alive, hits.any(-1))
            alive = alive & (F.pad(ids[:, 1:], (0, 1)).gather(1, places[..., k]) == wanted)
    return RankRates.counted(right.tolist(), tried.tolist())


@torch.no_grad()
def measure_confidence(model: TargetWithNetwork, data: Dataset, batch_size: int) -> Reliability:
    """Return how right a confidence head is about the tokens of blocks.

    Args:
        model: target and network. data: held-out rows as ``text.make_dataset`` makes them.
        batch_size: rows read together.
    """
    network, head = model.network, head_weight(model)
    assert isinstance(network, DFlash)
    weight, found = network.score_weight, list[tuple[Tensor, ...]]()
    for _, ids, final, states, places, counted in held_out_blocks(model, data, batch_size):
        before = ids.gather(1, places.flatten(1)).view_as(places)[counted]
        rows = torch.arange(len(ids), device=ids.device)[:, None, None].expand_as(places)[counted]
        mine, theirs = states[counted], final[rows, places[counted]]
        odds = network.confidence_head(confidence_inputs(network, mine, before))
        for own, other, each in zip(mine.split(256), theirs.split(256), odds.split(256), strict=True):
            p, q = logits_of(other, head).float().softmax(-1), logits_of(own, weight).float().softmax(-1)
            if network.tokens is not None:
                q = torch.zeros_like(p).index_copy_(-1, network.tokens, q)
            found.append((each.float().sigmoid(), acceptance_rate(p, q), p.argmax(-1) == q.argmax(-1)))
    confidence, acceptance, agreement = (torch.cat(column).cpu() for column in zip(*found, strict=True))
    return reliability(confidence, acceptance, agreement)


class BlockStep(nn.Module):
    """Computes ``DFlash`` with a cache; see ``decoding.state_drafters.BlockNetwork``.

    The rows of a block run as a decoder's do (``decoding.flat``, compiled where it can be). The keys and values that
    all layers make of the target's states are one product.

    Args:
        network: trained; its weights must not change any more. pack: pack them for the CPU.
    """

    def __init__(self, network: DFlash, pack: bool = True):
        super().__init__()
        shape = network.shape
        self.features, self.vocab_size, self.ranks = network.features, network.vocab_size, network.ranks
        self.block_size, self.length, self.image_tokens = shape.block_size, shape.length, shape.image_tokens
        self._kv_heads, self._dim, self._eps = shape.kv_heads, shape.head_dim, shape.eps
        self._mask_token, self.tokens, self._rotary = shape.mask_token, network.tokens, RotaryTable(network.angles)
        self._hidden_norm = network.hidden_norm.weight.detach()
        layers = [layer for layer in network.layers if isinstance(layer, BlockLayer)]
        parts = [(it.self_attn, it.mlp, it.input_layernorm, it.post_attention_layernorm) for it in layers]
        self._rows, each = decoder_step(decoder_structure(network, parts), pack), [layer.self_attn for layer in layers]
        self.fc = stack_linears(network.fc)
        self.context = stack_linears(*(linear for one in each for linear in (one.k_proj, one.v_proj)))
        self._key_norms = torch.stack([one.k_norm.get_parameter("weight").detach() for one in each])[:, None]
        self.markov = deepcopy(network.markov_head) if shape.markov_rank else None
        self._confidence = deepcopy(network.confidence_head) if shape.confidence else None
        if pack:
            pack_linears(self)

    @property
    def device(self) -> torch.device:
        """The device on which it computes."""
        return self._rows.device

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache for so many sequences of so many tokens."""
        return self._rows.new_cache(batch, capacity)

    def read(self, cache: KVCache, features: Tensor, block: Block) -> None:
        """Store the keys and values of the target's states, [b, n, F]."""
        weight, kv = self._hidden_norm, self._kv_heads
        states = F.rms_norm(self.fc(features.to(weight.dtype)), weight.shape, weight, self._eps)
        x = self.context(states).unflatten(-1, (len(self._key_norms), 2 * kv, self._dim))  # [b, n, layers, 2 kv, D]
        keys = F.rms_norm(x[..., :kv, :], (self._dim,), eps=self._eps) * self._key_norms
        cos, sin = self._rotary.at(block.positions(self.device), cache.capacity, x.dtype)
        rotate(keys.flatten(2, 3), cos, sin)
        x[..., :kv, :] = keys
        for layer in range(len(self._key_norms)):
            cache.write(layer, x[:, :, layer].transpose(1, 2), block)

    def draft(self, cache: KVCache, last: Tensor, block: Block, count: int) -> Output:
        """Return logits and states of the next ``count`` tokens."""
        tokens = torch.full((len(last), block.n), self._mask_token, device=last.device)
        tokens[:, 0] = last
        rows, begin = WholeBlock(block.starts, block.n, block.rows), block.n - self.length
        with without_torch_function():
            hidden = self._rows.embed(tokens, rows)
            hidden, _ = self._rows.run_layers(cache, hidden, rows, range(self._rows.layers))
            return self._rows.output(hidden, [*range(begin, begin + count)])

    @property
    def sees_tokens(self) -> bool:
        """Whether a token's logits depend on the token drafted before it."""
        return self.markov is not None

    @property
    def acceptance(self) -> Callable[[Tensor], float] | None:
        """The confidence head, on a state of ``place``; None: there is none."""
        head = self._confidence
        return None if head is None else lambda state: float(head(state[None]).sigmoid())

    def place(self, output: Output, k: int, before: Tensor, memory: Tensor | None) -> tuple[Output, Tensor | None]:
        """Return the output of place k after each of n tokens ``before`` [b, n], and the memory of a Markov head."""
        if self.markov is None:
            return output_at(output, k), None
        states = output.hidden[:, k : k + 1].expand(-1, before.shape[1], -1).to(self._hidden_norm.dtype)
        factor, memory = self.markov.factor(before, states, memory)
        logits = output.logits[:, k : k + 1] + self.markov.markov_w2(factor)
        return Output(logits, torch.cat((states, self.markov.markov_w1(before)), -1)), memory


def write_dflash(network: DFlash, directory: Path, *, target: str, architecture: str) -> None:
    """Write a network into an existing directory in speculators' layout, and check the round trip.

    Neither embeddings nor a whole LM head are written: they are the target's.

    Args:
        target: reference of the model it drafts for, of class ``architecture``.

    Raises:
        PeftlabError: the files differ from the network.
    """
    tensors = tensors_of(network)
    write_tensors(directory / WEIGHTS, tensors, {"format": "pt"})
    drafted, dtype = len(network.lm_head.weight), network.fc.weight.dtype
    layout = speculators_layout(network.shape, drafted, dtype, target=target, architecture=architecture)
    write_json(directory / "config.json", layout)
    head = network.lm_head.weight if network.tokens is None else None
    check_written(tensors, tensors_of(read_dflash(directory, network.embedding, head)), directory)


def tensors_of(network: DFlash) -> dict[str, Tensor]:
    """Return the network's tensors, by speculators' names, as its file has them."""
    whole = network.tokens is None
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    return {name: t for name, t in tensors.items() if not (whole and name == _HEAD)} | token_maps(network)


_HEAD = "lm_head.weight"


def read_dflash(directory: str | Path, embedding: Tensor, head: Tensor | None = None) -> DFlash:
    """Return the network in a directory of either layout; every key is used exactly once.

    Embeddings, and the LM head of a network that drafts all tokens, may be in the file: they are the target's.

    Args:
        embedding: the target's, [V, H]. head: the target's, [V, H], of a network that drafts all tokens.

    Raises:
        PeftlabError: it is for another vocabulary or width, or a key is missing, unknown or of another shape.
    """
    directory = Path(directory)
    shape, drafted = read_block_shape(directory)
    check_embedding(shape, embedding, directory)
    tensors = read_block_tensors(directory)
    shared = {"embed_tokens.weight": embedding} | ({} if drafted < shape.vocab_size else {_HEAD: head})
    for name, theirs in shared.items():
        copy = tensors.pop(name, None)
        if copy is not None and theirs is not None and not torch.equal(theirs.to(copy.dtype), copy.to(theirs.device)):
            raise PeftlabError(f"{directory}: {name} is not the target's; a block draft reads the target's")
    tokens = _check_tensors(tensors, shape, drafted, directory)
    rows = tensors[_HEAD] if tokens is not None else head
    if rows is None:
        raise PeftlabError(f"{directory}: drafts all tokens, by the LM head of its target, which is not given")
    network = DFlash(shape, embedding, rows, tokens)
    network.load_state_dict({_HEAD: rows} | tensors, assign=True)
    network.lm_head.weight = nn.Parameter(rows, requires_grad=False)
    network.ranks = read_ranks(directory / IDENTITY_FILE)
    return network.eval()


def _check_tensors(tensors: dict[str, Tensor], shape: BlockShape, drafted: int, directory: Path) -> Tensor | None:
    """Return which tokens a stored network drafts, None for all; their maps are removed from its tensors.

    Args:
        tensors: of the file, but for what is the target's. shape, drafted: what its configuration says.

    Raises:
        PeftlabError: a tensor is missing, unknown or of another shape than the configuration says.
    """
    tokens = drafted_tokens(tensors, drafted, shape.vocab_size, directory)
    with torch.device("meta"):
        blank = DFlash(shape, torch.empty(0), torch.empty(drafted, shape.hidden_size)).state_dict()
    if tokens is None:
        del blank[_HEAD]
    check_shapes(blank, tensors, directory)
    return tokens


def textless_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> list[int]:
    """Return the ids that the tokenizer writes for no text, those that suit a mask best first.

    These are its mask token, the rows past its tokens, and special tokens, those that are numbered last first.

    Args:
        tokenizer: the target's. size: rows of the target's embeddings.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special and i < size}
    mask = tokenizer.mask_token_id
    named = [mask] if isinstance(mask, int) else []
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, *named}
    return [*named, *reversed(range(len(tokenizer), size)), *sorted(special - ends, reverse=True)]


class DflashKind(StateKind[DflashDraft]):
    """Layers that draft a block in one pass as a draft."""

    name = "dflash"

    def check(self, target: PretrainedConfig) -> None:
        """Refuse layers and tokens that the target does not have, a mask that is text, and another kind of draft."""
        config = target.get_text_config(decoder=True)
        features, count, mask = self.config.features, config.num_hidden_layers, self.config.mask_token
        if features is not None and features[-1] > count:
            raise PeftlabError(
                f"draft.features: no layer {features[-1]}; the target has 0 to {count - 1}, and {count} is the "
                "state that its LM head reads"
            )
        free = textless_tokens(self.tokenizer, config.vocab_size)
        if mask is not None and mask not in free:
            nearest = f"write {free[0]}, or leave it out" if free else "leave it out"
            reason = "is no token of the target" if mask >= config.vocab_size else "is text to the tokenizer"
            raise PeftlabError(f"draft.mask_token: {mask} {reason}; {nearest}")
        super().check(target)

    def new(self, target: PreTrainedModel) -> DFlash:
        """Return layers with random weights and the target's final norm; ``prepare`` chooses the mask."""
        config = self.config
        sizes = asdict(shape_for(target.config, None if config.features is None else tuple(config.features)))
        sizes |= {"window": config.window, "layers": config.layers, "block_size": config.block_size, "head_norms": True}
        sizes |= {"image_tokens": config.image_tokens}
        if (markov := config.markov) is not None:
            sizes |= {"from_anchor": True, "markov_rank": markov.rank, "markov_head": markov.head}
            sizes |= {"confidence": config.confidence}
        network = DFlash(BlockShape(**sizes), input_embedding(target), head_weight(target))
        structure = structure_of(target)
        if structure is not None and not structure.norm.centred:  # else the weights start at one
            network.norm.weight = nn.Parameter(structure.norm.weight.detach().clone())
        return network

    def start(self, place: str, target: PreTrainedModel) -> DFlash:
        """Return the stored layers, which must be those that the recipe asks for where it names sizes."""
        network = self.read(place, target)
        shape, config = network.shape, self.config
        stored = {"features": list(shape.features), "layers": shape.layers, "block_size": shape.block_size}
        stored |= {"window": shape.window, "mask_token": shape.mask_token, "confidence": shape.confidence}
        stored |= {"image_tokens": shape.image_tokens}
        trained = Markov(rank=shape.markov_rank, head=shape.markov_head) if shape.markov_rank else None
        if config.markov not in (None, trained):
            kind = f"rank {shape.markov_rank}, {shape.markov_head}" if shape.markov_rank else "none"
            raise PeftlabError(f"draft.markov: {config.from_} was trained with {kind}; leave it out")
        for key, value in stored.items():
            wanted = getattr(config, key)
            if key in config.model_fields_set and wanted is not None and wanted != value:
                raise PeftlabError(f"draft.{key}: {wanted}, but {config.from_} was trained with {value}")
        return network

    def prepare(self, train: Dataset) -> None:
        """Choose the mask of new layers; store states and reduce the vocabulary as ``StateKind`` does."""
        network = self.model.network
        assert isinstance(network, DFlash)
        if self.config.from_ is None:
            network.shape = replace(network.shape, mask_token=self._mask_token(train))
        super().prepare(train)

    def _mask_token(self, train: Dataset) -> int:
        if self.config.mask_token is not None:
            return self.config.mask_token
        size = len(input_embedding(self.target))
        used = {token for text in train["input_ids"] for token in text}
        free = next((token for token in textless_tokens(self.tokenizer, size) if token not in used), None)
        return unused_token(size, train["input_ids"]) if free is None else free

    @classmethod
    def read(cls, place: str | Path, target: PreTrainedModel) -> DFlash:
        """Return the layers in a directory."""
        return read_dflash(place, input_embedding(target), head_weight(target))

    def write(self, directory: Path, *, architecture: str, tokens: int) -> None:
        """Write the layers, see ``write_dflash``."""
        network = self.model.network
        assert isinstance(network, DFlash)
        write_dflash(network, directory, target=self.recipe.target, architecture=architecture)

    @classmethod
    def step(cls, network: StateNetwork, pack: bool = True) -> BlockStep:
        """Return the layers as a handful of products."""
        assert isinstance(network, DFlash)
        return BlockStep(network, pack)

    def loss(self) -> Loss:
        """Return the weighted loss over blocks at drawn anchors."""
        config = self.config
        return BlockLoss(make_objective(self.recipe.objective), config.anchors, config.decay, config.dpace, self.known)

    def score(self, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
        """Return the mean acceptance over the tokens of a block, and each token's own."""
        assert isinstance(model, TargetWithNetwork)
        return rates_by_depth(measure_blocks(model, data, batch_size))

    def calibrate(self, held_out: Dataset, batch_size: int) -> None:
        """Measure on held-out text how often each choice of each place is right, and store the rates."""
        write_ranks(self.stored / IDENTITY_FILE, measure_block_ranks(self.model, held_out, batch_size))

    def reliability(self, held_out: Dataset, batch_size: int) -> Reliability | None:
        """Return how right the confidence head is on held-out text; None: there is none."""
        network = self.model.network
        assert isinstance(network, DFlash)
        return measure_confidence(self.model, held_out, batch_size) if network.shape.confidence else None

    @classmethod
    def export(cls, place: str, consumer: str) -> Path | DraftExporter:
        """Return what writes the draft for vLLM, SGLang, speculators or llama.cpp."""
        if consumer not in CONSUMERS:
            known = ", ".join(CONSUMERS)
            raise PeftlabError(f"--for {consumer}: {place} is a dflash draft, which is written for {known}")
        shape, drafted = read_block_shape(Path(place))
        tensors = read_block_tensors(Path(place))
        shared = {"embed_tokens.weight"} | ({_HEAD} if drafted == shape.vocab_size else set())
        own = {name: tensor for name, tensor in tensors.items() if name not in shared}
        _check_tensors(own, shape, drafted, Path(place))
        return BlockExport(Path(place), consumer)
