"""Text that the target wrote: continuations of prompts, stored on disk and never written twice.

A data set is a directory named by its fingerprint. Each part file contains one batch of continuations and is written
once and whole, so that an interrupted run continues with the next part and writes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engine import Engine
from peftlab.decoding.engines import build_engine
from peftlab.decoding.sampling import Sampling
from peftlab.errors import PeftlabError
from peftlab.files import LOCK, Json, locked, member, parse_json, read_object, read_text, write_json, write_text
from peftlab.tasks.prompts import Request

_SAMPLED = 1024  # elements per tensor that distinguish one set of weights from another


@dataclass(frozen=True)
class Writing:
    """How the target writes.

    Attributes:
        max_new_tokens: most tokens of a continuation.
        temperature: 0 is greedy. top_p: nucleus; None for all.
        samples: continuations per prompt.
        seed: continuation i is drawn with a generator of its own, seeded ``seed + i``.
        batch_size: prompts decoded together; a part file contains them.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float | None = None
    samples: int = 1
    seed: int = 0
    batch_size: int = 32


def write_continuations(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], writing: Writing, cache: Path, eos: frozenset[int]
) -> tuple[Path, list[Request]]:
    """Return the data set's directory and the target's continuations: sample s of prompt i at i·samples + s.

    Parts that exist are read; the others are written, each as soon as its batch is done.

    Args:
        target: a causal language model in eval mode.
        prompts: token ids. cache: the directory of data sets. eos: ids that end a continuation.

    Raises:
        PeftlabError: a prompt is longer than the target's context, or a part is damaged.
    """
    digest = fingerprint(target, prompts, writing, eos)
    directory = cache / digest[:16]
    note = {"fingerprint": digest, **asdict(writing), "prompts": len(prompts), "eos": sorted(eos)}
    jobs = [prompt for prompt in prompts for _ in range(writing.samples)]
    batches = {start: jobs[start : start + writing.batch_size] for start in range(0, len(jobs), writing.batch_size)}
    parts = {start: directory / f"part-{start // writing.batch_size:06d}.jsonl" for start in batches}

    def write() -> None:
        if not (directory / "data.json").exists():
            write_json(directory / "data.json", note)
        engine: Engine | None = None
        for start in [start for start, part in parts.items() if not part.exists()]:
            engine = engine or build_engine(target)
            rows = _batch(engine, batches[start], writing, start, eos)
            lines = [json.dumps({"prompt_ids": list(p), "response_ids": r}) for p, r in rows]
            write_text(parts[start], "\n".join(lines) + "\n")

    written_once([directory / "data.json", *parts.values()], write)
    return directory, [request for start, part in parts.items() for request in _read_part(part, len(batches[start]))]


def written_once(files: Sequence[Path], write: Callable[[], None]) -> None:
    """Call ``write``, which writes those of ``files`` that are missing, unless none is.

    Cells of a table that start together need the same files: one of them writes, the others wait for it.
    """
    if not all(file.exists() for file in files):
        with locked(files[0].with_name(f"{LOCK}-{files[0].name}"), files[0].parent, wait=math.inf):
            write()


def _batch(
    engine: Engine, prompts: Sequence[Sequence[int]], writing: Writing, start: int, eos: frozenset[int]
) -> Iterator[tuple[Sequence[int], list[int]]]:
    sampling = Sampling(writing.temperature, top_p=writing.top_p, seed=writing.seed + start)
    outputs = decode(engine, prompts, StoppingCriteria(writing.max_new_tokens, eos), sampling=sampling)
    for prompt, output in zip(prompts, outputs, strict=True):
        yield prompt, output.tokens


def _read_part(path: Path, count: int) -> list[Request]:
    try:
        rows = [parse_json(line) for line in read_text(path).splitlines()]
        requests = [Request(_ids(row, "prompt_ids"), _ids(row, "response_ids")) for row in rows]
    except (PeftlabError, ValueError) as error:
        raise PeftlabError(f"{path}: damaged ({error}); delete it and run again") from None
    if len(requests) != count:
        raise PeftlabError(f"{path}: {len(requests)} continuations instead of {count}; delete it and run again")
    return requests


def _ids(row: Json, key: str) -> list[int]:
    """Return the token ids of a key of a part file's line."""
    ids = row.get(key) if isinstance(row, dict) else None
    found = [i for i in ids if isinstance(i, int)] if isinstance(ids, list) else []
    if not isinstance(ids, list) or len(found) < len(ids):
        raise ValueError(f"{key} is not a list of token ids")
    return found


def check_room(lengths: Sequence[int], limit: int | None, what: str) -> None:
    """Raise ``PeftlabError`` if an example does not fit.

    Args:
        lengths: tokens of each prompt together with the most that may follow it.
        limit: positions; None for any number. what: the limit in words, with the way out.
    """
    long = [i for i, length in enumerate(lengths) if limit is not None and length > limit]
    if long:
        raise PeftlabError(
            f"data: {len(long)} of {len(lengths)} examples are longer than {limit} tokens, {what}; the first is number "
            f"{long[0] + 1}, the longest has {max(lengths)} tokens, data.max_new_tokens included"
        )


def fingerprint(target: nn.Module, prompts: Sequence[Sequence[int]], writing: Writing, eos: frozenset[int]) -> str:
    """Return a digest of all that determines the text: weights, prompts and how it is written."""
    digest = hashlib.sha256(weights_digest(target).encode())
    settings = {k: v for k, v in asdict(writing).items() if v is not None}
    digest.update(json.dumps([settings, sorted(eos), [list(p) for p in prompts]], sort_keys=True).encode())
    return digest.hexdigest()


@torch.no_grad()
def weights_digest(model: nn.Module) -> str:
    """Return a digest of a model's weights: names, shapes, dtypes and up to 1,024 evenly spaced elements per tensor.

    The state dict has the scales of weights in 8 and 4 bits too, without which their codes say little.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED].float().cpu().contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()


def known_fingerprint(directory: Path) -> str:
    """Return the fingerprint that a data set directory says it has."""
    return member(read_object(directory / "data.json"), "fingerprint", str, directory / "data.json")
