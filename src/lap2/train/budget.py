"""The guard: no step that would take a run beyond its target."""

from lap2.accountant import Accountant
from lap2.calibration import Target
from lap2.ledger import Entry
from lap2.mechanism import Mechanism

__all__ = ["Budget", "BudgetExhaustedError"]

_ENOUGH = 1 << 40


class BudgetExhaustedError(RuntimeError):
    """The next step would exceed the target epsilon; it was not taken, and nothing was released."""


class Budget:
    """How many more steps of one mechanism a ledger leaves room for.

    Args:
        target: epsilon and delta that must not be exceeded.
        accountant: the ledger, with whatever else is in it.
        mechanism: of every further step.
        sampling_prob: of every further step.
    """

    def __init__(
        self, target: Target, accountant: Accountant, mechanism: Mechanism, sampling_prob: float
    ) -> None:
        """Find out how many steps fit."""
        self.target = target
        self._accountant, self._mechanism, self._prob = accountant, mechanism, sampling_prob
        self._others: list[Entry] | None = None
        self._limit = 0
        self.check()

    @property
    def remaining_steps(self) -> int:
        """The number of further steps that fit."""
        others: list[Entry] = []
        own = 0
        for entry in self._accountant.ledger:
            if (entry.mechanism, entry.sampling_prob) == (self._mechanism, self._prob):
                own += entry.steps
            else:
                others.append(entry)
        if others != self._others:
            self._others, self._limit = others, self._most_steps(others)
        return max(0, self._limit - own)

    def check(self) -> None:
        """Refuse the next step if it does not fit.

        Raises:
            BudgetExhaustedError: it does not.
        """
        if self.remaining_steps < 1:
            spent = self._accountant.get_epsilon(self.target.delta)
            raise BudgetExhaustedError(
                f"the budget is spent: {self._accountant.steps} steps have cost epsilon "
                f"{spent:.6g}, and one more would exceed the target {self.target.epsilon:g} at "
                f"delta {self.target.delta:g}. Nothing was released for it"
            )

    def _most_steps(self, others: list[Entry]) -> int:
        """The largest number of steps that fits beside the other entries."""
        low, high = 0, 1
        while high < _ENOUGH and self._fits(others, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(others, middle) else (low, middle)
        return low

    def _fits(self, others: list[Entry], steps: int) -> bool:
        trial = Accountant()
        for entry in [*others, Entry(self._mechanism, self._prob, steps)]:
            trial.compose(entry.mechanism, sampling_prob=entry.sampling_prob, steps=entry.steps)
        return trial.get_epsilon(self.target.delta) <= self.target.epsilon
