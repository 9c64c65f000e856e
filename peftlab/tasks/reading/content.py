"""Reading the text of a data file: bounded in size and UTF-8, or an error that names the file."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import open_regular

_CHUNK = 2**20
_ALWAYS_FITS = 64 * 2**20
_EXPANSION = 100  # text compresses 3- to 30-fold, a decompression bomb a thousandfold


def read_text(path: Path) -> str:
    """Return a file's text, decompressed if its name ends in ``.gz``, without a byte order mark.

    Raises:
        PeftlabError: not a regular file, not readable, not UTF-8, a NUL byte, or a compressed file that expands
            beyond ``expansion_limit``; the line is named where there is one.
    """
    size = regular_size(path)
    packed = path.name.lower().endswith(".gz")
    content = bytearray()
    try:
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                _refuse_binary(path, content, chunk)
                content += chunk
                if packed and len(content) > expansion_limit(size):
                    raise PeftlabError(
                        f"{path}: {size:,} bytes expand to more than {expansion_limit(size):,}; if that is "
                        "intended, decompress the file yourself"
                    )
    except (OSError, EOFError, zlib.error) as error:
        raise PeftlabError(f"{path}: cannot be read ({error})") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PeftlabError(f"{path}:{line}: not UTF-8 ({error.reason}); save the file as UTF-8") from None


def regular_size(path: Path) -> int:
    """Return a file's size in bytes; errors as in ``open_regular``."""
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


def expansion_limit(size: int) -> int:
    """Return how many bytes a compressed file of ``size`` bytes may expand to."""
    return max(_ALWAYS_FITS, _EXPANSION * size)


def _refuse_binary(path: Path, before: bytearray, chunk: bytes) -> None:
    if not before and chunk.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise PeftlabError(f"{path}: is UTF-16, not UTF-8; save the file as UTF-8")
    place = chunk.find(0)
    if place >= 0:
        line = before.count(b"\n") + chunk.count(b"\n", 0, place) + 1
        raise PeftlabError(f"{path}:{line}: a NUL byte; the file is damaged, or not UTF-8 text")


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of every line that is not empty; errors as ``read_text``."""
    # str.splitlines would also break at U+2028 and the like, which are text.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        line = line.removesuffix("\r")
        if line:
            yield number, line


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode ``text``; an unpaired surrogate, which JSON can escape, cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
