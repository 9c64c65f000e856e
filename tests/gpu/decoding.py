"""Greedy decoding of one prompt: plain beside ``transformers.generate``, with drafts that need no training, and steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from peftlab.decoding.decode import Drafter, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import step_seconds
from peftlab.decoding.model_free import PromptLookup, TokenRecycling
from peftlab.models.load import load_base
from tests.gpu.shapes import Work
from tests.gpu.timing import taken

DRAFTERS: dict[str, Callable[[], Drafter] | None] = {"plain": None, "lookup": PromptLookup, "recycling": TokenRecycling}


def measure(model: Any, device: torch.device, *, new: int, repeats: int) -> dict[str, Any]:
    """Return tokens per second of each way to decode ``new`` tokens, and the seconds of a step over 1 to 8 tokens."""
    size, stopping = model.config.vocab_size, StoppingCriteria(new)
    prompt = torch.randint(5, size, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = torch.tensor([prompt], device=device)
    target = build_engine(model)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def generate() -> list[int]:
        return model.generate(ids, max_new_tokens=new, **options)[0, len(prompt) :].tolist()

    def ours(make: Callable[[], Drafter] | None) -> list[int]:
        return decode(target, [prompt], stopping, make and make())[0].tokens

    ways: dict[str, Callable[[], list[int]]] = {"transformers.generate": generate}
    ways |= {name: (lambda make=make: ours(make)) for name, make in DRAFTERS.items()}
    timed = {name: taken(way, device, warm=1, repeats=repeats) for name, way in ways.items()}
    outputs = {name: way() for name, way in ways.items()}
    rates = {name: len(outputs[name]) / one.seconds for name, one in timed.items()}
    steps = step_seconds({"flat": (target, 8), "transformers": (build_engine(model, flat=False), 8)})
    return {
        "new_tokens": new,
        "ways": {
            name: {**asdict(one), "tokens_per_second": rates[name],
                   "of_generate": rates[name] / rates["transformers.generate"],
                   "same_output": outputs[name] == outputs["plain"]}
            for name, one in timed.items()
        },
        "step_seconds": {f"{name}, {k} tokens": statistics.median(each) for (name, k), each in steps.items()},
    }  # fmt: skip


def model_of(place: str | Work, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a model, from a checkpoint or of a shape with random weights, in eval mode."""
    if isinstance(place, Work):
        return place.model(device).to(dtype).eval()
    return load_base(place, "AutoModelForCausalLM", dtype=dtype)[0].to(device).eval()
