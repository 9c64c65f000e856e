"""How a run was made: what is needed to repeat it or to report a bug."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from datetime import datetime, timezone

from peftlab.files import Json
from peftlab.version import version_of

PACKAGES = (
    "peftlab",
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "evaluate",
    "safetensors",
    "peft",
    "numpy",
    "bitsandbytes",
)


def environment() -> dict[str, Json]:
    """Return versions, platform and devices of this process."""
    import torch

    versions: dict[str, Json] = {name: version_of(name) for name in PACKAGES}
    cuda = torch.cuda.is_available()
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
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cuda": torch.version.cuda if cuda else None,
        "cpu_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
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


def provenance(seed: int, data_fingerprint: str, processes: int) -> dict[str, Json]:
    """Return the contents of ``provenance.json``."""
    return {
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [sys.argv[0].rpartition("/")[2], *sys.argv[1:]],
        "seed": seed,
        "data_fingerprint": data_fingerprint,
        "processes": processes,
        **git_state(),
        **environment(),
    }
