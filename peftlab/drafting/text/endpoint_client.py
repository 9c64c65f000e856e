"""A client of OpenAI-compatible servers: one request at a time, sent again where the network or the server fails.

The key is read from the environment, is sent in one header, and occurs in no message: servers like to repeat it.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPMessage
from typing import IO, TypeVar
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from peftlab.drafting.config import DraftData
from peftlab.errors import PeftlabError, did_you_mean, reason
from peftlab.files import Json, member, parse_json

T = TypeVar("T")

ATTEMPTS = 8  # at one request: two minutes, longer than a server takes to be restarted
FIRST_ATTEMPTS = 3  # at the first one, where a wrong address is likelier than a short failure
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before the second attempt, and at most; it doubles in between
_LONGEST_ASKED = 3600.0  # seconds that a server may ask to wait
_TIMEOUT = 600.0  # seconds without a byte
_PASSING = frozenset({408, 425, 429})  # statuses that pass, beside all from 500


class Refused(PeftlabError):
    """The server does not take such a request, now or later."""


class _Passing(Exception):
    """A failure that may have passed at the next attempt, after ``seconds`` if the server says so."""

    def __init__(self, text: str, seconds: float | None = None) -> None:
        super().__init__(text)
        self.seconds = seconds


class _NoRedirects(HTTPRedirectHandler):
    """Redirects are errors: urllib would send the key to wherever they lead."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


class Pace:
    """When the next request may be sent, for all threads together."""

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
        """Let nothing be sent for N seconds."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)


class Server:
    """The server of ``data.endpoint``.

    Raises:
        PeftlabError: the environment does not have the key that ``data.endpoint_key`` names.
    """

    def __init__(self, data: DraftData) -> None:
        self.url = str(data.endpoint)
        self._key = _key(data.endpoint_key)
        self._pace = Pace(data.requests_per_minute, data.tokens_per_minute)
        self._opener = build_opener(_NoRedirects)

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
            Refused: the server does not take the request.
            PeftlabError: it does not take the key, or no attempt was answered.
        """
        wait = FIRST_WAIT
        for attempt in range(1, attempts + 1):
            self._pace.wait(tokens)
            try:
                return self._once(path, read, body)
            except _Passing as error:
                if attempt == attempts:
                    failed = f"no answer after {attempts} attempts ({error})"
                    raise PeftlabError(f"data.endpoint: {self.url}{path}: {failed}") from None
                if error.seconds is not None:
                    self._pace.pause(error.seconds)  # other threads' requests would be turned away, too
                pause = error.seconds if error.seconds is not None else wait * random.uniform(0.5, 1)
            time.sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT)
        raise ValueError(f"{attempts} attempts")

    def _once(self, path: str, read: Callable[[dict[str, Json]], T], body: dict[str, Json] | None) -> T:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "peftlab"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        content = json.dumps(body).encode() if body is not None else None
        try:
            with self._opener.open(Request(self.url + path, content, headers), timeout=_TIMEOUT) as response:
                text = response.read().decode("utf-8")
        except HTTPError as error:
            raise self._status(path, error) from None
        except (OSError, HTTPException, UnicodeError) as error:  # refused, hung up, cut short, timed out, not text
            raise _Passing(self._shown(str(getattr(error, "reason", None) or reason(error)))) from None
        try:
            value = parse_json(text)
            if isinstance(value, dict):
                return read(value)
        except (ValueError, PeftlabError):
            pass
        raise _Passing(f"not an answer: {self._shown(text)!r}")

    def _status(self, path: str, error: HTTPError) -> Exception:
        """Return what an answer with another status than 200 means."""
        try:
            said = self._shown(error.read().decode("utf-8", "replace"))
        except (OSError, HTTPException):
            said = ""
        text = f"HTTP {error.code}{': ' + said if said else ''}"
        if error.code in _PASSING or error.code >= 500:
            return _Passing(text, _retry_after(error.headers.get("Retry-After")))
        if error.code in (401, 403):
            what = "the key that data.endpoint_key names" if self._key else "requests without a key (data.endpoint_key)"
            return PeftlabError(f"data.endpoint: {self.url} does not take {what} ({text})")
        return Refused(f"data.endpoint: {self.url}{path}: {text}")

    def _shown(self, text: str) -> str:
        """Return the beginning of a message, without the key."""
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
    rows = member(value, "data", list, "/models")
    return [member(row, "id", str, "/models") for row in rows if isinstance(row, dict)]


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
        seconds = (date.replace(tzinfo=date.tzinfo or timezone.utc) - datetime.now(timezone.utc)).total_seconds()
    return min(max(seconds, 0.0), _LONGEST_ASKED) if seconds == seconds else None
