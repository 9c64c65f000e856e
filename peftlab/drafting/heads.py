"""Heads on the target's last hidden state: Medusa, Hydra and the Markov bias."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.decoding.packed import pack_linears
from peftlab.decoding.state_drafters import HeadsDrafter, grown_tokens, tree_tokens
from peftlab.decoding.theory import Path as TreePath
from peftlab.decoding.theory import RankRates
from peftlab.drafting.acceptance import (
    RANKS,
    Acceptance,
    add_rates,
    batches,
    correct_choices,
    greedy_tokens,
    rates_by_depth,
    read_ranks,
    reduce_heads,
    response_tokens,
    write_ranks,
)
from peftlab.drafting.base import DraftExporter, DraftKind, Loss, Pair, SavedDraft, ServedDraft, TargetLoader
from peftlab.drafting.config import HeadsConfig, HydraDraft, MedusaDraft
from peftlab.drafting.objectives import Objective, chunked_loss, following, make_objective
from peftlab.drafting.target import frozen_hidden, head_weight, input_embedding, last_hidden, unwrapped
from peftlab.drafting.text import continuation_mask
from peftlab.errors import PeftlabError
from peftlab.files import Json, read_object, staged_directory, typed_value, write_json
from peftlab.methods.base import trainable_dtype
from peftlab.methods.config import MethodConfig
from peftlab.methods.inject import disabled, is_injected, plan_injection
from peftlab.models.load import eval_mode


class HeadStack(nn.Module):
    """K heads; head i (from 0) predicts token t+2+i from the state at t: a block, and W2 [V, H] on its output.

    Parameters are ``blocks.i...`` and ``lm_heads.i.weight``; where W2 is shared, ``lm_heads.0.weight`` is the only one.

    Args:
        lm_head: the target's LM head [V, H], with which each W2 starts.
        blocks: of each head.
        shared: all heads have one W2, ``lm_head`` itself, which must be a parameter, and not a copy: multi-token
            prediction's shared unembedding (Gloeckle et al. 2024, arXiv 2404.19737). Whether it trains is left
            to its owner.

    Attributes:
        ranks: how often each head's choices are right, as measured; None: not measured.
    """

    def __init__(self, lm_head: Tensor, blocks: Sequence[nn.Module], shared: bool):
        super().__init__()
        self.ranks: RankRates | None = None
        vocab_size, hidden_size = lm_head.shape
        self.blocks = nn.ModuleList(blocks)
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden_size, vocab_size, bias=False, device="meta") for _ in range(1 if shared else len(blocks))
        )
        for head in self.lm_heads:
            head.weight = lm_head if shared else nn.Parameter(lm_head.detach().clone())

    def __iter__(self) -> Iterator[tuple[nn.Module, Tensor]]:
        """Yield each head's block and W2 [V, H]."""
        weights = [head.get_parameter("weight") for head in self.lm_heads]
        return zip(self.blocks, cycle(weights), strict=False)

    @property
    def vocab_size(self) -> int:
        """V, the number of rows of each W2."""
        return self.lm_heads[0].get_parameter("weight").shape[0]

    @property
    def depth(self) -> int:
        """K, the number of heads."""
        return len(self.blocks)

    def states(self, head: int, hidden: Tensor, before: Tensor) -> Tensor:
        """Return what a head's W2 reads, [..., H].

        Args:
            hidden: [..., H], the states that the target's LM head reads.
            before: [..., head + 1], the tokens between these and those that are predicted.
        """
        raise NotImplementedError

    def addend(self, before: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the factors [T, r] and [V, r] of a head's bias after these tokens; None: the head has no bias."""
        return None

    def product(self, head: int, hidden: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [T, F] and weights [V, F] whose product is a head's logits.

        Args:
            head, hidden, before: as for ``states``.
        """
        features, weight, addend = self.states(head, hidden, before), [*self][head][1], self.addend(before)
        if addend is None:
            return features, weight
        return torch.cat((features, addend[0]), -1), torch.cat((weight, addend[1]), -1)

    def tokens(self, hidden: Tensor, last: Tensor, tree: Sequence[TreePath], ids: Tensor | None = None) -> Tensor:
        """Return the tokens of a tree, [b, N]; see ``decoding.state_drafters.Heads.tokens``.

        Args:
            ids: the token of each row of W2, [V]; None: its own number.
        """
        raise NotImplementedError


def to_parameter_dtype(block: nn.Module, states: Tensor) -> Tensor:
    """Return states in the dtype of a block's parameters: blocks on a 16-bit target train in fp32.

    Args:
        block: of a head. states: [..., H].
    """
    dtype = next((parameter.dtype for parameter in block.parameters()), states.dtype)
    return states.to(dtype)


class HeadedModel(nn.Module):
    """A language model and the heads on its last hidden state, as they train together.

    The forward pass is the language model's own; the loss applies the heads to the hidden states.
    """

    def __init__(self, trunk: PreTrainedModel, heads: HeadStack):
        super().__init__()
        self.trunk, self.heads = trunk, heads

    def forward(self, **inputs: object) -> ModelOutput:
        """Return what the language model returns."""
        return self.trunk(**inputs)

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the language model's LM head."""
        return self.trunk.get_output_embeddings()


class ReducedHeads(nn.Module):
    """Heads over part of the vocabulary, which draft no other token.

    Args:
        heads: with ``len(tokens)`` rows a head. tokens: their ids, [V_d]. vocab_size: V.
    """

    def __init__(self, heads: HeadStack, tokens: Tensor, vocab_size: int):
        super().__init__()
        self.heads, self.vocab_size = heads, vocab_size
        self.kept: Tensor
        self.register_buffer("kept", tokens, persistent=False)

    @property
    def depth(self) -> int:
        """K, the number of heads."""
        return self.heads.depth

    @property
    def ranks(self) -> RankRates | None:
        """The measured rates at which each head's choices are right; None: not measured."""
        return self.heads.ranks

    def tokens(self, hidden: Tensor, last: Tensor, tree: Sequence[TreePath]) -> Tensor:
        """Return the tokens of a tree, [b, N]; see ``decoding.state_drafters.Heads.tokens``.

        Args:
            hidden: states at the last tokens, [b, H]. last: these tokens, [b]. tree: paths of its nodes.
        """
        return self.heads.tokens(hidden, last, tree, self.kept)


class MedusaBlock(nn.Module):
    """Maps h to h + SiLU(W1 h), [..., H] -> [..., H]."""

    def __init__(self, hidden_size: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden_size, hidden_size, bias=bias)])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class MarkovBias(nn.Module):
    """Returns W2 W1[x], a bias of rank r by the token x before on the next one's logits, [...] -> [..., V].

    Successive heads draft without knowing what the head before has chosen; this tells them (DSpark's Markov head). W2
    starts at 0.

    Args:
        vocabulary: tokens x. rows: V, the tokens that are drafted. rank: r.
    """

    def __init__(self, vocabulary: int, rows: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, rows, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, before: Tensor) -> Tensor:
        return self.markov_w2(self.markov_w1(before))


class MedusaHeads(HeadStack):
    """K heads; head i (from 0) predicts position t+2+i: softmax(W2(SiLU(W1 h) + h)), h the state at t.

    Medusa (Cai et al. 2024, arXiv 2401.10774). Parameters are named as in the files of heads:
    ``blocks.i.layers.0.weight`` (and ``.bias``), ``lm_heads.i.weight``.

    Args:
        lm_head, shared: see ``HeadStack``. W1 starts at 0, so that an untrained head repeats the target's own
            next-token distribution.
        heads: K.
        bias: whether W1 has a bias.
        markov: rank of a ``MarkovBias``, one for all heads, whose parameters are ``markov_head.markov_w1.weight`` and
            ``markov_head.markov_w2.weight``; None: no bias.
        vocabulary: tokens of the text, where ``lm_head`` has fewer rows; None: V.
    """

    def __init__(
        self,
        lm_head: Tensor,
        heads: int,
        bias: bool = False,
        shared: bool = False,
        markov: int | None = None,
        vocabulary: int | None = None,
    ):
        vocab_size, hidden_size = lm_head.shape
        super().__init__(lm_head, [MedusaBlock(hidden_size, bias) for _ in range(heads)], shared)
        for block in self.blocks:
            for parameter in block.parameters():
                nn.init.zeros_(parameter)
        self.markov_head = MarkovBias(vocabulary or vocab_size, vocab_size, markov) if markov is not None else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of every head without the Markov bias: [..., H] -> [K, ..., V]."""
        if len(self.lm_heads) == 1:  # one product reads a shared W2 once, not K times
            return self.lm_heads[0](torch.stack([block(hidden) for block in self.blocks]))
        return torch.stack([head(block(hidden)) for block, head in zip(self.blocks, self.lm_heads, strict=True)])

    def states(self, head: int, hidden: Tensor, before: Tensor) -> Tensor:
        """Return what a head's W2 reads, as in ``HeadStack``; the tokens before are not read."""
        return self.blocks[head](to_parameter_dtype(self.blocks[head], hidden))

    def addend(self, before: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the factors of the Markov bias after the last of these tokens; None for heads without one."""
        markov = self.markov_head
        return None if markov is None else (markov.markov_w1(before[:, -1]), markov.markov_w2.weight)

    def tokens(self, hidden: Tensor, last: Tensor, tree: Sequence[TreePath], ids: Tensor | None = None) -> Tensor:
        """Return the tokens of a tree, as in ``HeadStack``."""
        return tree_tokens(self(hidden), last, tree, self.markov_head, ids)


class HydraBlock(nn.Module):
    """Maps x, a state [H] and embeddings [W] behind it, to R x + SiLU(A x), [..., H + W] -> [..., H].

    R starts as the map to the state, and A at 0: an untrained block returns the state, as an untrained Medusa block.
    """

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.residual = nn.Linear(hidden_size + width, hidden_size, bias=False)
        self.layers = nn.ModuleList([nn.Linear(hidden_size + width, hidden_size, bias=False)])
        nn.init.eye_(self.residual.weight)
        nn.init.zeros_(self.layers[0].get_parameter("weight"))

    def forward(self, both: Tensor) -> Tensor:
        hidden = self.residual(both)
        for layer in self.layers:
            hidden = hidden + F.silu(layer(both))
        return hidden


class HydraHeads(HeadStack):
    """K heads; head i (from 0) predicts token t+2+i from x = [h_t; E(x_{t+1}); ...; E(x_{t+1+i})]: W2(R x + SiLU(A x)).

    Hydra (Ankner et al. 2024, arXiv 2402.05109). Parameters are ``blocks.i.residual.weight``,
    ``blocks.i.layers.0.weight`` and ``lm_heads.i.weight``; the embeddings are the target's and no parameter.

    Args:
        lm_head, shared: see ``HeadStack``. heads: K.
        embedding: the target's, [V, D]; it is not copied.
    """

    def __init__(self, lm_head: Tensor, heads: int, embedding: Tensor, shared: bool = False):
        width, wide = lm_head.shape[1], embedding.shape[1]
        super().__init__(lm_head, [HydraBlock(width, (i + 1) * wide) for i in range(heads)], shared)
        self.embedding: Tensor
        self.register_buffer("embedding", embedding.detach(), persistent=False)

    def states(self, head: int, hidden: Tensor, before: Tensor) -> Tensor:
        """Return what a head's W2 reads, as in ``HeadStack``: the state and the embeddings of the tokens before."""
        embedded = F.embedding(before, self.embedding).flatten(-2).to(hidden.dtype)
        return self.blocks[head](to_parameter_dtype(self.blocks[head], torch.cat((hidden, embedded), -1)))

    def tokens(self, hidden: Tensor, last: Tensor, tree: Sequence[TreePath], ids: Tensor | None = None) -> Tensor:
        """Return the tokens of a tree, as in ``HeadStack``; children of a node follow from the tokens on its path."""

        def following(level: int, before: Tensor) -> Tensor:
            every = hidden[:, None].expand(-1, before.shape[1], -1)
            return self.lm_heads[level % len(self.lm_heads)](self.states(level, every, before))

        return grown_tokens(following, last, tree, ids)


@dataclass
class HeadsLoss:
    """Computes the loss of heads, Σ_i decay^i · D(p at t+1+i ‖ head i at t), one head's logits at a time.

    ``chunked_loss`` takes each head's gradient to its states before the next head's logits are made; the
    trunk's backward pass runs once, with the heads' sum.

    Head i reads the state at t, and where it reads tokens the text's t+1 to t+1+i, and predicts token t+2+i. The target
    of its objective is what the frozen base model predicts at t+1+i, or for ``ce`` the token itself. With a trained
    trunk (Medusa-2) ``preserve``·KL(base's next-token distribution ‖ the trunk's) keeps the model what it was.

    Attributes:
        objective: what each head minimises. decay: λ of the weights λ^i.
        preserve: weight of the KL of a trunk that has a method injected.
    """

    objective: Objective
    decay: float = 0.8
    preserve: float = 5.0

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the sum over tokens and heads."""
        ids, mask, weights = inputs["input_ids"], inputs["attention_mask"], inputs["weights"]
        headed = unwrapped(model)
        base_weight, trained = head_weight(headed).detach(), is_injected(headed.trunk)
        if trained:
            hidden = last_hidden(model, ids, mask)
            with disabled(headed.trunk):
                base = frozen_hidden(headed.trunk, ids, mask)
        else:
            # The heads alone train: no graph goes into the trunk, which is read as it will decode. The gradient mode
            # stays on, because DDP prepares to gather gradients only then.
            with eval_mode(model):
                hidden = base = last_hidden(model, ids, mask).detach()
        total, drafted = hidden.new_zeros(()), continuation_mask(inputs)
        n = ids.shape[1]
        for i, (_, weight) in enumerate(headed.heads):
            ahead = i + 1
            if n - ahead < 2:
                continue
            # Place t counts if its prediction, that of place t+1+i, does and the prompt has been read.
            places = drafted[:, : n - ahead] & (weights[:, ahead:] > 0)  # [b, n - ahead]
            if not places.any():
                continue
            before = known_tokens(ids, ahead)[places]
            states = headed.heads.states(i, hidden[:, : n - ahead][places], before)
            if self.objective.name == "ce":
                target, target_head = following(ids)[:, ahead:][places], None
            else:
                target, target_head = base[:, ahead:][places], base_weight
            mean = chunked_loss(
                states,
                weight,
                target,
                target_head,
                self.objective.name,
                settings=self.objective.settings,
                addend=headed.heads.addend(before),
            )
            # ``chunked_loss`` is a mean: times the places it is a sum, as the caller divides by the tokens of all.
            total = total + self.decay**i * mean * len(states)
        if not total.requires_grad:  # every continuation is too short to look ahead: nothing to learn, but a graph
            total = total + 0 * sum(p.sum() for p in headed.heads.parameters())
        if trained:
            places = weights > 0
            kept = chunked_loss(hidden[places], base_weight, base[places], base_weight, "kl")
            total = total + self.preserve * kept * places.sum()
        return total


def known_tokens(ids: Tensor, ahead: int) -> Tensor:
    """Return the ``ahead`` tokens after each place that has so many, [b, n - ahead, ahead].

    Args:
        ids: texts, [b, n]. ahead: how many tokens.
    """
    return ids[:, 1:].unfold(1, ahead, 1)


@torch.no_grad()
def measure_heads(model: HeadedModel, data: Dataset, batch_size: int = 16) -> tuple[list[Acceptance], Acceptance]:
    """Return the acceptance of each head by the base model, and of the model as trained by the base model.

    Head i's prediction at place t, of token t+2+i, is compared with the base model's at t+1+i; examples too
    short for a head have no predictions of it. The second is exactly 1 everywhere with a frozen trunk; with a
    trained one it measures how much of the model is preserved: the tokens of a collapsed trunk are easy to predict.

    Args:
        model: the language model and its heads. data: rows as ``text.make_dataset`` makes them.
        batch_size: rows read together.
    """
    head, count = head_weight(model), model.heads.depth
    sums = torch.zeros(count + 1, 4, len(data), dtype=torch.float64)
    for rows, places, ids, mask in batches(data, batch_size, head.device):
        hidden = frozen_hidden(model, ids, mask)
        base = hidden
        if is_injected(model.trunk):
            with disabled(model.trunk):
                base = frozen_hidden(model, ids, mask)
        for i in range(min(count, ids.shape[1] - 1)):
            both = places[:, : -(i + 1)] & places[:, i + 1 :]
            late = base[:, i + 1 :][both]
            early, weight = model.heads.product(i, hidden[:, : -(i + 1)][both], known_tokens(ids, i + 1)[both])
            add_rates(sums[i], rows[both.nonzero()[:, 0].cpu()], late, early, head, weight)
        kept = rows[places.nonzero()[:, 0].cpu()]
        add_rates(sums[-1], kept, base[places], hidden[places], head, head)
    *heads, trunk = (Acceptance(*part) for part in sums)
    return heads, trunk


@torch.no_grad()
def measure_ranks(model: HeadedModel, heads: HeadStack | ReducedHeads, data: Dataset, batch_size: int) -> RankRates:
    """Return how often the choice of each rank is the model's own greedy token, head by head.

    Head i counts at a place where the right tokens of all earlier heads were among their choices and are the text's
    own: there a tree can reach it. Heads that read tokens read the text's.

    Args:
        model: the target as served. heads: on it, as they draft.
        data: held-out rows as ``text.make_dataset`` makes them.
    """
    inner = heads.heads if isinstance(heads, ReducedHeads) else heads
    width = min(RANKS, len(inner.lm_heads[0].get_parameter("weight")))
    right, tried = torch.zeros(inner.depth, width, dtype=torch.float64), torch.zeros(inner.depth, dtype=torch.float64)
    head = head_weight(model)
    for _, places, ids, mask in batches(data, batch_size, head.device):
        hidden = frozen_hidden(model, ids, mask)
        own = greedy_tokens(hidden, head)
        alive = places[:, :-1]
        for i in range(inner.depth):
            n = ids.shape[1] - i - 1
            if n < 1:
                break
            # The token before is known, or it is what the head before had to find.
            alive = alive[:, :n] & places[:, i + 1 :]
            if i:  # the text's tokens, which heads read, must be the model's own
                alive = alive & (ids[:, i + 1 :] == own[:, i : i + n])
            hits = _correct_choices(
                heads, i, hidden[:, :n][alive], known_tokens(ids, i + 1)[alive], own[:, i + 1 :][alive]
            )
            right[i] += hits.sum(0).cpu().double()
            tried[i] += len(hits)
            alive = alive.masked_scatter(alive, hits.any(-1))  # a tree goes on only below a right choice
    return RankRates.counted(right.tolist(), tried.tolist())


def _correct_choices(heads: HeadStack | ReducedHeads, i: int, hidden: Tensor, before: Tensor, right: Tensor) -> Tensor:
    """Return which of a head's best choices are right: [T, H], [T, i + 1], [T] -> booleans [T, ranks]."""
    inner, ids = (heads.heads, heads.kept) if isinstance(heads, ReducedHeads) else (heads, None)
    features, weight = inner.product(i, hidden.to(next(heads.parameters()).dtype), before)
    return correct_choices(features, weight, right, ids)


_SIZES = ("truncated_vocab_size", "hidden_size", "num_heads", "vocab_size")

Read = Callable[[Path], HeadStack | ReducedHeads]

Make = Callable[[dict[str, Json], Tensor, int, bool, int], HeadStack]
"""(configuration, blank W2 [V_d, H], K, whether W2 is shared, V) -> heads of these sizes."""


def write_medusa(heads: HeadStack, out: Path, *, tokens: Tensor | None = None, overwrite: bool = False) -> Path:
    """Write Medusa heads as ``write_heads`` does.

    A Markov bias is ``markov_head.markov_w1.weight`` [V, r] and ``markov_head.markov_w2.weight`` [V_d, r], with
    ``markov_rank`` in the configuration.

    Args:
        heads: a ``MedusaHeads``. out, tokens, overwrite: as for ``write_heads``.
    """
    assert isinstance(heads, MedusaHeads)
    config: dict[str, Json] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_fc_bias": any(name.endswith(".bias") for name in heads.state_dict()),
        "markov_rank": None if heads.markov_head is None else heads.markov_head.markov_w1.embedding_dim,
    }
    return write_heads(heads, config, out, read_medusa, tokens=tokens, overwrite=overwrite)


def write_heads(
    heads: HeadStack,
    config: dict[str, Json],
    out: Path,
    read: Read,
    *,
    tokens: Tensor | None = None,
    overwrite: bool = False,
) -> Path:
    """Write heads, and check the round trip key for key.

    Keys are those of the heads' parameters; for a reduced vocabulary also ``token_map``, with ``truncated_vocab_size``
    in the configuration. A shared W2 is written once, with ``original_lm_head`` in the configuration.

    Args:
        config: what their configuration has beside sizes. read: reads the directory back.
        tokens: ids of the reduced vocabulary, [V_d]; None for all.

    Raises:
        PeftlabError: the files differ from the heads.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    vocab_size, hidden_size = tensors["lm_heads.0.weight"].shape
    if tokens is not None and len(tokens) < vocab_size:
        tensors = reduce_heads(tensors, tokens)
    sizes: dict[str, Json] = {
        "num_heads": heads.depth,
        "num_hidden_layers": 1,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": len(tensors["lm_heads.0.weight"]),
        "original_lm_head": len(heads.lm_heads) < heads.depth,
    }
    with staged_directory(out, "model", overwrite=overwrite) as staging:
        write_tensors(staging / "model.safetensors", tensors, {"format": "pt"})
        write_json(staging / "config.json", config | sizes)
        read(staging)
        back, _ = read_tensors(staging / "model.safetensors")
        if any(not torch.equal(tensor, back[name]) for name, tensor in tensors.items()):
            raise PeftlabError(f"{out}: what was written is not what was trained; nothing was left behind")
    return out


def read_medusa(directory: str | Path) -> HeadStack | ReducedHeads:
    """Return the heads in a directory that ``write_medusa`` wrote; see ``read_heads``."""
    file = Path(directory) / "config.json"

    def make(config: dict[str, Json], blank: Tensor, count: int, shared: bool, vocabulary: int) -> HeadStack:
        rank = None if config.get("markov_rank") is None else typed_value(config, "markov_rank", int, file)
        if rank is not None and not 1 <= rank < 2**31:
            raise PeftlabError(f"{file}: markov_rank is {rank}, not that of the heads beside it")
        return MedusaHeads(blank, count, bool(config.get("medusa_fc_bias", False)), shared, rank, vocabulary)

    return read_heads(directory, "medusa", make)


def read_heads(directory: str | Path, model_type: str, make: Make) -> HeadStack | ReducedHeads:
    """Return the heads in a directory; every key is used exactly once.

    Args:
        directory: of the heads. model_type: that the configuration must name. make: see Make.

    Raises:
        PeftlabError: the configuration is of another type, or a key is missing or unknown.
    """
    directory = Path(directory)
    file = directory / "config.json"
    config = read_object(file)
    if config.get("model_type") != model_type:
        raise PeftlabError(f"{directory}: model_type is {config.get('model_type')!r}, not {model_type}")
    tensors, _ = read_tensors(directory / "model.safetensors")
    rows, width, count, vocabulary = (typed_value(config, key, int, file) for key in _SIZES)
    if min(rows, width) < 1 or max(rows, width) >= 2**31 or not 1 <= count <= len(tensors):
        raise PeftlabError(f"{file}: {', '.join(_SIZES[:3])} are not those of the heads beside it")
    with torch.device("meta"):
        blank = nn.Parameter(torch.empty(rows, width))
        heads = make(config, blank, count, bool(config.get("original_lm_head", False)), vocabulary)
    reduced = rows < vocabulary
    expected = set(heads.state_dict()) | ({"token_map"} if reduced else set())
    if expected != set(tensors):
        odd = sorted(expected ^ set(tensors))
        raise PeftlabError(f"{directory}: keys that do not fit its configuration: {', '.join(odd[:5])}")
    tokens = tensors.pop("token_map", None)
    for name, parameter in heads.state_dict().items():
        if tensors[name].shape != parameter.shape:
            shapes = f"{tuple(tensors[name].shape)}, its configuration says {tuple(parameter.shape)}"
            raise PeftlabError(f"{directory}: {name} has shape {shapes}")
    heads.load_state_dict(tensors, assign=True)
    heads.ranks = read_ranks(file)
    return heads.eval() if tokens is None else ReducedHeads(heads, tokens, vocabulary).eval()


def check_heads(directory: str | Path, target: PreTrainedModel) -> None:
    """Raise ``PeftlabError`` for heads of another vocabulary or width than the target's.

    Args:
        directory: of the heads. target: the model that they are to draft for.
    """
    config, (rows, width) = read_object(Path(directory) / "config.json"), head_weight(target).shape
    tokens, states = config.get("vocab_size"), config.get("hidden_size")
    if (tokens, states) != (rows, width):
        raise PeftlabError(
            f"{directory}: heads for states of {states} and {tokens} tokens, but the target has {width} and {rows}"
        )


def write_hydra(heads: HydraHeads, out: Path, *, tokens: Tensor | None = None, overwrite: bool = False) -> Path:
    """Write Hydra heads as ``write_heads`` does, without the target's embeddings.

    Args:
        heads: a ``HydraHeads``. out, tokens, overwrite: as for ``write_heads``.
    """
    config: dict[str, Json] = {
        "architectures": ["HydraModel"],
        "model_type": "hydra",
        "embedding_size": heads.embedding.shape[1],
    }
    return write_heads(
        heads, config, out, lambda place: read_hydra(place, heads.embedding), tokens=tokens, overwrite=overwrite
    )


def read_hydra(directory: str | Path, embedding: Tensor) -> HeadStack | ReducedHeads:
    """Return the heads in a directory; see ``read_heads``.

    Args:
        embedding: the target's, [V, D].

    Raises:
        PeftlabError: they read embeddings of another width or vocabulary.
    """

    def make(config: dict[str, Json], blank: Tensor, count: int, shared: bool, vocabulary: int) -> HydraHeads:
        stored = (vocabulary, config.get("embedding_size"))
        if stored != tuple(embedding.shape):
            raise PeftlabError(
                f"{directory}: heads that read embeddings of {stored[0]} tokens and width {stored[1]}, but the target "
                f"has {embedding.shape[0]} of {embedding.shape[1]}"
            )
        return HydraHeads(blank, count, embedding, shared)

    return read_heads(directory, "hydra", make)


HeadsT = TypeVar("HeadsT", bound=HeadsConfig)


class HeadsKind(DraftKind[HeadsT]):
    """Heads on the target's last hidden state, trained with the target frozen or with a method in it.

    A kind says what new heads are (``new``), how they are written (``write``) and read (``read``), and their ``title``
    for messages.
    """

    title: ClassVar[str]
    own_modules = True
    model: HeadedModel

    @classmethod
    @abstractmethod
    def new(cls, rows: Tensor, target: PreTrainedModel, config: HeadsT) -> HeadStack:
        """Return untrained heads whose W2 starts with ``rows`` [V, H], or is it.

        Args:
            rows: the LM head, in the dtype in which W2 trains. target: the model. config: the recipe's section.
        """

    @classmethod
    @abstractmethod
    def read(cls, place: str | Path, target: PreTrainedModel) -> HeadStack | ReducedHeads:
        """Return the heads in a directory.

        Args:
            place: the directory. target: whose embeddings some heads read.
        """

    @classmethod
    @abstractmethod
    def write(cls, heads: HeadStack, out: Path, tokens: Tensor | None) -> None:
        """Write heads into a directory.

        Args:
            heads: trained heads. out: the directory, replaced.
            tokens: whose rows of W2 are written, [V_d]; None for all.
        """

    @classmethod
    def attach_heads(cls, target: PreTrainedModel, config: HeadsT) -> HeadedModel:
        """Return ``target``, frozen, with new heads on it or those of ``config.from_``.

        The blocks train in fp32 where the target is in half precision. W2 stays where the LM head is, or is it.

        Args:
            target: a causal language model. config: the recipe's section.

        Raises:
            PeftlabError: the target has no linear LM head, or the heads to continue from are for another target or of
                other settings.
        """
        head = target.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise PeftlabError(
                f"draft.kind {config.kind}: {type(target).__name__} has no linear LM head; the heads need a causal "
                "language model"
            )
        target.requires_grad_(False)
        dtype = trainable_dtype(head.weight)
        heads = cls.new(head.weight if config.shared_head else head.weight.to(dtype), target, config)
        for name, part in heads.named_children():
            if name != "lm_heads":
                part.to(head.weight.device, dtype)
        place = None if config.from_ is None else cls.row().find(config.from_)
        if place is not None:
            check_heads(place, target)
            _copy_weights(cls.read(place, target), heads, config)
        return HeadedModel(target, heads)

    def check(self, target: PretrainedConfig) -> None:
        """Refuse to continue from a draft that is not of these heads."""
        why = f"contains no {self.title} heads (config.json, model_type {self.name})"
        self.check_start(self.config.from_, why)

    def load(self, target: PreTrainedModel) -> None:
        """Put new heads on the target, or those to continue from.

        Raises:
            PeftlabError: the method would train the LM head, whose distribution the heads learn; or see
                ``attach_heads``.
        """
        if self.recipe.method is not None:
            check_trunk(target, self.recipe.method)
        self.model, self.adapted, self.target = self.attach_heads(target, self.config), target, target
        self.base = self.recipe.target

    def loss(self) -> Loss:
        """Return the weighted sum of the heads' losses."""
        return HeadsLoss(make_objective(self.recipe.objective), self.config.decay, self.config.preserve)

    def score(self, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
        """Return the mean acceptance of the heads, each head's own, and how much of the target is preserved."""
        assert isinstance(model, HeadedModel)
        measured, trunk = measure_heads(model, data, batch_size)
        return {**rates_by_depth(measured), "preserved": trunk.rates()["acceptance"]}

    def save(self, train: Dataset) -> Tensor | None:
        """Write the heads to ``heads/``, with the rows of the reduced vocabulary where the recipe asks for one."""
        tokens = response_tokens(train, self.config.vocabulary, self.target)
        self.write(self.model.heads, self.stored, tokens)
        return tokens

    def calibrate(self, held_out: Dataset, batch_size: int) -> None:
        """Measure on held-out text how often each choice of the written heads is right, and store it with them."""
        heads = self.read(self.stored, self.target).to(self.target.device)
        write_ranks(self.stored / "config.json", measure_ranks(self.model, heads, held_out, batch_size))

    def drafter(self, saved: SavedDraft | None) -> ServedDraft | None:
        """Return the target, as trained, with the heads read from disk; untrained heads draft nothing."""
        if saved is None:
            return None
        served = saved.merged if saved.merged is not None else self.adapted
        heads = self.read(saved.directory / self.row().folder, served).to(self.target.device, served.dtype)
        pack_linears(heads)
        return ServedDraft(served, partial(HeadsDrafter, heads))

    @classmethod
    def open(cls, place: str, loader: TargetLoader) -> Pair:
        """Read the heads and check them against the target, whose embeddings some read as they are."""
        heads = cls.open_heads(place, loader)
        return loader.pair(sum(parameter.numel() for parameter in heads.parameters()), heads=heads)

    @classmethod
    def open_heads(cls, place: str, loader: TargetLoader) -> HeadStack | ReducedHeads:
        """Return stored heads in the dtype and on the device of a draft.

        Args:
            place: their directory. loader: of the target.
        """
        check_heads(place, loader.target)
        heads = cls.read(place, loader.target)
        inner = heads.heads if isinstance(heads, ReducedHeads) else heads
        for part in inner.children():
            part.to(loader.draft_dtype)
        heads.to(loader.device)
        if loader.pack:
            pack_linears(heads)
        return heads

    @classmethod
    def export(cls, place: str, consumer: str) -> Path | DraftExporter:
        """Refuse to export: no released engine loads such heads."""
        raise PeftlabError(
            f"--for {consumer}: {place} contains {cls.title} heads, which no released engine loads; peftlab generate "
            "and peftlab draft bench do"
        )

    @classmethod
    def update(cls, config: HeadsT, newest: Path, log: Path) -> HeadsT:
        """Return the section that continues from the heads of ``newest``.

        Heads of a target that trains, too, are refused: the served target must not change between requests.
        """
        stored = cls.row().newest(newest)
        if any((newest / trained).exists() for trained in ("adapter", "merged")):
            raise PeftlabError(
                f"{newest}: its method trains the target, which must not change between requests; train heads on its "
                f"merged/ with method: null and data.replay={log}"
            )
        return config.model_copy(update={"from_": stored})


class MedusaKind(HeadsKind[MedusaDraft]):
    """Medusa heads, with a Markov bias if the recipe asks for one."""

    name, title = "medusa", "Medusa"

    @classmethod
    def new(cls, rows: Tensor, target: PreTrainedModel, config: MedusaDraft) -> HeadStack:
        """Return heads that repeat the target's own next token."""
        return MedusaHeads(rows, config.heads, config.bias, config.shared_head, config.markov)

    @classmethod
    def read(cls, place: str | Path, target: PreTrainedModel) -> HeadStack | ReducedHeads:
        """Return the heads in a directory."""
        return read_medusa(place)

    @classmethod
    def write(cls, heads: HeadStack, out: Path, tokens: Tensor | None) -> None:
        """Write the heads, see ``write_medusa``."""
        write_medusa(heads, out, tokens=tokens, overwrite=True)


class HydraKind(HeadsKind[HydraDraft]):
    """Hydra heads, which read the target's embeddings of the tokens drafted before."""

    name, title = "hydra", "Hydra"

    @classmethod
    def new(cls, rows: Tensor, target: PreTrainedModel, config: HydraDraft) -> HeadStack:
        """Return heads that repeat the target's own next token."""
        return HydraHeads(rows, config.heads, input_embedding(target), config.shared_head)

    @classmethod
    def read(cls, place: str | Path, target: PreTrainedModel) -> HeadStack | ReducedHeads:
        """Return the heads in a directory, with the target's embeddings."""
        return read_hydra(place, input_embedding(target))

    @classmethod
    def write(cls, heads: HeadStack, out: Path, tokens: Tensor | None) -> None:
        """Write the heads, see ``write_hydra``."""
        assert isinstance(heads, HydraHeads)
        write_hydra(heads, out, tokens=tokens, overwrite=True)


@torch.no_grad()
def _copy_weights(stored: HeadStack | ReducedHeads, heads: HeadStack, config: HeadsConfig) -> None:
    """Copy the weights of stored heads into ``heads``; rows that were not stored keep theirs.

    Raises:
        PeftlabError: the stored heads are not as ``config`` asks for.
    """
    inner = stored.heads if isinstance(stored, ReducedHeads) else stored
    if (theirs := _settings(inner)) != (ours := _settings(heads)):
        raise PeftlabError(f"draft.from: {config.from_} has {theirs}; the recipe asks for {ours}")
    mine = heads.state_dict()
    for name, weight in inner.state_dict().items():
        if name.startswith("lm_heads.") and config.shared_head:
            continue  # the target's own
        rows = stored.kept if isinstance(stored, ReducedHeads) and len(weight) < len(mine[name]) else slice(None)
        mine[name][rows] = weight.to(mine[name])


def _settings(heads: HeadStack) -> str:
    """Describe in words the settings that stored heads and those that continue from them must share."""
    names = heads.state_dict()
    parts = [f"{heads.depth} heads with {len(heads.lm_heads)} LM heads (draft.heads, draft.shared_head)"]
    parts += ["biases (draft.bias)"] if any(name.endswith(".bias") for name in names) else []
    markov = names.get("markov_head.markov_w1.weight")
    parts += [] if markov is None else [f"a Markov bias of rank {markov.shape[1]} (draft.markov)"]
    return ", ".join(parts)


def check_trunk(target: PreTrainedModel, method: MethodConfig) -> None:
    """Refuse a method that trains the LM head's weight, whose distribution the heads learn.

    Args:
        target: the language model. method: that the recipe injects into it.
    """
    head = target.get_output_embeddings()
    assert head is not None
    trained = next(
        (name for name in plan_injection(target, method).train if target.get_parameter(name) is head.weight), None
    )
    if trained is not None:
        raise PeftlabError(
            f"method {method.name} trains {trained}, the LM head's weight, from which the heads learn; take it out"
        )
