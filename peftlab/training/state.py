"""The files of a run in training: checkpoints, with everything the next step depends on, and the log of its metrics."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
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
from peftlab.methods.inject import adapter_state, is_injected, trainable_parameters
from peftlab.models.costs import Cost, kv_bytes_per_token
from peftlab.progress import Phase, per_second
from peftlab.training.distributed import full_tensors, optimiser_state, restore_optimiser, shard_like
from peftlab.training.order import Order
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
        earlier_seconds: those of ``seconds`` that earlier processes took, in a run that was resumed.
        metrics_bytes: length of metrics.jsonl at this point.
        step_costs: what each kind of step costs, by the first of them or by near ones (``Meter.known``); empty where
            steps are not counted (many processes, ``train.compile``). step_kinds: how many there were of each.
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
    earlier_seconds: float = 0.0
    metrics_bytes: int = 0
    step_costs: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    step_kinds: dict[str, int] = field(default_factory=dict)
    chosen: list[list[int]] = field(default_factory=list)
    scored_examples: int = 0
    scoring_flops: int = 0

    def cost(self, model: nn.Module) -> Cost | None:
        """Return what the run has cost so far, scoring included; None where steps are not, or not all, counted."""
        if not self.step_costs or not self.step_kinds.keys() <= self.step_costs.keys():
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
        model: the injected model; its trainable parameters are saved, and the buffers of what trains whole.
        optimiser: the wrapped optimiser.
        progress: of the run so far.
        keep: how many of the newest checkpoints stay.

    Raises:
        PeftlabError: it cannot be written; earlier checkpoints are unchanged.
    """
    state: Checkpoint = {
        "progress": asdict(progress),
        "adapter": full_tensors(_trained_state(model)),
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
        progress = Progress(**state["progress"])
        progress.earlier_seconds = progress.seconds
        return progress
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


def _trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what changes in training, by name: the trainable parameters, and the buffers of what trains whole."""
    state = adapter_state(model) if is_injected(model) else {}
    buffers = {name: tensor for name, tensor in state.items() if not isinstance(tensor, nn.Parameter)}
    return {**trainable_parameters(model), **buffers}


def restore_adapter(model: nn.Module, state: Checkpoint) -> None:
    """Copy a checkpoint's adapter into ``model``.

    Args:
        model: the injected model, wrapped or not.
        state: what ``read_checkpoint`` returned.
    """
    parameters = _trained_state(model)
    if set(parameters) != set(state["adapter"]):
        raise PeftlabError("the checkpoint contains other parameters than the recipe trains")
    for name, tensor in state["adapter"].items():
        if parameters[name].shape != tensor.shape:
            shapes = tuple(tensor.shape), tuple(parameters[name].shape)
            raise PeftlabError(f"the checkpoint's {name} has shape {shapes[0]}, the recipe's {shapes[1]}")
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


# --- The log of losses and scores.
_NAMED = 64  # examples of a bad batch that the error lists


class Log:
    """Writes losses and scores to the metrics file, the trackers and the terminal, from the main process only.

    Args:
        path: the metrics file; what it contains after ``keep_bytes`` was written after the checkpoint and is removed.
        step: steps completed before.
    """

    def __init__(self, path: Path, accelerator: Accelerator, step: int, keep_bytes: int, order: Order) -> None:
        self._accelerator, self._order = accelerator, order
        self._file = MetricsFile(path, keep_bytes) if accelerator.is_main_process else None
        # Reading a loss waits for its step. A GPU, which works behind the program, is given the next step first.
        self._behind = 0 if accelerator.device.type == "cpu" else 1
        self._pending: list[tuple[int, float, Tensor, Tensor, bool, list[int]]] = []
        self._phase = Phase("training", order.total, "step", done=step)
        self._loss = ""

    def __enter__(self) -> Log:
        self._phase.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._phase.__exit__(kind, *error)
        if self._file is not None:
            self._file.close()

    def step(
        self, step: int, lr: float, loss: Tensor, norm: Tensor, skipped: bool, batch: list[int], speed: float
    ) -> None:
        """Record a training step: on a CPU its line is in the file when this returns, on a GPU after the next step.

        Args:
            step: optimiser steps completed.
            lr: the learning rate of the step.
            loss: its mean loss, a scalar.
            norm: the gradient's norm before clipping, a scalar.
            skipped: whether the optimiser leaves a step out whose gradient overflows, as scaling in fp16 does.
            batch: indices of the global batch's examples.
            speed: tokens per second of the run so far.
        """
        self._pending.append((step, lr, loss, norm, skipped, batch))
        self.flush(self._behind)
        self._phase.advance(1, f"{self._loss}{per_second(speed)} tokens/s")

    def flush(self, behind: int = 0) -> None:
        """Write the pending steps but the last ``behind``; raise ``PeftlabError`` at a loss or gradient not finite."""
        while len(self._pending) > behind:
            step, lr, loss, norm, skipped, batch = self._pending.pop(0)
            value, size = loss.item(), float(norm)
            if not math.isfinite(value) or not (skipped or math.isfinite(size)):
                wrong = f"the norm of the gradient is {size}" if math.isfinite(value) else f"the loss is {value}"
                named = ", ".join(map(str, sorted(batch)[:_NAMED]))
                more = f" and {len(batch) - _NAMED} more" if len(batch) > _NAMED else ""
                raise PeftlabError(
                    f"{wrong} at step {step}, on training examples {named}{more} (from 0); the "
                    "checkpoints of earlier steps are intact. A lower train.lr, a longer train.warmup or "
                    "train.precision=fp32 usually helps"
                )
            self._write(step, {"loss": value, "lr": lr, "grad_norm": size})
            self._loss = f"loss {value:.4f}, "
        if self._file is not None:
            self._file.flush()

    def evaluation(self, step: int, scores: dict[str, dict[str, float]], *, best: bool) -> None:
        """Write and print an evaluation, one line per split; the first split is the deciding one.

        Args:
            step: optimiser steps completed.
            scores: metrics by split.
            best: whether it is the best evaluation so far.
        """
        for split, values in scores.items():
            self._write(step, {"split": split, "eval": values})
            shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
            mark = " (best)" if best and split == next(iter(scores)) else ""
            self._accelerator.print(f"step {step}/{self._order.total}: {split} {shown}{mark}", flush=True)

    def position(self) -> int:
        """Write the pending steps to the disk and return the length of the metrics file."""
        self.flush()
        return self._file.position() if self._file is not None else 0

    def _write(self, step: int, values: dict[str, object]) -> None:
        values = {"epoch": self._order.epoch(step), **values}
        if self._file is not None:
            self._file.write({"step": step, **values})
        if self._accelerator.trackers:
            self._accelerator.log(flat(values), step=step)


class MetricsFile:
    """``metrics.jsonl``: one JSON object per line.

    The file contains nothing that differs between two runs of one recipe (no clock), so that a resumed run's file
    equals an uninterrupted one's.

    Args:
        path: the file.
        keep_bytes: its length at the checkpoint, to which it is truncated.
    """

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self._file = open(path, "ab")  # noqa: SIM115
        self._file.truncate(keep_bytes)

    def write(self, values: Mapping[str, object]) -> None:
        """Append ``values`` as a line; a number that is not finite becomes null, as JSON has none."""
        self._file.write((json.dumps(_null_if_not_finite(values)) + "\n").encode())

    def flush(self) -> None:
        """Write buffered lines to the file; ``PeftlabError`` if that fails, as on a full disk."""
        try:
            self._file.flush()
        except OSError as error:
            raise PeftlabError(
                f"{self._file.name}: cannot be written ({error.strerror}); the newest checkpoint is complete"
            ) from None

    def position(self) -> int:
        """Flush to the disk and return the file's length in bytes."""
        self.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file; ``flush`` has already reported a full disk."""
        with suppress(OSError):
            self._file.close()


def _null_if_not_finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _null_if_not_finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(values: Mapping[str, object], prefix: str = "") -> dict[str, float]:
    """Return the numbers in nested ``values`` under slash-joined names, as accelerate's trackers need them.

    Args:
        values: numbers, and mappings of them.
        prefix: of the names, with its slash.
    """
    result: dict[str, float] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            result |= flat(value, f"{name}/")
        elif isinstance(value, (int, float)):
            result[name] = value
    return result
