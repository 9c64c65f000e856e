"""Images that are none, or that no model can read, as parts of prompts and conversations."""

from __future__ import annotations

import json
import os
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from tests.fuzz import hostile, mutations

Part = dict[str, Any]


def sound(folder: Path, name: str = "sound.png", mode: str = "L") -> Part:
    """Write a small image and return the part of a message that names it."""
    Image.new(mode, (8, 8)).save(folder / name)
    return {"type": "image", "path": name}


def _truncated(folder: Path) -> Part:
    part = sound(folder)
    whole = (folder / part["path"]).read_bytes()
    (folder / part["path"]).write_bytes(whole[: len(whole) // 2 + 8])
    return part


def _huge(folder: Path) -> Part:
    """A PNG whose header promises ten thousand million pixels."""
    head = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b""))
    )
    (folder / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    return {"type": "image", "path": "huge.png"}


def _directory(folder: Path) -> Part:
    (folder / "folder.png").mkdir()
    return {"type": "image", "path": "folder.png"}


def _text(folder: Path) -> Part:
    (folder / "text.png").write_text("no image")
    return {"type": "image", "path": "text.png"}


def _fifo(folder: Path) -> Part:
    os.mkfifo(folder / "fifo.png")
    return {"type": "image", "path": "fifo.png"}


def _frames(folder: Path) -> Part:
    first, second = Image.new("L", (8, 8)), Image.new("L", (8, 8), 255)
    first.save(folder / "frames.gif", save_all=True, append_images=[second])
    return {"type": "image", "path": "frames.gif"}


BAD: dict[str, Callable[[Path], Part]] = {
    "truncated": _truncated,
    "empty": lambda folder: ((folder / "empty.png").touch(), {"type": "image", "path": "empty.png"})[1],
    "sixteen bits": lambda folder: sound(folder, mode="I;16"),
    "floats": lambda folder: sound(folder, "floats.tif", mode="F"),
    "huge": _huge,
    "missing": lambda folder: {"type": "image", "path": "gone.png"},
    "directory": _directory,
    "text": _text,
    "fifo": _fifo,
    "frames": _frames,
    "endless": lambda folder: {"type": "image", "path": "/dev/zero"},
    "zero byte": lambda folder: {"type": "image", "path": "a\0b.png"},
    "no path": lambda folder: {"type": "image"},
    "a number for a path": lambda folder: {"type": "image", "path": 7},
    "an address": lambda folder: {"type": "image", "url": "http://127.0.0.1:9/a.png"},
    "a video": lambda folder: {"type": "video", "path": "a.mp4"},
}
"""What is wrong -> writes it into a folder, and returns the part of a message that names it."""


def damaged(folder: Path, rng: random.Random) -> list[Part]:
    """Return parts of a message: a bad image, one whose bytes were changed, or hostile values in place of parts."""
    kind = rng.random()
    if kind < 0.4:
        return [BAD[rng.choice(list(BAD))](folder)]
    parts = [
        sound(folder, f"{n}.{rng.choice(('png', 'bmp', 'gif', 'tif', 'jpg'))}") for n in range(rng.randrange(1, 4))
    ]
    if kind < 0.8:
        file = folder / rng.choice(parts)["path"]
        file.write_bytes(mutations.damaged(file.read_bytes(), rng))
        return parts
    changed = mutations.changed(parts, rng)
    return changed if isinstance(changed, list) else [changed]


def write_rows(folder: Path, parts: list[Part], model: Path) -> None:
    """Write a question with these parts as a prompt, as conversations, and the recipe that trains on those."""
    asked = {"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}
    (folder / "prompts.jsonl").write_text(hostile.spelled({"messages": [asked]}) + "\n")
    row = hostile.spelled({"messages": [asked, {"role": "assistant", "content": "this"}]})
    (folder / "chats.jsonl").write_text(f"{row}\n" * 2)
    recipe = {
        "model": str(model), "task": "text/chat", "data": {"path": "chats.jsonl", "validation": 1},
        "train": {"max_steps": 1, "max_length": 400}, "output_dir": "out",
    }  # fmt: skip
    (folder / "chat.yaml").write_text(json.dumps(recipe))


def commands(model: Path, parts: list[Part]) -> dict[str, list[str]]:
    """Return the commands that read what ``write_rows`` wrote, and the image itself."""
    short = ["--max-new-tokens", "2"]
    bench = ["draft", "bench", "--target", str(model), "--prompts", "prompts.jsonl", "--drafter", "lookup", *short]
    found = {
        "show": ["validate", "chat.yaml", "--show", "1"],
        "bench": [*bench, "--repeats", "1", "--gamma", "2", "--json", "bench.json"],
    }
    paths = [part["path"] for part in parts if isinstance(part, dict) and isinstance(part.get("path"), str)]
    asked = [word for path in paths if "\0" not in path for word in ("--image", path)]
    return found | (
        {"generate": ["generate", "--target", str(model), *asked, "--prompt", "a", *short]} if asked else {}
    )
