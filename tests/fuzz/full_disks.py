"""Disks that fill, and files that may not grow, swept over whole commands so that every write is the one that fails.

``python -m tests.fuzz.full_disks`` runs each command on a tmpfs of one page, of two, and so on, until it has room; and
under limits on the size of a file. However small the disk is, the command ends with status 2 and one line that names a
path, what it leaves behind is whole, and a run goes on from there once there is room. Mounting needs root or a user
namespace (``unshare``).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

import peftlab
from tests.fuzz import tensors
from tests.fuzz import world as worlds
from tests.fuzz.running import Outcome, in_process

_PAGE = resource.getpagesize()
_ROOM = 16_000  # pages, more than any of the commands writes
_REFUSED = "cannot be written"
_RUN = ("merge.latency=true", "train.save_every=1", "train.eval_every=1", "output_dir=out")


def commands(world: worlds.World) -> dict[str, list[str]]:
    """Return the commands that write, by name; each writes in the current directory alone."""
    lora, rows = str(world.adapter("lora")), str(world.data / "validation.csv")
    return {
        "run": ["run", str(world.run / "recipe.yaml"), *_RUN],
        "merge": ["merge", lora, "-o", "out", "--json", "report.json"],
        "merge in shards": ["merge", lora, "--base", str(world.sharded), "-o", "out", "--no-verify"],
        "unmerge": ["unmerge", str(world.merge), "-o", "out"],
        "predict": ["predict", str(world.run), rows, "-o", "out.csv", "--json", "out.json"],
        "predict to parquet": ["predict", str(world.run), rows, "-o", "out.parquet"],
        "report": ["report", str(world.root / "finished"), "-o", "out.html"],
        "convert": ["adapter", "convert", str(world.root / "llama-lora"), "--to", "vllm", "-o", "out"],
        "extract": ["adapter", "extract", str(world.merge), "--base", str(world.base), "-o", "out", "--rank", "2"],
        "recipes": ["recipes", "copy", "quickstart", "--to", "out.yaml"],
        "bench": ["draft", "bench", "--target", str(world.llama), "--prompts", str(world.root / "prompts.jsonl"),
                  "--max-new-tokens", "2", "--repeats", "1", "--gamma", "2", "--json", "out.json"],
    }  # fmt: skip


def sweep(world: worlds.World, folder: Path, names: Sequence[str], step: int = 1) -> list[str]:
    """Run the commands of these names with ever more room; return what is at fault.

    Args:
        folder: an empty directory, where disks of all sizes are mounted.
        step: pages by which the disks grow.
    """
    faults: list[str] = []

    def tried(name: str, pages: int, limit: int) -> bool:
        """Run a command with so much room; return whether all that it writes was written."""
        with _mounted(folder, pages * _PAGE), _files_of(limit):
            outcome = in_process(commands(world)[name], folder)
            fault = outcome.fault or _half_written(folder) or _unsaid(outcome, folder)
            if outcome.status and not fault and name == "run":
                fault = _stuck(folder, commands(world)[name])
        if fault:
            faults.append(f"--- {name}, {pages} pages, files of {limit} bytes: {fault}")
            print(faults[-1], flush=True)
        return outcome.status == 0 and _REFUSED not in outcome.out + outcome.err

    for name in names:
        with _mounted(folder, _ROOM * _PAGE):
            outcome = in_process(commands(world)[name], folder)
            sizes = sorted({path.stat().st_size for path in folder.rglob("*") if path.is_file()} - {0})
        if outcome.status:
            faults.append(f"--- {name}: with room: {outcome.fault or outcome.err}")
            continue
        enough = next((pages for pages in range(1, _ROOM, step) if tried(name, pages, _ROOM * _PAGE)), None)
        for size in sizes:
            tried(name, _ROOM, size - 1)
        print(f"{name}: disks of up to {enough} pages, {len(sizes)} limits on files", flush=True)
    return faults


def _unsaid(outcome: Outcome, folder: Path) -> str:
    """Return what is wrong with the message of a command that had no room: it is one line, which names a path."""
    if outcome.status == 0:
        return ""
    message = outcome.err.strip().splitlines()[-1]
    if not message.startswith("error: ") or _REFUSED not in message:
        return f"said {outcome.err[-1000:]!r}"
    named = message.removeprefix("error: ").partition(f": {_REFUSED}")[0].rpartition(" ")[2]
    known = named.startswith(("out", str(folder))) and ".peftlab-tmp-" not in named
    return "" if known else f"no path of the user's in {message!r}"


def _half_written(folder: Path) -> str:
    """Return which file is there and not whole."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if ".peftlab-tmp-" in str(name):
            return f"{name} is left behind"
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".jsonl":
                [json.loads(line) for line in path.read_text().splitlines()]
            elif path.suffix == ".safetensors":
                tensors.read(path)
            elif path.suffix == ".pt":
                with zipfile.ZipFile(path) as archive:
                    assert archive.testzip() is None
            elif path.suffix in (".html", ".csv", ".yaml", ".md", ".parquet", ".svg"):
                content = path.read_bytes()
                assert content.endswith((b"\n", b"PAR1", b"</html>")), content[-20:]
        except Exception as error:
            return f"{name} is half-written: {type(error).__name__}: {error}"
    return ""


def _stuck(folder: Path, arguments: list[str]) -> str:
    """Return why a run that had no room does not go on, or begin again, once there is room."""
    subprocess.run(["mount", "-o", f"remount,size={_ROOM * _PAGE}", str(folder)], check=True)
    with _files_of(_ROOM * _PAGE):
        begun = any(folder.glob("out/checkpoints/*.pt"))
        outcome = in_process(["resume", "out"] if begun else [*arguments, "--overwrite"], folder)
    if outcome.status or not (folder / "out" / "results.json").exists():
        return f"and then {'cannot be resumed' if begun else 'cannot begin again'}: {outcome.fault or outcome.err}"
    return ""


@contextmanager
def _mounted(folder: Path, size: int) -> Iterator[None]:
    """Mount an empty disk of so many bytes at ``folder`` for the block; datasets' cache is on it, too."""
    import datasets

    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def _files_of(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes for the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _built(root: Path) -> worlds.World:
    """Make the sound files, and what only these commands read: a finished run, an adapter of a Llama."""
    world = worlds.build(root)
    model = peftlab.inject_lora(transformers.AutoModelForCausalLM.from_pretrained(world.llama), r=2)
    peftlab.save_adapter(model, root / "llama-lora", base=str(world.llama))
    outcome = in_process(["run", str(world.run / "recipe.yaml"), f"output_dir={root / 'finished'}"], root)
    assert outcome.status == 0, outcome.err
    return world


def main() -> int:
    """Sweep the commands that the arguments name; 1 if any is at fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.full_disks", description=__doc__)
    parser.add_argument("names", nargs="*", help="commands; default: all")
    parser.add_argument("--step", type=int, default=1, help="pages by which the disks grow")
    options = parser.parse_args()
    if os.geteuid() != 0:  # in a namespace of one's own, where one is root
        return subprocess.run(
            ["unshare", "-rm", sys.executable, "-m", "tests.fuzz.full_disks", *sys.argv[1:]], check=False
        ).returncode
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="peftlab-disks-"))
    try:
        world = _built(root / "world")
        (root / "disk").mkdir()
        faults = sweep(world, root / "disk", options.names or list(commands(world)), options.step)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
