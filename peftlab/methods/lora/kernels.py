"""The products of LoRA's narrow matrices with activations, dropped or not, compiled; needs numba and GNU's OpenMP.

A library's product of a wide matrix and one of a few rows runs at a third of a CPU's speed, and a dropped copy of the
activations costs more than the product. Here four rows at a time are read, dropped and multiplied while a core's cache
has them. Which elements are dropped is the rule of ``dropout.Dropped``, computed again in the backward pass: no mask
is stored.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from torch import Tensor

from peftlab.methods.lora.dropout import FURTHER, GOLDEN, MIXERS, Dropped
from peftlab.models.costs import add_flops
from peftlab.models.vectors import (
    FLOATS,
    LANES,
    LANES_TYPE,
    all_threads,
    emits,
    fma,
    load,
    load_bf16,
    plus,
    put,
    repeat,
    run_on_threads,
    splat,
    spread,
    store,
    store_bf16,
    this_thread,
    total,
)
from peftlab.untyped import Attributes

_ROWS = 4  # that are multiplied together

_TASK = np.dtype(
    [
        # x [rows, width] and its gradient, or 0; A [rank, width] and its gradients [threads, rank, width], or 0;
        # (x∘keep)·Aᵀ or its gradient [rows, rank]; room for each thread's rows. Addresses: of float32 numbers, but
        # x and its gradient are bfloat16 where ``half`` is 1.
        *[(name, "i8") for name in ("x", "grad_x", "a", "grad_a", "h", "room", "half")],
        *[(name, "i8") for name in ("rows", "width", "rank")],
        # What is dropped: see ``dropout.Dropped``; all is kept where ``drops`` is 0.
        *[(name, "i8") for name in ("backward", "drops", "bound")],
        *[(name, "u8") for name in ("seed", "rest")],
    ]
)
_task = from_dtype(_TASK)
_WORD, _FOUR = ir.IntType(64), ir.VectorType(ir.IntType(64), 4)
_SHORTS, _BITS = (ir.VectorType(ir.IntType(width), LANES) for width in (16, 1))


def _mixed(builder: ir.IRBuilder, z: ir.Value) -> ir.Value:
    """Return SplitMix64 of words, or of one."""

    def constant(value: int) -> ir.Constant:
        return ir.Constant(z.type, [value] * 4 if isinstance(z.type, ir.VectorType) else value)

    for shift, factor in MIXERS:
        z = builder.mul(builder.xor(z, builder.lshr(z, constant(shift))), constant(factor))
    return builder.xor(z, builder.lshr(z, constant(31)))


@emits(types.UniTuple(types.int64, 2), types.uint64, types.int64, types.int64)
def drawn(builder, seed, first, bound):
    """Return which of sixteen elements from ``first`` on are at or above ``bound``, and which equal it, a bit each."""
    start = builder.add(seed, builder.mul(builder.lshr(first, _WORD(2)), _WORD(GOLDEN)))
    steps = ir.Constant(_FOUR, [i * GOLDEN % 2**64 for i in range(4)])
    words = _mixed(builder, builder.add(repeat(builder, start, _FOUR), steps))
    draws, limit = builder.bitcast(words, _SHORTS), repeat(builder, builder.trunc(bound, ir.IntType(16)), _SHORTS)
    pair = ir.Constant(ir.ArrayType(_WORD, 2), ir.Undefined)
    for i, sign in enumerate((">=", "==")):
        bits = builder.bitcast(builder.icmp_unsigned(sign, draws, limit), ir.IntType(16))
        pair = builder.insert_value(pair, builder.zext(bits, _WORD), i)
    return pair


@emits(types.uint64, types.uint64, types.int64)
def further(builder, seed, element):
    """Return the word that decides about an element whose draw is the bound."""
    counter = builder.add(element, _WORD(FURTHER))
    return _mixed(builder, builder.add(seed, builder.mul(counter, _WORD(GOLDEN))))


@emits(LANES_TYPE, LANES_TYPE, types.int64)
def where(builder, value, bits):
    """Return the lanes whose bits are 1, and 0 for the others."""
    kept = builder.bitcast(builder.trunc(bits, ir.IntType(16)), _BITS)
    return builder.select(kept, value, ir.Constant(FLOATS, [0.0] * LANES))


@njit
def kept_bits(task, first):
    """Return which of sixteen elements from the flat place ``first`` on are kept, a bit each."""
    keep, equal = drawn(task.seed, first, task.bound)
    if equal:
        for i in range(LANES):
            if (equal >> i) & 1 and further(task.seed, first + i) < task.rest:
                keep ^= 1 << i
    return keep


@njit
def read_rows(task, first, room):
    """Write four rows from ``first`` on, dropped, as float32 to ``room``; after the last row that one is repeated."""
    size = 2 if task.half else 4
    for t in range(_ROWS):
        row = min(first + t, task.rows - 1)
        source, into = task.x + row * task.width * size, room + 4 * t * task.width
        for i in range(0, task.width, LANES):
            value = load_bf16(source + 2 * i) if task.half else load(source + 4 * i)
            if task.drops:
                value = where(value, kept_bits(task, row * task.width + i))
            store(into + 4 * i, value)


@njit
def multiply(task, first, room):
    """Write the products of four rows with A's rows, two of them at a time."""
    line = 4 * task.width
    for r in range(0, task.rank, 2):
        a = task.a + r * line
        zero = splat(np.float32(0))
        s0, s1, s2, s3, t0, t1, t2, t3 = zero, zero, zero, zero, zero, zero, zero, zero
        for i in range(0, line, 4 * LANES):
            one, other, x = load(a + i), load(a + line + i), load(room + i)
            s0, t0 = fma(x, one, s0), fma(x, other, t0)
            x = load(room + line + i)
            s1, t1 = fma(x, one, s1), fma(x, other, t1)
            x = load(room + 2 * line + i)
            s2, t2 = fma(x, one, s2), fma(x, other, t2)
            x = load(room + 3 * line + i)
            s3, t3 = fma(x, one, s3), fma(x, other, t3)
        out, step = task.h + 4 * (first * task.rank + r), 4 * task.rank
        put(out, total(s0))
        put(out + 4, total(t0))
        put(out + step, total(s1))
        put(out + step + 4, total(t1))
        put(out + 2 * step, total(s2))
        put(out + 2 * step + 4, total(t2))
        put(out + 3 * step, total(s3))
        put(out + 3 * step + 4, total(t3))


@njit
def add_gradient_of_a(task, first, room, grad_a):
    """Add the products of four rows and their gradients to A's gradient, two of A's rows at a time."""
    line, step = 4 * task.width, 4 * task.rank
    for r in range(0, task.rank, 2):
        g = task.h + 4 * (first * task.rank + r)
        g0, g1, g2, g3 = spread(g), spread(g + step), spread(g + 2 * step), spread(g + 3 * step)
        e0, e1, e2, e3 = spread(g + 4), spread(g + step + 4), spread(g + 2 * step + 4), spread(g + 3 * step + 4)
        into = grad_a + r * line
        for i in range(0, line, 4 * LANES):
            x0, x1, x2, x3 = load(room + i), load(room + line + i), load(room + 2 * line + i), load(room + 3 * line + i)
            store(into + i, fma(x3, g3, fma(x2, g2, fma(x1, g1, fma(x0, g0, load(into + i))))))
            other = into + line + i
            store(other, fma(x3, e3, fma(x2, e2, fma(x1, e1, fma(x0, e0, load(other))))))


@njit
def add_to(task, row, i, value):
    """Add sixteen numbers to x's gradient where x was kept."""
    if row >= task.rows:
        return
    place = row * task.width + i
    if task.drops:
        value = where(value, kept_bits(task, place))
    if task.half:
        store_bf16(task.grad_x + 2 * place, plus(load_bf16(task.grad_x + 2 * place), value))
    else:
        store(task.grad_x + 4 * place, plus(load(task.grad_x + 4 * place), value))


@njit
def add_gradient_of_x(task, first):
    """Add the products of four rows' gradients and A to x's gradient."""
    step = 4 * task.rank
    for i in range(0, task.width, LANES):
        a, g, zero = task.a + 4 * i, task.h + first * step, splat(np.float32(0))
        s0, s1, s2, s3 = zero, zero, zero, zero
        for _ in range(task.rank):
            value = load(a)
            s0, s1 = fma(value, spread(g), s0), fma(value, spread(g + step), s1)
            s2, s3 = fma(value, spread(g + 2 * step), s2), fma(value, spread(g + 3 * step), s3)
            a, g = a + 4 * task.width, g + 4
        add_to(task, first, i, s0)
        add_to(task, first + 1, i, s1)
        add_to(task, first + 2, i, s2)
        add_to(task, first + 3, i, s3)


@cfunc(types.void(types.CPointer(_task)), cache=True)
def _work(pointer):
    """Do a thread's part of the rows."""
    task, thread, threads = carray(pointer, 1)[0], this_thread(), all_threads()
    groups = (task.rows + _ROWS - 1) // _ROWS
    room = task.room + 4 * thread * _ROWS * task.width
    grad_a = task.grad_a + 4 * thread * task.rank * task.width
    for group in range(groups * thread // threads, groups * (thread + 1) // threads):
        first = group * _ROWS
        if not task.backward:
            read_rows(task, first, room)
            multiply(task, first, room)
            continue
        if task.grad_a:
            read_rows(task, first, room)
            add_gradient_of_a(task, first, room, grad_a)
        if task.grad_x:
            add_gradient_of_x(task, first)


_FLOATS: Attributes = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are


def narrow_product(x: Tensor, a: Tensor, dropped: Dropped | None) -> Tensor:
    """Return (x∘keep)·Aᵀ, shape (N, r), in x's dtype; sums are in float32.

    Args:
        x: (N, in) of float32 or bfloat16, row after row, in a multiple of 16. a: (r, in). dropped: None keeps all.
    """
    wide = _even(a)
    h = torch.empty(-(-len(x) // _ROWS) * _ROWS, len(wide), **_FLOATS)
    _run(dropped, len(x), backward=False, x=x, a=wide, h=h)
    add_flops(2 * x.numel() * len(a))
    return h[: len(x), : len(a)].to(x.dtype)


def narrow_gradients(
    x: Tensor | None, a: Tensor, grad_h: Tensor, grad_x: Tensor | None, dropped: Dropped | None
) -> Tensor | None:
    """Return grad_hᵀ·(x∘keep), A's gradient (r, in), and add (grad_h·A)∘keep to ``grad_x`` in place.

    Args:
        x: as it was multiplied, or None where A does not train. a: (r, in). grad_h: (N, r).
        grad_x: (N, in), or None where x has no gradient. dropped: as in ``narrow_product``.
    """
    wide, rows = _even(a), len(grad_h)
    h = torch.zeros(-(-rows // _ROWS) * _ROWS, len(wide), **_FLOATS)
    h[:rows, : len(a)] = grad_h
    given = {"a": wide, "h": h} | ({} if grad_x is None else {"grad_x": grad_x})
    if x is not None:
        given |= {"x": x, "grad_a": torch.zeros(torch.get_num_threads(), *wide.shape, **_FLOATS)}
    _run(dropped, rows, backward=True, **given)
    add_flops(2 * rows * a.numel() * sum(each is not None for each in (x, grad_x)))
    return None if x is None else given["grad_a"].sum(0)[: len(a)].to(a.dtype)


def _even(a: Tensor) -> Tensor:
    """Return A in float32 with an even number of rows, a zero row behind an odd one."""
    wide = torch.zeros(len(a) + len(a) % 2, a.shape[1], **_FLOATS)
    wide[: len(a)] = a
    return wide


def _run(dropped: Dropped | None, rows: int, *, backward: bool, **tensors: Tensor) -> None:
    """Do a task.

    Args:
        dropped: None keeps all. rows: of activations. backward: gradients. tensors: by their names in ``_TASK``.
    """
    task, width = np.zeros(1, _TASK), tensors["a"].shape[1]
    tensors["room"] = torch.empty(torch.get_num_threads(), _ROWS, width, **_FLOATS)
    for name, tensor in tensors.items():
        task[name] = tensor.data_ptr()
    task["half"] = any(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    task["rows"], task["width"], task["rank"], task["backward"] = rows, width, len(tensors["a"]), backward
    if dropped is not None:
        task["drops"], task["seed"] = 1, dropped.seed
        task["bound"], task["rest"] = dropped.threshold()
    run_on_threads(_work, task.ctypes.data)
