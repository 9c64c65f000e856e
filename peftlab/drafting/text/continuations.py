"""Training examples of a draft: prompt and continuation as one row, and which predictions count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor

from peftlab.drafting.objectives import TopK
from peftlab.files import member
from peftlab.tasks.prompts import Request
from peftlab.tasks.tokens import Row


def make_dataset(
    requests: Sequence[Request],
    stored: Sequence[TopK] | None = None,
    counted: Sequence[Sequence[int]] | None = None,
    teachers: Sequence[int] | None = None,
) -> Dataset:
    """Return requests as rows ``input_ids``, ``prompt`` (its length), ``length`` and ``kept`` (predictions that count).

    Args:
        stored: the target's top-k distributions for each response's tokens that count, added as columns
            ``top_values``, ``top_indices`` and ``top_rest``.
        counted: which tokens of each response count, rising, added as a column; None: all.
        teachers: which of several targets wrote each response, added as column ``teacher``; None: there is one target.
    """
    rows = []
    for i, request in enumerate(requests):
        ids = [*request.prompt, *request.response]
        sizes = {"prompt": len(request.prompt), "length": len(ids), "kept": len(request.response)}
        row: dict[str, object] = {"input_ids": ids, **sizes}
        if counted is not None:
            row |= {"kept": len(counted[i]), "counted": list(counted[i])}
        if teachers is not None:
            row |= {"teacher": teachers[i]}
        if stored is not None:
            values, indices, rest = (part.tolist() for part in stored[i])
            row |= {"top_values": values, "top_indices": indices, "top_rest": rest}
        rows.append(row)
    return Dataset.from_list(rows)


@dataclass(frozen=True)
class Collate:
    """Rows to a batch, padded on the right.

    The mask comes from lengths, never from token ids, so that padding may be the end-of-sequence token.
    ``start`` [b] is the place of the prompt's last token, which predicts the first one of the continuation.
    ``weights`` [b, n] is 1 where the prediction made at that place is of a token of the continuation that counts:
    from there to the last token but one where all count. ``teacher`` [b], of several targets, is as in the rows.
    """

    pad: int = 0

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        lengths = [member(row, "length", int, "an example") for row in rows]
        longest = max(lengths)
        batch = {
            "input_ids": torch.full((len(rows), longest), self.pad),
            "attention_mask": torch.zeros(len(rows), longest, dtype=torch.long),
            "weights": torch.zeros(len(rows), longest),
            "start": torch.tensor([member(row, "prompt", int, "an example") - 1 for row in rows]),
        }
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            batch["input_ids"][i, :length] = torch.tensor(row["input_ids"])
            batch["attention_mask"][i, :length] = 1
            own = batch["weights"][i, batch["start"][i] : length - 1]
            own[torch.tensor(row["counted"]) if "counted" in row else slice(None)] = 1
        if "teacher" in rows[0]:
            batch["teacher"] = torch.tensor([member(row, "teacher", int, "an example") for row in rows])
        for key in ("top_values", "top_indices", "top_rest"):
            if key in rows[0]:  # [predictions of the batch, ...]: in the order of weights' nonzero places
                batch[key] = torch.cat([torch.tensor(row[key]) for row in rows])
        return batch


def continued(inputs: dict[str, Tensor]) -> Tensor:
    """Return which places of a batch predict a token of the continuation, whether it counts or not, [b, n]."""
    place = torch.arange(inputs["input_ids"].shape[1], device=inputs["input_ids"].device)
    last = inputs["attention_mask"].sum(1, keepdim=True) - 1
    return (place >= inputs["start"][:, None]) & (place < last)


def following(input_ids: Tensor) -> Tensor:
    """Return the token after each one, [b, n]; the last place is filled with 0."""
    return torch.cat([input_ids[:, 1:], torch.zeros_like(input_ids[:, :1])], 1)
