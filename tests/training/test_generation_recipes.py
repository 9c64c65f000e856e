"""The recipes gsm8k and e2e from start to end: a tiny model, a few rows of the real data, and the run as peft's JSON."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from peftlab.cli.app import app
from peftlab.errors import PeftlabError
from peftlab.pipelines.recipes import run
from peftlab.reporting.comparison import report
from tests.benchmarks.compare_peft import VARIABLE, read_by_processing

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TINY = ["train.max_steps=2", "train.batch_size=4", "train.warmup=0", "generate.max_new_tokens=8"]
KEYS = {
    "run_info": "created_at total_time experiment_name peft_branch peft_worktree_is_dirty train_config peft_config "
    "error_msg",
    "train_config": "model_id dtype max_seq_length batch_size batch_size_eval max_steps eval_steps compile use_gc "
    "query_template seed grad_norm_clip optimizer_type optimizer_kwargs lr_scheduler use_amp autocast_adapter_dtype "
    "generation_kwargs attn_implementation init_kv_cache_prefix",
    "train_info": "accelerator_memory_reserved_avg accelerator_memory_max accelerator_memory_reserved_99th train_time "
    "file_size num_trainable_params num_total_params status metrics",
    "meta_info": "model_info dataset_info package_info system_info pytorch_info",
    "system_info": "system release version machine processor accelerator",
}
EVALUATION = {
    "step", "valid accuracy", "train loss", "train samples", "train time", "eval time", "tokens / sec",
    "mem allocated avg", "mem reserved avg", "elapsed time",
}  # fmt: skip
TEST = {"step", "test accuracy", "train loss", "train samples", "train total tokens", "forgetting"}


def head(source: Path, lines: int, to: Path) -> Path:
    with source.open(encoding="utf-8") as file:
        to.write_text("".join(islice(file, lines)), encoding="utf-8")
    return to


@pytest.fixture(scope="module")
def gsm8k(shared: Path, stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the recipe gsm8k."""
    place = tmp_path_factory.mktemp("gsm8k")
    model = place / "model"
    AutoModelForCausalLM.from_pretrained(stories).save_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    rows = head(shared / "data" / "lm" / "gsm8k_train.jsonl", 24, place / "rows.jsonl")
    changes = [f"model={model}", f"data.path={rows}", "data.validation=6", f"output_dir={place / 'run'}"]
    run("gsm8k", [*TINY, *changes])
    return place / "run"


def test_gsm8k(gsm8k: Path) -> None:
    results = json.loads((gsm8k / "results.json").read_text())
    names = [f"{name}{end}" for name in ("gsm8k", "gsm8k_peft") for end in ("", "_low", "_high")]
    assert list(results["generate"]) == [*names, "ended", "contexts"] == list(results["generate_before"])
    assert results["generate"]["contexts"] == 6
    assert results["seen_examples"] == 8 and results["seen_tokens"] > 8 * 50


def test_e2e(shared: Path, stories: Path, tmp_path: Path) -> None:
    """The files are E2E's own: a prompt, || and one of its texts a line."""
    for package in ("sacrebleu", "nltk", "rouge_score"):
        pytest.importorskip(package)
    data = tmp_path / "e2e"
    data.mkdir()
    head(shared / "data" / "lm" / "e2e_valid.txt", 12, data / "train.txt")
    head(shared / "data" / "lm" / "e2e_valid.txt", 4, data / "valid.txt")
    test = head(shared / "data" / "lm" / "e2e_test.txt", 12, data / "test.txt")
    prompts = {line.split("||")[0] for line in test.read_text().splitlines()}
    assert 1 < len(prompts) < 12, "some rows have the same prompt"
    changes = [f"model={stories}", f"data.path={data}", "method.target_modules=all-linear", "generate.beams=2"]
    results = run("e2e", [*TINY, *changes, f"output_dir={tmp_path / 'run'}", "merge=false"])
    assert results.generate is not None and results.generate_before is not None
    assert results.generate["contexts"] == len(prompts)
    assert {"bleu", "nist", "rouge_l", "rouge_l_low", "cider", "ended"} <= results.generate.keys()
    assert results.metrics.keys() == {"validation", "test"}


class TestPeftsFormat:
    @pytest.fixture(scope="class")
    def written(self, gsm8k: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        out = tmp_path_factory.mktemp("results") / "lora--tiny.json"
        done = CliRunner().invoke(app, ["report", str(gsm8k), "-o", str(out), "--as", "peft"])
        assert done.exit_code == 0, done.output
        return out

    def test_it_has_the_keys_of_a_stored_result(self, written: Path) -> None:
        stored = json.loads(written.read_text())
        assert stored.keys() == {"run_info", "train_info", "meta_info"}
        parts = {**stored, "train_config": stored["run_info"]["train_config"], **stored["meta_info"]}
        for name, keys in KEYS.items():
            assert parts[name].keys() == set(keys.split()), name
        *evaluations, test = stored["train_info"]["metrics"]
        assert evaluations and all(entry.keys() == EVALUATION for entry in evaluations)
        assert test.keys() == TEST
        versions = stored["meta_info"]["package_info"]
        assert {f"{name}-{what}" for name in ("transformers", "peft", "datasets", "bitsandbytes", "torch")
                for what in ("version", "commit-hash")} == versions.keys()  # fmt: skip

    def test_its_values_are_the_runs(self, written: Path, gsm8k: Path) -> None:
        stored, results = json.loads(written.read_text()), json.loads((gsm8k / "results.json").read_text())
        config = stored["run_info"]["train_config"]
        assert config["query_template"] == "user: {query}assistant: "
        assert (config["max_steps"], config["batch_size"], config["lr_scheduler"]) == (2, 4, "cosine")
        assert stored["run_info"]["peft_config"]["peft_type"] == "LORA"
        test = stored["train_info"]["metrics"][-1]
        assert test["test accuracy"] == results["generate"]["gsm8k_peft"]
        assert (test["train samples"], test["train total tokens"]) == (8, results["seen_tokens"])
        assert stored["train_info"]["file_size"] == (gsm8k / "adapter" / "adapter_model.safetensors").stat().st_size

    def test_pefts_own_program_reads_it(self, written: Path) -> None:
        if VARIABLE not in os.environ:
            pytest.skip(f"{VARIABLE} does not name a checkout of peft")
        (row,) = read_by_processing(Path(os.environ[VARIABLE]), [written])
        stored = json.loads(written.read_text())
        assert row["test_accuracy"] == stored["train_info"]["metrics"][-1]["test accuracy"]
        assert (row["peft_type"], row["experiment_name"]) == ("LORA", "lora/run")


def test_the_other_forms(gsm8k: Path, tmp_path: Path) -> None:
    everything = json.loads(report(gsm8k, tmp_path / "run.json", "json").out.read_text())
    assert everything["results"] == json.loads((gsm8k / "results.json").read_text())
    assert everything["recipe"] == (gsm8k / "recipe.yaml").read_text()
    assert report(gsm8k, tmp_path / "run.html").out.read_text() == (gsm8k / "report.html").read_text()


def test_a_report_that_cannot_be_written_is_refused(gsm8k: Path, tmp_path: Path) -> None:
    with pytest.raises(PeftlabError, match="no finished run here"):
        report(tmp_path, tmp_path / "x")
    with pytest.raises(PeftlabError, match=r"--as pefft: one of html, json, peft .did you mean 'peft'"):
        report(gsm8k, tmp_path / "x", "pefft")
    unscored = tmp_path / "run"
    unscored.mkdir()
    for name in ("recipe.yaml", "provenance.json"):
        (unscored / name).write_text((gsm8k / name).read_text())
    results = json.loads((gsm8k / "results.json").read_text())
    del results["generate"]
    (unscored / "results.json").write_text(json.dumps(results))
    with pytest.raises(PeftlabError, match=r"no accuracy on GSM8K; run with generate.metrics=\[gsm8k_peft\]"):
        report(unscored, tmp_path / "x", "peft")
    assert not (tmp_path / "x").exists()
