"""The basis in which Laplace noise is added: one that spreads every gradient evenly.

Signs and clamps tell signals best that are alike and small. Gradients are not like that: a few
coordinates hold much of them. An orthonormal change of basis, a Hadamard transform of randomly
signed coordinates, spreads what they hold over all, and leaves norms, and so sensitivities, as they
are. What is released is turned back.
"""

# pyright: basic

import math
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lap2.signal import block_size, spread_size
from lap2.train.compiled import kernel

__all__ = ["blank", "gather", "spread", "turned"]

_DIGIT = 5
"""The transform is a product of matrices with up to 2 to this many rows: few passes, few sums."""
_CHUNK = 2**20
"""Coordinates that are transformed at a time, which bounds the memory needed."""
_WORTH_THREADS = 2**16
"""Coordinates whose transform takes longer than to have another core's cache share them."""


def spread(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors as one vector in another orthonormal basis, filled up with zeros; in float64.

    Formal guarantee:
        The l2 distance of two results is that of the arguments, up to ``1e-12`` of the arguments'
        norms. The basis is fixed and public.
    """
    size = sum(t.numel() for t in tensors)
    flat = blank(size, tensors[0].device)
    for part, tensor in _parts(flat, tensors):
        part.copy_(tensor)
    return turned(flat, size)


def blank(size: int, device: torch.device) -> Tensor:
    """Room for ``size`` coordinates and what they are filled up with: zeros, in float64."""
    home = "cpu" if device.type == "mps" else device
    return torch.zeros(spread_size(size), dtype=torch.float64, device=home)


def turned(flat: Tensor, size: int) -> Tensor:
    """What :func:`spread` gives, of coordinates that are in :func:`blank` room; overwrites it."""
    _turn(flat, size, 1.0, back=False)
    return flat


def gather(flat: Tensor, tensors: Sequence[Tensor], factor: float = 1.0) -> None:
    """Undo :func:`spread`: ``flat``, which is overwritten, times a factor into the tensors."""
    # What was released may be rounded as it likes: devices are faster, often much, in float32.
    is_narrow = flat.device.type != "cpu" and all(t.dtype != torch.float64 for t in tensors)
    dtype = torch.float32 if is_narrow else torch.float64
    _turn(flat, sum(t.numel() for t in tensors), factor, back=True, dtype=dtype)
    for part, tensor in _parts(flat, tensors):
        tensor.copy_(part)


def _parts(flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Where in the vector each tensor is, in its shape, and the tensor."""
    sizes = [t.numel() for t in tensors]
    for part, tensor in zip(flat[: sum(sizes)].split(sizes), tensors, strict=True):
        yield part.view(tensor.shape), tensor


def _turn(
    flat: Tensor, size: int, factor: float, *, back: bool, dtype: torch.dtype = torch.float64
) -> None:
    """Into the basis, or back, and multiplied; in place, and calculated in a type.

    The coordinates that are mixed with each other are as far apart as can be, so that they are of
    different layers.
    """
    block = block_size(size)
    if block == 1:
        flat.mul_(factor)
        return
    rows = flat.view(block, -1)
    if not _turn_compiled(rows, factor, back):
        matrices, signs = _basis(block, flat.device, dtype)
        for part in rows.split(max(1, _CHUNK // block), dim=1):
            scaled = (part * factor).to(dtype)
            mixed = _mixed(scaled, matrices) * signs if back else _mixed(scaled * signs, matrices)
            part.copy_(mixed)


def _turn_compiled(rows: Tensor, factor: float, back: bool) -> bool:
    """As :func:`_turn`, by as many threads as torch uses; False if this cannot be compiled."""
    compiled = kernel("basis")
    if compiled is None or rows.device.type != "cpu" or rows.dtype != torch.float64:
        return False
    if not rows.is_contiguous():
        return False
    weights, ones = _weights(len(rows))
    weights = weights * factor
    before, after = (ones, weights) if back else (weights, ones)
    threads = torch.get_num_threads() if rows.numel() > _WORTH_THREADS else 1
    compiled.transform(rows, before, after, threads)
    return True


def _mixed(part: Tensor, matrices: tuple[Tensor, ...]) -> Tensor:
    """The product of Hadamard matrices over the first dimension, which is its own inverse."""
    shape, before = part.shape, 1
    for matrix in matrices:  # each acts on one digit of the index
        part = matrix @ part.reshape(before, len(matrix), -1)
        before *= len(matrix)
    return part.reshape(shape)


@lru_cache(maxsize=32)
def _basis(
    block: int, device: torch.device, dtype: torch.dtype = torch.float64
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Hadamard matrices whose product has ``block`` rows, and a sign for each of these."""
    powers, rest = [], block.bit_length() - 1
    while rest:
        powers.append(min(rest, _DIGIT))
        rest -= powers[-1]
    signs = random.Random(block).choices((-1.0, 1.0), k=block)  # noqa: S311 - they are public
    column = torch.tensor(signs, dtype=dtype, device=device).unsqueeze(1)
    return tuple(_hadamard(power).to(device, dtype) for power in powers), column


@lru_cache(maxsize=32)
def _weights(block: int) -> tuple[Tensor, Tensor]:
    """What makes a matrix of entries 1 and -1 the basis, and what leaves it as it is."""
    _, signs = _basis(block, torch.device("cpu"))
    return signs / math.sqrt(block), torch.ones_like(signs)


def _hadamard(power: int) -> Tensor:
    """The orthonormal Hadamard matrix with ``2^power`` rows."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(power):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(len(matrix))
