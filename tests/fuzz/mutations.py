"""Changes to bytes, to lines of text and to trees of JSON values; a generator decides, so that each can be repeated."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from tests.fuzz import hostile

_SNIPPETS = [
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"\r", b"\t", b'"', b"'", b"{", b"}", b"[", b"]", b":", b",", b"#",
    b"-", b"&a ", b"*a", b"!!python/object:os.system ", b"<<: ", b"---\n", b"...\n", b"%YAML 1.1\n", b"\xe2\x80\xa8",
    b"\xed\xa0\x80", b"~", b"999999999999999999999", b"1_000", b"0x1F", b"0o17", b".inf", b"yes", b"2020-01-01",
]  # fmt: skip


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return ``content`` after one to four changes of bytes: flips, inserts, cuts, repeats, exchanges."""
    for _ in range(rng.choice((1, 1, 1, 1, 2, 4))):
        at = rng.randrange(len(content) + 1)
        end = min(len(content), at + rng.choice((1, 1, 2, 5, 20, 200)))
        kind = rng.choice(("flip", "insert", "insert", "cut", "repeat", "truncate", "lines"))
        if kind == "flip" and at < len(content):
            content = content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
        elif kind == "insert":
            content = content[:at] + rng.choice(_SNIPPETS) + content[at:]
        elif kind == "cut":
            content = content[:at] + content[end:]
        elif kind == "repeat":
            content = content[:at] + content[at:end] * rng.choice((2, 2, 3, 50)) + content[end:]
        elif kind == "truncate":
            content = content[:at]
        elif kind == "lines":
            lines = content.split(b"\n")
            i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[i], lines[j] = lines[j], lines[i]
            content = b"\n".join(lines)
    return content


def changed(tree: Any, rng: random.Random) -> Any:
    """Return a copy of ``tree`` with one to three of its nodes replaced, removed, renamed, wrapped or exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        nodes = list(_nodes(tree))
        if not nodes or rng.random() < 0.02:
            return hostile.value(rng)
        holder, key = rng.choice(nodes)
        kind = rng.choice(
            ("replace", "replace", "number", "number", "remove", "remove", "rename", "wrap", "exchange", "add")
        )
        if kind == "replace":
            holder[key] = hostile.value(rng)
        elif kind == "number" and isinstance(holder[key], int | float):
            holder[key] = rng.choice(
                (holder[key] + 1, holder[key] - 1, holder[key] * 10, -holder[key], holder[key] / 3)
            )
        elif kind == "remove":
            del holder[key]
        elif kind == "rename" and isinstance(key, str):
            holder[rng.choice((key + "s", key.upper(), key[:-1], f" {key}", f"{key}.{key}"))] = holder.pop(key)
        elif kind == "wrap":
            holder[key] = rng.choice(([holder[key]], {"a": holder[key]}, str(holder[key])))
        elif kind == "exchange":
            other, name = rng.choice(nodes)
            holder[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(holder[key])
        elif kind == "add" and isinstance(holder, dict):
            holder[rng.choice(("x", "", "r", "name", "auto_map", "torch_dtype", "peft_type"))] = hostile.value(rng)
    return tree


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a tree."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, inner in list(entries):
        yield tree, key
        yield from _nodes(inner)
