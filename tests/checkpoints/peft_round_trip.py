"""One adapter through peft and peftlab, there and back, with equal logits at every step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from models import load, stir
from safetensors.torch import load_file
from torch import Tensor, nn

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.methods.inject import trainable_parameters

Logits = Callable[[nn.Module], Tensor]


def randomised(model: Any) -> Any:
    """Give a model values under which a mistake shows, biases included."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model.eval()


def of(inputs: dict[str, Tensor]) -> Logits:
    """Return a function from a model to its first output for ``inputs``, in eval mode and without a gradient."""

    def compute(model: nn.Module) -> Tensor:
        with torch.no_grad():
            out = model.eval()(**inputs)
        return out if isinstance(out, Tensor) else out.logits if "logits" in out else out[0]

    return compute


def saved_by_peft(model: Any, directory: Path, logits: Logits, std: float = 0.1, **fields: Any) -> Tensor:
    """Train nothing, move everything, save with peft, and return the logits of the model that peft saved."""
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(model, peft.LoraConfig(**fields))
        stir(theirs, std)
        for name, buffer in theirs.named_buffers():
            if ".modules_to_save." in name:  # running statistics, which change with what trains whole
                buffer.add_(2)
        theirs.save_pretrained(directory)
    return logits(theirs)


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def round_trip(make: Callable[[], Any], logits: Logits, directory: Path, *, folds: bool = True, **fields: Any) -> Any:
    """Check that peft's adapter loads, trains, is disabled, saved, read by peft, merged and removed; return the model.

    Args:
        make: makes the base model, with equal values each time. folds: whether it can be merged.
        fields: of ``peft.LoraConfig``.
    """
    plain = logits(make())
    expected = saved_by_peft(make(), directory / "adapter", logits, **fields)
    assert (expected - plain).abs().max() > 1e-3
    model = peftlab.load_adapter(make(), directory / "adapter")
    equal(logits(model), expected)
    with peftlab.disabled(model):
        equal(logits(model), plain)
    peftlab.save_adapter(model, directory / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        equal(logits(peft.PeftModel.from_pretrained(make(), str(directory / "ours"))), expected)
    equal(logits(peftlab.load_adapter(make(), directory / "ours")), expected)
    if folds:
        _merges(model, make, logits, directory, expected)
    here, there = peftlab.remove(model).state_dict(), make().state_dict()
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    return peftlab.load_adapter(make(), directory / "adapter")


def _merges(model: Any, make: Callable[[], Any], logits: Logits, directory: Path, expected: Tensor) -> None:
    """Check the merge of both files on disk, and in memory with the same bytes."""
    kind = type(make())
    make().save_pretrained(directory / "base")
    for adapter in ("adapter", "ours"):
        merge_checkpoint(directory / adapter, directory / "base", directory / f"merged-{adapter}")
        equal(logits(load(kind, directory / f"merged-{adapter}")), expected)
    peftlab.merge(model, keep=True)
    equal(logits(model), expected)
    model.save_pretrained(directory / "in-memory")
    here, there = (load_file(directory / name / "model.safetensors") for name in ("in-memory", "merged-ours"))
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)
    peftlab.unmerge(model)
    equal(logits(model), expected)


def trains_as_in_peft(make: Callable[[], Any], inputs: dict[str, Tensor], directory: Path, loss: Logits) -> None:
    """Check three steps of AdamW on the adapter in ``directory``, beside peft's model."""
    losses: list[list[float]] = []
    for model in (
        peftlab.load_adapter(make(), directory),
        peft.PeftModel.from_pretrained(make(), str(directory), is_trainable=True),
    ):
        optimizer = torch.optim.AdamW(trainable_parameters(model).values(), lr=1e-2, weight_decay=0.0)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            value = loss(model.eval()(**inputs))
            value.backward()
            assert all(p.grad is not None for p in trainable_parameters(model).values())
            optimizer.step()
            losses[-1].append(float(value.detach()))
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-5)
    assert losses[0][-1] < losses[0][0]
