"""Drafts as released engines load them, checked by loading them back.

============  ==========================================================
transformers  a plain directory, for ``generate(assistant_model=...)``
vllm          a plain directory, for the speculative method ``draft_model``, with other tokens than the target's by
              ``use_heterogeneous_vocab``; eagle3 and dflash for the methods of these names; pard, which
              ``draft_model`` drafts with in one pass
sglang        a plain directory, for the algorithm ``STANDALONE``; eagle3 for ``EAGLE3``; dflash for ``DFLASH``;
              gated_lora for ``UNO``
speculators   eagle3, dflash and a target's own mtp layer, for its own classes
llama.cpp     a GGUF file: a plain model for ``draft-simple``; eagle3 for ``draft-eagle3``; dflash for ``draft-dflash``
stitched      a copy of the target with its own mtp layer, tuned, for vllm's ``mtp`` and sglang's ``NEXTN``
============  ==========================================================

Which engine loads what is in ``docs/drafts/training_drafts.md``.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from peftlab.checkpoints.gguf import load_values, write_model
from peftlab.drafting.base import DraftExporter, DraftKind, llama_command
from peftlab.drafting.config import STITCHED, DraftConfig
from peftlab.drafting.table import find_draft
from peftlab.drafting.target import check_tokenizers
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import MARK, Json, staged_directory, staged_file
from peftlab.models.config import plain_directory
from peftlab.models.load import load_base, load_config, load_tokenizer
from peftlab.references import locate, similar_path
from peftlab.registry import resolve

LLAMA_CPP, SPECULATORS = "llama.cpp", "speculators"


@dataclass(frozen=True)
class ExportedDraft:
    """A draft in the form that its consumer loads.

    Attributes:
        out: its directory. consumer: what loads it. command: how to serve it.
        max_logit_difference: the largest between what was trained and what was written.
        notes: what to know about how the consumer drafts with it.
    """

    out: Path
    consumer: str
    command: str
    max_logit_difference: float
    notes: tuple[str, ...] = ()


def export_draft(
    source: str | Path, out: str | Path, consumer: str, target: str, *, gamma: int = 4, overwrite: bool = False
) -> ExportedDraft:
    """Write a trained draft for ``consumer``, load it back and compare logits.

    Args:
        source: a run directory of a draft recipe, its ``merged/``, or any plain model directory.
        target: reference of the model it drafts for. gamma: drafted tokens per step in the printed command.

    Raises:
        PeftlabError: the consumer cannot load such a draft or target (nothing is written), or what was written
            differs.
    """
    if consumer not in (consumers := (*CONSUMERS, SPECULATORS, LLAMA_CPP, STITCHED)):
        raise PeftlabError(f"--for {consumer}: one of {', '.join(consumers)}{did_you_mean(consumer, consumers)}")
    if gamma < 1:
        raise PeftlabError(f"--gamma {gamma}: an engine drafts at least one token per step")
    source, out = Path(source), Path(out)
    if not source.is_dir():
        raise PeftlabError(f"{source}: no such directory{similar_path(str(source))}")
    row, place = find_draft(str(source))
    kind: type[DraftKind[DraftConfig]] = resolve(row.kind)
    target = plain_directory(target)
    found = kind.export(place, consumer)
    inputs: dict[str, str | Path | None] = {"the draft": source, "the target": target}
    if consumer == LLAMA_CPP:
        return _export_gguf(found, out, target, gamma, overwrite, inputs)
    if not isinstance(found, Path):
        served = target if consumer == STITCHED else served_reference(target, consumer)
        with staged_directory(out, "model", overwrite=overwrite, inputs=inputs) as staging:
            difference = found.write(target, staging, gamma)
        return ExportedDraft(out, consumer, found.command(served, os.path.abspath(out), gamma), difference)
    if consumer not in CONSUMERS:
        what = {STITCHED: "a target's own mtp layer", SPECULATORS: "eagle3, dflash and own mtp drafts"}[consumer]
        raise PeftlabError(f"--for {consumer}: {place} is a model of its own; {consumer} is for {what}")
    plain, common = found, None
    command = CONSUMERS[consumer](target, out, gamma)
    if consumer == "vllm":
        common = common_tokens(plain, target)
    if common is None:
        check_plain(plain, target, consumer)
    else:
        command = _vllm_command(target, out, gamma, heterogeneous=True)
    with staged_directory(out, "model", overwrite=overwrite, inputs=inputs) as staging:
        difference = copy_plain(plain, staging)
    return ExportedDraft(out, consumer, command, difference, () if common is None else _heterogeneous_note(common))


def _export_gguf(
    found: Path | DraftExporter,
    out: Path,
    target: str,
    gamma: int,
    overwrite: bool,
    inputs: Mapping[str, str | Path | None],
) -> ExportedDraft:
    """Write a plain model or an eagle3 draft as a GGUF file, and load it back; see ``export_draft``."""
    if out.suffix != ".gguf":
        raise PeftlabError(f"--for llama.cpp: writes one file; name it, as in -o {out.name or 'draft'}.gguf")
    place = locate(target)
    served = os.path.abspath(place) if isinstance(place, Path) and place.suffix == ".gguf" else "TARGET.gguf"
    notes = [] if served != "TARGET.gguf" else [f"llama.cpp serves {target} from a GGUF file of it: TARGET.gguf"]
    with staged_file(out, overwrite=overwrite, inputs=inputs) as staging:
        if not isinstance(found, Path):
            difference = found.write(target, staging / out.name, gamma)
            return ExportedDraft(
                out, LLAMA_CPP, found.command(served, os.path.abspath(out), gamma), difference, tuple(notes)
            )
        check_plain(found, target, LLAMA_CPP)
        stored = load_config(str(found)).dtype
        dtype = stored if isinstance(stored, torch.dtype) else torch.float32
        model, _ = load_base(str(found), "AutoModelForCausalLM", dtype=dtype)
        notes += write_model(model, found, staging / out.name)
        ids = torch.arange(1, 17)[None] % model.config.vocab_size
        with torch.no_grad():
            before = model(input_ids=ids).logits
            load_values(model, staging / out.name)
            difference = float((model(input_ids=ids).logits - before).abs().max())
        if difference > 0:
            raise PeftlabError(f"{out}: computes other logits than {found} (by {difference:.2g}); nothing was written")
    command = llama_command(served, os.path.abspath(out), "draft-simple", gamma)
    return ExportedDraft(out, LLAMA_CPP, command, difference, tuple(notes))


def _heterogeneous_note(common: int) -> tuple[str, ...]:
    """Return notes for the user on a draft with other tokens than its target's."""
    notes = [
        f"the vocabularies differ: vLLM (0.33) matches tokens by their text and drafts the {common:,} common ones, "
        "greedily; the output is the target's own all the same"
    ]
    if common < FEW_COMMON:
        notes.append(f"fewer than {FEW_COMMON} tokens are common: little can be accepted")
    return tuple(notes)


def _transformers_example(target: str, out: Path, gamma: int) -> str:
    """Return Python lines that decode with the draft in any directory; transformers chooses gamma itself."""
    place = locate(target)
    arguments = [repr(target)]
    if isinstance(place, Path):
        path = os.path.abspath(place)
        file = os.path.basename(path)
        arguments = [repr(os.path.dirname(path)), f"gguf_file={file!r}"] if place.is_file() else [repr(path)]
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"target = AutoModelForCausalLM.from_pretrained({', '.join(arguments)})\n"
        f"draft = AutoModelForCausalLM.from_pretrained({os.path.abspath(out)!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({os.path.abspath(out)!r})\n"
        "inputs = tokenizer('Once upon a time', return_tensors='pt')  # batches of one\n"
        "output = target.generate(**inputs, assistant_model=draft, max_new_tokens=32)\n"
        "print(tokenizer.decode(output[0]))"
    )


def served_reference(target: str, consumer: str) -> str:
    """Return a target's reference as a server takes it, valid in any directory.

    Args:
        target: reference. consumer: the server.

    Raises:
        PeftlabError: it is a GGUF file.
    """
    place = locate(target)
    if isinstance(place, Path) and place.is_file():
        name = {"vllm": "vLLM", "sglang": "SGLang"}.get(consumer, consumer)
        raise PeftlabError(
            f"--for {consumer}: the target {target} is a GGUF file, which {name} without a plugin does not load; load "
            "it with from_pretrained(..., gguf_file=...), save_pretrained it to a directory and name that"
        )
    return target if isinstance(place, str) else os.path.abspath(place)


def _vllm_command(target: str, out: Path, gamma: int, *, heterogeneous: bool = False) -> str:
    """Return vLLM's command that serves target and draft from any directory.

    Args:
        heterogeneous: the draft has other tokens, and its own tokenizer in its directory.
    """
    served = served_reference(target, "vllm")
    speculative: dict[str, Json] = {"method": "draft_model", "model": os.path.abspath(out)}
    speculative |= {"num_speculative_tokens": gamma} | ({"use_heterogeneous_vocab": True} if heterogeneous else {})
    return f"vllm serve {shlex.quote(served)} --speculative-config {shlex.quote(json.dumps(speculative))}"


def _sglang_command(target: str, out: Path, gamma: int) -> str:
    """Return SGLang's command that serves target and draft from any directory."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(served_reference(target, 'sglang'))} "
        f"--speculative-algorithm STANDALONE --speculative-draft-model-path {shlex.quote(os.path.abspath(out))} "
        f"--speculative-num-steps {gamma} --speculative-eagle-topk 1 --speculative-num-draft-tokens {gamma + 1}"
    )


CONSUMERS: dict[str, Callable[[str, Path, int], str]] = {
    "transformers": _transformers_example,
    "vllm": _vllm_command,
    "sglang": _sglang_command,
}
"""Name -> function of target, draft directory and gamma to how a draft model is served."""

_SPACES = str.maketrans({"\u2581": " ", "\u0120": " "})  # what SentencePiece and byte-level BPE write for a space

FEW_COMMON = 100  # tokens, below which vLLM warns


def check_plain(plain: Path, target: str, consumer: str) -> None:
    """Raise ``PeftlabError`` for a draft of other tokens or of another ``vocab_size`` than the target's.

    Args:
        plain: the draft's directory. target: reference. consumer: for messages.
    """
    check_tokenizers(load_tokenizer(target), load_tokenizer(str(plain)), chat=False)
    sizes = vocabulary_sizes(plain, target)
    if sizes[0] != sizes[1]:
        raise PeftlabError(
            f"--for {consumer}: the draft's vocab_size is {sizes[1]}, the target's {sizes[0]}; it would not be loaded. "
            f"model.resize_token_embeddings({sizes[0]}) before training makes them equal"
        )


def vocabulary_sizes(plain: Path, target: str) -> tuple[int, int]:
    """Return ``vocab_size`` of the target and of the draft, as servers compare them.

    Args:
        plain: the draft's directory. target: reference.
    """
    goal, own = (load_config(str(place)).get_text_config(decoder=True).vocab_size for place in (target, plain))
    return goal, own


def common_tokens(plain: Path, target: str) -> int | None:
    """Return how many tokens draft and target share by their text; None where vocabularies are the same.

    Args:
        plain: the draft's directory. target: reference.

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

    Args:
        plain: the model's directory. directory: where the copy goes.

    Raises:
        PeftlabError: the copy computes other logits.
    """
    for file in plain.iterdir():
        if file.is_file() and file.name not in ("merge.json", MARK):
            shutil.copyfile(file, directory / file.name)
    return _compare(plain, directory)


@torch.no_grad()
def _compare(source: Path, written: Path) -> float:
    """Load both models and return the largest difference of a logit on one text, which must be 0."""
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
