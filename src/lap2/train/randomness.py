"""The ordinary randomness of a training loop: put back, or kept from acting at all.

A model is run more than once on nearly the same batch, and what it draws (dropout, say) must not
make a difference. With the same shapes the same state gives the same draws; with other shapes only
fixed values do. Noise and sampling do not come from here.
"""

# pyright: basic

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from lap2.train.nested import tensors

__all__ = ["FixedDraws", "another_state", "restore", "same", "state"]

State = tuple[Any, Any, torch.Tensor, list[torch.Tensor]]


def state() -> State:
    """Of all generators that training loops use by default."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numbers = np.random.get_state()  # noqa: NPY002 - the one that others draw from
    return random.getstate(), numbers, torch.get_rng_state(), cuda


def restore(held: State) -> None:
    """Go on from there."""
    python, numbers, cpu, cuda = held
    random.setstate(python)
    np.random.set_state(numbers)  # noqa: NPY002
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


def another_state() -> State:
    """One that has nothing to do with those before; on a GPU it stays as it is."""
    seeds = np.random.SeedSequence().generate_state(3).tolist()
    return (
        random.Random(seeds[0]).getstate(),  # noqa: S311 - it is no secret
        np.random.RandomState(seeds[1]).get_state(),
        torch.Generator().manual_seed(seeds[2]).get_state(),
        state()[3],
    )


def same(one: State, other: State) -> bool:
    """Whether nothing was drawn between the two."""
    if one[0] != other[0] or not np.array_equal(one[1][1], other[1][1]) or one[1][2] != other[1][2]:
        return False
    mine, theirs = [one[2], *one[3]], [other[2], *other[3]]
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EPS = {dtype: torch.finfo(dtype).eps for dtype in _TYPES}


class FixedDraws(TorchDispatchMode):
    """While it is on, torch's random operations give every record values of its own, always those.

    A value depends on the record and on its place within it alone, however many records there are
    and however long they are padded. The first dimension is taken to be the batch, if it is as long
    as that; otherwise all along it is alike. Parameters are filled as always, and operations that
    are not known here draw as they always do.
    """

    _rows: tuple[int, ...] | None = None
    _common = 0.5
    precision = 0.0
    """The largest relative rounding error of what was computed in backward, since it was begun."""

    def begin(self, rows: tuple[int, ...], common: float) -> None:
        """Switch it on, for a batch.

        Args:
            rows: the numbers of its records.
            common: between 0 and 1, of what is drawn once for all records. What a loop does to the
                whole batch often depends on it, so that it must not always be the same.
        """
        self.end()
        self._rows, self._common, self.precision = rows, common, 0.0
        self.__enter__()

    def end(self) -> None:
        """Switch it off, for good where another thread does it."""
        if self._rows is not None:
            self._rows = None
            stack = _get_current_dispatch_mode_stack()
            if stack and stack[-1] is self:
                self.__exit__(None, None, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Called by torch for every operation."""
        result = self._call(func, args, kwargs or {})
        if self._rows is not None and torch._C._current_graph_task_id() != -1:
            for tensor in (result,) if isinstance(result, torch.Tensor) else tensors(result):
                if tensor.dtype in _EPS:
                    self.precision = max(self.precision, _EPS[tensor.dtype])
        return result

    def _call(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._rows is None:
            return func(*args, **kwargs)
        known = torch.Tag.nondeterministic_seeded in func.tags
        if not known or (args and isinstance(args[0], torch.nn.Parameter)):
            return func(*args, **kwargs)
        fixed = _FIXED.get(func._schema.name.removeprefix("aten::"))
        if fixed is not None:
            kwargs.pop("generator", None)
            return fixed(self._evenly, *args, **kwargs)
        args, kwargs = _without_dropout(func._schema, args, kwargs)
        return func(*args, **kwargs)

    def _evenly(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers between 0 and 1, spread evenly over records and the places in them."""
        rows = self._rows or ()
        kind: dict[str, Any] = {"dtype": torch.float64, "device": like.device}
        if like.dim() and len(rows) == len(like):
            value = 0.5 + 0.3819660113 * torch.tensor(rows, **kind)
            value = value.view(-1, *(1,) * (like.dim() - 1))
        else:
            value = torch.tensor(self._common, **kind)
        for dim in range(1, like.dim()):
            step = (2.0 + dim) ** 0.5 % 1  # irrational, and another one for each dimension
            places = step * torch.arange(like.shape[dim], **kind)
            value = value + places.view(-1, *(1,) * (like.dim() - 1 - dim))
        dtype = like.dtype if like.is_floating_point() else torch.float32
        return (value % 1).clamp(1e-6, 1 - 1e-6).expand(like.shape).to(dtype)

    Evenly = Callable[[torch.Tensor], torch.Tensor]


Evenly = Callable[[torch.Tensor], torch.Tensor]


def _without_dropout(schema: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of a fused operation, such as attention, with nothing dropped."""
    names = [argument.name for argument in schema.arguments]
    args = tuple(
        0.0 if name == "dropout_p" else value
        for name, value in zip(names, args, strict=False)  # the rest are keywords
    )
    return args, {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}


def _bernoulli(even: Evenly, given: torch.Tensor, p: Any = 0.5) -> torch.Tensor:
    return given.copy_(even(given) < p)


def _bernoulli_of(even: Evenly, given: torch.Tensor, p: Any = None) -> torch.Tensor:
    return _bernoulli(even, torch.empty_like(given), given if p is None else p)


def _uniform(
    even: Evenly, given: torch.Tensor, low: float = 0.0, high: float = 1.0
) -> torch.Tensor:
    return given.copy_(low + (high - low) * even(given))


def _normal(even: Evenly, given: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return given.copy_(mean + std * torch.special.ndtri(even(given).double()))


def _exponential(even: Evenly, given: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
    return given.copy_(-even(given).log() / rate)


def _native_dropout(
    even: Evenly, given: torch.Tensor, p: float, train: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return given.clone(), torch.ones_like(given, dtype=torch.bool)
    kept = even(given) >= p
    return given * kept / (1 - p if p < 1 else 1), kept


def _rrelu(  # noqa: PLR0917 - the signature is torch's
    even: Evenly,
    given: torch.Tensor,
    noise: torch.Tensor,
    low: float = 0.125,
    high: float = 1 / 3,
    training: bool = False,  # noqa: ARG001 - it draws only if it is
) -> torch.Tensor:
    slopes = low + (high - low) * even(given)
    return given * noise.copy_(torch.where(given <= 0, slopes, 1.0))


def _like(fill: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda even, given, **kwargs: fill(even, torch.empty_like(given, **kwargs))


def _sized(fill: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda even, size, **kwargs: fill(even, torch.empty(size, **kwargs))


_FIXED: dict[str, Callable[..., Any]] = {
    "bernoulli_": _bernoulli,
    "bernoulli": _bernoulli_of,
    "native_dropout": _native_dropout,
    "rrelu_with_noise": _rrelu,
    "uniform_": _uniform,
    "normal_": _normal,
    "exponential_": _exponential,
    "rand": _sized(_uniform),
    "randn": _sized(_normal),
    "rand_like": _like(_uniform),
    "randn_like": _like(_normal),
}
