"""Rows of masks behind every place of a text: what a draft reads to learn to write several tokens in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from peftlab.decoding.cache import additive
from peftlab.drafting.hidden_states import forward_hidden, head_weight, unwrapped
from peftlab.errors import PeftlabError
from peftlab.methods.modes import eval_mode


def drawn_places(count: int, length: int, retain: float, least: float) -> list[Tensor]:
    """Return which places keep a row with i masks, for i = 0, ..., length - 1: conditional dropping (COD).

    Of ``count`` places i = 0 keeps all; a later i keeps ⌊count · max(retain^i, least)⌋ drawn from the places after
    those that i - 1 keeps, or all of these where there are fewer. So every row's masks before its last one are rows,
    too.
    Randomness comes from torch's global generator, whose state checkpoints contain.

    Returns:
        For each i its places, rising.
    """
    kept = [torch.arange(count)]
    for i in range(1, length):
        possible = kept[-1] + 1
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
        """Draw rows behind the places of a batch that are above 0 [b, n], one run of places a text."""
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
        seen[:, n:, n:] = (anchor[:, None] == anchor[..., None]) & (self.depth[:, None] <= self.depth[..., None])
        return seen


def unused_token(size: int, texts: Iterable[Sequence[int]]) -> int:
    """Return the highest of ``size`` token ids that no text contains, as a mask.

    Rows of the LM head past the tokenizer's tokens come first, then special tokens, which text seldom contains.

    Raises:
        PeftlabError: the texts contain every token.
    """
    used = {token for text in texts for token in text}
    free = next((token for token in reversed(range(size)) if token not in used), None)
    if free is None:
        raise PeftlabError("draft.mask_token: the training text contains every token; name one to use as the mask")
    return free


def parallel_states(model: nn.Module, ids: Tensor, rows: MaskRows, mask: int | Tensor) -> Tensor:
    """Return the states that the LM head reads of texts [b, n], padded on the right, and of the rows: [b, n + R, H].

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
    """Return a mask as models of transformers take it, or one for each type of layer, with the model's windows."""
    text = config.get_text_config(decoder=True)
    window, types = getattr(text, "sliding_window", None), set(getattr(text, "layer_types", None) or ())

    def within(window: int | None) -> Tensor | None:
        near = visible if window is None else visible & (positions[..., None] - positions[:, None] < window)
        return additive(near[:, None], dtype)

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
