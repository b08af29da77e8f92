"""Speed of one epsilon query, against dp_accounting and against its own targets.

Everything runs in one process. Each round measures all contestants once, one after the other,
so that a busy or throttled machine slows them alike; a ratio is taken within a round, and the
median over the rounds is reported. A query is all the work from nothing to epsilon: make the
accountant, compose the steps, convert.

    python benchmarks/accountant.py --rounds 5
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import dp_accounting
import numpy as np

import lap2
from lap2.majorization import grouped_majorization_set

SAMPLING_PROB = 0.0043
STEPS = 5860
NOISE_MULTIPLIER = 1.0
DELTA = 1e-5

Query = Callable[[], float]


def of_lap2(mechanism: lap2.Mechanism) -> float:
    accountant = lap2.Accountant().compose(mechanism, sampling_prob=SAMPLING_PROB, steps=STEPS)
    return accountant.get_epsilon(DELTA)


def laplace(dimension: int) -> float:
    return of_lap2(lap2.Laplace(NOISE_MULTIPLIER, dimension))


def majorized() -> float:
    grouped_majorization_set.cache_clear()  # it is part of the work
    return of_lap2(lap2.MajorizedLaplace(NOISE_MULTIPLIER, 125_000_000))


def published() -> float:
    grouped_majorization_set.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lap2.NotAGuaranteeWarning)
        mechanism = lap2.PublishedLaplace(NOISE_MULTIPLIER, 125_000_000)
    return of_lap2(mechanism)


def distinct_steps() -> float:
    accountant = lap2.Accountant()
    for noise_multiplier in np.linspace(1.0, 2.0, 5000).tolist():
        step = lap2.Laplace(noise_multiplier, 10**9)
        accountant.compose(step, sampling_prob=SAMPLING_PROB)
    return accountant.get_epsilon(DELTA)


def of_peer(make_accountant: Callable[[], dp_accounting.PrivacyAccountant]) -> float:
    release = dp_accounting.GaussianDpEvent(NOISE_MULTIPLIER)
    step = dp_accounting.PoissonSampledDpEvent(SAMPLING_PROB, release)
    event = dp_accounting.SelfComposedDpEvent(step, STEPS)
    return make_accountant().compose(event).get_epsilon(DELTA)


CONTESTANTS: dict[str, Query] = {
    "lap2, n = 1e9": lambda: laplace(10**9),
    "lap2, n = 10": lambda: laplace(10),
    "dp_accounting RDP": lambda: of_peer(dp_accounting.rdp.RdpAccountant),
    "dp_accounting PLD": lambda: of_peer(dp_accounting.pld.PLDAccountant),
    "lap2, 5,000 distinct steps": distinct_steps,
    "lap2, majorized, n = 125e6": majorized,
    "lap2, published, n = 125e6": published,
}


@dataclass(frozen=True)
class Target:
    """A claim about medians: a time in seconds, or a ratio of two contestants' times."""

    name: str
    of: str
    to: str | None = None
    at_least: float = 0.0
    at_most: float = float("inf")

    def measure(self, rounds: Sequence[dict[str, float]]) -> float:
        """The median over the rounds."""
        return statistics.median(r[self.of] / (r[self.to] if self.to else 1.0) for r in rounds)

    def row(self, value: float) -> str:
        """One line of the table."""
        unit = "x" if self.to else " s"
        low, high = self.at_least, self.at_most
        limits = [f">= {low:g}{unit}"] if low else []
        limits += [f"<= {high:g}{unit}"] if high < float("inf") else []
        verdict = "pass" if low <= value <= high else "FAIL"
        return f"{self.name:<44} {value:>10.3g}{unit:<2}  {', '.join(limits):<16}  {verdict}"


TARGETS = (
    Target("RDP accountant / lap2", "dp_accounting RDP", "lap2, n = 1e9", at_least=30),
    Target("PLD accountant / lap2", "dp_accounting PLD", "lap2, n = 1e9", at_least=300),
    Target("lap2 at n = 1e9 / at n = 10", "lap2, n = 1e9", "lap2, n = 10", 0.5, 2),
    Target("5,000 distinct steps", "lap2, 5,000 distinct steps", at_most=2),
    Target("majorized bound, n = 125,000,000", "lap2, majorized, n = 125e6", at_most=1),
    Target("published bound, n = 125,000,000", "lap2, published, n = 125e6", at_most=1),
)


def seconds(query: Query, *, at_least: float = 0.02) -> float:
    """Mean time of one query, repeated until the clock has something to measure."""
    repeats, start = 0, time.perf_counter()
    while True:
        query()
        repeats += 1
        elapsed = time.perf_counter() - start
        if elapsed >= at_least:
            return elapsed / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description="Time epsilon queries of lap2 and dp_accounting.")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take the median of")
    count: int = parser.parse_args().rounds
    if not count >= 1:
        parser.error(f"--rounds must be at least 1, got {count}")

    answers = {name: query() for name, query in CONTESTANTS.items()}  # also warms everything up
    rounds = [{name: seconds(query) for name, query in CONTESTANTS.items()} for _ in range(count)]

    print(
        f"sampling probability {SAMPLING_PROB}, {STEPS} steps, noise multiplier "
        f"{NOISE_MULTIPLIER:g}, delta {DELTA:g}; median of {count} interleaved rounds\n"
    )
    print(f"{'query':<44} {'time':>10}    epsilon")
    for name, epsilon in answers.items():
        milliseconds = 1e3 * statistics.median(r[name] for r in rounds)
        print(f"{name:<44} {milliseconds:>10,.2f} ms {epsilon:.4f}")
    print(f"\n{'claim':<44} {'measured':>10}    {'target':<16}  verdict")
    for target in TARGETS:
        print(target.row(target.measure(rounds)))


if __name__ == "__main__":
    main()
