"""The text a draft learns from: continuations by the target, stored on disk, as rows and batches."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.decoding.cache import Engine
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_free import END, SuffixAutomaton
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.objectives import TopK, topk_targets
from peftlab.drafting.target import frozen_hidden, head_weight
from peftlab.errors import PeftlabError
from peftlab.files import (
    LOCK,
    Json,
    locked,
    parse_json,
    read_text,
    replacing,
    typed_value,
    write_json,
    write_text,
)
from peftlab.progress import counted
from peftlab.references import locate
from peftlab.tasks.batches import Row
from peftlab.tasks.data import listed, quoted, read_table, table_suffix
from peftlab.tasks.data import read_text as read_any_text
from peftlab.tasks.prompts import Request


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
    """Collates rows to a batch, padded on the right.

    The mask comes from lengths, never from token ids, so that padding may be the end-of-sequence token.
    ``start`` [b] is the place of the prompt's last token, which predicts the first one of the continuation.
    ``weights`` [b, n] is 1 where the prediction made at that place is of a token of the continuation that counts:
    from there to the last token but one where all count. ``teacher`` [b], of several targets, is as in the rows.
    """

    pad: int = 0

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        lengths = [typed_value(row, "length", int, "an example") for row in rows]
        longest = max(lengths)
        batch = {
            "input_ids": torch.full((len(rows), longest), self.pad),
            "attention_mask": torch.zeros(len(rows), longest, dtype=torch.long),
            "weights": torch.zeros(len(rows), longest),
            "start": torch.tensor([typed_value(row, "prompt", int, "an example") - 1 for row in rows]),
        }
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            batch["input_ids"][i, :length] = torch.tensor(row["input_ids"])
            batch["attention_mask"][i, :length] = 1
            own = batch["weights"][i, batch["start"][i] : length - 1]
            own[torch.tensor(row["counted"]) if "counted" in row else slice(None)] = 1
        if "teacher" in rows[0]:
            batch["teacher"] = torch.tensor([typed_value(row, "teacher", int, "an example") for row in rows])
        for key in ("top_values", "top_indices", "top_rest"):
            if key in rows[0]:  # [predictions of the batch, ...]: in the order of weights' nonzero places
                batch[key] = torch.cat([torch.tensor(row[key]) for row in rows])
        return batch


def continuation_mask(inputs: dict[str, Tensor]) -> Tensor:
    """Return which places of a batch predict a token of the continuation, counted or not, [b, n] booleans."""
    place = torch.arange(inputs["input_ids"].shape[1], device=inputs["input_ids"].device)
    last = inputs["attention_mask"].sum(1, keepdim=True) - 1
    return (place >= inputs["start"][:, None]) & (place < last)


_SAMPLED = 1024  # elements per tensor that distinguish one set of weights from another


@dataclass(frozen=True)
class WritingSettings:
    """Settings by which the target writes its continuations.

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
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    writing: WritingSettings,
    cache: Path,
    eos: frozenset[int],
) -> tuple[Path, list[Request]]:
    """Return the data set's directory and the target's continuations: sample s of prompt i at i·samples + s.

    Part files that exist are read; the others are written, each as soon as its batch is done. A part is named by its
    number and a digest of its prompts, so that a longer list of prompts goes on where a shorter one ended.

    Args:
        target: a causal language model in eval mode.
        prompts: token ids. cache: the directory of data sets. eos: ids that end a continuation.

    Raises:
        PeftlabError: a prompt is longer than the target's context, or a part is damaged.
    """
    known = fingerprint(target, writing, eos)
    directory = cache / known[:16]
    note = {"fingerprint": known, **asdict(writing), "eos": sorted(eos)}
    jobs = [list(prompt) for prompt in prompts for _ in range(writing.samples)]
    batches = {start: jobs[start : start + writing.batch_size] for start in range(0, len(jobs), writing.batch_size)}
    parts = {
        start: directory / f"part-{start // writing.batch_size:06d}-{digest(batch)[:16]}.jsonl"
        for start, batch in batches.items()
    }

    def write() -> None:
        if not (directory / "data.json").exists():
            write_json(directory / "data.json", note)
        engine: Engine | None = None
        stopping = StoppingCriteria(writing.max_new_tokens, eos)
        missing = [start for start, part in parts.items() if not part.exists()]
        for start in counted(missing, f"writing text by the target, {len(jobs):,} answers", len(missing), "batch"):
            engine = engine or build_engine(target)
            sampling = Sampling(writing.temperature, top_p=writing.top_p, seed=writing.seed + start)
            outputs = decode(engine, batches[start], stopping, sampling=sampling)
            rows = zip(batches[start], outputs, strict=True)
            lines = [json.dumps({"prompt_ids": list(ids), "response_ids": output.tokens}) for ids, output in rows]
            write_text(parts[start], "\n".join(lines) + "\n")

    write_missing([directory / "data.json", *parts.values()], write)
    return directory, [request for start, part in parts.items() for request in _read_part(part, len(batches[start]))]


def write_missing(files: Sequence[Path], write: Callable[[], None]) -> None:
    """Call ``write``, which writes the missing ones of ``files``, unless all are there.

    Cells of a table that start together need the same files: one of them writes, the others wait for it.

    Args:
        files: what ``write`` is to leave behind; the lock lies beside the first. write: skips files that exist.
    """
    if not all(file.exists() for file in files):
        with locked(files[0].with_name(f"{LOCK}-{files[0].name}"), files[0].parent, wait=math.inf):
            write()


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


def fingerprint(target: PreTrainedModel, writing: WritingSettings, eos: frozenset[int]) -> str:
    """Return a digest of all that determines a continuation, besides the prompts of its part: model and settings.

    Args:
        target: the model. writing: how it writes. eos: ids that end a continuation.
    """
    settings = {k: v for k, v in asdict(writing).items() if v is not None}
    return digest([model_digest(target), settings, sorted(eos)])


def digest(value: object) -> str:
    """Return SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


_NOT_COMPUTED = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache", "quantization_config")


@torch.no_grad()
def model_digest(model: PreTrainedModel) -> str:
    """Return a digest of what a model computes: its configuration (as of rotations and norms) and its weights.

    Of the weights: names, shapes, dtypes and up to 1,024 evenly spaced elements per tensor. The state dict has the
    scales of weights in 8 and 4 bits too, without which their codes say little.
    """
    settings = {k: v for k, v in json.loads(model.config.to_json_string()).items() if k not in _NOT_COMPUTED}
    running = hashlib.sha256(digest(settings).encode())
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED].float().cpu().contiguous()
        running.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        running.update(some.numpy().tobytes())
    return running.hexdigest()


_TOP_K_PART = 32  # requests per file


@torch.no_grad()
def stored_topk(target: PreTrainedModel, requests: Sequence[Request], k: int, cache: Path) -> list[TopK]:
    """Return the target's top-k distribution at every token of each response, [response, k] per request.

    Part files that are in ``cache`` (under a digest of model, text and k) are read, the others are computed and
    written, each once and whole.

    Args:
        target: a causal language model. requests: prompts with their responses. k: tokens kept at each.
        cache: the directory of data sets.

    Raises:
        PeftlabError: k outside 1..V.
    """
    if not 1 <= k <= len(head_weight(target)):
        raise PeftlabError(f"data.top_k: {k} is outside 1..{len(head_weight(target))}, the vocabulary")
    directory = cache / f"top{k}-{digest([model_digest(target), k, [[r.prompt, r.response] for r in requests]])[:16]}"
    parts = {
        directory / f"part-{start // _TOP_K_PART:06d}.safetensors": requests[start : start + _TOP_K_PART]
        for start in range(0, len(requests), _TOP_K_PART)
    }

    def write() -> None:
        missing = [path for path in parts if not path.exists()]
        for path in counted(missing, "storing the target's distributions", len(missing), "file"):
            tensors: dict[str, torch.Tensor] = {}
            for i, request in enumerate(parts[path]):
                values, indices, rest = _distribution(target, request, k)
                tensors |= {f"{i}.values": values, f"{i}.indices": indices, f"{i}.rest": rest}
            with replacing(path) as temporary:
                write_tensors(temporary, tensors, {})

    write_missing([*parts], write)
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
    # In chunks: logits of a whole response over the vocabulary may not fit beside the model.
    parts = [topk_targets(F.linear(h, head_weight(target)), k) for h in hidden.split(128)]
    return tuple(torch.cat(column).cpu() for column in zip(*parts, strict=True))  # values, indices and rest


_SEEN, _REPEATED = 8, 4  # tokens of the n-grams


@dataclass(frozen=True)
class Repetition:
    """Shares of text that a drafter could copy instead of predict; None where no text is long enough.

    Attributes:
        seen: share of the 8-grams of held-out answers that occur in an answer of the training text.
        repeated: share of the 4-grams of held-out answers that occurred before in the same answer.
    """

    seen: float | None
    repeated: float | None


def repetition(train: Dataset, held_out: Dataset) -> Repetition:
    """Return how much of the held-out answers is repetition.

    Args:
        train, held_out: rows as ``make_dataset`` makes them.
    """
    known = {gram for answer in _answers(train) for gram in _grams(answer, _SEEN)}
    seen: list[bool] = []
    repeated: list[bool] = []
    for answer in _answers(held_out):
        seen += [gram in known for gram in _grams(answer, _SEEN)]
        earlier: set[tuple[int, ...]] = set()
        for gram in _grams(answer, _REPEATED):
            repeated.append(gram in earlier)
            earlier.add(gram)
    return Repetition(_share(seen), _share(repeated))


def _answers(data: Dataset) -> Iterable[list[int]]:
    for ids, prompt in zip(data["input_ids"], data["prompt"], strict=True):
        yield ids[prompt:]


def _grams(tokens: Sequence[int], n: int) -> Iterable[tuple[int, ...]]:
    return zip(*(tokens[i:] for i in range(n)), strict=False)


def _share(found: Sequence[bool]) -> float | None:
    return round(sum(found) / len(found), 4) if found else None


_COLUMNS = ("text", "response", "completion", "answer", "output")


def read_documents(source: str) -> list[str]:
    """Return the texts of a corpus.

    Args:
        source: a table (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``), one text a row, from the first of
            its columns text, response, completion, answer and output; any other file is one text.

    Raises:
        PeftlabError: no such file, no such column, a row that is not a text, or nothing but white space.
    """
    path = locate(source, "corpus")
    if not isinstance(path, Path) or not path.is_file():
        raise PeftlabError(f"corpus {source!r}: no such file")
    texts: list[str] = []
    if table_suffix(path) is None:
        texts.append(read_any_text(path))
    else:
        table = read_table(path)
        name = next((name for name in _COLUMNS if name in table.columns), None)
        if name is None:
            raise PeftlabError(
                f"{path}: no column to copy from ({', '.join(_COLUMNS)}); columns: {listed(table.columns, 50)}"
            )
        for row, text in enumerate(table.columns[name]):
            if not isinstance(text, str):
                raise PeftlabError(f"{table.where(row)}: {name} is not a text, but {quoted(text)}")
            texts.append(text)
    if not any(text.strip() for text in texts):
        raise PeftlabError(f"{path}: no text in it")
    return texts


def index_corpus(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> SuffixAutomaton:
    """Return the suffix automaton of all documents' tokens; no copy crosses from one document to the next.

    Args:
        documents: texts. tokenizer: the target's.
    """
    corpus = SuffixAutomaton()
    for document in documents:
        for token in (*tokenizer(document, add_special_tokens=False)["input_ids"], END):
            corpus.extend(token)
    return corpus
