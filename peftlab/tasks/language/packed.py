"""Examples that share a row, and the proof that a model keeps them apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from peftlab.files import member
from peftlab.methods.modes import eval_mode
from peftlab.tasks.packing import packed_rows
from peftlab.tasks.tokens import Row

_TRIED = (8, 16, 24, 32)  # tokens of the examples that are tried


def pack(rows: Sequence[Row], row_tokens: int, *, pad: int) -> dict[str, Tensor]:
    """Return ``input_ids``, ``position_ids`` and ``trained``, [rows, longest], padded on the right.

    Positions begin at 0 with each example, and with the padding; there is no attention mask: from positions alone
    transformers lets tokens attend within their example only. The first token of an example is not trained.
    """
    shared = packed_rows([len(member(row, "input_ids", list, "an example")) for row in rows], row_tokens)
    ids = [[torch.tensor(rows[i]["input_ids"]) for i in row] for row in shared]
    marks = [[torch.tensor(rows[i]["trained"]) & (torch.arange(len(t)) > 0) for i, t in zip(row, texts, strict=True)]
             for row, texts in zip(shared, ids, strict=True)]  # fmt: skip
    longest = max(sum(map(len, texts)) for texts in ids)
    places = []
    for texts in ids:
        sizes = [len(text) for text in texts]
        places.append(torch.cat([torch.arange(size) for size in (*sizes, longest - sum(sizes))]))
    return {
        "input_ids": pad_sequence([torch.cat(texts) for texts in ids], batch_first=True, padding_value=pad),
        "position_ids": torch.stack(places),
        "trained": pad_sequence([torch.cat(row) for row in marks], batch_first=True),
    }


@torch.no_grad()
def packing_fault(model: PreTrainedModel, examples: Sequence[Row]) -> str | None:
    """Return why ``model`` computes something else for examples in one row than for each alone; None if it does not.

    A few beginnings of ``examples`` are tried on the device of the model, in eval mode. The logits may differ by
    rounding: by 0.002 % in fp32, 1 % in fp16 and TF32, 4 % in bf16.
    """
    name = type(model).__name__
    tried: list[Row] = []
    for i, length in enumerate(_TRIED):
        ids = member(examples[i % len(examples)], "input_ids", list, "an example")[:length]
        tried.append({"input_ids": ids, "trained": [True] * len(ids)})
    inputs = {key: value.to(model.device) for key, value in pack(tried, sum(_TRIED), pad=0).items() if key != "trained"}
    with eval_mode(model):
        alone = [model(input_ids=torch.tensor([row["input_ids"]], device=model.device), use_cache=False).logits[0]
                 for row in tried]  # fmt: skip
        try:
            together = model(**inputs, use_cache=False).logits[0]
        except (TypeError, ValueError):
            return f"{name} takes no position_ids"
    single = torch.cat(alone).float()
    single = single - single.mean(-1, keepdim=True)  # softmax does not see what all logits have in common
    shared = together.float() - together.float().mean(-1, keepdim=True)
    difference = float((shared - single).norm() / single.norm())
    if difference <= _precision(model, together) ** (2 / 3):
        return None
    return f"{name} does not keep the examples of a row apart (its logits differ by {difference:.1%})"


def _precision(model: PreTrainedModel, logits: Tensor) -> float:
    """Return the relative rounding error of the coarsest numbers that a forward pass computes with."""
    device = model.device.type
    kinds = {model.dtype, logits.dtype}
    if torch.is_autocast_enabled(device):
        kinds.add(torch.get_autocast_dtype(device))
    if device == "cuda" and torch.get_float32_matmul_precision() != "highest":
        kinds.add(torch.float16)  # TF32 has fp16's ten bits of fraction
    return max(torch.finfo(kind).eps for kind in kinds)
