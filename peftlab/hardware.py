"""The devices that models run on: the one that a name stands for, and what the CPU is called and can do."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError, did_you_mean

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda", "mps")
# What decides how fast products are; a server's CPU has some two hundred flags.
_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")


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
