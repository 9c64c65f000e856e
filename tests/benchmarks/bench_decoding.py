"""Decoding SmolLM2-135M in float32: one step, plain and speculative decoding, beside ``transformers``.

Run alone on the machine: ``python -m tests.benchmarks decoding``. With ``PEFTLAB_DRAFT=DIRECTORY`` a trained draft
joins in, and ``transformers``' assisted generation with the very same draft; ``PEFTLAB_PROMPTS=FILE`` replaces the
Spec-Bench questions by prompts of the domain that the draft was trained for.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peftlab.checkpoints.base import load_base, load_tokenizer
from peftlab.decoding.bench import Question, Settings, Stopwatch, bench
from peftlab.decoding.decoder import Ending, decode
from peftlab.decoding.drafters import Drafter, ModelDrafter
from peftlab.decoding.engine import Engine, build_engine
from peftlab.decoding.free import PromptLookup, Recycling
from peftlab.decoding.lengths import Fixed
from peftlab.decoding.pairs import eos_ids
from peftlab.decoding.plan import step_seconds
from peftlab.decoding.prompts import encode, read_prompts, spread
from tests.packages import SMOLLM2

NEW, GAMMA, PROMPTS, REPEATS, LONGEST = 64, 4, 13, 3, 300
SPEC_BENCH = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "lm" / "spec_bench_question.jsonl"


def questions() -> list[Question]:
    """Return prompts of at most ``LONGEST`` tokens, taken evenly from the categories."""
    tokenizer = load_tokenizer(SMOLLM2)
    prompts = read_prompts(os.environ.get("PEFTLAB_PROMPTS", SPEC_BENCH))
    encoded = {prompt.id: encode(tokenizer, prompt) for prompt in prompts}
    short = [prompt for prompt in prompts if len(encoded[prompt.id]) <= LONGEST]
    return [Question(p.id, p.category, encoded[p.id]) for p in spread(short, PROMPTS)]


def steps(model: Any) -> None:
    """Print the time of one forward pass over 1, 2, 4 and 8 tokens, by engine."""
    engines = {
        "transformers": build_engine(model, flat=False),
        "flat": build_engine(model, pack=False),
        "flat, packed": build_engine(model),
    }
    seconds = step_seconds({name: (engine, 8) for name, engine in engines.items()})
    print("| one step over | 1 | 2 | 4 | 8 tokens |\n| --- | --- | --- | --- | --- |")
    for name in engines:
        print(f"| {name} | " + " | ".join(f"{1e3 * seconds[name, k]:.1f} ms" for k in (1, 2, 4, 8)) + " |")


def library(model: Any, asked: list[Question], **options: Any) -> tuple[float, list[list[int]]]:
    """Return tokens a second of ``transformers.generate``, the median over repeats, and its outputs."""
    rates, outputs = [], []
    for _ in range(REPEATS + 1):
        outputs, began = [], time.perf_counter()
        for q in asked:
            ids = torch.tensor([q.ids])
            mask = torch.ones_like(ids)
            new = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)
            outputs.append(new[0, len(q.ids) :].tolist())
        rates.append(sum(map(len, outputs)) / (time.perf_counter() - began))
    return statistics.median(rates[1:]), outputs


def gate(model: Any, asked: list[Question], expected: list[list[int]]) -> None:
    """Print in how many outputs plain and speculative decoding, packing off, equal ``transformers.generate``."""
    target: Engine = build_engine(model, pack=False)
    ending = Ending(NEW, eos_ids(model))
    for name, make in {"plain": None, "lookup": PromptLookup, "recycling": Recycling}.items():
        outputs = [decode(target, [q.ids], ending, make and make())[0].tokens for q in asked]
        same = sum(one == other for one, other in zip(outputs, expected, strict=True))
        print(f"{name}: {same} of {len(asked)} outputs equal those of transformers.generate")


def main() -> None:
    """Print the tables."""
    model, _ = load_base(SMOLLM2, "AutoModelForCausalLM")
    asked = questions()
    steps(model)
    print()
    rate, expected = library(model, asked)
    gate(model, asked, expected)
    target = Stopwatch(build_engine(model))
    watches = [target]
    drafters: dict[str, Callable[[], Drafter]] = {}
    rows = {"transformers.generate": rate}
    if draft := os.environ.get("PEFTLAB_DRAFT"):
        small, _ = load_base(draft, "AutoModelForCausalLM")
        watches.append(Stopwatch(build_engine(small)))
        drafters["draft"] = partial(ModelDrafter, watches[1])
        rows["transformers, assisted by the draft"] = library(model, asked, assistant_model=small)[0]
    rows["transformers, prompt lookup"] = library(model, asked, prompt_lookup_num_tokens=GAMMA)[0]
    drafters |= {"lookup": PromptLookup, "recycling": Recycling}
    settings = Settings(NEW, eos_ids(model), partial(Fixed, GAMMA), repeats=REPEATS)
    result = bench(target, drafters, asked, settings, models=watches)
    rows["peftlab, plain"] = result["baseline_tokens_per_second"]
    rows |= {f"peftlab, {name}": of["tokens_per_second"] for name, of in result["drafters"].items()}
    plain = result["baseline_tokens_per_second"]
    print(f"\n| {len(asked)} prompts, {NEW} new tokens, gamma {GAMMA} | tokens/s | of generate | of our plain |")
    print("| --- | --- | --- | --- |")
    for name, value in rows.items():
        print(f"| {name} | {value:.1f} | {value / rate:.2f} | {value / plain:.2f} |")
    print()
    for name, of in result["drafters"].items():
        print(
            f"{name}: tau {of['tau']:.2f}, acceptance {of['acceptance']:.2f}, lossless {of['lossless']}; {of['verdict']}"
        )
    print(f"time outside the models: {100 * result['overhead']:.1f} %")


if __name__ == "__main__":
    main()
