"""Decoding SmolLM2-135M: one step, plain and speculative decoding, beside ``transformers``, in fp32 and in bf16.

Run alone on the machine: ``python -m tests.benchmarks decoding``. With ``PEFTLAB_DRAFT=DIRECTORY`` a trained draft
(in bf16) or a directory of Medusa heads joins in, and ``transformers``' assisted generation with the very same draft;
``PEFTLAB_TARGET`` names the model that it was trained for, and ``PEFTLAB_PROMPTS=FILE`` prompts of its domain instead
of the Spec-Bench questions; ``PEFTLAB_GAMMA`` and ``PEFTLAB_DTYPES`` ("float32 bfloat16") are taken, too.
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
from peftlab.decoding.drafters import Drafter
from peftlab.decoding.engine import Engine, build_engine
from peftlab.decoding.free import PromptLookup, Recycling
from peftlab.decoding.lengths import Fixed
from peftlab.decoding.pairs import eos_ids, load_pair, make_drafter
from peftlab.decoding.plan import step_seconds
from peftlab.decoding.prompts import encode, read_prompts, spread
from tests.packages import SMOLLM2

NEW, PROMPTS, REPEATS, LONGEST = 64, 5, 2, 300
GAMMA = int(os.environ.get("PEFTLAB_GAMMA", "4"))
SPEC_BENCH = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "lm" / "spec_bench_question.jsonl"


def questions(target: str) -> list[Question]:
    """Return prompts of at most ``LONGEST`` tokens, taken evenly from the categories."""
    tokenizer = load_tokenizer(target)
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


def contest(target: str, dtype: torch.dtype) -> None:
    """Print one precision's tables."""
    reference = os.environ.get("PEFTLAB_DRAFT")
    model, _ = load_base(target, "AutoModelForCausalLM", dtype=dtype)
    asked = questions(target)
    steps(model)
    rate, expected = library(model, asked)
    if dtype == torch.float32:
        gate(model, asked, expected)
    pair = load_pair(target, reference, dtype=dtype, draft_dtype=torch.bfloat16)
    watches = [Stopwatch(pair.target)]
    pair.target = watches[0]
    drafters: dict[str, Callable[[], Drafter]] = {}
    rows = {"transformers.generate": rate}
    if pair.draft is not None:
        small, _ = load_base(str(reference), "AutoModelForCausalLM", dtype=dtype)
        watches.append(Stopwatch(pair.draft))
        pair.draft = watches[1]
        drafters["draft"] = partial(make_drafter, "draft", pair)
        rows["transformers, assisted by the draft"] = library(model, asked, assistant_model=small)[0]
    if pair.heads is not None:
        pair.heads = watches[0].including(pair.heads)
        drafters["heads"] = partial(make_drafter, "draft", pair)
        for width in (3, 5):
            drafters[f"heads, tree of {width} choices"] = partial(make_drafter, "draft", pair, width)
    rows["transformers, prompt lookup"] = library(model, asked, prompt_lookup_num_tokens=GAMMA)[0]
    drafters |= {"lookup": PromptLookup, "recycling": Recycling}
    settings = Settings(NEW, eos_ids(model), partial(Fixed, GAMMA), repeats=REPEATS)
    result = bench(watches[0], drafters, asked, settings, models=watches)
    plain = result["baseline_tokens_per_second"]
    rows["peftlab, plain"] = plain
    rows |= {f"peftlab, {name}": of["tokens_per_second"] for name, of in result["drafters"].items()}
    print(
        f"\n| {dtype}, {len(asked)} prompts, {NEW} new tokens, gamma {GAMMA} | tokens/s | of generate | of our plain |"
    )
    print("| --- | --- | --- | --- |")
    for name, value in rows.items():
        print(f"| {name} | {value:.1f} | {value / rate:.2f} | {value / plain:.2f} |")
    print()
    for name, of in result["drafters"].items():
        print(
            f"{name}: tau {of['tau']:.2f}, acceptance {of['acceptance']:.2f}, lossless {of['lossless']}; {of['verdict']}"
        )
    print(f"time outside the models: {100 * result['overhead']:.1f} %\n", flush=True)


def main() -> None:
    """Print the tables."""
    for name in os.environ.get("PEFTLAB_DTYPES", "float32 bfloat16").split():
        contest(os.environ.get("PEFTLAB_TARGET", SMOLLM2), getattr(torch, name))


if __name__ == "__main__":
    main()
