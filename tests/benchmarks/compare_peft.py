"""Fill ``docs/benchmarks/compare_peft.md``: LoRA by peft's own training script and by peftlab, in one run.

    PEFT_CHECKOUT=DIR python -m tests.benchmarks.compare_peft [--seeds 0 1 2] [--steps N] [--rows ROW ...] [--sides peft peftlab]
        [--same-batches]

DIR is a checkout of peft. Its ``method_comparison/MetaMathQA/run.py`` runs as it is, in a process of its own, in which this file
replaces what a CPU without the hub does not have: the accelerator and its counters, the data sets, and the git branch. Settings are
read from the checkout. Both sides train on the same rows; a side of a seed that has finished is not run again, and figures
that are not measured stay on the page. Run alone on the machine; needs GSM8K and WikiText-2, in ../shared/data/lm or where ``--lm`` says.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from peftlab.environment import describe_cpu, peak_memory
from peftlab.training.order import epoch_batches
from tests.benchmarks.bench_language import LM
from tests.benchmarks.figures import PACKAGES
from tests.benchmarks.measure_systems import ROOT, peftlab, rows_of_part, short_name, with_part

PAGE = ROOT / "docs" / "benchmarks" / "compare_peft.md"
VARIABLE = "PEFT_CHECKOUT"
SCRIPT = Path("method_comparison", "MetaMathQA")
SIDES = ("peft", "peftlab")
ROWS = ("rank32", "rank64", "rank64-rslora", "rank32-dora", "rank10-target-mlp")
"""Experiments of ``experiments/lora/llama-3.2-3B-...`` whose settings peftlab's LoRA has too."""
LONGEST = 1300  # characters of the rows that their script keeps
TEXTS, TEXT_LENGTH = 8, 1000  # of WikiText-2, for what training forgets: as short as rows, so that memory is training's


@dataclass(frozen=True)
class Measured:
    """What a side measured with a seed, as peft's result file has it.

    Attributes:
        accuracy: share of the test questions that are answered right. held_out: loss per token of the held-out rows.
        train_seconds: of the optimiser steps alone. total_seconds: of the whole script.
        memory: the largest resident memory of its process in MiB. file_size: of the adapter in MiB.
        parameters: those trained. tokens: those trained on, one at the end of each row included.
    """

    accuracy: float
    held_out: float
    train_seconds: float
    total_seconds: float
    memory: float
    file_size: float
    parameters: int
    tokens: int


# --- What both sides share: settings, rows and the base.
def read_settings(checkout: Path, row: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the training parameters of an experiment of peft's, and its adapter's configuration.

    Args:
        checkout: of peft. row: the experiment's name, as in ``ROWS``.
    """
    place = checkout / SCRIPT
    experiment = place / "experiments" / "lora" / f"llama-3.2-3B-{row}"
    settings = json.loads((place / "default_training_params.json").read_text())
    if (own := experiment / "training_params.json").exists():
        settings |= json.loads(own.read_text())
    expected = {"optimizer_type": "AdamW", "lr_scheduler": "cosine", "dtype": "bfloat16", "use_amp": False}
    if differ := [key for key, value in expected.items() if settings[key] != value]:
        raise SystemExit(f"{row}: {', '.join(differ)} in the checkout is not what the recipe here has")
    return settings, json.loads((experiment / "adapter_config.json").read_text())


def read_rows(lm: Path, metamath: Path | None) -> list[dict[str, str]]:
    """Return the rows to train on with MetaMathQA's columns: its own where there is a file, else those of GSM8K.

    Args:
        lm: directory of ``gsm8k_train.jsonl``. metamath: MetaMathQA as a JSON or JSON Lines file.
    """
    if metamath is not None:
        text = metamath.read_text()
        read = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
        rows = [{key: row[key] for key in ("type", "query", "response", "original_question")} for row in read]
    else:
        rows = [
            {"type": "GSM", "query": row["question"], "response": row["answer"], "original_question": row["question"]}
            for row in read_jsonl(lm / "gsm8k_train.jsonl")
        ]
    return [row for row in rows if len(f"{row['query']} {row['response']}") <= LONGEST]


def read_jsonl(path: Path) -> list[dict[str, str]]:
    """Return the rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write a JSON Lines file into a directory that is made.

    Args:
        path: the file. rows: its lines.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def in_our_batches(
    rows: list[dict[str, str]], template: str, model: str, batch_size: int, seed: int
) -> list[dict[str, str]]:
    """Return rows in the order in which peftlab trains on them, batch by batch.

    Args:
        rows: of MetaMathQA's columns. template: peft's ``query_template``. model: whose tokenizer counts.
        batch_size: rows of a batch. seed: of the run.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [template.format(query=row["query"]) + row["response"] for row in rows]
    lengths = [len(tokenizer(text)["input_ids"]) + 1 for text in texts]  # and the token that ends it
    return [rows[i] for batch in epoch_batches(lengths, batch_size, seed=seed, epoch=0) for i in batch]


def pairs(rows: Sequence[Mapping[str, str]], template: str) -> list[dict[str, str]]:
    """Return rows as prompt and completion, whose texts together are those that peft's script makes.

    Args:
        rows: with ``query`` and ``response``. template: peft's ``query_template``.
    """
    return [{"prompt": template.format(query=row["query"]), "completion": row["response"]} for row in rows]


def our_recipe(
    base: str, rows: Path, settings: Mapping[str, Any], config: Mapping[str, Any], out: Path
) -> dict[str, Any]:
    """Return the recipe that trains as peft's script does.

    Args:
        base: the model. rows: the directory of train, validation and test rows.
        settings: the training parameters, as peft's ``TrainConfig`` has them. config: the adapter's configuration.
        out: the run directory.
    """
    method = {key: config[key] for key in ("r", "lora_alpha", "lora_dropout", "use_dora", "use_rslora")}
    optimiser = settings["optimizer_kwargs"]
    return {
        "model": base,
        "base": {"dtype": "bf16"},
        "task": "text/completion",
        "data": {"path": str(rows), "train_on": "all", "too_long": "truncate"},
        "method": {"name": "lora", **method, "target_modules": config["target_modules"] or "query-value"},
        "train": {
            "max_steps": settings["max_steps"],
            "batch_size": settings["batch_size"],
            "eval_batch_size": settings["batch_size_eval"],
            "max_length": settings["max_seq_length"],
            "lr": optimiser["lr"],
            "weight_decay": optimiser["weight_decay"],
            "max_grad_norm": settings["grad_norm_clip"] or None,
            "scheduler": "cosine",
            "warmup": int(0.1 * settings["max_steps"]),
            "precision": "bf16",
            "eval_every": settings["eval_steps"],
            "eval_before": False,
            "seed": settings["seed"],
        },
        "generate": {
            "metrics": ["gsm8k_peft"],
            "max_new_tokens": settings["generation_kwargs"]["max_new_tokens"],
            "batch_size": settings["batch_size_eval"],
            "before": False,
        },
        "merge": False,
        "output_dir": str(out),
    }


# --- One side with one seed. Each leaves ``result.json``, in peft's format, and its adapter in its directory.
ADAPTERS = {"peft": "adapter", "peftlab": "run/adapter"}


def run_peftlab(recipe: Path, out: Path) -> None:
    """Train with peftlab, from the beginning, and report the run as peft does.

    Args:
        recipe: the file; its ``output_dir`` is ``run`` in ``out``. out: the directory of what is left.
    """
    peftlab("run", str(recipe), "--device", "cpu", "--overwrite")
    peftlab("report", str(out / "run"), "-o", str(out / "result.json"), "--as", "peft")


def run_peft(
    checkout: Path,
    rows: Path,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    out: Path,
    *,
    same_batches: bool,
) -> None:
    """Train with peft's script in a process of its own.

    Its assertions are off: one of them is that the texts for forgetting have a loss that Llama 3.2 3B has.

    Args:
        checkout: of peft. rows: the directory of the data sets. settings: the training parameters.
        config: the adapter's configuration. out: the directory of what is left.
        same_batches: each four rows are a batch, in their order.
    """
    shutil.rmtree(out, ignore_errors=True)
    experiment = out / "experiment"
    experiment.mkdir(parents=True)
    (experiment / "training_params.json").write_text(json.dumps(settings))
    (experiment / "adapter_config.json").write_text(json.dumps(config))
    own = "tests.benchmarks.compare_peft"
    command = [sys.executable, "-O", "-m", own, "--script", *map(str, (checkout, rows, out))]
    command += ["--same-batches"] * same_batches
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    log = out / "script.log"
    print(f"output: {log}", flush=True)
    with log.open("w") as file:
        done = subprocess.run(command, check=False, env=environment, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"peft's script failed:\n{log.read_text()[-3000:]}")
    (written,) = (out / "results").glob("*.json")
    stored = json.loads(written.read_text())
    if stored["train_info"]["status"] != "success":
        raise SystemExit(f"peft's script: {stored['run_info']['error_msg']}")
    written.rename(out / "result.json")


def run_script(checkout: Path, rows: Path, out: Path, *, same_batches: bool) -> None:
    """Run ``main`` of peft's script, in this process, with what a CPU without the hub does not have replaced.

    Args:
        checkout: of peft. rows: the directory of the data sets. out: the directory with ``experiment``.
        same_batches: as for ``run_peft``.
    """
    import torch
    from datasets import Dataset, DatasetDict

    try:
        importlib.import_module("bitsandbytes")
    except ImportError:  # the script writes its version, and needs it for quantised bases alone
        absent: Any = types.ModuleType("bitsandbytes")
        absent.__version__, absent.__path__ = "not installed", ["site-packages"]
        sys.modules["bitsandbytes"] = absent
    sys.path.insert(0, str(checkout / SCRIPT))
    peft_utils: Any = importlib.import_module("peft.utils")
    peft_utils.infer_device = lambda: "cuda"  # any other is refused when the script is imported
    utils: Any = importlib.import_module("utils")
    peft_utils.infer_device = utils.infer_device = lambda: "cpu"
    utils.device = "cpu"
    data: Any = importlib.import_module("data")
    script: Any = importlib.import_module("run")
    if same_batches:
        script.BUCKET_FACTOR = 1  # batches from which the script chooses rows of similar length

    processor: Any = torch.cpu
    for counter in ("memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(processor, counter, lambda: round(peak_memory() * 2**20))
    processor.empty_cache = lambda: None
    processor.get_device_name = lambda index: describe_cpu().name
    script.init_accelerator = lambda: 0  # the script's own sets torch's seed to 0, whatever the experiment's seed is

    def table(name: str) -> Dataset:
        return Dataset.from_list(read_jsonl(rows / f"{name}.jsonl"))

    sets = {
        "meta-math/MetaMathQA": {"train": table("train")},
        "openai/gsm8k": DatasetDict(train=table("validation"), test=table("test")),
        "HuggingFaceFW/finewiki": table("texts"),
    }
    data.load_dataset = lambda name, *given, **options: sets[name]

    branch = f"peft {metadata.version('peft')}"
    script.get_peft_branch = utils.get_peft_branch = lambda: branch
    utils.get_peft_worktree_is_dirty = lambda: None
    utils.RESULT_PATH_TEST = utils.RESULT_PATH_CANCELLED = str(out / "results")
    (out / "results").mkdir()

    def keep(model: Any, **options: object) -> int:
        model.save_pretrained(out / "adapter")
        return (out / "adapter" / "adapter_model.safetensors").stat().st_size

    script.get_file_size = keep
    script.print_verbose = lambda *texts, **options: print(*texts, file=sys.stderr)
    script.main(
        path_experiment=str(out / "experiment"), experiment_name=f"lora/{out.name}", clean=True, bucket_name=None
    )


def score_held_out(adapter: Path, recipe: Path, rows: Path, out: Path) -> None:
    """Write the held-out loss of a side's adapter, by peftlab's scorer for both sides.

    Args:
        adapter: its directory. recipe: how texts become tokens. rows: the held-out rows. out: the JSON file.
    """
    given = [str(adapter), f"data.path={rows}", "data.validation=all", "~generate"]
    peftlab("eval", *given, "--recipe", str(recipe), "--device", "cpu", "--json", str(out))


def read_side(out: Path, side: str) -> Measured | None:
    """Return what a side measured; None where it has not finished.

    Their ``train_time`` has the evaluation on the test set in it, so that the seconds of the steps are read instead.

    Args:
        out: its directory. side: one of ``SIDES``.
    """
    files = [out / name for name in ("result.json", "held-out.json")]
    if not all(file.exists() for file in files):
        return None
    stored, held_out = (json.loads(file.read_text()) for file in files)
    train = stored["train_info"]
    last = train["metrics"][-1]
    return Measured(
        accuracy=last["test accuracy"],
        held_out=held_out["validation"]["loss"],
        train_seconds=train["metrics"][0]["train time"] if side == "peft" else train["train_time"],
        total_seconds=stored["run_info"]["total_time"],
        memory=train["accelerator_memory_max"] / 2**20,
        file_size=train["file_size"] / 2**20,
        parameters=train["num_trainable_params"],
        tokens=last["train total tokens"],
    )


def read_by_processing(checkout: Path, files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what ``processing.py`` of a checkout of peft makes of result files.

    Args:
        checkout: of peft. files: the results.
    """
    spec = importlib.util.spec_from_file_location("peft_processing", checkout / SCRIPT.parent / "processing.py")
    assert spec is not None and spec.loader is not None
    processing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(processing)
    with tempfile.TemporaryDirectory() as place:
        for number, file in enumerate(files):
            shutil.copy(file, Path(place) / f"{number}.json")
        found: list[dict[str, Any]] = processing.load_df(place, task_name="MetaMathQA").to_dict("records")
    return found


# --- The page.
HEAD = (
    "base", "row", "side", "seeds", "accuracy", "held-out loss", "training s", "total s", "memory MiB", "file MiB",
    "trained parameters", "tokens",
)  # fmt: skip
RATIOS = (
    "base",
    "row",
    "speed of the steps",
    "of the total time",
    "of the memory",
    "held-out loss, peftlab minus peft",
)


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean of values, and their sample standard deviation where there are several.

    Args:
        values: at least one. form: how a number is written.
    """
    deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{deviation}"


def ranged(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median of values, and their range where there are several.

    Args:
        values: at least one. form: how a number is written.
    """
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{statistics.median(values):{form}}{ends}"


def filled(page: str, base: str, row: str, found: Mapping[str, Mapping[int, Measured]]) -> str:
    """Return the page with what a row measured in place of what it had.

    Args:
        page: the page's text. base: the model's name and the steps. row: one of ``ROWS``.
        found: what each side measured, by seed.
    """
    results = {tuple(cells[:3]): cells[3:] for cells in rows_of_part(page, "results")}
    for side, seeds in found.items():
        if seeds:
            all_of = {key: [asdict(one)[key] for one in seeds.values()] for key in Measured.__dataclass_fields__}
            results[base, row, side] = [
                ", ".join(map(str, seeds)),
                spread([100 * value for value in all_of["accuracy"]], ".1f") + " %",
                spread(all_of["held_out"], ".4f"),
                spread(all_of["train_seconds"], ".0f"),
                spread(all_of["total_seconds"], ".0f"),
                spread(all_of["memory"], ".0f"),
                spread(all_of["file_size"], ".1f"),
                ranged(sorted({*all_of["parameters"]}), ",.0f"),
                ranged(sorted({*all_of["tokens"]}), ",.0f"),
            ]
    page = with_part(page, "results", _table(HEAD, [[*key, *cells] for key, cells in results.items()]))
    ratios = {tuple(cells[:2]): cells[2:] for cells in rows_of_part(page, "ratios")}
    theirs, ours = (found.get(side, {}) for side in SIDES)
    both = [(theirs[seed], ours[seed]) for seed in theirs if seed in ours]
    if both:
        ratios[base, row] = [
            ranged([peer.train_seconds / own.train_seconds for peer, own in both]) + " ×",
            ranged([own.total_seconds / peer.total_seconds for peer, own in both]),
            ranged([own.memory / peer.memory for peer, own in both]),
            ranged([own.held_out - peer.held_out for peer, own in both], "+.4f"),
        ]
    return with_part(page, "ratios", _table(RATIOS, [[*key, *cells] for key, cells in ratios.items()]))


def with_machine(page: str, base: str, row: str, where: Sequence[str]) -> str:
    """Return the page with where a row was measured, and what that cost, in place of what it had.

    Args:
        page: the page's text. base: the model's name and the steps. row: one of ``ROWS``.
        where: the processor, when and with what, core hours of all sides and seeds, and how many of the results
            peft's ``processing.py`` reads.
    """
    known = {tuple(cells[:2]): cells[2:] for cells in rows_of_part(page, "where")}
    known[base, row] = [*where]
    head = ("base", "row", "CPU", "measured", "core hours", "results that `processing.py` reads")
    return with_part(page, "where", _table(head, [[*key, *cells] for key, cells in known.items()]))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


# --- The command.
def versions(checkout: Path) -> str:
    """Return the versions of the libraries, and the commit of the checkout where it is one of git."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h", "--", "method_comparison"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    script = f"method_comparison at {commit}" if commit else "method_comparison without a commit"
    return ", ".join([*(f"{name} {metadata.version(name)}" for name in PACKAGES), script])


def write_rows(
    place: Path, template: str, options: argparse.Namespace, model: str, batch_size: int, count: int
) -> None:
    """Write the rows of every seed, as peft's script and as a recipe reads them, and those held out.

    Rows are those of the file's beginning, in another order with each seed, as the script does not shuffle them.

    Args:
        place: the directory. template: peft's ``query_template``. options: of the command.
        model: the base. batch_size: rows of a batch. count: rows to train on.
    """
    rows = read_rows(options.lm, options.metamath)
    if len(rows) <= count:
        raise SystemExit(f"{count} rows are trained on, and the file has {len(rows)}; give fewer --steps")
    tests = [
        {"query": row["question"], "response": row["answer"]} for row in read_jsonl(options.lm / "gsm8k_test.jsonl")
    ]
    validation = [{key: rows[count][key] for key in ("query", "response")}]
    texts = [text.strip() for text in (options.lm / "wikitext2_valid.txt").read_text().split("\n")]
    longest = sorted(texts, key=len, reverse=True)[:TEXTS]
    write_jsonl(place / "held-out.jsonl", pairs(tests[: options.held_out], template))
    for seed in options.seeds:
        train = random.Random(seed).sample(rows[:count], count)
        given = place / f"rows-seed{seed}"
        for name, of in (("train", train), ("validation", validation), ("test", tests[: options.questions])):
            write_jsonl(given / f"{name}.jsonl", pairs(of, template))
            asked = [{"question": row["query"], "answer": row["response"]} for row in of]
            if name == "train" and options.same_batches:
                of = in_our_batches(of, template, model, batch_size, seed)
            write_jsonl(given / "script" / f"{name}.jsonl", of if name == "train" else asked)
        write_jsonl(given / "script" / "texts.jsonl", [{"text": text[:TEXT_LENGTH]} for text in longest])


def main(arguments: list[str] | None = None) -> None:
    """Run the sides and seeds that are missing, and write the page after each of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "compare-peft", help="where the runs are kept")
    parser.add_argument("--lm", type=Path, default=LM, help="directory of gsm8k_*.jsonl and wikitext2_valid.txt")
    parser.add_argument("--metamath", type=Path, help="MetaMathQA as a JSON file, to train on in place of GSM8K")
    parser.add_argument("--model", help="a hub id or a directory; default: SmolLM2-135M-Instruct, from its package")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["rank32"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150, help="optimiser steps, of four rows each")
    parser.add_argument("--questions", type=int, default=50, help="GSM8K test questions that each side answers")
    parser.add_argument("--new-tokens", type=int, help="tokens of the longest answer; default: as in the checkout")
    parser.add_argument("--max-length", type=int, help="tokens of the longest row; default: as in the checkout")
    parser.add_argument("--held-out", type=int, default=100, help="GSM8K test rows whose loss is compared")
    parser.add_argument("--same-batches", action="store_true", help="peft's script trains on peftlab's batches")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to fill")
    parser.add_argument("--script", nargs=3, type=Path, help=argparse.SUPPRESS)  # this process is to run peft's script
    options = parser.parse_args(arguments)
    if options.script:
        run_script(*options.script, same_batches=options.same_batches)
        return
    if VARIABLE not in os.environ:
        raise SystemExit(f"{VARIABLE}: not set; it names a checkout of peft, with method_comparison in it")
    checkout = Path(os.environ[VARIABLE]).resolve()
    name = Path(options.model).name if options.model else "SmolLM2-135M"
    place = options.dir.resolve() / f"{name}-{options.steps}-steps{'-same-batches' * options.same_batches}"
    model = options.model or str(place / "base")
    if not options.model and not (place / "base").exists():
        code = "import sys; from tests.benchmarks.bench_language import make_base; make_base(sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, place / "base"], check=True, cwd=ROOT)  # its memory is no side's
    check_settings(place / "settings.json", options)
    base = f"{name}, {options.steps} steps{', same batches' * options.same_batches}"
    for row in options.rows:
        settings, config = read_settings(checkout, row)
        settings |= {
            "model_id": model,
            "max_steps": options.steps,
            "eval_steps": options.steps,
            "batch_size_eval": min(10, settings["batch_size_eval"]),
        }
        if options.max_length:
            settings["max_seq_length"] = options.max_length
        if options.new_tokens:
            settings["generation_kwargs"] = settings["generation_kwargs"] | {"max_new_tokens": options.new_tokens}
        size = settings["batch_size"]
        write_rows(place, settings["query_template"], options, model, size, size * options.steps)
        for seed in options.seeds:
            for side in options.sides:
                out = place / f"{side}-{row}-seed{seed}"
                rows = place / f"rows-seed{seed}"
                recipe = place / f"{row}-seed{seed}.yaml"
                ours = our_recipe(
                    model, rows, settings | {"seed": seed}, config, place / f"peftlab-{row}-seed{seed}" / "run"
                )
                recipe.write_text(json.dumps(ours, indent=1))
                if not (out / "result.json").exists():
                    print(f"\n### {row}, seed {seed}: {side}\n", flush=True)
                    if side == "peft":
                        own = settings | {"seed": seed}
                        run_peft(checkout, rows / "script", own, config, out, same_batches=options.same_batches)
                    else:
                        run_peftlab(recipe, out)
                if not (out / "held-out.json").exists():
                    score_held_out(out / ADAPTERS[side], recipe, place / "held-out.jsonl", out / "held-out.json")
                write_page(options.page, checkout, place, (base, row))


def check_settings(file: Path, options: argparse.Namespace) -> None:
    """Refuse settings other than those of the runs that a directory has; they are kept beside the runs.

    Args:
        file: where they are kept. options: of the command.
    """
    names = ("model", "metamath", "questions", "held_out", "new_tokens", "max_length")
    given = {name: str(getattr(options, name)) for name in names}
    kept = json.loads(file.read_text()) if file.exists() else given
    if differ := [f"--{name.replace('_', '-')} {kept[name]}" for name in names if kept[name] != given[name]]:
        raise SystemExit(f"{file.parent} has runs of {', '.join(differ)}; give the same, or another --dir")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(given))


def write_page(page: Path, checkout: Path, place: Path, row: tuple[str, str]) -> None:
    """Write what the sides of a row have measured into the page, read by peft's ``processing.py`` too.

    Args:
        page: the file. checkout: of peft. place: the directory of the runs. row: the base, and one of ``ROWS``.
    """
    found: dict[str, dict[int, Measured]] = {side: {} for side in SIDES}
    files = []
    for side in SIDES:
        seeds = [int(out.name.rpartition("-seed")[2]) for out in place.glob(f"{side}-{row[1]}-seed*")]
        for seed in sorted(seeds):
            out = place / f"{side}-{row[1]}-seed{seed}"
            if measured := read_side(out, side):
                found[side][seed] = measured
                files.append(out / "result.json")
    try:
        read = f"{len(read_by_processing(checkout, files))} of {len(files)}"
    except Exception as error:  # a program of others, which needs pandas; what was measured is written all the same
        read = f"none: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    print(f"{row[0]}, {row[1]}: results that peft's processing.py reads: {read}")
    cpu = describe_cpu()
    machine = f"{cpu.threads} thread{'s' * (cpu.threads > 1)}, {', '.join(cpu.features)}"
    hours = sum(one.total_seconds for of in found.values() for one in of.values()) * cpu.threads / 3600
    text = filled(page.read_text(), *row, found)
    measured_with = f"{datetime.date.today()}, {machine}, {versions(checkout)}"
    page.write_text(with_machine(text, *row, [short_name(cpu), measured_with, f"{hours:.1f}", read]))


if __name__ == "__main__":
    main()
