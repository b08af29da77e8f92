"""Forming per-example gradients of convolutions: the compiled kernel against products in torch.

Both form the same gradients in the same memory, in turns in one process; the ratio is the median
over the rounds. Needs ``lap2[fast]``.

    OMP_NUM_THREADS=1 python benchmarks/convolution.py
"""

import statistics
import time

import torch
from torch import nn

from lap2.train import convolution
from lap2.train.arena import Arena

ROUNDS = 9
SHAPES = (  # batch, inputs, outputs, kernel, stride, padding, pixels
    (256, 1, 16, 8, 2, 3, 28),
    (256, 16, 32, 4, 2, 0, 13),
    (256, 1, 32, 3, 1, 1, 28),
    (256, 32, 64, 3, 1, 1, 14),
    (32, 64, 64, 3, 1, 1, 32),
    (16, 3, 64, 7, 2, 3, 112),
    (64, 128, 128, 3, 1, 1, 8),
    (32, 32, 64, 5, 1, 2, 28),
    (64, 64, 128, 3, 2, 1, 16),
    (32, 64, 64, 1, 1, 0, 32),
    (64, 16, 8, 3, 1, 1, 28),
)


def timed(act) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    print(f"{torch.get_num_threads()} thread(s), median of {ROUNDS} interleaved rounds")
    print("batch, inputs, outputs, kernel, stride, padding, pixels: ms, GFLOP/s, kernel / products")
    for shape in SHAPES:
        batch, inputs, outputs, size, stride, padding, pixels = shape
        module = nn.Conv2d(inputs, outputs, size, stride=stride, padding=padding)
        x = torch.randn(batch, inputs, pixels, pixels).contiguous(memory_format=torch.channels_last)
        g = torch.randn_like(module(x)).contiguous(memory_format=torch.channels_last)
        windows, grads = convolution._windows(module, x, g.shape[2:]), g.permute(0, 2, 3, 1)
        values, arena = torch.empty(batch, *windows.shape[3:], outputs), Arena()

        def products(windows=windows, grads=grads, values=values, arena=arena):
            arena.reset()
            convolution._form(windows, grads, values, arena)

        def kernel(windows=windows, grads=grads, values=values):
            if convolution._form_compiled(windows, grads, values) is None:
                raise RuntimeError("the kernel needs numba: pip install 'lap2[fast]'")

        products()
        kernel()
        pairs = [(timed(kernel), timed(products)) for _ in range(ROUNDS)]
        seconds = statistics.median(first for first, _ in pairs)
        ratio = statistics.median(first / second for first, second in pairs)
        speed = 2 * windows.numel() * outputs / seconds / 1e9
        print(f"{shape!s:<36} {1e3 * seconds:>7.2f} ms {speed:>5.0f}   {ratio:.2f}")


if __name__ == "__main__":
    main()
