"""Run as a program: a command is killed at random moments and repeated; nothing is torn and the end is the same.

Arguments: what is killed (``run``, ``resume`` or ``table``), how many times, the seed of the moments, and a recipe
file whose output is ``out`` beside it. The same recipe is run without a kill first; its output becomes ``whole``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch
from killed import command

from peftlab.files import remove
from peftlab.recipe.load import load_recipe
from peftlab.training.state import read_checkpoint


def process(work: Callable[[], None], seconds: float | None = None) -> tuple[int, float]:
    """Do ``work`` in a process of its own, killed after ``seconds``; return its exit code and how long it took."""
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), 1)
            work()
            status = 0
        finally:
            os._exit(status)
    ended = (0, 0)
    while ended == (0, 0) and (seconds is None or time.monotonic() - began < seconds):
        time.sleep(0.002)
        ended = os.waitpid(pid, os.WNOHANG)
    if ended == (0, 0):
        os.kill(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(ended[1]), time.monotonic() - began


def sums(run: Path) -> dict[str, str]:
    """Return the checksums of what two equal runs have in common: all but clocks and paths."""
    names = ["metrics.jsonl", "adapter/*", "merged/*.safetensors", "merged/config.json", "merged/tokenizer*"]
    files = [file for name in names for file in run.glob(name)]
    alike = [file for file in files if file.name not in ("peftlab.json", "README.md")]
    found = {file.relative_to(run).as_posix(): sha256(file.read_bytes()).hexdigest() for file in alike}
    if (run / "results.json").exists():
        results = json.loads((run / "results.json").read_text())
        found["scores"] = json.dumps([results[key] for key in ("metrics", "last_metrics", "best_step", "steps")])
    return found


def check_whole(run: Path, whole: Path) -> None:
    """Assert that each part of a run is absent or complete."""
    if not run.exists():
        return
    expected = sums(whole)
    for part in ("adapter", "merged"):
        if (run / part).exists():
            there, full = (
                {name: value for name, value in found.items() if name.startswith(f"{part}/")}
                for found in (sums(run), expected)
            )
            differ = {name for name in {**there, **full} if there.get(name) != full.get(name)}
            assert not differ, f"{run / part} is torn: {differ}, of {sorted(there)}"
            assert {file.name for file in (run / part).iterdir()} == {file.name for file in (whole / part).iterdir()}
    for file in (run / "checkpoints").glob("step-*.pt"):
        read_checkpoint(file)
    for name in ("results.json", "provenance.json", "peftlab.json"):
        if (run / name).exists():
            json.loads((run / name).read_text())
    if (run / "recipe.yaml").exists():
        load_recipe(run / "recipe.yaml")
    if (run / "report.html").exists():
        assert (run / "report.html").read_text().rstrip().endswith("</html>")


def started(out: Path) -> bool:
    return any((out / "checkpoints").glob("step-*.pt"))


def runs(out: Path, whole: Path, kind: str) -> dict[Path, Path]:
    """Return the run directories that a command writes, and the ones they must equal."""
    if kind != "table":
        return {out: whole}
    return {out / "cells" / cell.name: cell for cell in (whole / "cells").iterdir() if cell.is_dir()}


def main(kind: str, kills: int, seed: int, recipe: Path) -> None:
    """Kill ``kills`` processes; after each kill of a ``run``, and at last of the others, let it end and compare."""
    out, whole = recipe.parent / "out", recipe.parent / "whole"
    code, seconds = process(lambda: command("run", str(recipe)))
    assert code == 0, f"exit status {code}"
    out.rename(whole)
    chance, killed = random.Random(seed), 0

    def anew() -> None:
        command("run", str(recipe), "--overwrite")

    def again() -> None:
        if kind != "table" and started(out):
            command("resume", str(out))
        else:
            anew()

    def compare() -> None:
        for run, expected in runs(out, whole, kind).items():
            here, there = sums(run), sums(expected)
            differ = {
                key: (here.get(key), there.get(key)) for key in {**here, **there} if here.get(key) != there.get(key)
            }
            assert not differ, f"{run} differs from a run that was not killed: {differ}"

    while killed < kills:
        moment = chance.random() * seconds
        code, took = process(anew if kind == "run" or not out.exists() else again, moment)
        assert code in (0, -signal.SIGKILL), f"exit status {code} instead of a kill after {moment:.3f} s"
        killed += code != 0
        print(f"{kind}: kill {killed} after {moment:.3f} s of {seconds:.3f}", flush=True)
        for run, expected in runs(out, whole, kind).items():
            check_whole(run, expected)
        if kind == "run":
            assert process(again)[0] == 0, "the rerun failed"
            compare()
        elif code == 0:
            seconds = min(seconds, 2 * took)  # the machine may have been busy when the first run was timed
            compare()
            remove(out, "table" if kind == "table" else "run")
    assert process(again)[0] == 0, "the rerun failed"
    compare()
    left = [path.name for path in recipe.parent.rglob(".peftlab-tmp-*")]
    assert not left, f"left behind: {left}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
