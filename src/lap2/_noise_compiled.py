"""The compiled noise kernel; importing it needs numba.

It computes its own logarithm, in a loop that the compiler turns into vector instructions, so that
its error bound rests on IEEE arithmetic alone (docs/noise.md, section 4).
"""

# pyright: basic, reportCallIssue=false

import math

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic

from lap2._arrays import finite_range

__all__ = ["add", "draw", "fits"]

if getattr(config, "DISABLE_JIT", False):
    raise ImportError("numba compiles nothing while NUMBA_DISABLE_JIT is set")

_LN2 = math.log(2.0)
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


# Fusing a product and a sum rounds once instead of twice: the error bound holds either way.
@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _draw(words, ratio, noise):
    """As :func:`draw`; returns how many samples were left undecided.

    ``-log U`` is ``-(e log 2 + 2 atanh z)`` with U = 2^e (1+z)/(1-z), |z| < 0.1716, and the series
    of atanh to z^19. It errs by less than ``2^-53 (3 + 4 (-log U))``, less than half the margin;
    what the bits after the 63rd can add, at most 1/u, is part of the margin as a power of two.
    """
    undecided = 0
    for i in range(words.size):
        word = np.int64(words[i])
        high, low = (word >> 32) & 0x7FFFFFFF, word & 0xFFFFFFFF
        u = _bits((_float(high | _2_TO_84) - (2.0**84 + 2.0**52)) + _float(low | _2_TO_52))
        octaves = u - _SQRT_HALF  # above sqrt(1/2), in the bits of the exponent
        e = _float(((octaves >> 52) & 0x7FF) | _2_TO_52) - (2.0**52 + 63)
        f = _float(u - (octaves & (_SIGN | _EXPONENT)))
        unknown = _float((2046 << 52) - (u & _EXPONENT))
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
        y = (e * _LN2 + (2.0 * z + 2.0 * z * (s * p))) * -ratio
        middle = np.floor(y) + 0.5
        margin = y * 2.0**-50 + ratio * (2.0**-50 + unknown)
        decided = abs(y - middle) < 0.5 - margin
        undecided += np.int64(not decided)
        noise[i] = _float(_bits(middle) | (word & _SIGN)) if decided else np.nan
    return undecided


@numba.njit(nogil=True, cache=True)
def _add(values, noise, grid, lowest, highest):
    inverse = 1.0 / grid
    for i in range(values.size):
        released = (np.rint(np.float64(values[i]) * inverse) + noise[i]) * grid
        values[i] = min(max(released, lowest), highest)


@numba.njit(nogil=True, cache=True)
def fits(values, limit):
    """Compiled :meth:`lap2.noise.NumpyKernel.fits`."""
    outside = 0
    for i in range(values.size):
        outside += np.int64(not abs(values[i]) < limit)
    return outside == 0


def draw(words, ratio, noise):
    """Compiled :meth:`lap2.noise.NumpyKernel.draw`."""
    return np.flatnonzero(np.isnan(noise)) if _draw(words, ratio, noise) else _NONE


def add(values, noise, grid):
    """Compiled :meth:`lap2.noise.NumpyKernel.add`."""
    _add(values, noise, grid, *finite_range(values.dtype))
