"""Max pooling: torch's own maxima and gradients, by a kernel of ours where it is faster."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from lap2.train import pooling
from lap2.train.recorder import Recorder

pytest.importorskip("numba")


def images(batch=5, channels=16, size=(9, 7)):
    """Half of them zero, so that maxima are tied."""
    x = torch.randn(batch, channels, *size).relu()
    return x.contiguous(memory_format=torch.channels_last)


def both_ways(module, x, grad=None):
    """Results and gradients, by ours and by torch; and whether the kernel was used."""
    found = []
    for forward in (lambda t: pooling.max_pool2d(module, t), module):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        result = forward(leaf)
        if grad is None:
            grad = torch.randn_like(result)
        result.backward(grad)
        found.append((result.detach(), leaf.grad, type(result.grad_fn).__name__))
    (ours, our_grad, how), (torchs, torch_grad, _) = found
    assert torch.equal(ours.isnan(), torchs.isnan())
    assert torch.equal(ours.nan_to_num(0.5), torchs.nan_to_num(0.5))
    assert ours.stride() == torchs.stride() or not ours.numel()
    torch.testing.assert_close(our_grad, torch_grad, rtol=1e-6, atol=1e-6)
    return how == "_MaxPoolBackward"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "module",
    [
        nn.MaxPool2d(2, 1),
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2),
        nn.MaxPool2d(3, 1),
        nn.MaxPool2d((2, 3), (3, 1)),
        nn.MaxPool2d((1, 7)),
        nn.MaxPool2d(1, 2),
    ],
)
def test_maxima_and_gradients_are_torchs(module, threads, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(pooling, "_WORTH_THREADS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for channels, batch in ((8, 5), (24, 1), (16, 0)):
        assert both_ways(module, images(batch, channels))


def test_what_is_not_finite_is_as_in_torch():
    x = images()
    x[0, 1, 2, 2], x[1, 2, 3, 3], x[2, 3, 4, 4], x[3] = math.nan, math.inf, -math.inf, -math.inf
    x[0, 4, 0, 0], x[0, 4, 0, 1] = math.nan, 1.0  # nothing comes after what is not a number
    for module in (nn.MaxPool2d(2, 1), nn.MaxPool2d(3, 2)):
        assert both_ways(module, x)


def test_gradients_may_lie_in_memory_as_they_like():
    grad = torch.randn(5, 16, 8, 6)
    module, x = nn.MaxPool2d(2, 1), images()
    assert both_ways(module, x, grad)
    for layout in (torch.contiguous_format, torch.channels_last):
        assert both_ways(module, x, torch._neg_view(grad.contiguous(memory_format=layout)))
    assert both_ways(module, x, grad[:1].expand(5, -1, -1, -1))


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.MaxPool2d(2, padding=1), images()),
        (nn.MaxPool2d(2, dilation=2), images()),
        (nn.MaxPool2d(2, ceil_mode=True), images()),
        (nn.MaxPool2d((17, 17), 1), images(size=(18, 18))),  # more places than a byte has numbers
        (nn.MaxPool2d(2), images(channels=12)),
        (nn.MaxPool2d(2), images().double()),
        (nn.MaxPool2d(2), images().contiguous()),
        (nn.MaxPool2d(2), images()[0]),
        (nn.MaxPool2d((2,)), images()),
        (nn.MaxPool2d([2, 1]), images()),
        (nn.MaxPool2d(np.int64(2)), images()),
        (nn.MaxPool2d(2, stride=()), images()),
        (nn.MaxPool2d(2, padding=(0,)), images()),
    ],
)
def test_what_the_kernel_cannot_do_is_left_to_torch(module, x):
    assert not both_ways(module, x)


def test_a_negative_view_keeps_its_sign():
    module, x = nn.MaxPool2d(2), torch._neg_view(images().requires_grad_())
    assert torch.equal(pooling.max_pool2d(module, x), module(x))


def test_indices_that_are_asked_for_are_torchs():
    module, x = nn.MaxPool2d(2, return_indices=True), images().requires_grad_()
    for ours, torchs in zip(pooling.max_pool2d(module, x), module(x), strict=True):
        assert torch.equal(ours, torchs)


def test_a_window_larger_than_the_image_is_refused_as_by_torch():
    x = images(size=(3, 3)).requires_grad_()
    with pytest.raises(RuntimeError, match="too small"):
        pooling.max_pool2d(nn.MaxPool2d(4), x)


@pytest.mark.parametrize(("size", "stride"), [(0, 1), (-1, 1), (2, -9), (2, 0)])
def test_a_window_that_is_none_is_refused_as_by_torch(size, stride):
    module = nn.MaxPool2d(size, 1)
    module.stride = stride
    with pytest.raises(RuntimeError, match=r"greater than zero|not be zero"):
        pooling.max_pool2d(module, images().requires_grad_())


def test_without_numba_torch_does_it(monkeypatch):
    monkeypatch.setattr(pooling, "kernel", lambda _: None)
    assert not both_ways(nn.MaxPool2d(2), images())


def test_transforms_of_functions_go_through_torch():
    module, x = nn.MaxPool2d(2), images(batch=3)

    def loss(image):
        return pooling.max_pool2d(module, image.unsqueeze(0)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(x)
    leaf = x.clone().requires_grad_()
    module(leaf).square().sum().backward()
    torch.testing.assert_close(found, leaf.grad)


def test_what_is_traced_is_torchs():
    module, x = nn.MaxPool2d(2), images().requires_grad_()
    traced = make_fx(lambda t: pooling.max_pool2d(module, t))(x)
    assert torch.equal(traced(x), module(x))
    with torch.autograd.forward_ad.dual_level():
        assert (
            type(pooling.max_pool2d(module, x).grad_fn).__name__ == "MaxPool2DWithIndicesBackward0"
        )
    assert type(pooling.max_pool2d(module, x).grad_fn).__name__ == "_MaxPoolBackward"


def test_without_a_gradient_torch_does_it(monkeypatch):
    monkeypatch.setattr(pooling, "_MaxPool", None)
    module, x = nn.MaxPool2d(2), images()
    assert torch.equal(pooling.max_pool2d(module, x), module(x))
    parameter = nn.Parameter(x)  # a class of its own, as those of other libraries
    assert torch.equal(pooling.max_pool2d(module, parameter), module(x))


def test_gradients_of_gradients_are_torchs():
    module, x, found = nn.MaxPool2d((2, 3), (1, 2)), images(), []
    weight = torch.randn_like(module(x))
    for forward in (lambda t: pooling.max_pool2d(module, t), module):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(
            (forward(leaf).square() * weight).sum(), leaf, create_graph=True
        )
        first.pow(3).sum().backward()
        found.append((first.detach(), leaf.grad))
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)


def test_memory_is_where_the_image_is():
    module, x = nn.MaxPool2d(2), images().requires_grad_()
    with torch.device("meta"):
        result = pooling.max_pool2d(module, x)
        places = torch.zeros(result.shape, dtype=torch.uint8, device="cpu")
        grad = pooling._scattered(result, places, x.shape, (2, 2, 2, 2))
    assert result.device.type == grad.device.type == "cpu"


def test_what_is_saved_may_come_back_in_another_layout():
    """As it does from pinned memory."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t):
        assert both_ways(nn.MaxPool2d(2), images())


def network():
    layers = nn.Conv2d(1, 8, 3), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def pools_here(model):
    """Whether the kernel pools in a recorded forward."""
    found = []
    handle = model[1].register_forward_hook(lambda *args: found.append(args[2].grad_fn))
    model(torch.randn(2, 1, 10, 10))
    handle.remove()
    return type(found[0]).__name__ == "_MaxPoolBackward"


def test_a_recorded_model_has_it_in_training_until_the_hooks_are_gone():
    model, x = network(), torch.randn(2, 1, 10, 10)
    expected = model(x)
    recorder = Recorder(model)
    assert pools_here(model)
    assert torch.equal(model(x), expected)
    assert not pools_here(model.eval())
    recorder.remove()
    assert "forward" not in model[1].__dict__
    assert not pools_here(model.train())


def test_a_copy_of_a_recorded_model_is_its_own():
    model = network()
    Recorder(model)
    copied = copy.deepcopy(model)
    copied[1].kernel_size = 4
    copied[1].stride = 4
    assert copied(torch.randn(2, 1, 10, 10)).shape == (2, 32)


def test_what_the_user_has_replaced_stays(monkeypatch):
    class Strict(nn.MaxPool2d):
        """A class of the user's may do anything."""

    model = nn.Sequential(nn.Conv2d(1, 8, 3), Strict(2), nn.MaxPool2d(2), nn.Flatten())
    model[2].forward = lambda x: 2 * x
    x = torch.randn(2, 1, 10, 10)
    expected = model(x)
    recorder = Recorder(model)
    assert torch.equal(model(x), expected)
    recorder.remove()
    assert torch.equal(model(x), expected)
    assert "forward" not in model[1].__dict__


def test_a_module_of_two_models_is_left_alone_by_the_second():
    one, other = network(), network()
    other[1] = one[1]
    first, second = Recorder(one), Recorder(other)
    second.remove()
    assert pools_here(one)
    first.remove()
    assert not pools_here(one)
