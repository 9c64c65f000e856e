"""Judging a case: peft makes and saves the adapter; peftlab's outputs must be those of peft at every step."""

from __future__ import annotations

import itertools
import re
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.errors import PeftlabError
from peftlab.methods.inject import trainable_parameters
from tests.peft_cases.cases import Case

STEPS = ("load", "train", "save", "merge", "merge on disk")


@dataclass
class Verdict:
    """What became of a case.

    Attributes:
        case: the case. steps: the end of each step that was tried: ``pass``, ``refused``, ``wrong``, or
            ``noted``: of training, where loading says what differs.
        theirs: why peft itself fails, if it does. detail: the first message that is not of a pass.
    """

    case: Case
    steps: dict[str, str] = field(default_factory=dict)
    theirs: str = ""
    detail: str = ""

    @property
    def end(self) -> str:
        """``pass``, ``noted``, ``refused``, ``wrong``, ``other method`` (refused) or ``peft fails``."""
        if self.theirs:
            return "peft fails"
        ends = set(self.steps.values())
        if "wrong" in ends:
            return "wrong"
        if "refused" in ends:
            return "other method" if self.case.other else "refused"
        return "noted" if "noted" in ends else "pass"


def judge(case: Case) -> Verdict:
    """Return the verdict on a case; where fp32 shows a difference, fp64 tells an error from rounding."""
    verdict = _judged(case, torch.float32)
    if verdict.end == "wrong" or verdict.theirs.startswith("its outputs differ"):
        again = _judged(case, torch.float64)
        if again.end == "pass":
            return again
    return verdict


def _judged(case: Case, dtype: torch.dtype) -> Verdict:
    verdict = Verdict(case)
    place = Path(tempfile.mkdtemp(prefix="peft-case-"))
    try:
        with quiet():
            try:
                expected = _theirs(case, place, dtype)
            except Exception as error:
                verdict.theirs = _line(error)
                return verdict
            for step, work in _steps(case, place, dtype, expected):
                try:
                    with warnings.catch_warnings(record=True) as told:
                        warnings.simplefilter("always")
                        work()
                    verdict.steps[step] = "pass"
                except PeftlabError as error:
                    if step.startswith("merge") and not _mergeable(case, place, dtype):
                        continue
                    verdict.steps[step] = "refused"
                    verdict.detail = verdict.detail or f"{step}: {_line(error)}"
                except Exception as error:
                    if step == "train" and any(re.search("peft trains|trains on", str(note.message)) for note in told):
                        verdict.steps[step] = "noted"
                        continue
                    verdict.steps[step] = "wrong"
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    verdict.detail = f"{step}: {_line(error)} ({Path(where.filename).name}:{where.lineno})"
                if step == "load" and verdict.steps[step] != "pass":
                    return verdict
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return verdict


def _theirs(case: Case, place: Path, dtype: torch.dtype) -> Tensor:
    """Have peft make, stir and save the adapter; return the outputs it gives once reloaded."""
    config = peft.LoraConfig(**case.fields)
    base = _base(case, dtype)
    if case.prepare is not None:
        case.prepare(base, config)
    torch.manual_seed(2)
    model = peft.get_peft_model(base, config)
    stir(model)
    model.save_pretrained(str(place / "adapter"), safe_serialization=not case.pickled)
    trained = outputs(inner(model, case), case)
    again = outputs(inner(peft.PeftModel.from_pretrained(_base(case, dtype), str(place / "adapter")), case), case)
    if not torch.allclose(trained, again, rtol=1e-2, atol=1e-2 * _size(trained)):
        raise AssertionError(f"its outputs differ by {(trained - again).abs().max():.2g} once it has reloaded the file")
    if torch.equal(again, outputs(_base(case, dtype), case)):
        raise AssertionError("the adapter changes nothing")
    return again


def _loaded(base: PreTrainedModel, directory: Path) -> Any:
    return type(base).from_pretrained(directory, dtype=base.dtype).eval()


def _mergeable(case: Case, place: Path, dtype: torch.dtype) -> bool:
    """Whether peft itself merges the adapter."""
    theirs: Any = peft.PeftModel.from_pretrained(_base(case, dtype), str(place / "adapter"))
    try:
        theirs.merge_and_unload()
    except Exception:
        return False
    return True


def inner(model: Any, case: Case) -> Any:
    """Return what of peft's model is called: peft finds the tokens that switch an activated LoRA on in the outermost."""
    return model if case.fields.get("alora_invocation_tokens") else model.base_model


def _base(case: Case, dtype: torch.dtype) -> Any:
    """Return the base model, in ``dtype`` unless it is in half precision."""
    model = case.build()
    halves = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    return model if halves else model.to(dtype)


def _steps(case: Case, place: Path, dtype: torch.dtype, expected: Tensor) -> Iterator[tuple[str, Any]]:
    adapter = place / "adapter"
    held: dict[str, Any] = {}

    def load() -> None:
        held["model"] = peftlab.load_adapter(_base(case, dtype), adapter)
        same(outputs(held["model"], case), expected)

    def train() -> None:
        ours = peftlab.load_adapter(_base(case, dtype), adapter)
        theirs = peft.PeftModel.from_pretrained(_base(case, dtype), str(adapter), is_trainable=True)
        try:
            rate = _step(inner(theirs, case), [p for p in theirs.parameters() if p.requires_grad], case, None)
        except RuntimeError:  # a model that cannot be trained
            return
        _step(ours, list(trainable_parameters(ours).values()), case, rate)
        after = outputs(inner(theirs, case), case)
        assert not torch.equal(after, expected), "a step of training changes nothing"
        same(outputs(ours, case), after)

    def save() -> None:
        peftlab.save_adapter(held["model"], place / "ours")
        theirs = peft.PeftModel.from_pretrained(_base(case, dtype), str(place / "ours"))
        same(outputs(inner(theirs, case), case), expected)
        same(outputs(peftlab.load_adapter(_base(case, dtype), place / "ours"), case), expected)

    def merge() -> None:
        same(outputs(peftlab.merge(held["model"]), case), expected)

    def merge_on_disk() -> None:
        base = _base(case, dtype)
        base.save_pretrained(place / "base")
        if not torch.allclose(outputs(_loaded(base, place / "base"), case), outputs(base, case), atol=1e-3):
            return  # a class that loads another model than it saves
        merge_checkpoint(adapter, place / "base", place / "merged")
        same(outputs(_loaded(base, place / "merged"), case), expected)
        stored = Path(base.config._name_or_path)  # of which the base is not a copy, as its vocabulary was resized
        if base.config._name_or_path and (stored / "config.json").is_file():
            merge_checkpoint(place / "ours", stored, place / "merged-stored")
            same(outputs(_loaded(base, place / "merged-stored"), case), expected)

    yield from zip(STEPS[:4], (load, train, save, merge), strict=True)
    if isinstance(held["model"], PreTrainedModel):
        yield STEPS[4], merge_on_disk


def stir(model: nn.Module, std: float = 0.1) -> None:
    """Move all parameters that train, as training would."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += (torch.randn(parameter.shape, generator=generator) * std).to(parameter.dtype)


def outputs(model: Any, case: Case) -> Tensor:
    """Return all floating-point tensors that the model's forward returns, in one row."""
    torch.manual_seed(4)
    with torch.no_grad():
        return _row(model.eval()(**_cast(case.inputs(), model)))


def _step(model: Any, parameters: list[nn.Parameter], case: Case, rate: float | None) -> float:
    """Take one step of gradient descent; its rate, unless given, moves the parameters by 0.1 in all; return it."""
    torch.manual_seed(4)
    with torch.enable_grad():
        _row(model.eval()(**_cast(case.inputs(), model))).square().mean().backward()
    with torch.no_grad():
        grads = [(p, p.grad) for p in parameters if p.grad is not None]
        rate = rate or float(0.1 / sum(g.square().sum() for _, g in grads).sqrt().clamp_min(1e-12))
        for parameter, grad in grads:
            parameter -= rate * grad
    return rate


def _cast(inputs: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if hasattr(model, "dtype") and dtype == torch.float64 and not isinstance(model, PreTrainedModel):
        model.dtype = dtype  # peft's custom models convert their input to it
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def _row(result: Any) -> Tensor:
    values = result if isinstance(result, (tuple, list)) else [result]
    values = result.values() if hasattr(result, "values") and not isinstance(result, Tensor) else values
    flat = [v for v in itertools.chain(values) if isinstance(v, Tensor) and v.is_floating_point()]
    return torch.cat([v.flatten() for v in flat])


def same(ours: Tensor, theirs: Tensor) -> None:
    """Assert that two rows of outputs are equal but for rounding; in bf16, where single ones stray, by their norm."""
    if theirs.dtype == torch.bfloat16:
        apart = float((ours - theirs).float().norm() / theirs.float().norm())
        assert apart < 0.05, f"the outputs are {apart:.2g} of their norm apart"
        return
    tight = 1e-9 if theirs.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(ours, theirs, rtol=tight, atol=tight * 0.5 * _size(theirs))


def _size(row: Tensor) -> float:
    return max(1.0, float(row.abs().max())) if row.numel() else 1.0


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out warnings and transformers' messages and bars within the block."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.enable_progress_bar()
        logging.set_verbosity(level)
