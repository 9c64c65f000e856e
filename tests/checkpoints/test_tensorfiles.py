"""The safetensors reader trusts nothing, and the writer writes what safetensors writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from peftlab.checkpoints.tensors import DTYPES, NAMES, layout, open_shards, read_header
from peftlab.errors import PeftlabError

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(())}


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Return header and data of a safetensors file."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(header: str | dict[str, Any], data: bytes) -> bytes:
    """Return a file of a header, sound or not, and data."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    )
)
def test_layout_is_the_libraries_own(contents: dict[str, tuple[str, list[int]]]) -> None:
    contents.pop("__metadata__", None)
    try:
        raw = save({k: torch.zeros(s, dtype=DTYPES[d]) for k, (d, s) in contents.items()}, metadata={"format": "pt"})
    except UnicodeEncodeError:
        return
    head, entries = layout({key: (dtype, tuple(shape)) for key, (dtype, shape) in contents.items()})
    assert raw.startswith(head) and len(raw) == len(head) + sum(e.nbytes for e in entries.values())


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt", "x": "y"})
    entries, metadata = read_header(tmp_path / "model.safetensors")
    assert metadata == {"format": "pt", "x": "y"}
    assert {key: (entry.dtype, entry.shape) for key, entry in entries.items()} == {
        key: (NAMES[tensor.dtype], tuple(tensor.shape)) for key, tensor in TENSORS.items()
    }
    (shard,) = open_shards(tmp_path)
    for key, tensor in TENSORS.items():
        assert torch.equal(shard.read(key), tensor)
    shard.close()


def _changed(**fields: Any) -> dict[str, Any]:
    header, _ = split(save(TENSORS))
    return header | {"a": header["a"] | fields}


HEADER, DATA = split(save(TENSORS))
BROKEN = {
    "no header": b"\x01\x02",
    "header longer than the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "header longer than allowed": (200_000_000).to_bytes(8, "little") + b"{}",
    "not JSON": join("{nonsense", DATA),
    "not an object": join("[]", DATA),
    "not UTF-8": (2).to_bytes(8, "little") + b"\xff\xfe",
    "deep nesting": join("[" * 100_000, b""),
    "duplicate key": join(json.dumps(HEADER)[:-1] + ', "a": ' + json.dumps(HEADER["a"]) + "}", DATA),
    "duplicate field": join(json.dumps(HEADER).replace('"shape"', '"dtype": "F32", "shape"', 1), DATA),
    "half a surrogate": join(json.dumps(HEADER).replace('"a"', '"\\ud800"'), DATA),
    "truncated": save(TENSORS)[:-1],
    "trailing bytes": save(TENSORS) + b"\0",
    "unknown dtype": join(_changed(dtype="F31"), DATA),
    "dtype no string": join(_changed(dtype=["F32"]), DATA),
    "shape too small": join(_changed(shape=[2, 2]), DATA),
    "negative size": join(_changed(shape=[-2, -3]), DATA),
    "fractional size": join(_changed(shape=[2.0, 3]), DATA),
    "huge size": join(_changed(shape=[1 << 70, 3]), DATA),
    "size is true": join(_changed(shape=[True, 6]), DATA),
    "offsets reversed": join(_changed(data_offsets=HEADER["a"]["data_offsets"][::-1]), DATA),
    "offsets outside": join(_changed(data_offsets=[1000, 1024]), DATA),
    "three offsets": join(_changed(data_offsets=[0, 12, 24]), DATA),
    "overlap": join(HEADER | {"d": HEADER["a"]}, DATA),
    "hole": join({key: value for key, value in HEADER.items() if key != "a"}, DATA),
    "extra field": join(_changed(more=1), DATA),
    "tensor no object": join(HEADER | {"a": 3}, DATA),
    "metadata no strings": join(HEADER | {"__metadata__": {"a": 1}}, DATA),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_by_name(tmp_path: Path, case: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BROKEN[case])
    with pytest.raises(PeftlabError, match=r"model\.safetensors"):
        read_header(path)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_headers_never_get_through(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever is done to a header: either it is refused, or the library agrees with what was read."""
    raw = bytearray(save(TENSORS, metadata={"format": "pt"}))
    length = int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(raw), 8 + length) - 1))
        kind = data.draw(st.sampled_from(["set", "insert", "delete", "cut", "digit"]))
        if kind == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "digit":
            raw[at] = ord(data.draw(st.sampled_from('0123456789-.,[]{}"')))
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=3))
        elif kind == "delete":
            del raw[at : at + data.draw(st.integers(1, 9))]
        else:
            del raw[at:]
        if not raw:
            break
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    before = sorted(tmp_path.iterdir())
    try:
        entries, _ = read_header(path)
    except PeftlabError as error:
        assert "model.safetensors" in str(error) and "\n" not in str(error).strip()
    else:
        theirs = load_file(path)
        assert entries.keys() == theirs.keys()
        assert all(
            entries[k].shape == tuple(t.shape) and DTYPES[entries[k].dtype] == t.dtype for k, t in theirs.items()
        )
    assert sorted(tmp_path.iterdir()) == before and path.read_bytes() == bytes(raw)


def test_indexes(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, words in (
        ({"a": "../one.safetensors"}, "inside the directory"),
        ({"a": "/etc/passwd"}, "inside the directory"),
        ({"a": ".."}, "inside the directory"),
        ({"a": 3}, "inside the directory"),
        ({"a": "three.safetensors"}, "missing"),
        ({"a": "two.safetensors"}, "'a' is not in two.safetensors"),
        ({}, "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(PeftlabError, match=words) as caught:
            open_shards(tmp_path)
        assert "index.json" in str(caught.value)
    index.write_text("{")
    with pytest.raises(PeftlabError, match="not valid JSON"):
        open_shards(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert [list(shard.entries) for shard in open_shards(tmp_path)] == [["a"], ["b"]]
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(PeftlabError, match="duplicate key 'a'"):
        open_shards(tmp_path)
    with pytest.raises(PeftlabError, match="no weights"):
        open_shards(tmp_path / "nowhere")
