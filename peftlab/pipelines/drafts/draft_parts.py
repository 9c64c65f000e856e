"""The parts of a draft run: the training text, and the job handed to the draft's kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from peftlab.drafting.base import Draft, DraftJob
from peftlab.drafting.config import DraftConfig
from peftlab.drafting.endpoint import ServedPrompt, ServedText, Target, served_continuations, served_model
from peftlab.drafting.text import Writing, check_room, make_dataset, stored_topk, write_continuations
from peftlab.errors import PeftlabError
from peftlab.methods.table import METHODS
from peftlab.models.pretrained import load_config, load_tokenizer
from peftlab.recipe.schema import DraftRecipe
from peftlab.tasks.prompts import Request, read_conversations, read_prompt_ids, read_requests
from peftlab.untyped import Attributes


@dataclass
class Text:
    """The data of a recipe, before the target has written anything.

    Attributes:
        config, tokenizer: the target's. prompts: token ids, the held-out ones last. requests: served ones, newest last.
        longest: tokens of the longest example, with all that the target may write.
    """

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    prompts: list[list[int]]
    requests: list[Request]
    longest: int


@dataclass
class Sets:
    """Tokenised examples: the training set, and held-out ones by split, the one that decides first.

    Attributes:
        served: how the endpoint answered; None where the target wrote here.
    """

    train: Dataset
    held_out: dict[str, Dataset]
    prompts: list[list[int]]
    fingerprint: str
    served: ServedText | None


def with_served_model(recipe: DraftRecipe) -> DraftRecipe:
    """Return ``recipe`` with the endpoint's model id, so that what is stored of its text is found without the server.

    Raises:
        PeftlabError: the endpoint cannot be reached, or lists several models.
    """
    if recipe.data.endpoint is None:
        return recipe
    data = recipe.data.model_copy(update={"endpoint_model": served_model(recipe.data)})
    return recipe.model_copy(update={"data": data})


def read_text(recipe: DraftRecipe) -> Text:
    """Read prompts and requests and check them against the target's context and tokenizer: no weights yet."""
    data, options = recipe.data, model_options(recipe)
    config = load_config(recipe.target, **options)
    if config.is_encoder_decoder:
        raise PeftlabError(
            f"target: {recipe.target} is an encoder-decoder model, which no recipe trains a draft for; generate and "
            "draft bench decode it with copies of its prompt, or with a smaller model of its kind as --draft"
        )
    tokenizer = load_tokenizer(recipe.target, **options)
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    prompts: list[list[int]] = []
    if data.prompts is not None:
        prompts = read_prompt_ids(data.prompts, tokenizer, field=data.field, chat=data.chat, most=data.max_prompts)
        if len(prompts) <= data.held_out:
            raise PeftlabError(
                f"data.held_out: {data.held_out} leaves none of {len(prompts)} prompts to train on; give more prompts "
                "or hold out fewer"
            )
    requests = read_requests(data.replay, tokenizer, chat=data.chat) if data.replay is not None else []
    if len(requests) == 1:
        raise PeftlabError(f"{data.replay}: a single request cannot be both trained on and held out; give 2 or more")
    lengths = [len(prompt) + data.max_new_tokens for prompt in prompts]
    lengths += [len(request.prompt) + len(request.response) for request in requests]
    check_room(lengths, limit, "the target's context; shorten the prompts or data.max_new_tokens")
    check_room(lengths, recipe.train.max_length, "train.max_length; raise it, or shorten data.max_new_tokens")
    return Text(config, tokenizer, prompts, requests, max(lengths))


def make_job(recipe: DraftRecipe, text: Text, directory: Path, device: torch.device) -> DraftJob[DraftConfig]:
    """Return what the recipe asks of its kind of draft."""
    return DraftJob(
        config=recipe.draft,
        target=recipe.target,
        tokenizer=text.tokenizer,
        method=recipe.method,
        objective=recipe.objective,
        data=recipe.data,
        folds=recipe.merge is not False and has_fold(recipe) and recipe.draft.language_model,
        longest=text.longest,
        directory=directory,
        device=device,
        seed=recipe.train.seed,
        batch_size=recipe.train.batch_size,
        revision=recipe.revision,
        trust_remote_code=recipe.trust_remote_code,
    )


def has_fold(recipe: DraftRecipe) -> bool:
    """Whether the recipe's method has a linear fold."""
    return recipe.method is not None and METHODS[recipe.method.name].folds


def make_sets(
    recipe: DraftRecipe, text: Text, draft: Draft, cache: Path, first: AbstractContextManager[object]
) -> Sets:
    """Let each target write what it has not written yet, and split it; served requests are split by age.

    Args:
        cache: directory of data sets. first: within it the main process works and the others wait for it.
    """
    data = recipe.data
    served: ServedText | None = None
    train: list[Request] = []
    held: dict[str, list[Request]] = {}
    with first:
        if text.requests:
            newest = min(data.held_out, max(1, len(text.requests) // 5))
            train += text.requests[:-newest]
            held["requests"] = text.requests[-newest:]
        if text.prompts:
            written, served = _written(recipe, text, draft.target, draft.eos, cache)
            train += _kept(written[: -data.held_out * data.samples], served)
            held["prompts"] = _kept(written[-data.held_out * data.samples :], served)
        teachers, writers = [0] * len(train), {"requests": 0, "prompts": 0}
        for number, reference in enumerate(data.targets or [], start=1):
            written = _written(recipe, text, draft.others[number - 1], draft.eos, cache)[0]
            mine = _kept(written[: -data.held_out * data.samples], None)
            train, teachers = train + mine, teachers + [number] * len(mine)
            held[f"prompts, {reference}"] = _kept(written[-data.held_out * data.samples :], None)
            writers[f"prompts, {reference}"] = number
        stored = stored_topk(draft.target, train, data.top_k, cache) if data.top_k is not None else None
    digest = sha256(json.dumps([[r.prompt, r.response] for r in train]).encode()).hexdigest()
    prompts = [*text.prompts[-data.held_out :]] if text.prompts else [r.prompt for r in held["requests"]]
    several = bool(data.targets)
    splits = {
        name: make_dataset(requests, teachers=[writers[name]] * len(requests) if several else None)
        for name, requests in held.items()
    }
    examples = make_dataset(train, stored, teachers=teachers if several else None)
    return Sets(examples, splits, prompts, digest, served)


def _written(
    recipe: DraftRecipe, text: Text, model: PreTrainedModel, eos: frozenset[int], cache: Path
) -> tuple[Sequence[Request | None], ServedText | None]:
    """Return the target's continuations, written here or by the endpoint; of its answers, None for a dropped one."""
    data = recipe.data
    writing = Writing(data.max_new_tokens, data.temperature, data.top_p, data.samples, data.seed, data.batch_size)
    if data.endpoint is None or data.prompts is None:
        return write_continuations(model, text.prompts, writing, cache, eos)[1], None
    target = Target(model, text.tokenizer, eos)
    said = read_conversations(data.prompts, text.tokenizer, field=data.field, chat=data.chat, most=data.max_prompts)
    prompts = [ServedPrompt(ids, messages) for ids, messages in zip(text.prompts, said, strict=True)]
    return served_continuations(data, target, prompts, writing, cache)


def _kept(written: Sequence[Request | None], served: ServedText | None) -> list[Request]:
    """Return the continuations that were not dropped."""
    kept = [request for request in written if request is not None]
    if not kept and served is not None:
        raise PeftlabError(f"data.endpoint: none of {len(written)} answers can be used; {served.line()}")
    return kept


def model_options(recipe: DraftRecipe) -> Attributes:
    """Return what loading the target takes beside its name."""
    options: Attributes = {"trust_remote_code": recipe.trust_remote_code}
    return options | ({"revision": recipe.revision} if recipe.revision else {})
