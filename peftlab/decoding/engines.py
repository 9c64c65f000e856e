"""Choose the forward pass that decodes a model: the fastest that a trial on the model shows to be exact.

Architectures differ in how they place and mask tokens, and a wrong mask gives wrong text without an error. So each
engine reads a handful of tokens, past the model's attention window, and its logits are compared with those of the
model's own forward on one row and the library's cache (``Trial``). The keys and values of the tokens before those are a
short prompt's, repeated: to read a whole window would take seconds, and the mask does not depend on what was read.

Some architectures place tokens by their slot instead of the position that they are given (ALiBi, GPT-Neo's local
layers) or build their own mask. Such a model reads rows of different lengths in several passes (``EqualLengths``), and
a tree as one row per path from the root to a leaf (``PathByPath``). Both return what the single rows would have
returned, at the price of more work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from peftlab.decoding.cache import Block, Engine, EngineWrapper, KVCache, Output, max_positions, paths_of, shape_of
from peftlab.decoding.flat import FlatEngine, structure_of
from peftlab.decoding.recurrent import MIXERS, RecurrentEngine
from peftlab.decoding.transformers_engine import Decoder, TransformersEngine
from peftlab.errors import PeftlabError
from peftlab.models.quantised import inputs_as_they_are, int8_maps


def build_engine(
    model: PreTrainedModel,
    *,
    vocabulary: int | None = None,
    pack: bool = True,
    flat: bool = True,
    features: Sequence[int] = (),
) -> Engine:
    """Return the fastest engine that gives ``model``'s own logits.

    For the families of ``flat.py`` that is a flattened step, else the forward of ``transformers`` with peftlab's masks,
    else with its own; so it is for the decoder of an encoder-decoder model. State-space models have an engine of their
    own (``recurrent.py``). Each is tried on chains, on a batch of rows of different lengths and on a tree (``Trial``);
    where only chains are right, rows of one length are read at a time and trees path by path. ``Engine.kind`` says
    which it is.

    Args:
        model: a causal or an encoder-decoder language model; its weights must not change afterwards.
        vocabulary: return logits for this many tokens only, where the LM head is padded past the
            tokenizer's size: target and draft must agree.
        pack: on the CPU, pack every weight once for FBGEMM's or oneDNN's kernels (a second copy in memory, a third
            of codes; see ``packed.py``). Sums are then rounded in another order than in
            ``transformers``.
        flat: use the flattened step where the architecture is known.
        features: layers, rising, the states entering which ``Output.features`` is to have; their number stands for the
            state that the LM head reads. None by default.

    Raises:
        PeftlabError: the model is not a decoder, keeps a state that cannot be cropped, or no engine gives its logits.
    """
    name, failures = type(model).__name__, list[str]()
    trial: Trial | None = None
    if flat and (structure := structure_of(model)) is not None:
        trial = _make_trial(Trial, model, name)
        engine = _exact_engine(FlatEngine(model, structure, vocabulary, pack=pack, features=features), trial, [])
        if engine is not None:
            return engine
    if name in MIXERS:
        engines: list[Engine] = [RecurrentEngine(model, MIXERS[name], vocabulary, features=features)]
        trial = _make_trial(StateTrial, model, name)
    else:
        language_model = Decoder(model) if model.config.is_encoder_decoder else model
        engines = [
            TransformersEngine(language_model, vocabulary, masks=masks, features=features) for masks in (True, False)
        ]
        trial = trial or _make_trial(Trial, language_model, name)
    for candidate in engines:
        if engine := _exact_engine(candidate, trial, failures):
            return engine
    raise PeftlabError(
        f"{name} cannot be decoded losslessly here ({failures[-1]}): "
        "decode it with transformers' generate, or take another target"
    )


def _make_trial(make: type[Trial], model: PreTrainedModel | Decoder, name: str) -> Trial:
    """Return a trial of a model; an error where its own forward fails, or is not causal."""
    try:
        trial = make(model)
    except _FORWARD_ERRORS as fault:
        raise PeftlabError(f"{name}: its own forward with a cache fails on a short prompt: {fault}") from fault
    if not trial.causal:
        raise PeftlabError(f"{name} is not causal: its logits for a token change with the tokens that follow")
    return trial


# Errors that a model raises when it is given a mask, a position or a cache of a form that it does not know.
_FORWARD_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError)


def _exact_engine(engine: Engine, trial: Trial, failures: list[str]) -> Engine | None:
    """Return an exact engine: the given one, its blocks split where that is necessary; None if single rows are wrong.

    Args:
        engine: to try. trial: of the model. failures: reasons of failed checks are appended to it.
    """

    def passes(check: Callable[[Engine], bool], engine: Engine) -> bool:
        try:
            right = check(engine)
        except torch.OutOfMemoryError:
            raise
        except _FORWARD_ERRORS as fault:
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


# Eight first choices before a path of three: the slot of the path's end is far from its position.
_PARENTS = (*[-1] * 8, 0, 7, 9)
_NODES = 1 + len(_PARENTS)
_PATHS = ([0, 8, 10, 11], [0, 1, 9])  # two of its paths, as nodes; node 0 is the root
_PROMPT = 12
_MAX_WINDOW = 1024  # a wider window is not exceeded: its keys and values could take gigabytes
_EDGE_FACTOR = 32  # how much larger the values are at the edge of the window, where one token too many is to be seen


class Trial:
    """A comparison of engines with the model's own forward on single rows.

    Two sequences are continued, one of 5 tokens and one past the window. Logits agree where their ``difference`` is
    at most the square root of the precision of the dtype that the model computes in: 3e-4 in float32, 0.03 in
    float16, 0.09 in bfloat16. Rounding over thirty layers is several times smaller, and a token too many or too few in
    a trained model larger.

    Args:
        model: a causal language model, or an encoder-decoder model's decoder, as it is to decode: on its device, in its
            dtype.

    Attributes:
        tolerance: the largest difference at which logits agree.
        causal: whether the model's own forward gives the same when it reads tokens at once and in two parts.

    Raises:
        Exception: whatever the model's own forward raises.
    """

    def __init__(self, model: PreTrainedModel | Decoder):
        self._model, self._config = model, model.config.get_text_config(decoder=True)
        limit = max_positions(self._config) or _MAX_WINDOW + _NODES
        self._window = _window(self._config)
        self._long = max(2, min(max(_PROMPT, self._window + 3), limit - len(_PATHS[0])))
        self._short = min(5, self._long - 1)
        weight = model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        vocabulary = len(weight)
        tokens = torch.randint(vocabulary, (_PROMPT + _NODES,), generator=torch.Generator().manual_seed(0))
        self._prompt, self._tree = tokens.to(model.device).split((_PROMPT, _NODES))
        self._prompt = self._prompt[: self._long]
        with _eval_mode(model), torch.inference_mode():
            with _dtypes_of_products(model) as dtypes:
                self._prompt_logits = self._read_prompt()
            self._paths = {
                n: [self._continue(n, self._tree[path])[0] for path in _PATHS] for n in (self._short, self._long)
            }
            self.tolerance = max(map(_precision, dtypes)) ** 0.5
            parts = self._continue(self._long, *self._tree[_PATHS[0]].split(2))
            self.causal = self._logits_agree(torch.cat(parts), self._paths[self._long][0])

    def chains(self, engine: Engine) -> bool:
        """Return whether logits of single rows are right: a prompt, tokens past the window, a token read again."""
        prompt, path = self._prompt[None], self._tree[None, _PATHS[0]]
        with _eval_mode(self._model), torch.inference_mode():
            empty = engine.new_cache(1, len(self._prompt))
            first = engine.forward(empty, prompt, Block((0,), prompt.shape[1]))
            cache = self._engine_cache(engine, [self._long])
            block = engine.forward(cache, path, Block((self._long,), path.shape[1]))
            again = engine.forward(cache, path[:, 1:2], Block((self._long + 1,), 1))
        expected = self._paths[self._long][0]
        # Rounding changes the first tokens of a text most: four times as much was measured.
        return (
            self._logits_agree(first.logits[0], self._prompt_logits, factor=4)
            and self._logits_agree(block.logits[0], expected)
            and self._logits_agree(again.logits[0], expected[1:2])
        )

    def batches(self, engine: Engine) -> bool:
        """Return whether logits of a batch of rows of different lengths are right."""
        starts = (self._short, self._long, self._short)
        tokens = self._tree[_PATHS[0]].expand(len(starts), -1)
        with _eval_mode(self._model), torch.inference_mode():
            out = engine.forward(self._engine_cache(engine, starts), tokens, Block(starts, tokens.shape[1]))
        return all(self._logits_agree(row, self._paths[n][0]) for row, n in zip(out.logits, starts, strict=True))

    def trees(self, engine: Engine) -> bool:
        """Return whether logits of trees are right, in a batch of rows of different lengths."""
        starts = (self._short, self._long)
        block = Block(starts, _NODES, tree=shape_of([_PARENTS] * len(starts)))
        with _eval_mode(self._model), torch.inference_mode():
            out = engine.forward(self._engine_cache(engine, starts), self._tree.expand(len(starts), -1), block)
        return all(
            self._logits_agree(row[path], want)
            for row, n in zip(out.logits, starts, strict=True)
            for path, want in zip(_PATHS, self._paths[n], strict=True)
        )

    def _read_prompt(self) -> Tensor:
        """Return the model's own logits of the prompt, [n, V], and keep its keys and values."""
        cache = DynamicCache(config=self._config)
        logits = self._own_logits(self._prompt, cache)
        self._states = [
            (i, layer.keys, layer.values)
            for i, layer in enumerate(cache.layers)
            if isinstance(layer, CacheLayerMixin) and layer.keys is not None and layer.values is not None
        ]
        return logits

    def _continue(self, length: int, *parts: Tensor) -> list[Tensor]:
        """Return the model's own logits, [n, V] each, of parts read one after the other behind ``length`` tokens."""
        cache = self._library_cache(length)
        return [self._own_logits(part, cache) for part in parts]

    def _own_logits(self, tokens: Tensor, cache: DynamicCache) -> Tensor:
        """Return the logits of the model's own forward of one row, [n, V]."""
        return self._model(input_ids=tokens[None], past_key_values=cache, use_cache=True).logits[0]

    def _repeated_states(self, length: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each layer's index, and keys and values [1, H_kv, length, D]: the prompt's, repeated."""
        for i, keys, values in self._states:
            slot = torch.arange(length, device=keys.device)
            edge = (slot - max(0, length - self._window)).abs() <= _NODES
            amplified = torch.where(edge, _EDGE_FACTOR, 1).to(values.dtype)[:, None]
            some = slot % keys.shape[2]
            yield i, keys[:, :, some], values[:, :, some] * amplified

    def _library_cache(self, length: int) -> DynamicCache:
        cache = DynamicCache(config=self._config)
        for i, keys, values in self._repeated_states(length):
            cache.update(keys, values, i)
        return cache

    def _engine_cache(self, engine: Engine, lengths: list[int] | tuple[int, ...]) -> KVCache:
        cache = engine.new_cache(len(lengths), max(lengths) + _NODES)
        for row, length in enumerate(lengths):
            for i, keys, values in self._repeated_states(length):
                cache.write(i, torch.cat((keys, values), 1), Block((0,), length, rows=(row,)))
        return cache

    def _logits_agree(self, logits: Tensor, expected: Tensor, factor: int = 1) -> bool:
        return difference(logits, expected[..., : logits.shape[-1]]) <= factor * self.tolerance


class StateTrial(Trial):
    """A trial of a state-space model, whose own forward reads a sequence again from its first token."""

    def _read_prompt(self) -> Tensor:
        return self._continue(0, self._prompt)[0]

    def _continue(self, length: int, *parts: Tensor) -> list[Tensor]:
        read, logits = self._prompt[:length], []
        for part in parts:
            read = torch.cat((read, part))
            logits.append(self._model(input_ids=read[None], use_cache=False).logits[0, -len(part) :])
        return logits

    def _engine_cache(self, engine: Engine, lengths: list[int] | tuple[int, ...]) -> KVCache:
        cache = engine.new_cache(len(lengths), max(lengths) + _NODES)
        for row, length in enumerate(lengths):
            engine.forward(cache, self._prompt[None, :length], Block((0,), length, rows=(row,)))
        return cache


def difference(logits: Tensor, expected: Tensor) -> float:
    """Return the root mean square over positions of |a - b| / |b - mean b|; infinite for nan.

    Args:
        logits: a, [n, V]. expected: b, [n, V].
    """
    usual = expected.abs() < torch.finfo(torch.float16).max  # some models set the logits of some tokens to -inf
    logits, expected, usual = logits.cpu(), expected.cpu(), usual.cpu()  # MPS has no fp64
    a, b = (torch.where(usual, x, 0).double() for x in (logits, expected))
    spread = torch.where(usual, b - b.sum(-1, keepdim=True) / usual.sum(-1, keepdim=True), 0)
    found = ((a - b).norm(dim=-1) / spread.norm(dim=-1)).square().mean().sqrt().item()
    return found if found == found else float("inf")


@contextmanager
def _dtypes_of_products(model: PreTrainedModel | Decoder) -> Iterator[set[torch.dtype]]:
    """Collect the dtypes of the model's products in the with-block: its own, and that of the logits under autocast."""
    dtypes, head = {model.dtype}, model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        yield dtypes
        return
    hook = head.register_forward_hook(lambda _, __, logits: dtypes.add(logits.dtype))
    try:
        yield dtypes
    finally:
        hook.remove()


def _precision(dtype: torch.dtype) -> float:
    """Return the relative precision of products in ``dtype``, which float32 may compute in TF32 or bfloat16."""
    coarse = {"highest": torch.float32, "high": torch.float16, "medium": torch.bfloat16}
    return torch.finfo(coarse[torch.get_float32_matmul_precision()] if dtype == torch.float32 else dtype).eps


def _window(config: PretrainedConfig) -> int:
    """Return the width of the model's attention window; 0 without one, or if it is wider than ``_MAX_WINDOW``."""
    names = ("sliding_window", "window_size", "attention_chunk_size", "attention_window_size", "local_attention")
    widths = [width for name in names if isinstance(width := getattr(config, name, None), int)]
    return max((width for width in widths if width <= _MAX_WINDOW), default=0)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch off dropout and the rounding of int8 inputs in the with-block; restore training mode after it."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with inputs_as_they_are(int8_maps(model)):
            yield
    finally:
        for module in training:
            module.training = True


class EqualLengths(EngineWrapper):
    """An engine that runs rows of equal length together, and different lengths in turn."""

    def __init__(self, engine: Engine):
        super().__init__(engine, ", rows of one length at a time")
        self.positioned = False

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run this engine on new tokens; see ``Engine.forward``."""
        by_start: dict[int, list[int]] = defaultdict(list)
        for place, start in enumerate(block.starts):
            by_start[start].append(place)
        slots = block.rows or range(len(block.starts))
        wanted = list(range(block.n)) if keep is None else keep
        logits = hidden = torch.empty(0)
        features: Tensor | None = None
        for start, places in by_start.items():
            # A model that places tokens by their slots has none past its limit.
            n = block.n if self.limit is None or block.tree else min(block.n, self.limit - start)
            kept = [i for i, place in enumerate(wanted) if place < n]
            if not kept:
                continue
            rows = block.rows if len(by_start) == 1 else tuple(slots[place] for place in places)
            tree = None if block.tree is None else block.tree.of_rows(places)
            part = replace(block, starts=(start,) * len(places), n=n, rows=rows, tree=tree)
            out = self._engine.forward(cache, tokens[places, :n], part, [wanted[i] for i in kept])
            if not len(logits):
                logits, hidden = (x.new_zeros(len(tokens), len(wanted), x.shape[-1]) for x in (out.logits, out.hidden))
            # Rows in this group by tokens kept: the two index tensors broadcast to a rectangle of the output.
            rectangle = torch.tensor(places)[:, None], torch.tensor(kept)
            logits[rectangle], hidden[rectangle] = out.logits, out.hidden
            if out.features is not None:
                if features is None:
                    features = out.features.new_zeros(*tokens.shape, out.features.shape[-1])
                features[places, :n] = out.features
        return Output(logits, hidden, features)


class PathByPath(EngineWrapper):
    """An engine that runs trees as chains: one copy of the row for each leaf."""

    def __init__(self, engine: Engine):
        super().__init__(engine, ", trees path by path")
        self.positioned = False

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run this engine on new tokens; see ``Engine.forward``."""
        if block.tree is None:
            return self._engine.forward(cache, tokens, block, keep)
        paths = paths_of(block.tree.below.to(self.device))
        slots, rows = block.rows or range(len(tokens)), paths.row.tolist()
        starts = tuple(block.starts[row] for row in rows)
        copies = cache.copy([slots[row] for row in rows], max(starts) + paths.nodes.shape[1])
        read = tokens[paths.row[:, None], paths.nodes]
        out = self._engine.forward(copies, read, Block(starts, paths.nodes.shape[1]))
        for layer, stored in enumerate(copies.states):
            if stored is not None:  # [paths, 2 H_kv, capacity, D]
                slot = torch.tensor(block.starts, device=stored.device)[:, None] + paths.depth
                cache.write(layer, stored[paths.path, :, slot].transpose(1, 2), block)
        wanted = slice(None) if keep is None else keep
        logits, hidden = (x[paths.path, paths.depth] for x in (out.logits, out.hidden))
        features = None if out.features is None else out.features[paths.path, paths.depth]
        return Output(logits[:, wanted], hidden[:, wanted], features)
