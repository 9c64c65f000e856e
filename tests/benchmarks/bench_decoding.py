"""Decoding SmolLM2-135M: one step, plain and speculative decoding, beside ``transformers``, in fp32 and in bf16.

Run alone on the machine: ``python -m tests.benchmarks decoding``. With ``PEFTLAB_DRAFT=DIRECTORY`` a trained draft
of any kind joins in, and, if it is a model, ``transformers``' assisted generation with the very same draft;
``PEFTLAB_TARGET`` names the model that it was trained for, and ``PEFTLAB_PROMPTS=FILE`` prompts of its domain instead
of the Spec-Bench questions; ``PEFTLAB_COUNT`` (5 prompts), ``PEFTLAB_GAMMA`` and ``PEFTLAB_DTYPES`` ("float32
bfloat16") are taken, too. With ``PEFTLAB_TOP_P=P`` all sample at temperature 0.8, cut to top-p.

``python -m tests.benchmarks decoding --engines`` has llama.cpp and vLLM for CPUs in the same turns, over weights in 16,
8 and 4 bits (or ``--engines=bf16,q8_0``), with as many threads; ``PEFTLAB_ENGINES`` is the interpreter of an
environment that has them, and with ``PEFTLAB_CONFIDENCE=P`` a draft ends after a token that it gave less. A prompt's
time is that of one new token, that of a generated token what ``NEW`` take beyond the first.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peftlab.checkpoints.gguf import write_model
from peftlab.decoding.benchmark import PLAIN, Comparison, Decode, Question, Settings, compare
from peftlab.decoding.cache import Engine
from peftlab.decoding.decode import Drafter, Fixed, Generation, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import Timings, rate_intervals, step_seconds
from peftlab.decoding.model_free import PromptLookup, TokenRecycling
from peftlab.decoding.policies import Confidence
from peftlab.decoding.sampled_trees import rsd_c
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.base import SUFFIX_AND_DRAFT, load_pair, make_drafter
from peftlab.drafting.target import eos_ids
from peftlab.models.load import load_base, load_tokenizer
from peftlab.pipelines.benchmark import attach_stopwatches
from peftlab.pipelines.served import LlamaServer, VllmServer, llama_command, started, vllm_command
from peftlab.reporting.drafts import finite
from peftlab.tasks.prompts import encode, read_prompts, spread
from tests.benchmarks.figures import Figure
from tests.packages import SMOLLM2

NEW, REPEATS, LONGEST = 64, 3, 300
PROMPTS = int(os.environ.get("PEFTLAB_COUNT", "5"))
GAMMA, WIDTH = int(os.environ.get("PEFTLAB_GAMMA", "4")), 3
CONFIDENCE = float(os.environ.get("PEFTLAB_CONFIDENCE", "0"))
TOP_P = float(os.environ.get("PEFTLAB_TOP_P", "0"))
SAMPLING = Sampling(0.8, top_p=TOP_P) if TOP_P else Sampling()
GENERATE = "transformers.generate"
TITLE = "Decoding"
CONDITIONS = (
    f"Greedy, {NEW} new tokens, medians of three passes over the questions in turn; target, draft, questions, γ and dtype are "
    "the command's (SmolLM2-135M and Spec-Bench where it names none; [Findings](findings.md#an-eagle-3-layer-over-weights-in-16-bits) has the "
    "commands that made `runs/target` and `runs/eagle3`; `python -m tests.benchmarks.measure_systems --only DFlash` makes "
    "`runs/systems/dflash` and its `questions.jsonl`). llama.cpp and vLLM are asked as servers; llama.cpp rounds activations to "
    "8 bits where weights are codes, and to bf16 where weights are, as peftlab does in bf16, drafts included."
)
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


def library(model: Any, **options: Any) -> Decode:
    """Return ``transformers.generate`` as a way to decode."""
    chosen = {"do_sample": True, "temperature": 0.8, "top_p": TOP_P, "top_k": 0} if TOP_P else {"do_sample": False}

    def generate(batch: Sequence[Question]) -> list[Generation]:
        (question,) = batch
        ids = torch.tensor([question.ids])
        mask = torch.ones_like(ids)
        new = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **chosen, **options)
        return [Generation(new[0, len(question.ids) :].tolist())]

    return generate


def gate(model: Any, asked: list[Question], expected: list[Generation]) -> None:
    """Print in how many outputs plain and speculative decoding, packing off, equal ``transformers.generate``."""
    target: Engine = build_engine(model, pack=False)
    stopping = StoppingCriteria(NEW, eos_ids(model))
    for name, make in {"plain": None, "lookup": PromptLookup, "recycling": TokenRecycling}.items():
        outputs = [decode(target, [q.ids], stopping, make and make())[0].tokens for q in asked]
        same = sum(one == other.tokens for one, other in zip(outputs, expected, strict=True))
        print(f"{name}, packing off: {same} of {len(asked)} outputs equal those of transformers.generate")


def contest(target: str, dtype: torch.dtype) -> list[Figure]:
    """Print one precision's tables and return the ratios."""
    reference = os.environ.get("PEFTLAB_DRAFT")
    model, _ = load_base(target, "AutoModelForCausalLM", dtype=dtype)
    asked = questions(target)
    steps(model)
    pair = load_pair(target, reference, dtype=dtype, draft_dtype=dtype)
    print(f"\npeftlab's step: {pair.target.kind}")
    watches = attach_stopwatches(pair)
    drafters: dict[str, Callable[[], Drafter]] = {"lookup": PromptLookup, "recycling": TokenRecycling}
    lookup = partial(library, model, prompt_lookup_num_tokens=GAMMA)
    others = {GENERATE: partial(library, model), "transformers, prompt lookup": lookup}
    if reference is not None:
        width, grow = (WIDTH, None) if pair.draft is None else (None, rsd_c(WIDTH))
        for name in ("draft", SUFFIX_AND_DRAFT):
            drafters[f"{name}, chain"] = partial(make_drafter, name, pair, 1)
            drafters[f"{name}, tree of {WIDTH} choices"] = partial(make_drafter, name, pair, width, grow)
    if pair.draft is not None:
        small, _ = load_base(str(reference), "AutoModelForCausalLM", dtype=dtype)
        others["transformers, assisted by the draft"] = partial(library, model, assistant_model=small)
    settings = Settings(NEW, eos_ids(model), partial(Fixed, GAMMA), sampling=SAMPLING, repeats=REPEATS)
    run = compare(watches[0], drafters, asked, settings, models=watches, others=others)
    within = sum(watch.seconds for watch in watches)
    show(run, drafters, f"{dtype}, {len(asked)} prompts, {NEW} new tokens, gamma {GAMMA}")
    if dtype == torch.float32 and SAMPLING.greedy:
        gate(model, asked, run.records[GENERATE].outputs)
    everything = sum(sum(map(sum, run.records[name].seconds)) for name in (PLAIN, *drafters))
    print(f"time outside the models: {100 * (1 - within / everything):.1f} %\n", flush=True)
    results = {name: run.result(name) for name in drafters}
    best = max(results, key=lambda name: results[name].speedup)
    theirs = run.timed(GENERATE).rate()
    interval = results[best].speedup_interval
    return [
        Figure("plain decoding", GENERATE, run.timed(PLAIN).rate() / theirs),
        Figure(f"decoding by {best}", "our plain decoding", results[best].speedup, interval=interval),
    ]


def show(run: Comparison, drafters: Iterable[str], title: str) -> None:
    """Print tokens per second of everything, and what each drafter's steps gave."""
    theirs = run.timed(GENERATE).rate()
    print(f"\n| {title} | tokens/s | of generate | against our plain decoding |\n| --- | --- | --- | --- |")
    for name in run.records:
        rate = run.timed(name).rate()
        print(f"| {name} | {rate:.1f} | {rate / theirs:.2f} | {run.result(name).verdict if name != PLAIN else ''} |")
    print()
    for name in drafters:
        found = run.result(name)
        facts = found.statistics
        print(
            f"{name}: tau {finite(facts.tau)}, acceptance {finite(facts.acceptance)}; "
            f"{len(found.divergences)} outputs differ from plain decoding's"
        )


Complete = Callable[[Question, int], tuple[list[int], float]]
"""Returns the greedy output of a question with so many new tokens, and the seconds that it took."""
Way = tuple[Callable[[], AbstractContextManager[None]], Complete]
"""A context in which an engine runs, and how it decodes: out of its turn a server is paused."""
IN_BF16 = "peftlab, inputs in bf16"
DRAFTED = {f"peftlab, {name}": f"decoding by {name}" for name in ("draft", SUFFIX_AND_DRAFT)}
OURS = {"peftlab": "plain decoding", IN_BF16: "plain decoding in bf16", **DRAFTED}
"""peftlab's own ways, and what the page of figures, which has the best of the drafted ones, calls them."""


def ways(stack: ExitStack, target: str, place: Path, storage: str) -> dict[str, Way]:
    """Return what decodes with weights in a type of GGUF: peftlab, llama.cpp, and in 16 bits vLLM and transformers.

    Args:
        stack: what ends the servers. target: reference. place: directory for files. storage: ``bf16``, ``q8_0``, ...
    """
    load_base(target, "AutoModelForCausalLM", dtype=torch.bfloat16)[0].save_pretrained(place / "target")
    load_tokenizer(target).save_pretrained(place / "target")
    model, _ = load_base(str(place / "target"), "AutoModelForCausalLM", dtype=torch.bfloat16)  # with plain linear maps
    file = place / f"{storage}.gguf"
    write_model(model, place / "target", file, storage)
    length = LONGEST + NEW + 1
    llama = LlamaServer(*stack.enter_context(started(llama_command(file, length, {}), place / "llama.log")))
    found: dict[str, Way] = {"llama.cpp": (llama.turn, partial(served, llama))}
    if storage == "bf16":
        command = vllm_command(str(place / "target"), "bf16", length)
        vllm = VllmServer(*stack.enter_context(started(command, place / "vllm.log")))
        found["vLLM"] = (vllm.turn, partial(served, vllm))
        found[GENERATE] = (nullcontext, timed(partial(generated, model)))
    pair = load_pair(str(file))
    print(f"{storage}: peftlab's step: {pair.target.kind}")
    found["peftlab"] = (nullcontext, timed(partial(decoded, pair.target, None)))
    if storage == "bf16":
        reference = os.environ.get("PEFTLAB_DRAFT")
        pair = load_pair(str(file), reference, dtype=torch.bfloat16)
        found[IN_BF16] = (nullcontext, timed(partial(decoded, pair.target, None)))
        for name in ("draft", SUFFIX_AND_DRAFT) if reference is not None else ():
            drafted = partial(decoded, pair.target, partial(make_drafter, name, pair))
            found[f"peftlab, {name}"] = (nullcontext, timed(drafted))
    return found


def served(server: LlamaServer | VllmServer, question: Question, new: int) -> tuple[list[int], float]:
    """Return an engine's output, and the seconds of the request."""
    done = server.complete(question.ids, new, ignore_eos=True)
    return done.tokens, done.seconds


def timed(complete: Callable[[Question, int], list[int]]) -> Complete:
    """Return what decodes in this process, with its seconds."""

    def run(question: Question, new: int) -> tuple[list[int], float]:
        began = time.perf_counter()
        return complete(question, new), time.perf_counter() - began

    return run


def generated(model: Any, question: Question, new: int) -> list[int]:
    """Return the output of ``transformers.generate``."""
    ids = torch.tensor([question.ids])
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(question.ids) :].tolist()


def decoded(target: Engine, drafter: Callable[[], Drafter] | None, question: Question, new: int) -> list[int]:
    """Return peftlab's output."""
    stopping = StoppingCriteria(new)
    made = None if drafter is None else drafter()
    policy = partial(Confidence, GAMMA, CONFIDENCE) if CONFIDENCE else partial(Fixed, GAMMA)
    return decode(target, [question.ids], stopping, made, policy=policy)[0].tokens


STORAGES = ("bf16", "q8_0", "q4_1")


def beside_engines(target: str, storages: Sequence[str]) -> list[Figure]:
    """Print a table for each type of weights and return the ratios of generated tokens per second."""
    figures, asked = [], questions(target)
    for storage in storages:
        with ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peftlab-engines-")))
            found = ways(stack, target, place, storage)
            prompts, rest = ({name: [[] for _ in asked] for name in found} for _ in range(2))
            outputs: dict[str, list[list[int]]] = {name: [[] for _ in asked] for name in found}
            for repeat in range(REPEATS + 1):
                for i, question in enumerate(asked):
                    for name in [*found][:: 1 if (i + repeat) % 2 else -1]:
                        turn, complete = found[name]
                        with turn():
                            _, first = complete(question, 1)
                            outputs[name][i], whole = complete(question, NEW)
                        if repeat:  # the first pass warms up
                            prompts[name][i].append(first)
                            rest[name][i].append(whole - first)
        tokens = [len(q.ids) for q in asked]
        rates = {name: Timings([NEW - 1] * len(asked), rest[name]) for name in found}
        theirs = rates["llama.cpp"]
        title = f"{storage}, {len(asked)} prompts, {NEW} new tokens"
        print(f"\n| {title} | prompt, tokens/s | generated, tokens/s | of llama.cpp's | outputs like llama.cpp's |")
        print("| --- | --- | --- | --- | --- |")
        for name, rate in rates.items():
            low, high = rate_intervals(rate, theirs).speedup or (0.0, 0.0)
            same = sum(mine == other for mine, other in zip(outputs[name], outputs["llama.cpp"], strict=True))
            read, times = Timings(tokens, prompts[name]).rate(), rate.rate() / theirs.rate()
            print(f"| {name} | {read:.0f} | {rate.rate():.1f} | {times:.2f} ({low:.2f} to {high:.2f}) | {same} |")
        print(flush=True)
        pairs = [("peftlab", peer) for peer in rates if peer not in OURS]
        if drafted := [name for name in rates if name in DRAFTED]:
            pairs.append((max(drafted, key=lambda name: rates[name].rate()), "llama.cpp"))
        if IN_BF16 in rates:
            pairs.append((IN_BF16, "llama.cpp"))
        for name, peer in pairs:
            ratio, between = rates[name].rate() / rates[peer].rate(), rate_intervals(rates[name], rates[peer])
            figures.append(Figure(f"{OURS[name]}, {storage} weights", peer, ratio, interval=between.speedup))
    return figures


def main() -> list[Figure]:
    """Print the tables and return the ratios; of two precisions each row says which."""
    target, names = (
        os.environ.get("PEFTLAB_TARGET", SMOLLM2),
        os.environ.get("PEFTLAB_DTYPES", "float32 bfloat16").split(),
    )
    if asked := next((word for word in sys.argv if word.partition("=")[0] == "--engines"), None):
        return beside_engines(target, asked.partition("=")[2].split(",") if "=" in asked else STORAGES)
    found = {name: contest(target, getattr(torch, name)) for name in names}
    if SAMPLING.greedy is False:
        return []
    return [replace(f, work=f"{f.work}, {name}" if len(names) > 1 else f.work) for name in names for f in found[name]]


if __name__ == "__main__":
    main()
