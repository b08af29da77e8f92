"""Whether compiling the clipping of a batch would pay: a convolution and a linear layer of the CNN.

Eager and compiled take turns in one process; the ratio is the median over the rounds.

    python benchmarks/compiled.py
"""

import math
import statistics
import time

import torch
from torch import nn

from lap2.train.arena import Arena
from lap2.train.layers import gradients_of

BATCH, ROUNDS = 256, 30


def of_lap2():
    """What a step does between backward and noise, for these two layers."""
    convolution, linear = nn.Conv2d(16, 32, 4, stride=2, bias=False), nn.Linear(512, 32, bias=False)
    arena = Arena()

    def clip(a, g, inputs, grads):
        arena.reset()
        found = gradients_of(convolution, a, arena=arena, grad=g)
        found += gradients_of(linear, inputs, arena=arena, grad=grads)
        squares = torch.stack([f.square_norms() for f in found]).sum(dim=0)
        weights = (1 / squares.sqrt()).clamp(max=1.0)
        return [f.weighted_sum(weights) for f in found]

    return clip


def to_compile(a, g, inputs, grads):
    """The same as one function of tensors."""
    a = a.permute(0, 2, 3, 1)
    batch, down, right, channel = a.stride()
    windows = a.as_strided(
        (a.shape[0], 5, 5, 4, 4, 16), (batch, 2 * down, 2 * right, down, right, channel)
    )
    patches = windows.reshape(a.shape[0], 25, 256)
    values = torch.bmm(g.permute(0, 2, 3, 1).flatten(1, 2).mT, patches)
    squares = (values * values).sum((1, 2)) + (inputs**2).sum(1) * (grads**2).sum(1)
    weights = (1 / squares.sqrt()).clamp(max=1.0)
    return weights @ values.flatten(1), (grads * weights[:, None]).mT @ inputs


def main():
    torch.set_num_threads(1)
    images = [torch.randn(BATCH, 16, 13, 13), torch.randn(BATCH, 32, 5, 5)]
    images = [image.to(memory_format=torch.channels_last) for image in images]
    batch = (*images, torch.randn(BATCH, 512), torch.randn(BATCH, 32))
    compiled = torch.compile(to_compile, dynamic=True)
    start = time.perf_counter()
    compiled(*batch)
    print(f"the first call takes {time.perf_counter() - start:.1f} s")
    eager = torch.no_grad()(of_lap2())
    for ours, theirs in zip(eager(*batch), compiled(*batch), strict=True):
        if not math.isclose(float(ours.norm()), float(theirs.norm()), rel_tol=1e-3):
            raise RuntimeError("both must compute the same")
    ratios = []
    for _ in range(ROUNDS):
        times = []
        for function in (eager, compiled):
            start = time.perf_counter()
            function(*batch)
            times.append(time.perf_counter() - start)
        ratios.append(times[1] / times[0])
    print(f"compiled / eager: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
