"""The instructions of a compiled step, in vectors of sixteen float32 numbers; needs numba and torch's OpenMP threads.

A program is a table of instructions, one a row: products with tiled weights, norms, rotation, attention. ``run``
executes one on torch's threads, all of them waiting for one another after each instruction. The functions here read and
write memory by address: whoever makes a program (``compiled.py``) answers for the sizes.

A vector operation is written out as LLVM's own, so the compiler reorders no sum. In a product the sixteen lanes are
sixteen outputs, the inputs are added in one order, and several rows differ from one in nothing but how often a decoded
weight is used. So a row's numbers are the same bits whatever rows it is computed with, on any number of threads. That
holds for AMX, too, which multiplies bfloat16 weights where a CPU has it, whether by one row or by many.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from numba.core import cgutils
from numpy.typing import NDArray

from peftlab.decoding.tiled import BF16, F16, F32, INT8, LANES, PAIRS
from peftlab.models.vectors import (
    ADDRESS,
    FLOATS,
    NOTHING,
    WORDS,
    all_of,
    all_threads,
    call,
    emits,
    exp,
    fma,
    intrinsic,
    load,
    load_bf16,
    load_f16,
    load_int8,
    load_uint4,
    number,
    over,
    plus,
    prefetch,
    put,
    read,
    repeat,
    run_on_threads,
    splat,
    spread,
    store,
    store_bf16,
    this_thread,
    times,
    total,
    wait,
    word,
)
from peftlab.untyped import Unwrapped

PRODUCT, NORM, ROTATE, ATTEND = range(4)
"""Kinds of instructions."""
STORE, ADD, GATED = range(3)
"""What a product does with its sums: keep them, add them to what is there, or silu(gate) * factor of pairs of tiles."""
BUFFERS = 9
"""How many tables of rows a block has."""

INSTRUCTION = np.dtype(
    [
        ("kind", "i8"),
        # Rows are read from buffer x and written to buffer out, ``stride`` bytes each; what a norm, an attention or a
        # gated product writes is also written to buffer ``half``, rounded to bfloat16, unless that is 0.
        *[(name, "i8") for name in ("x", "x_stride", "out", "out_stride", "half", "half_stride")],
        # PRODUCT: see ``tiled.py``. ``sums`` is the buffer of sums of a block's inputs, -1 where none are needed.
        *[(name, "i8") for name in ("mode", "form", "inputs", "tiles", "codes", "bias")],
        *[(name, "i8") for name in ("scales", "minima", "halves", "size", "sums")],
        *[("factor", "f4"), ("least", "f4")],
        # NORM: of ``width`` numbers. ROTATE norms heads, where ``weight`` (queries) and ``key_weight`` are not 0.
        *[("width", "i8"), ("weight", "i8"), ("key_weight", "i8"), ("eps", "f4"), ("key_eps", "f4")],
        # ROTATE the first ``rotated`` numbers of a head by table ``table``; ATTEND to what view ``sight`` shows.
        *[(name, "i8") for name in ("heads", "kv", "dim", "layer", "table", "rotated", "sight")],
        ("scale", "f8"),
    ]
)
"""One instruction; addresses and whole numbers, unless it says otherwise."""

BLOCK = np.dtype(
    [
        # The program, and how many rows it reads; whether products may use AMX, which ``run`` fills in.
        *[(name, "i8") for name in ("program", "length", "rows", "matrices")],
        # Of each row: its row in the cache, its slot and its position. Of each layer: keys and values, which have so
        # many slots. Of each table: cosines and sines. Of each view: for each row, ``view_width`` numbers: the first
        # slot that it sees, how many from there on, how many others, and these.
        *[(name, "i8") for name in ("places", "states", "slots", "tables", "views", "view_width")],
        # Room for each thread's scores, so many; and the buffers.
        *[(name, "i8") for name in ("scores", "most_scores")],
        ("buffers", "i8", (BUFFERS,)),
    ]
)
"""What ``run`` takes: a program and the block of tokens that it reads."""

PADDING = 1
"""Rows of numbers that must follow a product's inputs, and their sums, in memory: they may be multiplied too."""

_ROWS = 128  # of a product that are multiplied with all weights before the next: so many stay in a core's cache
_AHEAD = 3072  # bytes: several rows take so little time a weight that the next ones must be on their way
_CHUNK = 32  # inputs whose products are added before their sum joins the others: less rounding, and shorter waits


_instruction, _block = from_dtype(INSTRUCTION), from_dtype(BLOCK)


@njit
def buffer_of(block, i):
    """Return the address of buffer i > 0, 0 for i = 0."""
    return block.buffers[i] if i > 0 else np.int64(0)


# ---- Products ---------------------------------------------------------------------------------------------------
# A tile is sixteen outputs; for each pair of inputs it has the first one's sixteen weights, then the second one's.


@njit
def pair_f32(at):
    return load(at), load(at + 64)


@njit
def pair_bf16(at):
    return load_bf16(at), load_bf16(at + 32)


@njit
def pair_f16(at):
    return load_f16(at), load_f16(at + 32)


@njit
def pair_int8(at):
    return load_int8(at), load_int8(at + 16)


@njit
def pair_uint4(at):
    return load_uint4(at)


@njit
def load_scale(at, group, halves):
    return load_f16(at + 32 * group) if halves else load(at + 64 * group)


@intrinsic
def add_products(context, weight, x, stride, sums):
    """Return for each row r: sums[r] + weight times the number at x + r stride, rounded once."""

    def generate(_context, builder, _signature, values):
        weight, x, stride, result = values
        for r in range(sums.count):
            factor = repeat(builder, read(builder, x, ir.FloatType(), 4))
            summed = call(builder, "llvm.fma.v16f32", weight, factor, builder.extract_value(result, r))
            result, x = builder.insert_value(result, summed, r), builder.add(x, stride)
        return result

    return sums(weight, x, stride, sums), generate


class _BFloat(ir.Type):
    """LLVM's type of a bfloat16 number, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_config: Unwrapped = numba.config
_features = llvmlite.binding.get_host_cpu_features() if _config.CPU_NAME in (None, "host") else {}
_multiplies_pairs, _has_matrices = _features.get("avx512bf16"), _features.get("amx-bf16")
if _has_matrices:
    llvmlite.binding.initialize_native_asmparser()


@intrinsic
def add_pairs(context, weights, x, stride, sums):
    """Return for each row r: sums[r] + the products of each lane's two bfloat16 weights and the pair at x + r stride.

    With AVX512-BF16 two products and a sum are one instruction; without, each product that is added is rounded.
    """

    def generate(_context, builder, _signature, values):
        weights, x, stride, result = values
        words, pairs = builder.bitcast(weights, WORDS), ir.VectorType(_BFloat(), 2 * LANES)
        for r in range(sums.count):
            pair = repeat(builder, read(builder, x, ir.IntType(32), 2), WORDS)
            summed = builder.extract_value(result, r)
            if _multiplies_pairs:
                kind = ir.FunctionType(FLOATS, [FLOATS, pairs, pairs])
                name = "llvm.x86.avx512bf16.dpbf16ps.512"
                multiply = cgutils.get_or_insert_function(builder.module, kind, name)
                summed = builder.call(multiply, [summed, *(builder.bitcast(v, pairs) for v in (words, pair))])
            else:
                for part in (
                    lambda v: builder.shl(v, all_of(16)),
                    lambda v: builder.and_(v, all_of(0xFFFF0000)),
                ):
                    factors = (builder.bitcast(part(v), FLOATS) for v in (words, pair))
                    summed = call(builder, "llvm.fma.v16f32", *factors, summed)
            result, x = builder.insert_value(result, summed, r), builder.add(x, stride)
        return result

    return sums(weights, x, stride, sums), generate


@intrinsic
def add_scaled(context, scale, sums, totals):
    """Return for each row r: totals[r] + scale sums[r], rounded once."""

    def generate(_context, builder, _signature, values):
        scale, added, result = values
        for r in range(sums.count):
            parts = builder.extract_value(added, r), builder.extract_value(result, r)
            result = builder.insert_value(result, call(builder, "llvm.fma.v16f32", scale, *parts), r)
        return result

    return sums(scale, sums, totals), generate


@intrinsic
def add_rows(context, a, b):
    """Return for each row r: a[r] + b[r]."""

    def generate(_context, builder, _signature, values):
        result, other = values
        for r in range(a.count):
            summed = builder.fadd(builder.extract_value(result, r), builder.extract_value(other, r))
            result = builder.insert_value(result, summed, r)
        return result

    return a(a, b), generate


@njit
def silu(x):
    one = splat(np.float32(1))
    return over(x, plus(one, exp(times(x, splat(np.float32(-1))))))


@njit
def tiles_of(op, thread, threads):
    """Return the first tile of a thread's share of a product, and the one behind its last; pairs stay together."""
    together = 2 if op.mode == GATED else 1
    share = op.tiles // together
    return together * (share * thread // threads), together * (share * (thread + 1) // threads)


@njit
def finish_tile(totals, rows, out, stride, half, half_stride, tile, mode, bias, factor):
    """Store a tile's sums, of the first ``rows`` of ``totals``, where its outputs go."""
    for r in range(rows):
        result = times(totals[r], factor)
        if bias != 0:
            result = plus(result, load(bias + 64 * tile))
        place = tile // 2 if mode == GATED else tile
        at = out + r * stride + 64 * place
        if mode == ADD:
            result = plus(load(at), result)
        elif mode == GATED and tile % 2:  # the gate is there already
            result = times(silu(load(at)), result)
            if half != 0:
                store_bf16(half + r * half_stride + 32 * place, result)
        store(at, result)


def _sum_of(pair: Callable, step: int) -> Callable:
    """Return the sum over a chunk of inputs, two of whose weights ``pair`` reads from ``step`` bytes of a tile."""

    @njit
    def sum_chunk(codes, n, x, stride, zeros):
        """Return sums of n weights times inputs: those of even places, plus those of odd ones."""
        even = odd = zeros
        for k in range(0, n, 2):
            first, second = pair(codes)
            even = add_products(first, x + 4 * k, stride, even)
            odd = add_products(second, x + 4 * k + 4, stride, odd)
            codes += step
        return add_rows(even, odd)

    return sum_chunk


@njit(forceinline=True)
def sum_pairs(codes, n, x, stride, zeros):
    """Return sums of n weights times inputs in bfloat16: those of even pairs, plus those of odd ones."""
    even = odd = zeros
    for k in range(0, n, 4):
        prefetch(codes + _AHEAD)
        prefetch(codes + _AHEAD + 64)
        even = add_pairs(load(codes), x + 2 * k, stride, even)
        odd = add_pairs(load(codes + 64), x + 2 * k + 4, stride, odd)
        codes += 128
    return add_rows(even, odd)


def _product_with(sum_chunk: Callable, step: int, unit: int = 4) -> Callable:
    """Return the product with weights of which ``sum_chunk`` multiplies some.

    Rows are multiplied one, two or four at a time, those in bfloat16 also eight, of which the last may be padding:
    reading a weight once more takes longer than multiplying a row in vain. In float32 eight at a time were no faster.

    Args:
        sum_chunk: see ``_sum_of``. step: bytes of two inputs' weights in a tile. unit: bytes of an input: 4, or 2.
    """

    @njit
    def sum_tile(codes, scales, minima, halves, least, inputs, size, x, stride, sums, sums_stride, zeros):
        """Return the sums of one tile for as many rows as ``zeros`` has vectors.

        Blocks of ``size`` inputs have a scale, and perhaps a minimum, by which the sum of their inputs is multiplied;
        ``least`` is added to codes, in the same way.
        """
        totals = zeros
        for group in range(inputs // size):
            block = zeros
            for first in range(group * size, (group + 1) * size, _CHUNK):
                n = min(_CHUNK, (group + 1) * size - first)
                block = add_rows(block, sum_chunk(codes, n, x + unit * first, stride, zeros))
                codes += step * (n // 2)
            if least != 0:
                block = add_products(splat(least), sums + 4 * group, sums_stride, block)
            if scales == 0:
                totals = add_rows(totals, block)
            else:
                totals = add_scaled(load_scale(scales, group, halves), block, totals)
            if minima != 0:
                totals = add_products(load_scale(minima, group, halves), sums + 4 * group, sums_stride, totals)
        return totals

    @njit
    def multiply(op, block, thread, threads):
        """Compute this thread's share of the tiles of a product, for all rows."""
        rows, inputs, size, mode = block.rows, op.inputs, op.size, op.mode
        x, stride, out, out_stride = block.buffers[op.x], op.x_stride, block.buffers[op.out], op.out_stride
        half, half_stride = buffer_of(block, op.half), op.half_stride
        codes, scales, minima, halves, bias = op.codes, op.scales, op.minima, op.halves, op.bias
        factor, least, sums, groups = splat(op.factor), op.least, np.int64(0), inputs // size
        scales_of_tile, sums_stride = (32 if halves else 64) * groups, 4 * groups
        if op.sums >= 0:  # each thread adds the inputs for itself: waiting for one another would take longer
            sums = block.buffers[op.sums] + thread * rows * sums_stride
            for i in range(rows * groups):
                at = x + i // groups * stride + 4 * size * (i % groups)
                added = splat(np.float32(0))
                for k in range(0, 4 * size, 64):
                    added = plus(added, load(at + k))
                put(sums + 4 * i, total(added))
        zero = splat(np.float32(0))
        first, last = tiles_of(op, thread, threads)
        for begin in range(0, rows, _ROWS):
            end = min(begin + _ROWS, rows)
            for tile in range(first, last):
                own = codes + tile * step * (inputs // 2)
                own_scales = scales + tile * scales_of_tile if scales else scales
                own_minima = minima + tile * scales_of_tile if minima else minima
                given, r = (own, own_scales, own_minima, halves, least, inputs, size), begin
                while r < end:
                    read = x + r * stride, stride, sums + r * sums_stride, sums_stride
                    rounded = half + r * half_stride if half else half
                    to = out + r * out_stride, out_stride, rounded, half_stride, tile, mode, bias, factor
                    if end - r >= 7 and unit == 2:
                        zeros = (zero, zero, zero, zero, zero, zero, zero, zero)
                        finish_tile(sum_tile(*given, *read, zeros), min(end - r, 8), *to)
                        r += 8
                    elif end - r >= 3:
                        finish_tile(sum_tile(*given, *read, (zero, zero, zero, zero)), min(end - r, 4), *to)
                        r += 4
                    elif end - r == 2:
                        finish_tile(sum_tile(*given, *read, (zero, zero)), 2, *to)
                        r += 2
                    else:
                        finish_tile(sum_tile(*given, *read, (zero,)), 1, *to)
                        r += 1

    return multiply


# AMX has eight registers of sixteen rows of 64 bytes. One instruction adds to sums of sixteen rows and sixteen outputs
# the products of 32 inputs, each row's in one order whatever the other rows. Registers 0 to 3 have the sums of four
# times sixteen rows, 4 and 5 rows of inputs, the last of which may be fewer than sixteen, and 7 the weights.
_REGISTERS = range(8)
_MATRIX_ROWS, _MATRIX_INPUTS = 16, 32
_SUMS_BYTES = 4 * _MATRIX_ROWS * 64


def _assemble(builder: ir.IRBuilder, lines: list[str], values: list[ir.Value], changed: str = "") -> ir.Value:
    """Write instructions of AMX, in which LLVM changes nothing; none where the CPU has no AMX.

    Args:
        builder: of LLVM. lines: in the syntax of AT&T. values: ``$0`` and so on in ``lines``. changed: other registers.
    """
    if _has_matrices:
        names = [*changed.split(), "memory", "flags", *(f"tmm{i}" for i in _REGISTERS)]
        constraints = ",".join(["r"] * len(values) + [f"~{{{name}}}" for name in names])
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        builder.asm(kind, "\n".join(lines), constraints, values, True)
    return NOTHING


@emits(types.int64)
def room_for_sums(builder):
    """The address of room for the sums of a tile and 64 rows, on the stack."""
    return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), _SUMS_BYTES)), ir.IntType(64))


@emits(types.none, types.int64)
def begin_matrices(builder, rows):
    """Set the registers' sizes for 1 to 64 rows."""
    byte, eight_bytes = ir.IntType(8), ir.IntType(64)
    settings = ir.Constant(ir.ArrayType(byte, 64), [1] + 15 * [0] + 8 * [64, 0] + 32 * [0])  # of 64 bytes a row
    at = builder.ptrtoint(cgutils.alloca_once(builder, settings.type), eight_bytes)
    builder.store(settings, builder.inttoptr(at, settings.type.as_pointer()))
    # The last group of rows is behind so many whole ones.
    before = builder.udiv(builder.sub(rows, eight_bytes(1)), eight_bytes(_MATRIX_ROWS))
    last = builder.sub(rows, builder.mul(before, eight_bytes(_MATRIX_ROWS)))
    for i in _REGISTERS:
        is_last = builder.icmp_unsigned("==", before, eight_bytes(i)) if i != 5 else ir.IntType(1)(1)
        count = builder.trunc(builder.select(is_last, last, eight_bytes(_MATRIX_ROWS)), byte)
        builder.store(count, builder.inttoptr(builder.add(at, eight_bytes(48 + i)), byte.as_pointer()))
    return _assemble(builder, ["ldtilecfg ($0)"], [at])


@emits(types.none)
def end_matrices(builder):
    """Leave the registers empty, as they cost time where threads take turns."""
    return _assemble(builder, ["tilerelease"], [])


def _matrix_sums(count: int) -> Callable:
    """Return the sums of a tile and ``count`` times sixteen rows, the last of them perhaps fewer."""
    rows = ("%r10", "%r11", "%r12", "%r13")[:count]
    setup = ["mov $0, %r8", "mov $1, %r9", "mov $3, %rax", "shl $$4, %rax", "mov $2, %r10"]
    setup += [f"lea ({before},%rax), {after}" for before, after in pairwise(rows)]
    setup += ["mov $$64, %rax", *(f"tilezero %tmm{i}" for i in range(count))]
    loop = ["1:", "tileloadd (%r8,%rax), %tmm7"]
    loop += [f"prefetcht0 {_AHEAD + k}(%r8)" for k in range(0, 64 * _MATRIX_ROWS, 64)]
    for i, row in enumerate(rows):
        read = "%tmm5" if i == count - 1 else "%tmm4"
        loop += [f"tileloadd ({row},$3), {read}", f"tdpbf16ps %tmm7, {read}, %tmm{i}", f"add $$64, {row}"]
    loop += [f"add $${64 * _MATRIX_ROWS}, %r8", "dec %r9", "jnz 1b"]
    end = [f"tilestored %tmm{i}, {64 * _MATRIX_ROWS * i}($4,%rax)" for i in range(count)]

    @emits(types.none, ADDRESS, types.int64, ADDRESS, types.int64, ADDRESS)
    def sums(builder, codes, steps, x, stride, to):
        return _assemble(builder, setup + loop + end, [codes, steps, x, stride, to], "rax r8 r9 r10 r11 r12 r13")

    return sums


_sums_16, _sums_32, _sums_48, _sums_64 = (_matrix_sums(count) for count in (1, 2, 3, 4))


@njit
def multiply_matrices(op, block, thread, threads):
    """Compute this thread's share of the tiles of a product of bfloat16 numbers, for all rows, with AMX."""
    rows, steps, stride, sums = block.rows, op.inputs // _MATRIX_INPUTS, op.x_stride, room_for_sums()
    half, factor = buffer_of(block, op.half), splat(op.factor)
    first, last = tiles_of(op, thread, threads)
    for begin in range(0, rows, 4 * _MATRIX_ROWS):
        n = min(4 * _MATRIX_ROWS, rows - begin)
        begin_matrices(n)
        x, out = block.buffers[op.x] + begin * stride, block.buffers[op.out] + begin * op.out_stride
        rounded = half + begin * op.half_stride if half else half
        for tile in range(first, last):
            codes = op.codes + 32 * op.inputs * tile
            if n <= _MATRIX_ROWS:
                _sums_16(codes, steps, x, stride, sums)
            elif n <= 2 * _MATRIX_ROWS:
                _sums_32(codes, steps, x, stride, sums)
            elif n <= 3 * _MATRIX_ROWS:
                _sums_48(codes, steps, x, stride, sums)
            else:
                _sums_64(codes, steps, x, stride, sums)
            for r in range(n):
                to = out + r * op.out_stride, op.out_stride, rounded + r * op.half_stride if half else half
                finish_tile((load(sums + 64 * r),), 1, *to, op.half_stride, tile, op.mode, op.bias, factor)
    end_matrices()


_multiply_f32 = _product_with(_sum_of(pair_f32, 128), 128)
_multiply_bf16 = _product_with(_sum_of(pair_bf16, 64), 64)
_multiply_f16 = _product_with(_sum_of(pair_f16, 64), 64)
_multiply_int8 = _product_with(_sum_of(pair_int8, 32), 32)
_multiply_uint4 = _product_with(_sum_of(pair_uint4, 16), 16)
_multiply_pairs = _product_with(sum_pairs, 64, unit=2)


@njit
def product(op, block, thread, threads):
    if op.form == F32:
        _multiply_f32(op, block, thread, threads)
    elif op.form == BF16:
        _multiply_bf16(op, block, thread, threads)
    elif op.form == F16:
        _multiply_f16(op, block, thread, threads)
    elif op.form == INT8:
        _multiply_int8(op, block, thread, threads)
    elif op.form == PAIRS:
        if block.matrices and op.inputs % _MATRIX_INPUTS == 0:
            multiply_matrices(op, block, thread, threads)
        else:
            _multiply_pairs(op, block, thread, threads)
    else:
        _multiply_uint4(op, block, thread, threads)


# ---- The rest of a layer ----------------------------------------------------------------------------------------


@njit
def norm_into(x, width, weight, eps, out, half):
    """Write RMSNorm of ``width`` numbers: x / sqrt(mean x² + eps) times the weight."""
    squares = splat(np.float32(0))
    for k in range(0, 4 * width, 64):
        a = load(x + k)
        squares = fma(a, a, squares)
    inverse = splat(np.float32(1) / np.sqrt(total(squares) / np.float32(width) + eps))
    for k in range(0, 4 * width, 64):
        result = times(times(load(x + k), inverse), load(weight + k))
        store(out + k, result)
        if half != 0:
            store_bf16(half + k // 2, result)


@njit
def norm(op, block, thread, threads):
    x, out, half, rows = block.buffers[op.x], block.buffers[op.out], buffer_of(block, op.half), block.rows
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        rounded = half + r * op.half_stride if half else half
        norm_into(x + r * op.x_stride, op.width, op.weight, op.eps, out + r * op.out_stride, rounded)


@njit
def rotate(op, block, thread, threads):
    """Norm and rotate queries and keys in place, and store keys and values in the cache."""
    x, stride, rows = block.buffers[op.x], op.x_stride, block.rows
    heads, kv, dim, rotated = op.heads, op.kv, op.dim, op.rotated
    stored, slots = word(block.states, op.layer), block.slots
    cosines, sines = word(block.tables, 2 * op.table), word(block.tables, 2 * op.table + 1)
    each, half = heads + 2 * kv, 2 * rotated  # bytes of half of what is rotated
    for item in range(rows * each * thread // threads, rows * each * (thread + 1) // threads):
        r, head = item // each, item % each
        at, place = x + r * stride + 4 * dim * head, block.places + 24 * r
        if head < heads and op.weight != 0:
            norm_into(at, dim, op.weight, op.eps, at, 0)
        elif heads <= head < heads + kv and op.key_weight != 0:
            norm_into(at, dim, op.key_weight, op.key_eps, at, 0)
        if head < heads + kv:
            cos, sin = cosines + 4 * rotated * word(place, 2), sines + 4 * rotated * word(place, 2)
            for k in range(0, half, 4):
                first, second = number(at + k), number(at + half + k)
                put(at + k, first * number(cos + k) + second * number(sin + k))
                put(at + half + k, second * number(cos + half + k) + first * number(sin + half + k))
        if head >= heads:
            slot = stored + 4 * dim * ((word(place, 0) * 2 * kv + head - heads) * slots + word(place, 1))
            for k in range(0, 4 * dim, 64):
                store(slot + k, load(at + k))


@njit
def slot_of(view, i):
    """Return the slot of the i-th token that a row sees: slots in a row, then those that are listed."""
    return word(view, 0) + i if i < word(view, 1) else word(view, 3 + i - word(view, 1))


@njit
def attend(op, block, thread, threads):
    """Write the attention of each query head."""
    x, stride, out, out_stride = block.buffers[op.x], op.x_stride, block.buffers[op.out], op.out_stride
    half = buffer_of(block, op.half)
    rows, heads, kv, dim, scale = block.rows, op.heads, op.kv, op.dim, np.float32(op.scale)
    stored, slots = word(block.states, op.layer), block.slots
    views, width = word(block.views, op.sight), block.view_width
    scores = block.scores + 4 * block.most_scores * thread
    none = splat(np.float32(0))
    for item in range(rows * heads * thread // threads, rows * heads * (thread + 1) // threads):
        r, head = item // heads, item % heads
        query, view = x + r * stride + 4 * dim * head, views + 8 * width * r
        keys = stored + 4 * dim * slots * (word(block.places + 24 * r, 0) * 2 * kv + head // (heads // kv))
        values = keys + 4 * dim * slots * kv
        seen = word(view, 1) + word(view, 2)
        most = np.float32(-np.inf)
        for i in range(seen):
            key, dot = keys + 4 * dim * slot_of(view, i), none
            for k in range(0, 4 * dim, 64):
                dot = fma(load(query + k), load(key + k), dot)
            score = total(dot) * scale
            most = max(most, score)
            put(scores + 4 * i, score)
        for i in range(seen, -(-seen // LANES) * LANES):
            put(scores + 4 * i, np.float32(-np.inf))
        weights, shift = none, splat(-most)
        for i in range(0, 4 * seen, 64):
            weight = exp(plus(load(scores + i), shift))
            weights = plus(weights, weight)
            store(scores + i, weight)
        inverse = splat(np.float32(1) / total(weights))
        at, rounded, k = out + r * out_stride + 4 * dim * head, half + r * op.half_stride + 2 * dim * head, 0
        while k + 256 <= 4 * dim:  # four vectors of values at a time: sums of several do not wait for one another
            a = b = c = d = none
            for i in range(seen):
                weight, value = spread(scores + 4 * i), values + 4 * dim * slot_of(view, i) + k
                a, b = fma(weight, load(value), a), fma(weight, load(value + 64), b)
                c, d = fma(weight, load(value + 128), c), fma(weight, load(value + 192), d)
            store(at + k, times(a, inverse))
            store(at + k + 64, times(b, inverse))
            store(at + k + 128, times(c, inverse))
            store(at + k + 192, times(d, inverse))
            k += 256
        while k < 4 * dim:
            a = none
            for i in range(seen):
                a = fma(spread(scores + 4 * i), load(values + 4 * dim * slot_of(view, i) + k), a)
            store(at + k, times(a, inverse))
            k += 64
        if half != 0:
            for k in range(0, 4 * dim, 64):
                store_bf16(rounded + k // 2, load(at + k))


# ---- Programs ---------------------------------------------------------------------------------------------------


@intrinsic
def instructions_at(context, address):
    """The instructions at an address."""
    pointer = types.CPointer(_instruction)

    def generate(target, builder, _signature, values):
        return builder.inttoptr(values[0], target.get_value_type(pointer))

    return pointer(types.int64), generate


@cfunc(types.void(types.CPointer(_block)), cache=True)
def _execute(pointer):
    """Execute a program in one of the threads."""
    block, thread, threads = carray(pointer, 1)[0], this_thread(), all_threads()
    program = carray(instructions_at(block.program), block.length)
    for i in range(block.length):
        op = program[i]
        if op.kind == PRODUCT:
            product(op, block, thread, threads)
        elif op.kind == NORM:
            norm(op, block, thread, threads)
        elif op.kind == ROTATE:
            rotate(op, block, thread, threads)
        else:
            attend(op, block, thread, threads)
        wait()


def _may_use_matrices() -> bool:
    """Ask Linux for AMX's registers, which a process has to; return whether it may use them."""
    arch_prctl, request_permission, registers = 158, 0x1023, 18
    return bool(_has_matrices) and ctypes.CDLL(None).syscall(arch_prctl, request_permission, registers) == 0


MATRICES = _may_use_matrices()
"""Whether AMX multiplies weights in bfloat16."""


def run(block: NDArray[np.void]) -> None:
    """Execute a program on as many threads as torch has.

    Args:
        block: [1] of ``BLOCK``.
    """
    block["matrices"] = MATRICES
    run_on_threads(_execute, block.ctypes.data)
