"""A run's ``results.json`` as text: labelled numbers, for all pages and tables, the terminal's table, model cards."""

from __future__ import annotations

import json
import math
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from peftlab.errors import PeftlabError, reason
from peftlab.files import Json, read_text
from peftlab.progress import duration, per_second
from peftlab.tasks.table import HIGH, LOW
from peftlab.untyped import JsonObject

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

    from peftlab.checkpoints.merge_plan import Training
    from peftlab.tasks.batches import SplitRows

Results = Mapping[str, object]
"""The contents of ``results.json``; its keys are the fields of ``FinetuneResults`` and ``DraftResults``."""

_CONSTANT_SCORED = frozenset({"pearson", "spearman"})


def check_results(results: Results, run: Path) -> None:
    """Raise ``PeftlabError`` where the results of a run lack what every run has.

    Args:
        results: its ``results.json``. run: its directory.
    """
    missing = [key for key in ("task", "method", "metric", "score") if key not in results]
    if missing:
        raise PeftlabError(f"{run / 'results.json'}: no {', '.join(missing)}")


def stored_recipe(run: Path) -> tuple[str, dict[str, Json]]:
    """Return the recipe that a run's directory has, as text and as values.

    Raises:
        PeftlabError: there is none, or it is damaged.
    """
    from ruamel.yaml import YAML, YAMLError

    file = run / "recipe.yaml"
    text = read_text(file)
    try:
        values = YAML(typ="safe").load(text)
    except YAMLError as error:
        raise PeftlabError(f"{file}: damaged ({reason(error)})") from None
    if not isinstance(values, dict):
        raise PeftlabError(f"{file}: damaged (no keys in it)")
    return text, values


def number(value: object) -> str:
    """Return ``value`` as a person reads it: ``294,912``, ``0.8725``, ``3.1e-06``, ``yes``, ``none``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value and abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.0f}"


def setting(value: object) -> str:
    """Return a recipe's value as YAML has it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def as_float(value: object) -> float | None:
    """Return ``value`` if it is a number, else None."""
    return value if isinstance(value, int | float) else None


def required(results: Results, key: str) -> float:
    """Return the number of a key; ``PeftlabError`` where there is none.

    Args:
        results: the contents of ``results.json``.
        key: the number's key.
    """
    value = as_float(results.get(key))
    if value is None:
        raise PeftlabError(f"results.json of {results.get('task')}: {key} is not a number")
    return value


def percent(share: float) -> str:
    """Return a share of 1 with three significant digits: ``0.00236`` gives ``0.236 %``."""
    return f"{100 * share:.3g} %" if abs(share) < 1 else f"{100 * share:.0f} %"


def size(count: float) -> str:
    """Return a number of bytes in its unit: ``308306432`` gives ``308 MB``, ``2180000000`` gives ``2.2 GB``."""
    return _in_unit(count, {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})


def flops(count: float) -> str:
    """Return a number of floating-point operations in its unit: ``8907034558464`` gives ``8.9 TFLOPs``."""
    return _in_unit(count, {"PFLOPs": 1e15, "TFLOPs": 1e12, "GFLOPs": 1e9, "MFLOPs": 1e6, "FLOPs": 1.0})


def _in_unit(count: float, units: Mapping[str, float]) -> str:
    """Return a number in the largest unit that it has one of, below 100 with a decimal."""
    unit = next((unit for unit, factor in units.items() if count >= factor), list(units)[-1])
    value = count / units[unit]
    return f"{value:.{1 if value < 100 and units[unit] > 1 else 0}f} {unit}"


_COSTS = {
    "forward_flops": "forward",
    "backward_flops": "backward",
    "kept_bytes": "kept for backward",
    "optimizer_bytes": "gradients and optimiser",
    "kv_bytes_per_token": "KV cache per token",
}


def costs(cost: Mapping[str, object]) -> dict[str, str]:
    """Return label and text of each value of a ``Cost``; one that is None has no row."""
    known = {name: (key, value) for key, name in _COSTS.items() if (value := as_float(cost.get(key))) is not None}
    return {name: flops(value) if key.endswith("flops") else size(value) for name, (key, value) in known.items()}


def threads(count: object) -> str:
    """Return a number of threads: ``1 thread``, ``2 threads``."""
    return f"{count} thread{'' if count == 1 else 's'}"


def decoding_after_training(results: Results) -> Mapping[str, object]:
    """Return ``decoding.after`` of a draft run; empty of any other run."""
    decoding = results.get("decoding")
    after = decoding.get("after") if isinstance(decoding, Mapping) else None
    return after if isinstance(after, Mapping) else {}


def _reals(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values that are numbers."""
    return {name: known for name, value in values.items() if (known := as_float(value)) is not None}


def flatten(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield ``(dotted key, leaf)`` of nested mappings; a list of plain values is one comma-joined leaf.

    Args:
        value: nested mappings, lists and plain values.
        prefix: of the dotted keys.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple):
        yield prefix, ", ".join(map(str, value)) or "none"
    else:
        yield prefix, value


def label(key: str) -> str:
    """Return a key as words: ``max_logit_difference`` gives ``max logit difference``."""
    return key.replace("_", " ").replace(".", " / ")


def title(key: str) -> str:
    """Return a key as words that begin with a capital letter."""
    words = label(key)
    return words[:1].upper() + words[1:]


def baseline_name(metric: str) -> str:
    """Return what the baseline of ``metric`` is called: the majority class, a constant for regression, the draft
    or language model before training."""
    if metric in ("acceptance", "loss"):
        return "before training"
    return "constant baseline" if metric in _CONSTANT_SCORED else "majority baseline"


@dataclass(frozen=True)
class Score:
    """A metric of a split.

    Attributes:
        name: in words, with the split.
        split: the split's key.
        metric: its key.
        value: at the best evaluation.
        baseline: of the first split alone.
        last: at the last evaluation.
    """

    name: str
    split: str
    metric: str
    value: float
    baseline: float | None
    last: float | None


def scores(results: Results) -> list[Score]:
    """Return every number in ``metrics``."""
    baselines, last = (dict(flatten(results.get(f"{name}_metrics") or {})) for name in ("baseline", "last"))
    first, rows = _first_split(results), []
    for place, value in flatten(results.get("metrics") or {}):
        split, _, metric = place.rpartition(".")
        known = baselines.get(place, baselines.get(metric) if split == first else None)
        if (score := as_float(value)) is not None:
            name = score_name(metric, split, results)
            rows.append(Score(name, split, metric, score, as_float(known), as_float(last.get(place))))
    return rows


def deciding_name(results: Results) -> str:
    """Return the name of the headline's score: the deciding metric on the first split."""
    return score_name(str(results["metric"]), _first_split(results), results)


def other_scores(results: Results) -> list[Score]:
    """Return ``scores`` without the headline's."""
    return [score for score in scores(results) if score.name != deciding_name(results)]


def _first_split(results: Results) -> str:
    return next((place.rpartition(".")[0] for place, _ in flatten(results.get("metrics") or {})), "")


def score_name(metric: str, split: str, results: Results) -> str:
    """Return a metric's name in words: ``accuracy (validation)``, ``f1, mean over classes (validation)``.

    Args:
        metric: the metric's key.
        split: the split's name.
        results: the contents of ``results.json``.
    """
    classes = results.get("classes")
    name = label(metric)
    if metric == "f1" and isinstance(classes, Mapping) and len(classes) > 1:
        name += f" of {list(classes)[1]}" if str(results.get("task")).startswith("glue/") else ", mean over classes"
    return f"{name} ({label(split)})" if split else name


def gain(results: Results) -> str | None:
    """Return the signed distance of score to baseline, or None where there is no baseline."""
    score, baseline = as_float(results.get("score")), as_float(results.get("baseline_score"))
    return None if score is None or baseline is None else f"{score - baseline:+.4f}"


def with_intervals(values: Mapping[str, object]) -> dict[str, str]:
    """Return each metric's value as text, with its 95 % interval where ``values`` has one."""
    texts = {}
    for name, value in values.items():
        if not name.endswith((LOW, HIGH)):
            low, high = (values.get(name + end) for end in (LOW, HIGH))
            texts[name] = number(value) + (f" (95 % {number(low)} to {number(high)})" if low is not None else "")
    return texts


def answer_scores(results: Results) -> dict[str, str]:
    """Return label and value of each metric of the generated answers, after training and before."""
    before = dict(flatten(results.get("generate_before") or {}))
    return {
        label(name): text + (f"; before training {number(before[name])}" if name in before else "")
        for name, text in with_intervals(dict(flatten(results.get("generate") or {}))).items()
    }


@dataclass(frozen=True)
class Headline:
    """What a run is about: its score, or of a draft how much faster decoding is with it.

    Attributes:
        name: what was measured.
        value: the number.
        rest: what follows it in the same line.
        beneath: label and text of what it is to be read with.
    """

    name: str
    value: str
    rest: str
    beneath: dict[str, str]


def headline(results: Results, times: str = "x") -> Headline:
    """Return the headline of a run.

    Args:
        results: the contents of ``results.json``.
        times: the sign of a factor; the terminal's is ASCII.
    """
    metric, baseline = str(results["metric"]), results.get("baseline_score")
    score, after = number(results["score"]), decoding_after_training(results)
    if (speedup := as_float(after.get("speed_up"))) is None:
        compared = {} if baseline is None else {baseline_name(metric): f"{number(baseline)} ({gain(results)})"}
        return Headline(label(metric), score, "", compared)
    interval, conditions = after.get("speed_up_interval"), after.get("conditions")
    ends = f" ({interval[0]:.2f} to {interval[1]:.2f})" if isinstance(interval, list | tuple) else ""
    beneath = {label(metric): score if baseline is None else f"{score} ({number(baseline)} before training)"}
    if isinstance(conditions, Mapping) and conditions.get("doubts"):
        beneath["uncertain"] = f"the machine was busy: {', '.join(map(str, conditions['doubts']))}"
    return Headline("decoding with the draft", f"{speedup:.2f}{times}", f"plain decoding{ends}", beneath)


def summary(results: Results, times: str = "x") -> dict[str, str]:
    """Return label and text of what is asked first about a run, beside its headline; all else is in results.json.

    Args:
        results: the contents of ``results.json``.
        times: the sign of a factor; the terminal's is ASCII.
    """
    own = _draft_summary(results, times) if "draft" in results else _finetune_summary(results, times)
    last = dict(flatten(results.get("last_metrics") or {})).get(f"{_first_split(results)}.{results['metric']}")
    cpu, cost = _mapping(results.get("cpu")), _reals(_mapping(results.get("cost")))
    passes = cost.get("forward_flops", 0) + cost.get("backward_flops", 0)
    memory = {"": results.get("peak_rss_mb"), " on the GPU": results.get("peak_gpu_mb")}
    trained, total, seconds, whole, speed = (
        as_float(results.get(key))
        for key in ("trainable_parameters", "total_parameters", "train_seconds", "total_seconds", "tokens_per_second")
    )
    rows = {
        **own,
        "parameters": ""
        if trained is None or total is None
        else f"{trained:,} of {total:,} trained ({percent(trained / max(total, 1))})",
        "best step": _joined(
            f"{number(results['best_step'])} of {number(results['steps'])}"
            if results.get("steps") and "best_step" in results
            else "",
            f"{number(last)} at the last" if last not in (None, results["score"]) else "",
            f"learning rate {rate:g}" if (rate := as_float(results.get("lr"))) is not None else "",
        ),
        "training": _joined(
            duration(seconds) if seconds is not None else "",
            f"{per_second(speed)} tokens/s" if speed is not None else "",
            f"{duration(whole)} in all" if whole else "",
        ),
        "cost": _joined(
            flops(passes) if passes else "",
            *(f"{size(value * 2**20)} of memory{place}" for place, value in _reals(memory).items()),
        ),
        "processor": f"{cpu['name']}, {threads(cpu.get('threads'))}" if cpu else "",
    }
    return {name: text for name, text in rows.items() if text}


def _finetune_summary(results: Results, times: str) -> dict[str, str]:
    """Return the rows of a finetuned model: other scores, answers, data, the merge."""
    others: dict[str, list[str]] = {}
    for score in other_scores(results):
        others.setdefault(score.split, []).append(f"{label(score.metric)} {number(score.value)}")
    merge, latency, said, losses, chosen = (
        _mapping(results.get(key)) for key in ("merge", "latency", "sample", "merge_losses", "selection")
    )
    truncated = sum(int(_mapping(rows).get("truncated", 0)) for rows in _mapping(results.get("splits")).values())
    left_out, agreement = sum(_mapping(results.get("left_out")).values()), as_float(merge.get("argmax_agreement"))
    return {
        "other metrics": _joined(*others.pop(_first_split(results), [])),
        "other splits": "; ".join(f"{label(split)}: {', '.join(texts)}" for split, texts in others.items()),
        "generated answers": "; ".join(f"{name} {text}" for name, text in answer_scores(results).items()),
        **{f"answer {when} training": textwrap.shorten(text, 100, placeholder=" ...") for when, text in said.items()},
        "trained on": _joined(
            *(f"{count:,} {unit}" for unit in ("examples", "tokens") if (count := results.get(f"seen_{unit}"))),
            f"{chosen['examples']:,} of them chosen" if chosen else "",
            f"{left_out:,} left out" if left_out else "",
            f"{truncated:,} rows truncated" if truncated else "",
        ),
        "merged and unmerged": _joined(
            f"logits within {number(merge.get('max_logit_difference'))}" if merge else "",
            f"{percent(agreement)} of predictions equal" if agreement is not None else "",
        ),
        "loss by merge": _joined(*(f"{name} {number(loss)}" for name, loss in losses.items())),
        "time of a forward pass": _joined(*(f"{value:.2f}{times} {name}" for name, value in latency.items()))
        + (" (base: 1)" if latency else ""),
    }


def _draft_summary(results: Results, times: str) -> dict[str, str]:
    """Return the rows of a draft: its decoding, what it is and what it learnt from."""
    after, decoding = decoding_after_training(results), _mapping(results.get("decoding"))
    first, metrics = _first_split(results), _mapping(results.get("metrics"))
    merge, vocabulary, repeated, merged, gained, beside = (
        _mapping(values)
        for values in (
            *(results.get(key) for key in ("merge", "vocabulary", "repetition")),
            _mapping(results.get("merged_metrics")).get(first),
            *(after.get(key) for key in ("gain", "beside")),
        )
    )
    speeds = {"with the draft": after.get("tokens_per_second"), "plain": after.get("plain_tokens_per_second")}
    differing = after.get("divergences")
    near = [_mapping(at).get("near_tie") for at in differing] if isinstance(differing, list) else []
    outputs = "" if "lossless" not in after else "equal outputs" if after["lossless"] else f"{len(near)} outputs differ"
    outputs += "" if not near else " at near ties" if all(near) else f", {near.count(True)} at near ties"
    tau, best, seen = map(as_float, (after.get("block_efficiency"), gained.get("best_gain"), repeated.get("seen")))
    longest, counts = gained.get("best_gamma"), {"answers": "train_examples", "tokens": "learnt_tokens"}
    return {
        "other splits": _joined(
            *(
                f"{label(name)} {number(_mapping(rates).get('acceptance'))}"
                for name, rates in metrics.items()
                if name != first
            )
        ),
        "tokens/s": _joined(*(f"{per_second(speed)} {name}" for name, speed in _reals(speeds).items()), outputs),
        "tokens per target step": _joined(
            "" if tau is None else f"{tau:.2f} with {decoding.get('gamma')} drafted",
            "" if best is None else f"best length {longest} (about {best:.2f}{times})" if longest else "no length pays",
        ),
        "other drafters": _joined(*(f"{name} {speedup:.2f}{times}" for name, speedup in _reals(beside).items())),
        "vocabulary": f"{vocabulary['tokens']:,} tokens, acceptance at most {vocabulary['ceiling']:.3f}"
        if vocabulary
        else "",
        "learnt from": _joined(*(f"{count:,} {what}" for what, key in counts.items() if (count := results.get(key)))),
        "seen in training": "" if seen is None else f"{percent(seen)} of the held-out 8-grams",
        "merged draft": _joined(
            f"acceptance {number(merged.get('acceptance'))}" if merged else "",
            f"logits within {number(merge.get('max_logit_difference'))}" if merge else "",
        ),
    }


def _joined(*parts: str) -> str:
    """Return the parts that are not empty, with commas."""
    return ", ".join(filter(None, parts))


def _mapping(value: object) -> JsonObject:
    """Return a value that is an object of JSON; an empty one for any other."""
    return value if isinstance(value, Mapping) else {}


# --- Classes.

Counts = Mapping[str, Mapping[str, int]]
"""Class name to its number of examples by split, as ``classes`` of ``results.json``."""

FEW = 5
_SHOWN = 20


def found_lines(found: Mapping[str, Sequence[str] | str]) -> list[str]:
    """Return a line for each key of the ``data`` section that the recipe leaves to the columns' usual names.

    Args:
        found: key to the column, or columns, that stand for it.
    """
    return [
        f"data.{key}: not given; column {columns if isinstance(columns, str) else ' and '.join(columns)} is used"
        for key, columns in found.items()
    ]


def data_lines(
    classes: Counts,
    left_out: Mapping[str, int],
    repeated: Mapping[str, int],
    splits: Mapping[str, SplitRows],
    max_length: int,
) -> list[str]:
    """Return the lines printed about the data before training: counts, rows left out or truncated, warnings.

    Args:
        classes: class name to its number of examples by split.
        left_out: reason to the number of rows left out.
        repeated: split to the number of its rows whose text a training row has too.
        splits: split to its rows, and what ``max_length`` does to them.
        max_length: ``train.max_length``.
    """
    header, *rows = class_rows(classes, _SHOWN)
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    table = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in (header, *rows)
    ]
    long = {reason for each in splits.values() for reason in each.left_out}
    return [
        *(table if classes else []),
        *length_lines(splits, max_length),
        *(f"left out: {count:,} rows ({reason})" for reason, count in left_out.items() if reason not in long),
        *(f"warning: {text}" for text in class_warnings(classes)),
        *(
            f"warning: {split} rows with the text of a training row: {count:,}; scores may be too high"
            for split, count in repeated.items()
        ),
    ]


def length_lines(splits: Mapping[str, SplitRows], max_length: int) -> list[str]:
    """Return the lines on rows that are left out or truncated as ``train.max_length`` says.

    Args:
        splits: split to its rows; the name may be empty where there are no splits.
        max_length: ``train.max_length``.
    """

    def parts(counts: Mapping[str, tuple[int, int]]) -> str:
        names = {split: f"{'training' if split == 'train' else split} rows".lstrip() for split in counts}
        return " and ".join(f"{n:,} of {of:,} {names[split]}" for split, (n, of) in counts.items() if n)

    lines = []
    for why in dict.fromkeys(why for each in splits.values() for why in each.left_out):
        counts = {
            split: (each.left_out.get(why, 0), each.rows + sum(each.left_out.values()))
            for split, each in splits.items()
        }
        lines.append(f"left out: {parts(counts)} ({why}, {max_length:,} tokens)")
    if cut := parts({split: (each.truncated, each.rows) for split, each in splits.items()}):
        longest = max(each.longest for each in splits.values())
        lines.append(
            f"truncated: {cut} are longer than train.max_length ({max_length:,} tokens); the longest has {longest:,}"
        )
    return lines


def class_rows(classes: Counts, most: int) -> list[tuple[str, ...]]:
    """Return a header and a row for each of the first ``most`` classes: name and count by split.

    Args:
        classes: class name to its number of examples by split.
        most: how many classes are listed.
    """
    splits = list(next(iter(classes.values()), {}))
    rows = [
        (_one_line(name), *(f"{counts.get(split, 0):,}" for split in splits))
        for name, counts in list(classes.items())[:most]
    ]
    rest = len(classes) - most
    more = [(f"and {rest:,} more", *("" for _ in splits))] if rest > 0 else []
    return [("class", *splits), *rows, *more]


def class_warnings(classes: Counts) -> list[str]:
    """Return warnings: classes with few training rows, and names that differ in case or spaces alone."""
    few = [
        f"{_one_line(name)} ({counts['train']})" for name, counts in classes.items() if counts.get("train", FEW) < FEW
    ]
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault("".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(repr(name))
    doubles = [", ".join(names[:_SHOWN]) for names in alike.values() if len(names) > 1]
    return [
        *([f"fewer than {FEW} training rows: {_first_of(few)}"] if few else []),
        *(f"class names that differ only in case or spaces: {names}" for names in doubles[:_SHOWN]),
    ]


def class_counts(results: Results) -> Counts:
    """Return ``classes`` of ``results.json``; empty for regression and where it is missing."""
    classes = results.get("classes")
    return classes if isinstance(classes, Mapping) else {}


def class_score_rows(results: Results, most: int) -> list[tuple[str, ...]]:
    """Return a header and precision, recall, F1 and support of each of the first ``most`` classes; else nothing.

    Args:
        results: the contents of ``results.json``.
        most: how many classes are listed.
    """
    scores = results.get("by_class")
    if not isinstance(scores, Mapping):
        return []
    rows = [
        (_one_line(name), *(number(float(row[key])) for key in ("precision", "recall", "f1")), f"{row['support']:,}")
        for name, row in list(scores.items())[:most]
    ]
    rest = len(scores) - most
    more = [(f"and {rest:,} more", "", "", "", "")] if rest > 0 else []
    return [("class", "precision", "recall", "F1", "support"), *rows, *more]


@dataclass(frozen=True)
class Confusion:
    """Examples by [class of the label][class predicted]; ``names`` in the order of both."""

    names: list[str]
    counts: list[list[int]]

    def share(self, row: int, column: int) -> float:
        """Return the share of a label's examples that were predicted as a class.

        Args:
            row: place of the label's class.
            column: place of the predicted class.
        """
        return self.counts[row][column] / max(1, sum(self.counts[row]))


def confusion(results: Results, most: int) -> Confusion | None:
    """Return the confusion matrix; None where there is none, or of more classes than ``most``.

    Args:
        results: the contents of ``results.json``.
        most: classes of a matrix at most.
    """
    counts, scores = results.get("confusion"), results.get("by_class")
    if not isinstance(counts, list) or not isinstance(scores, Mapping) or len(counts) > most:
        return None
    return Confusion([_one_line(name) for name in scores], counts)


def baseline_remark(results: Results) -> str | None:
    """Return a sentence where the score equals that of always giving the same answer, else None."""
    score, baseline = as_float(results.get("score")), as_float(results.get("baseline_score"))
    if "classes" not in results or score is None or baseline is None or not math.isclose(score, baseline):
        return None
    metric = str(results["metric"])
    return f"The {label(metric)} equals the {baseline_name(metric)} (one answer for all)."


def _first_of(items: list[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")


def _one_line(name: str) -> str:
    """Return a class name on one line, shortened where it is long."""
    line = " ".join(name.split())
    return line if len(line) <= 40 else f"{line[:37]}..."


# --- The terminal: ASCII tables that fit into 80 columns and into a log file.
_TERMINAL_CLASSES, _TERMINAL_CONFUSED = 30, 8  # classes in the table of scores, and in the confusion matrix


def results_title(results: Results) -> str:
    """Return what was trained: ``text/classification, lora``; a draft's kind, and its method where it has one."""
    return ", ".join(str(name) for key in ("task", "draft", "method") if (name := results.get(key)) is not None)


def results_table(results: Results) -> Table:
    """Return the headline of ``results.json``, what it compares with, and the summary."""
    table = plain_table(title=results_title(results))
    table.show_header = table.show_edge = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    first = headline(results)
    table.add_row(Text(first.name), Text(f"{first.value} {first.rest}".strip(), style="bold green"))
    for name, text in {**first.beneath, **summary(results)}.items():
        table.add_row(Text(name), Text(text))
    return table


def class_tables(results: Results) -> list[Table]:
    """Return the scores by class and, for a few classes but more than two, the confusion matrix."""
    tables = []
    if header_and_rows := class_score_rows(results, _TERMINAL_CLASSES):
        tables.append(_table_of_cells("by class", header_and_rows))
    if (matrix := confusion(results, _TERMINAL_CONFUSED)) is not None and len(matrix.names) > 2:
        header = ("label, predicted:", *matrix.names)
        rows = [(name, *map("{:,}".format, row)) for name, row in zip(matrix.names, matrix.counts, strict=True)]
        tables.append(_table_of_cells("confusion", [header, *rows]))
    return tables


def _table_of_cells(title: str, rows: list[tuple[str, ...]]) -> Table:
    """Return a table whose rows are a name and then numbers; the first row is the header."""
    table = plain_table(title=title)
    table.show_edge = False
    for i, column in enumerate(rows[0]):
        table.add_column(Text(column), justify="right" if i else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table


def print_results(results: Results, run_dir: str | Path) -> None:
    """Print the table of results and, on lines that are never broken, a remark on the score and the run directory.

    Args:
        results: the contents of ``results.json``.
        run_dir: the run's directory.
    """
    console = Console()
    for table in (results_table(results), *class_tables(results)):
        console.print(table)
        console.print()
    remark = baseline_remark(results)
    if remark:
        console.print(Text(remark), soft_wrap=True)
    console.print(Text(f"run directory: {run_dir}"), soft_wrap=True)


def trainable_line(trainable: int, total: int) -> str:
    """Return peft's ``trainable params: 294,912 || all params: 124,940,546 || trainable%: 0.2360``.

    Args:
        trainable: number of trainable parameters.
        total: number of all parameters.
    """
    share = 100 * trainable / total if total else 0.0
    return f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {share:.4f}"


def score_lines(scores: Mapping[str, Mapping[str, float]], examples: Mapping[str, int]) -> list[str]:
    """Return a line of metrics for each split, with the number of examples that they are computed on.

    Args:
        scores: metrics by split.
        examples: number of examples by split.
    """
    lines = []
    for name, metrics in scores.items():
        what = f"{name} ({examples[name]:,} examples)" if name in examples else name
        what = "latency, the base model's being 1" if name == "latency" else what
        lines.append(f"{what}: " + ", ".join(f"{key} {text}" for key, text in with_intervals(metrics).items()))
    return lines


def plain_table(title: str) -> Table:
    """Return an empty table with a title, in the style of all of them."""
    return Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


# --- Model cards: an adapter's README.md, and the section on training of a merged model's.
_HUB_METRICS = {"pearson": "pearsonr", "spearman": "spearmanr"}
_CARD_CLASSES = 50  # rows of the table of classes


@dataclass(frozen=True)
class CardInfo:
    """The contents of a run that both cards are made of.

    Attributes:
        name: the model's name or directory, used as title and in the loading code.
        base_model: the base's reference as in the recipe.
        revision: its git revision.
        results: the contents of ``results.json``.
        recipe: the resolved recipe's YAML text.
        base_license: the base's licence, as its own card calls it.
        dataset: reference of the data: a hub id or a path.
        split: the split the results are of.
        labels: class names in label order; empty for regression; None where they are not known or there are none.
        auto_class, pipeline: of transformers, for such a model.
    """

    name: str
    base_model: str
    results: Results
    recipe: str
    revision: str | None = None
    base_license: str | None = None
    dataset: str | None = None
    split: str = "validation"
    labels: Sequence[str] | None = None
    auto_class: str = "AutoModelForSequenceClassification"
    pipeline: str = "text-classification"

    @property
    def method(self) -> str:
        """How parameters trained."""
        return str(self.results["method"])

    @property
    def metric(self) -> str:
        """The deciding metric."""
        return str(self.results["metric"])


def adapter_card(info: CardInfo) -> str:
    """Return the README.md of an adapter directory.

    A LoRA adapter is in peft's format and says ``library_name: peft``; any other is loaded by peftlab.
    """
    from peftlab.checkpoints.merge import code, fence, hub_id, model_card

    if info.method == "lora":
        library, importing, load = "peft", "from peft import PeftModel", "PeftModel.from_pretrained"
    else:
        importing, load = "from peftlab.checkpoints.adapter import load_adapter", "load_adapter"
        library = "peftlab"
    kind = "ImageProcessor" if info.pipeline == "image-classification" else "Tokenizer"
    name = {"ImageProcessor": "image_processor", "Tokenizer": "tokenizer"}[kind]
    imports, base = [], json.dumps(info.base_model)
    if info.base_model.startswith("package:"):
        imports, base = ["from peftlab.references import locate"], f"locate({base})"
    classes = "" if info.labels is None else f", num_labels={max(len(info.labels), 1)}"
    revision = f", revision={json.dumps(info.revision)}" if info.revision else ""
    lines = [
        importing,
        *imports,
        f"from transformers import {info.auto_class}, Auto{kind}",
        "",
        f"base = {base}",
        f"{name} = Auto{kind}.from_pretrained(base{revision})",
        f"model = {info.auto_class}.from_pretrained(base{classes}{revision})",
        f"model = {load}(model, {json.dumps(info.name)})",
    ]
    trained = training_section(info)
    data = {
        "base_model": hub_id(info.base_model),
        "base_model_relation": "adapter",
        "library_name": library,
        **trained.data,
    }
    parts = [
        f"A {info.method} adapter of {code(info.base_model)}, {trained.summary} with peftlab.",
        *trained.parts,
        "## Use\n\n" + fence("\n".join(lines), "python"),
    ]
    return model_card(data, trained.name, parts, recipe=info.recipe, license_=info.base_license)


def training_section(info: CardInfo) -> Training:
    """Return the section on training of the card of a run's adapter or of its merged model."""
    from huggingface_hub import ModelCardData

    from peftlab.checkpoints.merge import code, hub_id, table
    from peftlab.checkpoints.merge_plan import Training

    task, dataset, score = str(info.results["task"]), hub_id(info.dataset), info.results["score"]
    evaluated = _eval_results(info, dataset)
    classes = class_rows(class_counts(info.results), _CARD_CLASSES)
    data = ModelCardData(
        pipeline_tag=info.pipeline,
        tags=list(dict.fromkeys(["peftlab", info.method, task.partition("/")[0]])),
        datasets=[dataset] if dataset else None,
        metrics=list(dict.fromkeys(result.metric_type for result in evaluated)) or None,
        eval_results=evaluated or None,
        model_name=Path(info.name).name,
    )
    baseline = info.results.get("baseline_score")
    compared = [
        (label(info.metric), number(score), "" if baseline is None else number(baseline)),
        *(
            (other.name, number(other.value), "" if other.baseline is None else number(other.baseline))
            for other in other_scores(info.results)
        ),
    ]
    parts = [
        f"## Results\n\n{table(('metric', 'score', baseline_name(info.metric)), compared)}",
        *([table(("generated answers", ""), rows.items())] if (rows := answer_scores(info.results)) else []),
        table(("run", ""), summary(info.results).items()),
        *([table(classes[0], classes[1:])] if len(classes) > 1 else []),
    ]
    return Training(info.name, f"finetuned on {code(task)}", parts, data.to_dict())


def _eval_results(info: CardInfo, dataset: str | None) -> list[EvalResult]:
    """Return the finite scores as the hub's client represents them; ``dataset``: its hub id."""
    from huggingface_hub import EvalResult

    task = str(info.results["task"])
    return [
        EvalResult(
            task_type=info.pipeline,
            dataset_type=dataset or "text",
            dataset_name=task,
            dataset_config=task.partition("/")[2] if task.startswith("glue/") else None,
            dataset_split=info.split,
            metric_type=_HUB_METRICS.get(metric := name.rpartition(".")[2], metric),
            metric_value=value,
            metric_name=label(name),
        )
        for name, value in _scores(info).items()
        if math.isfinite(value)
    ]


def _scores(info: CardInfo) -> dict[str, float]:
    """Return the metrics by name, the deciding one first."""
    named = {info.metric: info.results["score"]} | dict(flatten(info.results.get("metrics") or {}))
    return {key: known for key, value in named.items() if (known := as_float(value)) is not None}
