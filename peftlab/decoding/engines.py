"""Choose the forward pass that decodes a model: the fastest that a trial on the model shows to be exact.

Architectures differ in how they place and mask tokens, and a wrong mask gives wrong text without an error. So each
engine reads a handful of tokens, past the model's attention window, and its logits are compared with those of the
model's own forward on one row and the library's cache (``Trial``). The keys and values of the tokens before those are a
short prompt's, repeated: to read a whole window would take seconds, and the mask does not depend on what was read.

Some architectures place tokens by their slot instead of the position that they are given (ALiBi, GPT-Neo's local
layers) or build their own mask. Such a model reads rows of different lengths in several passes (``EqualLengths``), and
a tree as one row per path from the root to a leaf (``PathByPath``). Both return what the single rows would have
returned, at the price of more work.

``TransformersEngine`` is the forward pass of ``transformers`` on a ``KVCache``, of decoders and of encoder-decoder
models (T5, BART). An encoder reads a prompt once. What the decoder needs of it, the keys and values of its
cross-attention among it, is part of the batch's cache (``Context``), and a step of the decoder is then a step like any
other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutput

from peftlab.decoding.cache import (
    Block,
    Context,
    Encoder,
    Engine,
    EngineWrapper,
    KVCache,
    Output,
    additive_mask,
    paths_of,
    right_padded,
    shape_of,
)
from peftlab.decoding.flat import FlatEngine, LayerStructure, Norm, Structure, structure_of
from peftlab.decoding.recurrent import HYBRIDS, MIXERS, HybridEngine, RecurrentEngine
from peftlab.decoding.tiled import LANES
from peftlab.errors import PeftlabError
from peftlab.models.load import max_positions
from peftlab.models.quantised import int8_maps, unquantised_inputs
from peftlab.untyped import Unwrapped


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
    else with its own; so it is for the decoder of an encoder-decoder model. Models with a state have engines of their
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
        compiled = compiled_engine(structure) if pack else None
        for make in (compiled, partial(FlatEngine, pack=pack)):
            if make and (engine := _exact_engine(make(structure, vocabulary, features=features), trial, [])):
                return engine
    if name in MIXERS:
        engines: list[Engine] = [RecurrentEngine(model, MIXERS[name], vocabulary, features=features)]
        trial = _make_trial(StateTrial, model, name)
    elif name in HYBRIDS:
        engines = [HybridEngine(model, vocabulary, features=features)]
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


def compiled_engine(structure: Structure) -> type[FlatEngine] | None:
    """Return the class of the compiled step; None without numba or torch's OpenMP, or for another architecture."""
    stored = structure.embedding
    if stored.device.type != "cpu" or stored.dtype not in _COMPILED_DTYPES or not can_compile(structure):
        return None
    try:
        from peftlab.decoding.compiled import CompiledEngine
    except (ImportError, AttributeError, OSError, RuntimeError):
        # No numba; a torch without GNU's functions of OpenMP; no directory where numba may keep what it compiles.
        return None
    return CompiledEngine


_COMPILED_DTYPES = (torch.float32, torch.bfloat16)


def can_compile(structure: Structure) -> bool:
    """Return whether a decoder is built as Llama is, with sizes that vectors divide."""
    gated = structure.gated and structure.activation is F.silu and not structure.parallel
    whole = structure.dim % LANES == 0 and _is_plain(structure.norm) and structure.head.addition is None
    return gated and whole and all(_can_compile_layer(layer, structure.dim) for layer in structure.layers)


def _can_compile_layer(layer: LayerStructure, dim: int) -> bool:
    linears = [*layer.qkv, layer.out, *layer.up, layer.down]
    heads = [norm for norm in (layer.queries, layer.keys) if norm is not None]
    return (
        all(linear.addition is None and linear.weight.shape[1] % LANES == 0 for linear in linears)
        and layer.before_mlp is not None
        and layer.after_attention is layer.after_mlp is layer.cap is None
        and all(map(_is_plain, [layer.before_attention or layer.before_mlp, layer.before_mlp, *heads]))
        and all(norm.weight.numel() == dim for norm in heads)
    )


def _is_plain(norm: Norm) -> bool:
    return not norm.centred and norm.bias is None and norm.weight.numel() % LANES == 0


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
        cache = DynamicCache(config=self._config)
        for i, keys, values in self._repeated_states(length):
            cache.update(keys, values, i)
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

    def _engine_cache(self, engine: Engine, lengths: list[int] | tuple[int, ...]) -> KVCache:
        cache = engine.new_cache(len(lengths), max(lengths) + _NODES)
        for row, length in enumerate(lengths):
            for i, keys, values in self._repeated_states(length):
                cache.update(i, keys, values, Block((0,), length, rows=(row,)))
        return cache

    def _logits_agree(self, logits: Tensor, expected: Tensor, factor: int = 1) -> bool:
        return difference(logits, expected[..., : logits.shape[-1]]) <= factor * self.tolerance


class StateTrial(Trial):
    """A trial of a model with a state, whose own forward reads a sequence again from its first token."""

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
        with unquantised_inputs(int8_maps(model)):
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
            if wanted and not kept:
                continue
            rows = block.rows if len(by_start) == 1 else tuple(slots[place] for place in places)
            tree = None if block.tree is None else block.tree.of_rows(places)
            part = replace(block, starts=(start,) * len(places), n=n, rows=rows, tree=tree)
            out = self._engine.forward(cache, tokens[places, :n], part, [wanted[i] for i in kept])
            if not len(logits):
                logits, hidden = (x.new_zeros(len(tokens), len(wanted), x.shape[-1]) for x in (out.logits, out.hidden))
            # Rows in this group by tokens kept: the two index tensors broadcast to a rectangle of the output.
            rectangle = torch.tensor(places)[:, None], torch.tensor(kept, dtype=torch.long)
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


class TransformersEngine:
    """The model's own forward, with peftlab's positions and a four-dimensional mask, or with its own mask.

    Args:
        model: a causal language model, or the decoder of an encoder-decoder model.
        vocabulary: see ``build_engine``.
        masks: give the model a mask of what each token sees. Without, the model masks as in its own ``generate``, which
            is right for rows of one length without trees only.
        features: see ``build_engine``.

    Raises:
        PeftlabError: the model keeps a state that cannot be cropped, or is not a decoder.
    """

    def __init__(
        self,
        model: PreTrainedModel | Decoder,
        vocabulary: int | None = None,
        *,
        masks: bool = True,
        features: Sequence[int] = (),
    ):
        config = model.config.get_text_config(decoder=True)
        name, head = type(model).__name__, model.get_output_embeddings()
        if head is None:
            raise PeftlabError(f"{name} is not a language model; load one for causal LM")
        kinds = {type(layer) for layer in DynamicCache(config=config).layers} or {DynamicLayer}
        if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
            raise PeftlabError(f"{name} keeps a state other than keys and values, which cannot be cropped")
        self.kind = "transformers" if masks else "transformers, its own mask"
        self.packed: tuple[str, ...] = ()
        self.model, self.head = model, head
        self.encoder: Encoder | None = model if isinstance(model, Decoder) else None
        self.vocab_size = vocabulary or self.head.get_parameter("weight").shape[0]
        self.limit = max_positions(config)
        self.layers = config.num_hidden_layers
        self.device = model.device
        self.positioned = masks
        self._masks, self._features = masks, tuple(features)
        self._int8 = int8_maps(model)
        self._window = getattr(config, "sliding_window", None)
        self._layer_types = set(getattr(config, "layer_types", None) or ())

    def new_cache(self, batch: int, capacity: int, context: Context | None = None) -> KVCache:
        """Return an empty cache; see ``Engine.new_cache``."""
        return KVCache(self.layers, batch, capacity, context)

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run this engine on new tokens; see ``Engine.forward``."""
        positions = block.positions(self.device).expand(len(tokens), -1)
        if self.limit is not None:
            positions = positions.clamp_max(self.limit - 1)  # of rows that are at the end, and draft nothing
        head_inputs: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: head_inputs.append(inputs[0]))
        try:
            with unquantised_inputs(self._int8):
                logits, features = self._logits(cache, tokens, positions, block, keep)
        finally:
            hook.remove()
        hidden = head_inputs[0]
        if keep is not None and (not keep or self.encoder is not None):  # of an encoder-decoder model they are all
            logits, hidden = logits[:, keep], hidden[:, keep]
        return Output(logits[..., : self.vocab_size], hidden, features)

    def _logits(
        self, cache: KVCache, tokens: Tensor, positions: Tensor, block: Block, keep: list[int] | None
    ) -> tuple[Tensor, Tensor | None]:
        slots, context = _CacheLayer if self._masks else _ContiguousCacheLayer, cache.context
        if context is not None and block.rows is not None:
            context = context.select(block.rows)
        output = self.model(
            input_ids=tokens,
            attention_mask=self._mask(block) if self._masks else None,
            position_ids=positions,
            past_key_values=Cache(
                layers=[slots(cache, block, i, self._slots_shown(block)) for i in range(self.layers)]
            ),
            use_cache=True,
            logits_to_keep=torch.tensor(keep or [0], device=self.device) if keep is not None else 0,
            output_hidden_states=bool(self._features),
            **({} if context is None else {"context": context}),
        )
        features = [output.hidden_states[layer] for layer in self._features]
        return output.logits, torch.cat(features, -1) if features else None

    def _slots_shown(self, block: Block) -> int:
        """Return the number of slots shown to the model: in a chain none past its limit, where it may have no mask."""
        return block.end if self.limit is None or block.tree else min(block.end, self.limit)

    def _mask(self, block: Block) -> Tensor | dict[str, Tensor]:
        # Always a tensor: without one, the library would derive a causal mask from its own idea of positions.
        everything = torch.ones(1, 1, block.n, block.end, dtype=torch.bool, device=self.device)

        def mask(window: int | None) -> Tensor:
            visible = block.visible(window, self.device)
            visible = everything if visible is None else visible
            visible = visible.expand(len(block.starts), -1, -1, -1)
            return additive_mask(visible[..., : self._slots_shown(block)], self.model.dtype)

        if len(self._layer_types) > 1:
            return {"full_attention": mask(None), "sliding_attention": mask(self._window)}
        return mask(None if self._layer_types == {"full_attention"} else self._window)


class _CacheLayer(CacheLayerMixin):
    """A layer of a ``KVCache`` behind the cache interface of ``transformers``, for one forward pass."""

    def __init__(self, cache: KVCache, block: Block, layer: int, seen: int):
        super().__init__()
        self.cache, self.block, self.layer, self.seen = cache, block, layer, seen

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the ``KVCache`` allocates."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.update(self.layer, key_states, value_states, self.block)
        return keys[:, :, : self.seen], values[:, :, : self.seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.block.end, 0

    def get_seq_length(self) -> int:
        return self.block.end - self.block.n

    def get_max_length(self) -> int:
        return self.cache.capacity


class _ContiguousCacheLayer(_CacheLayer):
    """A layer that returns contiguous keys and values, as the library's cache does: some models rely on it."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        return keys.contiguous(), values.contiguous()


class Decoder(nn.Module):
    """The decoder of an encoder-decoder model, with the interface of a causal language model and ``cache.Encoder``.

    Args:
        model: an encoder-decoder language model.

    Attributes:
        config: the decoder's. start: tokens that its outputs begin with: the start token, and the one that the
            generation configuration forces after it.

    Raises:
        PeftlabError: the model names no start token.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model: Unwrapped = model
        self.config = self.model.get_decoder().config
        first, forced = (_configured_token(model, name) for name in ("decoder_start_token_id", "forced_bos_token_id"))
        if first is None:
            raise PeftlabError(f"{type(model).__name__}: its configuration names no decoder_start_token_id")
        self.start = [first] if forced is None else [first, forced]
        self.limit: int | None = getattr(model.config, "max_position_embeddings", None)
        self._default_context: Context | None = None

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of its weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def get_input_embeddings(self) -> nn.Module:
        """Return the decoder's embeddings."""
        embeddings: nn.Module = self.model.get_input_embeddings()
        return embeddings

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the LM head."""
        head: nn.Module | None = self.model.get_output_embeddings()
        return head

    @torch.inference_mode()
    def encode(self, prompts: Sequence[Sequence[int]]) -> Context:
        """Return the encoder's output for prompts of any lengths, and the cross-attention's keys and values."""
        longest = max(map(len, prompts))
        mask = right_padded([[1] * len(prompt) for prompt in prompts], longest).to(self.device)
        ids = right_padded(prompts, longest).to(self.device)
        states = self.model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        first = torch.full((len(prompts), 1), self.start[0], device=self.device)
        crossed = DynamicCache()
        self._run(first, Context(states, mask, []), EncoderDecoderCache(DynamicCache(config=self.config), crossed))
        library: list[Unwrapped] = [*crossed.layers]
        return Context(states, mask, [(layer.keys, layer.values) for layer in library])

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Cache,
        *,
        use_cache: bool = True,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: object = 0,
        output_hidden_states: bool = False,
        context: Context | None = None,
    ) -> SimpleNamespace:
        """Run the decoder with the arguments of a causal language model.

        Positions follow from the cache's length: these models take no others. All logits are returned.

        Args:
            input_ids: [b, n]. past_key_values: cache of the self-attention. use_cache, position_ids: ignored.
            attention_mask: of the self-attention, [b, 1, n, end]. logits_to_keep: ignored.
            output_hidden_states: return the states entering each layer as well.
            context: of each row; None: that of a few tokens, the same in every row.
        """
        if context is None:
            if self._default_context is None:
                self._default_context = self.encode([list(range(min(8, self.model.config.vocab_size)))])
            context = self._default_context.select([0] * len(input_ids))
        output = self._run(
            input_ids,
            context,
            EncoderDecoderCache(past_key_values, _cross_attention_cache(context)),
            decoder_attention_mask=attention_mask,
            output_hidden_states=output_hidden_states,
        )
        return SimpleNamespace(logits=output.logits, hidden_states=output.decoder_hidden_states)

    def _run(self, tokens: Tensor, context: Context, cache: Cache, **options: object) -> SimpleNamespace:
        output: SimpleNamespace = self.model(
            decoder_input_ids=tokens, encoder_outputs=BaseModelOutput(last_hidden_state=context.states),
            attention_mask=context.mask, past_key_values=cache, use_cache=True, **options,
        )  # fmt: skip
        return output


def _cross_attention_cache(context: Context) -> DynamicCache:
    """Return the keys and values of the cross-attention as the library's cache, without a copy."""
    cache = DynamicCache()
    for keys, values in context.layers:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _configured_token(model: PreTrainedModel, name: str) -> int | None:
    for config in (model.generation_config, model.config):
        token = getattr(config, name, None)
        if token is not None:
            return int(token)
    return None
