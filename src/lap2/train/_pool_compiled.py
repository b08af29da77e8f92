"""The compiled kernels of max pooling; importing it needs numba.

torch remembers the place of every maximum in 64 bits, twice the size of the maxima themselves. Here
it is one byte.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false

from contextlib import contextmanager

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lap2.train._threads import finish, job_type, pointer, run, share

__all__ = ["MULTIPLE", "backward", "forward"]

MULTIPLE = 8
"""The number of channels must be a multiple of this."""

_JOB = job_type("""
    rows columns channels out_rows out_columns
    kernel_rows kernel_columns down right inputs outputs places
""")
"""What there is to do: sizes, strides, and addresses."""

_SIZE, _BYTE, _INDEX = ir.IntType(64), ir.IntType(8), ir.IntType(32)
_FLOATS, _BYTES = (ir.VectorType(kind, MULTIPLE) for kind in (ir.FloatType(), _BYTE))
_FIRST = ir.Constant(ir.VectorType(_INDEX, MULTIPLE), None)


@contextmanager
def _each_vector(builder, arguments):
    """A loop over the vectors of a run: where they are, of inputs, outputs and places."""
    _, inputs, outputs, places, count, _ = arguments
    with cgutils.for_range(builder, builder.udiv(count, _SIZE(MULTIPLE))) as loop:
        byte = builder.mul(loop.index, _SIZE(MULTIPLE))
        number = builder.mul(byte, _SIZE(4))
        yield (
            builder.add(inputs, number),
            builder.inttoptr(builder.add(outputs, number), _FLOATS.as_pointer()),
            builder.inttoptr(builder.add(places, byte), _BYTES.as_pointer()),
        )


def _for_each_tap(builder, arguments, first, known, act):
    """Act on every place of a window, given its number, in every lane, and where its vector is.

    If it is known to be a square of this size, one after the other without a loop.
    """
    rows, columns, row, column = (builder.extract_value(arguments[5], i) for i in range(4))

    def act_on(down, right):
        number = builder.trunc(builder.add(builder.mul(down, columns), right), _BYTE)
        lane = builder.insert_element(ir.Constant(_BYTES, ir.Undefined), number, _INDEX(0))
        place = builder.add(first, builder.mul(down, row))
        place = builder.add(place, builder.mul(right, column))
        act(
            builder.shuffle_vector(lane, lane, _FIRST),
            builder.inttoptr(place, _FLOATS.as_pointer()),
        )

    if known:
        for number in range(known * known):
            act_on(*map(_SIZE, divmod(number, known)))
        return
    with cgutils.for_range(builder, rows) as down, cgutils.for_range(builder, columns) as right:
        act_on(down.index, right.index)


def _signature(known):
    return types.void(known, *4 * (types.intp,), types.UniTuple(types.intp, 4))


@intrinsic(prefer_literal=True)
def _maxima(typing_context, known, inputs, outputs, places, count, taps):  # noqa: ARG001, PLR0917
    """Write the maxima of a run of windows, and where in each the first of them is.

    As torch has it: what is not a number is larger than all.

    Args:
        typing_context: numba's.
        known: the size of windows, if that is known when it is compiled; else 0.
        inputs: address of the first number of the first window.
        outputs: address of the first maximum.
        places: address of the first place.
        count: how many maxima, which follow each other as their windows' first numbers do.
        taps: rows and columns of a window; how many bytes further the next row and column are.
    """
    size = known.literal_value

    def generate(context, builder, _signature, arguments):
        best = cgutils.alloca_once(builder, _FLOATS)
        where = cgutils.alloca_once(builder, _BYTES)

        def compare(tap, address):
            value, before = builder.load(address, align=4), builder.load(best)
            larger = builder.fcmp_ordered(">", value, before)
            larger = builder.or_(larger, builder.fcmp_unordered("uno", value, value))
            builder.store(builder.select(larger, value, before), best)
            builder.store(builder.select(larger, tap, builder.load(where)), where)

        with _each_vector(builder, arguments) as (first, output, place):
            source = builder.inttoptr(first, _FLOATS.as_pointer())
            builder.store(builder.load(source, align=4), best)
            builder.store(ir.Constant(_BYTES, None), where)
            _for_each_tap(builder, arguments, first, size, compare)
            builder.store(builder.load(best), output, align=4)
            builder.store(builder.load(where), place, align=1)
        return context.get_dummy_value()

    return _signature(known), generate


@intrinsic(prefer_literal=True)
def _passed(typing_context, known, inputs, outputs, places, count, taps):  # noqa: ARG001, PLR0917
    """Add the gradients of a run of maxima to those of where they are. See :func:`_maxima`."""
    size = known.literal_value

    def generate(context, builder, _signature, arguments):
        with _each_vector(builder, arguments) as (first, output, place):
            grad, where = builder.load(output, align=4), builder.load(place, align=1)

            def add(tap, address):
                here = builder.icmp_unsigned("==", where, tap)
                passed = builder.select(here, grad, ir.Constant(_FLOATS, None))
                total = builder.fadd(builder.load(address, align=4), passed)
                builder.store(total, address, align=4)

            _for_each_tap(builder, arguments, first, size, add)
        return context.get_dummy_value()

    return _signature(known), generate


@numba.njit
def _runs(job, example):
    """Of every run of windows of an example: addresses, how many numbers, and the taps."""
    taps = (
        job.kernel_rows,
        job.kernel_columns,
        4 * job.columns * job.channels,
        4 * job.channels,
    )
    runs, count = job.out_columns, job.channels
    if job.right == 1:  # neighbours in a row follow each other in memory
        runs, count = 1, count * runs
    for y in range(job.out_rows):
        for x in range(runs):
            first = (example * job.rows + y * job.down) * job.columns + x * job.right
            result = (example * job.out_rows + y) * job.out_columns + x
            inputs = job.inputs + 4 * first * job.channels
            outputs = job.outputs + 4 * result * job.channels
            yield inputs, outputs, job.places + result * job.channels, count, taps


@numba.cfunc(types.void(types.voidptr), cache=True)
def _forward(address):
    """The maxima of one example after the other, as many as are this thread's."""
    job = numba.carray(address, 1, _JOB)[0]
    first, last = share(job)
    for example in range(first, last):
        for inputs, outputs, places, count, taps in _runs(job, example):
            if job.kernel_rows == 2 and job.kernel_columns == 2:
                _maxima(2, inputs, outputs, places, count, taps)
            else:
                _maxima(0, inputs, outputs, places, count, taps)
    finish(address, first, last)


@numba.cfunc(types.void(types.voidptr), cache=True)
def _backward(address):
    """The gradients of one example after the other, as many as are this thread's."""
    job = numba.carray(address, 1, _JOB)[0]
    shape = (job.pieces, job.rows * job.columns * job.channels)
    grads = numba.carray(pointer(job.inputs), shape, np.float32)
    first, last = share(job)
    for example in range(first, last):
        grads[example] = 0.0
        for inputs, outputs, places, count, taps in _runs(job, example):
            if job.kernel_rows == 2 and job.kernel_columns == 2:
                _passed(2, inputs, outputs, places, count, taps)
            else:
                _passed(0, inputs, outputs, places, count, taps)
    finish(address, first, last)


def forward(inputs, outputs, places, window, threads):
    """Write maxima to ``outputs``, and where in its window each is to ``places``.

    Args:
        inputs: (batch, rows, columns, channels) in float32, contiguous, as are all.
        outputs: (batch, out_rows, out_columns, channels) in float32.
        places: likewise, in uint8.
        window: its rows and columns, at most 256 places together; how many rows and columns further
            the next is.
        threads: how many to use.
    """
    run(_forward, len(inputs), _fields(inputs, outputs, places, window), threads)


def backward(inputs, outputs, places, window, threads):
    """Write the gradients of ``inputs``, given those of maxima in ``outputs``. See above."""
    run(_backward, len(inputs), _fields(inputs, outputs, places, window), threads)


def _fields(inputs, outputs, places, window):
    addresses = (t.data_ptr() for t in (inputs, outputs, places))
    return (*inputs.shape[1:], *outputs.shape[1:3], *window, *addresses)
