"""The parts of a draft recipe's way: what is loaded, what is learnt from, what is minimised and measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from peftlab.drafting.acceptance import measure, measure_exit, measure_heads
from peftlab.drafting.checks import check_dtypes, check_head, check_method, check_models, check_tokenizers
from peftlab.drafting.examples import make_dataset
from peftlab.drafting.exits import Exit, find_exit
from peftlab.drafting.load import eos_ids
from peftlab.drafting.losses import EarlyExitLoss, HeadsLoss, Objective, PairLoss
from peftlab.drafting.on_policy import OnPolicy
from peftlab.drafting.stored_top_k import stored_topk
from peftlab.drafting.target_text import Writing, check_room, write_continuations
from peftlab.drafting.truncation import truncate
from peftlab.errors import PeftlabError
from peftlab.methods.medusa_config import MedusaConfig
from peftlab.models.pretrained import load_base, load_config, load_tokenizer
from peftlab.recipe.schema import DraftRecipe, Truncation
from peftlab.tasks.prompts import Request, read_prompt_ids, read_requests

Score = Callable[[nn.Module], dict[str, dict[str, float]]]


@dataclass
class Text:
    """What a recipe's data comes to, before the target has written anything.

    Attributes:
        tokenizer: the target's. prompts: token ids, the held-out ones last. requests: served ones, newest last.
        longest: tokens of the longest example, with all that the target may write.
    """

    tokenizer: PreTrainedTokenizerBase
    prompts: list[list[int]]
    requests: list[Request]
    longest: int


@dataclass
class Models:
    """What is loaded: the frozen target, the model that trains, and how the latter is called in an adapter.

    For heads and early exit the two are the same model.

    Attributes:
        base: reference of the model that trains; the run's ``base/`` where it was cut from the target.
        exit: where the target exits early; None for other drafts.
    """

    target: Any
    student: Any
    base: str
    eos: frozenset[int]
    reference: Any = None
    exit: Exit | None = None


@dataclass
class Sets:
    """Tokenised examples: the training set, and held-out ones by split, the one that decides first."""

    train: Dataset
    held_out: dict[str, Dataset]
    prompts: list[list[int]]
    fingerprint: str


def read_text(recipe: DraftRecipe) -> Text:
    """Read prompts and requests and check them against the target's context and tokenizer: no weights yet."""
    data, options = recipe.data, model_options(recipe)
    config = load_config(recipe.target, **options)
    tokenizer = load_tokenizer(recipe.target, **options)
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    count = config.get_text_config(decoder=True).num_hidden_layers
    if isinstance(recipe.draft, Truncation):
        missing = [layer for layer in recipe.draft.truncate.layers if not 0 <= layer < count]
        if missing:
            raise PeftlabError(f"draft.truncate.layers: no layer {missing[0]}; the target has 0 to {count - 1}")
        if recipe.early_exit and len(recipe.draft.truncate.layers) == count:
            raise PeftlabError(f"early_exit: draft.truncate.layers names all {count} layers; leave out the last ones")
    prompts: list[list[int]] = []
    if data.prompts is not None:
        prompts = read_prompt_ids(data.prompts, tokenizer, field=data.field, chat=data.chat)[: data.max_prompts]
        if len(prompts) <= data.held_out:
            raise PeftlabError(
                f"data.held_out: {data.held_out} leaves none of {len(prompts)} prompts to train on; give more prompts "
                "or hold out fewer"
            )
    requests = read_requests(data.replay, tokenizer, chat=data.chat) if data.replay is not None else []
    if len(requests) == 1:
        raise PeftlabError(f"{data.replay}: a single request cannot be both learnt from and held out; give 2 or more")
    lengths = [len(prompt) + data.max_new_tokens for prompt in prompts]
    lengths += [len(request.prompt) + len(request.response) for request in requests]
    check_room(lengths, limit, "the target's context; shorten the prompts or data.max_new_tokens")
    check_room(lengths, recipe.train.max_length, "train.max_length; raise it, or shorten data.max_new_tokens")
    if isinstance(recipe.draft, str):
        chat = bool(getattr(tokenizer, "chat_template", None)) and data.chat is not False
        check_tokenizers(tokenizer, load_tokenizer(recipe.draft), chat=chat)
        check_dtypes(config, load_config(recipe.draft))
    return Text(tokenizer, prompts, requests, max(lengths))


def load_models(recipe: DraftRecipe, text: Text, run_dir: Path, device: torch.device) -> Models:
    """Load target and draft, check that they fit, and put them on the device.

    Raises:
        PeftlabError: as the preflight checks do.
    """
    options = model_options(recipe)
    target, _ = load_base(recipe.target, "AutoModelForCausalLM", **options)
    check_head(target, "target")
    exit_ = _exit(recipe, target)
    student, base = target, recipe.target
    if isinstance(recipe.draft, Truncation) and not recipe.early_exit:
        student, base = truncate(target, recipe.draft.truncate.layers), str(run_dir / "base")
    elif isinstance(recipe.draft, str):
        base = recipe.draft
        student, _ = load_base(base, "AutoModelForCausalLM", trust_remote_code=recipe.trust_remote_code)
    eos = eos_ids(target) or frozenset(filter(None, [text.tokenizer.eos_token_id]))
    held = Models(target, student, base, eos, exit=exit_)
    if recipe.objective.reference is not None:
        held.reference, _ = load_base(recipe.objective.reference, "AutoModelForCausalLM")
    others: list[Any] = [student, held.reference]
    for model in others:
        if model is not None and model is not target:
            check_head(model, "draft")
            check_models(target, model, text.longest)
            model.to(device)
    check_method(student, recipe.method)
    held.target.to(device).requires_grad_(False)
    return held


def _exit(recipe: DraftRecipe, target: Any) -> Exit | None:
    if not recipe.early_exit:
        return None
    assert isinstance(recipe.draft, Truncation)
    return find_exit(target, len(recipe.draft.truncate.layers))


def make_sets(recipe: DraftRecipe, text: Text, models: Models, cache: Path, first: AbstractContextManager[Any]) -> Sets:
    """Let the target write what it has not written yet, and split it; served requests are split by age.

    Args:
        cache: directory of data sets. first: within it the main process works and the others wait for it.
    """
    data = recipe.data
    writing = Writing(data.max_new_tokens, data.temperature, data.top_p, data.samples, data.seed, data.batch_size)
    train: list[Request] = []
    held: dict[str, list[Request]] = {}
    with first:
        if text.requests:
            newest = min(data.held_out, max(1, len(text.requests) // 5))
            train += text.requests[:-newest]
            held["requests"] = text.requests[-newest:]
        if text.prompts:
            _, written = write_continuations(models.target, text.prompts, writing, cache, models.eos)
            train += written[: -data.held_out * data.samples]
            held["prompts"] = written[-data.held_out * data.samples :]
        stored = stored_topk(models.target, train, data.top_k, cache) if data.top_k is not None else None
    digest = sha256(json.dumps([[r.prompt, r.response] for r in train]).encode()).hexdigest()
    prompts = [*text.prompts[-data.held_out :]] if text.prompts else [r.prompt for r in held["requests"]]
    splits = {name: make_dataset(requests) for name, requests in held.items()}
    return Sets(make_dataset(train, stored), splits, prompts, digest)


def make_objective(recipe: DraftRecipe) -> Objective:
    """Return the recipe's objective with the settings that it knows."""
    chosen = recipe.objective
    settings = {"jsd": {"beta": chosen.beta}, "lk_hybrid": {"eta": chosen.eta}}.get(chosen.name, {})
    return Objective(chosen.name, settings, chosen.selective or 1.0)


def make_losses(recipe: DraftRecipe, models: Models) -> Callable[..., Any]:
    """Return the loss that the recipe's kind of draft is trained by."""
    objective, method = make_objective(recipe), recipe.method
    if isinstance(method, MedusaConfig):
        return HeadsLoss(objective, method.decay, method.preserve, method.trunk is not None)
    if models.exit is not None:
        return EarlyExitLoss(objective, models.exit)
    rewrite = OnPolicy(recipe.data.on_policy, recipe.data.temperature, models.eos) if recipe.data.on_policy else None
    return PairLoss(objective, models.target, models.reference, rewrite)


def make_score(recipe: DraftRecipe, models: Models, sets: Sets) -> Score:
    """Return the function that measures acceptance on every held-out split."""
    size = recipe.train.eval_batch_size

    def of_heads(model: nn.Module, data: Dataset) -> dict[str, float]:
        measured, trunk = measure_heads(model, data, size)
        heads = [head.rates() for head in measured]
        each = {f"{key}_{i + 1}": rates[key] for i, rates in enumerate(heads) for key in ("acceptance", "agreement")}
        mean = sum(rates["acceptance"] for rates in heads) / len(heads)
        return {"acceptance": mean, **each, "preserved": trunk.rates()["acceptance"]}

    def of_exit(model: nn.Module, exit_: Exit, data: Dataset) -> dict[str, float]:
        early, whole = measure_exit(model, exit_, data, size)
        return early.rates() | {"preserved": whole.rates()["acceptance"]}

    def score(model: nn.Module) -> dict[str, dict[str, float]]:
        bare: Any = getattr(model, "module", model)
        if recipe.method.name == "medusa":
            return {name: of_heads(bare, data) for name, data in sets.held_out.items()}
        if models.exit is not None:
            return {name: of_exit(bare, models.exit, data) for name, data in sets.held_out.items()}
        return {name: measure(models.target, bare, d, size).rates() for name, d in sets.held_out.items()}

    return score


def model_options(recipe: DraftRecipe) -> dict[str, Any]:
    """Return what loading the target takes beside its name."""
    options: dict[str, Any] = {"trust_remote_code": recipe.trust_remote_code}
    return options | ({"revision": recipe.revision} if recipe.revision else {})
