"""Writes what `recipes/image/quickstart.yaml` learns from: images, questions about them, and an untrained model.

    python recipes/image/digits.py digits
    peftlab run image/quickstart

The images are scikit-learn's 1,797 digits of 8 x 8 pixels, as PNG files in a folder for each digit. A question is about
one image: which digit it shows, whether that is even, whether it is greater than another digit, or all of it in one
answer. The model is a LLaVA of transformers, two layers that see and two that write, with random weights and a word for
each token. ``prompts.jsonl`` has the questions of the last kind alone, for a draft (``recipes/image/draft.yaml``).
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

HELD_OUT = 297  # images of the validation split, in which none of the training images is asked about
DIGITS = [str(digit) for digit in range(10)]
WORDS = ["which", "digit", "is", "it", "even", "greater", "than", "yes", "no", "describe", "user", "assistant"]
SPECIAL = ["<pad>", "<image>", "<end>"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %} {{ p.text }}{% endif %}{% endfor %}{% endif %} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def write_images(directory: Path) -> list[tuple[str, int]]:
    """Write the digits and return their paths, from the directory, with the digit that each shows."""
    data = load_digits()
    written = []
    for number, (pixels, digit) in enumerate(zip(data.images, data.target, strict=True)):
        path = directory / "images" / str(digit) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 255 / 16).astype("uint8")).save(path)
        written.append((str(path.relative_to(directory)), int(digit)))
    return written


def description(digit: int) -> str:
    """Return what is to be said of a digit in one answer."""
    even, greater = ("no" if digit % 2 else "yes"), ("yes" if digit > 4 else "no")
    return f"it is digit {digit} is it even {even} is it greater than 4 {greater}"


def write_questions(file: Path, images: list[tuple[str, int]], draw: random.Random) -> None:
    """Write four questions about each image, with their answers, as conversations."""
    with file.open("w") as lines:
        for path, digit in images:
            other = draw.choice([each for each in range(10) if each != digit])
            for question, answer in (
                ("which digit", str(digit)),
                ("is it even", "no" if digit % 2 else "yes"),
                (f"is it greater than {other}", "yes" if digit > other else "no"),
                ("describe it", description(digit)),
            ):
                asked = [{"type": "image", "path": path}, {"type": "text", "text": question}]
                turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
                lines.write(json.dumps({"messages": turns}) + "\n")


def write_prompts(file: Path, images: list[tuple[str, int]]) -> None:
    """Write the question that has a long answer about each image, without the answer."""
    with file.open("w") as lines:
        for path, _ in images:
            asked = [{"type": "image", "path": path}, {"type": "text", "text": "describe it"}]
            lines.write(json.dumps({"messages": [{"role": "user", "content": asked}]}) + "\n")


def write_model(directory: Path) -> None:
    """Write the untrained model, its tokenizer and its image processor."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS, *DIGITS])}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="<end>", additional_special_tokens=SPECIAL
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    square = {"height": 8, "width": 8}
    CLIPImageProcessor(size=square, crop_size=square).save_pretrained(directory)
    processor = {"processor_class": "LlavaProcessor", "patch_size": 2, "num_additional_image_tokens": 1}
    processor |= {"vision_feature_select_strategy": "default", "image_token": "<image>"}
    (directory / "processor_config.json").write_text(json.dumps(processor, indent=2))
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 2, **size},
        text_config={
            "model_type": "llama", "vocab_size": len(vocabulary), "max_position_embeddings": 64, **size,
            "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        },
        image_token_index=vocabulary["<image>"],
        vision_feature_layer=-1,
    )  # fmt: skip
    LlavaForConditionalGeneration(config).save_pretrained(directory)


def main(directory: Path) -> None:
    """Write images, questions and model into a directory."""
    draw = random.Random(0)
    images = write_images(directory)
    draw.shuffle(images)
    write_questions(directory / "train.jsonl", images[HELD_OUT:], draw)
    write_questions(directory / "validation.jsonl", images[:HELD_OUT], draw)
    write_prompts(directory / "prompts.jsonl", images[HELD_OUT:] + images[:HELD_OUT])
    write_model(directory / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
