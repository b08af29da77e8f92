"""Calibration against dp_accounting's, on the same target, interleaved in one process.

Run: python benchmarks/calibration.py [--rounds 5]
"""

import argparse
import statistics
import time

import dp_accounting
from dp_accounting import rdp

import lap2

EPSILON, DELTA, PROB, STEPS = 1.0, 1e-5, 0.0043, 5860


def ours(dimension):
    step = lap2.Laplace(1.0, dimension)
    return lap2.calibrate_noise(
        step, epsilon=EPSILON, delta=DELTA, sampling_prob=PROB, steps=STEPS
    ).noise_multiplier


def theirs():
    def event(noise_multiplier):
        sampled = dp_accounting.PoissonSampledDpEvent(
            PROB, dp_accounting.GaussianDpEvent(noise_multiplier)
        )
        return dp_accounting.SelfComposedDpEvent(sampled, STEPS)

    return dp_accounting.calibrate_dp_mechanism(rdp.RdpAccountant, event, EPSILON, DELTA, tol=1e-6)


def timed(function, *arguments):
    start = time.perf_counter()
    value = function(*arguments)
    return time.perf_counter() - start, value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    ours(10**9)
    ratios, seconds = [], []
    for _ in range(rounds):
        (mine, value), (peer, reference) = timed(ours, 10**9), timed(theirs)
        ratios.append(peer / mine)
        seconds.append((mine, peer))
    mine, peer = (statistics.median(column) for column in zip(*seconds, strict=True))
    ratio = statistics.median(ratios)
    print(f"lap2, Laplace in 1e9 dimensions   {1e3 * mine:9.2f} ms   noise multiplier {value:.6f}")
    print(
        f"dp_accounting RDP, Gaussian       {1e3 * peer:9.2f} ms   noise multiplier {reference:.6f}"
    )
    print(f"ratio {ratio:.0f}x, target >= 15x: {'pass' if ratio >= 15 else 'FAIL'}")


if __name__ == "__main__":
    main()
