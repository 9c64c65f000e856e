"""Runs whose merge is planned before they train: of a checkpoint of images and text, and of one that cannot be merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from safetensors.torch import load_file, save_file

from peftlab.errors import PeftlabError
from peftlab.pipelines.evaluate import evaluate
from peftlab.pipelines.recipes import run
from tests.byte_tokens import byte_tokenizer
from tests.composite_models import save_composite


def test_the_text_model_of_a_composite_checkpoint_is_trained_and_merged(tmp_path: Path) -> None:
    base = save_composite("Qwen3_5", tmp_path / "base")
    byte_tokenizer(None, [], bos="<s>", eos="</s>").save_pretrained(base)
    rows = [{"prompt": f"{i} and", "completion": " it was red."} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"model": str(base), "task": "text/completion", "method": {"name": "lora", "r": 2},
              "data": {"path": str(tmp_path / "rows.jsonl"), "validation": 4}, "output_dir": str(tmp_path / "run"),
              "train": {"max_steps": 2, "batch_size": 4, "max_length": 32, "lr": 0.01}}  # fmt: skip
    results = run(tiny.write_recipe(recipe, tmp_path / "recipe.yaml"))
    assert results.merge is not None and results.merge.max_logit_difference < 1e-4
    merged = load_file(tmp_path / "run" / "merged" / "model.safetensors")
    assert merged.keys() == load_file(base / "model.safetensors").keys()
    stored = json.loads((tmp_path / "run" / "results.json").read_text())
    for place in (tmp_path / "run", tmp_path / "run" / "merged"):
        assert evaluate(place)["validation"]["loss"] == pytest.approx(stored["score"], rel=1e-4)


def test_what_would_stop_the_merge_stops_the_run_before_it_trains(rows: Path, tmp_path: Path) -> None:
    base = tiny.save_model(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    twice = next(key for key in tensors if key.endswith("query.weight"))
    save_file(tensors, base / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file({twice: tensors[twice]}, base / "model-00002-of-00002.safetensors", {"format": "pt"})
    (base / "model.safetensors").unlink()
    index = dict.fromkeys(tensors, "model-00001-of-00002.safetensors") | {twice: "model-00002-of-00002.safetensors"}
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    recipe = tiny.recipe(base, rows, tmp_path / "run", max_steps=1)
    tiny.run(recipe)  # without a merge it can be trained
    recipe |= {"merge": True, "output_dir": str(tmp_path / "other")}
    with pytest.raises(PeftlabError, match=r"^merge: .*duplicate key"):
        tiny.run(recipe)
    assert not (tmp_path / "other").exists()
