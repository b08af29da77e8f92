"""Speed and memory of the secure noise, against torch's generators and against its own targets.

Everything runs in one process, in float32. Each round measures all contestants once, one after the
other, so that a busy or throttled machine slows them alike; a ratio is taken within a round, and
the median over the rounds is reported. torch.randn and torch's Laplace make a new tensor in every
call; ours add to one that exists, and torch's normal_ overwrites one. Signs run in one thread, as
normal_ does.

    python benchmarks/noise.py --rounds 5
"""

import argparse
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lap2.noise import SecureGaussian, SecureLaplace, SecureSigns

COMPILED, NUMPY = "Laplace, compiled", "Laplace, NumPy"
GAUSSIAN, SINGLE, GAUSSIAN_NUMPY = "Gauss, compiled", "Gauss, one thread", "Gauss, NumPy"
SIGNS, SIGNS_NUMPY = "Signs, one thread", "Signs, NumPy, one"
RANDN, NORMAL, LAPLACE = "torch.randn", "torch normal_", "torch Laplace"

Call = Callable[[], object]


def contestants(size: int) -> dict[str, Call]:
    array, overwritten = torch.ones(size), torch.ones(size)
    parts = list(array.split(1 << 20))  # lap2 does so many with one thread
    pieces = list(overwritten.split(1 << 20))
    compiled, numpy = SecureLaplace(compiled=True), SecureLaplace(compiled=False)
    gaussian, gaussian_numpy = SecureGaussian(compiled=True), SecureGaussian(compiled=False)
    signs, signs_numpy = SecureSigns(compiled=True), SecureSigns(compiled=False)
    laplace = torch.distributions.Laplace(0.0, 1.0)
    return {
        COMPILED: lambda: compiled.add(array, 1.0),
        NUMPY: lambda: numpy.add(array, 1.0),
        GAUSSIAN: lambda: gaussian.add(array, 1.0),
        SINGLE: lambda: [gaussian.add(part, 1.0) for part in parts],
        GAUSSIAN_NUMPY: lambda: gaussian_numpy.add(array, 1.0),
        SIGNS: lambda: [signs.add(piece, 1.0) for piece in pieces],
        SIGNS_NUMPY: lambda: [signs_numpy.add(piece, 1.0) for piece in pieces],
        RANDN: lambda: torch.randn(size),
        NORMAL: overwritten.normal_,
        LAPLACE: lambda: laplace.sample((size,)),
    }


@dataclass(frozen=True)
class Target:
    """A claim: the median ratio of two contestants' times is at most so much.

    Attributes:
        of: whose time is claimed to be small.
        to: whose time it is compared with.
        at_most: the largest ratio.
        least: the number of coordinates from which on it is claimed.
    """

    of: str
    to: str
    at_most: float
    least: int = 0

    def row(self, size: int, rounds: Sequence[dict[str, float]]) -> str:
        """One line of the table."""
        ratio = statistics.median(r[self.of] / r[self.to] for r in rounds)
        verdict = "pass" if ratio <= self.at_most else "FAIL"
        claim = f"{self.of} / {self.to}"
        return f"{size:>11,}  {claim:<34} {ratio:>8.2f}  <= {self.at_most:<6g} {verdict}"


TARGETS = (
    Target(COMPILED, RANDN, at_most=2.5),
    Target(COMPILED, LAPLACE, at_most=1.0),
    Target(NUMPY, RANDN, at_most=6.0),
    Target(GAUSSIAN, NORMAL, at_most=3.0),
    Target(SINGLE, NORMAL, at_most=3.0),
    Target(GAUSSIAN_NUMPY, RANDN, at_most=9.0),
    Target(SIGNS, NORMAL, at_most=0.5, least=10_000_000),
    Target(SIGNS_NUMPY, NORMAL, at_most=3.0, least=10_000_000),
)
COPIES, COPIED, NANOSECONDS = 64, 100_000, 40.0
"""Signs of so many copies of so many coordinates take at most so much processor time for each."""


def seconds(
    call: Call, *, at_least: float = 0.1, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median time of one call, repeated until the clock has something to measure."""
    times: list[float] = []
    while sum(times) < at_least:
        start = clock()
        call()
        times.append(clock() - start)
    return statistics.median(times)


def measured_round(calls: dict[str, Call], first: int) -> dict[str, float]:
    """All contestants once, beginning with another one each time.

    torch's threads go on spinning for a while after they have finished, and slow whoever is next.
    """
    names = list(calls)
    start = first % len(names)
    return {name: seconds(calls[name]) for name in names[start:] + names[:start]}


def peak_megabytes(call: Call) -> float:
    """The most memory a call holds at a time, beyond what was there before.

    Python's and NumPy's memory as traced; torch's only as the rise of resident memory (on Linux).
    """

    def status(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

    tracemalloc.start()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = status("VmRSS:")
        call()
        risen = status("VmHWM:") - before
    except OSError:
        call()
        risen = 0.0
    traced = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return max(risen, traced)


def report(size: int, count: int) -> list[str]:
    """Print the times and the memory of all contestants at one size; the rows of their claims."""
    calls = contestants(size)
    for call in calls.values():
        call()  # compiles, imports, touches the memory
    memory = {name: peak_megabytes(call) for name, call in calls.items()}
    rounds = [measured_round(calls, first) for first in range(count)]
    for name in calls:
        median = statistics.median(r[name] for r in rounds)
        print(
            f"{size:>11,}  {name:<17} {1e3 * median:>10,.3f} ms {1e9 * median / size:>8.2f} ns "
            f"{memory[name]:>10,.1f} MB",
            flush=True,
        )
    return [target.row(size, rounds) for target in TARGETS if size >= target.least]


def copies_row(count: int) -> str:
    """The claim about many copies, in one thread; there is nothing to compare it with."""
    signs = SecureSigns(COPIES, compiled=True)
    pieces = torch.zeros(COPIED).split((1 << 20) // COPIES)

    def call() -> None:
        for piece in pieces:
            signs.add(piece, 1.0)

    call()
    each = statistics.median(
        1e9 * seconds(call, clock=time.thread_time) / COPIED for _ in range(count)
    )
    verdict = "pass" if each <= NANOSECONDS else "FAIL"
    claim = f"Signs, {COPIES} copies, ns"
    return f"{COPIED:>11,}  {claim:<34} {each:>8.2f}  <= {NANOSECONDS:<6g} {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the secure noise against torch.")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take the median of")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 10_000_000, 125_000_000])
    arguments = parser.parse_args()
    if not arguments.rounds >= 1:
        parser.error(f"--rounds must be at least 1, got {arguments.rounds}")

    print(
        f"float32, scale 1, median of {arguments.rounds} interleaved rounds on {os.cpu_count()} "
        "cores\nlap2 uses all cores above 2^20 coordinates; torch's normal noise one, its Laplace "
        f"{torch.get_num_threads()} in part\n"
    )
    print(f"{'coordinates':>11}  {'':<17} {'time':>10}    {'each':>8}    {'peak extra':>10}")
    rows = [row for size in arguments.sizes for row in report(size, arguments.rounds)]
    rows.append(copies_row(arguments.rounds))
    print(f"\n{'coordinates':>11}  {'claim':<34} {'measured':>8}  {'target':<9} verdict")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
