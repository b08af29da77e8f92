"""What a batch under Opacus is: a Poisson sample, for one step.

The engine that puts the parts together is :mod:`lap2.interop.opacus`.
"""

# pyright: basic

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import DataLoader

from lap2.train import BookkeepingError, PoissonLoader

__all__ = ["OVER", "Loader", "PoissonSampler"]

OVER = "a pass over the loader ends where another one begins"


class PoissonSampler(UniformWithReplacementSampler):
    """This rank's share of each Poisson sample; an empty sample is a sample.

    Inclusion is decided by :class:`lap2.train.PoissonLoader` under fresh keys of the operating
    system: no seed can repeat it, on this rank or another.
    """

    def __init__(
        self, size: int, *, prob: float, steps: int, shard: tuple[int, int], prefetch: bool
    ) -> None:
        share = len(range(shard[0], size, shard[1]))
        super().__init__(num_samples=share, sample_rate=prob, steps=steps)
        self._source = PoissonLoader(range(size), sampling_prob=prob, steps=steps, shard=shard)  # pyright: ignore[reportArgumentType]
        self._prefetch, self._drawn, self.passes = prefetch, deque[int](), 0
        self.begin_batch: Callable[[int], None] = lambda _: None
        self.give_up: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[list[int]]:
        self._drawn.clear()
        self.passes += 1
        this = self.passes
        self.give_up()
        for _ in range(self.steps):
            self.refuse_unless(this)
            index = self._source.sample()
            self._drawn.append(len(index))
            if not self._prefetch:
                self.hand_out()
            yield index.tolist()

    def hand_out(self) -> None:
        """Tell the optimizer of the batch that is about to be seen."""
        self.begin_batch(self._drawn.popleft())

    def refuse_unless(self, this: int) -> None:
        if self.passes != this:
            raise BookkeepingError(OVER)


class Loader(DataLoader):
    """Knows which batch is handed out when workers have drawn others ahead."""

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sampler: Any = self.batch_sampler
        batches = super().__iter__()
        if not self.num_workers:
            yield from batches
            return
        this = sampler.passes
        for batch in batches:
            sampler.refuse_unless(this)
            sampler.hand_out()
            yield batch
