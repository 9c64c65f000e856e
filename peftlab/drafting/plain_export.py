"""A draft model's plain directory, copied for an engine and compared with what was trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from peftlab.drafting.checks import check_tokenizers
from peftlab.errors import PeftlabError
from peftlab.files import MARK
from peftlab.models.pretrained import load_base, load_config, load_tokenizer

_SPACES = str.maketrans({"\u2581": " ", "\u0120": " "})  # what SentencePiece and byte-level BPE write for a space
FEW_COMMON = 100  # tokens, below which vLLM warns


def check_plain(plain: Path, target: str, consumer: str) -> None:
    """Raise ``PeftlabError`` for a draft of other tokens or of another ``vocab_size`` than the target's."""
    check_tokenizers(load_tokenizer(target), load_tokenizer(str(plain)), chat=False)
    sizes = vocabulary_sizes(plain, target)
    if sizes[0] != sizes[1]:
        raise PeftlabError(
            f"--for {consumer}: the draft's vocab_size is {sizes[1]}, the target's {sizes[0]}; it would not be loaded. "
            f"model.resize_token_embeddings({sizes[0]}) before training makes them equal"
        )


def vocabulary_sizes(plain: Path, target: str) -> tuple[int, int]:
    """Return ``vocab_size`` of the target and of the draft, as servers compare them."""
    goal, own = (load_config(str(place)).get_text_config(decoder=True).vocab_size for place in (target, plain))
    return goal, own


def common_tokens(plain: Path, target: str) -> int | None:
    """Return how many tokens draft and target have in common, by their text; None where vocabularies are the same.

    Raises:
        PeftlabError: no token is common, or the draft's directory has no tokenizer.
    """
    ours, theirs = (load_tokenizer(str(place)).get_vocab() for place in (target, plain))
    sizes = vocabulary_sizes(plain, target)
    if ours == theirs and sizes[0] == sizes[1]:
        return None
    goal, own = ({token.translate(_SPACES) for token in vocabulary} for vocabulary in (ours, theirs))
    if not goal & own:
        raise PeftlabError(f"--for vllm: {plain} has no token in common with {target}; nothing could be drafted")
    return len(goal & own)


def copy_plain(plain: Path, directory: Path) -> float:
    """Copy a model into an existing directory; return the largest difference of a logit, which is 0.

    Raises:
        PeftlabError: the copy computes other logits.
    """
    for file in plain.iterdir():
        if file.is_file() and file.name not in ("merge.json", MARK):
            shutil.copyfile(file, directory / file.name)
    return _compare(plain, directory)


@torch.no_grad()
def _compare(source: Path, written: Path) -> float:
    ids = torch.arange(1, 17)[None]
    logits = []
    for place in (source, written):
        model, fresh = load_base(str(place), "AutoModelForCausalLM")
        if fresh:
            raise PeftlabError(f"{place}: lacks {', '.join(fresh[:5])}")
        logits.append(model(input_ids=ids % model.config.vocab_size).logits)
    difference = float((logits[0] - logits[1]).abs().max())
    if difference > 0:
        raise PeftlabError(f"{written}: computes other logits than {source} (by {difference:.2g}); nothing was written")
    return difference
