"""Answers to many prompts, on peftlab's decoder, or on transformers' ``generate`` for what only that can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from peftlab.decoding.cache import Engine
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.sampling import Sampling
from peftlab.errors import PeftlabError
from peftlab.tasks.config import GenerateConfig
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
    sampled = settings.temperature > 0
    library: Unwrapped = model
    cuts = {"temperature": settings.temperature, "top_k": settings.top_k or 0, "top_p": settings.top_p or 1.0}
    # A model's own generation settings (sampling, penalties) are not those of the recipe.
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(settings.seed)
        output = library.generate(
            input_ids=ids.to(model.device), attention_mask=mask.to(model.device),
            max_new_tokens=settings.max_new_tokens, num_beams=settings.beams, length_penalty=settings.length_penalty,
            no_repeat_ngram_size=settings.no_repeat_ngram, repetition_penalty=1.0, do_sample=sampled,
            eos_token_id=sorted(ends) or None, pad_token_id=pad, **(cuts if sampled else {}),
        )  # fmt: skip
    return [_cut_after_end(tokens, ends) for tokens in output[:, longest:].tolist()]


def _cut_after_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """Return an answer up to its end token, which is kept; padding after it is dropped."""
    end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: end + 1]
