"""Max pooling of images that are stored channels-last.

Convolutions are fastest in that layout, and then torch's pooling takes as long as they do, most of
it for the memory in which it remembers where each maximum was. This has nothing to do with privacy:
maxima and gradients are torch's own.
"""

# pyright: basic

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lap2.train.compiled import kernel

__all__ = ["is_pooling", "max_pool2d"]

_WORTH_THREADS = 1 << 16
"""Numbers whose maxima take longer than to wake a thread."""


def is_pooling(module: nn.Module) -> TypeGuard[nn.MaxPool2d]:
    """Whether :func:`max_pool2d` may stand in for the module's forward."""
    return type(module) is nn.MaxPool2d


def max_pool2d(module: nn.MaxPool2d, input: Tensor) -> Any:  # noqa: A002 - torch's name
    """What the module's own forward gives, to the bit, and the same gradient up to rounding."""
    plain = _pair(module.padding) == (0, 0) and _pair(module.dilation) == (1, 1)
    size = _pair(module.kernel_size)
    if not plain or module.ceil_mode or module.return_indices or not _fits(input, size):
        return nn.MaxPool2d.forward(module, input)
    return _MaxPool.apply(input, (*size, *_pair(module.stride)))


def _pair(size: int | tuple[int, ...]) -> tuple[int, int]:
    rows, columns = (size, size) if isinstance(size, int) else size
    return rows, columns


def _fits(x: Tensor, size: tuple[int, int]) -> bool:
    """Whether the compiled kernel can have the maxima of windows of this size."""
    compiled = _kernel()
    if compiled is None or not x.requires_grad or torch._C._are_functorch_transforms_active():
        return False
    if type(x) is not Tensor or x.dim() != 4 or x.dtype != torch.float32 or not x.is_cpu:
        return False
    if x.shape[1] % compiled.MULTIPLE or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    rows, columns = size
    return rows * columns <= 256 and rows <= x.shape[2] and columns <= x.shape[3] and not x.is_neg()


class _MaxPool(torch.autograd.Function):
    """Remembers the place of each maximum in one byte."""

    @staticmethod
    def forward(ctx, x, window):
        """The maxima; a window is its size and how far the next is, in rows and columns each."""
        rows, columns, down, right = window
        sizes = (x.shape[2] - rows) // down + 1, (x.shape[3] - columns) // right + 1
        shape = (*x.shape[:2], *sizes)
        result, places = _empty(shape, torch.float32), _empty(shape, torch.uint8)
        ctx.shape, ctx.window = x.shape, window
        ctx.save_for_backward(places)
        _kernel().forward(*_channels_last(x, result, places), window, _threads(x))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Each gradient where its maximum was."""
        (places,) = ctx.saved_tensors
        result = _empty(ctx.shape, torch.float32)
        grad = grad.resolve_neg().contiguous(memory_format=torch.channels_last)
        images = _channels_last(result, grad, places)
        _kernel().backward(*images, ctx.window, _threads(result))
        return result, None


def _kernel() -> Any:
    return kernel("pool")


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu", memory_format=torch.channels_last)


def _channels_last(*images: Tensor) -> list[Tensor]:
    """As they are in memory."""
    return [image.permute(0, 2, 3, 1) for image in images]


def _threads(images: Tensor) -> int:
    return torch.get_num_threads() if images.numel() > _WORTH_THREADS else 1
