"""Which target a draft was trained for, how often that accepts its choices, and how another one differs from it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.decoding.trees import RankRates
from peftlab.drafting.rank_rates import KEY, rates_on_disk, read_rates
from peftlab.errors import PeftlabError
from peftlab.files import member, read_object, write_json

FILE = "target.json"
_SAMPLED = 4  # numbers of each tensor


@dataclass(frozen=True)
class TargetIdentity:
    """A target, told from others by its tokens and a few numbers of each of its tensors.

    Attributes:
        reference: as the recipe names it. tokenizer: digest of its tokens and their ids.
        weights: name of a parameter -> evenly spaced elements of it, in float32. Stored as numbers and not as a digest:
            the same target loaded in another precision has these numbers, rounded.
    """

    reference: str
    tokenizer: str
    weights: dict[str, list[float]]

    def write(self, directory: Path) -> None:
        """Write it beside the draft."""
        write_json(directory / FILE, asdict(self))


def identify(reference: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TargetIdentity:
    """Return the identity of a target."""
    samples = {name: some.float().tolist() for name, some in _samples(target).items()}
    return TargetIdentity(reference, _token_digest(tokenizer), samples)


def read_identity(directory: Path) -> TargetIdentity | None:
    """Return the identity of the target that the draft in a directory was trained for; None where none is stored."""
    file = directory / FILE
    if not file.exists():
        return None
    values = read_object(file)
    weights = member(values, "weights", dict, file)
    if not all(isinstance(v, list) and all(isinstance(x, float | int) for x in v) for v in weights.values()):
        raise PeftlabError(f"{file}: weights must be lists of numbers by name")
    return TargetIdentity(member(values, "reference", str, file), member(values, "tokenizer", str, file), weights)


def write_ranks(directory: Path, ranks: RankRates) -> None:
    """Store beside the identity how often the target accepts each choice of the draft."""
    write_json(directory / FILE, {**read_object(directory / FILE), KEY: rates_on_disk(ranks)})


def read_ranks(directory: Path) -> RankRates | None:
    """Return what ``write_ranks`` has stored; None where nothing is."""
    file = directory / FILE
    return read_rates(read_object(file).get(KEY), file) if file.exists() else None


def check_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerBase) -> TargetIdentity | None:
    """Return the identity that is stored beside a draft.

    Raises:
        PeftlabError: the target has other tokens.
    """
    known = read_identity(directory)
    if known is not None and _token_digest(tokenizer) != known.tokenizer:
        raise PeftlabError(
            f"{directory}: trained for {known.reference}, whose tokenizer is not this target's: the ids of its tokens "
            f"differ ({len(tokenizer)} tokens here); train a draft for this target"
        )
    return known


def check_target(directory: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return warnings for a target whose weights are not those that the draft in a directory was trained for.

    Raises:
        PeftlabError: the target has other tokens.
    """
    known = check_tokenizer(directory, tokenizer)
    if known is None:
        return ()
    samples = _samples(target)
    shared = samples.keys() & known.weights.keys()
    differing = []
    for name in shared:
        then = torch.tensor(known.weights[name]).to(samples[name].dtype)
        if then.shape != samples[name].shape or not torch.equal(then, samples[name]):
            differing.append(name)
    count = len(differing) + len(samples.keys() ^ known.weights.keys())
    if not count:
        return ()
    first = min(differing or samples.keys() ^ known.weights.keys())
    return (
        f"the draft was trained for {known.reference}, and this target's weights differ from it in {count} of "
        f"{len(samples.keys() | known.weights.keys())} tensors ({first}, ...): the output is the target's all the "
        "same, but less is accepted; train the draft for this target (draft: {kind: eagle3, from: ...})",
    )


def _token_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _samples(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        flat = {name: parameter.detach().reshape(-1) for name, parameter in target.named_parameters()}
        return {n: x[:: max(1, x.numel() // _SAMPLED)][:_SAMPLED].cpu() for n, x in flat.items() if x.numel()}
