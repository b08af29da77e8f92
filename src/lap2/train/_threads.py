"""Compiled work on torch's own threads; importing it needs numba.

While torch's threads wait for torch, which they do busily, others would find no processor.

numba keeps what it compiled by the date of the kernel's own file: who changes what is compiled here
must touch the kernels too.
"""

# pyright: basic, reportCallIssue=false

import ctypes

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic

__all__ = ["finish", "job_type", "pointer", "run", "share"]

_SIZE = ir.IntType(64)

if getattr(config, "DISABLE_JIT", False):
    raise ImportError("numba compiles nothing while NUMBA_DISABLE_JIT is set")


@intrinsic
def _called(typing_context, address):  # noqa: ARG001 - numba's calling convention
    """What the function at an address returns."""

    def generate(_context, builder, _signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), ())
        result = builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), ())
        return builder.sext(result, _SIZE)

    return types.int64(types.int64), generate


@numba.njit
def share(job):
    """The first piece that this thread is to do, and the first that it is not.

    Always the same thread does the same pieces, as in torch's own work, so that what it needs is in
    its own processor's cache.
    """
    if job.thread == 0:
        return 0, job.pieces
    number, threads = _called(job.thread), _called(job.threads)
    return number * job.pieces // threads, (number + 1) * job.pieces // threads


@intrinsic
def _add(typing_context, address, number):  # noqa: ARG001 - numba's calling convention
    """To the first field of a job."""

    def generate(context, builder, _signature, arguments):
        place = builder.bitcast(arguments[0], _SIZE.as_pointer())
        builder.atomic_rmw("add", place, arguments[1], "monotonic")
        return context.get_dummy_value()

    return types.void(types.voidptr, types.int64), generate


@numba.njit
def finish(address, first, last):
    """Say that the pieces from the first to before the last are done.

    Squares add up to that of all pieces if every share was done once; if some were done twice, and
    others not at all, they do not.
    """
    _add(address, last * last - first * first)


@intrinsic
def pointer(typing_context, address):  # noqa: ARG001 - numba's calling convention
    """What is at an address that a job has."""

    def generate(_context, builder, _signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def _openmp():
    """OpenMP's entry points, if the process has it; torch's threads are OpenMP's."""
    try:
        library = ctypes.CDLL(None)
        start = library.GOMP_parallel
        asked = [library.omp_get_thread_num, library.omp_get_num_threads]
    except (AttributeError, OSError, TypeError):
        return None
    start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    start.restype = None
    return start, *(ctypes.cast(f, ctypes.c_void_p).value for f in asked)


_OPENMP = _openmp()


def job_type(names: str) -> np.dtype:
    """The record of a job: what :func:`run` fills in, and integers of these names."""
    return np.dtype([(name, np.int64) for name in [*_OWN, *names.split()]])


_OWN = ("done", "pieces", "thread", "threads")
"""What is done (see :func:`finish`), how many pieces there are, and whom to ask for the number of a
thread and for how many there are: zero, if there is one.
"""


def run(work, pieces: int, fields: tuple[int, ...], threads: int) -> None:
    """Let several threads do a job, each its :func:`share`.

    Args:
        work: a compiled function of the address of a job.
        pieces: how many there are to do.
        fields: those of its :func:`job_type` that have names of its own.
        threads: how many.

    Raises:
        RuntimeError: not every piece was done once. (Compiled work cannot raise; numba prints.)
    """
    if threads > 1 and _OPENMP is not None:
        start, *asked = _OPENMP
        job = np.array((0, pieces, *asked, *fields), dtype=np.int64)
        start(work.address, job.ctypes.data, threads, 0)
    else:
        job = np.array((0, pieces, 0, 0, *fields), dtype=np.int64)
        work.ctypes(job.ctypes.data)
    if job[0] != pieces * pieces:
        raise RuntimeError(
            f"compiled work must do each of {pieces} pieces once, and did not: memory may have run "
            "out, or OpenMP be there twice"
        )
