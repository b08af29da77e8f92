"""The published multivariate bound is violated: shown by simulating the mechanism, nothing else.

One step of the mechanism (Poisson sampling, l2 clipping, Laplace noise) is run half a million times
without and half a million times with one record whose clipped gradient has equal coordinates. An
event fixed in advance, "the release is closer in l1 distance to the record's gradient than to zero,
by 7 b", happens far more often with the record than the published epsilon and delta allow.

Counts become bounds on probabilities by Chernoff's inequality: for a Binomial X of mean mu,
``sqrt(X) >= sqrt(mu) + sqrt(s)`` and ``X <= mu - 2 sqrt(mu s)`` have probability at most
``exp(-2 s)`` each. Why the bound fails: docs/theory.md, section 4.
"""

import math
import warnings

import numpy as np

import lap2

N, ZETA, C, B, DELTA, TRIALS, S = 100, 0.01, 1.0, 0.3, 1e-5, 500_000, 15.0


def count(seed: int, zeta: float) -> int:
    """How often the event happens; ``zeta = 0`` leaves the record out of the data."""
    rng, v, hits = np.random.default_rng(seed), np.full(N, C / math.sqrt(N)), 0
    for _ in range(50):
        sampled = rng.random((TRIALS // 50, 1)) < zeta
        release = sampled * v + rng.laplace(scale=B, size=(TRIALS // 50, N))
        hits += int(np.sum((np.abs(release) - np.abs(release - v)).sum(axis=1) > 7 * B))
    return hits


def main() -> tuple[float, float]:
    """Print the conclusion; return the published epsilon and one that is surely too small."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lap2.NotAGuaranteeWarning)
        step = lap2.PublishedLaplace(noise_multiplier=B / C, dimension=N)
    published = lap2.Accountant().compose(step, sampling_prob=ZETA).get_epsilon(DELTA)
    without, added = count(seed=2026, zeta=0.0), count(seed=2027, zeta=ZETA)
    most = (math.sqrt(without + S) + math.sqrt(S)) ** 2 / TRIALS
    least = (math.sqrt(added) - math.sqrt(S)) ** 2 / TRIALS
    excess, true = least - math.exp(published) * most, math.log((least - DELTA) / most)
    print(f"published claim: one step is ({published:.3f}, {DELTA:g})-differentially private")
    print(f"event without the record: {without:4} of {TRIALS}, probability at most  {most:.2e}")
    print(f"event with the record:    {added:4} of {TRIALS}, probability at least {least:.2e}")
    print(f"so delta at that epsilon is above {excess:.2e}, {excess / DELTA:.0f} times the claim,")
    print(f"and epsilon at that delta is above {true:.2f}, {true / published:.1f} times the claim")
    print(f"(both up to a statistical error of probability {2 * math.exp(-2 * S):.0e})")
    return published, true


if __name__ == "__main__":
    main()
