"""Generated text: answers to many prompts, and token ids streamed as text up to a stop string.

Answers come from peftlab's decoder, or from transformers' ``generate`` for what only that can do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.decoding.cache import Engine
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.sampling import Sampling
from peftlab.errors import PeftlabError
from peftlab.models.load import max_positions
from peftlab.tasks.table import GenerateConfig
from peftlab.untyped import Unwrapped

Answering = Callable[[Sequence[Sequence[int]]], list[list[int]]]
"""Prompts of one batch -> their answers, as token ids; an answer that ended contains its end token."""


def answering(model: PreTrainedModel, settings: GenerateConfig, ends: frozenset[int], pad: int) -> Answering:
    """Return a function that answers batches of prompts.

    Beam search and a ban on repeated n-grams run on transformers' ``generate``; so does a model that no engine decodes
    (``build_engine``). Everything else runs on peftlab's own decoder.

    Args:
        model: a causal language model in eval mode; its weights must not change afterwards.
        settings: how to generate.
        ends: token ids that end an answer. pad: any token id, for the shorter prompts of a batch.
    """
    if settings.stepwise:
        try:
            engine = build_engine(model)
        except PeftlabError:
            pass
        else:
            return partial(_decode_with_engine, engine, settings, ends)
    return partial(_generate_with_transformers, model, settings, ends, pad)


def _decode_with_engine(
    engine: Engine, settings: GenerateConfig, ends: frozenset[int], prompts: Sequence[Sequence[int]]
) -> list[list[int]]:
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, settings.seed)
    stopping = StoppingCriteria(settings.max_new_tokens, ends)
    return [generation.tokens for generation in decode(engine, prompts, stopping, sampling=sampling)]


def _generate_with_transformers(
    model: PreTrainedModel,
    settings: GenerateConfig,
    ends: frozenset[int],
    pad: int,
    prompts: Sequence[Sequence[int]],
) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return answer_inputs(model, settings, ends, pad, {"input_ids": ids, "attention_mask": mask})


def answer_inputs(
    model: PreTrainedModel,
    settings: GenerateConfig,
    ends: frozenset[int],
    pad: int,
    inputs: Mapping[str, Tensor],
) -> list[list[int]]:
    """Return the answers to one batch by transformers' ``generate``, as token ids.

    Args:
        model, settings, ends, pad: as for ``answering``.
        inputs: ``input_ids``, [prompts, longest], padded on the left, and what else the model takes, such as images.

    Returns:
        Answers of at most as many tokens as the model has positions for after the longest prompt.
    """
    sampled = settings.temperature > 0
    library: Unwrapped = model
    limit, most = max_positions(model.config.get_text_config(decoder=True)), settings.max_new_tokens
    most = most if limit is None else min(most, limit - inputs["input_ids"].shape[1])
    if most < 1:
        return [[] for _ in inputs["input_ids"]]
    cuts = {"temperature": settings.temperature, "top_k": settings.top_k or 0, "top_p": settings.top_p or 1.0}
    # A model's own generation settings (sampling, penalties) are not those of the recipe.
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(settings.seed)
        output = library.generate(
            **{key: value.to(model.device) for key, value in inputs.items()},
            max_new_tokens=most, num_beams=settings.beams, length_penalty=settings.length_penalty,
            no_repeat_ngram_size=settings.no_repeat_ngram, repetition_penalty=1.0, do_sample=sampled,
            eos_token_id=sorted(ends) or None, pad_token_id=pad, **(cuts if sampled else {}),
        )  # fmt: skip
    return [_cut_after_end(tokens, ends) for tokens in output[:, inputs["input_ids"].shape[1] :].tolist()]


def _cut_after_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """Return an answer up to its end token, which is kept; padding after it is dropped."""
    end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: end + 1]


BROKEN = "\N{REPLACEMENT CHARACTER}"  # the decoded text of a character whose bytes are incomplete


def stop_at(tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
    """Return a function (output ids) -> whether they contain a stop string; None without stop strings.

    It is an argument of ``decode.StoppingCriteria``.

    The output then ends with the token that completes the stop string; ``cut_at`` removes it from the text.

    Args:
        tokenizer: decodes. stops: stop strings.

    Raises:
        PeftlabError: an empty stop string, which every output contains.
    """
    if "" in stops:
        raise PeftlabError("stop: an empty string ends every output before it begins")
    if not stops:
        return None
    # A stop string spans at most as many tokens as it has bytes; one more may overlap either end.
    reach = max(len(stop.encode()) for stop in stops) + 2

    def complete(ids: Sequence[int]) -> bool:
        tail = tokenizer.decode(list(ids[-reach:]), skip_special_tokens=True)
        return any(stop in tail for stop in stops)

    return complete


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Return ``text`` up to the first stop string in it.

    Args:
        text: decoded output. stops: stop strings.
    """
    return text[: min((found for stop in stops if (found := text.find(stop)) >= 0), default=len(text))]


class TextStream:
    """A decoder of token ids into text, piece by piece; a returned piece never changes.

    Characters whose bytes are incomplete, and an ending that may become a stop string, are withheld.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._returned = 0

    def add(self, ids: Sequence[int]) -> str:
        """Add ids and return the text that can no longer change."""
        self._ids += ids
        text = cut_at(self._text(), self._stops)
        return self._new_text(text[: len(text) - self._withheld_length(text)])

    def finish(self) -> str:
        """Return the text withheld so far."""
        return self._new_text(cut_at(self._text(), self._stops))

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _withheld_length(self, text: str) -> int:
        whole = text.rstrip(BROKEN)
        prefixes = (
            n for stop in self._stops for n in range(min(len(stop), len(whole)), 0, -1) if whole.endswith(stop[:n])
        )
        return len(text) - len(whole) + max(prefixes, default=0)

    def _new_text(self, text: str) -> str:
        piece = text[self._returned :]
        self._returned = max(self._returned, len(text))
        return piece
