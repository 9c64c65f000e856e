"""Writes what `recipes/image/pixels.yaml` and `pixels-draft.yaml` learn from: images as texts of grey levels.

    python recipes/image/pixels.py pixels
    peftlab run image/pixels
    peftlab run image/pixels-draft

The images are scikit-learn's 1,797 digits of 8 x 8 pixels. A text is the digit's name and then its pixels row by row,
a token each: one of the seventeen grey levels, 0 to 16. The model is a Llama of four layers with random weights, and
its vocabulary is these words.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HELD_OUT = 297  # images of the validation split
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
GREYS = [str(level) for level in range(17)]


def write_texts(directory: Path) -> None:
    """Write images to learn from and held-out ones, beginnings of images for a draft, and prompts for a benchmark."""
    data, draw = load_digits(), random.Random(0)
    rows = [
        (NAMES[digit], [GREYS[int(level)] for level in image.flatten()])
        for image, digit in zip(data.images, data.target, strict=True)
    ]
    draw.shuffle(rows)
    texts = [{"prompt": name, "completion": " ".join(pixels)} for name, pixels in rows]
    begun = [{"prompt": " ".join([name, *pixels[:8]]), "category": name} for name, pixels in rows]  # one row of pixels
    files = {
        "train": texts[HELD_OUT:], "validation": texts[:HELD_OUT],
        "begun": begun[HELD_OUT:][:400], "begun_validation": begun[:40],
    }  # fmt: skip
    for name, lines in files.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_model(directory: Path) -> None:
    """Write the untrained model and its tokenizer."""
    vocabulary = {word: number for number, word in enumerate([*GREYS, *NAMES, "<pad>", "<end>"])}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.add_special_tokens(["<pad>", "<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<end>")
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=72, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)


def main(directory: Path) -> None:
    """Write texts and model into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_texts(directory)
    write_model(directory / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
