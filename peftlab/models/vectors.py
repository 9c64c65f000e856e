"""Vectors of sixteen float32 numbers, and torch's threads, for code that numba compiles; needs numba and GNU's OpenMP.

A vector operation is written out as LLVM's own, so the compiler reorders no sum. Memory is read and written by address:
who calls answers for the sizes. Numba keeps what it has compiled by the file that asks for it: whoever changes this one
removes their ``__pycache__``.
"""

from __future__ import annotations

import ctypes
import inspect
import math
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding
import torch
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.extending import models, register_model

from peftlab.untyped import Compiled

LANES = 16
"""Numbers of a vector."""


class Lanes(types.Type):
    """Numba's type of sixteen float32 numbers, which LLVM keeps in one, two or four registers."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


FLOATS = ir.VectorType(ir.FloatType(), LANES)
WORDS = ir.VectorType(ir.IntType(32), LANES)
LANES_TYPE = Lanes()
NOTHING = ir.Constant(ir.IntType(8).as_pointer(), None)
"""What a function without a result returns."""
intrinsic: Compiled = extending.intrinsic
ADDRESS = types.int64


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager: object, numba_type: object):
        super().__init__(manager, numba_type, FLOATS)


def emits(result: types.Type, *arguments: types.Type) -> Callable:
    """Return a decorator that makes a function of LLVM's builder and values callable from compiled code."""

    def decorate(build: Callable) -> Callable:
        def typer(context: object, *_: object) -> object:
            return result(*arguments), lambda _context, builder, _signature, values: build(builder, *values)

        names = inspect.signature(build).parameters.values()
        typer.__signature__ = inspect.Signature([p.replace(annotation=p.empty) for p in names])  # type: ignore[attr-defined]
        typer.__name__ = build.__name__
        return intrinsic(typer)

    return decorate


def read(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    """Return what is stored at an address."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def write(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    """Store float32 numbers at an address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 4
    return NOTHING


def call(builder: ir.IRBuilder, name: str, *values: ir.Value) -> ir.Value:
    """Call a function of LLVM's whose result is of its arguments' type."""
    kind = ir.FunctionType(values[0].type, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def repeat(builder: ir.IRBuilder, number: ir.Value, kind: ir.VectorType = FLOATS) -> ir.Value:
    """Return a vector of a number in all lanes."""
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(
        first, first, ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [0] * kind.count)
    )


def all_of(value: int) -> ir.Constant:
    """Return a whole number in all lanes."""
    return ir.Constant(WORDS, [value] * LANES)


def vector_of(kind: ir.Type) -> ir.VectorType:
    """Return the type of sixteen of these."""
    return ir.VectorType(kind, LANES)


@emits(types.int64, ADDRESS, types.int64)
def word(builder, table, i):
    """The i-th whole number of a table."""
    address = builder.add(table, builder.mul(i, ir.IntType(64)(8)))
    return read(builder, address, ir.IntType(64), 8)


@emits(types.float32, ADDRESS)
def number(builder, address):
    return read(builder, address, ir.FloatType(), 4)


@emits(types.none, ADDRESS, types.float32)
def put(builder, address, value):
    return write(builder, address, value)


@emits(LANES_TYPE, ADDRESS)
def load(builder, address):
    return read(builder, address, FLOATS, 4)


@emits(types.none, ADDRESS, LANES_TYPE)
def store(builder, address, value):
    return write(builder, address, value)


@emits(types.none, ADDRESS)
def prefetch(builder, address):
    """Ask for the 64 bytes at an address, which need not exist."""
    pointer, one = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, one, one, one])
    ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(ask, [builder.inttoptr(address, pointer), one(0), one(3), one(1)])
    return NOTHING


@emits(LANES_TYPE, ADDRESS)
def spread(builder, address):
    """The number at an address in all lanes."""
    return repeat(builder, read(builder, address, ir.FloatType(), 4))


@emits(LANES_TYPE, types.float32)
def splat(builder, value):
    return repeat(builder, value)


@emits(LANES_TYPE, LANES_TYPE, LANES_TYPE)
def plus(builder, a, b):
    return builder.fadd(a, b)


@emits(LANES_TYPE, LANES_TYPE, LANES_TYPE)
def times(builder, a, b):
    return builder.fmul(a, b)


@emits(LANES_TYPE, LANES_TYPE, LANES_TYPE)
def over(builder, a, b):
    return builder.fdiv(a, b)


@emits(LANES_TYPE, LANES_TYPE, LANES_TYPE, LANES_TYPE)
def fma(builder, a, b, c):
    """a b + c, rounded once."""
    return call(builder, "llvm.fma.v16f32", a, b, c)


@emits(types.float32, LANES_TYPE)
def total(builder, a):
    """The sum of the lanes: halves are added until one number is left."""
    width = LANES // 2
    while width:
        places = ir.Constant(WORDS, [i + width if i < width else i for i in range(LANES)])
        a = builder.fadd(a, builder.shuffle_vector(a, a, places))
        width //= 2
    return builder.extract_element(a, ir.IntType(32)(0))


@emits(LANES_TYPE, LANES_TYPE)
def exp(builder, x):
    """e^x, within two units in the last place from -87 to 88, and constant beyond."""

    def f(value: float) -> ir.Constant:
        return ir.Constant(FLOATS, [value] * LANES)

    x = call(builder, "llvm.minnum.v16f32", call(builder, "llvm.maxnum.v16f32", x, f(-87.0)), f(88.0))
    n = call(builder, "llvm.rint.v16f32", builder.fmul(x, f(math.log2(math.e))))
    rest = call(builder, "llvm.fma.v16f32", n, f(-0.693359375), x)  # ln 2 in two parts, the first exact in a product
    rest = call(builder, "llvm.fma.v16f32", n, f(2.12194440e-4), rest)
    series = f(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        series = call(builder, "llvm.fma.v16f32", series, rest, f(factor))
    exponent = builder.shl(builder.add(builder.fptosi(n, WORDS), all_of(127)), all_of(23))
    return builder.fmul(series, builder.bitcast(exponent, FLOATS))


@emits(LANES_TYPE, ADDRESS)
def load_f16(builder, address):
    return builder.fpext(read(builder, address, vector_of(ir.HalfType()), 2), FLOATS)


@emits(LANES_TYPE, ADDRESS)
def load_bf16(builder, address):
    bits = builder.zext(read(builder, address, vector_of(ir.IntType(16)), 2), WORDS)
    return builder.bitcast(builder.shl(bits, all_of(16)), FLOATS)


@emits(types.none, ADDRESS, LANES_TYPE)
def store_bf16(builder, address, value):
    """Store the lanes rounded to the nearest bfloat16 number, of two the even one."""
    bits = builder.bitcast(value, WORDS)
    up = builder.add(all_of(0x7FFF), builder.and_(builder.lshr(bits, all_of(16)), all_of(1)))
    rounded = builder.trunc(builder.lshr(builder.add(bits, up), all_of(16)), vector_of(ir.IntType(16)))
    builder.store(rounded, builder.inttoptr(address, rounded.type.as_pointer())).align = 2
    return NOTHING


@emits(LANES_TYPE, ADDRESS)
def load_int8(builder, address):
    return builder.sitofp(builder.sext(read(builder, address, vector_of(ir.IntType(8)), 1), WORDS), FLOATS)


@emits(types.UniTuple(LANES_TYPE, 2), ADDRESS)
def load_uint4(builder, address):
    """The low and the high halves of sixteen bytes."""
    both = builder.zext(read(builder, address, vector_of(ir.IntType(8)), 1), WORDS)
    pair = ir.Constant(ir.ArrayType(FLOATS, 2), ir.Undefined)
    for i, half in enumerate((builder.and_(both, all_of(15)), builder.lshr(both, all_of(4)))):
        pair = builder.insert_value(pair, builder.sitofp(half, FLOATS), i)
    return pair


# ---- Torch's threads --------------------------------------------------------------------------------------------

_NAMES = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
_torch = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
_functions = {name: getattr(_torch, name) for name in _NAMES}
for _name, _function in _functions.items():
    llvmlite.binding.add_symbol(_name, ctypes.cast(_function, ctypes.c_void_p).value)


def _openmp(builder: ir.IRBuilder, name: str, result: ir.Type) -> ir.Value:
    return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, []), name), [])


@emits(types.int64)
def this_thread(builder):
    return builder.sext(_openmp(builder, "omp_get_thread_num", ir.IntType(32)), ir.IntType(64))


@emits(types.int64)
def all_threads(builder):
    return builder.sext(_openmp(builder, "omp_get_num_threads", ir.IntType(32)), ir.IntType(64))


@emits(types.none)
def wait(builder):
    """Wait until all threads are here."""
    _openmp(builder, "GOMP_barrier", ir.VoidType())
    return NOTHING


_parallel = _functions["GOMP_parallel"]
_parallel.argtypes, _parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None


def run_on_threads(function: Compiled, argument: int) -> None:
    """Call a function once in each of as many threads as torch has.

    Args:
        function: compiled by numba's ``cfunc``. argument: the address that it gets.
    """
    _parallel(function.address, argument, torch.get_num_threads(), 0)
