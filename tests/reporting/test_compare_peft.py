"""The comparison with peft's own training script: its recipe, its page, and both sides for two steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from peftlab.recipe.schema import FinetuneRecipe
from tests.benchmarks.compare_peft import (
    HEAD,
    PAGE,
    VARIABLE,
    Measured,
    filled,
    main,
    our_recipe,
    pairs,
    read_rows,
    with_machine,
)
from tests.benchmarks.measure_systems import rows_of_part

BASE = "SmolLM2-135M, 150 steps"
CONFIG = {
    "r": 32,
    "lora_alpha": 64,
    "lora_dropout": 0.0,
    "use_dora": False,
    "use_rslora": False,
    "target_modules": None,
}
SETTINGS: dict[str, Any] = {
    "max_seq_length": 768, "batch_size": 4, "batch_size_eval": 10, "max_steps": 150, "eval_steps": 150, "seed": 2,
    "grad_norm_clip": 1.0, "optimizer_kwargs": {"lr": 1e-4, "weight_decay": 0.1}, "generation_kwargs": {"max_new_tokens": 300},
}  # fmt: skip


def measured(seconds: float, loss: float, memory: float = 1000.0) -> Measured:
    return Measured(0.02, loss, seconds, 2 * seconds, memory, 7.0, 1_843_200, 150_000)


def test_the_page_keeps_what_is_not_measured() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text, BASE, "rank32", {}) == text, "the tables have other columns than the command writes"
    sides = {
        "peft": {0: measured(300, 1.2), 1: measured(330, 1.3)},
        "peftlab": {0: measured(150, 1.21, 500), 1: measured(110, 1.3, 600)},
    }
    page = filled(text, BASE, "rank32", sides)
    rows = {tuple(row[:3]): dict(zip(HEAD[3:], row[3:], strict=True)) for row in rows_of_part(page, "results")}
    theirs = rows[BASE, "rank32", "peft"]
    assert (theirs["seeds"], theirs["accuracy"], theirs["held-out loss"]) == ("0, 1", "2.0 ± 0.0 %", "1.2500 ± 0.0707")
    assert (theirs["trained parameters"], theirs["tokens"]) == ("1,843,200", "150,000")
    ratios = {tuple(row[:2]): row[2:] for row in rows_of_part(page, "ratios")}
    assert ratios[BASE, "rank32"] == [
        "2.50 (2.00 to 3.00) ×", "0.42 (0.33 to 0.50)", "0.55 (0.50 to 0.60)", "+0.0050 (+0.0000 to +0.0100)",
    ]  # fmt: skip
    more = filled(page, BASE, "rank64", {"peft": {0: measured(200, 1.1)}, "peftlab": {}})
    assert rows_of_part(more, "ratios") == rows_of_part(page, "ratios"), "one side alone has no ratio"
    kept = {tuple(row[:3]): dict(zip(HEAD[3:], row[3:], strict=True)) for row in rows_of_part(more, "results")}
    assert kept.items() > rows.items() and kept[BASE, "rank64", "peft"]["training s"] == "200"
    once = with_machine(more, BASE, "rank32", ["AMD EPYC", "yesterday", "1.2", "4 of 4"])
    twice = with_machine(once, BASE, "rank32", ["Intel Xeon", "today", "1.3", "6 of 6"])
    assert [BASE, "rank32", "Intel Xeon", "today", "1.3", "6 of 6"] in rows_of_part(twice, "where")
    assert "yesterday" not in twice, "the results of the other processor are replaced, too"


def test_the_recipe_has_the_settings_of_the_script(tmp_path: Path) -> None:
    recipe = FinetuneRecipe.model_validate(our_recipe("base", tmp_path, SETTINGS, CONFIG, tmp_path / "run"))
    train, method = recipe.train, recipe.method
    assert (train.lr, train.weight_decay, train.max_grad_norm, train.scheduler) == (1e-4, 0.1, 1.0, "cosine")
    assert (train.max_steps, train.batch_size, train.warmup, train.seed) == (150, 4, 15, 2)
    assert (method.r, method.lora_alpha, method.target_modules) == (32, 64, "query-value")
    assert (recipe.base.dtype, recipe.data.train_on) == ("bf16", "all")
    assert recipe.generate is not None and recipe.generate.metrics == ["gsm8k_peft"]


def test_rows_have_the_columns_and_texts_of_metamath(tmp_path: Path) -> None:
    write_sums(tmp_path, 2, longest=1290)
    first, second = read_rows(tmp_path, None)
    assert first == {"type": "GSM", "query": question(0), "response": answer(0), "original_question": question(0)}
    assert pairs([second], "Q: {query}\nA:") == [{"prompt": f"Q: {question(1)}\nA:", "completion": answer(1)}]
    metamath = tmp_path / "metamath.json"
    metamath.write_text(json.dumps([first | {"other": 1}]))
    assert read_rows(tmp_path, metamath) == [first]


def question(number: int) -> str:
    return f"How much is {number} + 1?"


def answer(number: int) -> str:
    return f"It is one more. #### {number + 1}"


def write_sums(place: Path, count: int, longest: int = 0) -> None:
    """Write short rows under the names of GSM8K's and WikiText's files, and one that the script leaves out."""
    for name in ("gsm8k_train", "gsm8k_test"):
        rows = [{"question": question(number), "answer": answer(number)} for number in range(count)]
        rows += [{"question": "x" * longest, "answer": answer(0)}] if longest else []
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "wikitext2_valid.txt").write_text("A line about a town .\n\nAnother line about a river .\n")


@pytest.mark.slow
def test_both_sides_train_on_the_same_tokens(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """PEFT_CHECKOUT is a checkout of peft, whose script runs."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} does not name a checkout of peft")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_sums(tmp_path, 20)
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    given = ["--model", str(stories), "--lm", str(tmp_path), "--dir", str(tmp_path / "runs"), "--page", str(page)]
    given += [
        "--seeds",
        "1",
        "--steps",
        "2",
        "--questions",
        "2",
        "--held-out",
        "4",
        "--new-tokens",
        "4",
        "--max-length",
        "400",
    ]
    main(given)
    rows = {row[2]: dict(zip(HEAD[3:], row[3:], strict=True)) for row in rows_of_part(page.read_text(), "results")
            if row[0] == f"{stories.name}, 2 steps"}  # fmt: skip
    theirs, ours = rows["peft"], rows["peftlab"]
    assert theirs["tokens"] == ours["tokens"] and theirs["trained parameters"] == ours["trained parameters"]
    assert float(theirs["held-out loss"]) == pytest.approx(float(ours["held-out loss"]), abs=0.05)
    assert float(theirs["file MiB"]) == pytest.approx(float(ours["file MiB"]), rel=0.1)
    assert "processing.py reads: 2 of 2" in capfd.readouterr().out
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("result.json")}
    main(given)
    assert files == {file: file.stat().st_mtime_ns for file in files} and len(files) == 2, "what has finished is kept"
