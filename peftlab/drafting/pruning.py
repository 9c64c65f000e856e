"""Drafts found inside their target: layers chosen by gates, and units pruned by early-bird search."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.drafting.config import Pruning, Truncation
from peftlab.drafting.objectives import Objective, PairLoss
from peftlab.drafting.target import layer_stack, truncate
from peftlab.drafting.text import Collate, digest, model_digest, write_missing
from peftlab.errors import PeftlabError
from peftlab.files import Json, replacing
from peftlab.progress import counted
from peftlab.registry import Section
from peftlab.training.order import epoch_batches


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: ``tensors`` that make the draft, and a ``report`` for results.json."""

    tensors: dict[str, Tensor]
    report: Mapping[str, Json]


@dataclass(frozen=True)
class Search:
    """A search for a draft in ``source``, the whole target with weights in the draft's dtype.

    Attributes:
        target: whose distribution the objective compares with. train: the draft's training text.
        batch_size: examples per step. seed: of their order and of all that is drawn.
    """

    source: PreTrainedModel
    target: PreTrainedModel
    objective: Objective
    train: Dataset
    batch_size: int
    seed: int

    def batches(self, steps: int) -> Iterator[dict[str, Tensor]]:
        """Yield this many batches on the source's device; the text is read again as often as that takes."""
        collate, device = Collate(), self.source.device
        epochs = (
            epoch_batches(self.train["length"], self.batch_size, seed=self.seed, epoch=epoch) for epoch in count()
        )
        drawn = islice((batch for epoch in epochs for batch in epoch), steps)
        for rows in counted(drawn, "searching the target for the draft", steps, "step"):
            yield {key: value.to(device) for key, value in collate(self.train.__getitems__(rows)).items()}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean of the objective over a batch's tokens.

        Args:
            model: in search. batch: as ``Collate`` makes it.
        """
        return PairLoss(self.objective, self.target)(model, batch) / batch["weights"].sum()

    def find(self, cache: Path, settings: Section, choose: Callable[[], SearchResult]) -> SearchResult:
        """Return the result of ``choose``, read from ``cache`` if the same search has ended before.

        A resumed run reads what it began with, whatever machine it continues on.

        Args:
            cache: directory of what the target has computed. settings: of the search. choose: searches.

        Raises:
            PeftlabError: the file is damaged.
        """
        objective = asdict(self.objective) | {"settings": dict(self.objective.settings)}
        known = [type(settings).__name__, settings.as_json(), objective, self.batch_size, self.seed]
        text = [
            model_digest(self.source),
            model_digest(self.target),
            [*self.train["input_ids"]],
            [*self.train["prompt"]],
        ]
        path = cache / f"draft-{digest([known, text])[:16]}.safetensors"

        def write() -> None:
            if not path.exists():
                found = choose()
                with replacing(path) as temporary:
                    write_tensors(temporary, found.tensors, {"report": json.dumps(found.report)})

        with PartialState().main_process_first():
            write_missing([path], write)
        tensors, metadata = read_tensors(path)
        return SearchResult(tensors, json.loads(metadata["report"]))


_OPEN = 0.9  # probability of each gate at the start: some must be closed to show what they do, few at a time

_LR = 0.1

_PRICE_RATE = 0.2  # per step and share of the layers that is open too many, in mean losses so far


def choose_layers(search: Search, config: Truncation) -> SearchResult:
    """Return the numbers of the ``keep`` layers whose gates are the most open, rising, as ``layers`` [keep].

    Each row of a batch draws gates of its own, so that a step compares as many sets of layers as it has rows. The price
    of an open gate rises while more than ``keep`` are expected to be open and falls while fewer are: it ends where so
    many layers are worth it. All draws come from the search's seed.

    Args:
        search: of the draft. config: ``keep`` and the batches of the search.
    """
    assert config.keep is not None
    count = len(layer_stack(search.source))
    model = truncate(search.source, range(count), share=True)  # hooks on the source itself might be the target's, too
    model.requires_grad_(False)
    logits = torch.full((count,), _OPEN).logit().requires_grad_(True)
    optimiser = torch.optim.Adam([logits], lr=_LR)
    generator = torch.Generator().manual_seed(search.seed)
    price = losses = 0.0
    for step, batch in enumerate(search.batches(config.batches), start=1):
        gates = draw_gates(logits, len(batch["input_ids"]), generator)
        with gated(model, gates.to(model.device)):
            loss = search.loss(model, batch).cpu()
        expected = logits.sigmoid().sum()
        (loss + price * expected).backward()
        optimiser.step()
        optimiser.zero_grad()
        losses += loss.item()
        # In units of the mean loss, so that one rate serves objectives of any size.
        price += _PRICE_RATE * (expected.item() - config.keep) / count * (losses / step)
    probabilities = logits.detach().sigmoid()
    kept = probabilities.sort(descending=True, stable=True).indices[: config.keep].sort().values
    report: dict[str, Json] = {
        "layers": kept.tolist(),
        "probabilities": [round(p, 4) for p in probabilities.tolist()],
        "expected": round(float(probabilities.sum()), 4),
        "price": round(price, 4),
        "steps": config.batches,
    }
    return SearchResult({"layers": kept}, report)


def draw_gates(logits: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Return gates of 0 or 1, open with probability σ(logit), with the gradient of soft ones, [rows, layers].

    The soft gate is σ(logit + noise), the noise logistic; the hard one says whether it is above a half.

    Args:
        logits: [layers]. rows: of the batch. generator: of the noise.
    """
    noise = torch.rand(rows, len(logits), generator=generator).clamp(1e-6, 1 - 1e-6).logit()
    soft = (logits + noise).sigmoid()
    # Straight-through: the value is the hard gate's, the gradient the soft one's.
    return (soft > 0.5).float() + (soft - soft.detach())


@contextmanager
def gated(model: PreTrainedModel, gates: Tensor) -> Iterator[None]:
    """Gate the layers within the block: layer i of row b gives g·F(x) + (1 - g)·x.

    Args:
        model: a language model. gates: g at b, i, [rows, layers].
    """
    handles = []
    for number, layer in enumerate(layer_stack(model)):

        def mix(
            module: nn.Module,
            inputs: tuple[Tensor, ...],
            keywords: Mapping[str, Tensor],
            output: Tensor | tuple[Tensor, ...],
            gate: Tensor = gates[:, number, None, None],
        ) -> Tensor | tuple[Tensor, ...]:
            before = inputs[0] if inputs else keywords["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            mixed = before + gate.to(after.dtype) * (after - before)
            return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

        handles.append(layer.register_forward_hook(mix, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class PrunablePart:
    """One kind of unit that pruning can remove from each layer.

    Attributes:
        units: how many a layer has.
        writers: the maps whose outputs are the units', each with the numbers per unit. reader: the map that reads them.
        per_unit: numbers of a unit that ``reader`` reads.
        sizes: keys of the configuration that say how many there are, each with a unit's share.
    """

    units: int
    writers: Mapping[str, int]
    reader: str
    per_unit: int
    sizes: Mapping[str, int]


_GATED = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")

_FFN: dict[str, tuple[tuple[str, ...], str, str]] = {
    **dict.fromkeys(_GATED, (("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "intermediate_size")),
    "gpt2": (("mlp.c_fc",), "mlp.c_proj", "n_inner"),
    "gpt_neox": (("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h", "intermediate_size"),
}
"""Model type to the maps before and after the feed-forward units, and the key that says how many there are."""

_HEADS = tuple(family for family in _GATED if family != "olmo2")  # which normalises all heads as one
"""The model types whose number of heads is free: the size of a head is a key of its own."""


def parts(config: PretrainedConfig) -> dict[str, PrunablePart]:
    """Return the prunable parts of a model of this configuration, by their keys in ``draft.prune``; maybe none."""
    found = {}
    if config.model_type in _FFN:
        writers, reader, key = _FFN[config.model_type]
        units = getattr(config, key) or 4 * config.hidden_size  # GPT-2's default
        found["ffn"] = PrunablePart(units, dict.fromkeys(writers, 1), reader, 1, {key: 1})
    if config.model_type in _HEADS:
        groups = config.num_key_value_heads or config.num_attention_heads
        queries = config.num_attention_heads // groups
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        projections = {"self_attn.q_proj": queries * dim, "self_attn.k_proj": dim, "self_attn.v_proj": dim}
        sizes = {"num_attention_heads": queries, "num_key_value_heads": 1}
        found["kv_groups"] = PrunablePart(groups, projections, "self_attn.o_proj", queries * dim, sizes)
    return found


def kept_units(config: PretrainedConfig, shares: Mapping[str, float]) -> dict[str, int]:
    """Return how many units of each part a layer keeps.

    Args:
        shares: of the units that are pruned, by part; 0 leaves a part whole.

    Raises:
        PeftlabError: the architecture has no such part, or a share is less than one unit or leaves none.
    """
    known, kept = parts(config), {}
    for name, share in shares.items():
        if not share:
            continue
        if name not in known:
            fit = ", ".join(sorted(_HEADS if name == "kv_groups" else _FFN))
            why = "its number of heads follows from its width, or all are normalised as one" if known else "unknown"
            raise PeftlabError(f"draft.prune.{name}: {config.model_type} ({why}) is not among {fit}")
        units = known[name].units
        kept[name] = units - round(share * units)
        if not 0 < kept[name] < units:
            rest = "none of them" if kept[name] else "all of them"
            raise PeftlabError(f"draft.prune.{name}: {share:g} of {units} is {rest}")
    return kept


@contextmanager
def scaled(model: PreTrainedModel, scales: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiply within the block what each unit gives by its scale; 0 masks it.

    Args:
        model: a language model. scales: of each part, [layers, units].
    """
    known, handles = parts(model.config), []
    for name, scale in scales.items():
        part = known[name]
        for number, layer in enumerate(layer_stack(model)):

            def multiply(
                module: nn.Module, inputs: tuple[Tensor, ...], row: Tensor = scale[number], width: int = part.per_unit
            ) -> tuple[Tensor, ...]:
                return (inputs[0] * row.repeat_interleave(width).to(inputs[0].dtype), *inputs[1:])

            handles.append(layer.get_submodule(part.reader).register_forward_pre_hook(multiply))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def pruned(
    model: PreTrainedModel, units: Mapping[str, Tensor], scales: Mapping[str, Tensor] | None = None
) -> PreTrainedModel:
    """Return a plain model of the same class with these units alone, on the CPU and in eval mode.

    It computes what ``model`` computes with all other units masked.

    Args:
        units: the numbers of those kept, [layers, kept] and rising, of each part.
        scales: as in ``scaled``: folded into the maps that read the units.
    """
    config, tensors = copy.deepcopy(model.config), {name: t.detach() for name, t in model.state_dict().items()}
    known, stack = parts(model.config), layer_stack(model)
    place = next(name for name, module in model.named_modules() if module is stack)
    for name, kept in units.items():
        part = known[name]
        for key, share in part.sizes.items():
            setattr(config, key, share * kept.shape[1])
        if name == "kv_groups":
            config.head_dim = part.writers["self_attn.k_proj"]
        for number, layer in enumerate(stack):
            at = f"{place}.{number}."
            for writer, width in part.writers.items():
                rows = _places(kept[number], width)
                _select(tensors, at + writer, rows, 1 if isinstance(layer.get_submodule(writer), Conv1D) else 0)
                if (bias := tensors.get(f"{at}{writer}.bias")) is not None:
                    tensors[f"{at}{writer}.bias"] = bias[rows.to(bias.device)]
            along = 0 if isinstance(layer.get_submodule(part.reader), Conv1D) else 1
            _select(tensors, at + part.reader, _places(kept[number], part.per_unit), along)
            if scales is not None:
                weight = tensors[f"{at}{part.reader}.weight"]
                row = scales[name][number][kept[number]].repeat_interleave(part.per_unit).to(weight)
                tensors[f"{at}{part.reader}.weight"] = weight * (row if along else row[:, None])
    with torch.random.fork_rng(devices=[]), no_init_weights():
        small = type(model)._from_config(config, dtype=model.dtype)
        small.tie_weights()  # which comes with the initialisation left out
    small.load_state_dict(tensors)
    small.generation_config = copy.deepcopy(model.generation_config)
    return small.eval()


def _places(kept: Tensor, width: int) -> Tensor:
    """Return the rows of units that have ``width`` numbers each, [kept] -> [kept · width]."""
    return (kept[:, None] * width + torch.arange(width, device=kept.device)).flatten()


def _select(tensors: dict[str, Tensor], module: str, rows: Tensor, along: int) -> None:
    """Replace a module's weight by its rows or columns ``rows``, taken along dimension ``along``."""
    weight = tensors[f"{module}.weight"]
    tensors[f"{module}.weight"] = weight.index_select(along, rows.to(weight.device))


_MASKS = 5  # compared with each other

_EVERY = 8  # steps from one mask to the next: sooner, masks agree because coefficients have hardly moved

_L1 = 1.0  # of the mean coefficient of each part: of a single one, less where there are many that each do little

_WEIGHTS_LR = 2e-5

_COEFFICIENTS_LR = 2e-2

Masks = dict[str, Tensor]
"""By part: [layers, units], true for a unit that stays."""


def choose_units(search: Search, config: Pruning) -> SearchResult:
    """Return the units that stay, [layers, kept] of each part, and the trained weights unless they are rewound.

    With several rounds each prunes the same share of what is left (iterative pruning); ``rewind`` starts each from the
    target's weights, and leaves the draft with them.

    Args:
        search: of the draft. config: shares, rounds and whether to rewind.
    """
    counts = {name: part.units for name, part in parts(search.source.config).items()}
    final = kept_units(search.source.config, config.shares())
    layers = len(layer_stack(search.source))
    alive = {name: torch.ones(layers, counts[name], dtype=torch.bool) for name in final}
    model, coefficients = _start_round(search.source, alive)
    rounds: list[Json] = []
    for number in range(1, config.rounds + 1):
        if number > 1 and config.rewind:
            model, coefficients = _start_round(search.source, alive)
        kept = {name: round(counts[name] * (n / counts[name]) ** (number / config.rounds)) for name, n in final.items()}
        alive, record = _round(search, config, model, coefficients, alive, kept)
        rounds.append({"kept": dict(kept), **record})
    units = {name: mask.nonzero()[:, 1].view(layers, -1) for name, mask in alive.items()}
    tensors = dict(units)
    if not config.rewind:
        small = pruned(model, units, {name: c.detach() for name, c in coefficients.items()})
        nn.Module.to(small, search.source.dtype)
        tensors |= {f"weights.{name}": tensor for name, tensor in small.state_dict().items()}
    report: dict[str, Json] = {"kept": dict(final), "of": {name: counts[name] for name in final}, "rounds": rounds}
    return SearchResult(tensors, report)


def pruned_draft(source: PreTrainedModel, tensors: Mapping[str, Tensor]) -> PreTrainedModel:
    """Return the draft that ``choose_units`` has found, in the dtype of ``source`` and on the CPU.

    Args:
        source: the whole model. tensors: of the search's result.
    """
    small = pruned(source, {name: t for name, t in tensors.items() if not name.startswith("weights.")})
    weights = {name.removeprefix("weights."): t for name, t in tensors.items() if name.startswith("weights.")}
    if weights:
        small.load_state_dict(weights)
    return small


def _start_round(source: PreTrainedModel, alive: Masks) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return a copy of the model in fp32 whose layers train, and coefficients that start at one."""
    model = copy.deepcopy(source).float()
    model.requires_grad_(False)
    layer_stack(model).requires_grad_(True)
    return model, {
        name: torch.ones(mask.shape, device=source.device, requires_grad=True) for name, mask in alive.items()
    }


def _round(
    search: Search,
    config: Pruning,
    model: PreTrainedModel,
    coefficients: dict[str, Tensor],
    alive: Masks,
    kept: Mapping[str, int],
) -> tuple[Masks, dict[str, Json]]:
    """Train until the masks are stable, or ``config.steps`` steps; return the last masks and a record."""
    masked = {name: mask.to(coefficients[name]) for name, mask in alive.items()}
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": weights, "lr": _WEIGHTS_LR}, {"params": list(coefficients.values()), "lr": _COEFFICIENTS_LR}]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.0)
    latest: deque[Masks] = deque(maxlen=_MASKS)
    distances: list[Json] = []
    masks, step, stable = alive, 0, False
    for step, batch in enumerate(search.batches(config.steps), start=1):
        scales = {name: c * masked[name] for name, c in coefficients.items()}
        with scaled(model, scales):
            loss = search.loss(model, batch)
        (loss + _L1 * sum(scale.abs().mean() for scale in scales.values())).backward()
        optimiser.step()
        optimiser.zero_grad()
        if step % _EVERY and step < config.steps:
            continue
        masks = {name: largest(c.detach().abs().cpu(), alive[name], kept[name]) for name, c in coefficients.items()}
        latest.append(masks)
        furthest = max(distance(masks, other) for other in latest)
        distances.append(furthest)
        if len(latest) == _MASKS and furthest < config.distance:
            stable = True
            break
    return masks, {"steps": step, "distances": distances, "stable": stable}


def largest(scores: Tensor, alive: Tensor, kept: int) -> Tensor:
    """Return the mask of each row's ``kept`` largest scores among those alive; among equals the first win.

    Args:
        scores: [layers, units]. alive: booleans, [layers, units]. kept: units of a layer.
    """
    order = scores.masked_fill(~alive, -1.0).sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(alive).scatter_(1, order[:, :kept], True)


def distance(masks: Masks, others: Masks) -> float:
    """Return the share of the units on which two sets of masks differ.

    Args:
        masks, others: by part, [layers, units].
    """
    differ = sum(int((masks[name] != others[name]).sum()) for name in masks)
    return differ / sum(mask.numel() for mask in masks.values())
