"""What is written into a model while a batch is at hand: data that no noise was added to."""

# pyright: basic

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lap2.train.errors import BookkeepingError
from lap2.train.secrecy import StaysHere

__all__ = ["Writes"]


class _Mark(NamedTuple):
    """What a tensor is known again by: any write through torch changes its version."""

    tensor: Tensor
    version: int
    address: int
    bits: int | None


class Writes(StaysHere):
    """Tells which parameters and buffers of a model were written since :meth:`begin`.

    Written means: changed in place, however torch counts it, replaced, added or removed. Writes
    that torch does not count (through ``.data`` or NumPy) show only where bits are compared.

    Args:
        module: of which all parameters and buffers are watched, also those that are not saved.
        public: names of buffers and frozen parameters that may be written, because what is written
            is public. A tensor with several names may be given by any of them.
    """

    def __init__(self, module: nn.Module, public: Iterable[str] = ()) -> None:
        """Check the names."""
        self._module = module
        self._before: dict[str, _Mark] = {}
        every = list(_named(module, once=False))
        allowed = {name: t for name, t in every if not t.requires_grad}
        for name in public:
            if name not in allowed:
                raise ValueError(
                    "public_state must hold names of the module's buffers and frozen parameters, "
                    f"got {name!r}; these are {sorted(allowed)}"
                )
        same = {id(allowed[name]) for name in public}
        self._public = {name for name, t in every if id(t) in same}
        for name, t in every:
            if t.is_inference():
                raise ValueError(
                    f"tensor {name!r} of the module must be an ordinary one, got one made in "
                    "inference mode, whose writes torch does not count: make it outside, or clone "
                    "it there"
                )

    def begin(self, *, bits: bool = False) -> None:
        """From here on, what is written counts.

        Args:
            bits: also compare contents, which reads every tensor once here and once later.
        """
        self._before = {name: _mark(t, bits=bits) for name, t in _named(self._module)}

    def changed(self) -> list[str]:
        """The names of what was written since :meth:`begin`, but for what is public."""
        before, now = self._before, dict(_named(self._module))
        return [
            name
            for name in {**before, **now}
            if name not in self._public
            and not (name in before and name in now and _is_same(before[name], now[name]))
        ]

    def check(self) -> None:
        """Refuse to go on if anything was written.

        Raises:
            BookkeepingError: it was; names it, and the ways out.
        """
        if names := self.changed():
            raise BookkeepingError(
                f"nothing may be written into the model between fetching a batch and the "
                f"optimizer's step, got writes to {', '.join(map(repr, names))}: they may hold "
                "data of the batch, without noise. Freeze such layers with .eval(), leave out "
                "max_norm and running statistics, or name what is public in public_state"
            )


def _named(module: nn.Module, *, once: bool = True) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers; tensors with several names once, or as often as these."""
    return chain(
        module.named_parameters(remove_duplicate=once), module.named_buffers(remove_duplicate=once)
    )


def _mark(tensor: Tensor, *, bits: bool) -> _Mark:
    return _Mark(tensor, tensor._version, _address(tensor), _bits(tensor) if bits else None)


def _is_same(mark: _Mark, tensor: Tensor) -> bool:
    return (
        mark.tensor is tensor
        and mark.version == tensor._version
        and mark.address == _address(tensor)
        and (mark.bits is None or mark.bits == _bits(tensor))
    )


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _bits(tensor: Tensor) -> int | None:
    """A checksum of what is stored; None for kinds of tensors whose storage is hidden."""
    if type(tensor) not in {Tensor, nn.Parameter} or tensor.layout is not torch.strided:
        return None
    if tensor.is_quantized or tensor.is_meta:
        return None
    stored = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    if stored.storage_offset() % 8:
        stored = stored.clone()
    whole = stored.numel() // 8 * 8  # eight bytes at a time are far faster
    return int(stored[:whole].view(torch.int64).sum()) + int(stored[whole:].sum())
