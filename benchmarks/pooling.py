"""Max pooling of images that are stored channels-last: the compiled kernel against torch.

Forward and backward, in turns in one process; the ratio is the median over the rounds. Needs
``lap2[fast]``.

    OMP_NUM_THREADS=1 python benchmarks/pooling.py
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lap2.train.pooling import max_pool2d

ROUNDS = 15
SHAPES = (  # batch, channels, window, stride, pixels
    (256, 16, 2, 1, 14),
    (256, 32, 2, 1, 5),
    (256, 16, 2, 2, 28),
    (64, 64, 2, 2, 32),
    (32, 64, 3, 2, 56),
    (64, 128, 2, 2, 8),
)


def timed(pool: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[float, float]:
    """Seconds of forward, and of backward."""
    start = time.perf_counter()
    result = pool(x)
    middle = time.perf_counter()
    torch.autograd.grad(result, x, grad)
    return middle - start, time.perf_counter() - middle


def main() -> None:
    print(f"{torch.get_num_threads()} thread(s), median of {ROUNDS} interleaved rounds")
    print("batch, channels, window, stride, pixels: ms forward, backward; ratio to torch, each")
    for shape in SHAPES:
        batch, channels, window, stride, pixels = shape
        module = nn.MaxPool2d(window, stride)
        x = torch.randn(batch, channels, pixels, pixels).relu()
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        grad = torch.randn_like(module(x))
        ways = (lambda x, module=module: max_pool2d(module, x), module)
        rounds = [[timed(pool, x, grad) for pool in ways] for _ in range(ROUNDS + 3)][3:]
        times = [1e3 * statistics.median(ours[i] for ours, _ in rounds) for i in range(2)]
        ratios = [statistics.median(ours[i] / theirs[i] for ours, theirs in rounds) for i in (0, 1)]
        print(f"{shape!s:<24} {times[0]:>6.2f} {times[1]:>6.2f}   {ratios[0]:.2f} {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
