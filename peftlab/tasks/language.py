"""Language tasks: chats, completions and plain text, trained and scored by the likelihood of the marked tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from peftlab.errors import PeftlabError
from peftlab.files import typed_value
from peftlab.models.chunked_sum import chunked_sum, last_position
from peftlab.models.costs import CountFlops, add_flops
from peftlab.models.load import eval_mode, max_positions
from peftlab.registry import resolve
from peftlab.tasks.batches import Row, SplitRows, eval_batches, packed_rows, padding_or_end, seeded_order, seeded_subset
from peftlab.tasks.conversations import (
    Conversation,
    chat_columns,
    read_completion,
    read_conversation,
    read_plain,
)
from peftlab.tasks.data import (
    Columns,
    Fault,
    Table,
    bin_classes,
    is_missing,
    numbers,
    read_text,
    refuse,
    split_files,
    split_tables,
    text_lines,
)
from peftlab.tasks.generated import make_contexts, prompt_ids, prompt_text
from peftlab.tasks.images import collate_chat, prompt_inputs, with_pictures
from peftlab.tasks.labelled_rows import BEYOND, MISSING, OUTSIDE
from peftlab.tasks.language_examples import (
    Encoding,
    Source,
    Tokens,
    collate,
    encode,
    encode_rows,
    end_of_turn,
    fingerprint,
    fit_length,
    tokenizer_of,
)
from peftlab.tasks.problem import ModelSource, RowSharing, TaskOptions, TaskProblem, mean_loss, score_batches
from peftlab.tasks.table import DataConfig, Task
from peftlab.untyped import Attributes, Processor, Unwrapped


def _read_chat(table: Table, row: int, data: DataConfig) -> Conversation:
    return with_pictures(read_conversation(table, row, data), table.path.parent)


_READERS: dict[str, Callable[[Table, int, DataConfig], Source]] = {
    "text/chat": _read_chat, "text/completion": read_completion, "text/plain": read_plain,
}  # fmt: skip
RowT = TypeVar("RowT")
Named = Callable[[Table, int], Sequence[str] | None]
_ANSWER = 48  # tokens of a sample


def load_language(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, list[Source]], dict[str, int]]:
    """Read ``text/chat``, ``text/completion`` or ``text/plain`` from the user's files.

    ``data.path`` is a file or a directory as for ``text/classification``; for plain text also a ``.txt`` file, whose
    paragraphs are rows, and for completions one whose lines are ``prompt||completion``, as E2E's files are.
    ``data.validation`` rows are drawn with ``data.split_seed`` where no file has them.

    Args:
        task: the table's row.
        data: the recipe's data section.
        classes: not used; a language task has no classes.

    Returns:
        The task, the rows of each split, and the rows left out by reason.

    Raises:
        PeftlabError: a file, column or row that cannot be used.
    """
    fixed: Columns = resolve(task.columns)(data, ())

    def needed(table: Table, row: int) -> Sequence[str] | None:
        return chat_columns(table, row, data) if task.name == "text/chat" else tuple(fixed.inputs)

    splits, left_out = read_splits(task, data, _READERS[task.name], needed)
    return task, splits, left_out


def read_splits(
    task: Task, data: DataConfig, read: Callable[[Table, int, DataConfig], RowT], columns: Named
) -> tuple[dict[str, list[RowT]], dict[str, int]]:
    """Return the rows of each split as ``read`` makes them, and the number of rows left out by reason.

    Args:
        task: the table's row.
        data: the recipe's data section.
        read: table, index of a row and the data section to the row.
        columns: table and row to the columns without whose value the row is left out, where ``data.drop_missing`` says
            so; None: it is left out in any case.
    """
    if data.path is None:
        raise PeftlabError(f"task {task.name} needs data.path")
    left_out = {MISSING: 0, OUTSIDE: 0}
    splits: dict[str, list[RowT]] = {}
    for split, table in _read_tables(task, data).items():
        table, dropped = _with_bin_names(table, data, columns)
        left_out = {why: left_out[why] + dropped[why] for why in left_out}
        splits[split] = [read(table, row, data) for row in range(len(table))]
    if data.validation == "all":
        splits["validation"] = splits.pop("train")
    elif data.validation is not None:
        splits = _hold_out(splits, data.validation, data.split_seed)
    return splits, {why: count for why, count in left_out.items() if count}


def prepare(task: Task, data: DataConfig, source: ModelSource, options: TaskOptions) -> TaskProblem:
    """Read a language task's data, load its model, and return both with the functions that train and score it.

    Args:
        task: the table's row.
        data: the recipe's data section.
        source: where the model comes from.
        options: what else the recipe says.
    """
    splits: dict[str, list[Source]]
    task, splits, left_out = load_rows(task, data)
    held, how = evaluation_splits(task, splits), encoding(task, data, options.max_length)
    processor, sees = processor_for(source, splits)
    tokenizer = tokenizer_of(processor)
    used = {"train": splits["train"], **held} if options.train and "train" in splits else held
    encoder = partial(encode_rows, tokenizer=processor, how=how)
    train, held_out, counted = encode_splits(encoder, used, left_out)
    auto_class = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    model, fresh = source.model(auto_class, options.max_length)
    pad = padding_or_end(tokenizer) or 0
    padded = partial(collate_chat, processor) if sees else partial(collate, pad=pad)
    prompted_examples = held.get("test", held.get("validation", []))  # no checkpoint is chosen by its answers
    return TaskProblem(
        task=task,
        processor=processor,
        model=model,
        fresh=fresh,
        train=train,
        held_out=held_out,
        collate=padded,
        loss=partial(nll, label_smoothing=options.label_smoothing) if options.label_smoothing else nll,
        mean_loss=partial(mean_loss, nll, padded, _trained_tokens),
        denominator=_trained_tokens(train) if len(train) else len,
        score=LanguageEvaluation(held_out, padded, options.batch_size).score,
        deciding="loss",
        higher_is_better=False,
        left_out=left_out,
        splits=counted,
        fingerprint=fingerprint(task.name, sorted(splits.items())),
        auto_class=auto_class,
        pipeline="image-text-to-text" if sees else "text-generation",
        sharing=None if sees else RowSharing(partial(pack, pad=pad), packing_fault),
        sample=partial(sample, processor, next(iter(held.values()))[0], options.max_length),
        contexts=partial(make_contexts, prompted_examples, processor, how, data.split_seed) if task.prompted else None,
    )


def processor_for(source: ModelSource, splits: Mapping[str, Sequence[RowT]]) -> tuple[Processor, bool]:
    """Return what makes a model's inputs of the rows: its tokenizer, or its processor where a row has an image.

    Args:
        source: where the model comes from.
        splits: rows by split.

    Returns:
        The tokenizer or processor, and whether there are images.
    """
    sees = any(getattr(row, "pictures", ()) for rows in splits.values() for row in rows)
    return (source.text_and_image_processor() if sees else source.tokenizer()), sees


def load_rows(task: Task, data: DataConfig) -> tuple[Task, dict[str, list[RowT]], dict[str, int]]:
    """Return what ``task.load`` does, with ``data.max_train_examples`` rows to train on.

    Args:
        task: the table's row.
        data: the recipe's data section.
    """
    task, splits, left_out = resolve(task.load)(task, data)
    chosen = seeded_subset(len(splits.get("train", ())), data.max_train_examples, data.split_seed)
    if chosen is not None:
        rows = splits["train"]
        splits, left_out = {**splits, "train": [rows[i] for i in chosen]}, {**left_out, BEYOND: len(rows) - len(chosen)}
    return task, splits, left_out


def evaluation_splits(task: Task, splits: Mapping[str, list[RowT]]) -> dict[str, list[RowT]]:
    """Return the splits that a model is evaluated on.

    Args:
        task: the table's row, named in the error.
        splits: rows by split.

    Raises:
        PeftlabError: there is none.
    """
    held = {name: splits[name] for name in ("validation", "test") if name in splits}
    if not held:
        raise PeftlabError(f"task {task.name}: no validation split; set data.validation")
    return held


def encode_splits(
    encode: Callable[[Sequence[RowT]], tuple[Dataset, SplitRows]],
    splits: Mapping[str, Sequence[RowT]],
    left_out: dict[str, int],
) -> tuple[Dataset, dict[str, Dataset], dict[str, SplitRows]]:
    """Return the training examples, empty without such a split, the held-out ones by split, and each split's rows.

    Args:
        encode: rows to their examples, and how many are used and left out.
        splits: rows by split.
        left_out: reason to the number of rows left out so far; those of all splits are added.
    """
    encoded: dict[str, Dataset] = {}
    counted: dict[str, SplitRows] = {}
    for split, rows in splits.items():
        encoded[split], counted[split] = encode(rows)
        for why, count in counted[split].left_out.items():
            left_out[why] = left_out.get(why, 0) + count
    return encoded.pop("train", Dataset.from_dict({})), encoded, counted


def examples(
    task: Task, data: DataConfig, row: Source, tokenizer: Processor, max_length: int
) -> list[list[tuple[str, Tokens]]]:
    """Return a row's examples as they are trained, each as its sequences with their titles: one without a title.

    Args:
        task: the table's row.
        data: the recipe's data section.
        row: the row.
        tokenizer: the model's tokenizer.
        max_length: tokens of the longest example.
    """
    how = encoding(task, data, max_length)
    found = (part for tokens in encode(row, tokenizer, how) for part in fit_length(tokens, row.where, how))
    return [[("", tokens)] for tokens in found]


def encoding(task: Task, data: DataConfig, max_length: int) -> Encoding:
    """Return how a task's rows become tokens.

    Args:
        task: the table's row.
        data: the recipe's data section.
        max_length: tokens of the longest example.
    """
    return Encoding(max_length, data.too_long or "drop", data.train_on or "assistant", split=task.name == "text/plain")


def _trained_tokens(data: Dataset) -> Callable[[list[int]], float]:
    """Return the function of a global batch's indices to its number of trained tokens, which divides its loss."""
    counts = list(data["trained_tokens"])
    return lambda batch: float(sum(counts[i] for i in batch))


def _read_tables(task: Task, data: DataConfig) -> Mapping[str, Table]:
    files = split_files(str(data.path), () if task.name == "text/chat" else (".txt",))
    documents = {split: file for split, file in files.items() if file.suffix == ".txt"}
    tables = split_tables(
        {split: file for split, file in files.items() if split not in documents}, data.validation, files
    )
    read = partial(_read_pairs, data=data) if task.prompted else partial(_read_paragraphs, data=data)
    return {**tables, **{name: read(file) for name, file in documents.items()}}


def _read_pairs(file: Path, data: DataConfig) -> Table:
    """Return a text file as rows: its lines, of a prompt, ``||`` and a completion."""
    pairs = [(number, *line.partition("||")) for number, line in text_lines(file) if line.strip()]
    for number, _, found, _ in pairs:
        if not found:
            raise PeftlabError(f"{file}:{number}: a line of a prompt, || and a completion has no ||")
    if not pairs:
        raise PeftlabError(f"{file}: no line in it")
    columns: dict[str, list[object]] = {
        data.prompt or "prompt": [prompt.strip() for _, prompt, _, _ in pairs],
        data.completion or "completion": [completion.strip() for *_, completion in pairs],
    }
    return Table(file, columns, [number for number, *_ in pairs])


def _read_paragraphs(file: Path, data: DataConfig) -> Table:
    """Return a text file as rows: its paragraphs, which are separated by empty lines."""
    name = data.text[0] if data.text else "text"
    paragraphs, line = [], 1
    for block in read_text(file).replace("\r\n", "\n").split("\n\n"):
        if block.strip():
            paragraphs.append((line, block.strip("\n")))
        line += block.count("\n") + 2
    if not paragraphs:
        raise PeftlabError(f"{file}: no text in it")
    return Table(file, {name: [text for _, text in paragraphs]}, [line for line, _ in paragraphs])


def _with_bin_names(table: Table, data: DataConfig, named: Named) -> tuple[Table, dict[str, int]]:
    """Return the rows with a word of ``data.bins`` for the number in ``data.completion``, without those in no bin.

    Rows that lack a value are left out where ``data.drop_missing`` says so.
    """
    kept, column = list(range(len(table))), data.completion
    columns = dict(table.columns)
    if data.bins is not None and column is not None:
        faults: list[Fault] = []
        values = numbers(table, column, faults)
        refuse(faults)
        places, words = bin_classes(values, data.bins), list(data.bins)
        columns[column] = [None if place is None else words[place] for place in places]
        absent = [is_missing(value) for value in table.columns[column]]  # left out as such, or refused where it is read
        kept = [row for row, place in enumerate(places) if place is not None or absent[row]]
    inside = len(kept)
    if data.drop_missing:
        worded = replace(table, columns=columns)
        found = {row: named(worded, row) for row in kept}
        kept = [
            row for row, names in found.items()
            if names is not None and not any(is_missing(columns[name][row]) for name in names if name in columns)
        ]  # fmt: skip
    if not kept:
        raise PeftlabError(f"{table.path}: no examples; every row is left out")
    left_out = {OUTSIDE: len(table) - inside, MISSING: inside - len(kept)}
    return replace(table, columns=columns).take(list(columns), kept), left_out


def _hold_out(splits: dict[str, list[RowT]], validation: int | float, seed: int) -> dict[str, list[RowT]]:
    rows = splits["train"]
    size = validation if isinstance(validation, int) else round(validation * len(rows))
    if not 0 < size < len(rows):
        raise PeftlabError(
            f"data.validation {validation}: holds out {size} of {len(rows)} examples, and leaves none to train on"
            if size
            else f"data.validation {validation}: holds out none of {len(rows)} examples"
        )
    chosen = set(seeded_order(len(rows), seed, 1)[:size])
    return {
        **splits,
        "train": [row for i, row in enumerate(rows) if i not in chosen],
        "validation": [row for i, row in enumerate(rows) if i in chosen],
    }


@torch.no_grad()
def sample(processor: Processor, row: Source, max_length: int, model: nn.Module) -> str:
    """Return the answer that a model decodes greedily to a held-out row.

    Args:
        processor: the model's tokenizer, or its processor where the row has images.
        row: the held-out row.
        max_length: tokens of a text's end that the model reads at most.
        model: a causal language model.
    """
    bare: Unwrapped = getattr(model, "module", model)
    tokenizer = tokenizer_of(processor)
    text = prompt_text(row, processor) if isinstance(row, Conversation) else row.prompt or row.completion[:40]
    if isinstance(row, Conversation) and row.pictures:
        inputs = prompt_inputs(processor, [text], [[picture.path for picture in row.pictures]])
    else:
        ids = torch.tensor([prompt_ids(row, text, tokenizer)[-max_length:]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs = {key: value.to(bare.device) for key, value in inputs.items()}
    length, own = inputs["input_ids"].shape[1], bare.generation_config.eos_token_id
    positions = max_positions(bare.config.get_text_config(decoder=True))
    room = _ANSWER if positions is None else min(_ANSWER, positions - length)
    if room < 1:
        return ""
    ends = {*(own if isinstance(own, list) else [own]), *end_of_turn(tokenizer)} - {None}
    with eval_mode(bare):
        output = bare.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=room,
            eos_token_id=sorted(ends) or None,
            pad_token_id=padding_or_end(tokenizer),
        )
    answer = output[0, length:]
    return str(tokenizer.decode(answer, skip_special_tokens=True)).strip()


# --- The negative log-likelihood of the trained tokens, without ever holding logits of all of them.
_CHUNK = 256  # tokens whose logits live at a time
_READS_HEAD: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def nll(model: nn.Module, inputs: Mapping[str, Tensor], *, label_smoothing: float = 0.0) -> Tensor:
    """Return Σ -log p(token | tokens before it) over the trained tokens of a batch, in fp32.

    Args:
        model: a causal language model, wrapped by accelerate or not.
        inputs: ``input_ids``, ``attention_mask`` or ``position_ids``, and ``trained``, [b, n], padded on the right.
        label_smoothing: share s of each token's loss that is the mean over the vocabulary instead: p(token) becomes
            the geometric mean p(token)^(1-s) · Π p(any)^(s/V).
    """
    loss = partial(F.cross_entropy, reduction="sum", label_smoothing=label_smoothing)
    bare: Unwrapped = getattr(model, "module", model)
    if not head_is_separable(bare):
        return loss(*_trained_logits(model, inputs))
    hidden, targets = _trained_states(model, inputs)

    def chunk_loss(rows: Tensor, part: Tensor) -> Tensor:
        return loss(head_logits(bare, part), targets[rows])

    # Logits [T, V] of a large vocabulary would take more memory than the model: only a chunk of them exists at a time.
    rows = torch.arange(len(hidden), device=hidden.device)
    return chunked_sum(chunk_loss, hidden, rows, _CHUNK, list(bare.get_output_embeddings().parameters()))


def token_nll(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return -log p(token | tokens before it) of each trained token, [T], row by row; arguments as for ``nll``.

    For losses that are no sum over tokens: which gradient a token's logits receive is known in the backward pass only,
    which computes each chunk's logits again.

    Args:
        model: a causal language model, wrapped by accelerate or not.
        inputs: a batch, as for ``nll``.
    """
    loss = partial(F.cross_entropy, reduction="none")
    bare: Unwrapped = getattr(model, "module", model)
    if not head_is_separable(bare):
        return loss(*_trained_logits(model, inputs))
    hidden, targets = _trained_states(model, inputs)

    def chunk_loss(part: Tensor, ids: Tensor) -> Tensor:
        return loss(head_logits(bare, part), ids)

    parts = zip(hidden.split(_CHUNK), targets.split(_CHUNK), strict=True)
    return torch.cat([checkpoint(chunk_loss, *part, use_reentrant=False) for part in parts])


def _trained_states(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the states [T, H] that the LM head predicts the trained tokens from, and these tokens' ids [T]."""
    given, kept = _forward_inputs(inputs), inputs["trained"][:, 1:]
    bare: Unwrapped = getattr(model, "module", model)
    with _last_states(bare) as states:
        # Through the wrapper: DDP must see a forward pass.
        model(**given, logits_to_keep=last_position(given["input_ids"]))
    return states[0][:, :-1][kept], inputs["input_ids"][:, 1:][kept]


def _trained_logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits [T, V] of the trained tokens, in fp32, and these tokens' ids [T]."""
    kept = inputs["trained"][:, 1:]
    logits = model(**_forward_inputs(inputs)).logits
    return logits[:, :-1][kept].float(), inputs["input_ids"][:, 1:][kept]


def _forward_inputs(inputs: Mapping[str, Tensor]) -> Attributes:
    """Return the entries of a batch that the model's forward takes."""
    return {"use_cache": False} | {key: value for key, value in inputs.items() if key != "trained"}


def head_logits(model: Unwrapped, hidden: Tensor) -> Tensor:
    """Return the logits [t, V] of states [t, H]: the LM head's, scaled and capped as the model's class does.

    Args:
        model: a causal language model.
        hidden: states [t, H] after the final norm.
    """
    config = model.config.get_text_config(decoder=True)
    logits = model.get_output_embeddings()(hidden).float()
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None) is not None:  # Granite
        logits = logits / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
def head_is_separable(model: Unwrapped) -> bool:
    """Return whether ``head_logits`` of the last states is what the model computes: tried once, then remembered."""
    if model not in _READS_HEAD:
        with CountFlops() as trial:
            _READS_HEAD[model] = _head_matches(model)
        add_flops(-trial.flops)  # no part of the step that is being counted
    return _READS_HEAD[model]


def _head_matches(model: PreTrainedModel) -> bool:
    """Return whether ``head_logits`` gives the model's own logits for a few tokens, up to rounding."""
    head = model.get_output_embeddings()
    if head is None or any(type(p.data) is not Tensor for p in head.parameters()):
        return False
    size = min(16, model.get_input_embeddings().get_parameter("weight").shape[0])
    ids = torch.arange(size, device=model.device)[None]
    with eval_mode(model), _last_states(model) as states:
        try:
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
            model(input_ids=ids, use_cache=False, logits_to_keep=last_position(ids))
        except TypeError:  # a model that does not take logits_to_keep
            return False
        if not states:
            return False
        own = head_logits(model, states[0][0])
    return bool((own - logits).abs().max() <= 1e-3 * logits.abs().max().clamp_min(1e-6))


@contextmanager
def _last_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Yield a list that receives the states [b, n, H] that each forward pass gives to the LM head."""
    states: list[Tensor] = []

    def keep(module: nn.Module, arguments: object, output: Unwrapped) -> None:
        states.append(output[0])

    handle = model.get_decoder().register_forward_hook(keep)
    try:
        yield states
    finally:
        handle.remove()


@dataclass(frozen=True)
class LanguageEvaluation:
    """Held-out splits and how a language model is scored on them.

    Attributes:
        splits: tokenised examples by split name.
        collate: rows to one batch.
        batch_size: examples per batch and process.
    """

    splits: Mapping[str, Dataset]
    collate: Callable[[Sequence[Row]], dict[str, Tensor]]
    batch_size: int

    def score(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Return per split ``loss`` (nats per trained token), ``perplexity`` and ``bits_per_byte`` of the trained text.

        Every process must call it, and each gets the same result.
        """
        scores = {}
        for split, data in self.splits.items():
            total = math.fsum(self.totals(model, data))
            loss = total / sum(data["trained_tokens"])
            size = max(1, sum(data["trained_bytes"]))
            scores[split] = {
                "loss": loss,
                "perplexity": math.exp(min(loss, 700)),
                "bits_per_byte": total / math.log(2) / size,
            }
        return scores

    def totals(self, model: nn.Module, data: Dataset) -> list[float]:
        """Return the summed NLL of each batch, in the order of ``eval_batches``.

        Args:
            model: the model, in eval mode.
            data: tokenised examples.
        """
        batches = eval_batches(data["length"], self.batch_size)
        return score_batches(data, batches, self.collate, lambda inputs: float(nll(model, inputs)))


# --- Examples that share a row, and the proof that a model keeps them apart.
_TRIED = (8, 16, 24, 32)  # tokens of the examples that are tried


def pack(rows: Sequence[Row], row_tokens: int, *, pad: int) -> dict[str, Tensor]:
    """Return ``input_ids``, ``position_ids`` and ``trained``, [rows, longest], padded on the right.

    Positions begin at 0 with each example, and with the padding; there is no attention mask: from positions alone
    transformers lets tokens attend within their example only. The first token of an example is not trained.

    Args:
        rows: tokenised examples.
        row_tokens: tokens of a row at most, unless one example is longer.
        pad: the id that fills rows.
    """
    shared = packed_rows([len(typed_value(row, "input_ids", list, "an example")) for row in rows], row_tokens)
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
    """Return why ``model`` computes different logits for examples in one row than for each alone; None if it does not.

    A few beginnings of ``examples`` are tried on the device of the model, in eval mode. The logits may differ by
    rounding: by 0.002 % in fp32, 1 % in fp16 and TF32, 4 % in bf16.

    Args:
        model: a causal language model.
        examples: tokenised examples.
    """
    name = type(model).__name__
    tried: list[Row] = []
    for i, length in enumerate(_TRIED):
        ids = typed_value(examples[i % len(examples)], "input_ids", list, "an example")[:length]
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
    # The power 2/3 of one operation's rounding error allows for a whole model's: the percentages named above.
    difference = float((shared - single).norm() / single.norm())
    if difference <= _rounding_error(model, together) ** (2 / 3):
        return None
    return f"{name} does not keep the examples of a row apart (its logits differ by {difference:.1%})"


def _rounding_error(model: PreTrainedModel, logits: Tensor) -> float:
    """Return the relative rounding error of the coarsest numbers that a forward pass computes with."""
    device = model.device.type
    kinds = {model.dtype, logits.dtype}
    if torch.is_autocast_enabled(device):
        kinds.add(torch.get_autocast_dtype(device))
    if device == "cuda" and torch.get_float32_matmul_precision() != "highest":
        kinds.add(torch.float16)  # TF32 has fp16's ten bits of fraction
    return max(torch.finfo(kind).eps for kind in kinds)
