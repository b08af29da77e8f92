"""The compiled noise kernel; importing it needs numba.

It computes its own logarithm, in loops that the compiler turns into vector instructions, so that
its error bounds rest on IEEE arithmetic alone (docs/noise.md, section 4).
"""

# pyright: basic, reportCallIssue=false

import math

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic

from lap2.noise.arrays import finite_range

__all__ = ["add", "fits", "gaussian", "laplace"]

if getattr(config, "DISABLE_JIT", False):
    raise ImportError("numba compiles nothing while NUMBA_DISABLE_JIT is set")

_LN2 = math.log(2.0)
_EIGHTH_TURN = math.pi / 2**64
"""An eighth of a turn over 2^62."""
_SIGN = -(1 << 63)
_EXPONENT = 0x7FF << 52
_SQRT_HALF = int(np.float64(math.sqrt(0.5)).view(np.int64))
# The bits of 2^52 and 2^84. An integer below 2^32 or-ed into them adds itself, or 2^32 of itself:
# how to make floats of integers with vector instructions that every processor has.
_2_TO_52 = 0x433 << 52
_2_TO_84 = 0x453 << 52
_NONE = np.empty(0, dtype=np.intp)


@intrinsic
def _bits(typing_context, number):  # noqa: ARG001 - numba's calling convention
    """The 64 bits of a float."""

    def generate(_context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic
def _float(typing_context, bits):  # noqa: ARG001 - numba's calling convention
    """The float that has these 64 bits."""

    def generate(_context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


# Fusing a product and a sum rounds once instead of twice: the error bounds hold either way.
_inner = numba.njit(nogil=True, error_model="numpy", fastmath={"contract"})
_outer = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})


@_inner
def _uniform(word):
    """The 63 bits of a word behind its sign, as the nearest float."""
    high, low = (word >> 32) & 0x7FFFFFFF, word & 0xFFFFFFFF
    return (_float(high | _2_TO_84) - (2.0**84 + 2.0**52)) + _float(low | _2_TO_52)


@_inner
def _minus_log(u):
    """``-log(u / 2^63)``, of the bits of a float.

    It is ``-(e log 2 + 2 atanh z)`` with U = 2^e (1+z)/(1-z), |z| < 0.1716, and the series of atanh
    to z^19. It errs by less than ``2^-53 (3 + 4 (-log U))``.
    """
    octaves = u - _SQRT_HALF  # above sqrt(1/2), in the bits of the exponent
    e = _float(((octaves >> 52) & 0x7FF) | _2_TO_52) - (2.0**52 + 63)
    f = _float(u - (octaves & (_SIGN | _EXPONENT)))
    z = (f - 1.0) / (f + 1.0)
    s = z * z
    p = 1 / 19
    p = p * s + 1 / 17
    p = p * s + 1 / 15
    p = p * s + 1 / 13
    p = p * s + 1 / 11
    p = p * s + 1 / 9
    p = p * s + 1 / 7
    p = p * s + 1 / 5
    p = p * s + 1 / 3
    return -(e * _LN2 + (2.0 * z + 2.0 * z * (s * p)))


@_inner
def _unknown(u):
    """What the bits after the 63rd can add to ``-log U``, 1/u, as a power of two not below it."""
    return _float((2046 << 52) - (u & _EXPONENT))


@_outer
def _laplace(words, ratio, noise):
    """As :func:`laplace`; returns how many samples were left undecided."""
    undecided = 0
    for i in range(words.size):
        word = np.int64(words[i])
        u = _bits(_uniform(word))
        y = _minus_log(u) * ratio
        middle = np.floor(y) + 0.5
        margin = y * 2.0**-50 + ratio * (2.0**-50 + _unknown(u))
        decided = abs(y - middle) < 0.5 - margin
        undecided += np.int64(not decided)
        noise[i] = _float(_bits(middle) | (word & _SIGN)) if decided else np.nan
    return undecided


@_outer
def _gaussian(words, ratio, noise):
    """As :func:`gaussian`; returns how many samples were left undecided.

    The error is at most half of the margin, which is the same for both coordinates of a pair.
    """
    undecided = 0
    for i in range(words.size // 2):
        first, second = np.int64(words[2 * i]), np.int64(words[2 * i + 1])
        u = _bits(_uniform(first))
        log = _minus_log(u)
        stretch = ratio / np.sqrt(log)
        t = (_uniform(second) - 2.0**62) * _EIGHTH_TURN
        s = t * t
        c = 1 / 20922789888000
        c = c * s - 1 / 87178291200
        c = c * s + 1 / 479001600
        c = c * s - 1 / 3628800
        c = c * s + 1 / 40320
        c = c * s - 1 / 720
        c = c * s + 1 / 24
        c = c * s - 1 / 2
        c = c * s + 1
        d = 1 / 355687428096000
        d = d * s - 1 / 1307674368000
        d = d * s + 1 / 6227020800
        d = d * s - 1 / 39916800
        d = d * s + 1 / 362880
        d = d * s - 1 / 5040
        d = d * s + 1 / 120
        d = d * s - 1 / 6
        d = d * s * t + t
        radius = stretch * log
        y, z = radius * (c - d), radius * (c + d)
        limit = 0.5 - stretch * (2.0**-50 + 2.0**-48 * log + 2.0 * _unknown(u))
        middle_y, middle_z = np.floor(y) + 0.5, np.floor(z) + 0.5
        decided_y, decided_z = abs(y - middle_y) < limit, abs(z - middle_z) < limit
        undecided += np.int64(not decided_y) + np.int64(not decided_z)
        noise[2 * i] = _float(_bits(middle_y) | (first & _SIGN)) if decided_y else np.nan
        noise[2 * i + 1] = _float(_bits(middle_z) | (second & _SIGN)) if decided_z else np.nan
    return undecided


@numba.njit(nogil=True, cache=True)
def _add(values, noise, grid, lowest, highest):
    inverse = 1.0 / grid
    for i in range(values.size):
        released = (np.rint(np.float64(values[i]) * inverse) + noise[i]) * grid
        values[i] = min(max(released, lowest), highest)


@numba.njit(nogil=True, cache=True)
def fits(values, limit):
    """Compiled :func:`lap2.noise.grid_numpy.fits`."""
    outside = 0
    for i in range(values.size):
        outside += np.int64(not abs(values[i]) < limit)
    return outside == 0


def laplace(words, ratio, noise):
    """Compiled :func:`lap2.noise.grid_numpy.laplace`."""
    return np.flatnonzero(np.isnan(noise)) if _laplace(words, ratio, noise) else _NONE


def gaussian(words, ratio, noise):
    """Compiled :func:`lap2.noise.grid_numpy.gaussian`."""
    return np.flatnonzero(np.isnan(noise)) if _gaussian(words, ratio, noise) else _NONE


def add(values, noise, grid):
    """Compiled :func:`lap2.noise.grid_numpy.add`."""
    _add(values, noise, grid, *finite_range(values.dtype))
