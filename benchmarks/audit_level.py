"""How often each audit cries wolf at the smallest sizes it allows: honest mechanisms, many times.

For each audit, the share of verdicts "violated" at two confidences, which must not be more than
confidence allows; whether it is more is a binomial test at 1e-3, for all rows together. Then the
two mechanisms that once fooled the mechanism audit: they must be found, or refused.

Run: python benchmarks/audit_level.py [--repeats 2000]
"""

import argparse

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy import stats

from lap2.audit import (
    CanaryScores,
    Pair,
    RunPlan,
    audit_claim,
    audit_mechanism,
    audit_membership,
    audit_releases,
    audit_run,
    audit_sampler,
)
from lap2.audit.statistics import gaussian_epsilon
from lap2.noise import SecureLaplace

CONFIDENCES = 0.9, 0.999
CLAIM = gaussian_epsilon(1.0, 0.1)
"""Of noise of scale 1 and a shift of 1, which is met exactly."""


def sampler(dtype):
    def once(_seed, confidence):  # honest noise has none
        return audit_sampler(
            SecureLaplace(), size=4, steps=4, releases=200, dtype=dtype, confidence=confidence
        )

    return once


def releases(dimension):
    def once(seed, confidence):
        rng = np.random.default_rng(seed)
        shift = np.full(dimension, 1 / np.sqrt(dimension))

        def draw(batch, count):
            return batch + rng.normal(size=(count, dimension))

        pair = Pair("shift", np.zeros(dimension), shift, shift)
        terms = {"claimed_epsilon": CLAIM, "delta": 0.1, "trials": 100, "confidence": confidence}
        return audit_releases(draw, [pair], **terms)

    return once


def mechanism(seed, confidence):
    rng = np.random.default_rng(seed)

    def step(batch):
        return batch + rng.laplace(size=1)

    pair = Pair("shift", np.zeros(1), np.ones(1))
    terms = {"claimed_epsilon": 1.0, "delta": 0.0, "trials": 100, "confidence": confidence}
    return audit_mechanism(step, [pair], **terms)


def run(canaries, width):
    """The release of a correct run of one step; fair coins that fell alike are thrown again."""

    def once(seed, confidence):
        rng = np.random.default_rng(seed)
        coins = np.zeros(canaries, dtype=bool)
        while not 0 < coins.sum() < canaries:
            coins = rng.random(canaries) < 0.5
        plan = RunPlan(width, 1.0, 1.0, 0.5, 1)
        observed = CanaryScores(plan, coins, rng=rng)
        sums = plan.sums(coins, rng)
        observed.add(sums + rng.laplace(size=sums.shape))
        return audit_run(observed, claimed_epsilon=np.sqrt(width), delta=0.0, confidence=confidence)

    return once


def membership(count):
    """Scores that know nothing, of a training that claims to release nothing."""

    def once(seed, confidence):
        rng = np.random.default_rng(seed)
        coins = np.zeros(count, dtype=bool)
        while not 0 < coins.sum() < count:
            coins = rng.random(count) < 0.5
        terms = {"claimed_epsilon": 0.0, "delta": 0.0, "confidence": confidence}
        return audit_membership(rng.normal(size=count), coins, guesses=count // 2 * 2, **terms)

    return once


def claim(seed, confidence):
    return audit_claim("exact", trials=100, confidence=confidence, rng=np.random.default_rng(seed))


AUDITS = {
    "sampler, 4 x 4, float32": sampler("float32"),
    "sampler, 4 x 4, float64": sampler("float64"),
    "mechanism, 100 releases of 1": releases(1),
    "mechanism, 100 releases of 16": releases(16),
    "mechanism, 100 calls of a step": mechanism,
    "run, 2 canaries of 1": run(2, 1),
    "run, 12 canaries of 2": run(12, 2),
    "membership, 2 records": membership(2),
    "membership, 12 records": membership(12),
    "claim, 100 trials": claim,
}


def levels(repeats, console):
    """Whether every row kept its confidence."""
    table = Table("audit", *(f"violated at {confidence:g}" for confidence in CONFIDENCES), "")
    least = 1e-3 / (len(AUDITS) * len(CONFIDENCES))
    kept = True
    for name, once in AUDITS.items():
        row, worst = [], 1.0
        for confidence in CONFIDENCES:
            seeds = track(range(repeats), f"{name}, {confidence:g}", transient=True)
            violated = sum(once(seed, confidence).violated for seed in seeds)
            worst = min(worst, float(stats.binom.sf(violated - 1, repeats, 1 - confidence)))
            row.append(f"{violated} of {repeats}")
        kept &= worst > least
        table.add_row(name, *row, "kept" if worst > least else "TOO OFTEN")
    console.print(table)
    return kept


def fooled(console):
    """Whether any of the two mechanisms that hid is not found."""
    rng = np.random.default_rng(0)
    pair = Pair("a record", 0, 1)

    def too_many(batch, count):  # the second half of the rows is what would be counted
        return np.concatenate([rng.normal(size=(count, 1)), np.full((count, 1), float(batch))])

    def undefined(batch, count):
        return np.full((count, 1), np.nan if batch else np.inf)

    terms = {"claimed_epsilon": 1.0, "delta": 1e-5, "trials": 4000}
    try:
        found = audit_releases(too_many, [pair], **terms).violated
    except ValueError as error:
        found = True
        console.print(f"too many releases: refused, {error}")
    result = audit_releases(undefined, [pair], **terms)
    console.print(f"undefined or infinite: {result.verdict}, {result.evidence}")
    return not (found and result.violated)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=2000)
    console = Console()
    kept = levels(arguments.parse_args().repeats, console)
    raise SystemExit(int(fooled(console) or not kept))


if __name__ == "__main__":
    main()
