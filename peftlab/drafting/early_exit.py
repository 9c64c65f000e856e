"""The target's own layers as its draft: early exits (LayerSkip), and exit:K, del and swift, which train nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.decoding.cache import Engine
from peftlab.decoding.engines import build_engine
from peftlab.decoding.flat import FlatEngine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.own_layers import DelDrafter, EarlyExit, ExitSelector, SkippedSublayers, SkipSearch, SwiftDrafter
from peftlab.decoding.sampled_trees import DrawnTrees, GrowthFactory
from peftlab.drafting.acceptance import Acceptance, add_rates, batches
from peftlab.drafting.base import DraftExporter, DraftKind, Loss, OwnLayers, Pair, SavedDraft, ServedDraft, TargetLoader
from peftlab.drafting.config import EarlyExitDraft
from peftlab.drafting.objectives import Objective, chunked_loss, following, make_objective
from peftlab.drafting.target import forward_hidden, frozen_hidden, head_weight, layer_stack, truncate, unwrapped
from peftlab.errors import PeftlabError
from peftlab.methods.inject import disabled
from peftlab.models.load import eval_mode
from peftlab.training.loop import FIRST_STEPS


@dataclass(frozen=True)
class Exit:
    """An early exit: the model's first layers and the modules from there to the LM head.

    Attributes:
        layers: how many of the first layers run.
        final: names of the modules that take the last layer's output to the LM head: a norm, in some models
            also a projection.
    """

    layers: int
    final: tuple[str, ...]

    def states(self, model: nn.Module, hidden: Sequence[Tensor], places: Tensor) -> Tensor:
        """Return the LM head's inputs after the exit, [T, H].

        Args:
            model: the language model. hidden: states of every layer, [b, n, H] each.
            places: which of them are read, [b, n] booleans with T true.
        """
        exited = hidden[self.layers][places]
        for name in self.final:
            exited = model.get_submodule(name)(exited)
        return exited


@torch.no_grad()
def find_exit(model: PreTrainedModel, layers: int, tolerance: float = 1e-4) -> Exit:
    """Return the exit after the first ``layers`` layers, checked against the model cut to these layers.

    Args:
        model: a causal language model. tolerance: allowed difference, relative to the largest logit.

    Raises:
        PeftlabError: all layers are named, or the exit computes other logits than the cut model.
    """
    name, count = type(model).__name__, len(layer_stack(model))
    if layers >= count:
        raise PeftlabError(f"draft.exits: the exit runs all {count} layers of {name}; leave out at least the last one")
    weight = head_weight(model)
    ids = torch.arange(min(16, len(weight)), device=weight.device)[None]
    with eval_mode(model):
        exit_ = Exit(layers, _final_modules(model, ids))
        hidden = forward_hidden(model, ids, torch.ones_like(ids))
        own = nn.functional.linear(exit_.states(model, hidden, ids >= 0), weight).float()
        cut = truncate(model, range(layers), share=True)(input_ids=ids, use_cache=False).logits[0].float()
    gap = float((own - cut).abs().max() / cut.abs().max().clamp_min(1e-6))
    if not gap <= tolerance:
        raise PeftlabError(
            f"draft.exits: {name} cut to {layers} layers computes other logits than its hidden state after them, "
            f"through {', '.join(exit_.final) or 'nothing'} and the LM head (off by {gap:.1e} of the largest); early "
            "exits of such models cannot be trained"
        )
    return exit_


def _final_modules(model: PreTrainedModel, ids: Tensor) -> tuple[str, ...]:
    """Return the modules from the last layer to the LM head, each called on the output of the one before."""
    last, head = layer_stack(model)[-1], model.get_output_embeddings()
    assert head is not None
    names: list[str] = []
    state: object = None
    running: nn.Module | None = None
    reached: object = None

    def enter(name: str, module: nn.Module, inputs: tuple[object, ...]) -> None:
        nonlocal running, reached
        if module is head:
            reached = inputs[0]
        elif running is None and inputs and _equal_values(state, inputs[0]):
            running = module
            names.append(name)

    def leave(module: nn.Module, output: object) -> None:
        nonlocal running, state
        if module is last or module is running:
            state, running = output[0] if isinstance(output, tuple) else output, None

    inside = set(last.modules()) - {last}
    hooks = []
    for name, module in model.named_modules():
        if module in inside:
            continue
        if module is not last:
            hooks.append(module.register_forward_pre_hook(lambda m, x, name=name: enter(name, m, x)))
        hooks.append(module.register_forward_hook(lambda m, x, output: leave(m, output)))
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not _equal_values(state, reached):
        raise PeftlabError(
            f"draft.exits: between the last layer and the LM head {type(model).__name__} computes something outside "
            "its modules; early exits of such models cannot be trained"
        )
    return tuple(names)


def _equal_values(one: object, other: object) -> bool:
    """Return whether both are tensors of the same numbers in any shape, as models reshape on the way."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    if one.numel() != other.numel() or not one.is_floating_point():
        return False
    return torch.equal(one.flatten(), other.flatten())


def dropout_rates(layers: int, most: float) -> list[float]:
    """Return each layer's dropout rate, ``most``·(2^(l / (L - 1)) - 1), from 0 to ``most``.

    Args:
        layers: L. most: the rate of the last layer.
    """
    return [most * (2 ** (layer / max(1, layers - 1)) - 1) for layer in range(layers)]


def dropout_growth(schedule: str, step: int, steps: int) -> float:
    """Return S(t), the factor of the rates: 1 for ``constant``, 2^(t / (T - 1)) - 1 for ``exponential``.

    Args:
        schedule: its name. step: t. steps: T.
    """
    return 1.0 if schedule == "constant" else 2 ** (step / max(1, steps - 1)) - 1


def exit_weights(exits: Sequence[int], layers: int, scale: float | None) -> list[float]:
    """Return the weight e of each exit's loss and, behind them, of the last layer's.

    e(l) = ``scale``·(0 + 1 + ... + l), and of the last layer L - 1 + ``scale``·(0 + 1 + ... + L - 2).

    Args:
        exits: layers before each exit. layers: L. scale: None: all weigh the same.
    """
    if scale is None:
        return [1.0] * (len(exits) + 1)
    last = layers - 1 + scale * (layers - 2) * (layers - 1) / 2
    return [*(scale * (exit_ - 1) * exit_ / 2 for exit_ in exits), last]


def training_exits(curriculum: str | None, exits: int, step: int, steps: int, every: int) -> list[bool]:
    """Return which exits train in a step; the last layer always trains.

    ``rotational``: every R-th exit, and in the next step the exits after these. ``gradual``: the last layer alone at
    first, and in the first half of the steps one exit more after the other, the last one first.

    Args:
        exits: how many there are. steps: T. every: R.
    """
    if curriculum == "rotational":
        return [i % every == step % every for i in range(exits)]
    if curriculum == "gradual":
        return [2 * step * (exits + 1) >= (exits - i) * steps for i in range(exits)]
    return [True] * exits


def loss_shares(weights: Sequence[float], active: Sequence[bool]) -> list[float]:
    """Return the share of each exit, and of the last layer behind them, in the loss: C·e / Σ C·e.

    Args:
        weights: e of exits and last layer. active: C of each exit, 0 or 1.
    """
    counted = [weight * on for weight, on in zip(weights, [*active, True], strict=True)]
    return [weight / sum(counted) for weight in counted]


class LayerDropout:
    """Leaves layers out of a model in training, for each row of a batch on its own, without rescaling.

    What is left out is fixed by ``draw`` until the next call, so that a checkpointed layer is computed again as it was.

    Args:
        model: a causal language model; each of its layers gets a hook. most: see ``dropout_rates``.
    """

    def __init__(self, model: PreTrainedModel, most: float):
        stack = layer_stack(model)
        self._rates = torch.tensor(dropout_rates(len(stack), most))
        self._kept: Tensor | None = None  # [L, b]
        # Before the hooks by which transformers records the states, which are to be those that the next layer reads.
        self._hooks = [
            layer.register_forward_hook(partial(self._leave_out, i), with_kwargs=True, prepend=True)
            for i, layer in enumerate(stack)
        ]

    def draw(self, rows: int, growth: float, device: torch.device) -> None:
        """Draw the layers that the next batch leaves out.

        Args:
            rows: b. growth: factor of the rates, see ``dropout_growth``. device: of the model.
        """
        self._kept = (torch.rand(len(self._rates), rows) >= growth * self._rates[:, None]).to(device)

    def remove(self) -> None:
        """Remove the hooks, so that the model is as it was."""
        for hook in self._hooks:
            hook.remove()

    def _leave_out(
        self,
        number: int,
        layer: nn.Module,
        inputs: tuple[Tensor, ...],
        named: dict[str, Tensor],
        output: Tensor | tuple[Tensor, ...],
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the layer's output, or its input in the rows that leave it out, [b, n, H]."""
        if self._kept is None or not layer.training:
            return output
        entered = inputs[0] if inputs else named["hidden_states"]
        kept = self._kept[number].view(-1, *[1] * (entered.dim() - 1))
        if isinstance(output, tuple):
            return (torch.where(kept, output[0], entered), *output[1:])
        return torch.where(kept, output, entered)


@dataclass
class EarlyExitLoss:
    """LayerSkip's loss: Σ ẽ_k·objective(exit k) + ẽ_L·KL(base ‖ the trained model), shared LM head.

    Elhoushi et al. 2024 (arXiv 2404.16710), with the base model's own distribution as the teacher. An exit
    computes head(norm(h_k)), h_k the state after k layers: what a draft of the first layers computes.

    Attributes:
        objective: what the exits minimise against the base model's distribution.
        exits: where they are. weights: e of each, and of the last layer behind them.
        curriculum, every: see ``training_exits``.
        dropout: leaves layers out, in all but the first steps, in which every parameter must learn; None: none.
        schedule: of the dropout, see ``dropout_growth``.
    """

    objective: Objective
    exits: Sequence[Exit]
    weights: Sequence[float]
    curriculum: str | None = None
    every: int = 1
    dropout: LayerDropout | None = None
    schedule: str = "constant"
    _shares: list[float] = field(init=False)
    _growth: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._shares = loss_shares(self.weights, [True] * len(self.exits))

    def at_step(self, step: int, steps: int) -> str:
        """Choose the exits and the dropout of a step; return the exits where a curriculum chooses them.

        Args:
            step: its number, from 0. steps: of the training.
        """
        active = training_exits(self.curriculum, len(self.exits), step, steps, self.every)
        self._shares = loss_shares(self.weights, active)
        self._growth = dropout_growth(self.schedule, step, steps) if step >= FIRST_STEPS else 0.0
        trained = [str(exit_.layers) for exit_, on in zip(self.exits, active, strict=True) if on]
        return "" if self.curriculum is None else f" exits {','.join(trained)}"

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the loss summed over tokens."""
        ids, mask, places = inputs["input_ids"], inputs["attention_mask"], inputs["weights"] > 0
        bare = unwrapped(model)
        with disabled(bare):
            base = frozen_hidden(bare, ids, mask)[places]
        if self.dropout is not None:
            self.dropout.draw(len(ids), self._growth, ids.device)
        states = forward_hidden(model, ids, mask)
        head = head_weight(model)
        frozen = head.detach()
        if self.objective.name == "ce":
            target, target_head = following(ids)[places], None
        else:
            target, target_head = base, frozen
        name, settings = self.objective.name, self.objective.settings
        *early, last = self._shares
        # The last layer is held to the base model, so that drafting early does not change what is served.
        loss = last * chunked_loss(states[-1][places], head, base, frozen, "kl")
        for exit_, share in zip(self.exits, early, strict=True):
            if share:
                exited = exit_.states(bare, states, places)
                loss = loss + share * chunked_loss(exited, head, target, target_head, name, settings=settings)
        return loss * places.sum()


@torch.no_grad()
def measure_exits(model: nn.Module, exits: Sequence[Exit], data: Dataset, batch_size: int = 16) -> list[Acceptance]:
    """Return the acceptance by the base model of each early exit and, behind them, of the whole model.

    The base model is what ``model`` computes with its injection switched off.

    Args:
        model: with its injection. exits: where they are. data: rows as ``text.make_dataset`` makes them.
        batch_size: rows read together.
    """
    sums = torch.zeros(len(exits) + 1, 4, len(data), dtype=torch.float64)
    head = head_weight(model)
    for rows, places, ids, mask in batches(data, batch_size, head.device):
        with eval_mode(model):
            states = forward_hidden(model, ids, mask)
            each = [*(exit_.states(model, states, places) for exit_ in exits), states[-1][places]]
        with disabled(model):
            base = frozen_hidden(model, ids, mask)[places]
        for total, mine in zip(sums, each, strict=True):
            add_rates(total, rows[places.nonzero()[:, 0].cpu()], base, mine, head, head)
    return [Acceptance(*total) for total in sums]


_CHOICES = 8  # exits that ``del`` chooses from, at most: each costs rows of the LM head in every step


class EarlyExitKind(DraftKind[EarlyExitDraft]):
    """An early exit as draft: the target's first layers, trained in the target and read from it.

    Attributes:
        exits: the first one drafts. dropout: of the layers while it trains; None for none.
    """

    name = "early_exit"
    exits: list[Exit]
    dropout: LayerDropout | None = None

    def check(self, target: PretrainedConfig) -> None:
        """Refuse an exit after the last layer, or beyond it."""
        count, last = target.get_text_config(decoder=True).num_hidden_layers, self.config.exits[-1]
        if last >= count:
            raise PeftlabError(f"draft.exits: {last} is past the last exit; the target has {count} layers")

    def load(self, target: PreTrainedModel) -> None:
        """Take the target with its exits, each compared with the target cut to its layers."""
        self.exits = [find_exit(target, layers) for layers in self.config.exits]
        self.model = self.adapted = self.target = target
        self.base = self.recipe.target

    def loss(self) -> Loss:
        """Return LayerSkip's loss on the exits."""
        config, layers = self.config, len(layer_stack(self.adapted))
        if config.dropout:
            self.dropout = LayerDropout(self.adapted, config.dropout)
        return EarlyExitLoss(
            make_objective(self.recipe.objective),
            self.exits,
            exit_weights(config.exits, layers, config.scale),
            config.curriculum,
            config.every,
            self.dropout,
            config.dropout_schedule,
        )

    def score(self, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
        """Return the acceptance of the first exit and of each other one, and how much of the target is preserved."""
        first, *later, whole = measure_exits(model, self.exits, data, batch_size)
        others = zip(self.exits[1:], later, strict=True)
        each = {f"acceptance_exit_{exit_.layers}": found.rates()["acceptance"] for exit_, found in others}
        return first.rates() | each | {"preserved": whole.rates()["acceptance"]}

    def save(self, train: Dataset) -> None:
        """Remove the layer dropout; nothing is written, as adapter or merged model are target and draft."""
        if self.dropout is not None:
            self.dropout.remove()

    def drafter(self, saved: SavedDraft | None) -> ServedDraft | None:
        """Return the model as trained, drafting with its first layers."""
        model = self.adapted if saved is None or saved.merged is None else saved.merged
        engine = exit_engine(model, self.exits[0].layers, build_engine(model))
        return ServedDraft(model, partial(ModelDrafter, engine, shares_cache=True))

    @classmethod
    def open(cls, place: str, loader: TargetLoader) -> Pair:
        """Return some of the target's layers as a draft, by name; it has no weights of its own.

        Raises:
            PeftlabError: the target has too few layers.
        """
        model = loader.target
        count, size = len(layer_stack(model)), model.num_parameters()
        if place == "swift":
            if count < 3:
                raise PeftlabError(
                    f"draft swift: keeps the first and the last layer, and the target has {count} in all"
                )
            return loader.pair(size, own=partial(_open_swift, SkipSearch(count)))
        if place == "del":
            if count < 2:
                raise PeftlabError("draft del: chooses an exit before the last layer, and the target has one in all")
            choice = ExitSelector(possible_exits(count), count, _head_cost(model))
            return loader.pair(size, own=partial(_open_del, choice), features=tuple(choice.exits))
        layers = int(place.removeprefix("exit:"))
        if layers >= count:
            raise PeftlabError(f"draft exit:{layers}: the target has {count} layers; leave out at least the last one")
        smaller = truncate(model, range(layers), share=True).num_parameters()
        return loader.pair(smaller, own=partial(_open_exit, model, layers, loader.pack))

    @classmethod
    def export(cls, place: str, consumer: str) -> Path | DraftExporter:
        """Refuse to export: an exit is part of its target."""
        raise PeftlabError(
            f"--for {consumer}: {place} is part of the target; of all engines, transformers alone drafts with it: load "
            "the merged model and generate(..., assistant_early_exit=LAYERS)"
        )

    @classmethod
    def update(cls, config: EarlyExitDraft, newest: Path, log: Path) -> EarlyExitDraft:
        """Refuse to update: an exit is part of its target, which must not change between requests."""
        raise PeftlabError(f"{newest}: an early exit is part of the target; train it anew with data.replay={log}")


def possible_exits(layers: int) -> list[int]:
    """Return the exits of a model that ``del`` chooses from: at most 8 before the last layer, evenly spread."""
    count = min(_CHOICES, layers - 1)
    return [round((i + 1) * layers / (count + 1)) for i in range(count)]


def exit_engine(model: PreTrainedModel, layers: int, target: Engine, *, pack: bool = True) -> Engine:
    """Return the first layers of a model as a draft in the cache of the model's own engine.

    A flattened step continues from the states of the tokens that its first layers have read. Any other engine reads
    drafted tokens from the embeddings on.

    Args:
        model: the target. layers: how many. target: the engine of ``model``. pack: pack weights for the CPU.
    """
    if isinstance(target, FlatEngine):
        return EarlyExit(target, layers)
    return build_engine(truncate(model, range(layers), share=True), vocabulary=target.vocab_size, pack=pack)


def flattened_step(draft: str, target: Engine) -> FlatEngine:
    """Return ``target`` if it is a flattened step.

    Args:
        draft: name, for the message. target: the engine.

    Raises:
        PeftlabError: it is another one.
    """
    if isinstance(target, FlatEngine):
        return target
    raise PeftlabError(
        f"draft {draft}: needs the flattened step, and this target's kernel is {target.kind}; use --draft exit:K"
    )


def _open_exit(model: PreTrainedModel, layers: int, pack: bool, target: Engine) -> OwnLayers:
    engine = exit_engine(model, layers, target, pack=pack)

    def trees(engine: Engine, grow: GrowthFactory) -> DrawnTrees:
        return DrawnTrees(engine, shares_cache=True, grow=grow)

    return OwnLayers(engine, partial(ModelDrafter, shares_cache=True), trees)


def _open_swift(search: SkipSearch, target: Engine) -> OwnLayers:
    skipping = SkippedSublayers(flattened_step("swift", target))
    return OwnLayers(skipping, partial(SwiftDrafter, layers=skipping, search=search), "swift")


def _open_del(choice: ExitSelector, target: Engine) -> OwnLayers:
    exit_ = EarlyExit(flattened_step("del", target), choice.exits[0])
    return OwnLayers(exit_, partial(DelDrafter, exit=exit_, choice=choice), "del")


def _head_cost(model: PreTrainedModel) -> float:
    """Return how much a step of the LM head reads, in units of a layer's weights."""
    stack = layer_stack(model)
    return head_weight(model).numel() / (sum(p.numel() for p in stack.parameters()) / len(stack))
