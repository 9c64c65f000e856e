"""Text that the target wrote on a server: a client, the forms of requests, and answers stored as they arrive."""

from __future__ import annotations

import json
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeVar

import httpx2
import torch
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.drafting.config import DraftData
from peftlab.drafting.target import frozen_hidden, head_weight
from peftlab.drafting.text import WritingSettings, digest, model_digest
from peftlab.errors import PeftlabError, did_you_mean, reason
from peftlab.files import LOCK, Json, locked, parse_json, read_text, typed_value, write_errors, write_json
from peftlab.progress import counted
from peftlab.tasks.conversations import Message
from peftlab.tasks.data import is_unicode
from peftlab.tasks.prompts import Request

ATTEMPTS = 8  # at one request: two minutes, longer than a server takes to be restarted
FIRST_ATTEMPTS = 3  # at the first one, where a wrong address is likelier than a short failure
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before the second attempt, and at most; it doubles in between
_LONGEST_ASKED = 3600.0  # seconds that a server may ask to wait
_TIMEOUT = 600.0  # seconds without a byte
_RETRYABLE_STATUSES = frozenset({408, 425, 429})  # statuses that pass, beside all from 500


class RequestRefused(PeftlabError):
    """The server refuses such a request, now and later."""


class _RetryableError(Exception):
    """A failure that may be over at the next attempt, ``seconds`` from now if the server says so."""

    def __init__(self, text: str, seconds: float | None = None) -> None:
        super().__init__(text)
        self.seconds = seconds


class RateLimiter:
    """Spaces requests evenly in time, for all threads together."""

    def __init__(self, requests_per_minute: float | None = None, tokens_per_minute: float | None = None) -> None:
        self._request = 60 / requests_per_minute if requests_per_minute else 0.0
        self._token = 60 / tokens_per_minute if tokens_per_minute else 0.0
        self._next = time.monotonic()
        self._lock = threading.Lock()

    def wait(self, tokens: int) -> None:
        """Sleep until a request for N tokens may be sent; requests are spaced evenly."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next)
            self._next = start + max(self._request, tokens * self._token)
        time.sleep(start - now)

    def pause(self, seconds: float) -> None:
        """Hold back all requests for N seconds."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)


class Server:
    """A client of the server of ``data.endpoint``.

    Raises:
        PeftlabError: the address is no URL; the environment does not have the key that ``data.endpoint_key`` names, or
            names a proxy that cannot be used.
    """

    def __init__(self, data: DraftData) -> None:
        self.url = str(data.endpoint)
        self._key = _key(data.endpoint_key)
        self._limiter = RateLimiter(data.requests_per_minute, data.tokens_per_minute)
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "peftlab"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        # Redirects are not followed (the default): the key would be sent to wherever they lead.
        limits = httpx2.Limits(max_connections=None)  # data.concurrency limits them
        try:
            httpx2.URL(self.url)
            self._client = httpx2.Client(headers=headers, timeout=_TIMEOUT, limits=limits)
        except httpx2.InvalidURL as error:
            raise PeftlabError(f"data.endpoint: {self.url} is no URL ({reason(error)})") from None
        except (ImportError, ValueError) as error:
            raise PeftlabError(f"data.endpoint: the environment's proxy cannot be used ({reason(error)})") from None

    def ask(
        self,
        path: str,
        read: Callable[[dict[str, Json]], T],
        body: dict[str, Json] | None = None,
        *,
        tokens: int = 0,
        attempts: int = ATTEMPTS,
    ) -> T:
        """Return what ``read`` makes of the answer to a POST of ``body``, or to a GET.

        Args:
            read: raises ``PeftlabError`` for what is not an answer; the request is then sent again.
            tokens: that it may cost at most, for ``data.tokens_per_minute``.

        Raises:
            RequestRefused: the server does not take the request.
            PeftlabError: it does not take the key, or no attempt was answered.
        """

        def seconds(state: RetryCallState) -> float:
            """Return how long to wait before the next attempt: as the server says, else twice as long as before."""
            error = state.outcome.exception() if state.outcome is not None else None
            if isinstance(error, _RetryableError) and error.seconds is not None:
                self._limiter.pause(error.seconds)  # other threads' requests would be turned away, too
                return error.seconds
            return min(FIRST_WAIT * 2 ** (state.attempt_number - 1), LONGEST_WAIT) * random.uniform(0.5, 1)

        def once() -> T:
            self._limiter.wait(tokens)
            return self._once(path, read, body)

        retry = retry_if_exception_type(_RetryableError)
        try:
            return Retrying(stop=stop_after_attempt(attempts), wait=seconds, retry=retry, reraise=True)(once)
        except _RetryableError as error:
            failed = f"no answer after {attempts} attempts ({error})"
            raise PeftlabError(f"data.endpoint: {self.url}{path}: {failed}") from None

    def _once(self, path: str, read: Callable[[dict[str, Json]], T], body: dict[str, Json] | None) -> T:
        """Send the request once and return what ``read`` makes of the answer."""
        content = json.dumps(body).encode() if body is not None else None
        try:
            response = self._client.request("GET" if body is None else "POST", self.url + path, content=content)
            if not response.is_success:
                raise self._status(path, response)
            text = response.content.decode("utf-8")
        except (httpx2.HTTPError, UnicodeError) as error:  # refused, hung up, cut short, timed out, not text
            raise _RetryableError(self._shown(reason(error))) from None
        try:
            value = parse_json(text)
            if isinstance(value, dict):
                return read(value)
        except (ValueError, PeftlabError):
            pass
        raise _RetryableError(f"not an answer: {self._shown(text)!r}")

    def _status(self, path: str, response: httpx2.Response) -> Exception:
        """Return the error that an unsuccessful status means."""
        said = self._shown(response.content.decode("utf-8", "replace"))
        text = f"HTTP {response.status_code}{': ' + said if said else ''}"
        if response.status_code in _RETRYABLE_STATUSES or response.status_code >= 500:
            return _RetryableError(text, _retry_after(response.headers.get("Retry-After")))
        if response.status_code in (401, 403):
            what = "the key that data.endpoint_key names" if self._key else "requests without a key (data.endpoint_key)"
            return PeftlabError(f"data.endpoint: {self.url} does not take {what} ({text})")
        return RequestRefused(f"data.endpoint: {self.url}{path}: {text}")

    def _shown(self, text: str) -> str:
        """Return the beginning of a message, with the key removed."""
        clean = text.replace(self._key, "***") if self._key else text
        return " ".join(clean.split())[:300]


def served_model(data: DraftData) -> str:
    """Return the id of the model that the endpoint is asked for: ``data.endpoint_model``, else the only one it lists.

    Raises:
        PeftlabError: it cannot be reached, or lists none or several.
    """
    if data.endpoint_model is not None:
        return data.endpoint_model
    try:
        found = Server(data).ask("/models", _model_ids, attempts=FIRST_ATTEMPTS)
    except PeftlabError as error:
        raise PeftlabError(f"{error}; a server that lists no models needs data.endpoint_model") from None
    if len(found) != 1:
        listed = f"lists {len(found)} models: {', '.join(found[:20])}" if found else "lists no model"
        raise PeftlabError(f"data.endpoint_model: missing; {data.endpoint} {listed}; name the target's")
    return found[0]


def _model_ids(value: dict[str, Json]) -> list[str]:
    rows = typed_value(value, "data", list, "/models")
    return [typed_value(row, "id", str, "/models") for row in rows if isinstance(row, dict)]


def _key(variable: str | None) -> str:
    """Return the key in an environment variable; empty without one."""
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        near = did_you_mean(variable, os.environ)
        # The name is not repeated: it may be the key itself, written in the wrong place.
        raise PeftlabError(f"data.endpoint_key: the environment has no variable of that name{near}")
    if not key.isascii() or not key.isprintable():  # a header cannot contain it, and the error would show it
        raise PeftlabError("data.endpoint_key: the variable contains more than printable ASCII")
    return key


def _retry_after(value: str | None) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for: a number or a date; None where it says neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), _LONGEST_ASKED) if seconds == seconds else None


_ANCHOR = "\n"  # begins a line: what follows is tokenised as after other text, not as the beginning of one


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of token ids, special ones included and every space kept.

    Args:
        tokenizer: the target's. ids: token ids.
    """
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)


def tokenisations(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], text: str) -> list[list[int]]:
    """Return the token ids that decode to ``text`` after ``prompt``; none if the text does not decode back.

    There are two where the tokenizer drops a leading space (Llama 2's: ``there`` and ``▁there`` decode alike on their
    own) and the text begins with none: some servers decode the answer with the prompt, others alone. The text as it is
    comes first.

    Args:
        tokenizer: the target's. prompt: token ids. text: of the answer.
    """
    found = [ids for ids in [_after(tokenizer, prompt, text)] if ids]
    if not text.startswith(" "):
        spaced = _after(tokenizer, prompt, f" {text}")
        if spaced and text_of(tokenizer, spaced) == text:
            found.append(spaced)
    return found


def _after(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], text: str) -> list[int] | None:
    """Return the ids of a text that follows ``prompt`` without more or less space; None if there are none."""
    expected = text_of(tokenizer, prompt) + text
    alone = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    anchor = list(tokenizer(_ANCHOR, add_special_tokens=False)["input_ids"])
    anchored = list(tokenizer(_ANCHOR + text, add_special_tokens=False)["input_ids"])
    candidates = [alone]
    if anchored[: len(anchor)] == anchor:
        candidates.append(anchored[len(anchor) :])
    return next((ids for ids in candidates if text_of(tokenizer, [*prompt, *ids]) == expected), None)


@torch.no_grad()
def most_probable(target: PreTrainedModel, prompt: Sequence[int], candidates: Sequence[list[int]]) -> list[int]:
    """Return the candidate whose first token the target gives the highest probability after ``prompt``.

    Args:
        target: a causal language model. prompt: token ids. candidates: token ids of each.
    """
    if len(candidates) == 1:
        return candidates[0]
    inputs = torch.tensor([list(prompt)], device=head_weight(target).device)
    state = frozen_hidden(target, inputs, torch.ones_like(inputs))[0, -1]
    logits = F.linear(state, head_weight(target))
    return max(candidates, key=lambda ids: float(logits[ids[0]]))


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt that is sent to the server.

    Attributes:
        ids: token ids. messages: the conversation that the chat template made them of; None for another text.
    """

    ids: list[int]
    messages: list[Message] | None


@dataclass(frozen=True)
class Reply:
    """An answer in the server's words.

    Attributes:
        text: without special tokens. finish: why it ends: "stop", "length" or another reason.
        end: id of the token that ended it, where the server says so. prompt_tokens: those that it read, where it does.
        thought: whether the model wrote more than the text, a chain of thought that the server returned apart from it.
    """

    text: str
    finish: str
    end: int | None
    prompt_tokens: int | None
    thought: bool = False


@dataclass(frozen=True)
class RequestForm:
    """A form of request in which servers take prompts.

    Attributes:
        name: for messages and results. path: after the endpoint's address.
        prompt: returns the prompt's part of the request; None where the prompt has no such form.
    """

    name: str
    path: str
    prompt: Callable[[PreTrainedTokenizerBase, ServedPrompt], dict[str, Json] | None]


def _as_ids(tokenizer: PreTrainedTokenizerBase, prompt: ServedPrompt) -> dict[str, Json] | None:
    return {"prompt": [*prompt.ids]}


def _as_text(tokenizer: PreTrainedTokenizerBase, prompt: ServedPrompt) -> dict[str, Json] | None:
    """Return the text from which a server that adds special tokens, as most do, makes the prompt's ids."""
    for ids in (prompt.ids[1:], prompt.ids):  # the first token may be one that it adds
        text = text_of(tokenizer, ids)
        if list(tokenizer(text)["input_ids"]) == prompt.ids:
            return {"prompt": text}
    return None


def _as_messages(tokenizer: PreTrainedTokenizerBase, prompt: ServedPrompt) -> dict[str, Json] | None:
    return {"messages": [{**message} for message in prompt.messages]} if prompt.messages is not None else None


FORMS = (
    RequestForm("completions of token ids", "/completions", _as_ids),
    RequestForm("completions of text", "/completions", _as_text),
    RequestForm("chat completions", "/chat/completions", _as_messages),
)
"""In the order in which they are tried."""


def sampling(writing: WritingSettings, row: int) -> dict[str, Json]:
    """Return a request's sampling settings; the answer of each row has a seed of its own.

    Args:
        writing: settings of the data set. row: number of the answer.
    """
    settings: dict[str, Json] = {"max_tokens": writing.max_new_tokens, "temperature": writing.temperature}
    if writing.temperature > 0:  # top_p in any case: a server's default may be another
        settings |= {"top_p": writing.top_p or 1.0, "seed": (writing.seed + row) % 2**31}
    return settings


def read_reply(value: dict[str, Json]) -> Reply:
    """Return the first answer of a completion or chat completion; ``PeftlabError`` for anything else."""
    where = "the answer"
    choice = next(iter(typed_value(value, "choices", list, where)), None)
    if not isinstance(choice, dict):
        raise PeftlabError(f"{where}: no choice in it")
    thought = False
    if "message" in choice:
        message = typed_value(choice, "message", dict, where)
        text = typed_value(message, "content", str, where) if message.get("content") is not None else ""
        thought = any(message.get(key) for key in ("reasoning_content", "reasoning"))
    else:
        text = typed_value(choice, "text", str, where)
    usage, end = value.get("usage"), choice.get("stop_reason")
    read = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return Reply(
        text=text,
        finish=str(choice.get("finish_reason")),
        end=end if isinstance(end, int) else None,
        prompt_tokens=read if isinstance(read, int) else None,
        thought=thought,
    )


def read_another_prompt(reply: Reply, prompt: Sequence[int]) -> bool:
    """Return whether the server read another number of tokens than the prompt has, as far as it says so.

    Args:
        reply: the server's. prompt: token ids.
    """
    return reply.prompt_tokens is not None and reply.prompt_tokens != len(prompt)


@dataclass(frozen=True)
class Answer:
    """A stored answer.

    Attributes:
        form: of the request. text, finish: as the server gave them.
        ids: token ids, with the end of sequence if it was written; None if the answer is ``dropped``, for that reason.
    """

    form: str
    text: str
    finish: str
    ids: list[int] | None
    dropped: str | None


def answer_line(row: int, answer: Answer) -> bytes:
    """Return the line of a file that stores the answer to a row.

    Args:
        row: its number. answer: to be stored.
    """
    return (json.dumps({"row": row, **vars(answer)}) + "\n").encode()


def cut_unfinished(path: Path) -> None:
    """Cut off a last line that was not written to its end."""
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def read_answers(path: Path, count: int) -> dict[int, Answer]:
    """Return stored answers by row, without an unfinished last line; none where there is no file.

    Args:
        count: rows of the data set.

    Raises:
        PeftlabError: a line is damaged, or a row occurs twice.
    """
    if not path.exists():
        return {}
    answers: dict[int, Answer] = {}
    for number, line in enumerate(read_text(path).split("\n")[:-1], 1):
        where = f"{path}:{number}"
        try:
            row, answer = _parsed(parse_json(line), where)
            if not 0 <= row < count or row in answers:
                raise ValueError(f"row {row} is one too many")
        except (PeftlabError, ValueError) as error:
            raise PeftlabError(f"{where}: damaged ({error}); delete the line and run again") from None
        answers[row] = answer
    return answers


def _parsed(value: Json, where: str) -> tuple[int, Answer]:
    """Return the row and the answer of a stored line, or raise for a damaged one."""
    if not isinstance(value, dict):
        raise ValueError("not an object")
    ids, dropped = value.get("ids"), value.get("dropped")
    found = [i for i in ids if isinstance(i, int)] if isinstance(ids, list) else None
    if (found is None) == (dropped is None) or (isinstance(ids, list) and len(ids) != len(found or ())):
        raise ValueError("neither token ids nor a reason")
    form, text, finish = (typed_value(value, key, str, where) for key in ("form", "text", "finish"))
    answer = Answer(form, text, finish, found, str(dropped) if dropped is not None else None)
    return typed_value(value, "row", int, where), answer


T = TypeVar("T")

_FILE = "answers.jsonl"

_OTHER_PROMPT = "the server read another number of prompt tokens"

_NO_FORM = "the prompt cannot be sent to this server"

_THOUGHT = "the server keeps its reasoning apart (start it without a reasoning parser)"

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
        """Return the counts as a sentence."""
        forms = ", ".join(f"{count} by {name}" for name, count in self.forms.items())
        dropped = ", ".join(f"{count} because {reason}" for reason, count in self.dropped.items())
        repeated = f"; {self.repeated} repeat an earlier sample of their prompt" if self.repeated else ""
        return f"text by {self.model}: {self.answers} answers ({forms}); dropped: {dropped or 'none'}{repeated}"


@dataclass(frozen=True)
class Target:
    """The local target, with which the tokens of a server's answers are found.

    Attributes:
        eos: ids that end a continuation.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]


def served_continuations(
    data: DraftData, target: Target, prompts: Sequence[ServedPrompt], writing: WritingSettings, cache: Path
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


def _digest(model: str, target: Target, prompts: Sequence[ServedPrompt], writing: WritingSettings) -> str:
    """Return a digest of what determines the text, weights included, as a server may keep its id for new ones."""
    ids = [prompt.ids for prompt in prompts]
    return digest([model, model_digest(target.model), _settings(writing), sorted(target.eos), ids])


def _settings(writing: WritingSettings) -> dict[str, float | None]:
    """Return the settings that determine the text."""
    return {key: value for key, value in asdict(writing).items() if key != "batch_size"}


def _complete(
    data: DraftData, model: str, target: Target, jobs: Sequence[ServedPrompt], writing: WritingSettings, directory: Path
) -> dict[int, Answer]:
    """Ask for the answers that are not stored, store each as it arrives, and return all."""
    path = directory / _FILE
    answers = read_answers(path, len(jobs))
    missing = [row for row in range(len(jobs)) if row not in answers]
    if not missing:
        return answers
    print(f"text by {model} at {data.endpoint}: {len(answers)} of {len(jobs)} answers are stored")
    server = Server(data)

    def ask(row: int, form: RequestForm, attempts: int = ATTEMPTS) -> Reply | None:
        prompt = form.prompt(target.tokenizer, jobs[row])
        if prompt is None:
            return None
        body = {"model": model, **prompt, **sampling(writing, row)}
        tokens = len(jobs[row].ids) + writing.max_new_tokens
        return server.ask(form.path, read_reply, body, tokens=tokens, attempts=attempts)

    first, *others = missing
    known = next((answer.form for answer in answers.values()), None)
    taken, reply = _first_accepted_form(lambda form: ask(first, form, FIRST_ATTEMPTS), jobs[first], known)
    if not (directory / "data.json").exists():
        write_json(directory / "data.json", {"model": model, **_settings(writing), "answers": len(jobs)})
    cut_unfinished(path)
    with open(path, "ab", buffering=0) as file:

        def store(row: int, reply: Reply | None) -> None:
            answers[row] = _answer(target, jobs[row].ids, writing.max_new_tokens, taken, reply)
            with write_errors(path):
                file.write(answer_line(row, answers[row]))

        store(first, reply)
        replies = _ask_concurrently(lambda row: ask(row, taken), others, data.concurrency)
        for row, reply in counted(replies, f"writing text by {model}", len(others), "answer"):
            store(row, reply)
        os.fsync(file.fileno())
    return answers


def _first_accepted_form(
    ask: Callable[[RequestForm], Reply | None], prompt: ServedPrompt, known: str | None
) -> tuple[RequestForm, Reply | None]:
    """Return the first form of request that the server takes and reads as the prompt, and its answer.

    Args:
        known: name of the form of earlier answers: it is tried first, and is the one unless the server refuses it.
    """
    refusals = []
    for form in sorted(FORMS, key=lambda form: form.name != known):
        try:
            reply = ask(form)
        except RequestRefused as error:
            refusals.append(f"{form.name}: {error}")
            continue
        if form.name == known or (reply is not None and not read_another_prompt(reply, prompt.ids)):
            return form, reply
        read = f"it read {reply.prompt_tokens} tokens, and the prompt has {len(prompt.ids)}" if reply else _NO_FORM
        refusals.append(f"{form.name}: {read}")
    raise PeftlabError(
        "data.endpoint: the server takes no form of the first prompt; is it the target that it serves?\n  "
        + "\n  ".join(refusals)
    )


def _ask_concurrently(ask: Callable[[int], T], rows: Sequence[int], concurrency: int) -> Iterator[tuple[int, T]]:
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


def _answer(target: Target, prompt: Sequence[int], most: int, form: RequestForm, reply: Reply | None) -> Answer:
    """Return the answer that is stored for a reply, or for None, where the prompt has no such form."""
    if reply is None:
        return Answer(form.name, "", "", None, _NO_FORM)
    ids, dropped = None, None
    if read_another_prompt(reply, prompt):
        dropped = _OTHER_PROMPT
    elif reply.thought:
        dropped = _THOUGHT
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
        found = tokenisations(target.tokenizer, prompt, text)
        if not found:
            return None
        ids = most_probable(target.model, prompt, found)
    if not cut and target.eos:
        said = (reply.end, target.tokenizer.eos_token_id, min(target.eos))
        ids = [*ids, next(id_ for id_ in said if id_ in target.eos)]
    return ids[:most] or None
