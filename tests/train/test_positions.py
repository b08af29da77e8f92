"""Sums over positions: the compiled kernel, and torch where it does not fit."""

import pytest
import torch

from lap2.train import layers
from lap2.train.compiled import kernel


@pytest.mark.skipif(kernel("sum") is None, reason="needs numba")
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 5), (0, 4, 2), (5, 0, 3), (300, 64, 33)])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernel_adds_in_float64(shape, threads):
    values = torch.randn(shape)
    found = kernel("sum").over_positions(values, threads)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, values.double().sum(dim=1), rtol=1e-15, atol=1e-13)


@pytest.mark.skipif(kernel("sum") is None, reason="needs numba")
def test_views_are_read_where_they_are():
    images = torch.randn(6, 4, 5, 3).to(memory_format=torch.channels_last)
    found = kernel("sum").over_positions(images.flatten(2).mT, 1)
    torch.testing.assert_close(found, images.double().sum(dim=(2, 3)), rtol=1e-15, atol=1e-13)
    every_second = torch.randn(6, 8, 3)[:, ::2]
    found = kernel("sum").over_positions(every_second, 1)
    torch.testing.assert_close(found, every_second.double().sum(dim=1), rtol=1e-15, atol=1e-13)


def test_what_the_kernel_cannot_read_is_added_by_torch():
    images = torch.randn(6, 4, 5, 3).flatten(2).mT
    half = torch.randn(6, 5, 3).bfloat16()
    negated = torch.randn(6, 5, 3, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    for values in (images, half, negated):
        found = layers._total(values, [1])
        torch.testing.assert_close(found, values.double().sum(dim=1), rtol=1e-15, atol=1e-13)
