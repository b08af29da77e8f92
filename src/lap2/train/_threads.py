"""Compiled work on torch's own threads; importing it needs numba.

While torch's threads wait for torch, which they do busily, others would find no processor.

numba keeps what it compiled by the date of the kernel's own file: who changes :func:`take` or
:func:`pointer` must touch the kernels too.
"""

# pyright: basic

import ctypes

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["pointer", "run", "take"]

_SIZE = ir.IntType(64)


@intrinsic
def take(typing_context, job):  # noqa: ARG001 - numba's calling convention
    """The number of a piece that no one else has: the first field of a job, which it counts."""

    def generate(_context, builder, _signature, arguments):
        place = builder.bitcast(arguments[0], _SIZE.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(_SIZE, 1), "monotonic")

    return types.int64(types.voidptr), generate


@intrinsic
def pointer(typing_context, address):  # noqa: ARG001 - numba's calling convention
    """What is at an address that a job has."""

    def generate(_context, builder, _signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def _openmp():
    """OpenMP's entry point, if the process has it; torch's threads are OpenMP's."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    found.restype = None
    return found


_PARALLEL = _openmp()


def run(work, pieces: int, fields: tuple[int, ...], threads: int) -> None:
    """Let several threads work on a job until nothing of it is left to :func:`take`.

    Args:
        work: a compiled function of the address of a job: a record of integers of 64 bits, the
            first of which counts what was taken.
        pieces: how many there are to take: the second field.
        fields: the others.
        threads: how many.

    Raises:
        MemoryError: not all was taken. (Compiled work cannot raise: numba only prints.)
    """
    job = np.array((0, pieces, *fields), dtype=np.int64)
    if threads > 1 and _PARALLEL is not None:
        _PARALLEL(work.address, job.ctypes.data, threads, 0)
    else:
        work.ctypes(job.ctypes.data)
    if job[0] < pieces:
        raise MemoryError(f"compiled work stopped after {job[0]} of {pieces} pieces")
