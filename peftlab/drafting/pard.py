"""A draft model that writes several tokens in one pass, reading masks in their place (PARD, arXiv 2504.18583)."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.decoding.cache import additive_mask
from peftlab.decoding.parallel_drafters import Masks, ParallelDrafter
from peftlab.drafting.acceptance import Acceptance, add_rates, batches, rates_by_depth
from peftlab.drafting.base import DraftExporter, Loss, Pair, SavedDraft, ServedDraft, TargetLoader
from peftlab.drafting.config import PardDraft, Truncation, eighth_of_layers
from peftlab.drafting.export import check_plain, copy_plain
from peftlab.drafting.model import ModelKind, draft_engine, open_model
from peftlab.drafting.objectives import Inputs, Objective, chunked_loss, following, make_objective
from peftlab.drafting.target import forward_hidden, frozen_hidden, head_weight, unwrapped
from peftlab.drafting.text import continuation_mask
from peftlab.errors import PeftlabError
from peftlab.files import read_object, typed_value, write_json
from peftlab.models.load import eval_mode


def drawn_places(count: int, length: int, retain: float, least: float) -> list[Tensor]:
    """Return which places keep a row with i masks, for i = 0, ..., length - 1: conditional dropping (COD).

    Of ``count`` places i = 0 keeps all; a later i keeps ⌊count · max(retain^i, least)⌋ drawn from the places after
    those that i - 1 keeps, or all of these where there are fewer. So every row's masks before its last one are rows,
    too.
    Randomness comes from torch's global generator, whose state checkpoints contain.

    Args:
        count: places of the continuation. length: K. retain: share that each further mask keeps.
        least: smallest share that is kept.

    Returns:
        For each i its places, rising.
    """
    kept = [torch.arange(count)]
    for i in range(1, length):
        possible = kept[-1] + 1  # i masks behind an anchor end one place after i - 1 masks behind it
        possible = possible[possible < count]
        wanted = math.floor(count * max(retain**i, least) + 1e-9)  # 100 · 0.7² is a little less than 49
        drawn = torch.randperm(len(possible))[:wanted]
        kept.append(possible[drawn].sort().values)
    return kept


@dataclass(frozen=True)
class MaskRows:
    """Rows of masks behind the texts of a batch.

    Row (i, t) stands at position t, is the i-th of i masks behind the text up to t - i, and predicts token t + 1.

    Attributes:
        depth: i of each row, [b, R]; 0 where there is no row. place: t of each row, [b, R].
    """

    depth: Tensor
    place: Tensor

    @classmethod
    def drawn(cls, continued: Tensor, length: int, retain: float, least: float) -> MaskRows:
        """Draw rows behind the places of a batch that are above 0.

        Args:
            continued: [b, n], above 0 at one run of places in each text. length, retain, least: see ``drawn_places``.
        """
        depths, places = [], []
        for line in continued.cpu() > 0:
            first, count = int(line.int().argmax()), int(line.sum())
            kept = drawn_places(count, length, retain, least)[1:]
            places.append(torch.cat([torch.zeros(0, dtype=torch.long), *(first + each for each in kept)]))
            depths.append(torch.cat([torch.zeros(0, dtype=torch.long), *map(torch.full_like, kept, range(1, length))]))
        depth, place = (nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (depths, places))
        return cls(depth.to(continued.device), place.to(continued.device))

    def visible(self, n: int) -> Tensor:
        """Return what each of n tokens and R rows sees of them, [b, n + R, n + R] booleans.

        A row sees the text up to t - i and the masks (1, t - i + 1) to (i, t): itself and those before it.
        """
        b, rows = self.depth.shape
        anchor = torch.where(self.depth > 0, self.place - self.depth, -1)  # no row: sees its like alone
        text = torch.arange(n, device=anchor.device)
        seen = torch.zeros(b, n + rows, n + rows, dtype=torch.bool, device=anchor.device)
        seen[:, :n, :n] = text <= text[:, None]
        seen[:, n:, :n] = text <= anchor[..., None]
        # A mask sees the masks behind the same anchor up to its own depth, and none behind another anchor.
        seen[:, n:, n:] = (anchor[:, None] == anchor[..., None]) & (self.depth[:, None] <= self.depth[..., None])
        return seen


def unused_token(size: int, texts: Iterable[Sequence[int]]) -> int:
    """Return the highest of ``size`` token ids that no text contains, to serve as mask.

    Rows of the LM head past the tokenizer's tokens come first, then special tokens, which text seldom contains.

    Args:
        size: rows of the LM head. texts: token ids of each.

    Raises:
        PeftlabError: the texts contain every token.
    """
    used = {token for text in texts for token in text}
    free = next((token for token in reversed(range(size)) if token not in used), None)
    if free is None:
        raise PeftlabError("draft.mask_token: the training text contains every token; name one to use as the mask")
    return free


def with_token(masks: Masks, size: int, texts: Iterable[Sequence[int]]) -> Masks:
    """Return masks that read a token; where none is named, the highest of ``size`` ids that no text contains.

    Args:
        masks: whose token is -1 where none is named. size: of the vocabulary. texts: token ids of the training text.
    """
    return masks if masks.token >= 0 else replace(masks, token=unused_token(size, texts))


def parallel_states(model: nn.Module, ids: Tensor, rows: MaskRows, mask: int | Tensor) -> Tensor:
    """Return the states that the LM head reads of texts and of rows of masks behind them, [b, n + R, H].

    Args:
        mask: the token that the rows read, or each row's own [b, R].
    """
    b, n = ids.shape
    tokens = torch.cat((ids, mask if isinstance(mask, Tensor) else torch.full_like(rows.depth, mask)), 1)
    positions = torch.cat((torch.arange(n, device=ids.device).expand(b, -1), rows.place), 1)
    bare = unwrapped(model)
    return forward_hidden(model, tokens, _as_model(bare.config, rows.visible(n), positions, bare.dtype), positions)[-1]


def _as_model(
    config: PretrainedConfig, visible: Tensor, positions: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor | None] | None:
    """Return a mask in the form that models of transformers take, per type of layer, with the model's windows."""
    text = config.get_text_config(decoder=True)
    window, types = getattr(text, "sliding_window", None), set(getattr(text, "layer_types", None) or ())

    def within(window: int | None) -> Tensor | None:
        near = visible if window is None else visible & (positions[..., None] - positions[:, None] < window)
        return additive_mask(near[:, None], dtype)

    if len(types) > 1:
        return {"full_attention": within(None), "sliding_attention": within(window)}
    return within(None if types == {"full_attention"} else window)


@torch.no_grad()
def check_parallel(model: nn.Module, kind: str = "pard", tolerance: float = 1e-3) -> None:
    """Refuse a model whose rows of masks are not what it computes with the masks appended to the text.

    Args:
        kind: of the draft, for messages.

    Raises:
        PeftlabError: it does not take the mask or the positions that such rows need.
    """
    size = len(head_weight(model))
    ids = torch.arange(1, 7, device=head_weight(model).device)[None] % size
    rows = MaskRows.drawn(torch.ones(1, 6), 3, 1.0, 1.0)
    depth, place = (each.to(ids.device) for each in (rows.depth, rows.place))
    name, at = type(model).__name__, 3  # the row of two masks behind the first ``at`` tokens
    with eval_mode(model):
        try:
            found = parallel_states(model, ids, MaskRows(depth, place), 0)[0, 6:]
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as fault:
            raise PeftlabError(
                f"draft.kind {kind}: {name} does not read rows of masks beside a text: {fault}"
            ) from fault
        appended = torch.cat((ids[:, :at], torch.zeros_like(ids[:, :2])), 1)
        wanted = forward_hidden(model, appended, torch.ones_like(appended))[-1][0, -1]
    mine = found[(depth[0] == 2) & (place[0] == at + 1)][0]
    gap = float((mine.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp_min(1e-6))
    if gap > tolerance * (30 if wanted.dtype != torch.float32 else 1):
        raise PeftlabError(
            f"draft.kind {kind}: {name} computes other states for rows of masks than with the masks appended (off by "
            f"{gap:.1e} of the largest): it places tokens by their order. Train draft: {{kind: model}} for it"
        )


@dataclass
class PardLoss:
    """Computes the objective at every token of the continuations and at rows of masks behind them.

    Row (i, t) is behind i masks (``MaskRows``), and i = 0 is the text: with K = 1 it is ``PairLoss``. All
    rows count alike, however many were dropped.

    Attributes:
        objective: what is minimised. target: a frozen causal language model.
        length: K. retain, least: see ``drawn_places``. mask: gives the token that rows read; it is known
            when the training text is.
        rewrite: exchanges some rows for continuations of the draft's own; None for none.
    """

    objective: Objective
    target: nn.Module
    length: int
    retain: float
    least: float
    mask: Callable[[], int]
    rewrite: Callable[[nn.Module, Inputs], Inputs] | None = None

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Return the loss summed over tokens and rows."""
        if self.rewrite is not None:
            inputs = self.rewrite(model, inputs)
        ids, weights = inputs["input_ids"], inputs["weights"]
        rows = MaskRows.drawn(continuation_mask(inputs), self.length, self.retain, self.least)
        states = parallel_states(model, ids, rows, self.mask())
        places, masked = weights > 0, rows.depth > 0

        def each(values: Tensor) -> Tensor:
            """Return the values [b, n, ...] at the places of tokens and rows, [T, ...]."""
            which = torch.arange(len(values), device=values.device)[:, None].expand_as(rows.place)
            return torch.cat((values[places], values[which[masked], rows.place[masked]]))

        mine = torch.cat((states[:, : ids.shape[1]][places], states[:, ids.shape[1] :][masked]))
        if self.objective.name == "ce":
            target, head = each(following(ids)), None
        else:
            target, head = each(frozen_hidden(self.target, ids, inputs["attention_mask"])), head_weight(self.target)
        shares = each(weights)
        loss = chunked_loss(
            mine, head_weight(model), target, head, self.objective.name, shares, settings=self.objective.settings
        )
        return loss * shares.sum()


@torch.no_grad()
def measure_depths(
    target: nn.Module, draft: nn.Module, data: Dataset, length: int, mask: int, batch_size: int = 16
) -> list[Acceptance]:
    """Return the acceptance of the tokens behind 0, 1, ..., ``length`` - 1 masks on the continuations of ``data``.

    Args:
        target, draft: causal language models. data: rows as ``text.make_dataset`` makes them. length: K.
        mask: token that the masks read. batch_size: rows read together.
    """
    sums = torch.zeros(length, 4, len(data), dtype=torch.float64)
    heads = head_weight(target), head_weight(draft)
    for numbers, places, ids, attention in batches(data, batch_size, heads[0].device):
        state = torch.random.get_rng_state()
        rows = MaskRows.drawn(places.float(), length, 1.0, 1.0)
        torch.random.set_rng_state(state)  # nothing is dropped: what training draws must not change
        with eval_mode(draft):
            states = parallel_states(draft, ids, rows, mask)
        own, n = frozen_hidden(target, ids, attention), ids.shape[1]
        add_rates(sums[0], numbers[places.nonzero()[:, 0].cpu()], own[places], states[:, :n][places], *heads)
        for i in range(1, length):
            here = rows.depth == i
            which = here.nonzero()[:, 0]
            add_rates(sums[i], numbers[which.cpu()], own[which, rows.place[here]], states[:, n:][here], *heads)
    return [Acceptance(*part) for part in sums]


_TYPE = "pard"  # the value of spd_type, as its authors write it


def write_masks(directory: Path, masks: Masks) -> None:
    """Add the mask and K to a model's configuration, as ``pard_token``, which vLLM reads.

    Args:
        directory: of the model. masks: what the draft reads.
    """
    config = read_object(directory / "config.json")
    added = {"pard_token": masks.token, "spd_type": _TYPE, "pard_length": masks.length}
    write_json(directory / "config.json", {**config, **added})


def read_masks(directory: str | Path) -> Masks:
    """Return the masks that ``write_masks`` has written; in files of others, which name no K, it is 8.

    Raises:
        PeftlabError: it is no token of the model, or no number.
    """
    file = Path(directory) / "config.json"
    config = read_object(file)
    token, size = typed_value(config, "pard_token", int, file), typed_value(config, "vocab_size", int, file)
    length = typed_value(config, "pard_length", int, file) if "pard_length" in config else 8
    if not 0 <= token < size or length < 1:
        raise PeftlabError(f"{file}: pard_token {token} and pard_length {length} are not those of {size} tokens")
    return Masks(token, length)


@dataclass(frozen=True)
class PardExport:
    """Writes a PARD draft for vLLM, the only engine that drafts so; see ``base.DraftExporter``.

    Attributes:
        place: the model's directory.
    """

    place: Path

    def write(self, target: str, directory: Path, gamma: int) -> float:
        masks = read_masks(self.place)
        masks.check_gamma(gamma)
        check_plain(self.place, target, "vllm")
        return copy_plain(self.place, directory)

    def command(self, target: str, directory: str, gamma: int) -> str:
        settings = {"method": "draft_model", "model": directory, "num_speculative_tokens": gamma}
        speculative = json.dumps(settings | {"parallel_drafting": True})
        return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(speculative)}"


class PardKind(ModelKind[PardDraft]):
    """A draft model beside its target that writes several tokens in one pass.

    Attributes:
        masks: what it reads in the place of tokens to be written; their id is -1 until the training text is known.
    """

    name = "pard"
    masks: Masks

    def _start(self, target: PretrainedConfig) -> None:
        """Start from the first eighth of the target's layers where the recipe names no start."""
        if not self.config.starts:
            layers = list(range(eighth_of_layers(target.get_text_config(decoder=True).num_hidden_layers)))
            self.config = self.config.model_copy(update={"truncate": Truncation(layers=layers)})

    def check(self, target: PretrainedConfig) -> None:
        """Refuse what a draft model refuses, a mask that is no token, and a method without a fold."""
        if not self.folds:
            raise PeftlabError("draft.kind pard: is stored as merged weights, and the method has no linear fold")
        size, mask = target.get_text_config(decoder=True).vocab_size, self.config.mask_token
        if mask is not None and mask >= size:
            raise PeftlabError(f"draft.mask_token: {mask} is no token; the target has 0 to {size - 1}")
        self._start(target)
        super().check(target)

    def load(self, target: PreTrainedModel) -> None:
        """Load the draft as a draft model, and check that it reads rows of masks."""
        self._start(target.config)
        super().load(target)
        check_parallel(self.adapted)
        token = self.config.mask_token
        if token is None and self.config.from_ is not None:
            token = getattr(self.adapted.config, "pard_token", None)
        self.masks = Masks(token if isinstance(token, int) else -1, self.config.tokens)

    def prepare(self, train: Dataset) -> None:
        """Find the draft where it is searched for, and choose the mask."""
        super().prepare(train)
        self.masks = with_token(self.masks, len(head_weight(self.target)), train["input_ids"])

    def loss(self) -> Loss:
        """Return the objective between target and draft on the text and on rows of masks."""
        config, objective = self.config, make_objective(self.recipe.objective)
        settings = (config.tokens, config.retain, config.retain_least)
        return PardLoss(objective, self.target, *settings, lambda: self.masks.token, self.rewriting())

    def score(self, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
        """Return the mean acceptance over the K tokens of a pass, and each one's own."""
        return rates_by_depth(measure_depths(self.target, model, data, self.masks.length, self.masks.token, batch_size))

    def save(self, train: Dataset) -> Tensor | None:
        """Name the mask in the merged draft's configuration, and which tokens it is restricted to, if it is."""
        write_masks(self.directory / "merged", self.masks)
        return super().save(train)

    def drafter(self, saved: SavedDraft | None) -> ServedDraft | None:
        """Return the target with the merged draft; an untrained one, whose mask is not chosen yet, drafts nothing."""
        if saved is None:
            return None
        assert saved.merged is not None
        engine = draft_engine(saved.merged, tokens=saved.tokens)
        return ServedDraft(self.target, partial(ParallelDrafter, engine, self.masks))

    @classmethod
    def open(cls, place: str, loader: TargetLoader) -> Pair:
        """Load the draft as a draft model is loaded, and its mask."""
        masks = read_masks(place)
        model, engine, vocabulary = open_model(place, loader)
        return loader.pair(model.num_parameters(), whole=engine, masks=masks, vocabulary=vocabulary)

    @classmethod
    def export(cls, place: str, consumer: str) -> Path | DraftExporter:
        """Return what writes the draft for vLLM; others would draft with it token by token."""
        if consumer != "vllm":
            raise PeftlabError(
                f"--for {consumer}: {place} writes several tokens in one pass (pard), which vllm alone drafts with"
            )
        return PardExport(Path(place))

    @classmethod
    def update(cls, config: PardDraft, newest: Path, log: Path) -> PardDraft:
        """Return the section that continues from the merged draft of ``newest``, with its mask."""
        cls.row().newest(newest)
        return super().update(config, newest, log)
