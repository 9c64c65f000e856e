"""Checkpoints of a run: everything the next step depends on, written atomically."""

from __future__ import annotations

import hashlib
import shlex
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from peftlab.checkpoints.tensors import unpickle
from peftlab.environment import describe_cpu, peak_memory
from peftlab.errors import PeftlabError
from peftlab.files import STAGING_PREFIX, replacing
from peftlab.methods.inject import trainable_parameters
from peftlab.models.costs import Cost, kv_bytes_per_token
from peftlab.training.distributed import full_tensors, optimiser_state, restore_optimiser, shard_like
from peftlab.untyped import Attributes

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

    from peftlab.training.config import TrainConfig

_PATTERN = "step-*.pt"
_DIGEST = "peftlab-digest"  # the entry of the archive that the others are compared with


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        step: optimiser steps done.
        best_step, best_score, best_metrics: the best evaluation so far.
        last_metrics: the newest evaluation.
        stale: evaluations since the best one.
        examples, tokens, padded_tokens, seconds: work done in training steps.
        metrics_bytes: length of metrics.jsonl at this point.
        step_costs: what each kind of step costs, counted in the first of them (``Meter.known``); empty where steps
            are not counted (many processes, ``train.compile``). step_kinds: how many there were of each.
        chosen: the examples that each round added, where a score chooses them (``train.sample``).
        scored_examples, scoring_flops: of the forward passes that chose them.
    """

    step: int = 0
    best_step: int = 0
    best_score: float | None = None
    best_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    last_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    stale: int = 0
    examples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    seconds: float = 0.0
    metrics_bytes: int = 0
    step_costs: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    step_kinds: dict[str, int] = field(default_factory=dict)
    chosen: list[list[int]] = field(default_factory=list)
    scored_examples: int = 0
    scoring_flops: int = 0

    def cost(self, model: nn.Module) -> Cost | None:
        """Return what the run has cost so far, scoring included; None where steps are not counted."""
        if not self.step_costs:
            return None
        forward, backward = (sum(self.step_costs[kind][i] * n for kind, n in self.step_kinds.items()) for i in (0, 1))
        kept, optimiser = (max(costs[i] for costs in self.step_costs.values()) for i in (2, 3))
        return Cost(forward + self.scoring_flops, backward, kept, optimiser, kv_bytes_per_token(model))

    def figures(self, settings: TrainConfig, model: nn.Module, device: torch.device) -> Attributes:
        """Return what the results of every run say of its training, by the names of their fields.

        Args:
            settings: the recipe's ``train`` section.
            model: trained.
            device: of the training.
        """
        seconds = max(self.seconds, 1e-9)
        gpu = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
        return {
            "score": self.best_score,
            "metrics": self.best_metrics,
            "last_metrics": self.last_metrics,
            "best_step": self.best_step,
            "steps": self.step,
            "train_seconds": round(self.seconds, 3),
            "examples_per_second": round(self.examples / seconds, 2),
            "tokens_per_second": round(self.tokens / seconds, 2),
            "peak_rss_mb": round(peak_memory(), 1),
            "peak_gpu_mb": round(gpu, 1) if gpu is not None else None,
            "lr": settings.peak_lr,
            "cpu": describe_cpu(),
            "seed": settings.seed,
            "cost": self.cost(model),
            "selection": self.selection(),
        }

    def selection(self) -> SelectionResult | None:
        """Return what was chosen so far; None where no score chooses examples."""
        if not self.chosen:
            return None
        examples = sum(map(len, self.chosen))
        return SelectionResult(len(self.chosen), examples, self.scored_examples, self.scoring_flops)


@dataclass(frozen=True)
class SelectionResult:
    """The examples that ``train.sample`` chose by a score, and what choosing them took.

    Attributes:
        rounds: times that examples were chosen.
        examples: how many.
        scored_examples: forward passes that this took.
        scoring_flops: their FLOPs, which the run's cost includes; 0 where steps are not counted.
    """

    rounds: int
    examples: int
    scored_examples: int
    scoring_flops: int


class RandomState(TypedDict):
    """The state of torch's generators, on the CPU and on the current CUDA device or MPS."""

    torch: Tensor
    cuda: Tensor | None
    mps: Tensor | None


class Checkpoint(TypedDict):
    """The contents of a checkpoint file.

    Attributes:
        progress: the fields of ``Progress``.
        adapter: the trainable parameters by name.
        optimiser: as ``optimiser_state`` returns it.
        scaler: of fp16's gradient scaler; None without one.
        rng: the generators' states, one per process.
    """

    progress: StateDict
    adapter: Mapping[str, Tensor]
    optimiser: StateDict | list[StateDict]
    scaler: StateDict | None
    rng: list[RandomState]


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the file of the checkpoint after ``step`` steps.

    Args:
        directory: of the checkpoints.
        step: optimiser steps completed.
    """
    return directory / f"step-{step:08d}.pt"


def save_checkpoint(
    directory: Path,
    accelerator: Accelerator,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    progress: Progress,
    keep: int,
) -> None:
    """Write a checkpoint, then remove all but the newest ``keep`` and the best one.

    Args:
        directory: of the checkpoints.
        accelerator: devices and processes.
        model: the wrapped model; its trainable parameters are saved.
        optimiser: the wrapped optimiser.
        progress: of the run so far.
        keep: how many of the newest checkpoints stay.

    Raises:
        PeftlabError: it cannot be written; earlier checkpoints are unchanged.
    """
    state: Checkpoint = {
        "progress": asdict(progress),
        "adapter": full_tensors(trainable_parameters(model)),
        "optimiser": optimiser_state(optimiser, accelerator),
        "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
        "rng": gather_object([_rng_state()]),
    }
    if accelerator.is_main_process:
        path = checkpoint_path(directory, progress.step)
        before = sorted(directory.glob(_PATTERN))
        kept = f"{before[-1].name} is complete" if before else "there is no earlier one"
        with replacing(path, f"{kept}. Is the disk full?") as temporary:
            torch.save(state, temporary)
            with zipfile.ZipFile(temporary, "a") as archive:
                archive.writestr(_digest_name(archive), _digest(archive))
        for old in sorted({*before, path})[:-keep]:
            if old not in (path, checkpoint_path(directory, progress.best_step)):
                old.unlink()
    accelerator.wait_for_everyone()


def load_checkpoint(
    directory: Path, accelerator: Accelerator, model: nn.Module, optimiser: torch.optim.Optimizer
) -> Progress:
    """Restore the newest readable checkpoint of a run; a damaged one is skipped with a message.

    A damaged file gets ``.damaged`` added to its name, and leftovers of an interrupted write are removed.

    Args:
        directory: of the checkpoints.
        accelerator: devices and processes.
        model: the wrapped model, which receives the adapter.
        optimiser: the wrapped optimiser, which receives its state.

    Raises:
        PeftlabError: no checkpoint can be read, it was written by a different number of processes, or only one of
            that run and this one uses DeepSpeed.
    """
    skipped: list[str] = []
    for path in sorted(directory.glob(_PATTERN), reverse=True):
        try:
            state = read_checkpoint(path)
        except PeftlabError as error:
            skipped.append(str(error))
            continue
        if len(state["rng"]) != accelerator.num_processes:
            raise PeftlabError(
                f"{path} was written by {len(state['rng'])} processes; resume with the same "
                f"number, not {accelerator.num_processes}"
            )
        for reason in skipped:
            accelerator.print(f"skipped {reason}; resuming from {path.name}")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _remove_unusable(directory, path)
        restore_adapter(model, state)
        restore_optimiser(optimiser, state["optimiser"], accelerator)
        if accelerator.scaler is not None and state["scaler"]:
            accelerator.scaler.load_state_dict(state["scaler"])
        _set_rng_state(state["rng"][accelerator.process_index])
        return Progress(**state["progress"])
    run = directory.parent
    again = f"`peftlab run {shlex.quote(str(run / 'recipe.yaml'))} --overwrite` starts again"
    how = "none of its checkpoints can be read" if skipped else "it was stopped before its first checkpoint"
    raise PeftlabError("\n".join([f"{run}: no checkpoint to resume from ({how}); {again}", *skipped]))


def _remove_unusable(directory: Path, newest: Path) -> None:
    """Rename the damaged checkpoints, those newer than the one in use, and remove half-written files."""
    for path in directory.glob(_PATTERN):
        if path > newest:
            path.rename(f"{path}.damaged")
    for leftover in directory.glob(f"{STAGING_PREFIX}*"):
        leftover.unlink()


def read_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint file; a missing or damaged one raises ``PeftlabError``."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not check the checksums
            bad = archive.testzip()
            unchanged = bad is None and archive.read(_digest_name(archive)) == _digest(archive)
        if unchanged:
            return unpickle(path)
        reason = f"wrong checksum of {bad}" if bad is not None else "its contents were changed after it was written"
    except FileNotFoundError:
        raise PeftlabError(f"{path}: no such checkpoint") from None
    except KeyError:
        reason = f"it has no {_DIGEST}: written by another program"
    except (zipfile.BadZipFile, RuntimeError, OSError, EOFError, ValueError, zlib.error) as error:
        reason = _error_text(error)
    raise PeftlabError(f"{path}: damaged checkpoint ({reason})")


def _digest(archive: zipfile.ZipFile) -> bytes:
    """Return the digest of a checkpoint's entries: their names, sizes and checksums, which ``testzip`` has compared."""
    own = _digest_name(archive)
    entries = sorted((each.filename, each.file_size, each.CRC) for each in archive.infolist() if each.filename != own)
    return hashlib.sha256(repr(entries).encode()).hexdigest().encode()


def _digest_name(archive: zipfile.ZipFile) -> str:
    return f"{archive.namelist()[0].partition('/')[0]}/{_DIGEST}"  # torch reads archives of one directory only


def restore_adapter(model: nn.Module, state: Checkpoint) -> None:
    """Copy a checkpoint's adapter into the trainable parameters of ``model``.

    Args:
        model: the injected model, wrapped or not.
        state: what ``read_checkpoint`` returned.
    """
    parameters = trainable_parameters(model)
    if set(parameters) != set(state["adapter"]):
        raise PeftlabError("the checkpoint contains other parameters than the recipe trains")
    with torch.no_grad():
        for name, tensor in state["adapter"].items():
            parameters[name].copy_(shard_like(parameters[name], tensor))


def _error_text(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _rng_state() -> RandomState:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "mps": mps}


def _set_rng_state(state: RandomState) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if state["mps"] is not None and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
