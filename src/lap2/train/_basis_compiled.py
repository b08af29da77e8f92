"""The compiled Hadamard transform; importing it needs numba.

Rows are mixed in two passes, each of which changes half of the bits of a row's number, so that what
is mixed at a time stays in the fastest cache.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lap2.train._threads import finish, job_type, pointer, run, share

__all__ = ["transform"]

_LANES = 8
"""Columns in a vector, which is one register or a few."""
_WIDTH = 2 * _LANES
"""Columns that are worked on at a time."""
_VECTOR = ir.VectorType(ir.DoubleType(), _LANES)
_FIRST = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), None)

_JOB = job_type("next_piece rows next_row columns values before after")
"""One pass. The rows of a piece are mixed with each other: how many there are, and how many rows
further the next of them and the next piece are. And addresses.
"""


def _place(builder, address, offset):
    """Where a vector is."""
    return builder.inttoptr(builder.add(address, offset), _VECTOR.as_pointer())


@intrinsic(prefer_literal=True)
def _move(typing_context, count, source, target, weight):  # noqa: ARG001 - numba's convention
    """Write ``count`` numbers, a multiple of :data:`_LANES`, times a weight to another address."""
    numbers = count.literal_value

    def generate(context, builder, _signature, arguments):
        _, source, target, weight = arguments
        nothing = ir.Constant(_VECTOR, ir.Undefined)
        first = builder.insert_element(nothing, weight, ir.IntType(32)(0))
        weights = builder.shuffle_vector(first, nothing, _FIRST)
        for start in range(0, 8 * numbers, 8 * _LANES):
            offset = source.type(start)
            vector = builder.load(_place(builder, source, offset), align=8)
            builder.store(builder.fmul(vector, weights), _place(builder, target, offset), align=8)
        return context.get_dummy_value()

    return types.void(count, types.intp, types.intp, types.float64), generate


@intrinsic(prefer_literal=True)
def _mix_few(typing_context, count, address, step):  # noqa: ARG001 - numba's calling convention
    """The Hadamard transform over a few rows of :data:`_WIDTH` numbers, in registers.

    Args:
        typing_context: numba's.
        count: how many rows, a power of two, known when it is compiled.
        address: of the first.
        step: how many bytes further the next is.
    """
    rows = count.literal_value

    def generate(context, builder, _signature, arguments):
        _, address, step = arguments
        firsts = [builder.add(address, builder.mul(step, step.type(i))) for i in range(rows)]
        for offset in range(0, 8 * _WIDTH, 8 * _LANES):
            places = [_place(builder, first, step.type(offset)) for first in firsts]
            numbers = [builder.load(place, align=8) for place in places]
            half = 1
            while half < rows:
                for i in range(rows):
                    if not i & half:
                        a, b = numbers[i], numbers[i + half]
                        numbers[i], numbers[i + half] = builder.fadd(a, b), builder.fsub(a, b)
                half *= 2
            for number, place in zip(numbers, places, strict=True):
                builder.store(number, place, align=8)
        return context.get_dummy_value()

    return types.void(count, types.intp, types.intp), generate


@numba.njit
def _mix(tile, rows):
    """The Hadamard transform over the rows of a tile, in place; up to three bits at a time."""
    size, step = 8 * _WIDTH, 1
    while step < rows:
        if 8 * step <= rows:
            together = 8
        elif 4 * step <= rows:
            together = 4
        else:
            together = 2
        for start in range(0, rows, together * step):
            for row in range(start, start + step):
                if together == 8:
                    _mix_few(8, tile + row * size, step * size)
                elif together == 4:
                    _mix_few(4, tile + row * size, step * size)
                else:
                    _mix_few(2, tile + row * size, step * size)
        step *= together


@numba.njit
def _copy(source, target, count, weight):
    """Write ``count`` numbers, but at most :data:`_WIDTH`, times a weight to another address."""
    if count >= _WIDTH:
        _move(_WIDTH, source, target, weight)
        return
    first = 0
    if count >= _LANES:
        _move(_LANES, source, target, weight)
        first = _LANES
    numbers = numba.carray(pointer(source), count, np.float64)
    result = numba.carray(pointer(target), count, np.float64)
    for i in range(first, count):
        result[i] = numbers[i] * weight


@numba.cfunc(types.void(types.voidptr), cache=True)
def _work(address):
    """Mix the rows of one piece after the other, as many as are this thread's."""
    job = numba.carray(address, 1, _JOB)[0]
    columns = job.columns
    before = numba.carray(pointer(job.before), job.pieces * job.rows, np.float64)
    after = numba.carray(pointer(job.after), job.pieces * job.rows, np.float64)
    tile = np.zeros((job.rows, _WIDTH))
    first = tile.ctypes.data
    begin, end = share(job)
    for piece in range(begin, end):
        for start in range(0, columns, _WIDTH):
            rest = columns - start
            for i in range(job.rows):
                row = piece * job.next_piece + i * job.next_row
                place = job.values + 8 * (row * columns + start)
                _copy(place, first + 8 * i * _WIDTH, rest, before[row])
            _mix(first, job.rows)
            for i in range(job.rows):
                row = piece * job.next_piece + i * job.next_row
                place = job.values + 8 * (row * columns + start)
                _copy(first + 8 * i * _WIDTH, place, rest, after[row])
    finish(address, begin, end)


def transform(values, before, after, threads):
    """Multiply by ``diag(after) H diag(before)``, with H a Hadamard matrix of entries 1 and -1.

    Args:
        values: (rows, columns) in float64, contiguous, changed in place; rows are a power of two.
        before: a weight for each row, in float64.
        after: likewise.
        threads: how many to use.
    """
    count, columns = values.shape
    near = 1 << ((count.bit_length() - 1) // 2)
    far = count // near
    ones = torch.ones_like(before)
    for pieces, *rows, first, last in (
        (far, near, near, 1, before, ones),
        (near, 1, far, near, ones, after),
    ):
        addresses = (t.data_ptr() for t in (values, first, last))
        run(_work, pieces, (*rows, columns, *addresses), threads)
