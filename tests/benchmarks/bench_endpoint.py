"""Throughput of ``data.endpoint`` beside a bare client's at the same concurrency.

    python -m tests.benchmarks.bench_endpoint [--prompts N] [--concurrency N] [--rounds N]

The bare client is OpenAI's own, which reads the same prompts' answers and drops them. Both take turns, so that other
load on the machine meets both; the figure is the median of the rounds' ratios. Ours also tokenises the answers, checks
that they decode back, and writes them to the disk. One server computes nothing, so that the clients' own time counts
most; the other is `transformers serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from peftlab.drafting.config import DraftData
from peftlab.drafting.endpoint import ServedPrompt, Target, served_continuations
from peftlab.drafting.text import WritingSettings
from tests.benchmarks.bench_merge import ROOT
from tests.benchmarks.figures import Figure
from tests.text_server import put_into_cache, transformers_serve

STORIES = ROOT.parent / "shared" / "data" / "weights" / "stories260K-hf"
MODEL, TOKENS = "local/stories", 24
TITLE = "Text written by a server"
CONDITIONS = (
    "Answers per second of `data.endpoint`, which also tokenises, checks and stores, where OpenAI's client drops them; "
    f"96 prompts of {TOKENS} tokens, 8 at a time, medians of five rounds."
)
NAMES = ("Tom", "Lily", "Ben", "Anna", "Max", "Mia", "Sam", "Sue")
DELAYED = """
import time
from tests.text_server import completion, told_server

def answer(request, before):
    time.sleep(0.02)
    return completion(" there was a little girl named Lily. She loved to play with her toys. One day", None)

with told_server(answer) as (url, asked):
    print(url, flush=True)
    time.sleep(3600)
"""
DEEDS = ("found a red ball", "went to the park", "saw a big dog", "was very sad", "had a small cat", "liked to sing")


def texts(count: int) -> list[str]:
    """Return different prompts."""
    return [f"{'One day, ' * (i // 48)}{NAMES[i % 8]} {DEEDS[i // 8 % 6]}" for i in range(count)]


async def bare(url: str, prompts: Sequence[str], concurrency: int) -> None:
    """Ask for all continuations, so many at a time, and drop them."""
    todo = iter(prompts)
    async with AsyncOpenAI(base_url=url, api_key="none") as client:

        async def work() -> None:
            for prompt in todo:
                await client.completions.create(model=MODEL, prompt=prompt, max_tokens=TOKENS, temperature=0)

        await asyncio.gather(*(work() for _ in range(concurrency)))


def ours(url: str, target: Target, prompts: Sequence[str], concurrency: int, cache: Path) -> None:
    """Ask for them as a draft recipe does."""
    data = DraftData(prompts=list(prompts), endpoint=url, endpoint_model=MODEL, concurrency=concurrency)
    served = [ServedPrompt(target.tokenizer(text).input_ids, None) for text in prompts]
    with redirect_stdout(StringIO()):
        _, found = served_continuations(data, target, served, WritingSettings(TOKENS), cache)
    assert found.answers == len(prompts) and not found.dropped


@contextmanager
def delayed() -> Iterator[str]:
    """Yield the address of a server, a process of its own, that computes nothing and answers after 20 ms."""
    with subprocess.Popen([sys.executable, "-c", DELAYED], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.kill()


def compare(title: str, url: str, target: Target, args: argparse.Namespace, work: Path) -> Figure:
    """Print both rates of each round, and return the median of their ratios."""
    prompts, ratios = texts(args.prompts), []
    asyncio.run(bare(url, prompts[:2], 1))  # the server loads the model
    for turn in range(args.rounds):
        rates = {}
        for name in ("bare", "ours")[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            if name == "bare":
                asyncio.run(bare(url, prompts, args.concurrency))
            else:
                ours(url, target, prompts, args.concurrency, work / f"{title}-{turn}")
            rates[name] = len(prompts) / (time.perf_counter() - began)
        ratios.append(rates["ours"] / rates["bare"])
        print("  ".join(f"{name} {rate:6.1f} answers/s" for name, rate in sorted(rates.items())), flush=True)
    print(f"{title}, {args.prompts} prompts, {TOKENS} tokens each, {args.concurrency} at a time:")
    print(f"  ours / bare client {statistics.median(ratios):.2f}\n")
    return Figure(f"asking {title}", "OpenAI's client", statistics.median(ratios))


def main() -> list[Figure]:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(STORIES).eval()
    target = Target(model, AutoTokenizer.from_pretrained(STORIES), frozenset({2}))
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        with delayed() as url:
            delayed_answers = compare("a server that answers after 20 ms", url, target, args, work)
        put_into_cache(work, MODEL, STORIES)
        with transformers_serve(work) as url:
            served = compare("transformers serve, a Llama of 260 thousand weights", url, target, args, work)
    return [delayed_answers, served]


if __name__ == "__main__":
    main()
