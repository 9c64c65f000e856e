"""The commands and Python programs that pages show: fenced blocks of ``sh`` and ``python``, and indented lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

LAUNCHERS = (("peftlab",), ("accelerate", "launch"), ("torchrun",), ("python", "-m", "peftlab"))
_BLOCK = re.compile(
    r"^```(?P<language>\w+)\n(?P<fenced>.*?)^```$|(?P<indented>(?:^ {4}[^\n]*\n(?:\n(?= {4}))*)+)", re.M | re.S
)
_ASSIGNED = re.compile(r"(\w+)=(.*)", re.S)


@dataclass(frozen=True)
class Block:
    """A block of a page: its language ("" for indented lines), its text, and the number of its first line."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command that a page shows.

    Attributes:
        page, line: where it is. words: what the shell makes of it, pipes and redirections left out.
        note: the comment behind it. piped: what an ``echo`` before it writes.
    """

    page: str
    line: int
    words: tuple[str, ...]
    note: str
    piped: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def blocks(page: str, text: str) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    for found in _BLOCK.finditer(text):
        fenced = found["language"] is not None
        start = text.count("\n", 0, found.start()) + 1 + fenced
        indented = re.sub(r"^ {4}", "", found["indented"] or "", flags=re.M)
        yield Block(page, start, found["language"] or "", found["fenced"] if fenced else indented)


def programs(page: str, text: str) -> Iterator[Block]:
    """Yield the blocks of Python."""
    for block in blocks(page, text):
        if block.language == "python" or (not block.language and re.match(r"import |from ", block.text)):
            yield block


def commands(page: str, text: str) -> Iterator[Command]:
    """Yield the commands of peftlab, or of what starts it in several processes, in order."""
    for block in blocks(page, text):
        if block.language not in ("", "sh"):
            continue
        variables: dict[str, str] = {}
        for line, one in _whole_lines(block):
            for name, value in variables.items():
                one = one.replace(f"${name}", value)
            assigned = _ASSIGNED.fullmatch(one.strip())
            if assigned and len(words := shlex.split(one)) == 1:
                variables[assigned[1]] = words[0].partition("=")[2]
            yield from _launched(block.page, line, one)


def _whole_lines(block: Block) -> Iterator[tuple[int, str]]:
    """Yield each command with the number of its first line: until its quotes are closed and nothing continues it."""
    start, kept = block.line, ""
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if not kept:
            start = number
        kept += line
        try:
            shlex.split(kept, comments=True)
        except ValueError:  # a quote is open, or the line ends in a backslash
            kept = kept.removesuffix("\\") + "\n" * (not kept.endswith("\\"))
            continue
        yield start, kept
        kept = ""


def _launched(page: str, line: int, text: str) -> Iterator[Command]:
    comment = re.search(r"\s#\s(.*)$", text)
    words = [word for word in shlex.split(text, comments=True) if not re.match(r"\d?>", word)]
    piped = None
    while words:
        end = words.index("|") if "|" in words else len(words)
        part, words = words[:end], words[end + 1 :]
        if part[:1] == ["echo"]:
            piped = " ".join(part[1:]) + "\n"
        if any(tuple(part[: len(launcher)]) == launcher for launcher in LAUNCHERS):
            yield Command(page, line, tuple(part), comment[1] if comment else "", piped)
