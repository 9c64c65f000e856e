"""Target probabilities kept on disk: the k largest of every predicted token, and the mass of the others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.drafting.hidden_states import frozen_hidden, head_weight
from peftlab.drafting.objectives import TopK, topk_targets
from peftlab.drafting.text.continuations import Collate
from peftlab.drafting.text.target_text import weights_digest, written_once
from peftlab.errors import PeftlabError
from peftlab.files import replacing
from peftlab.tasks.prompts import Request

_PART = 32  # requests per file


@torch.no_grad()
def stored_topk(target: PreTrainedModel, requests: Sequence[Request], k: int, cache: Path) -> list[TopK]:
    """Return the target's top-k distribution at every token of each response, [response, k] per request.

    Parts that are in ``cache`` (under a digest of weights, text and k) are read, the others are computed and
    written, each once and whole.

    Raises:
        PeftlabError: k outside 1..V.
    """
    if not 1 <= k <= len(head_weight(target)):
        raise PeftlabError(f"data.top_k: {k} is outside 1..{len(head_weight(target))}, the vocabulary")
    text = json.dumps([k, [[r.prompt, r.response] for r in requests]])
    digest = hashlib.sha256((weights_digest(target) + text).encode()).hexdigest()
    directory = cache / f"top{k}-{digest[:16]}"
    parts = {
        directory / f"part-{start // _PART:06d}.safetensors": requests[start : start + _PART]
        for start in range(0, len(requests), _PART)
    }

    def write() -> None:
        for path in [path for path in parts if not path.exists()]:
            tensors: dict[str, torch.Tensor] = {}
            for i, request in enumerate(parts[path]):
                values, indices, rest = _distribution(target, request, k)
                tensors |= {f"{i}.values": values, f"{i}.indices": indices, f"{i}.rest": rest}
            with replacing(path) as temporary:
                write_tensors(temporary, tensors, {})

    written_once([*parts], write)
    found: list[TopK] = []
    for path, part in parts.items():
        stored, _ = read_tensors(path)
        found += [TopK(*(stored[f"{i}.{name}"] for name in ("values", "indices", "rest"))) for i in range(len(part))]
    return found


def _distribution(target: PreTrainedModel, request: Request, k: int) -> tuple[torch.Tensor, ...]:
    ids = [*request.prompt, *request.response]
    row = {"input_ids": ids, "prompt": len(request.prompt), "length": len(ids)}
    inputs = {key: value.to(head_weight(target).device) for key, value in Collate()([row]).items()}
    hidden = frozen_hidden(target, inputs["input_ids"], inputs["attention_mask"])[inputs["weights"] > 0]
    parts = [topk_targets(F.linear(h, head_weight(target)), k) for h in hidden.split(128)]
    return tuple(torch.cat(column).cpu() for column in zip(*parts, strict=True))
