"""Max pooling of images that are stored channels-last.

Convolutions are fastest in that layout, and then torch's pooling takes as long as they do, some of
it for the memory in which it remembers where each maximum was. This has nothing to do with privacy:
maxima and gradients are torch's own.
"""

# pyright: basic

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lap2.train.compiled import kernel

__all__ = ["is_pooling", "max_pool2d"]

_WORTH_THREADS = 1 << 16
"""Numbers whose maxima take longer than to wake a thread."""

_PLACES = 256
"""That a byte can tell from each other."""

Window = tuple[int, int, int, int]
"""Rows and columns of a window, and how many rows and columns further the next is."""


def is_pooling(module: nn.Module) -> TypeGuard[nn.MaxPool2d]:
    """Whether :func:`max_pool2d` may stand in for the module's forward."""
    return type(module) is nn.MaxPool2d and "forward" not in module.__dict__


def max_pool2d(module: nn.MaxPool2d, input: Tensor) -> Any:  # noqa: A002 - torch's name
    """What the module's own forward gives, to the bit, and the same gradient up to rounding."""
    window = _window(module)
    if window is None or not _fits(input, window):
        return nn.MaxPool2d.forward(module, input)
    return _MaxPool.apply(input, window)


def _window(module: nn.MaxPool2d) -> Window | None:
    """Size and stride, if the kernel has all that the module asks for."""
    given = (module.kernel_size, module.stride, module.padding, module.dilation)
    pairs: list[Any] = [(v, v) if type(v) is int else v for v in given]
    if not all(type(v) is tuple and [*map(type, v)] == [int, int] for v in pairs):
        return None  # torch knows what to do with it
    (rows, columns), (down, right), padding, dilation = pairs
    if padding != (0, 0) or dilation != (1, 1) or module.ceil_mode or module.return_indices:
        return None
    possible = min(rows, columns, down, right) >= 1 and rows * columns <= _PLACES
    return (rows, columns, down, right) if possible else None


def _fits(x: Tensor, window: Window) -> bool:
    """Whether the kernel can read it, and nothing else wants to see what happens."""
    compiled = _kernel()
    if compiled is None or not x.requires_grad or _is_watched():
        return False
    if type(x) is not Tensor or x.dim() != 4 or x.dtype != torch.float32 or not x.is_cpu:
        return False
    if x.shape[1] % compiled.MULTIPLE or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    return window[0] <= x.shape[2] and window[1] <= x.shape[3] and not x.is_neg()


def _is_watched() -> bool:
    """Whether tensors may stand for others, or operations be recorded."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd.forward_ad._current_level >= 0
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    )


class _MaxPool(torch.autograd.Function):
    """Remembers the place of each maximum in one byte."""

    @staticmethod
    def forward(ctx, x, window):
        """The maxima."""
        rows, columns, down, right = window
        sizes = (x.shape[2] - rows) // down + 1, (x.shape[3] - columns) // right + 1
        shape = (*x.shape[:2], *sizes)
        result, places = _empty(shape, torch.float32), _empty(shape, torch.uint8)
        ctx.shape, ctx.window = x.shape, window
        ctx.save_for_backward(places)
        _kernel().forward(*_channels_last(x, result, places), window, _threads(x))
        return result

    @staticmethod
    def backward(ctx, grad):
        """Each gradient where its maximum was."""
        (places,) = ctx.saved_tensors
        if torch.is_grad_enabled() or _is_watched():  # as when gradients of gradients are wanted
            return _scattered(grad, places, ctx.shape, ctx.window), None
        result = _empty(ctx.shape, torch.float32)
        grad, places = (
            t.resolve_neg().contiguous(memory_format=torch.channels_last) for t in (grad, places)
        )
        images = _channels_last(result, grad, places)
        _kernel().backward(*images, ctx.window, _threads(result))
        return result, None


def _scattered(grad: Tensor, places: Tensor, shape: torch.Size, window: Window) -> Tensor:
    """The readable version of backward, in operations that torch can differentiate."""
    _, columns, down, right = window
    y = down * torch.arange(grad.shape[2], device=grad.device)
    x = right * torch.arange(grad.shape[3], device=grad.device)
    place = places.long()
    index = (y[:, None] + place // columns) * shape[3] + x + place % columns
    images = grad.new_zeros(*shape[:2], shape[2] * shape[3])
    return images.scatter_add(2, index.flatten(2), grad.flatten(2)).view(shape)


def _kernel() -> Any:
    return kernel("pool")


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu", memory_format=torch.channels_last)


def _channels_last(*images: Tensor) -> list[Tensor]:
    """As they are in memory."""
    return [image.permute(0, 2, 3, 1) for image in images]


def _threads(images: Tensor) -> int:
    return torch.get_num_threads() if images.numel() > _WORTH_THREADS else 1
