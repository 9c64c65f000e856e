"""How a run was made: what is needed to repeat it or to report a bug."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.files import Json, parse_json, to_json
from peftlab.hardware import describe_cpu
from peftlab.version import version_of

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "peftlab",
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "safetensors",
    "peft",
    "numpy",
    "bitsandbytes",
)


def environment(device: torch.device) -> dict[str, Json]:
    """Return versions, platform, and what models run on."""
    import torch

    versions: dict[str, Json] = {name: version_of(name) for name in PACKAGES}
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "system": {
            "system": platform.system(),
            "release": platform.release(),
            "version": platform.version(),
            "machine": platform.machine(),
            "processor": platform.processor(),
        },
        "versions": versions,
        "device": torch.cuda.get_device_name() if cuda else device.type,
        "cuda": torch.version.cuda if cuda else None,
        "cpu": to_json(describe_cpu()),
    }


def peak_memory() -> float:
    """Return the largest main memory of this process so far, in MiB."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return float(psutil.Process().memory_info().peak_wset / 2**20)
    # In bytes on macOS, in KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def git_state() -> dict[str, Json]:
    """Return the commit of the working directory's repository, and whether it has uncommitted changes."""
    if shutil.which("git") is None:
        return {"git_sha": None, "git_dirty": None}

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"git_sha": git("rev-parse", "HEAD"), "git_dirty": bool(status) if status is not None else None}


def launch() -> str | None:
    """Return what identifies the launch of torchrun's that started this process, again perhaps; None without one.

    That is ``--rdzv-id``, which all machines of a launch share. Without one torchrun calls every launch "none", and
    the directory of its own logs, which has a random name, tells this one from others.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name != "none":
        return name or None
    logs = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents  # LOGS/attempt_N/RANK/error.json
    return logs[2].name if len(logs) > 3 else None


def launch_in(provenance: bytes | None) -> str | None:
    """Return the launch that a ``provenance.json`` names; None where it names none or cannot be read."""
    try:
        found = parse_json(provenance.decode("utf-8")) if provenance is not None else None
    except ValueError:
        return None
    name = found.get("launch") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def provenance(seed: int, data_fingerprint: str, processes: int, device: torch.device) -> dict[str, Json]:
    """Return the contents of ``provenance.json``."""
    return {
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "launch": launch(),
        "command": [sys.argv[0].rpartition("/")[2], *sys.argv[1:]],
        "seed": seed,
        "data_fingerprint": data_fingerprint,
        "processes": processes,
        **git_state(),
        **environment(device),
    }
