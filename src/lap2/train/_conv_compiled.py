"""The compiled kernel for per-example gradients of convolutions; importing it needs numba.

It reads the image where it lies: what a convolution was applied to is many times the image, and is
never written out. The sums over positions of a few inputs times a few outputs are kept in the
processor's registers.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false

import operator
from functools import reduce

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lap2.train._threads import finish, job_type, pointer, run, share

__all__ = ["MULTIPLE", "form"]

MULTIPLE = 8
"""The number of outputs must be a multiple of this."""
_WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
"""Whether the processor has 32 registers of 16 numbers, rather than 16 of 8."""
_LANES = 16 if _WIDE else 8
_INPUTS = (8, 4, 3, 1) if _WIDE else (4, 3, 1)
"""Inputs that are worked on at once: with two vectors of outputs each, their sums are half of the
registers.
"""
_OUTPUTS = 2 * _LANES
_POSITIONS = 256
"""Positions that are worked on at a time: their gradients stay in the fastest cache."""
_SUMS = 4
"""Sums that squares are added to in turn, as one would have to wait for itself."""

_SIZE = ir.IntType(64)
_FLOAT = ir.FloatType()

_JOB = job_type("""
    rows columns kernel_rows kernel_columns inputs outputs
    windows window_example window_row window_column down right
    grads grad_example grad_row grad_column
    values squares
""")
"""What there is to do: sizes, addresses, and steps in bytes."""


def _tile(builder, inputs, outputs, grads, image, values, sizes):  # noqa: PLR0917
    """Write or add ``sum_t image[t, i] grads[t, o]`` to ``values[i, o]`` for a few i and o.

    Args:
        builder: of the function that does it.
        inputs: how many i.
        outputs: how many o.
        grads: address of the first gradient.
        image: address of the first input; the others follow it.
        values: address of the first result.
        sizes: rows and columns of t; how many bytes further the next row and the next column of
            ``grads`` are, and those of ``image``, and the next i of ``values``; whether to add.
    """
    rows, columns, grad_row, grad_column, image_row, image_column, next_input, add = sizes
    lanes = min(outputs, _LANES)
    vector = ir.VectorType(_FLOAT, lanes)
    zero, undefined = ir.Constant(vector, None), ir.Constant(vector, ir.Undefined)
    first_lane = ir.Constant(ir.VectorType(ir.IntType(32), lanes), None)
    shape = ir.FunctionType(vector, 3 * (vector,))
    fused = cgutils.get_or_insert_function(builder.module, shape, f"llvm.fma.v{lanes}f32")

    def after(address, steps, size):
        return builder.add(address, builder.mul(steps, size))

    def at(address, offset, kind):
        return builder.inttoptr(builder.add(address, _SIZE(offset)), kind.as_pointer())

    def vectors_at(address):
        return [at(address, 4 * first, vector) for first in range(0, outputs, lanes)]

    sums = [
        [cgutils.alloca_once_value(builder, zero) for _ in range(0, outputs, lanes)]
        for _ in range(inputs)
    ]
    for total in reduce(operator.add, sums):
        builder.store(zero, total)
    with cgutils.for_range(builder, rows) as down:
        first_grad = after(grads, down.index, grad_row)
        first_pixel = after(image, down.index, image_row)
        with cgutils.for_range(builder, columns) as right:
            grad = after(first_grad, right.index, grad_column)
            pixel = after(first_pixel, right.index, image_column)
            factors = [builder.load(place, align=4) for place in vectors_at(grad)]
            for i in range(inputs):
                number = builder.load(at(pixel, 4 * i, _FLOAT), align=4)
                first = builder.insert_element(undefined, number, ir.IntType(32)(0))
                everywhere = builder.shuffle_vector(first, undefined, first_lane)
                for total, factor in zip(sums[i], factors, strict=True):
                    more = builder.call(fused, [everywhere, factor, builder.load(total)])
                    builder.store(more, total)
    adds = builder.icmp_signed("!=", add, _SIZE(0))
    for i in range(inputs):
        places = vectors_at(after(values, _SIZE(i), next_input))
        for total, place in zip(sums[i], places, strict=True):
            before = builder.select(adds, builder.load(place, align=4), zero)
            builder.store(builder.fadd(before, builder.load(total)), place, align=4)


@intrinsic(prefer_literal=True)
def _tiles(typing_context, outputs, inputs, grads, image, values, sizes):  # noqa: ARG001, PLR0917
    """:func:`_tile` for as many inputs as are worked on at once; how many that were.

    Args:
        typing_context: numba's.
        outputs: how many o, known when it is compiled.
        inputs: how many there are, at least 1.
        grads: see :func:`_tile`.
        image: likewise.
        values: likewise.
        sizes: likewise.
    """
    signature = types.intp(outputs, *4 * (types.intp,), types.UniTuple(types.intp, 8))

    def generate(_context, builder, _signature, arguments):
        _, left, grads, image, values, packed = arguments
        unpacked = [builder.extract_value(packed, i) for i in range(8)]
        done = cgutils.alloca_once(builder, _SIZE)
        end = builder.append_basic_block("tiled")
        for count in _INPUTS:
            with builder.if_then(builder.icmp_signed(">=", left, _SIZE(count))):
                _tile(builder, count, outputs.literal_value, grads, image, values, unpacked)
                builder.store(_SIZE(count), done)
                builder.branch(end)
        builder.branch(end)
        builder.position_at_end(end)
        return builder.load(done)

    return signature, generate


@intrinsic
def _square_norm(typing_context, values, size):  # noqa: ARG001 - numba's calling convention
    """Squared norm of ``size`` numbers, a multiple of :data:`MULTIPLE`, from an address on.

    In float64, where squares of float32 neither vanish nor overflow, and in many sums at once.
    """
    signature = types.float64(types.intp, types.intp)

    def generate(_context, builder, _signature, arguments):
        narrow, wide = (ir.VectorType(kind, MULTIPLE) for kind in (_FLOAT, ir.DoubleType()))
        shape = ir.FunctionType(wide, 3 * (wide,))
        fused = cgutils.get_or_insert_function(builder.module, shape, f"llvm.fma.v{MULTIPLE}f64")
        values, size = arguments
        sums = [cgutils.alloca_once(builder, wide) for _ in range(_SUMS)]
        for total in sums:
            builder.store(ir.Constant(wide, None), total)

        def add(number, total):
            """The square of the vector with this number to a sum."""
            place = builder.add(values, builder.mul(number, _SIZE(4 * MULTIPLE)))
            vector = builder.load(builder.inttoptr(place, narrow.as_pointer()), align=4)
            long = builder.fpext(vector, wide)
            builder.store(builder.call(fused, [long, long, builder.load(total)]), total)

        vectors = builder.udiv(size, _SIZE(MULTIPLE))
        rounds = builder.udiv(vectors, _SIZE(_SUMS))
        with cgutils.for_range(builder, rounds) as loop:
            first = builder.mul(loop.index, _SIZE(_SUMS))
            for i, total in enumerate(sums):
                add(builder.add(first, _SIZE(i)), total)
        done = builder.mul(rounds, _SIZE(_SUMS))
        with cgutils.for_range(builder, builder.sub(vectors, done)) as loop:
            add(builder.add(done, loop.index), sums[0])
        vector = reduce(builder.fadd, [builder.load(total) for total in sums])
        lanes = [builder.extract_element(vector, ir.IntType(32)(i)) for i in range(MULTIPLE)]
        return reduce(builder.fadd, lanes)

    return signature, generate


@numba.njit
def _form(job, example, values):
    """Write the gradient of one example to an address."""
    line, kernel_columns = job.inputs, job.kernel_columns
    if job.right == 4 * line:  # the inputs of a line of the kernel follow each other in memory
        line, kernel_columns = line * kernel_columns, 1
    some = max(1, _POSITIONS // job.columns)
    step = 4 * job.outputs
    for row in range(0, job.rows, some):
        sizes = (
            min(some, job.rows - row),
            job.columns,
            job.grad_row,
            job.grad_column,
            job.window_row,
            job.window_column,
            step,
            row,
        )
        image = job.windows + example * job.window_example + row * job.window_row
        grads = job.grads + example * job.grad_example + row * job.grad_row
        output = 0
        while output < job.outputs:
            value, grad = values + 4 * output, grads + 4 * output
            rest = job.outputs - output
            for y in range(job.kernel_rows):
                for x in range(kernel_columns):
                    pixel = image + y * job.down + x * job.right
                    left = line
                    while left > 0:
                        if rest >= _OUTPUTS:
                            done = _tiles(_OUTPUTS, left, grad, pixel, value, sizes)
                        elif rest >= 16:
                            done = _tiles(16, left, grad, pixel, value, sizes)
                        else:
                            done = _tiles(8, left, grad, pixel, value, sizes)
                        pixel += 4 * done
                        value += step * done
                        left -= done
            output += _OUTPUTS if rest >= _OUTPUTS else 16 if rest >= 16 else 8


@numba.cfunc(types.void(types.voidptr), cache=True)
def _work(address):
    """Form the gradients of one example after the other, as many as are this thread's."""
    job = numba.carray(address, 1, _JOB)[0]
    size = job.kernel_rows * job.kernel_columns * job.inputs * job.outputs
    squares = numba.carray(pointer(job.squares), job.pieces, np.float64)
    first, last = share(job)
    for example in range(first, last):
        values = job.values + 4 * example * size
        _form(job, example, values)
        squares[example] = _square_norm(values, size)
    finish(address, first, last)


def form(windows, grads, values, squares, threads):
    """Write ``sum_{y,x} windows[b,y,x,...] grads[b,y,x,o]`` to ``values[b,...,o]``.

    Args:
        windows: (batch, rows, columns, *kernel, inputs) in float32, with contiguous inputs.
        grads: (batch, rows, columns, outputs) in float32, with contiguous outputs.
        values: (batch, *kernel, inputs, outputs) in float32, contiguous.
        squares: (batch,) in float64, contiguous: the squared norms are written here.
        threads: how many to use.
    """
    batch, *sizes = windows.shape
    fields = (*sizes, grads.shape[3], windows.data_ptr(), *_steps(windows)[:5])
    fields += (grads.data_ptr(), *_steps(grads)[:3], values.data_ptr(), squares.data_ptr())
    run(_work, batch, fields, threads)


def _steps(tensor):
    """How many bytes further the next one is, in each dimension."""
    return [tensor.itemsize * step for step in tensor.stride()]
