"""One batch whose rows use four adapters, beside a loop over the adapters, and peft's both. SmolLM2-135M, 8 rows.

Run alone on the machine: ``python -m tests.benchmarks mixed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import Tensor

import peftlab
from peftlab.models.load import load_base
from tests.benchmarks.bench_lora import interleaved
from tests.benchmarks.figures import Figure, ranged
from tests.packages import SMOLLM2

NAMES, ROWS, REPEATS = "abcd", 2, 3  # rows per adapter
TOKENS = (1, 8, 32)
NEW_TOKENS, PROMPT = 16, 16
TITLE = "A batch for several adapters"
CONDITIONS = f"SmolLM2-135M in fp32, four LoRAs r=8, {ROWS * len(NAMES)} rows, two of each adapter; one thread."
TARGETS: dict[str, list[str] | str] = {"q and v": ["q_proj", "v_proj"], "all-linear": "all-linear"}


def ours(targets: list[str] | str) -> Any:
    """Return SmolLM2 with four LoRAs of ours that differ."""
    model, _ = load_base(SMOLLM2, "AutoModelForCausalLM")
    torch.manual_seed(0)
    for name in NAMES:
        peftlab.inject(model, peftlab.LoraConfig(r=8, target_modules=targets), name=name)
        with torch.no_grad():
            for key, parameter in peftlab.trainable_parameters(model).items():
                if key.endswith("lora_B"):
                    parameter.normal_(std=0.01)
    return model


def theirs(model: Any, targets: list[str] | str) -> Any:
    """Return SmolLM2 with the same four LoRAs in peft."""
    plain, _ = load_base(SMOLLM2, "AutoModelForCausalLM")
    wrapped: Any = None
    for name in NAMES:
        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets)
        if wrapped is None:
            wrapped = peft.get_peft_model(plain, config, adapter_name=name)
        else:
            wrapped.add_adapter(name, config)
        peftlab.set_adapter(model, name)
        with torch.no_grad():
            for key, parameter in peftlab.trainable_parameters(model).items():
                module, _, factor = key.rpartition(".")
                wrapped.get_parameter(f"base_model.model.{module}.{factor}.{name}.weight").copy_(parameter)
    return wrapped.eval()


def each(model: Any, run: Callable[[Tensor], Tensor], ids: Tensor, switch: Callable[[Any, str], None]) -> Tensor:
    """Return what ``run`` gives, adapter by adapter."""
    parts = []
    for name, rows in zip(NAMES, ids.split(ROWS), strict=True):
        switch(model, name)
        parts.append(run(rows))
    return torch.cat(parts)


def contestants(model: Any, peer: Any, ids: Tensor, *, generate: bool) -> dict[str, Callable[[], Tensor]]:
    """Return the four ways to compute the batch, by name."""
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}

    def run(one: Any, rows: Tensor, **more: Any) -> Tensor:
        if generate:
            return one.generate(input_ids=rows, attention_mask=torch.ones_like(rows), **options, **more)
        return one(input_ids=rows, logits_to_keep=1, **more).logits

    names = [name for name in NAMES for _ in range(ROWS)]

    def mixed() -> Tensor:
        with peftlab.adapter_names(model, names):
            return run(model, ids)

    return {
        "peftlab, mixed batch": mixed,
        "peftlab, loop": lambda: each(model, lambda rows: run(model, rows), ids, peftlab.set_adapter),
        "peft, mixed batch": lambda: run(peer, ids, adapter_names=names),
        "peft, loop": lambda: each(peer, lambda rows: run(peer, rows), ids, lambda one, name: one.set_adapter(name)),
    }


def main() -> list[Figure]:
    """Print milliseconds, how many times faster than our loop, the greatest difference from it; return the ratios."""
    figures = []
    threads = torch.get_num_threads()
    print(f"SmolLM2-135M in fp32, LoRA r=8, {ROWS * len(NAMES)} rows over {len(NAMES)} adapters, {threads} threads\n")
    print("| LoRA on | what | | ms | faster than the loop | greatest difference of the logits |")
    print("| --- | --- | --- | --- | --- | --- |")
    for label, targets in TARGETS.items():
        model = ours(targets)
        peer = theirs(model, targets)
        passes = []
        works = [(f"forward, {length} tokens a row", length, False) for length in TOKENS]
        for what, length, generate in [*works, (f"{NEW_TOKENS} new tokens after {PROMPT}", PROMPT, True)]:
            ids = torch.randint(
                100, 40000, (ROWS * len(NAMES), length), generator=torch.Generator().manual_seed(length)
            )
            with torch.no_grad():
                ways = contestants(model, peer, ids, generate=generate)
                results = {name: way() for name, way in ways.items()}
                seconds = interleaved(ways, REPEATS)
            expected = results["peftlab, loop"]
            for name, result in results.items():
                if generate:
                    difference = "same tokens" if torch.equal(result, expected) else "other tokens"
                else:
                    difference = f"{(result - expected).abs().max():.1e} of {expected.abs().max():.0f}"
                faster = seconds["peftlab, loop"] / seconds[name]
                print(
                    f"| {label} | {what} | {name} | {1e3 * seconds[name]:.0f} | {faster:.2f} | {difference} |",
                    flush=True,
                )
            beside = seconds["peft, mixed batch"] / seconds["peftlab, mixed batch"]
            if generate:
                looped, work = (
                    seconds["peftlab, loop"] / seconds["peftlab, mixed batch"],
                    f"`generate`, LoRA on {label}",
                )
                figures += [
                    Figure(work, "a loop over the adapters", looped),
                    Figure(work, "peft's mixed batch", beside),
                ]
            else:
                passes.append(beside)
    work = f"passes of {', '.join(map(str, TOKENS[:-1]))} and {TOKENS[-1]} tokens a row, LoRA on {label}"
    return [*figures, ranged(work, "peft's mixed batch", passes)]


if __name__ == "__main__":
    main()
