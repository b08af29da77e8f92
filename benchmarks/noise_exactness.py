"""Exactness of the secure noise at 1e8 draws: mean, square, tails and extremes.

Prints a table, and exits with status 1 if a check fails or if it passes a sampler that is wrong:
one whose scale is off by 0.5%, and one whose tail is cut where that of torch's float32 Laplace is.

    python benchmarks/noise_exactness.py --draws 100000000
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from lap2.noise import SecureLaplace

BLOCK = 1 << 20
TORCH_ENDS = 15.94
"""torch's float32 Laplace makes nothing larger than 23 log 2 = 15.94 scales."""
TAILS = (0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 14.0)
STANDARD_ERRORS = 5.5
"""By chance, a right sampler fails one such check in 26 million."""

Floats = NDArray[np.float64]
Draw = Callable[[int], Floats]


def laplace(scale: float) -> Draw:
    sampler = SecureLaplace()

    def draw(size: int) -> Floats:
        values = np.zeros(size)
        sampler.add(values, scale)
        return values

    return draw


def cut(draw: Draw) -> Draw:
    return lambda size: np.clip(draw(size), -TORCH_ENDS, TORCH_ENDS)


def blocks(draw: Draw, draws: int) -> Iterator[Floats]:
    for start in range(0, draws, BLOCK):
        yield draw(min(BLOCK, draws - start))


def deviations(draw: Draw, draws: int) -> dict[str, float]:
    """How far each statistic is from its exact value for scale 1, in standard errors.

    The draws beyond torch's edge are Poisson with a mean of a dozen: their deviation is that of the
    square root, whose standard error is 1/2, and to fail by chance there must be none (6e-6). The
    largest draw is judged by its own distribution.
    """
    total = dict.fromkeys(("x", "|x|", "x^2"), 0.0)
    beyond = np.zeros(len(TAILS))
    edge, largest = 0, 0.0
    for values in blocks(draw, draws):
        magnitude = np.abs(values)
        total["x"] += float(values.sum())
        total["|x|"] += float(magnitude.sum())
        total["x^2"] += float(magnitude @ magnitude)
        beyond += [np.count_nonzero(magnitude > tail) for tail in TAILS]
        edge += np.count_nonzero(magnitude > TORCH_ENDS)
        largest = max(largest, float(magnitude.max()))
    root = math.sqrt(draws)
    result = {
        "E x": total["x"] / root / math.sqrt(2),
        "E |x|": (total["|x|"] / draws - 1) * root,
        "E x^2": (total["x^2"] / draws - 2) * root / math.sqrt(20),
    }
    for tail, count in zip(TAILS, beyond.tolist(), strict=True):
        p = math.exp(-tail)
        result[f"P(|x| > {tail:g})"] = (count - draws * p) / math.sqrt(draws * p * (1 - p))
    expected = draws * math.exp(-TORCH_ENDS)
    result[f"draws beyond {TORCH_ENDS}"] = 2 * (math.sqrt(edge) - math.sqrt(expected))
    # The largest is log(draws) plus a Gumbel variate.
    result["largest, less log(draws)"] = largest - math.log(draws)
    return result


def passes(name: str, deviation: float) -> bool:
    if name.startswith("largest"):
        return -3.3 <= deviation <= 17.0  # fails by chance with probability exp(-17) = 4e-8
    return abs(deviation) <= STANDARD_ERRORS


CONTROLS: dict[str, tuple[Draw, tuple[str, ...]]] = {
    "scale +0.5%": (laplace(1.005), ("E |x|", "E x^2", "P(|x| > 1)", "P(|x| > 4)")),
    "scale -0.5%": (laplace(0.995), ("E |x|", "E x^2", "P(|x| > 1)", "P(|x| > 4)")),
    f"cut at {TORCH_ENDS}": (cut(laplace(1.0)), (f"draws beyond {TORCH_ENDS}",)),
}
"""Wrong samplers, and the checks that have to reject them."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the secure noise at many draws.")
    parser.add_argument("--draws", type=int, default=100_000_000)
    draws: int = parser.parse_args().draws
    if not draws >= 100_000_000:
        parser.error(f"--draws must be at least 100000000 for the tails to be seen, got {draws}")

    failed = 0
    print(f"{draws:,} draws of scale 1; deviations in standard errors, at most {STANDARD_ERRORS}\n")
    for name, deviation in deviations(laplace(1.0), draws).items():
        good = passes(name, deviation)
        failed += not good
        print(f"{name:<28} {deviation:>10.2f}  {'pass' if good else 'FAIL'}", flush=True)
    for control, (draw, checks) in CONTROLS.items():
        print(f"\nmust be rejected: {control}")
        wrong = deviations(draw, draws)
        for name in checks:
            rejected = not passes(name, wrong[name])
            failed += not rejected
            verdict = "pass" if rejected else "FAIL"
            print(f"{name:<28} {wrong[name]:>10.2f}  {verdict}", flush=True)
    print(f"\n{'FAIL: ' + str(failed) if failed else 'pass'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
