"""Several processes that train one model: each sums its own records, together they add noise once.

Laplace noise is not closed under sums, so no two processes may share a coordinate's noise. After
the sums are reduced, each process holds one slice of the total, adds the noise of that slice, and
all slices are gathered.
"""

# pyright: basic

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lap2.noise.signs import estimates, pack, unpack

__all__ = ["World", "refuse_wrapped"]

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The processes of a run: one, unless ``torch.distributed`` has been initialised before.

    Attributes:
        rank: of this process.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> "World":
        """The world as ``torch.distributed`` knows it."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    def slice_size(self, coordinates: int) -> int:
        """How many coordinates the largest slice has."""
        return -(-coordinates // self.size)

    def same(self, what: str, value: Any) -> None:
        """Refuse to go on unless all processes have the same value.

        Raises:
            ValueError: they have not; on all processes.
        """
        if self.size == 1:
            return
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        if any(other != values[0] for other in values):
            shown = [repr(v) if len(repr(v)) < 60 else "something else" for v in values]
            raise ValueError(f"all processes must have the same {what}, got {', '.join(shown)}")

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first process makes, on all of them; if it raises, all do."""
        if self.size == 1:
            return make()
        held: list[Any] = [None, None]
        if self.rank == 0:
            try:
                held[0] = make()
            except Exception as error:  # noqa: BLE001 - raised below, everywhere
                held[1] = error
        dist.broadcast_object_list(held, src=0)
        if held[1] is not None:
            raise held[1]
        return held[0]

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the values of the first."""
        if self.size > 1:
            for tensor in tensors:
                held = tensor.detach().contiguous()
                dist.broadcast(held, src=0)
                tensor.detach().copy_(held)

    def wait(self) -> None:
        """Go on when all processes have come here."""
        if self.size > 1:
            dist.barrier()

    def release(
        self, sums: list[Tensor], add_noise: Callable[[list[Tensor]], Any], *, sliced: bool
    ) -> None:
        """Replace each process's sums by the total with noise, the same everywhere.

        Args:
            sums: of this process; changed in place.
            add_noise: to a list of tensors, in place.
            sliced: whether processes draw independent noise, so that each may do a slice;
                otherwise the first does all of it.
        """
        if self.size == 1:
            add_noise(sums)
            return
        flat = torch.cat([t.reshape(-1) for t in sums])
        if sliced:
            mine = self._slice_of_total(flat)
            add_noise([mine])
            flat = self._join(mine)
        else:
            self._release_on_first(flat, lambda: add_noise([flat]))
        start = 0
        for tensor in sums:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()

    def release_bits(self, flat: Tensor, signs: Any, scale: float) -> None:
        """Replace each process's vector by what the signs of the noisy total tell of it.

        Each process draws the bits of a slice, and only these, packed, go to the others.

        Args:
            flat: of this process; changed in place.
            signs: :class:`lap2.noise.SecureSigns`, or what draws bits as it does.
            scale: of the noise.
        """
        if self.size == 1:
            signs.add(flat, scale)
        elif not signs.is_secure:
            self._release_on_first(flat, lambda: signs.add(flat, scale))
        else:
            counts = signs.counts(self._slice_of_total(flat), scale)
            packed = torch.from_numpy(pack(counts, signs.copies)).to(flat.device)
            parts = self._join(packed).cpu().numpy().reshape(self.size, -1)
            found = [unpack(part, signs.copies)[: len(counts)] for part in parts]
            told = estimates(np.concatenate(found), copies=signs.copies, scale=scale)
            flat.copy_(torch.from_numpy(told[: flat.numel()]))

    def _slice_of_total(self, flat: Tensor) -> Tensor:
        """This process's slice of the sum over all; zeros fill up the last."""
        size = self.slice_size(flat.numel())
        whole = torch.zeros(size * self.size, dtype=flat.dtype, device=flat.device)
        whole[: flat.numel()] = flat
        mine = whole.new_empty(size)
        _reduce_scatter(mine, whole)
        return mine

    def _join(self, mine: Tensor) -> Tensor:
        """The slices of all, one after the other."""
        whole = mine.new_empty(len(mine) * self.size)
        _all_gather(whole, mine)
        return whole

    def _release_on_first(self, flat: Tensor, add_noise: Callable[[], Any]) -> None:
        """Have the first process make the total noisy; all get the result."""
        dist.reduce(flat, dst=0)
        if self.rank == 0:
            add_noise()
        dist.broadcast(flat, src=0)


# torch 2.13 renamed both, and warns of the old names.
_new = hasattr(dist, "reduce_scatter_single")
_reduce_scatter: Any = getattr(dist, "reduce_scatter_" + ("single" if _new else "tensor"), None)
_all_gather: Any = getattr(dist, "all_gather_" + ("single" if _new else "into_tensor"), None)


def refuse_wrapped(module: nn.Module) -> None:
    """Refuse models whose wrapper would reduce gradients before they are clipped.

    Raises:
        ValueError: the model is wrapped for DDP or sharded by FSDP; the message has the fix.
    """
    for name, part in module.named_modules():
        if type(part).__name__ == "DistributedDataParallel":
            raise ValueError(
                f"module {name or 'itself'} is a DistributedDataParallel, which averages gradients "
                "before they are clipped: pass the model inside it (its .module); lap2 adds up the "
                "clipped sums of all processes itself"
            )
    for name, param in module.named_parameters():
        if hasattr(param, "full_tensor") or type(param).__name__ == "FlatParameter":
            raise ValueError(
                f"parameter {name!r} is sharded (FSDP), so that no process sees the whole layer "
                "whose per-example norm must be known: pass the model unsharded, one copy in each "
                "process"
            )
