"""Exactness of the secure noise at 1e8 draws: mean, square, tails and extremes.

Prints a table, and exits with status 1 if a check fails or if it passes a sampler that is wrong:
one whose scale is off by 0.5%, and one whose tail is cut: where that of torch's float32 Laplace is,
or at 5 standard deviations.

    python benchmarks/noise_exactness.py --law gaussian --draws 100000000
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lap2.noise import SecureGaussian, SecureLaplace

BLOCK = 1 << 20
STANDARD_ERRORS = 5.5
"""By chance, a right sampler fails one such check in 26 million."""

Floats = NDArray[np.float64]
Draw = Callable[[int], Floats]


@dataclass(frozen=True)
class Law:
    """What is to be expected at scale 1.

    Attributes:
        sampler: the secure one.
        beyond: the probability that ``|x|`` is larger than a number.
        moments: means and standard deviations of ``x``, ``|x|`` and ``x^2``.
        tails: where to look.
        end: that a wrong sampler does not reach; a dozen draws in 10^8 are to be beyond it.
    """

    sampler: type[SecureLaplace | SecureGaussian]
    beyond: Callable[[float], float]
    moments: tuple[tuple[float, float], ...]
    tails: tuple[float, ...]
    end: float

    def draw(self, scale: float) -> Draw:
        """Noise of that scale."""
        sampler = self.sampler()

        def draw(size: int) -> Floats:
            values = np.zeros(size)
            sampler.add(values, scale)
            return values

        return draw


LAWS = {
    # torch's float32 Laplace makes nothing larger than 23 log 2 = 15.94 scales.
    "laplace": Law(
        SecureLaplace,
        lambda x: math.exp(-x),
        ((0, math.sqrt(2)), (1, 1), (2, math.sqrt(20))),
        (0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 14.0),
        15.94,
    ),
    "gaussian": Law(
        SecureGaussian,
        lambda x: math.erfc(x / math.sqrt(2)),
        ((0, 1), (math.sqrt(2 / math.pi), math.sqrt(1 - 2 / math.pi)), (1, math.sqrt(2))),
        (0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 4.7),
        5.25,
    ),
}


def cut(draw: Draw, end: float) -> Draw:
    return lambda size: np.clip(draw(size), -end, end)


def blocks(draw: Draw, draws: int) -> Iterator[Floats]:
    for start in range(0, draws, BLOCK):
        yield draw(min(BLOCK, draws - start))


def deviations(law: Law, draw: Draw, draws: int) -> dict[str, float]:
    """How far each statistic is from its exact value for scale 1, in standard errors.

    The draws beyond the end are Poisson with a mean of a dozen: their deviation is that of the
    square root, whose standard error is 1/2, and to fail by chance there must be none (6e-6). The
    largest draw is judged by its own distribution.
    """
    total = dict.fromkeys(("x", "|x|", "x^2"), 0.0)
    beyond = np.zeros(len(law.tails))
    edge, largest = 0, 0.0
    for values in blocks(draw, draws):
        magnitude = np.abs(values)
        total["x"] += float(values.sum())
        total["|x|"] += float(magnitude.sum())
        total["x^2"] += float(magnitude @ magnitude)
        beyond += [np.count_nonzero(magnitude > tail) for tail in law.tails]
        edge += np.count_nonzero(magnitude > law.end)
        largest = max(largest, float(magnitude.max()))
    root = math.sqrt(draws)
    result = {
        f"E {name}": (total[name] / draws - mean) * root / deviation
        for name, (mean, deviation) in zip(total, law.moments, strict=True)
    }
    for tail, count in zip(law.tails, beyond.tolist(), strict=True):
        p = law.beyond(tail)
        result[f"P(|x| > {tail:g})"] = (count - draws * p) / math.sqrt(draws * p * (1 - p))
    expected = draws * law.beyond(law.end)
    result[f"draws beyond {law.end}"] = 2 * (math.sqrt(edge) - math.sqrt(expected))
    # The smallest of so many uniform variates is exp(-Gumbel) / draws.
    result["largest, as a Gumbel variate"] = -math.log(law.beyond(largest) * draws)
    return result


def passes(name: str, deviation: float) -> bool:
    if name.startswith("largest"):
        return -3.3 <= deviation <= 17.0  # fails by chance with probability exp(-17) = 4e-8
    return abs(deviation) <= STANDARD_ERRORS


def controls(law: Law) -> dict[str, tuple[Draw, tuple[str, ...]]]:
    """Wrong samplers, and the checks that have to reject them."""
    scaled = ("E |x|", "E x^2", "P(|x| > 1)", "P(|x| > 2)")
    return {
        "scale +0.5%": (law.draw(1.005), scaled),
        "scale -0.5%": (law.draw(0.995), scaled),
        f"cut at {law.end}": (cut(law.draw(1.0), law.end), (f"draws beyond {law.end}",)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the secure noise at many draws.")
    parser.add_argument("--law", choices=LAWS, default="laplace")
    parser.add_argument("--draws", type=int, default=100_000_000)
    arguments = parser.parse_args()
    law, draws = LAWS[arguments.law], arguments.draws
    if not draws >= 100_000_000:
        parser.error(f"--draws must be at least 100000000 for the tails to be seen, got {draws}")

    failed = 0
    print(f"{draws:,} draws of scale 1; deviations in standard errors, at most {STANDARD_ERRORS}\n")
    for name, deviation in deviations(law, law.draw(1.0), draws).items():
        good = passes(name, deviation)
        failed += not good
        print(f"{name:<28} {deviation:>10.2f}  {'pass' if good else 'FAIL'}", flush=True)
    for control, (draw, checks) in controls(law).items():
        print(f"\nmust be rejected: {control}")
        wrong = deviations(law, draw, draws)
        for name in checks:
            rejected = not passes(name, wrong[name])
            failed += not rejected
            verdict = "pass" if rejected else "FAIL"
            print(f"{name:<28} {wrong[name]:>10.2f}  {verdict}", flush=True)
    print(f"\n{'FAIL: ' + str(failed) if failed else 'pass'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
