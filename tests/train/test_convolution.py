"""Forming per-example gradients of convolutions: the compiled kernel against products in torch."""

import ctypes
import math

import pytest
import torch
from torch import nn

from lap2.train import convolution
from lap2.train.arena import Arena
from lap2.train.gradients import Dense

from ..helpers import norms, recorded

numba = pytest.importorskip("numba")
_threads = pytest.importorskip("lap2.train._threads")


def example(module, batch, size, *, dtype=torch.float32):
    """A layer's input and the gradient of its output."""
    x = torch.randn(batch, module.in_channels, *size, dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    return x, torch.randn_like(module.to(dtype)(x)).detach()


def formed(module, x, g):
    """By the kernel, into memory that holds anything; and by the readable version in float64."""
    windows, grads = convolution._windows(module, x, g.shape[2:]), g.permute(0, 2, 3, 1)
    shape = (len(x), *windows.shape[3:], g.shape[1])
    values = torch.full(shape, math.nan)
    squares = convolution._form_compiled(windows, grads, values)
    exact = values.double().square().flatten(1).sum(dim=1)
    torch.testing.assert_close(squares, exact, rtol=1e-13, atol=0, equal_nan=True)
    expected = torch.empty(shape, dtype=torch.float64)
    convolution._form(windows.double(), grads.double(), expected, Arena())
    return values, expected


def assert_equal_up_to_rounding(values, expected):
    error = torch.linalg.vector_norm(values.double() - expected)
    assert error <= 2e-6 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize(
    ("module", "batch", "size"),
    [
        (nn.Conv2d(1, 16, 8, stride=2, padding=3), 5, (28, 28)),
        (nn.Conv2d(16, 32, 4, stride=2), 5, (13, 13)),
        (nn.Conv2d(1, 8, 3), 3, (9, 7)),  # a line of 3, one vector
        (nn.Conv2d(1, 24, 2), 3, (5, 9)),  # a line of 2, three vectors
        (nn.Conv2d(1, 16, 1), 2, (6, 6)),  # a line of 1
        (nn.Conv2d(3, 40, 3, padding=1), 2, (11, 30)),  # a line of 9, five vectors
        (nn.Conv2d(5, 16, 3, dilation=2), 2, (12, 12)),  # lines are not contiguous
        (nn.Conv2d(7, 8, (2, 3), dilation=(1, 3), stride=(2, 1)), 2, (12, 12)),
        (nn.Conv2d(2, 16, 3, padding=1, padding_mode="reflect"), 2, (40, 40)),  # in several blocks
        (nn.Conv2d(1, 8, 3), 1, (3, 400)),  # a row of more than a block
        (nn.Conv2d(4, 8, 3), 1, (3, 3)),  # one position
        (nn.Conv2d(4, 8, 3), 0, (9, 9)),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernel_forms_what_products_do(module, batch, size, threads, monkeypatch):
    monkeypatch.setattr(convolution, "_WORTH_THREADS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    values, expected = formed(module, *example(module, batch, size))
    assert_equal_up_to_rounding(values, expected)


def test_without_openmp_one_thread_does_it_all(monkeypatch):
    monkeypatch.setattr(_threads, "_OPENMP", None)
    monkeypatch.setattr(convolution, "_WORTH_THREADS", 0)
    module = nn.Conv2d(3, 8, 3)
    values, expected = formed(module, *example(module, 9, (8, 8)))
    assert_equal_up_to_rounding(values, expected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_may_lie_in_memory_as_they_like(layout):
    module = nn.Conv2d(3, 16, 3)
    x, g = example(module, 4, (8, 8))
    values, expected = formed(module, x, g.contiguous(memory_format=layout))
    assert_equal_up_to_rounding(values, expected)
    shared = g[:1].expand(4, -1, -1, -1)
    values, expected = formed(module, x, shared)
    assert_equal_up_to_rounding(values, expected)


def test_what_is_not_finite_stays_in_its_example():
    module = nn.Conv2d(1, 16, 3)
    x, g = example(module, 4, (9, 9))
    x[1, 0, 4, 4], g[2, 3, 0, 0] = math.nan, math.inf
    values, _ = formed(module, x, g)
    assert values.flatten(1).isfinite().all(dim=1).tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("module", "dtype"),
    [(nn.Conv2d(3, 10, 3), torch.float32), (nn.Conv2d(3, 16, 3), torch.float64)],
)
def test_what_the_kernel_cannot_do_is_left_to_torch(module, dtype):
    """Outputs that are no multiple of a vector, and other types."""
    x, g = example(module, 4, (8, 8), dtype=dtype)
    windows, grads = convolution._windows(module, x, g.shape[2:]), g.permute(0, 2, 3, 1)
    values = torch.zeros(len(x), *windows.shape[3:], g.shape[1], dtype=dtype)
    assert convolution._form_compiled(windows, grads, values) is None
    assert not values.any()
    found = convolution.conv2d_gradients(module, x, g, Arena())
    expected = torch.einsum("byxijc,byxo->bocij", windows, grads)
    torch.testing.assert_close(found.explicit(), expected, check_dtype=False)


def test_without_numba_torch_does_it(monkeypatch):
    module = nn.Conv2d(3, 16, 3)
    x, g = example(module, 4, (8, 8))
    compiled = convolution.conv2d_gradients(module, x, g, Arena())
    monkeypatch.setattr(convolution, "kernel", lambda _: None)
    products = convolution.conv2d_gradients(module, x, g, Arena())
    assert isinstance(compiled, Dense)
    torch.testing.assert_close(
        compiled.explicit(), products.explicit(), rtol=1e-5, atol=1e-5, check_dtype=False
    )
    torch.testing.assert_close(norms(compiled), norms(products), rtol=1e-6, atol=0)
    for gradient in (compiled, products):  # norms of the numbers that are added up
        exact = gradient.explicit().double().flatten(1).norm(dim=1)
        torch.testing.assert_close(norms(gradient), exact, rtol=1e-13, atol=0)
    bad = torch.tensor([True, False, False, True])
    compiled.zero(bad)
    assert (norms(compiled) == 0).tolist() == bad.tolist()


def test_memory_is_where_the_image_is():
    module = nn.Conv2d(3, 16, 3)
    x, g = example(module, 4, (8, 8))
    with torch.device("meta"):
        found = convolution.conv2d_gradients(module, x, g, Arena())
    assert norms(found).device.type == "cpu"


def test_a_negative_view_keeps_its_sign():
    module = nn.Conv2d(3, 16, 3)
    x, g = example(module, 4, (8, 8))
    found = convolution.conv2d_gradients(module, x, torch._neg_view(g), Arena())
    expected = convolution.conv2d_gradients(module, x, -g, Arena())
    torch.testing.assert_close(
        found.explicit(), expected.explicit(), rtol=1e-5, atol=1e-5, check_dtype=False
    )


def test_work_that_stops_is_no_result():
    """As it does when memory runs out: numba prints that, and goes on."""

    @numba.cfunc("void(voidptr)")
    def nothing(address):
        return

    with pytest.raises(RuntimeError, match="each of 3 pieces once"):
        _threads.run(nothing, 3, (), 1)


@pytest.mark.parametrize("number", [0, 1])
def test_threads_that_all_have_one_number_are_noticed(number, monkeypatch):
    """As when it is asked of another OpenMP than theirs."""
    same = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: number)
    start, _, threads = _threads._OPENMP
    monkeypatch.setattr(
        _threads, "_OPENMP", (start, ctypes.cast(same, ctypes.c_void_p).value, threads)
    )
    monkeypatch.setattr(convolution, "_WORTH_THREADS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    module = nn.Conv2d(3, 8, 3)
    with pytest.raises(RuntimeError, match="each of 8 pieces once"):
        formed(module, *example(module, 8, (8, 8)))


def network():
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(256, 2))
    return nn.Sequential(*layers)


def test_gradients_formed_in_backward_last_until_they_are_collected():
    """Several passes before a step share the scratch memory."""
    model, x = network(), torch.randn(6, 1, 8, 8)

    def both():
        model(x).square().sum().backward()
        model(2 * x).sum().backward()

    found = recorded(model, both)
    first = recorded(model, lambda: model(x).square().sum().backward())
    second = recorded(model, lambda: model(2 * x).sum().backward())
    for name, values in found.items():
        torch.testing.assert_close(values, first[name] + second[name], rtol=1e-4, atol=1e-4)


def test_a_graph_that_is_used_twice_counts_twice():
    model, x = network(), torch.randn(6, 1, 8, 8)

    def twice():
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    once = recorded(model, lambda: model(x).square().sum().backward())
    for name, values in recorded(model, twice).items():
        torch.testing.assert_close(values, 2 * once[name], rtol=1e-4, atol=1e-4)
