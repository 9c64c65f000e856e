"""The verbs about drafts: plan, bench, update, export, generate. Heavy imports wait until a verb needs them.

``cli.app`` makes them commands: what a verb prints is for people, what it returns is for programs, as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peftlab.decoding.table import LOSSY, MODEL_FREE, POLICIES, TREES, VERIFIERS, rule_help
from peftlab.errors import PeftlabError
from peftlab.files import write_text

if TYPE_CHECKING:
    from peftlab.pipelines.benchmark import DecodingOptions
    from peftlab.pipelines.generate import GeneratedText, Writer

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result of the same kind.")]
Device = Annotated[
    Literal["auto", "cpu", "cuda", "mps"],
    typer.Option("--device", help="Where models run; auto: cuda if there is one, else mps, else cpu."),
]

Target = Annotated[str, typer.Option("--target", help="The model whose output is wanted.")]
DraftName = Annotated[
    str | None, typer.Option("--draft", help="A draft model, heads, a draft run, exit:K, del or swift.")
]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Length of the longest output.")]
Gamma = Annotated[int, typer.Option("--gamma", help="Tokens drafted per target step.")]
Width = Annotated[
    int | None,
    typer.Option(
        "--width",
        help="A tree of gamma tokens with as many choices of each head or pard or gated_lora place, or children of an "
        "eagle3 or mtp node. Default: the best tree as measured for heads, else a chain.",
    ),
]
Length = Annotated[str, typer.Option("--policy", help=f"Draft length, at most gamma: {rule_help(POLICIES)}.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Sample from the k most likely tokens.")]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", help="Sample from the most likely tokens that have this probability together."),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of sampling.", min=0, max=2**32 - 1)]
Dtype = Annotated[str, typer.Option("--dtype", help="Dtype of the target: fp32, bf16 or fp16.")]
DraftDtype = Annotated[
    str | None,
    typer.Option("--draft-dtype", help="Dtype of the draft; default: the target's. The output stays lossless."),
]
Corpus = Annotated[
    str | None,
    typer.Option("--corpus", help="Texts that suffix copies from and ngram counts, beside the prompt and the output."),
]
PEARL = (
    "pearl, the draft at work while the target verifies; one_pass, a gated_lora draft whose masks the target reads as "
    "it verifies"
)
Lossy = Annotated[
    str | None,
    typer.Option("--lossy", help=f"Accept, not exactly, {rule_help(LOSSY)}. Default: the output is the target's own."),
]
Tree = Annotated[
    str | None,
    typer.Option(
        "--tree", help=f"A tree of gamma tokens drawn from a draft model: {rule_help(TREES)}. Default: a chain."
    ),
]
Verify = Annotated[
    str | None, typer.Option("--verify", help=f"How sampled drafts are verified, all lossless: {rule_help(VERIFIERS)}.")
]
DraftWindow = Annotated[
    str | None,
    typer.Option("--draft-window", help="SINKS:LAST: the draft sees only the first and last tokens. Default: all."),
]
Html = Annotated[Path | None, typer.Option("--html", help="Write an HTML page to this file.")]
Pack = Annotated[bool, typer.Option("--pack/--no-pack", help="Store the weights in the layout of fast kernels (CPU).")]


def _decoding_options(arguments: Mapping[str, object]) -> DecodingOptions:
    """Return the options of decoding among a verb's arguments, which have the names of its fields."""
    from peftlab.pipelines.benchmark import DecodingOptions
    from peftlab.untyped import Attributes

    given: Attributes = {f.name: arguments[f.name] for f in fields(DecodingOptions) if f.name in arguments}
    return DecodingOptions(**given)


def plan(
    target: Annotated[
        str | None, typer.Option("--target", help="The model whose output is wanted; not with --theory.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="The draft model, trained or not; none: compare the kinds of drafts.")
    ] = None,
    alpha: Annotated[float, typer.Option("--alpha", help="The acceptance to recommend for.")] = 0.5,
    max_gamma: Annotated[int, typer.Option("--max-gamma", help="Longest draft to consider.")] = 8,
    context: Annotated[int, typer.Option("--context", help="Tokens in the cache while measuring.")] = 128,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed passes of each kind.")] = 9,
    batch: Annotated[
        str, typer.Option("--batch", help="Sequences decoded together, as in 1,4,16: the best length for each.")
    ] = "1",
    theory: Annotated[
        bool, typer.Option("--theory", help="Print expected tokens and speed-up by alpha and gamma; measure nothing.")
    ] = False,
    dtype: Dtype = "fp32",
    draft_dtype: DraftDtype = None,
    draft_window: DraftWindow = None,
    pack: Pack = True,
    device: Device = "auto",
    engine: Annotated[
        str, typer.Option("--engine", help="Whose steps to measure, with --draft: peftlab, vllm or llama.cpp.")
    ] = "peftlab",
    html: Html = None,
) -> object:
    """Measure the target on this device: which draft can be faster, and from what acceptance on?"""
    arguments = locals()
    from peftlab.pipelines.benchmark import plan_draft
    from peftlab.reporting import drafts

    if theory:
        return _show_theory(arguments, html)
    options = _decoding_options(arguments)
    if target is None:
        raise PeftlabError("--target: missing; give the model to measure, or --theory for the formulas alone")
    how = {"max_gamma": max_gamma, "context": context, "repeats": repeats}
    found = plan_draft(target, draft, options, alpha=alpha, batches=_numbers("batch", batch), engine=engine, **how)
    plan = found.result
    tables = [*drafts.plan_tables(plan), *([drafts.memory_table(found.memory)] if found.memory else [])]
    facts = drafts.plan_facts(plan, found.warnings, alpha)
    drafts.show(tables, facts)
    if html is not None:
        write_text(html, drafts.page("Draft plan", tables, facts, drafts.plan_plots(plan)))
    return found


def _show_theory(arguments: Mapping[str, object], html: Path | None) -> object:
    from peftlab.decoding.theory import theory_grid
    from peftlab.reporting import drafts
    from peftlab.reporting.drafts import theory_facts, theory_tables

    defaults = {name: parameter.default for name, parameter in signature(plan).parameters.items()}
    given = [name for name, value in defaults.items() if name not in ("theory", "html") and arguments[name] != value]
    if given:
        flags = ", ".join("--no-pack" if name == "pack" else "--" + name.replace("_", "-") for name in given)
        raise PeftlabError(f"--theory: measures nothing; leave {flags} out, or --theory")
    found = theory_grid()
    tables, facts = theory_tables(found), theory_facts()
    drafts.show(tables, facts)
    if html is not None:
        write_text(html, drafts.page("Speculative decoding in theory", tables, facts, []))
    return found


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PeftlabError(f"--{name} {text}: whole numbers separated by commas, such as 1,4,16") from None


def bench(
    target: Target,
    prompts: Annotated[Path, typer.Option("--prompts", help="JSON lines (Spec-Bench or prompt/text), or text.")],
    draft: DraftName = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            help=f"Beside the draft, or alone: {rule_help(MODEL_FREE)}; {PEARL}. "
            "Default: one of each without these two.",
        ),
    ] = None,
    max_new_tokens: NewTokens = 64,
    gamma: Gamma = 4,
    width: Width = None,
    policy: Length = "fixed",
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts decoded together.")] = 1,
    pool: Annotated[
        bool, typer.Option("--pool", help="Also time a pool that takes the next prompt as soon as an output ends.")
    ] = False,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed passes over all prompts.")] = 3,
    max_prompts: Annotated[
        int | None,
        typer.Option("--max-prompts", help="Use at most N prompts, spread evenly over the categories.", metavar="N"),
    ] = None,
    dtype: Dtype = "fp32",
    draft_dtype: DraftDtype = None,
    pack: Pack = True,
    corpus: Corpus = None,
    lossy: Lossy = None,
    tree: Tree = None,
    verify: Verify = None,
    draft_window: DraftWindow = None,
    device: Device = "auto",
    engine: Annotated[
        str,
        typer.Option("--engine", help="Measure the draft there, too: vllm, llama.cpp or a server's URL."),
    ] = "peftlab",
    html: Html = None,
) -> object:
    """Time plain and speculative decoding on the same prompts; drafters without a model run beside the draft."""
    from peftlab.pipelines.benchmark import benchmark
    from peftlab.reporting import drafts

    options = _decoding_options(locals())
    result = benchmark(
        target, prompts, draft, options, drafters=drafter or (), batch_size=batch_size, repeats=repeats,
        max_prompts=max_prompts, pool=pool, engine=engine,
    )  # fmt: skip
    found = result.result
    tables, facts = drafts.bench_tables(found, result.engine), drafts.bench_facts(found, result.warnings, result.engine)
    drafts.show(tables, [*facts, result.where()])
    if html is not None:
        write_text(html, drafts.bench_page(found, result.warnings, result.lines(), result.example, result.engine))
    return result


def update(
    run: Annotated[Path, typer.Argument(help="The run directory of a draft recipe.")],
    requests: Annotated[
        Path | None, typer.Option("--requests", help="Served requests: rows with prompt (or messages) and response.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="A stream of requests to decode, learning in between from rejected tokens."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides: train.max_steps=50.", metavar="KEY=VALUE"),
    ] = None,
    size: Annotated[int, typer.Option("--size", help="Size of the replay buffer, in requests.", min=2)] = 1024,
    every: Annotated[
        int | None, typer.Option("--every", help="With --prompts: requests between two updates; 16.", min=1)
    ] = None,
    device: Device = "auto",
) -> object:
    """Train the newest draft of a run further: on requests it has served, or while it decodes a stream of them."""
    if (requests is None) == (prompts is None):
        raise PeftlabError("give one of --requests, a log that was served, and --prompts, a stream to decode now")
    if requests is not None:
        from peftlab.pipelines.update import update_draft

        if every is not None:
            raise PeftlabError("--every: goes with --prompts; a log is learnt from at once")
        return update_draft(run, requests, size=size, overrides=overrides or [], device=device)
    from peftlab.pipelines.update import update_live
    from peftlab.reporting import drafts
    from peftlab.reporting.drafts import stream_facts, stream_tables

    assert prompts is not None
    found = update_live(run, prompts, every=every or 16, size=size, overrides=overrides or [], device=device)
    drafts.show(stream_tables(found), stream_facts(found))
    return found


def export(
    source: Annotated[Path, typer.Argument(help="A draft run, its merged/, or another model directory.")],
    consumer: Annotated[str, typer.Option("--for", help="transformers, vllm, sglang, llama.cpp or stitched.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write; for llama.cpp a file, FILE.gguf.")],
    target: Target,
    gamma: Gamma = 4,
    overwrite: Overwrite = False,
) -> object:
    """Write a trained draft as its consumer loads it, compare logits, and print the command that serves it."""
    from peftlab.drafting.export import export_draft

    done = export_draft(source, out, consumer, target, gamma=gamma, overwrite=overwrite)
    print(f"{out}: loaded back, largest difference of a logit {done.max_logit_difference:.3g}")
    print(*done.notes, done.command, sep="\n")
    return done


def generate(
    target: Target,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="The text to continue; with --chat, to answer once.")
    ] = None,
    draft: DraftName = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter", help=f"Without a draft: {rule_help(MODEL_FREE)}. With --draft: suffix, too; {PEARL}."
        ),
    ] = None,
    max_new_tokens: NewTokens = 256,
    gamma: Gamma = 4,
    width: Width = None,
    policy: Length = "fixed",
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text.")] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Through the chat template; without --prompt a conversation: each line of the input is a turn.",
        ),
    ] = False,
    dtype: Dtype = "fp32",
    draft_dtype: DraftDtype = None,
    pack: Pack = True,
    corpus: Corpus = None,
    lossy: Lossy = None,
    tree: Tree = None,
    verify: Verify = None,
    draft_window: DraftWindow = None,
    image: Annotated[
        list[str] | None, typer.Option("--image", help="A file that the prompt asks about; may be given several times.")
    ] = None,
    device: Device = "auto",
) -> object:
    """Generate text to the terminal, or chat, with a draft if one is named; then say how fast it was."""
    from peftlab.pipelines.generate import generate as generated
    from peftlab.pipelines.generate import generate_with_images, load_writer

    options = _decoding_options(locals())
    if image:
        if prompt is None or stop:
            raise PeftlabError("--image: goes with --prompt, and without --stop")
        answer = generate_with_images(target, prompt, image, draft, options, drafter=drafter, on_text=_write)
        _end_line(answer)
        return answer
    if prompt is not None:
        answer = generated(target, prompt, draft, options, drafter=drafter, stop=stop or [], chat=chat, on_text=_write)
        _end_line(answer)
        return answer
    if not chat:
        raise PeftlabError("--prompt: missing; give a text to continue, or --chat for a conversation")
    return {
        "answers": _hold_conversation(load_writer(target, draft, options, drafter=drafter, stop=stop or [], chat=True))
    }


# The terminal of a chat: lines typed or piped are turns, answers appear as they are written


def _write(piece: str) -> None:
    """Write a piece of text at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def _end_line(answer: GeneratedText) -> None:
    """End an output, and say on stderr how fast it was."""
    from peftlab.reporting.console import generation_line

    _write("\n")
    lossy = answer.lossy.line() if answer.lossy is not None else None
    line = generation_line(
        len(answer.tokens), answer.seconds, answer.reason, answer.block_efficiency, answer.acceptance, lossy
    )
    print(line if answer.reason != "interrupt" else "[stopped]", file=sys.stderr, flush=True)


def _hold_conversation(writer: Writer) -> list[GeneratedText]:
    """Hold a conversation until the input ends, and return the answers; a line is a turn."""
    from peftlab.pipelines.generate import converse

    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):  # editing and history of the lines
            import readline  # noqa: F401
        _note("Ctrl-C stops an answer, Ctrl-D ends the chat.")
    answers: list[GeneratedText] = []

    def answered(answer: GeneratedText) -> None:
        _end_line(answer)
        answers.append(answer)

    converse(writer, _read, _write, answered, _note, interactive=typed)
    if typed:
        _write("\n")
    return answers


def _read() -> str | None:
    """Return the next line, None at the end of the input."""
    try:
        if sys.stdin.isatty():
            return input("> " if sys.stdout.isatty() else "")
        line = sys.stdin.readline()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise PeftlabError(f"chat: the input is not {error.encoding} text ({error.reason})") from None
    return line.rstrip("\r\n") if line else None


def _note(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)
