"""safetensors files and merged weights, read and computed with struct, json and numpy alone."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
_FACTOR = re.compile(r"(.+)\.lora_(A|B|magnitude_vector)(?:\.weight)?$")


def header_and_data(path: Path) -> tuple[Any, bytes]:
    """Return a file's JSON header and the bytes after it."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(path: Path, header: str, data: bytes) -> None:
    """Write a file of any header text."""
    text = header.encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read(path: Path) -> Arrays:
    """Return a file's tensors; bfloat16 becomes float32."""
    header, data = header_and_data(path)
    arrays = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if entry["dtype"] == "BF16":
            flat = (np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            flat = np.frombuffer(data[begin:end], _DTYPES[entry["dtype"]])
        arrays[key] = flat.reshape(entry["shape"])
    return arrays


def read_directory(directory: Path) -> Arrays:
    """Return all tensors of a model directory, in one file or several."""
    return {key: array for path in sorted(directory.glob("*.safetensors")) for key, array in read(path).items()}


def merged(base: Mapping[str, np.ndarray], adapter: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Arrays:
    """Return the base's tensors with an adapter in peft's format (LoRA, rsLoRA, DoRA, whole modules), or one of whole
    parameters, folded in, in float64."""
    result = {key: array.astype(np.float64) for key, array in base.items()}
    modules: dict[str, dict[str, np.ndarray]] = {}
    for key, array in adapter.items():
        key = key.removeprefix("base_model.model.")
        found = _FACTOR.match(key)
        if found:
            modules.setdefault(found[1], {})[found[2]] = array.astype(np.float64)
        elif ".original_module." not in key:
            result[key.replace(".modules_to_save.", ".").replace(".base_layer.", ".")] = array.astype(np.float64)
    for name, parts in modules.items():
        a, b = parts["A"], parts["B"]
        weight = result[f"{name}.weight"] + _scaling(name, config) * (b @ a)
        if "magnitude_vector" in parts:
            weight *= (parts["magnitude_vector"].reshape(-1) / np.linalg.norm(weight, axis=1))[:, None]
        result[f"{name}.weight"] = weight
    return result


def _scaling(module: str, config: Mapping[str, Any]) -> float:
    # Where the file does not say them, r and lora_alpha are peft's defaults.
    rank = _by_pattern(config.get("rank_pattern"), module, config.get("r", 8))
    alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.search(rf"(?:^|\.)(?:{pattern})$", module):
            return value
    return default


def difference(path: Path, wanted: Mapping[str, np.ndarray]) -> str:
    """Return what in a merged directory is not as ``wanted``; empty if nothing is."""
    found = read_directory(path)
    for key, array in found.items():
        name = next((k for k in (key, key.removeprefix("bert."), f"bert.{key}") if k in wanted), None)
        if name is None:
            return f"{key} is in neither file"
        if array.shape != wanted[name].shape:
            return f"{key} has shape {array.shape}, not {wanted[name].shape}"
        near = np.isclose(array.astype(np.float64), wanted[name], rtol=2e-3, atol=2e-5, equal_nan=True)
        if not near.all():
            at = np.argwhere(~near)[0]
            return f"{key}{list(at)} is {array[tuple(at)]}, not {wanted[name][tuple(at)]}"
    return ""
