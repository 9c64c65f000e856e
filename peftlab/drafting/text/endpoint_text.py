"""Text that the target wrote on a server: continuations of prompts, each stored as it arrives and asked for once.

A data set is a directory named by a digest of prompts, settings, the endpoint's model id and the target's weights here.
``answers.jsonl`` has one line per answer, in the order of arrival, so that a killed run loses only what it was waiting
for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.drafting.config import DraftData
from peftlab.drafting.text.answer_file import Answer, answer_line, cut_unfinished, read_answers
from peftlab.drafting.text.endpoint_client import ATTEMPTS, FIRST_ATTEMPTS, Refused, Server, served_model
from peftlab.drafting.text.request_forms import FORMS, Form, Reply, ServedPrompt, read_otherwise, read_reply, sampling
from peftlab.drafting.text.retokenised import likeliest, readings
from peftlab.drafting.text.target_text import Writing, weights_digest
from peftlab.errors import PeftlabError
from peftlab.files import LOCK, locked, write_errors, write_json
from peftlab.tasks.data import is_unicode
from peftlab.tasks.prompts import Request

T = TypeVar("T")

_FILE = "answers.jsonl"
_OTHER_PROMPT = "the server read another number of prompt tokens"
_NO_FORM = "the prompt cannot be sent to this server"
_NOT_BACK = "the text does not decode back"


@dataclass(frozen=True)
class ServedText:
    """How a server answered, as ``results.json`` contains it.

    Attributes:
        model: the endpoint's id. answers: stored ones, those that were dropped included.
        forms: form of the request -> answers. dropped: reason -> answers that are not trained on.
        repeated: answers with the text of an earlier sample of the same prompt: many, where a server does not sample.
    """

    model: str
    answers: int
    forms: dict[str, int]
    dropped: dict[str, int]
    repeated: int

    def line(self) -> str:
        """Return it in a sentence."""
        forms = ", ".join(f"{count} by {name}" for name, count in self.forms.items())
        dropped = ", ".join(f"{count} because {reason}" for reason, count in self.dropped.items())
        repeated = f"; {self.repeated} repeat an earlier sample of their prompt" if self.repeated else ""
        return f"text by {self.model}: {self.answers} answers ({forms}); dropped: {dropped or 'none'}{repeated}"


@dataclass(frozen=True)
class Target:
    """The target as it is here: what an answer's tokens are found with.

    Attributes:
        eos: ids that end a continuation.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]


def served_continuations(
    data: DraftData, target: Target, prompts: Sequence[ServedPrompt], writing: Writing, cache: Path
) -> tuple[list[Request | None], ServedText]:
    """Return the continuations by ``data.endpoint``, sample s of prompt i at i·samples + s; None for a dropped one.

    Stored answers are read, the others are asked for.

    Args:
        writing: ``batch_size`` is not used. cache: the directory of data sets.

    Raises:
        PeftlabError: the server cannot be reached, or takes no form of the prompts; a damaged file.
    """
    model = served_model(data)
    directory = cache / _digest(model, target, prompts, writing)[:16]
    jobs = [prompt for prompt in prompts for _ in range(writing.samples)]
    answers = read_answers(directory / _FILE, len(jobs))
    if len(answers) < len(jobs):
        with locked(directory / LOCK, directory, wait=math.inf):  # another run may be asking for the same text
            answers = _complete(data, model, target, jobs, writing, directory)
    rows = [answers[row] for row in range(len(jobs))]
    texts = [(i // writing.samples, answer.text) for i, answer in enumerate(rows) if answer.dropped is None]
    served = ServedText(
        model=model,
        answers=len(rows),
        forms=dict(Counter(answer.form for answer in rows)),
        dropped=dict(Counter(answer.dropped for answer in rows if answer.dropped is not None)),
        repeated=len(texts) - len(set(texts)),
    )
    found = [None if a.ids is None else Request(list(p.ids), a.ids) for p, a in zip(jobs, rows, strict=True)]
    return found, served


def _digest(model: str, target: Target, prompts: Sequence[ServedPrompt], writing: Writing) -> str:
    """Return a digest of what determines the text; of the weights too, since a server keeps its id for new ones."""
    what = [
        model,
        weights_digest(target.model),
        _settings(writing),
        sorted(target.eos),
        [prompt.ids for prompt in prompts],
    ]
    text = json.dumps(what, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _settings(writing: Writing) -> dict[str, float | None]:
    """Return the settings that determine the text."""
    return {key: value for key, value in asdict(writing).items() if key != "batch_size"}


def _complete(
    data: DraftData, model: str, target: Target, jobs: Sequence[ServedPrompt], writing: Writing, directory: Path
) -> dict[int, Answer]:
    """Ask for the answers that are not stored, store each as it arrives, and return all."""
    path = directory / _FILE
    answers = read_answers(path, len(jobs))
    missing = [row for row in range(len(jobs)) if row not in answers]
    if not missing:
        return answers
    print(f"text by {model} at {data.endpoint}: {len(answers)} of {len(jobs)} answers are stored", flush=True)
    server = Server(data)

    def ask(row: int, form: Form, attempts: int = ATTEMPTS) -> Reply | None:
        prompt = form.prompt(target.tokenizer, jobs[row])
        if prompt is None:
            return None
        body = {"model": model, **prompt, **sampling(writing, row)}
        tokens = len(jobs[row].ids) + writing.max_new_tokens
        return server.ask(form.path, read_reply, body, tokens=tokens, attempts=attempts)

    first, *others = missing
    known = next((answer.form for answer in answers.values()), None)
    taken, reply = _first(lambda form: ask(first, form, FIRST_ATTEMPTS), jobs[first], known)
    if not (directory / "data.json").exists():
        write_json(directory / "data.json", {"model": model, **_settings(writing), "answers": len(jobs)})
    cut_unfinished(path)
    with open(path, "ab", buffering=0) as file:

        def store(row: int, reply: Reply | None) -> None:
            answers[row] = _answer(target, jobs[row].ids, writing.max_new_tokens, taken, reply)
            with write_errors(path):
                file.write(answer_line(row, answers[row]))
            if len(answers) % math.ceil(len(jobs) / 10) == 0:
                print(f"{len(answers)} of {len(jobs)} answers", flush=True)

        store(first, reply)
        for row, reply in _together(lambda row: ask(row, taken), others, data.concurrency):
            store(row, reply)
        os.fsync(file.fileno())
    return answers


def _first(ask: Callable[[Form], Reply | None], prompt: ServedPrompt, known: str | None) -> tuple[Form, Reply | None]:
    """Return the first form of request that the server takes and reads as the prompt, and its answer.

    Args:
        known: name of the form of earlier answers: it is tried first, and is the one unless the server refuses it.
    """
    refusals = []
    for form in sorted(FORMS, key=lambda form: form.name != known):
        try:
            reply = ask(form)
        except Refused as error:
            refusals.append(f"{form.name}: {error}")
            continue
        if form.name == known or (reply is not None and not read_otherwise(reply, prompt.ids)):
            return form, reply
        read = f"it read {reply.prompt_tokens} tokens, and the prompt has {len(prompt.ids)}" if reply else _NO_FORM
        refusals.append(f"{form.name}: {read}")
    raise PeftlabError(
        "data.endpoint: the server takes no form of the first prompt; is it the target that it serves?\n  "
        + "\n  ".join(refusals)
    )


def _together(ask: Callable[[int], T], rows: Sequence[int], concurrency: int) -> Iterator[tuple[int, T]]:
    """Yield each row with its answer, in the order of arrival, of at most ``concurrency`` requests at a time.

    The threads end with the process: an interrupt does not wait for the server.
    """
    todo: SimpleQueue[int] = SimpleQueue()
    done: SimpleQueue[tuple[int, T] | BaseException] = SimpleQueue()
    stopped = Event()
    for row in rows:
        todo.put(row)

    def work() -> None:
        while not stopped.is_set():
            try:
                row = todo.get_nowait()
            except Empty:
                return
            try:
                done.put((row, ask(row)))
            except BaseException as error:  # for the thread that waits
                done.put(error)

    for _ in range(min(concurrency, len(rows))):
        Thread(target=work, daemon=True).start()
    try:
        for _ in rows:
            found = done.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        stopped.set()


def _answer(target: Target, prompt: Sequence[int], most: int, form: Form, reply: Reply | None) -> Answer:
    """Return what is stored of a reply; None: the prompt has no such form."""
    if reply is None:
        return Answer(form.name, "", "", None, _NO_FORM)
    ids, dropped = None, None
    if read_otherwise(reply, prompt):
        dropped = _OTHER_PROMPT
    elif reply.finish not in ("stop", "length"):
        dropped = f"it ends with {reply.finish!r}"
    else:
        ids = _ids(target, prompt, most, reply)
        dropped = _NOT_BACK if ids is None else None
    return Answer(form.name, reply.text, reply.finish, ids, dropped)


def _ids(target: Target, prompt: Sequence[int], most: int, reply: Reply) -> list[int] | None:
    """Return a reply's token ids, at most ``most``, with the end of sequence; None if the text does not decode back."""
    cut = reply.finish == "length"
    text = reply.text.rstrip("\ufffd") if cut else reply.text  # the last token may be part of a character
    if "\ufffd" in text or not is_unicode(text):
        return None
    ids: list[int] = []
    if text:
        found = readings(target.tokenizer, prompt, text)
        if not found:
            return None
        ids = likeliest(target.model, prompt, found)
    if not cut and target.eos:
        said = (reply.end, target.tokenizer.eos_token_id, min(target.eos))
        ids = [*ids, next(id_ for id_ in said if id_ in target.eos)]
    return ids[:most] or None
