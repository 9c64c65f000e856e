"""The loss and the acceptance of a gated LoRA: masks beside the text, which the target reads as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from torch import Tensor, nn

from peftlab.decoding.parallel_drafters import Masks
from peftlab.drafting.acceptance import Acceptance, add_rates, batches
from peftlab.drafting.chunked_loss import chunked_loss
from peftlab.drafting.hidden_states import head_weight
from peftlab.drafting.kinds.pard.mask_rows import MaskRows, parallel_states
from peftlab.drafting.objectives import Objective
from peftlab.drafting.text.continuations import following
from peftlab.methods.lora.gate import Gate
from peftlab.methods.modes import eval_mode


def block_rows(weights: Tensor, length: int, offsets: Sequence[int]) -> MaskRows:
    """Return blocks of masks, one behind the other, over the places of texts whose predictions count.

    A block begins with a token of the text, its anchor, and has ``length`` - 1 masks at the places after it. No place
    has two masks, so that a text has fewer masks than tokens.

    Args:
        weights: [b, n], above 0 where a prediction counts: one run of places in each text.
        offsets: the first anchor of each text, counted from its first such place.
    """
    depths, places = [], []
    for line, offset in zip(weights.cpu() > 0, offsets, strict=True):
        inside = torch.arange(int(line.sum()))
        depth = (inside - offset) % length
        masked = (depth > 0) & (inside > offset)
        depths.append(depth[masked])
        places.append(int(line.int().argmax()) + inside[masked])
    depth, place = (nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (depths, places))
    return MaskRows(depth.to(weights.device), place.to(weights.device))


@dataclass
class GatedLoss:
    """The objective of masks against the target's own rows at their places, in one pass of both.

    The rows of the text get no addition: they are the frozen target's, and its predictions are the teacher (Uno, arXiv
    2609.04010). All masks count alike.

    Attributes:
        objective: what is minimised. gate: of the target's LoRA. masks: what they read, known as the training text is.
        blocks: numbers of tokens of a block, each for an equal share of the steps.
    """

    objective: Objective
    gate: Gate
    masks: Callable[[], Masks]
    blocks: Sequence[int]
    _length: int = field(init=False)

    def __post_init__(self) -> None:
        self._length = self.blocks[0]

    def at_step(self, step: int, steps: int) -> str:
        """Choose the length of the blocks of a step; return it where there are several."""
        self._length = self.blocks[min(step * len(self.blocks) // max(steps, 1), len(self.blocks) - 1)]
        return f" blocks of {self._length}" if len(self.blocks) > 1 else ""

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the mean over masks times the tokens of the continuations."""
        ids, weights = inputs["input_ids"], inputs["weights"]
        counts = (weights > 0).sum(1).tolist()
        # A text of two tokens or more has a mask, wherever its blocks begin.
        offsets = [int(torch.randint(max(1, min(self._length, count - 1)), ())) for count in counts]
        rows, masks = block_rows(weights, self._length, offsets), self.masks()
        read = torch.randint_like(rows.depth, masks.token) if masks.noise else masks.token
        # Not only within this call: with gradient checkpointing backward computes layers again.
        self.gate.show(_gated(ids, rows))
        states = parallel_states(model, ids, rows, read)
        which, place = _texts(rows)
        head = head_weight(model).detach()
        own = states[:, : ids.shape[1]].detach()[which, place]
        target, target_head = (following(ids)[which, place], None) if self.objective.name == "ce" else (own, head)
        mine, name = states[:, ids.shape[1] :][rows.depth > 0], self.objective.name
        return chunked_loss(mine, head, target, target_head, name, settings=self.objective.settings) * weights.sum()


def _gated(ids: Tensor, rows: MaskRows) -> Tensor:
    """Return which of n tokens and R rows get the addition, [b, n + R]: the masks."""
    return torch.cat((torch.zeros_like(ids, dtype=torch.bool), rows.depth > 0), 1)


def _texts(rows: MaskRows) -> tuple[Tensor, Tensor]:
    """Return the text and the place of each mask, [M] each, in the order of ``depth > 0``."""
    masked = rows.depth > 0
    which = torch.arange(len(masked), device=masked.device)[:, None].expand_as(masked)
    return which[masked], rows.place[masked]


@torch.no_grad()
def measure_masks(model: nn.Module, gate: Gate, data: Dataset, masks: Masks, batch_size: int = 16) -> list[Acceptance]:
    """Return the acceptance of the first, second, ... mask of a block on the continuations of ``data``.

    Every place that counts is an anchor once.
    """
    sums = torch.zeros(masks.length - 1, 4, len(data), dtype=torch.float64)
    head, ids_of = head_weight(model), torch.tensor([0, *masks.ids(masks.length - 1)])
    for numbers, places, ids, _ in batches(data, batch_size, head.device):
        for offset in range(masks.length):
            rows = block_rows(places.float(), masks.length, [offset] * len(ids))
            with eval_mode(model), gate.over(_gated(ids, rows)):
                states = parallel_states(model, ids, rows, ids_of.to(ids.device)[rows.depth])
            which, place = _texts(rows)
            own, mine = states[which, place], states[:, ids.shape[1] :][rows.depth > 0]
            depth = rows.depth[rows.depth > 0]
            for i, total in enumerate(sums, start=1):
                here = depth == i
                add_rates(total, numbers[which[here].cpu()], own[here], mine[here], head, head)
    return [Acceptance(*total) for total in sums]
