"""The compiled kernel of signs; importing it needs numba.

It computes its own exponential in float32, in loops that the compiler turns into vector
instructions, so that its error bound rests on IEEE arithmetic alone (docs/noise.md, section 9).
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false

import math

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic

from lap2.noise.arrays import finite_range
from lap2.noise.grid_compiled import fits
from lap2.noise.signs_numpy import MARGIN

__all__ = ["count", "fits", "write"]

if getattr(config, "DISABLE_JIT", False):
    raise ImportError("numba compiles nothing while NUMBA_DISABLE_JIT is set")

_ONE, _MARGIN = np.float32(1), np.float32(MARGIN)
_MOST = np.float32(60)
_OCTAVES = np.float32(-1 / math.log(2))
# 2^r for 0 <= r <= 1, within 2^-23.4 of itself once these are rounded to float32.
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(c)
    for c in (
        0.9999999250636205,
        0.6931530731948385,
        0.24015361709052507,
        0.055826317916588986,
        0.008989340253437228,
        0.0018775766078619471,
    )
)
_UNDECIDED = np.uint32(1 << 31)
_LANES = 32
"""Words that are compared at a time."""
_BLOCK = 1024
"""Counts that are searched at a time."""


@intrinsic
def _power(typing_context, exponent):  # noqa: ARG001 - numba's calling convention
    """Two to the power of an integer, as a float."""

    def generate(_context, builder, _signature, arguments):
        biased = builder.add(arguments[0], ir.IntType(32)(127))
        return builder.bitcast(builder.shl(biased, ir.IntType(32)(23)), ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def _below(typing_context, words, first):  # noqa: ARG001 - numba's calling convention
    """How many of :data:`_LANES` words at an address are below another."""
    vector = ir.VectorType(ir.IntType(16), _LANES)

    def generate(_context, builder, _signature, arguments):
        address, first = arguments
        place = builder.inttoptr(address, vector.as_pointer())
        nothing = ir.Constant(vector, ir.Undefined)
        one = builder.insert_element(nothing, first, ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), None)
        limits = builder.shuffle_vector(one, nothing, lanes)
        below = builder.icmp_unsigned("<", builder.load(place, align=2), limits)
        return builder.ctpop(builder.bitcast(below, ir.IntType(_LANES)))

    return types.uint32(types.intp, types.uint16), generate


# Fusing a product and a sum rounds once instead of twice: the error bound holds either way.
_inner = numba.njit(nogil=True, error_model="numpy", fastmath={"contract"})
_outer = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
# Only what is written in such a function itself may be added in any order: counts.
_any_order = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc"})


@_inner
def _threshold(value, inverse):
    """``2^15 exp(-|u|)``, a word of 16 bits below which is a flip."""
    size = min(np.float32(abs(np.float64(value) * inverse)), _MOST)
    y = size * _OCTAVES
    octave = np.floor(y)
    r = y - octave
    p = _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r + _C1
    p = p * r + _C0
    return p * _power(np.int32(octave) + np.int32(15))


@_inner
def _flips(value, word, inverse):
    """Whether a word flips the sign of a value, and whether that is sure."""
    rest = _threshold(value, inverse) - np.float32(word)
    flips = rest >= _ONE + _MARGIN
    return flips, flips | (rest <= -_MARGIN)


@_any_order
def _count_one(values, words, inverse, counts):
    undecided = np.float32(0)
    for i in range(values.size):
        flips, is_sure = _flips(values[i], words[i], inverse)
        undecided += np.float32(0) if is_sure else np.float32(1)
        positive = np.uint32(flips != (values[i] >= 0))
        counts[i] = positive if is_sure else _UNDECIDED
    return np.intp(undecided)


@_outer
def _count(values, words, inverse, copies, counts):
    undecided, address = 0, words.ctypes.data
    whole = copies - copies % _LANES
    for i in range(values.size):
        threshold = _threshold(values[i], inverse)
        first = np.uint16(max(np.floor(threshold - _MARGIN), np.float32(0)))
        second = np.uint16(np.ceil(threshold + _MARGIN))
        flips, perhaps, start = np.uint32(0), np.uint32(0), i * copies
        for j in range(start, start + whole, _LANES):
            flips += _below(address + 2 * j, first)
            perhaps += _below(address + 2 * j, second)
        for j in range(start + whole, start + copies):
            flips += np.uint32(words[j] < first)
            perhaps += np.uint32(words[j] < second)
        undecided += np.intp(flips != perhaps)
        positive = np.uint32(copies) - flips if values[i] >= 0 else flips
        counts[i] = positive if flips == perhaps else _UNDECIDED
    return undecided


@_outer
def _find(counts, places):
    """Write the places of all undecided counts, which are few: whole blocks are passed over."""
    number, start = 0, 0
    while number < places.size:
        block = counts[start : start + _BLOCK]
        together = np.uint32(0)
        for i in range(block.size):
            together |= block[i]
        if together >= _UNDECIDED:
            for i in range(block.size):
                if block[i] == _UNDECIDED:
                    places[number] = start + i
                    number += 1
        start += _BLOCK


@_outer
def _write(values, counts, gain, copies, limits):
    for i in range(values.size):
        estimate = gain * (2.0 * counts[i] - copies)
        values[i] = min(max(estimate, limits[0]), limits[1])


@_outer
def _write_one(values, counts, size):
    for i in range(values.size):
        values[i] = size if counts[i] else -size


def write(values, counts, gain, copies):
    """Compiled :func:`lap2.noise.signs_numpy.write`."""
    limits = finite_range(values.dtype)
    if copies == 1:
        _write_one(values, counts, values.dtype.type(min(gain, limits[1])))
    else:
        _write(values, counts, gain, copies, limits)


def count(values, words, inverse, copies, counts):
    """Compiled :func:`lap2.noise.signs_numpy.count`."""
    if copies == 1:
        undecided = _count_one(values, words, inverse, counts)
    else:
        undecided = _count(values, words, inverse, copies, counts)
    places = np.empty(undecided, dtype=np.intp)
    _find(counts, places)
    return places
