"""What a process runs on: versions of this package and of others, devices, the CPU, memory, and the state of git."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json, to_json

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"  # the one place that states it
DEVICES = ("auto", "cpu", "cuda", "mps")
# What decides how fast products are; a server's CPU has some two hundred flags.
_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")
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


@dataclass(frozen=True)
class Cpu:
    """The processor.

    Attributes:
        name: as its maker calls it. features: those of ``_FEATURES`` that it has, or what PyTorch says.
        threads: that PyTorch computes with.
    """

    name: str
    features: list[str]
    threads: int

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.features)}), {self.threads} thread{'' if self.threads == 1 else 's'}"


def check_device_name(name: str) -> None:
    """Raise ``PeftlabError`` if no device has this name, on whatever machine."""
    if name not in DEVICES:
        raise PeftlabError(f"device {name}: one of {', '.join(DEVICES)}{did_you_mean(name, DEVICES)}")


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve_device(name: str) -> torch.device:
    """Return the device that ``name`` stands for.

    Args:
        name: ``cpu``, ``cuda``, ``mps``, or ``auto``: the accelerator that there is (cuda, else mps), else the CPU.

    Raises:
        PeftlabError: no such name, or PyTorch sees no such device here.
    """
    import torch

    check_device_name(name)
    if name == "auto":
        there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return there or torch.device("cpu")
    missing = {
        "cuda": not torch.cuda.is_available(),
        "mps": not torch.backends.mps.is_available(),
    }
    if missing.get(name):
        built = torch.backends.cuda.is_built() if name == "cuda" else torch.backends.mps.is_built()
        why = "and sees no such device" if built else "which was built without it"
        raise PeftlabError(f"device {name}: there is none here (PyTorch {torch.__version__}, {why}); use cpu or auto")
    return torch.device(name)


def wait_for(device: torch.device) -> None:
    """Wait until a device has computed what it was given; a CPU computes before it returns."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def describe_cpu() -> Cpu:
    """Return what the processor is called, what it can do, and how many threads PyTorch uses."""
    import torch

    about: dict[str, str] = {}
    with suppress(OSError):  # Linux alone has the file
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
        about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = (about.get("flags") or about.get("Features") or "").split()
    features = [name for name in _FEATURES if name in flags] or [torch.backends.cpu.get_cpu_capability()]
    name = about.get("model name") or platform.processor() or platform.machine()
    return Cpu(name, features, torch.get_num_threads())


def version_of(package: str) -> str | None:
    """Return the version of a distribution; None where it is not installed. This package need not be."""
    if package == "peftlab":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_environment(device: torch.device) -> dict[str, Json]:
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
