"""The file of a server's answers: one line for each, appended as it arrives.

A killed run may leave a last line that is not finished; it is not read, and cut before the next one is written.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import Json, member, parse_json, read_text


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
    """Return the line of the answer to a row."""
    return (json.dumps({"row": row, **vars(answer)}) + "\n").encode()


def cut_unfinished(path: Path) -> None:
    """Cut a last line that is not finished."""
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def read_answers(path: Path, count: int) -> dict[int, Answer]:
    """Return the answers by row, without a last line that is not finished; none where there is no file.

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
    if not isinstance(value, dict):
        raise ValueError("not an object")
    ids, dropped = value.get("ids"), value.get("dropped")
    found = [i for i in ids if isinstance(i, int)] if isinstance(ids, list) else None
    if (found is None) == (dropped is None) or (isinstance(ids, list) and len(ids) != len(found or ())):
        raise ValueError("neither token ids nor a reason")
    form, text, finish = (member(value, key, str, where) for key in ("form", "text", "finish"))
    answer = Answer(form, text, finish, found, str(dropped) if dropped is not None else None)
    return member(value, "row", int, where), answer
