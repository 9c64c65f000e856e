"""Image classification from a recipe: train, save, merge, predict, resume; transformers and peft load what is saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification

import peftlab
from peftlab.errors import PeftlabError
from peftlab.pipelines.evaluate import evaluate
from peftlab.pipelines.predict import predict_file
from peftlab.pipelines.preview import example_inputs, show_examples
from peftlab.pipelines.recipes import resume
from peftlab.recipe.schema import FinetuneRecipe
from peftlab.tasks.images import read_image
from tests.image_models import CLASSIFIERS, save_classifier, save_digits


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_digits(tmp_path_factory.mktemp("images") / "digits")


def recipe(model: Path, digits: Path, run: Path, **method: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "task": "image/classification",
        "data": {"path": str(digits), "validation": 30},
        "method": {"name": "lora", "r": 4, "lora_dropout": 0.1, **method},
        "train": {"epochs": 6, "batch_size": 8, "lr": 1e-2, "warmup": 0.0, "eval_every": 20},
        "output_dir": str(run),
    }


@pytest.fixture(scope="module", params=CLASSIFIERS)
def learnt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Any:
    """The recipe of a run, its directory and what it ended with."""
    place = tmp_path_factory.mktemp(request.param)
    values = recipe(save_classifier(request.param, place / "model"), digits, place / "run")
    return values, place / "run", tiny.run(values)


def test_what_can_be_learnt_is_learnt_and_taken_apart(learnt: Any) -> None:
    _, run, results = learnt
    assert results["score"] > results["baseline_score"] + 0.2
    assert results["merge"]["examples"] == 16 and results["merge"]["max_logit_difference"] < 1e-4
    stored = json.loads((run / "results.json").read_text())
    assert set(stored["by_class"]) == {"0", "1", "4"} and len(stored["confusion"]) == 3
    assert Path(stored["hardest"][0]["text"]).is_file()
    targets = json.loads((run / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert {name.rpartition(".")[2] for name in targets} in ({"q_proj", "v_proj"}, {"pwconv1", "pwconv2"})
    assert evaluate(run)["validation"] == pytest.approx(results["metrics"]["validation"], rel=1e-4)


def test_transformers_and_peft_load_what_is_saved(learnt: Any, digits: Path) -> None:
    values, run, _ = learnt
    paths = [str(path) for path in sorted(digits.rglob("*.png"))[::10]]
    found = peftlab.predict(run, paths)
    assert found.classes == ("0", "1", "4") and set(found.answers) <= set(found.classes)
    processor = AutoImageProcessor.from_pretrained(run / "adapter", backend="pil")
    inputs = processor(images=[read_image(path) for path in paths], return_tensors="pt")
    base = AutoModelForImageClassification.from_pretrained(values["model"], num_labels=3)
    for model in (
        AutoModelForImageClassification.from_pretrained(run / "merged"),
        peft.PeftModel.from_pretrained(base, str(run / "adapter")),
    ):
        with torch.no_grad():
            logits = model.eval()(**inputs).logits
        assert torch.allclose(logits.softmax(-1), torch.tensor(found.probabilities, dtype=logits.dtype), atol=1e-5)


def test_a_stopped_run_resumes_bit_for_bit(learnt: Any, tmp_path: Path) -> None:
    _, run, _ = learnt
    stopped = Path(shutil.copytree(run, tmp_path / "run"))
    sorted((stopped / "checkpoints").glob("*.pt"))[-1].unlink()
    (stopped / "results.json").unlink()
    resume(stopped)
    for name in ("metrics.jsonl", "adapter/adapter_model.safetensors"):
        assert (stopped / name).read_bytes() == (run / name).read_bytes()


def test_shown_and_merged_once_more(learnt: Any, tmp_path: Path) -> None:
    values, run, _ = learnt
    parsed = FinetuneRecipe.model_validate(values)
    (shown,) = show_examples(parsed, 1)
    assert [(part.trained, part.text) for part in shown.parts[1:]] == [(True, "0")]
    assert "(8 x 8, L) as 3 x 16 x 16 numbers from" in shown.parts[0].text
    assert example_inputs(parsed, 5)["pixel_values"].shape == (5, 3, 16, 16)
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "merge_inputs.safetensors").unlink()  # the recipe's data are read again
    check = peftlab.run_merge(copy, out=tmp_path / "merged").check
    assert check is not None and check.max_logit_difference < 1e-4 and check.examples == 16


def test_a_directory_of_images_is_predicted(learnt: Any, digits: Path, tmp_path: Path) -> None:
    _, run, _ = learnt
    flat = tmp_path / "flat"
    shutil.copytree(digits / "4", flat)
    predict_file(run, str(flat), str(tmp_path / "out.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["image"] for row in rows] == sorted(path.name for path in flat.iterdir())
    assert all(row["prediction"] in ("0", "1", "4") for row in rows)
    (flat / "bad.png").write_text("no image")
    with pytest.raises(PeftlabError, match=r"bad.png: not an image that Pillow can read"):
        predict_file(run, str(flat), str(tmp_path / "other.jsonl"))
    assert not (tmp_path / "other.jsonl").exists()


def test_a_model_of_another_size_is_refused_before_training(tmp_path: Path, digits: Path) -> None:
    model = save_classifier("vit", tmp_path / "model")
    (model / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}})
    )
    values = recipe(model, digits, tmp_path / "run")
    with pytest.raises(
        PeftlabError, match=r"makes 3 x 8 x 8 \(channels, height, width\).*which the model does not take"
    ):
        tiny.run(values)
    (model / "preprocessor_config.json").unlink()
    with pytest.raises(PeftlabError, match=r"has no preprocessor_config.json"):
        tiny.run(values)
    assert not (tmp_path / "run" / "adapter").exists()
