"""The compiled sum of float32 rows in float64; importing it needs numba.

Rows are widened as they are added, so that no wide copy of them is ever in memory. A few rows are
added at a time to a few columns, whose sums stay in the fastest cache.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false

import numba
import numpy as np
import torch
from numba import types

from lap2.train._threads import finish, job_type, pointer, run, share

__all__ = ["add", "fits", "over_positions"]

_COLUMNS = 1024
"""Columns that are worked on at a time."""

_JOB = job_type("rows columns next_row weights values total")
_POSITIONS = job_type("positions width next_example next_position values total")


def fits(weights, values, total):
    """Whether :func:`add` can read them."""
    return (
        all(t.device.type == "cpu" and not t.is_neg() for t in (weights, values, total))
        and (weights.dtype, total.dtype) == (torch.float64, torch.float64)
        and values.dtype == torch.float32
        and values.stride(1) == 1
        and weights.is_contiguous()
        and total.is_contiguous()
    )


@numba.cfunc(types.void(types.voidptr), cache=True)
def _work(address):
    """Add all rows, in one block of columns after the other, as many as are this thread's."""
    job = numba.carray(address, 1, _JOB)[0]
    rows, columns = job.rows, job.columns
    weights = numba.carray(pointer(job.weights), rows, np.float64)
    total = numba.carray(pointer(job.total), columns, np.float64)
    first, last = share(job)
    for block in range(first, last):
        start = block * _COLUMNS
        count = min(_COLUMNS, columns - start)
        sums = total[start : start + count]
        done = 0
        while done + 4 <= rows:
            w0, w1, w2, w3 = weights[done], weights[done + 1], weights[done + 2], weights[done + 3]
            place = job.values + 4 * (done * job.next_row + start)
            step = 4 * job.next_row
            v0 = numba.carray(pointer(place), count, np.float32)
            v1 = numba.carray(pointer(place + step), count, np.float32)
            v2 = numba.carray(pointer(place + 2 * step), count, np.float32)
            v3 = numba.carray(pointer(place + 3 * step), count, np.float32)
            for i in range(count):
                sums[i] += (w0 * np.float64(v0[i]) + w1 * np.float64(v1[i])) + (
                    w2 * np.float64(v2[i]) + w3 * np.float64(v3[i])
                )
            done += 4
        while done < rows:
            w0 = weights[done]
            place = job.values + 4 * (done * job.next_row + start)
            v0 = numba.carray(pointer(place), count, np.float32)
            for i in range(count):
                sums[i] += w0 * np.float64(v0[i])
            done += 1
    finish(address, first, last)


def add(weights, values, total, threads):
    """Add ``sum_i weights[i] values[i]`` to ``total``, in float64.

    Args:
        weights: (rows,) in float64, contiguous.
        values: (rows, columns) in float32, each row contiguous.
        total: of as many numbers as there are columns, in float64, contiguous.
        threads: how many to use.
    """
    rows, columns = values.shape
    addresses = (t.data_ptr() for t in (weights, values, total))
    run(_work, -(-columns // _COLUMNS), (rows, columns, values.stride(0), *addresses), threads)


@numba.cfunc(types.void(types.voidptr), cache=True)
def _sum(address):
    """Sum over the positions of one example after the other, as many as are this thread's."""
    job = numba.carray(address, 1, _POSITIONS)[0]
    first, last = share(job)
    for example in range(first, last):
        total = numba.carray(pointer(job.total + 8 * example * job.width), job.width, np.float64)
        place = job.values + 4 * example * job.next_example
        for i in range(job.width):
            total[i] = 0.0
        for position in range(job.positions):
            start = place + 4 * position * job.next_position
            values = numba.carray(pointer(start), job.width, np.float32)
            for i in range(job.width):
                total[i] += np.float64(values[i])
    finish(address, first, last)


def over_positions(values, threads):
    """The sums over the positions of each example, in float64; None if it cannot read them.

    Args:
        values: (batch, positions, width).
        threads: how many to use.
    """
    batch, positions, width = values.shape
    if values.dtype != torch.float32 or values.device.type != "cpu" or values.is_neg():
        return None
    if values.stride(2) != 1:
        return None
    total = values.new_empty((batch, width), dtype=torch.float64)
    strides = values.stride()[:2]
    fields = (positions, width, *strides, values.data_ptr(), total.data_ptr())
    run(_sum, batch, fields, threads)
    return total
