"""Runs in two processes, forked or started by ``accelerate launch``."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import tiny

from tests.forked import two

LAUNCHED = Path(__file__).with_name("launched.py")
# --multi_gpu makes accelerate start processes itself; with --cpu it leaves that to mpirun.
TWO = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(*arguments, options=TWO, port=None, **environment):
    launcher = ["-m", "accelerate.commands.launch", *options, "--dynamo_backend", "no"]
    return subprocess.Popen(
        [sys.executable, *launcher, "--main_process_port", str(port or free_port()), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**tiny.environment(), **environment},
    )


def ended(process):
    with process:
        try:
            said, complained = process.communicate(timeout=180)
        finally:
            process.terminate()
    assert process.returncode == 0, said[-2000:] + complained[-6000:]
    return said


def launch(*arguments, **options):
    return ended(start(*arguments, **options))


def run_in_two(*recipes, **environment):
    """Run recipes, one after the other, as ``launched.py`` does."""
    both = two(LAUNCHED, *recipes, **environment)  # if one fails, the other is killed
    assert not any(each.returncode for each in both), "\n".join(e.stdout[-2000:] + e.stderr[-6000:] for e in both)
