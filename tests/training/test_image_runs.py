"""Images from a recipe: classes, and conversations; transformers and peft load what is saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification, AutoModelForImageTextToText

import peftlab
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.checkpoints.tensors import read_tensors
from peftlab.errors import PeftlabError
from peftlab.models.load import load_processor
from peftlab.pipelines.evaluate import evaluate
from peftlab.pipelines.finetune import load_task
from peftlab.pipelines.predict import predict_file
from peftlab.pipelines.preview import example_inputs, show_examples
from peftlab.pipelines.recipes import resume
from peftlab.recipe.schema import FinetuneRecipe
from peftlab.tasks.batches import model_inputs
from peftlab.tasks.images import read_image
from tests.image_models import CLASSIFIERS, VISION_LANGUAGE, save_classifier, save_digits, save_vision_language


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


# --- ``text/chat`` with images.
ASKED = ("Which digit?", "Is it even?")


def chats(file: Path, digits: Path, n: int = 24) -> Path:
    """Write conversations about one image, about two, and one about none."""
    paths = sorted(digits.rglob("*.png"))
    rows = []
    for i, path in enumerate(paths[:: len(paths) // n][:n]):
        name, other = str(path.relative_to(file.parent)), str(paths[i].relative_to(file.parent))
        parts = [{"type": "image", "path": name}, {"type": "text", "text": ASKED[i % 2]}]
        if i % 5 == 4:
            parts += [{"type": "image", "path": other}, {"type": "text", "text": "And this?"}]
        asked = [{"role": "user", "content": parts}]
        rows.append({"messages": [*asked, {"role": "assistant", "content": [path.parent.name, "no"][i % 2]}]})
    hello = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi."}]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": hello}]))
    return file


@pytest.fixture(scope="module", params=VISION_LANGUAGE)
def talked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The recipe of a run on conversations with images, its directory and what it ended with."""
    place = tmp_path_factory.mktemp(request.param)
    save_digits(place / "digits", each=12)
    values = {
        "model": str(save_vision_language(request.param, place / "model")),
        "task": "text/chat",
        "data": {"path": str(chats(place / "chats.jsonl", place / "digits")), "validation": 6},
        "method": {"name": "lora", "r": 2, "lora_dropout": 0.1},
        "train": {"max_steps": 4, "batch_size": 4, "lr": 1e-2, "warmup": 0.0, "max_length": 400, "eval_every": 2},
        "generate": {"metrics": ["exact_match"], "max_new_tokens": 3, "before": False},
        "output_dir": str(place / "run"),
    }
    return values, place / "run", tiny.run(values)


@pytest.fixture(scope="module")
def task(talked: Any) -> Any:
    """What the recipe trains, read once more; no test changes it."""
    return load_task(FinetuneRecipe.model_validate(talked[0]))


def test_examples_with_images_are_the_processors_own(talked: Any, task: Any) -> None:
    values, _, _ = talked
    tokenizer = task.processor.tokenizer
    special = {tokenizer.convert_tokens_to_ids(VISION_LANGUAGE[Path(values["model"]).parent.name[:-1]]["image"])}
    for i in range(len(task.train)):
        row = task.train[i]
        learnt = [id for id, trained in zip(row["input_ids"], row["trained"], strict=True) if trained]
        answer = tokenizer.decode(learnt)
        assert answer.endswith("<|im_end|>") and answer.removesuffix("<|im_end|>") in ("0", "1", "4", "no", "Hi.")
        assert row["trained_bytes"] == len(answer.removesuffix("<|im_end|>"))
        images = [[read_image(path) for path in row["images"]]]
        own = task.processor(text=[row["text"]], images=images if row["images"] else None, add_special_tokens=False)
        assert list(own["input_ids"][0]) == row["input_ids"]
    all_trained = load_task(FinetuneRecipe.model_validate({**values, "data": {**values["data"], "train_on": "all"}}))
    for row in all_trained.train:
        seen = [t for id, t in zip(row["input_ids"], row["trained"], strict=True) if id in special]
        assert bool(seen) == bool(row["images"]) and not any(seen)


def test_the_loss_is_that_of_the_models_own_logits(task: Any) -> None:
    batch = task.collate([task.train[i] for i in range(4)])
    with torch.no_grad():
        loss = task.loss(task.model, batch)
        logits = task.model(**{key: value for key, value in batch.items() if key != "trained"}).logits.float()
    kept = batch["trained"][:, 1:]
    own = torch.nn.functional.cross_entropy(logits[:, :-1][kept], batch["input_ids"][:, 1:][kept], reduction="sum")
    assert float(loss) == pytest.approx(float(own), rel=1e-4)


def test_the_language_part_is_adapted_and_every_tensor_kept(talked: Any) -> None:
    values, run, results = talked
    assert results["merge"]["max_logit_difference"] < 1e-4 and results["merge"]["examples"] == 6
    assert 0 <= results["generate"]["exact_match"] <= 1 and results["generate"]["contexts"] == 6
    before, _ = read_tensors(Path(values["model"]) / "model.safetensors")
    after, _ = read_tensors(run / "merged" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("layers" in name and "vision" not in name and "visual" not in name for name in changed)


def test_transformers_and_peft_load_a_model_that_sees(talked: Any, task: Any) -> None:
    values, run, _ = talked
    batch = model_inputs(task.collate([task.train[i] for i in range(3)]))
    base = AutoModelForImageTextToText.from_pretrained(values["model"])
    merged = AutoModelForImageTextToText.from_pretrained(run / "merged").eval()
    adapted = peft.PeftModel.from_pretrained(base, str(run / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, adapted(**batch).logits, rtol=1e-3, atol=1e-3)
    assert load_processor(str(run)).image_token == task.processor.image_token


def test_a_stopped_chat_resumes_bit_for_bit(talked: Any, tmp_path: Path) -> None:
    _, run, _ = talked
    stopped = Path(shutil.copytree(run, tmp_path / "run"))
    sorted((stopped / "checkpoints").glob("*.pt"))[-1].unlink()
    (stopped / "results.json").unlink()
    resume(stopped)
    for name in ("metrics.jsonl", "adapter/adapter_model.safetensors"):
        assert (stopped / name).read_bytes() == (run / name).read_bytes()


def test_shown_images_say_their_size_and_tokens(talked: Any) -> None:
    values, _, _ = talked
    shown = show_examples(FinetuneRecipe.model_validate(values), 3)
    text = "".join(part.text for sequence in shown for part in sequence.parts)
    assert ".png: 8 x 8, " in text and " tokens]" in text and "Which digit?" in text
    assert all("tokens]" not in part.text for sequence in shown for part in sequence.parts if part.trained)


def test_full_finetuning_leaves_out_what_the_model_does_not_read(llava: Path) -> None:
    """LLaVA takes the states before its last layer that sees."""
    file = chats(llava.parent / "full.jsonl", llava.parent / "digits", n=3)
    values = {
        "model": str(llava), "task": "text/chat", "data": {"path": str(file), "validation": 1}, "method": {"name": "full"},
        "train": {"max_steps": 3, "batch_size": 3, "max_length": 256}, "output_dir": str(llava.parent / "full"),
    }  # fmt: skip
    results = tiny.run(values)
    assert results["steps"] == 3 and 0 < results["trainable_parameters"] < results["total_parameters"]


def test_a_base_in_four_bits_that_sees_trains_saves_and_merges(llava: Path) -> None:
    """Every tensor is in what is merged, either way; rows that bitsandbytes misreads, here of what sees, stay whole."""
    pytest.importorskip("bitsandbytes")
    place = llava.parent / "nf4"
    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    file = chats(llava.parent / "nf4.jsonl", llava.parent / "digits", n=6)
    values = {
        "model": str(save_vision_language("llava", place / "model", wide)), "base": {"dtype": "nf4"}, "task": "text/chat",
        "data": {"path": str(file), "validation": 2}, "method": {"name": "lora", "r": 2}, "output_dir": str(place / "run"),
        "train": {"max_steps": 3, "batch_size": 3, "max_length": 256, "lr": 1e-2, "warmup": 0.0},
    }  # fmt: skip
    results = tiny.run(values)
    assert results["steps"] == 3 and results["merge"]["max_logit_difference"] < 1e-3
    peftlab.run_merge(place / "run", out=place / "original", options=MergeOptions(into="original"), verify=False)
    places = (place / "model", place / "run" / "merged", place / "original")
    base, dequantised, original = (read_tensors(folder / "model.safetensors")[0] for folder in places)
    assert base.keys() == dequantised.keys() == original.keys()
    rounded, changed = (
        {name for name in base if not torch.equal(base[name], found[name])} for found in (dequantised, original)
    )
    assert len(changed) == 14 and all("layers" in name and "vision" not in name for name in changed)
    assert rounded == {*changed, "multi_modal_projector.linear_2.weight"}, "of what is not adapted, rows of 64"
    plain = AutoModelForImageTextToText.from_pretrained(place / "model")
    adapted = peft.PeftModel.from_pretrained(plain, str(place / "run" / "adapter"))
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 14


def said(content: Any, answer: Any = "0") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


IMAGE = {"type": "image", "path": "digits/0/000.png"}
WORDS = {"type": "text", "text": "Which?"}


@pytest.mark.parametrize(
    ("turns", "train", "data", "message"),
    [
        (said([{"type": "image", "path": "gone.png"}, WORDS]), {}, {}, r"chats.jsonl:1: .*gone.png: no such file"),
        (
            said([{"type": "image", "path": "chats.jsonl"}, WORDS]),
            {},
            {},
            r"chats.jsonl: not an image that Pillow can read",
        ),
        (
            said([{"type": "image", "url": "x.png"}, WORDS]),
            {},
            {},
            r"parts \{type: text, text: ...\} and \{type: image, path: ...\}",
        ),
        (
            said([{"type": "video", "path": "x.mp4"}, WORDS]),
            {},
            {},
            r"a part of type 'video'; this task learns from texts and images",
        ),
        (said([WORDS], [IMAGE]), {}, {}, r"an image in a turn of role assistant; the user's turns have them"),
        (said([IMAGE, {"type": "text", "text": "what is <image>?"}]), {}, {}, r"1 images, and 2 times <image> in what"),
        (
            said([IMAGE, WORDS]),
            {"max_length": 20},
            {"too_long": "error"},
            r"tokens, 16 of them of images, and train.max_length is 20",
        ),
        (said([IMAGE, WORDS]), {"max_length": 20}, {"too_long": "truncate"}, r"is 20; an image cannot be cut"),
        (said([IMAGE, WORDS]), {"max_length": 20}, {}, r"every example is longer than train.max_length, 20 tokens"),
    ],
)
def test_bad_images_in_conversations_are_named(llava: Path, turns: Any, train: Any, data: Any, message: str) -> None:
    file = llava.parent / "chats.jsonl"
    file.write_text(f"{json.dumps({'messages': turns})}\n" * 2)
    values = {
        "model": str(llava), "task": "text/chat", "data": {"path": str(file), "validation": 1, **data},
        "method": {"name": "lora"}, "train": {"max_steps": 1, "max_length": 256, **train}, "output_dir": str(llava.parent / "run"),
    }  # fmt: skip
    with pytest.raises(PeftlabError, match=message):
        load_task(FinetuneRecipe.model_validate(values))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llava")
    save_digits(place / "digits", each=2)
    return save_vision_language("llava", place / "model")
