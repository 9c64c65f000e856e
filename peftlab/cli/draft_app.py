"""The verbs about drafts: plan, bench, update, export, generate. Heavy imports wait until a verb needs them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from peftlab.errors import PeftlabError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from peftlab.decoding.draft_length import Policy

draft_app = typer.Typer(help="Draft models: can one pay here, and does it.", no_args_is_help=True)

Target = Annotated[str, typer.Option("--target", help="The model whose output it is.")]
DraftName = Annotated[Optional[str], typer.Option("--draft", help="The draft model, or a directory of Medusa heads.")]  # noqa: UP045
NewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Longest output.")]
Gamma = Annotated[int, typer.Option("--gamma", help="Tokens drafted a step.")]
Width = Annotated[int, typer.Option("--width", help="Choices of each Medusa head in a tree of gamma tokens.")]
Length = Annotated[
    str, typer.Option("--policy", help="Draft length: fixed, confidence (at most gamma), heuristic (from gamma).")
]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopK = Annotated[Optional[int], typer.Option("--top-k", help="Keep the k likeliest tokens.")]  # noqa: UP045
TopP = Annotated[Optional[float], typer.Option("--top-p", help="Keep the likeliest up to this mass.")]  # noqa: UP045
Seed = Annotated[int, typer.Option("--seed", help="Of sampling.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Of the target: float32 or bfloat16.")]
DraftDtype = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--draft-dtype", help="Of the draft, default the target's; bfloat16 stays lossless."),
]
Json = Annotated[Optional[Path], typer.Option("--json", help="Write the result here.")]  # noqa: UP045
Html = Annotated[Optional[Path], typer.Option("--html", help="Write a page here.")]  # noqa: UP045
Pack = Annotated[bool, typer.Option("--pack/--no-pack", help="Lay the weights out for fast kernels (CPU).")]


@draft_app.command()
def plan(
    target: Target,
    draft: Annotated[str, typer.Option("--draft", help="The draft model, trained or not.")],
    max_gamma: Annotated[int, typer.Option("--max-gamma", help="Longest draft to consider.")] = 8,
    context: Annotated[int, typer.Option("--context", help="Tokens in the cache while measuring.")] = 128,
    repeats: Annotated[int, typer.Option("--repeats", help="Passes of each kind.")] = 9,
    dtype: Dtype = "float32",
    draft_dtype: DraftDtype = None,
    pack: Pack = True,
    json: Json = None,
    html: Html = None,
) -> None:
    """Measure target and draft on this device: can drafting pay, and from what acceptance on."""
    from peftlab.decoding.analysis.planning import check_plan
    from peftlab.decoding.analysis.planning import plan as measure
    from peftlab.decoding.drafters.head_drafter import is_medusa
    from peftlab.drafting.load import load_pair
    from peftlab.reporting import draft_pages as pages

    check_plan(max_gamma, repeats)
    if is_medusa(draft):
        raise PeftlabError(f"--draft {draft}: heads have no step of their own to plan; time them with draft bench")
    pair = load_pair(target, draft, dtype=_dtype(dtype), draft_dtype=_dtype(draft_dtype or dtype), pack=pack)
    assert pair.draft is not None
    result: dict[str, Any] = {"target": target, "draft": draft, "dtype": dtype, "draft_dtype": draft_dtype or dtype}
    result["warnings"] = list(pair.warnings)
    result |= measure(pair.target, pair.draft, max_gamma=max_gamma, context=context, repeats=repeats)
    tables, facts = pages.plan_tables(result), pages.plan_facts(result)
    pages.show(tables, facts)
    _write(result, json, html, lambda: pages.page("Draft plan", tables, facts, pages.plan_drawings(result)))


@draft_app.command()
def bench(
    target: Target,
    prompts: Annotated[Path, typer.Option("--prompts", help="JSON lines (Spec-Bench or prompt/text), or text.")],
    draft: DraftName = None,
    max_new_tokens: NewTokens = 64,
    gamma: Gamma = 4,
    width: Width = 1,
    policy: Length = "fixed",
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts decoded together.")] = 1,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed passes over all prompts.")] = 3,
    max_prompts: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--max-prompts", help="At most so many, taken evenly from the categories."),
    ] = None,
    dtype: Dtype = "float32",
    draft_dtype: DraftDtype = None,
    pack: Pack = True,
    json: Json = None,
    html: Html = None,
) -> None:
    """Time plain and speculative decoding side by side; the free drafters always run beside the draft."""
    from functools import partial

    from peftlab.decoding.analysis import benchmark as benches
    from peftlab.decoding.analysis.stopwatch import Stopwatch
    from peftlab.decoding.drafters.head_drafter import is_medusa
    from peftlab.decoding.drafters.model_free import PromptLookup, Recycling
    from peftlab.decoding.prompts import encode, read_prompts, spread
    from peftlab.decoding.verification.sampling import Sampling
    from peftlab.drafting.load import BOTH, check_width, load_pair, make_drafter
    from peftlab.reporting import draft_pages as pages

    check_width(width, heads=draft is not None and is_medusa(draft))
    settings = benches.Settings(
        max_new_tokens=max_new_tokens,
        policy=_policy(policy, gamma),
        sampling=Sampling(temperature, top_k, top_p, seed),
        batch_size=batch_size,
        repeats=repeats,
    )
    listed = read_prompts(prompts)
    if max_prompts is not None:
        listed = spread(listed, max_prompts)
    pair = load_pair(target, draft, dtype=_dtype(dtype), draft_dtype=_dtype(draft_dtype or dtype), pack=pack)
    settings.eos = pair.eos
    watches = [Stopwatch(pair.target)]
    drafters: dict[str, Any] = {}
    if pair.draft is not None:
        watches.append(Stopwatch(pair.draft))
        pair.draft = watches[1]
    if pair.heads is not None:
        pair.heads = watches[0].including(pair.heads)
    if draft is not None:
        drafters |= {name: partial(make_drafter, name, pair, width) for name in ("draft", BOTH)}
    drafters |= {"lookup": PromptLookup, "recycling": Recycling}
    questions = [benches.Question(p.id, p.category, encode(pair.tokenizer, p)) for p in listed]
    result: dict[str, Any] = {
        "target": target,
        "draft": draft,
        "gamma": gamma,
        "width": width,
        "policy": policy,
        "dtype": dtype,
        "draft_dtype": draft_dtype or dtype,
    }
    result |= benches.bench(watches[0], drafters, questions, settings, models=watches).as_json()
    tables, facts = pages.bench_tables(result), pages.bench_facts(result)
    pages.show(tables, [*(f"warning: {w}" for w in pair.warnings), *facts])
    _write(result, json, html, lambda: pages.page("Draft benchmark", tables, facts, pages.bench_drawings(result)))


@draft_app.command()
def update(
    run: Annotated[Path, typer.Argument(help="The run directory of a draft recipe.")],
    requests: Annotated[
        Path, typer.Option("--requests", help="Served requests: rows with prompt (or messages) and response.")
    ],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="Overrides: train.max_steps=50.", metavar="[key=value]..."),
    ] = None,
    size: Annotated[int, typer.Option("--size", help="Requests the replay buffer holds.", min=2)] = 1024,
) -> None:
    """Train the newest draft of a run further on the requests it has served since."""
    from peftlab.pipelines.update import run_update

    run_update(run, requests, size=size, overrides=tuple(overrides or []))


@draft_app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A draft run, its merged/, or another model directory.")],
    consumer: Annotated[str, typer.Option("--for", help="transformers or vllm.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")],
    target: Target,
    gamma: Gamma = 4,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result of the same kind.")] = False,
) -> None:
    """Write a trained draft as its consumer loads it, compare logits, and print the command that serves it."""
    from peftlab.drafting.export import export_draft

    command, difference = export_draft(source, out, consumer, target, gamma=gamma, overwrite=overwrite)
    print(f"{out}: loaded back, largest difference of a logit {difference:.3g}\n{command}")


def generate(
    target: Target,
    prompt: Annotated[str, typer.Option("--prompt", help="What to go on from.")],
    draft: DraftName = None,
    drafter: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--drafter", help="lookup, recycling or ngram; with --draft: lookup+draft."),
    ] = None,
    max_new_tokens: NewTokens = 256,
    gamma: Gamma = 4,
    width: Width = 1,
    policy: Length = "fixed",
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    stop: Annotated[Optional[list[str]], typer.Option("--stop", help="End before this text.")] = None,  # noqa: UP045
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the chat template.")] = False,
    dtype: Dtype = "float32",
    draft_dtype: DraftDtype = None,
    pack: Pack = True,
) -> None:
    """Generate text to the terminal, with a draft if one is named; then say how fast it was."""
    import sys
    import time

    from peftlab.decoding.analysis.statistics import acceptance_statistics
    from peftlab.decoding.decode import StoppingCriteria, decode
    from peftlab.decoding.drafters.head_drafter import is_medusa
    from peftlab.decoding.prompts import Prompt, encode
    from peftlab.decoding.text_stream import TextStream, stop_at
    from peftlab.decoding.verification.sampling import Sampling
    from peftlab.drafting.load import BOTH, check_width, load_pair, make_drafter

    if draft is not None and drafter not in (None, "draft", BOTH):
        raise PeftlabError(f"--draft and --drafter {drafter}: give one of them, or --drafter {BOTH}")
    check_width(width, heads=draft is not None and is_medusa(draft))
    sampling, make_policy = Sampling(temperature, top_k, top_p, seed), _policy(policy, gamma)
    pair = load_pair(target, draft, dtype=_dtype(dtype), draft_dtype=_dtype(draft_dtype or dtype), pack=pack)
    name = drafter or ("draft" if draft is not None else None)
    messages = [{"role": "user", "content": prompt}] if chat else None
    if chat and not getattr(pair.tokenizer, "chat_template", None):
        raise PeftlabError(f"--chat: the tokenizer of {target!r} has no chat template")
    stops = stop or []
    stream = TextStream(pair.tokenizer, stops)
    ids = encode(pair.tokenizer, Prompt("prompt", "all", prompt, messages))

    def show(_: int, tokens: list[int]) -> None:
        sys.stdout.write(stream.add(tokens))
        sys.stdout.flush()

    began = time.perf_counter()
    result = decode(
        pair.target,
        [ids],
        StoppingCriteria(max_new_tokens, pair.eos, stop_at(pair.tokenizer, stops)),
        make_drafter(name, pair, width) if name else None,
        policy=make_policy,
        sampling=sampling,
        on_tokens=show,
    )[0]
    seconds = time.perf_counter() - began
    print(stream.finish())
    of = acceptance_statistics([result])
    line = f"{len(result.tokens)} tokens in {seconds:.2f} s, {len(result.tokens) / seconds:.1f} tokens/s"
    if name and of.tau:
        share = f"{100 * of.acceptance:.0f} %" if of.acceptance is not None else "none drafted"
        line += f", acceptance {share}, {of.tau:.2f} tokens a target step"
    print(f"[{line}; ended by {result.reason}]", file=sys.stderr)


def _policy(name: str, gamma: int) -> Callable[[], Policy]:
    from functools import partial

    from peftlab.decoding.draft_length import Confidence, Fixed, Heuristic

    policies: dict[str, Any] = {"fixed": Fixed, "confidence": Confidence, "heuristic": Heuristic}
    if name not in policies:
        raise PeftlabError(f"--policy {name}: none of {', '.join(policies)}{did_you_mean(name, policies)}")
    policies[name](gamma)  # a wrong gamma is found before a model is loaded
    return partial(policies[name], gamma)


def _dtype(name: str) -> Any:
    import torch

    if name not in ("float32", "bfloat16"):
        raise PeftlabError(f"--dtype {name}: float32 or bfloat16")
    return getattr(torch, name)


def _write(result: dict[str, Any], json: Path | None, html: Path | None, page: Callable[[], str]) -> None:
    from peftlab.files import write_json, write_text

    if json is not None:
        write_json(json, result)
    if html is not None:
        write_text(html, page())
