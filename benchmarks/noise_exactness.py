"""Exactness of the secure noise at 1e8 draws: mean, square, tails and extremes.

Prints a table, and exits with status 1 if a check fails or if it passes a sampler that is wrong:
one whose scale is off by 0.5%, and one whose tail is cut: where that of torch's float32 Laplace is,
or at 5 standard deviations. Of signs, the counts are compared with the binomial distribution, for
which a sampler is wrong whose probability is off by 0.2%; and the compiled threshold is compared
with float64, for all float32 from 2^-12 to 60 and every 61st below.

    python benchmarks/noise_exactness.py --law gaussian --draws 100000000
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lap2.noise import SecureGaussian, SecureLaplace, SecureSigns, signs_compiled

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


def positive(u: float) -> float:
    return 1 - math.exp(-u) / 2 if u >= 0 else math.exp(u) / 2


def shifted(u: float, factor: float) -> float:
    """The coordinate whose probability is that of u times a factor."""
    p = factor * positive(u)
    return -math.log(2 * (1 - p)) if p >= 0.5 else math.log(2 * p)


def binomial_pvalue(copies: int, drawn: float, assumed: float, bits: int) -> float:
    """Chi-square of the counts of as many bits, drawn at one u, against the law of another."""
    sampler, observed = SecureSigns(copies), np.zeros(copies + 1)
    for start in range(0, bits // copies, BLOCK):
        size = min(BLOCK, bits // copies - start)
        counts = sampler.counts(np.full(size, drawn * math.sqrt(copies)), 1.0)
        observed += np.bincount(counts, minlength=copies + 1)
    expected = stats.binom.pmf(np.arange(copies + 1), copies, positive(assumed)) * observed.sum()
    often = expected >= 10
    bins = [[*of[often], of[~often].sum()] for of in (observed, expected)]
    if not often.all() and bins[1][-1] < 10:
        bins = [[*of[:-2], of[-2] + of[-1]] for of in bins]
    keep = np.array(bins[1]) > 0
    return float(stats.chisquare(np.array(bins[0])[keep], np.array(bins[1])[keep]).pvalue)


@numba.njit(nogil=True)
def thresholds(values, found):
    for i in range(values.size):
        found[i] = signs_compiled._threshold(values[i], 1.0)


def threshold_error() -> tuple[float, float, int]:
    """The largest error of the compiled threshold; over its bound, the same; of so many."""
    worst, of_bound, count = 0.0, 0.0, 0
    small, large = (int(np.float32(x).view(np.int32)) for x in (2.0**-12, 60.0))
    for first, last, step in ((0, small, 61), (small, large + 1, 1)):
        for start in range(first, last, step * BLOCK):
            bits = np.arange(start, min(last, start + step * BLOCK), step, dtype=np.int32)
            values, found = bits.view(np.float32), np.empty(bits.size, np.float32)
            thresholds(values, found)
            sizes = values.astype(np.float64)
            exact = 2.0**15 * np.exp(-sizes)
            error = np.abs(found - exact)
            worst = max(worst, float(error.max()))
            of_bound = max(of_bound, float((error / (exact * (2.3 * sizes + 4.2))).max()) * 2**24)
            count += bits.size
    return worst, of_bound, count


def check_signs(bits: int) -> int:
    """Print all checks of signs; how many failed."""
    failed = 0

    def row(name: str, value: float, good: bool) -> None:
        nonlocal failed
        failed += not good
        print(f"{name:<46} {value:>10.2e}  {'pass' if good else 'FAIL'}", flush=True)

    print(f"{bits:,} bits each; p-values of chi-square against the binomial, at least 1e-7\n")
    for copies in (1, 64):
        for u in (0.0, 0.25, 1.0, -0.5):
            pvalue = binomial_pvalue(copies, u, u, bits)
            row(f"{copies} copies, u = {u}", pvalue, pvalue >= 1e-7)
            for factor in (1.002, 0.998):
                pvalue = binomial_pvalue(copies, shifted(u, factor), u, bits)
                row(f"  must be rejected: P times {factor}", pvalue, pvalue < 1e-7)
    worst, of_bound, count = threshold_error()
    print(f"\ncompiled threshold at {count:,} values up to 60")
    row("largest error, at most 0.0083", worst, worst <= 0.0083)
    row("of its bound at the value, at most 1", of_bound, of_bound <= 1)
    return failed


def check_noise(name_of_law: str, draws: int) -> int:
    """Print all checks of a noise; how many failed."""
    law, failed = LAWS[name_of_law], 0
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
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the secure noise at many draws.")
    parser.add_argument("--law", choices=[*LAWS, "signs"], default="laplace")
    parser.add_argument("--draws", type=int, default=100_000_000)
    arguments = parser.parse_args()
    draws = arguments.draws
    if not draws >= 100_000_000:
        parser.error(f"--draws must be at least 100000000 for the tails to be seen, got {draws}")

    failed = check_signs(draws) if arguments.law == "signs" else check_noise(arguments.law, draws)
    print(f"\n{'FAIL: ' + str(failed) if failed else 'pass'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
