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

from peftlab.decoding.analysis.benchmark import Question, Stopwatch
from peftlab.decoding.analysis.planning import step_seconds
from peftlab.decoding.analysis.statistics import acceptance_statistics
from peftlab.decoding.decode import Generation, StoppingCriteria, decode
from peftlab.decoding.draft_length import Fixed
from peftlab.decoding.drafters.base import Drafter
from peftlab.decoding.drafters.model_free import PromptLookup, Recycling
from peftlab.decoding.engines.build import Engine, build_engine
from peftlab.decoding.prompts import encode, read_prompts, spread
from peftlab.drafting.checks import eos_ids
from peftlab.drafting.load import BOTH, load_pair, make_drafter
from peftlab.models.pretrained import load_base, load_tokenizer
from tests.packages import SMOLLM2

NEW, PROMPTS, REPEATS, LONGEST = 64, 5, 3, 300
GAMMA = int(os.environ.get("PEFTLAB_GAMMA", "4"))
Contender = Callable[[], Callable[[Question], Generation]]
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
        medians = [1e3 * statistics.median(seconds[name, k]) for k in (1, 2, 4, 8)]
        print(f"| {name} | " + " | ".join(f"{median:.1f} ms" for median in medians) + " |")


def library(model: Any, **options: Any) -> Contender:
    """Return ``transformers.generate`` as a contender."""

    def generate(question: Question) -> Generation:
        ids = torch.tensor([question.ids])
        mask = torch.ones_like(ids)
        new = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)
        return Generation(new[0, len(question.ids) :].tolist())

    return lambda: generate


def ours(target: Engine, ending: StoppingCriteria, make: Callable[[], Drafter] | None = None) -> Contender:
    """Return a decoder as a contender; its drafter is made anew for every pass."""

    def contender() -> Callable[[Question], Generation]:
        drafter = make and make()
        return lambda q: decode(target, [q.ids], ending, drafter, policy=partial(Fixed, GAMMA))[0]

    return contender


def race(contenders: dict[str, Contender], asked: list[Question]) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """Return tokens a second, the median over ``REPEATS`` passes, and the outputs; all take turns at every prompt."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    outputs: dict[str, list[Generation]] = {}
    for repeat in range(REPEATS + 1):  # the first is the warm-up
        answer = {name: make() for name, make in contenders.items()}
        outputs, seconds = {name: [] for name in names}, dict.fromkeys(names, 0.0)
        for i, question in enumerate(asked):
            turn = (i + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                began = time.perf_counter()
                outputs[name].append(answer[name](question))
                seconds[name] += time.perf_counter() - began
        for name in names:
            rates[name].append(sum(len(one.tokens) for one in outputs[name]) / seconds[name])
    return {name: statistics.median(of[1:]) for name, of in rates.items()}, outputs


def gate(model: Any, asked: list[Question], expected: list[Generation]) -> None:
    """Print in how many outputs plain and speculative decoding, packing off, equal ``transformers.generate``."""
    target: Engine = build_engine(model, pack=False)
    ending = StoppingCriteria(NEW, eos_ids(model))
    for name, make in {"plain": None, "lookup": PromptLookup, "recycling": Recycling}.items():
        outputs = [decode(target, [q.ids], ending, make and make())[0].tokens for q in asked]
        same = sum(one == other.tokens for one, other in zip(outputs, expected, strict=True))
        print(f"{name}, packing off: {same} of {len(asked)} outputs equal those of transformers.generate")


def contest(target: str, dtype: torch.dtype) -> None:
    """Print one precision's tables."""
    reference = os.environ.get("PEFTLAB_DRAFT")
    model, _ = load_base(target, "AutoModelForCausalLM", dtype=dtype)
    asked = questions(target)
    steps(model)
    pair = load_pair(target, reference, dtype=dtype, draft_dtype=torch.bfloat16)
    print(f"\npeftlab's step: {pair.target.kind}")
    watches = [Stopwatch(pair.target)]
    drafters: dict[str, Callable[[], Drafter]] = {}
    contenders = {"transformers.generate": library(model)}
    if pair.draft is not None:
        small, _ = load_base(str(reference), "AutoModelForCausalLM", dtype=dtype)
        watches.append(Stopwatch(pair.draft))
        pair.draft = watches[1]
        drafters["draft"] = partial(make_drafter, "draft", pair)
        contenders["transformers, assisted by the draft"] = library(model, assistant_model=small)
    if pair.heads is not None:
        pair.heads = watches[0].including(pair.heads)
        drafters["heads"] = partial(make_drafter, "draft", pair)
        drafters["heads, tree of 3 choices"] = partial(make_drafter, "draft", pair, 3)
        drafters["lookup, else heads"] = partial(make_drafter, BOTH, pair)
        drafters["lookup, else tree of 3"] = partial(make_drafter, BOTH, pair, 3)
    contenders["transformers, prompt lookup"] = library(model, prompt_lookup_num_tokens=GAMMA)
    drafters |= {"lookup": PromptLookup, "recycling": Recycling}
    ending = StoppingCriteria(NEW, eos_ids(model))
    contenders["peftlab, plain"] = ours(watches[0], ending)
    contenders |= {f"peftlab, {name}": ours(watches[0], ending, make) for name, make in drafters.items()}
    rates, outputs = race(contenders, asked)
    plain, theirs = rates["peftlab, plain"], rates["transformers.generate"]
    print(
        f"\n| {dtype}, {len(asked)} prompts, {NEW} new tokens, gamma {GAMMA} | tokens/s | of generate | of our plain |"
    )
    print("| --- | --- | --- | --- |")
    for name, rate in rates.items():
        print(f"| {name} | {rate:.1f} | {rate / theirs:.2f} | {rate / plain:.2f} |")
    print()
    for name in drafters:
        mine = outputs[f"peftlab, {name}"]
        facts = acceptance_statistics(mine)
        same = sum(one.tokens == other.tokens for one, other in zip(mine, outputs["peftlab, plain"], strict=True))
        print(
            f"{name}: tau {facts['tau']:.2f}, acceptance {facts['acceptance']:.2f}; "
            f"{same} of {len(asked)} outputs equal plain decoding's"
        )
    if dtype == torch.float32:
        gate(model, asked, outputs["transformers.generate"])
    print(f"time outside the models: {100 * overhead(watches, asked, ending, drafters):.1f} %\n", flush=True)


def overhead(
    watches: list[Stopwatch],
    asked: list[Question],
    ending: StoppingCriteria,
    drafters: dict[str, Callable[[], Drafter]],
) -> float:
    """Return the share of the decoder's time that is not spent in its models, over all drafters and plain decoding."""
    for watch in watches:
        watch.seconds = 0.0
    began = time.perf_counter()
    for make in (None, *drafters.values()):
        answer = ours(watches[0], ending, make)()
        for question in asked:
            answer(question)
    return 1 - sum(watch.seconds for watch in watches) / (time.perf_counter() - began)


def main() -> None:
    """Print the tables."""
    for name in os.environ.get("PEFTLAB_DTYPES", "float32 bfloat16").split():
        contest(os.environ.get("PEFTLAB_TARGET", SMOLLM2), getattr(torch, name))


if __name__ == "__main__":
    main()
