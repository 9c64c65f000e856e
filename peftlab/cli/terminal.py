"""The terminal of a chat: lines typed or piped are turns, answers appear as they are written."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError

if TYPE_CHECKING:
    from peftlab.pipelines.drafts.generate import GeneratedText, Writer

_HINT = "Ctrl-C stops an answer, Ctrl-D ends the chat."


def show_piece(piece: str) -> None:
    """Write a piece of text at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def show_line(answer: GeneratedText) -> None:
    """End an output, and say on stderr how fast it was."""
    from peftlab.reporting.console import generation_line

    show_piece("\n")
    lossy = answer.lossy.line() if answer.lossy is not None else None
    line = generation_line(
        len(answer.tokens), answer.seconds, answer.reason, answer.block_efficiency, answer.acceptance, lossy
    )
    print(line if answer.reason != "interrupt" else "[stopped]", file=sys.stderr, flush=True)


def talk(writer: Writer) -> list[GeneratedText]:
    """Hold a conversation until the input ends, and return the answers; a line is a turn."""
    from peftlab.pipelines.drafts.conversation import converse

    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):  # editing and history of the lines
            import readline  # noqa: F401
        _note(_HINT)
    answers: list[GeneratedText] = []

    def answered(answer: GeneratedText) -> None:
        show_line(answer)
        answers.append(answer)

    converse(writer, _read, show_piece, answered, _note, interactive=typed)
    if typed:
        show_piece("\n")
    return answers


def _read() -> str | None:
    """Return the next line, None at the end of the input."""
    try:
        if sys.stdin.isatty():
            return input("> " if sys.stdout.isatty() else "")
        line = sys.stdin.readline()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise PeftlabError(f"chat: the input is not {error.encoding} text ({error.reason})") from None
    return line.rstrip("\r\n") if line else None


def _note(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)
