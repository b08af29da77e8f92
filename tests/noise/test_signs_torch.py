"""Signs drawn on a device are those drawn on the CPU, bit for bit, and hardly wait for the host."""

import math
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from lap2.noise import SecureLaplace, SecureSigns, signs_torch
from lap2.noise.keystream import ChaChaStream
from lap2.noise.signs import flips

from ..fakegpu import DEVICE, FakeGpu

KEY = bytes(range(32))


@pytest.fixture
def gpu():
    with FakeGpu() as device:
        yield device


def stream():
    return ChaChaStream(KEY)


def on_the_cpu(tensor, scale, copies=1):
    """What the slowest form that there is on the CPU makes of a tensor."""
    same = tensor.detach().clone()
    SecureSigns(copies, compiled=False)._add_with_key(same, scale, stream())
    return same


def on_the_device(tensor, scale, copies=1):
    there = tensor.to(DEVICE)
    SecureSigns(copies)._add_with_key(there, scale, stream())
    return there.cpu()


def block(key, number, use):
    numbers = torch.tensor([number])
    return signs_torch.blocks(signs_torch.key_words(key), numbers, use=use).numpy().tobytes()


@pytest.mark.parametrize(
    ("key", "number", "use", "expected"),
    [  # RFC 8439, section 2.3.2, and appendix A.1, vectors 1, 2 and 3
        (
            KEY,
            1 + (0x09 << 56),
            0x4A << 24,
            "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
            "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
        ),
        (
            bytes(32),
            0,
            0,
            "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
            "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
        ),
        (
            bytes(32),
            1,
            0,
            "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
            "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
        ),
        (
            bytes(31) + b"\1",
            1,
            0,
            "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
            "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
        ),
    ],
)
def test_blocks_are_those_of_the_standard(key, number, use, expected):
    assert block(key, number, use) == bytes.fromhex(expected)


@pytest.mark.parametrize("number", [0, 7, 2**31, 2**32 - 1, 2**32, 2**40 + 3, 2**62 + 2**31])
@pytest.mark.parametrize("use", [0, 1, 2])
def test_blocks_are_those_of_another_library(number, use):
    key = np.random.default_rng(number % 1000).bytes(32)
    nonce = struct.pack("<QQ", number, use)
    other = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update(bytes(64))
    assert block(key, number, use) == other


def compiled(monkeypatch, compiler):
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiler(function))
    monkeypatch.setattr(signs_torch, "_COMPILED", ("cpu",))
    signs_torch._compiled.cache_clear()
    monkeypatch.setattr(signs_torch, "_compiled", signs_torch._compiled.__wrapped__)
    return signs_torch._compiled(torch.device("cpu"))


def no_compiler(_):
    def fails(_):
        raise RuntimeError("no compiler")

    return fails


def test_compiled_blocks_are_the_same(monkeypatch):
    numbers, key = torch.arange(1000) << 25, signs_torch.key_words(KEY)
    plain = signs_torch.blocks(key, numbers, use=3)
    assert compiled(monkeypatch, lambda function: function)
    assert torch.equal(signs_torch.blocks(key, numbers, use=3), plain)


@pytest.mark.parametrize("compiler", [no_compiler, lambda f: lambda x: f(x) ^ 1])
def test_a_compiler_that_fails_or_errs_is_not_used(compiler, monkeypatch):
    assert compiled(monkeypatch, compiler) is None
    assert block(KEY, 5, 0) == ChaChaStream(KEY)._from_block(5, use=0).update(bytes(64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("copies", [1, 2, 33, 300])
def test_bits_are_those_of_the_cpu(dtype, copies, gpu):
    tensor = (3 * torch.randn(9000 // copies, dtype=torch.float64)).to(dtype)
    tensor[:3] = torch.tensor([0.0, -0.0, 50.0])
    found = on_the_device(tensor, 0.7, copies)
    assert found.dtype == dtype
    assert torch.equal(found, on_the_cpu(tensor, 0.7, copies))
    assert not torch.equal(found, on_the_cpu(tensor, 0.9, copies))


@pytest.mark.parametrize(
    ("size", "copies"), [(0, 3), (1, 1), (32, 1), (33, 1), (300, 1), (100, 5), (7, 64), (6, 200)]
)
def test_bits_are_those_of_the_cpu_in_pieces_of_any_size(size, copies, gpu, monkeypatch):
    tensor = torch.randn(size)
    expected = on_the_cpu(tensor, 1.0, copies)
    monkeypatch.setattr("lap2.noise.signs._SEGMENT", 48)
    monkeypatch.setattr(signs_torch, "_WORDS", 70)
    assert torch.equal(on_the_device(tensor, 1.0, copies), expected)


def test_bits_are_those_of_the_cpu_for_lists_of_tensors_here_and_there(gpu):
    tensors = [torch.randn(7), torch.randn(3, 4), torch.randn(9).double(), torch.randn(11).half()]
    parts = [tensors[0].to(DEVICE), tensors[1].clone(), *(t.to(DEVICE) for t in tensors[2:])]
    SecureSigns(3)._add_with_key(parts, 1.0, stream())
    SecureSigns(3)._add_with_key(tensors, 1.0, stream())
    assert [part.device.type for part in parts] == [DEVICE.type, "cpu", DEVICE.type, DEVICE.type]
    for part, tensor in zip(parts, tensors, strict=True):
        assert torch.equal(part.cpu(), tensor)


def test_bits_are_those_of_the_cpu_for_tensors_of_any_layout(gpu):
    images = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    for view in (images, torch.randn(40, 30).T, torch.randn(20, 30)[:, ::3], torch.tensor(0.3)):
        there = view.to(DEVICE)
        expected = view.clone()
        assert there.stride() == expected.stride()
        SecureSigns()._add_with_key(there, 1.0, stream())
        SecureSigns()._add_with_key(expected, 1.0, stream())
        assert torch.equal(there.cpu(), expected)


def test_what_is_around_a_view_stays(gpu):
    whole = torch.randn(20, 30)
    there = whole.to(DEVICE)
    SecureSigns()._add_with_key(there[:, ::3], 1.0, stream())
    after = there.cpu()
    assert not torch.equal(after[:, ::3], whole[:, ::3])
    after[:, ::3] = whole[:, ::3]
    assert torch.equal(after, whole)


@pytest.mark.parametrize("copies", [1, 6, 300])
def test_counts_are_those_of_the_cpu(copies, gpu):
    tensor = torch.randn(2000)
    here = SecureSigns(copies)._counts_with_key(tensor, 0.5, stream())
    there = tensor.to(DEVICE)
    found = SecureSigns(copies)._counts_with_key(there, 0.5, stream())
    assert found.dtype == here.dtype
    np.testing.assert_array_equal(found, here)
    assert torch.equal(there.cpu(), tensor)


@pytest.mark.parametrize("scale", [2.0**-900, 2.0**-130, 1e-30, 1e30, 2.0**130, 2.0**900])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scales_of_any_size_are_those_of_the_cpu(scale, dtype, gpu):
    sizes = scale * torch.linspace(-9, 9, 500, dtype=torch.float64)
    limits = torch.finfo(dtype)
    tensor = sizes.clamp(limits.min, limits.max).to(dtype)
    here = SecureSigns(compiled=False)._counts_with_key(tensor.double(), scale, stream())
    found = SecureSigns()._counts_with_key(tensor.to(DEVICE), scale, stream())
    np.testing.assert_array_equal(found, here)


def variates_of(size):
    """The first 80 bits of each of the stream's first variates."""
    room = bytearray(2 * size + 63)
    stream().reader(0).update_into(bytes(2 * size), room)
    words = np.frombuffer(room, dtype="<u2", count=size).astype(object)
    return words * 2**64 + stream().further(range(size)).astype(object)


def at_the_boundary(size, distance):
    """Values whose bits are the hardest to decide: with the probability at U, up to a distance."""
    values = []
    for i, variate in enumerate(variates_of(size).tolist()):
        p = variate / 2.0**80 + (-1) ** i * distance
        values.append((1 if i % 3 else -1) * -math.log(min(max(2 * p, 1e-9), 1.0)))
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("distance", [0.0, 2.0**-56, 2.0**-40, 2.0**-20])
@pytest.mark.parametrize("size", [40, 400])
def test_bits_at_the_boundary_are_exact(size, distance, gpu):
    """A few are decided on the device or, with the segment, by the CPU; many at once by the CPU."""
    values = at_the_boundary(size, distance)
    found = SecureSigns()._counts_with_key(values.to(DEVICE), 1.0, stream())
    pairs = zip(values.tolist(), variates_of(size).tolist(), strict=True)
    for i, (value, variate) in enumerate(pairs):
        flipped = flips(abs(value), 1.0, 1, variate, stream().endless(i))
        assert found[i] == (flipped != (value >= 0))
    assert torch.equal(on_the_device(values, 1.0), on_the_cpu(values, 1.0))


def left_over(values, copies=1):
    """The segments that are left for the CPU."""
    seen = []
    original = signs_torch._Drawing.each

    def each(*arguments):
        seen.append(original(*arguments))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signs_torch._Drawing, "each", each)
        on_the_device(values, 1.0, copies)
    return seen[0]


def test_the_device_decides_nearly_all_itself(gpu):
    assert not left_over(torch.randn(300_000))
    assert not left_over(at_the_boundary(40, 2.0**-37))  # with more bits
    assert left_over(at_the_boundary(40, 2.0**-45))  # in arbitrary precision
    assert left_over(at_the_boundary(3000, 2.0**-37))  # too many for their room


@pytest.mark.parametrize(("units", "holds"), [(28, True), (100, False)])
def test_an_exponential_that_errs_as_much_as_assumed_gives_the_same_bits(
    units, holds, gpu, monkeypatch
):
    original = signs_torch._Drawing._threshold
    tensor = at_the_boundary(60, 2.0**-20)
    expected = on_the_cpu(tensor, 1.0)
    errors = units * (2.0 * torch.randint(0, 2, (60,)) - 1)
    there = errors.to(DEVICE)

    def threshold(self, values):
        exact = original(self, values)
        return exact + there * 2.0**-23 * exact

    monkeypatch.setattr(signs_torch._Drawing, "_threshold", threshold)
    assert torch.equal(on_the_device(tensor, 1.0), expected) == holds


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda: torch.randn(300_000), 1),
        (lambda: torch.randn(3000), 64),
        (lambda: [torch.randn(50, 30), torch.randn(7).double(), torch.randn(900)], 4),
    ],
)
def test_the_host_asks_twice_and_gets_no_numbers(make, copies, gpu, monkeypatch):
    monkeypatch.setattr("lap2.noise.signs._SEGMENT", 1 << 16)
    monkeypatch.setattr(signs_torch, "_WORDS", 1 << 17)
    tensors = make()
    there = [t.to(DEVICE) for t in tensors] if isinstance(tensors, list) else tensors.to(DEVICE)
    gpu.reads.clear()
    gpu.sent.clear()
    SecureSigns(copies).add(there, 1.0)
    assert len(gpu.reads) == 2
    assert sum(gpu.reads) < 10
    assert sum(gpu.sent) < 300


def test_the_fake_device_sees_copies_reads_and_mixtures(gpu):
    """The control of the test above."""
    tensor = torch.randn(300_000).to(DEVICE)
    SecureLaplace().add(tensor, 1.0)
    assert sum(gpu.reads) >= 300_000
    assert sum(gpu.sent) >= 600_000
    before = len(gpu.reads)
    assert tensor.isfinite().all()
    _ = tensor[tensor > 0]
    assert len(gpu.reads) == before + 2
    with pytest.raises(RuntimeError, match="one device"):
        tensor + torch.zeros(300_000)


def test_a_device_without_float64_will_do():
    tensor = torch.randn(100_000)
    expected = on_the_cpu(tensor, 1.0)
    with FakeGpu(lacks=(torch.float64,)), pytest.MonkeyPatch.context() as patch:
        with pytest.raises(TypeError, match="float64"):
            on_the_device(tensor, 1.0)
        patch.setattr(signs_torch, "_NO_DOUBLES", (DEVICE.type,))
        assert torch.equal(on_the_device(tensor, 1.0), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_refused_with_nothing_changed(bad, dtype, gpu):
    tensors = [torch.randn(50, dtype=dtype), torch.randn(50, dtype=dtype)]
    tensors[1][-1] = bad
    there = [tensor.to(DEVICE) for tensor in tensors]
    with pytest.raises(ValueError, match="finite"):
        SecureSigns().add(there, 1.0)
    for tensor, other in zip(tensors, there, strict=True):
        torch.testing.assert_close(other.cpu(), tensor, rtol=0, atol=0, equal_nan=True)


def test_every_call_has_a_key_of_its_own(gpu):
    tensor = torch.zeros(256)
    one, other = tensor.to(DEVICE), tensor.to(DEVICE)
    SecureSigns().add(one, 1.0)
    SecureSigns().add(other, 1.0)
    assert not torch.equal(one.cpu(), other.cpu())
    assert one.cpu().abs().eq(1).all()


def test_noise_does_not_import_torch():
    code = "import lap2.noise, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
