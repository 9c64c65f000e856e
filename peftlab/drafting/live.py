"""A stream of requests: what a draft learns from while it serves, and the numbers window by window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch
from datasets import Dataset

from peftlab.decoding.decode import Generation, Row, Step, Verified
from peftlab.decoding.measurements import Interval, acceptance_statistics, percentiles
from peftlab.drafting.objectives import TopK, topk_targets
from peftlab.drafting.text import make_dataset
from peftlab.errors import PeftlabError
from peftlab.files import Json, read_object, typed_value
from peftlab.tasks.prompts import Request


def rejected_tokens(steps: Sequence[Step]) -> list[int]:
    """Return the places in an output at which the target replaced a drafted token, rising."""
    places, begin = [], 0
    for step in steps:
        if step.accepted < min(step.drafted, step.emitted):
            places.append(begin + step.accepted)
        begin += step.emitted
    return places


@dataclass(frozen=True)
class LiveRequest:
    """A request of a stream, decoded with the draft as it was then.

    Attributes:
        request: the prompt and the answer.
        steps: what each target step did. frozen_steps: the same with the draft as it was at the start of the stream.
        equal: whether that one's answer was the same.
        top: the target's k most probable tokens at every rejected one, as ``data.top_k`` asks; None: not kept.
    """

    request: Request
    steps: list[Step]
    frozen_steps: list[Step]
    equal: bool
    top: TopK | None = None

    @property
    def rejected(self) -> list[int]:
        """The places in the answer at which the draft was wrong."""
        return rejected_tokens(self.steps)

    def as_json(self) -> dict[str, Json]:
        """Return the request as its file contains it."""
        return {
            "prompt_ids": [*self.request.prompt],
            "response_ids": [*self.request.response],
            "steps": [[step.drafted, step.accepted, step.emitted] for step in self.steps],
            "frozen_steps": [[step.drafted, step.accepted, step.emitted] for step in self.frozen_steps],
            "equal": self.equal,
            "top": None if self.top is None else [part.tolist() for part in self.top],
        }

    @classmethod
    def from_json(cls, row: object, where: str) -> LiveRequest:
        """Return the request that ``as_json`` wrote.

        Args:
            row: the parsed JSON. where: its file, for messages.

        Raises:
            PeftlabError: it is something else.
        """
        if not isinstance(row, dict):
            raise PeftlabError(f"{where}: a request is no object")
        prompt, response = (typed_value(row, key, list, where) for key in ("prompt_ids", "response_ids"))
        live, frozen = (
            [Step(*step) for step in typed_value(row, key, list, where)] for key in ("steps", "frozen_steps")
        )
        top = None
        if row.get("top") is not None:
            values, indices, rest = typed_value(row, "top", list, where)
            top = TopK(torch.tensor(values), torch.tensor(indices), torch.tensor(rest))
        return cls(Request(prompt, response), live, frozen, typed_value(row, "equal", bool, where), top)


@dataclass
class RejectionTopK:
    """Keeps the target's k most probable tokens where it rejects a drafted one, as an ``observe`` of ``decode``."""

    k: int
    _steps: list[TopK] = field(default_factory=list, init=False)

    def __call__(self, rows: list[Row], verified: Verified) -> None:
        """Store the distribution behind the last accepted token of the only row.

        Args:
            rows: the sequences of the step, one. verified: the outcome of its verification.
        """
        path = verified.paths[0]
        self._steps.append(topk_targets(verified.output.logits[:1, path[-1] + 1 if path else 0].float(), self.k))

    def of(self, output: Generation) -> TopK:
        """Return the distributions at the rejected tokens of the observed output, [m, k], [m, k] and [m]."""
        rejected = [
            top
            for top, step in zip(self._steps, output.steps, strict=True)
            if step.accepted < min(step.drafted, step.emitted)
        ]
        if not rejected:
            return TopK(torch.zeros(0, self.k), torch.zeros(0, self.k, dtype=torch.long), torch.zeros(0))
        return TopK(*(torch.cat(column).clone() for column in zip(*rejected, strict=True)))


def rejection_dataset(requests: Sequence[LiveRequest]) -> Dataset:
    """Return the requests with a rejected token as training examples in which these tokens alone count."""
    wrong = [request for request in requests if request.rejected]
    stored = [request.top for request in wrong if request.top is not None]
    return make_dataset([r.request for r in wrong], stored or None, [r.rejected for r in wrong])


@dataclass(frozen=True)
class Window:
    """A window: requests that were decoded with one draft, and the update after them.

    Attributes:
        requests: in order.
        decoding_seconds: of all of them together. frozen_seconds: with the draft as it was at the start of the stream.
        update_seconds: of training, storing and loading the draft; 0 without an update.
        learnt_tokens: rejected tokens that the update was trained on; 0: none was made.
    """

    requests: list[LiveRequest]
    decoding_seconds: float
    frozen_seconds: float
    update_seconds: float
    learnt_tokens: int

    @classmethod
    def read(cls, path: Path) -> Window:
        """Return the window that a file contains.

        Raises:
            PeftlabError: it is damaged.
        """
        found = read_object(path)
        decoding, frozen, update = (
            typed_value(found, f"{name}_seconds", float, path) for name in ("decoding", "frozen", "update")
        )
        requests = [LiveRequest.from_json(row, str(path)) for row in typed_value(found, "requests", list, path)]
        return cls(requests, decoding, frozen, update, typed_value(found, "learnt_tokens", int, path))


@dataclass(frozen=True)
class Rates:
    """Rates at which the target accepted a draft.

    Attributes:
        acceptance: accepted share of the drafted tokens that were tried. tau: tokens per target step. None without any.
    """

    acceptance: float | None
    tau: float | None


@dataclass(frozen=True)
class WindowResult:
    """The figures of a window; the seconds and ``learnt_tokens`` are those of ``Window``.

    Attributes:
        requests: how many. live: of the draft as it was then. frozen: of the draft as it was at the start.
        rejected: drafted tokens in whose place the target put another.
    """

    requests: int
    live: Rates
    frozen: Rates
    rejected: int
    learnt_tokens: int
    decoding_seconds: float
    frozen_seconds: float
    update_seconds: float


@dataclass(frozen=True)
class StreamResults:
    """The results of a stream.

    Attributes:
        target, draft: reference of the target, and of the draft at the end.
        every: requests of a window. requests: of the stream. updates: how many were made.
        live, frozen: over all requests.
        gain: the difference of their acceptance. gain_interval: of 95 %, requests resampled in pairs.
        unequal: greedy answers that differ between the two drafts, though both are the target's own; None: sampled.
        decoding_seconds, frozen_seconds, update_seconds: of all windows.
        windows: in order.
    """

    target: str
    draft: str
    every: int
    requests: int
    updates: int
    live: Rates
    frozen: Rates
    gain: float | None
    gain_interval: Interval
    unequal: int | None
    decoding_seconds: float
    frozen_seconds: float
    update_seconds: float
    windows: list[WindowResult]


def stream_results(target: str, draft: str, every: int, windows: Sequence[Window], *, greedy: bool) -> StreamResults:
    """Return the figures of a stream of at least one request.

    Args:
        target, draft: references. every: requests of a window. windows: in order. greedy: whether decoding was greedy.
    """
    requests = [request for window in windows for request in window.requests]
    live, frozen = _rates(r.steps for r in requests), _rates(r.frozen_steps for r in requests)
    both = live.acceptance is not None and frozen.acceptance is not None
    decoding, compared, updating = (
        round(sum(getattr(window, f"{name}_seconds") for window in windows), 3)
        for name in ("decoding", "frozen", "update")
    )
    return StreamResults(
        target=target,
        draft=draft,
        every=every,
        requests=len(requests),
        updates=sum(window.learnt_tokens > 0 for window in windows),
        live=live,
        frozen=frozen,
        gain=(live.acceptance or 0.0) - (frozen.acceptance or 0.0) if both else None,
        gain_interval=gain_interval(requests) if both else None,
        unequal=sum(not request.equal for request in requests) if greedy else None,
        decoding_seconds=decoding,
        frozen_seconds=compared,
        update_seconds=updating,
        windows=[*map(window_result, windows)],
    )


def gain_interval(requests: Sequence[LiveRequest], *, draws: int = 1000) -> Interval:
    """Return the 95 % bootstrap interval of the difference of the two acceptances; None for a single request.

    Args:
        requests: resampled in pairs of live and frozen. draws: how many samples.
    """
    if len(requests) < 2:
        return None
    counts = numpy.array([[_counts(r.steps), _counts(r.frozen_steps)] for r in requests])  # [requests, draft, 2]
    picked = numpy.random.default_rng(0).integers(len(requests), size=(draws, len(requests)))
    drawn = counts[picked].sum(1)  # [draws, draft, 2]
    accepted, tried = drawn[..., 0], numpy.maximum(drawn[..., 1], 1)
    live, frozen = (accepted / tried).T
    return percentiles(live - frozen)


def _counts(steps: Sequence[Step]) -> tuple[int, int]:
    """Return accepted and tried tokens, as ``AcceptanceStatistics.acceptance`` counts them."""
    return sum(s.accepted for s in steps), sum(min(s.drafted, s.accepted + 1) for s in steps)


def _rates(outputs: Iterable[list[Step]]) -> Rates:
    found = acceptance_statistics(Generation(steps=steps) for steps in outputs)
    return Rates(found.acceptance, found.tau)


def window_result(window: Window) -> WindowResult:
    """Return the figures of a window."""
    return WindowResult(
        requests=len(window.requests),
        live=_rates(r.steps for r in window.requests),
        frozen=_rates(r.frozen_steps for r in window.requests),
        rejected=sum(len(r.rejected) for r in window.requests),
        learnt_tokens=window.learnt_tokens,
        decoding_seconds=round(window.decoding_seconds, 3),
        frozen_seconds=round(window.frozen_seconds, 3),
        update_seconds=round(window.update_seconds, 3),
    )
