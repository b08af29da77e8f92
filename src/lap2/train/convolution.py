"""Per-example gradients of the weights of 2-d convolutions.

What a convolution is applied to, the receptive field of every output, is many times the image. So
gradients that are formed are formed straight from the image by a compiled kernel, or, where there
is none, from the receptive fields of a few examples at a time.
"""

# pyright: basic

import math

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.linalg import vector_norm

from lap2.train.arena import Arena
from lap2.train.compiled import kernel
from lap2.train.gradients import Dense, Outer, PerExample, best_formed

__all__ = ["conv2d_gradients", "is_formed", "padded"]

_CACHED = 1 << 18
"""Numbers that are worked on at a time: 1 MB in float32, which stays in a core's own cache."""

_WORTH_THREADS = 1 << 20
"""Products that take much longer than to wake a thread."""


def conv2d_gradients(module: nn.Conv2d, a: Tensor, g: Tensor, arena: Arena) -> PerExample:
    """Of the weight of a convolution with one group, in float32 or wider.

    Args:
        module: the layer.
        a: what it was applied to.
        g: gradients of what came out.
        arena: scratch memory; what is returned is valid until it is reset.
    """
    windows, grads = _windows(module, a, g.shape[2:]), g.permute(0, 2, 3, 1)
    if is_formed(module, g):
        shape = (len(g), *windows.shape[3:], g.shape[1])
        values = arena.empty(shape, a)
        squares = _form_compiled(windows, grads, values)
        lengths = None
        if squares is None:
            values = arena.empty(shape, _wide(a))
            lengths = _form(windows, grads, values, arena)
        order = (2, 3, 1, 0)
        return Dense(module.weight, values, order=order, squares=squares, lengths=lengths)
    inputs = arena.empty(tuple(windows.shape), a).copy_(windows).flatten(3).flatten(1, 2)
    return Outer(module.weight, inputs, grads.flatten(1, 2), arena=arena, order=(0, 2, 3, 1))


def is_formed(module: nn.Conv2d, g: Tensor) -> bool:
    """Whether gradients of a weight that is used once are formed, given those of the output."""
    outputs, *field = module.weight.shape
    return best_formed(math.prod(g.shape[2:]), math.prod(field), outputs)


def padded(module: nn.Conv1d | nn.Conv2d, a: Tensor) -> Tensor:
    """The input of a convolution with the margin it adds."""
    if not any(module._reversed_padding_repeated_twice):
        return a  # torch would copy it
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(a, module._reversed_padding_repeated_twice, mode=mode)


def _windows(module: nn.Conv2d, a: Tensor, size: torch.Size) -> Tensor:
    """A view of the receptive field of every output: (batch, *size, *kernel, inputs).

    One copy of it is several times faster than ``unfold`` for channels_last inputs.
    """
    a = padded(module, a).contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    batch, down, right, channel = a.stride()
    (dy, dx), (sy, sx) = module.dilation, module.stride
    return a.as_strided(
        (a.shape[0], *size, *module.kernel_size, a.shape[3]),
        (batch, down * sy, right * sx, down * dy, right * dx, channel),
    )


def _wide(like: Tensor) -> Tensor:
    """Empty, of the type in which gradients are formed that may cancel."""
    return like.new_empty(0, dtype=like.dtype if like.device.type == "mps" else torch.float64)


def _form(windows: Tensor, grads: Tensor, values: Tensor, arena: Arena) -> tuple[Tensor, Tensor]:
    """Write ``sum_{y,x} windows[b,y,x,...] grads[b,y,x,o]`` to ``values[b,...,o]``, in its type.

    Returns:
        Each example's sums of the l1 norms and of the l2 norms of its terms.
    """
    positions, width = math.prod(windows.shape[1:3]), math.prod(windows.shape[3:])
    count = max(1, _CACHED // (positions * width))
    held = arena.empty((min(count, len(windows)), *windows.shape[1:]), values)
    lengths: list[tuple[Tensor, ...]] = []
    pieces = zip(*(t.split(count) for t in (windows, grads, values)), strict=True)
    for some, grad, value in pieces:
        inputs = held[: len(some)].copy_(some).view(len(some), positions, width)
        outputs = grad.flatten(1, 2).to(value)
        torch.bmm(inputs.mT, outputs, out=value.flatten(1, 3))
        both = ((vector_norm(t, p, dim=2) for t in (inputs, outputs)) for p in (1, 2))
        lengths.append(tuple((one * other).sum(dim=1) for one, other in both))
    first, second = (torch.cat(of) for of in zip(*lengths, strict=True))
    return first, second


def _form_compiled(windows: Tensor, grads: Tensor, values: Tensor) -> Tensor | None:
    """As :func:`_form`, by as many threads as torch uses, with the norms of what it wrote.

    Returns:
        The squared norm of each example's values, taken while these are in the cache. None if this
        cannot be compiled; then nothing was written.
    """
    compiled, outputs = kernel("conv"), grads.shape[3]
    if compiled is None or windows.device.type != "cpu":
        return None
    if any(t.dtype != torch.float32 or t.is_neg() for t in (windows, grads, values)):
        return None
    if outputs % compiled.MULTIPLE or not values.is_contiguous():
        return None
    grads = grads if grads.stride(3) == 1 else grads.contiguous()
    squares = values.new_empty(len(values), dtype=torch.float64)
    threads = torch.get_num_threads() if windows.numel() * outputs > _WORTH_THREADS else 1
    compiled.form(windows, grads, values, squares, threads)
    return squares
