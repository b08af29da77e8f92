"""The compiled kernel for per-example gradients of convolutions; importing it needs numba.

It reads the image where it lies: what a convolution was applied to is many times the image, and is
never written out. The sums over positions of a few inputs times a few outputs are kept in the
processor's registers.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false

import operator
from functools import reduce

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lap2.train._threads import pointer, run, take

__all__ = ["LANES", "form"]

LANES = 8
"""Outputs that are worked on at once: the number of them must be a multiple of this."""
_POSITIONS = 256
"""Positions that are worked on at a time: their gradients stay in the fastest cache."""
_SUMS = 4
"""Sums that squares are added to in turn, as one would have to wait for itself."""

_SIZE = ir.IntType(64)
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_ZERO = ir.Constant(_VECTOR, None)
_ANY = ir.Constant(_VECTOR, ir.Undefined)
_FIRST = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)

_NAMES = """
    taken batch rows columns kernel_rows kernel_columns inputs outputs
    windows window_example window_row window_column down right
    grads grad_example grad_row grad_column
    values squares
"""
_JOB = np.dtype([(name, np.int64) for name in _NAMES.split()])
"""What there is to do: how many examples were taken, sizes, addresses, and steps in bytes."""


@intrinsic(prefer_literal=True)
def _tile(typing_context, inputs, vectors, grads, image, values, sizes):  # noqa: ARG001, PLR0917
    """Write or add ``sum_t image[t, i] grads[t, o]`` to ``values[i, o]`` for a few i and o.

    Args:
        typing_context: numba's.
        inputs: how many i, known when it is compiled.
        vectors: how many o, in units of :data:`LANES`, known when it is compiled.
        grads: address of the first gradient.
        image: address of the first input; the others follow it.
        values: address of the first result.
        sizes: rows and columns of t; how many bytes further the next row and the next column of
            ``grads`` are, and those of ``image``, and the next i of ``values``; whether to add.
    """
    count, width = inputs.literal_value, vectors.literal_value
    signature = types.void(inputs, vectors, *3 * (types.intp,), types.UniTuple(types.intp, 8))

    def generate(context, builder, _signature, arguments):
        byte = ir.IntType(8).as_pointer()
        grads, image, values = (builder.inttoptr(a, byte) for a in arguments[2:5])
        unpacked = [builder.extract_value(arguments[5], i) for i in range(8)]
        rows, columns, grad_row, grad_column, image_row, image_column, next_input, add = unpacked
        shape = ir.FunctionType(_VECTOR, 3 * (_VECTOR,))
        fused = cgutils.get_or_insert_function(builder.module, shape, f"llvm.fma.v{LANES}f32")

        def after(address, steps, size):
            return builder.gep(address, [builder.mul(steps, size)])

        def at(address, offset, kind):
            moved = builder.gep(address, [ir.Constant(_SIZE, offset)])
            return builder.bitcast(moved, kind.as_pointer())

        def vectors_at(address):
            return [at(address, 4 * LANES * v, _VECTOR) for v in range(width)]

        sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(width)] for _ in range(count)]
        for total in reduce(operator.add, sums):
            builder.store(_ZERO, total)
        with cgutils.for_range(builder, rows) as down:
            first_grad = after(grads, down.index, grad_row)
            first_pixel = after(image, down.index, image_row)
            with cgutils.for_range(builder, columns) as right:
                grad = after(first_grad, right.index, grad_column)
                pixel = after(first_pixel, right.index, image_column)
                factors = [builder.load(place, align=4) for place in vectors_at(grad)]
                for i in range(count):
                    number = builder.load(at(pixel, 4 * i, _FLOAT), align=4)
                    first = builder.insert_element(_ANY, number, ir.IntType(32)(0))
                    everywhere = builder.shuffle_vector(first, _ANY, _FIRST)
                    for total, factor in zip(sums[i], factors, strict=True):
                        more = builder.call(fused, [everywhere, factor, builder.load(total)])
                        builder.store(more, total)
        adds = builder.icmp_signed("!=", add, ir.Constant(_SIZE, 0))
        for i in range(count):
            places = vectors_at(after(values, ir.Constant(_SIZE, i), next_input))
            for total, place in zip(sums[i], places, strict=True):
                before = builder.select(adds, builder.load(place, align=4), _ZERO)
                builder.store(builder.fadd(before, builder.load(total)), place, align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _square_norm(typing_context, values, size):  # noqa: ARG001 - numba's calling convention
    """Squared norm of ``size`` numbers, a multiple of :data:`LANES`, from an address on.

    In float64, where squares of float32 neither vanish nor overflow, and in many sums at once.
    """
    signature = types.float64(types.intp, types.intp)

    def generate(_context, builder, _signature, arguments):
        wide = ir.VectorType(ir.DoubleType(), LANES)
        shape = ir.FunctionType(wide, 3 * (wide,))
        fused = cgutils.get_or_insert_function(builder.module, shape, f"llvm.fma.v{LANES}f64")
        values, size = arguments
        sums = [cgutils.alloca_once(builder, wide) for _ in range(_SUMS)]
        for total in sums:
            builder.store(ir.Constant(wide, None), total)

        def add(number, total):
            """The square of the vector with this number to a sum."""
            place = builder.add(values, builder.mul(number, _SIZE(4 * LANES)))
            vector = builder.load(builder.inttoptr(place, _VECTOR.as_pointer()), align=4)
            long = builder.fpext(vector, wide)
            builder.store(builder.call(fused, [long, long, builder.load(total)]), total)

        vectors = builder.udiv(size, _SIZE(LANES))
        rounds = builder.udiv(vectors, _SIZE(_SUMS))
        with cgutils.for_range(builder, rounds) as loop:
            first = builder.mul(loop.index, _SIZE(_SUMS))
            for i, total in enumerate(sums):
                add(builder.add(first, _SIZE(i)), total)
        done = builder.mul(rounds, _SIZE(_SUMS))
        with cgutils.for_range(builder, builder.sub(vectors, done)) as loop:
            add(builder.add(done, loop.index), sums[0])
        vector = reduce(builder.fadd, [builder.load(total) for total in sums])
        lanes = [builder.extract_element(vector, ir.IntType(32)(i)) for i in range(LANES)]
        return reduce(builder.fadd, lanes)

    return signature, generate


@numba.cfunc(types.void(types.voidptr), cache=True)
def _work(address):
    """Form the gradients of one example after the other, until all are taken."""
    job = numba.carray(address, 1, _JOB)[0]
    size = job.kernel_rows * job.kernel_columns * job.inputs * job.outputs
    squares = numba.carray(pointer(job.squares), job.batch, np.float64)
    line, kernel_columns = job.inputs, job.kernel_columns
    if job.right == 4 * line:  # the inputs of a line of the kernel follow each other in memory
        line, kernel_columns = line * kernel_columns, 1
    some = max(1, _POSITIONS // job.columns)
    step = 4 * job.outputs
    example = take(address)
    while example < job.batch:
        formed = job.values + 4 * example * size
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
                value, grad = formed + 4 * output, grads + 4 * output
                two = output + 2 * LANES <= job.outputs
                for y in range(job.kernel_rows):
                    for x in range(kernel_columns):
                        pixel = image + y * job.down + x * job.right
                        left = line
                        while left > 0:
                            if two and left >= 4:
                                _tile(4, 2, grad, pixel, value, sizes)
                                done = 4
                            elif two and left == 3:
                                _tile(3, 2, grad, pixel, value, sizes)
                                done = 3
                            elif two:
                                _tile(1, 2, grad, pixel, value, sizes)
                                done = 1
                            elif left >= 4:
                                _tile(4, 1, grad, pixel, value, sizes)
                                done = 4
                            else:
                                _tile(1, 1, grad, pixel, value, sizes)
                                done = 1
                            pixel += 4 * done
                            value += step * done
                            left -= done
                output += 2 * LANES if two else LANES
        squares[example] = _square_norm(formed, size)
        example = take(address)


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
