"""The compiled step: a decoder built as Llama is, run as one program of ``kernels.py`` instead of operations of torch.

A layer is eight instructions over the same few buffers. They read every stored weight once for up to four rows, with
AMX for up to 64, and the threads meet between two of them without returning to Python. So a step over one token takes
as long as reading the weights from memory.

A token's numbers are the same bits whether it is read alone, after drafted tokens or as a node of a tree, up to
``MOST_TOKENS`` of a sequence at a time: every sum runs over its inputs, or over the tokens that it sees, in one order.
Longer blocks, which are prompts, have torch's attention.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peftlab.decoding import kernels
from peftlab.decoding.cache import Block, KVCache, Output, WholeBlock
from peftlab.decoding.flat import FlatEngine, LayerStructure, Norm, Structure, attend, softcap
from peftlab.decoding.kernels import ADD, ATTEND, GATED, NORM, PRODUCT, ROTATE, STORE
from peftlab.decoding.packed import Products
from peftlab.decoding.tiled import LANES, TiledWeight, tile_linears

MOST_TOKENS = 32
"""New tokens of a sequence at most whose attention is an instruction."""
_STATES, _NORMED, _HEADS, _ATTENDED, _RAISED, _LOGITS, _SUMS, _NARROW, _WIDE = range(kernels.BUFFERS)
_HALVES = {_NORMED: _NARROW, _ATTENDED: _NARROW, _RAISED: _WIDE}  # where they also are, rounded to bfloat16
_LAYER = 8  # instructions of a layer, of which the first five are its attention
_ATTENTION = 5
Numbers = NDArray[np.int64] | NDArray[np.float32]


class CompiledEngine(FlatEngine):
    """See ``cache.Engine``; a flattened step of which all but the embedding is compiled.

    States, keys, values and sums are float32. Of a model in bfloat16 the inputs of products are rounded to bfloat16.
    """

    _computed_in = torch.float32

    def _store_weights(self, structure: Structure, products: Products) -> tuple[str, ...]:
        """Write the program; return the forms in which it stores the weights."""
        heads, kv, dim = structure.heads, structure.kv_heads, structure.dim
        width, raised = structure.embedding.shape[1], max(layer.down.weight.shape[1] for layer in structure.layers)
        self._rounded = structure.embedding.dtype == torch.bfloat16
        head = tile_linears([structure.head], outputs=self.vocab_size, rounded=self._rounded)
        # Of the buffers, in numbers of 4 bytes; that of sums is known when all weights are.
        read = max(width, *(linear.weight.shape[1] for layer in structure.layers for linear in layer.qkv))
        self._widths = [width, read, (heads + 2 * kv) * dim, heads * dim, raised, head.tiles * LANES, 0]
        self._widths += [max(read, heads * dim) // 2, raised // 2] if self._rounded else [0, 0]
        self._weights: list[TiledWeight] = []
        self._norms: list[Tensor] = []
        self._windows = list(dict.fromkeys(layer.window for layer in structure.layers))
        self._settings = [(layer.scale, self._windows.index(layer.window)) for layer in structure.layers]
        rotated = {name: angles(torch.zeros(1, 1).long())[0].shape[-1] for name, angles in structure.angles.items()}
        parts = [self._layer(i, layer, rotated) for i, layer in enumerate(structure.layers)]
        self._program = np.concatenate(parts)
        self._last = np.stack((self._norm_of(structure.norm), self._product(head, _NORMED, _LOGITS, STORE)))
        self._widths[_SUMS] = max((w.inputs // w.size for w in self._weights if w.sums_needed), default=0)
        return ("compiled", *dict.fromkeys(weight.stored for weight in self._weights))

    def _layer(self, i: int, layer: LayerStructure, rotated: dict[str, int]) -> NDArray[np.void]:
        """Return the instructions of a layer, ``_LAYER``."""
        assert layer.before_mlp is not None
        shape = {"heads": self._heads, "kv": self._kv_heads, "dim": self._dim, "layer": i}
        rotate = self._instruction(ROTATE, _HEADS, _HEADS, **shape)
        if layer.angles is not None:
            rotate["table"], rotate["rotated"] = [*rotated].index(layer.angles), rotated[layer.angles]
        if layer.queries is not None:
            rotate["weight"], rotate["eps"] = self._weight_of(layer.queries), layer.queries.eps
        if layer.keys is not None:
            rotate["key_weight"], rotate["key_eps"] = self._weight_of(layer.keys), layer.keys.eps
        attend = self._instruction(ATTEND, _HEADS, _ATTENDED, **shape)
        attend["scale"], attend["sight"] = self._settings[i]
        tiled = partial(tile_linears, rounded=self._rounded)
        return np.stack(
            (
                # Without a norm it is not run: what it would write is given.
                self._norm_of(layer.before_attention or layer.before_mlp),
                self._product(tiled(layer.qkv), _NORMED, _HEADS, STORE),
                rotate,
                attend,
                self._product(tiled([layer.out]), _ATTENDED, _STATES, ADD),
                self._norm_of(layer.before_mlp),
                self._product(tiled(layer.up, interleaved=True), _NORMED, _RAISED, GATED),
                self._product(tiled([layer.down]), _RAISED, _STATES, ADD),
            )
        )

    def _norm_of(self, norm: Norm) -> NDArray[np.void]:
        fields = {"width": norm.weight.numel(), "weight": self._weight_of(norm), "eps": norm.eps}
        return self._instruction(NORM, _STATES, _NORMED, **fields)

    def _product(self, weight: TiledWeight, x: int, out: int, mode: int) -> NDArray[np.void]:
        self._weights.append(weight)
        sums, read = _SUMS if weight.sums_needed else -1, _HALVES[x] if self._rounded else x
        return self._instruction(PRODUCT, read, out, mode=mode, sums=sums, **weight.fields())

    def _instruction(self, kind: int, x: int, out: int, **fields: float) -> NDArray[np.void]:
        instruction = np.zeros((), kernels.INSTRUCTION)
        half = _HALVES.get(out, 0) if self._rounded else 0
        for name, buffer in (("x", x), ("out", out), ("half", half)):
            instruction[name], instruction[f"{name}_stride"] = buffer, 4 * self._widths[buffer]
        for name, value in {"kind": kind, **fields}.items():
            instruction[name] = value
        return instruction

    def _weight_of(self, norm: Norm) -> int:
        """Return the address of a norm's weight in float32, which is kept as long as the engine."""
        self._norms.append(norm.weight.float().contiguous())
        return self._norms[-1].data_ptr()

    def run_layers(
        self,
        cache: KVCache,
        h: Tensor,
        block: Block,
        layers: range,
        skipped: Collection[int] = (),
        given: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run some layers on the states [b, n, H] that enter them; see ``FlatEngine.run_layers``."""
        h = h.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        whole = block.n <= MOST_TOKENS
        spans = [] if whole else [self._spans(block, window) for window in self._windows]
        step = self._step(cache, block, h, whole)
        reported: list[Tensor] = []
        pending: list[int] = []  # instructions

        def finish() -> None:
            if pending:
                span = slice(pending[0], pending[-1] + 1)
                whole = span.stop - span.start == len(pending)
                step.run(self._program[span if whole else pending])
                pending.clear()

        for i in layers:
            first, mlp, end = _LAYER * i, _LAYER * i + _ATTENTION, _LAYER * (i + 1)
            if i in self._features:
                finish()
                reported.append(h.clone())
            if 2 * i not in skipped:
                if given is not None:
                    finish()
                    step.give(_NORMED, given.flatten(0, 1))
                    first += 1
                if whole:
                    pending.extend(range(first, mlp))
                else:
                    pending.extend(range(first, mlp - 2))
                    finish()
                    queries = step.buffers[_HEADS].view(*h.shape[:2], -1, self._dim)[:, :, : self._heads]
                    keys, values = cache.seen(i, block)
                    scale, sight = self._settings[i]
                    step.give(_ATTENDED, attend(queries, keys, values, spans[sight], scale).flatten(0, 1))
                    pending.append(mlp - 1)
            if 2 * i + 1 not in skipped:
                pending.extend(range(mlp, end))
        finish()
        return h, reported

    def output(self, h: Tensor, keep: list[int] | None = None) -> Output:
        """Return logits and normed states for the output of the last layer; see ``FlatEngine.output``."""
        if keep is not None:
            h = h[:, keep]
            if not keep:
                return Output(h.new_zeros(len(h), 0, self.vocab_size), h)
        h = h.float().contiguous()
        step = self._buffers(h.flatten(0, -2), (_NORMED, _LOGITS, _SUMS, _NARROW))
        step.run(self._last)
        logits = step.buffers[_LOGITS].view(*h.shape[:-1], -1)[..., : self.vocab_size]
        hidden = step.buffers[_NORMED][:, : h.shape[-1]].view(h.shape)
        return Output(logits if self._cap is None else softcap(logits, self._cap), hidden)

    def logits(self, h: Tensor) -> Tensor:
        """Return the logits for normed states, see ``FlatEngine.logits``."""
        rows = h.flatten(0, -2)
        step = self._buffers(rows, (_NORMED, _LOGITS, _SUMS, _NARROW))
        step.give(_NORMED, rows)
        step.run(self._last[1:])
        return step.buffers[_LOGITS].view(*h.shape[:-1], -1)[..., : self.vocab_size]

    def _buffers(self, h: Tensor, others: Collection[int]) -> _Step:
        """Return a step with the buffer of states h [R, H], and others."""
        rows, buffers = len(h), {_STATES: h}
        for i in others:
            # Each thread has sums of its own, behind which lie another's or padding.
            count = torch.get_num_threads() * rows if i == _SUMS else rows
            wide = torch.empty(count + kernels.PADDING, self._widths[i])
            if rows % 4 == 3:  # then padding is multiplied, and some numbers take long
                wide[count:] = 0
            buffers[i] = wide[:count]
        return _Step(buffers, rows)

    def _step(self, cache: KVCache, block: Block, h: Tensor, whole: bool) -> _Step:
        """Return a step over states [b, n, H].

        Args:
            cache: of the tokens. block: their places. h: their states. whole: whether it has attention.
        """
        step = self._buffers(h.flatten(0, 1), range(_NORMED, kernels.BUFFERS))
        places = _places(block)
        states = [cache.allocated(i, 2 * self._kv_heads, self._dim, h) for i in range(self.layers)]
        tables = [part for table in self._tables.values() for part in table.parts(cache.capacity, self.device)]
        if places[:, 1].max() >= cache.slots or (tables and places[:, 2].max() >= len(tables[0])):
            raise IndexError(f"a block that ends at {block.end} in a cache of {cache.capacity} tokens")
        step.keep("places", places)
        step.keep("states", np.array([state.data_ptr() for state in states]))
        step.keep("tables", np.array([table.data_ptr() for table in tables] or [0, 0]))
        step.given["slots"] = cache.slots
        if whole:
            views = _views(block, places, self._windows)
            most = max(int((view[:, 1] + view[:, 2]).max()) for view in views)
            most = -(-most // LANES) * LANES
            step.keep("scores", np.empty((torch.get_num_threads(), most), np.float32))
            step.keep("views", np.array([step.kept(view) for view in views]))
            step.given["most_scores"], step.given["view_width"] = most, views[0].shape[1]
        return step


class _Step:
    """What a program is given, as ``kernels.BLOCK`` names it, and the memory that it reads and writes.

    Attributes:
        given: [1] of ``kernels.BLOCK``. buffers: [rows, width] each.
    """

    def __init__(self, buffers: dict[int, Tensor], rows: int):
        self.given, self.buffers = np.zeros(1, kernels.BLOCK), buffers
        self._kept: list[Numbers] = []
        self.given["rows"] = rows
        for i, buffer in buffers.items():
            self.given["buffers"][0, i] = buffer.data_ptr()

    def kept(self, array: Numbers) -> int:
        """Return the address of an array, which is kept as long as this step."""
        self._kept.append(array)
        return array.ctypes.data

    def keep(self, name: str, array: Numbers) -> None:
        """Give the program an array by a name of ``kernels.BLOCK``."""
        self.given[name] = self.kept(array)

    def give(self, buffer: int, x: Tensor) -> None:
        """Write what products read from a buffer, [rows, width], as an instruction would."""
        self.buffers[buffer][:, : x.shape[1]] = x
        rounded = self.buffers[_HALVES[buffer]]
        if rounded.shape[1]:
            rounded.view(torch.bfloat16)[:, : x.shape[1]] = x

    def run(self, program: NDArray[np.void]) -> None:
        """Run instructions."""
        self.given["program"], self.given["length"] = program.ctypes.data, len(program)
        kernels.run(self.given)


def _places(block: Block) -> NDArray[np.int64]:
    """Return row in the cache, slot and position of each token of a block, [b n, 3]."""
    b, n, cpu = len(block.starts), block.n, torch.device("cpu")
    rows = np.repeat(np.array(block.rows or range(b)), n)
    if type(block) in (Block, WholeBlock) and block.tree is None:
        slots = positions = (np.array(block.starts)[:, None] + np.arange(n)).ravel()
    else:
        slots, positions = (x.expand(b, n).reshape(-1).numpy() for x in (block.slots(cpu), block.positions(cpu)))
    return np.stack((rows, slots, positions), 1)


def _views(block: Block, places: NDArray[np.int64], windows: Sequence[int | None]) -> list[NDArray[np.int64]]:
    """Return for each window what each token sees, as ``kernels.BLOCK`` has it, in order of slots; [b n, width]."""
    whole = type(block) is WholeBlock and [*windows] == [None]
    if whole or (type(block) is Block and block.tree is None):  # what each sees are slots in a row
        ends = np.repeat(np.array(block.starts) + block.n, block.n) if whole else places[:, 2] + 1
        firsts = [np.zeros_like(ends) if window is None else np.maximum(ends - window, 0) for window in windows]
        return [np.stack((first, ends - first, np.zeros_like(ends)), 1) for first in firsts]
    everything = torch.ones(1, 1, 1, block.end, dtype=torch.bool)
    views = []
    for window in windows:
        visible = block.visible(window, torch.device("cpu"))
        mask = (everything if visible is None else visible).expand(len(block.starts), 1, block.n, -1).flatten(0, 2)
        view = np.zeros((len(mask), 3 + block.end), np.int64)
        for row, seen in zip(view, mask.numpy(), strict=True):
            (slots,) = seen.nonzero()
            row[2], row[3 : 3 + len(slots)] = len(slots), slots
        views.append(view)
    return views
