"""Choosing the forward pass that decodes a model: the fastest that a trial on the model shows to be exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from peftlab.decoding.engines.base import Engine
from peftlab.decoding.engines.encoder_decoder import Decoder
from peftlab.decoding.engines.flat import FlatEngine
from peftlab.decoding.engines.proof import StateTrial, Trial
from peftlab.decoding.engines.recurrent.mixers import mix_of
from peftlab.decoding.engines.recurrent.recurrent_engine import RecurrentEngine
from peftlab.decoding.engines.split import EqualLengths, PathByPath
from peftlab.decoding.engines.structure import structure_of
from peftlab.decoding.engines.transformers import TransformersEngine
from peftlab.errors import PeftlabError


def build_engine(
    model: PreTrainedModel,
    *,
    vocabulary: int | None = None,
    pack: bool = True,
    flat: bool = True,
    features: Sequence[int] = (),
) -> Engine:
    """Return the fastest engine that gives ``model``'s own logits.

    For the families of ``structure.py`` that is a flattened step (``flat.py``), else the forward of ``transformers``
    with peftlab's masks, else with its own; so it is for the decoder of an encoder-decoder model. State-space models
    have an engine of their own (``recurrent``). Each is tried on
    chains, on a batch of rows of different lengths and on a tree (``proof.py``); where only chains are right, rows of
    one length are read at a time and trees path by path (``split.py``). ``Engine.kind`` says which it is.

    Args:
        model: a causal or an encoder-decoder language model; its weights must not change afterwards.
        vocabulary: return logits for this many tokens only, where the LM head is padded past the
            tokenizer's size: target and draft must agree.
        pack: on the CPU, pack every weight once for FBGEMM's or oneDNN's kernels (a second copy in memory, a third
            of codes; see ``packed/products.py``). Sums are then rounded in another order than in
            ``transformers``.
        flat: use the flattened step where the architecture is known.
        features: layers, rising, the states entering which ``Output.features`` is to have; their number stands for the
            state that the LM head reads. None by default.

    Raises:
        PeftlabError: the model is not a decoder, keeps a state that cannot be cropped, or no engine gives its logits.
    """
    name = type(model).__name__
    language_model = Decoder(model) if model.config.is_encoder_decoder else model
    if (mix := mix_of(model)) is not None:
        trial: Trial = _trial(StateTrial, model, name)
        engines: list[Engine] = [RecurrentEngine(model, mix, vocabulary, features=features)]
    else:
        library = TransformersEngine(language_model, vocabulary, features=features)
        trial = _trial(Trial, language_model, name)
        engines = [library, TransformersEngine(language_model, vocabulary, masks=False, features=features)]
        if flat and library.encoder is None and (structure := structure_of(model)) is not None:
            engine = _exact(FlatEngine(model, structure, vocabulary, pack=pack, features=features), trial, [])
            if engine is not None:
                return engine
    failures: list[str] = []
    for engine in engines:
        if exact := _exact(engine, trial, failures):
            return exact
    raise PeftlabError(
        f"{name} cannot be decoded losslessly here ({failures[-1]}): "
        "decode it with transformers' generate, or take another target"
    )


def _trial(make: type[Trial], model: PreTrainedModel | Decoder, name: str) -> Trial:
    try:
        trial = make(model)
    except _FAULTS as fault:
        raise PeftlabError(f"{name}: its own forward with a cache fails on a short prompt: {fault}") from fault
    if not trial.causal:
        raise PeftlabError(f"{name} is not causal: its logits for a token change with the tokens that follow")
    return trial


# What a model raises when it is given a mask, a position or a cache of a form that it does not know.
_FAULTS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError)


def _exact(engine: Engine, trial: Trial, failures: list[str]) -> Engine | None:
    """Return the engine, its blocks split where necessary; None if single rows are wrong. ``failures`` says why."""

    def passes(check: Callable[[Engine], bool], engine: Engine) -> bool:
        try:
            right = check(engine)
        except torch.OutOfMemoryError:
            raise
        except _FAULTS as fault:
            failures.append(f"its forward fails on {check.__name__}: {fault}")
            return False
        if not right:
            failures.append(f"its logits of {check.__name__} are not those of its own forward on single rows")
        return right

    if not passes(trial.chains, engine):
        return None
    if not passes(trial.batches, engine):
        engine = EqualLengths(engine)
    if not passes(trial.trees, engine):
        engine = PathByPath(engine)
    return engine if passes(trial.batches, engine) and passes(trial.trees, engine) else None
