"""What a draft learns from while it serves: the tokens of each answer at which the target rejected what it drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from datasets import Dataset

from peftlab.decoding.decode import Generation, Step
from peftlab.decoding.drafter import Row, Verified
from peftlab.drafting.objectives import TopK, topk_targets
from peftlab.drafting.text.continuations import make_dataset
from peftlab.errors import PeftlabError
from peftlab.files import Json, member
from peftlab.tasks.prompts import Request


def rejected_tokens(steps: Sequence[Step]) -> list[int]:
    """Return which tokens of an output the target put in the place of a drafted one, rising."""
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
        """Which tokens of the answer the draft got wrong."""
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
        """Return what ``as_json`` wrote.

        Raises:
            PeftlabError: it is something else.
        """
        if not isinstance(row, dict):
            raise PeftlabError(f"{where}: a request is no object")
        prompt, response = (member(row, key, list, where) for key in ("prompt_ids", "response_ids"))
        live, frozen = ([Step(*step) for step in member(row, key, list, where)] for key in ("steps", "frozen_steps"))
        top = None
        if row.get("top") is not None:
            values, indices, rest = member(row, "top", list, where)
            top = TopK(torch.tensor(values), torch.tensor(indices), torch.tensor(rest))
        return cls(Request(prompt, response), live, frozen, member(row, "equal", bool, where), top)


@dataclass
class KeptTopK:
    """Keeps the target's k most probable tokens where it rejects a drafted one; an ``observe`` for ``decode``."""

    k: int
    _steps: list[TopK] = field(default_factory=list, init=False)

    def __call__(self, rows: list[Row], verified: Verified) -> None:
        """Take the distribution behind the last accepted token of the only row."""
        path = verified.paths[0]
        self._steps.append(topk_targets(verified.output.logits[:1, path[-1] + 1 if path else 0].float(), self.k))

    def of(self, output: Generation) -> TopK:
        """Return the distributions at the rejected tokens of the output that was observed, [m, k] and [m]."""
        rejected = [
            top
            for top, step in zip(self._steps, output.steps, strict=True)
            if step.accepted < min(step.drafted, step.emitted)
        ]
        if not rejected:
            return TopK(torch.zeros(0, self.k), torch.zeros(0, self.k, dtype=torch.long), torch.zeros(0))
        return TopK(*(torch.cat(column).clone() for column in zip(*rejected, strict=True)))


def rejection_dataset(requests: Sequence[LiveRequest]) -> Dataset:
    """Return the requests that have a rejected token as training examples; these tokens alone count."""
    wrong = [request for request in requests if request.rejected]
    stored = [request.top for request in wrong if request.top is not None]
    return make_dataset([r.request for r in wrong], stored or None, [r.rejected for r in wrong])
