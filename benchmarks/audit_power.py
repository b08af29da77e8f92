"""What each audit sees: detection rates on deliberately broken steps, and on the correct one.

Also how close lower bounds come to known truths with a million releases, how long those take, and
how long the published bound's counterexample takes.

Run: python benchmarks/audit_power.py [--repeats 20] [--levels sampler mechanism run truths]
"""

import argparse
import sys
import time

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lap2.audit import Pair, audit_claim, audit_releases, audit_sampler, canary_directions
from lap2.audit.controls import FAULTS
from lap2.audit.demonstration import audit_demonstration_run
from lap2.audit.engine import audit_engine
from lap2.audit.probe import EngineSetting
from lap2.audit.statistics import gaussian_epsilon, laplace_epsilon
from lap2.noise import SecureLaplace

SEEN_BY_SAMPLER = {"none", "noise", "float32", "repeat", "shared"}
RELEASES = ("bits", "values")
NAMES = {
    "none": "correct",
    "noise": "noise x 0.7",
    "clip": "clip x 1.5",
    "layer": "noise missing on a layer",
    "sampling": "no subsampling",
    "divisor": "realised divisor",
    "float32": "float32 torch noise",
    "repeat": "the same noise, or keystream, in every step",
    "shared": "one noise, or bit, for two coordinates",
    "copies": "four times as many copies, too large",
    "ledger": "four times as many copies as accounted",
    "whole": "copies as large as their coordinate",
    "twins": "one bit for all copies",
}


def once(level, fault, rng):
    """One audit, at sizes that take seconds."""
    if level == "sampler":
        return audit_sampler(fault.sampler("values"))
    kind, release = level.split(", ")
    if kind == "mechanism":
        return audit_engine(release=release, trials=60_000, steps=1200, fault=fault, rng=rng)
    return audit_demonstration_run(release=release, fault=fault, rng=rng)


def power(levels, repeats, console):
    """Share of repeats with the verdict "violated"."""
    table = Table("", *levels)
    seconds = dict.fromkeys(levels, 0.0)
    for name, fault in FAULTS.items():
        row = []
        for level in levels:
            of_values = level == "sampler" or level.endswith("values")
            unseen = level == "sampler" and name not in SEEN_BY_SAMPLER
            if unseen or (of_values and fault.is_of_bits):
                row.append("not its subject")
                continue
            start, violated = time.process_time(), 0
            for seed in track(range(repeats), f"{level}: {name}", transient=True):
                violated += once(level, fault, np.random.default_rng(seed)).violated
            spent = (time.process_time() - start) / repeats
            seconds[level] = max(seconds[level], spent)
            row.append(f"{violated} of {repeats}")
        table.add_row(NAMES[name], *row)
        print(NAMES[name], *row, sep=", ", file=sys.stderr)
    console.print(table)
    for level, spent in seconds.items():
        console.print(f"{level}: at most {spent:.1f} s of processor time an audit")


def laplace(scale):
    def draw(batch, count):
        rows = np.tile(batch, (count, 1))
        SecureLaplace().add(rows, scale)
        return rows

    return draw


def truths(repeats, console):
    """Lower bounds over exact epsilons, with a million releases in all."""
    table = Table("mechanism", "delta", "exact", "assumption-free", "GDP shape", "exceeded")
    rng, one = np.random.default_rng(0), Pair("one", np.zeros(1), np.ones(1), np.ones(1))
    cases = [(f"Gaussian, mu = {mu:g}", d, mu) for mu in (0.5, 1, 2) for d in (1e-5, 1e-3, 1e-2)]
    cases += [(f"Laplace, shift {x:g} b", 1e-5, -x) for x in (0.5, 1, 2, 4)]
    for name, delta, size in cases:
        exact = gaussian_epsilon(size, delta) if size > 0 else laplace_epsilon(-size, delta)

        def gaussian(batch, count, sigma=1 / size):
            return batch + rng.normal(scale=sigma, size=(count, 1))

        draw = gaussian if size > 0 else laplace(-1 / size)
        results = [
            audit_releases(draw, [one], claimed_epsilon=exact, delta=delta, gdp_shape=size > 0)
            for _ in range(repeats)
        ]
        shares = np.array([[b.epsilon_lower / exact for b in r.bounds] for r in results])
        text = [f"{100 * np.median(column):.0f}%" for column in shares.T] + [""]
        exceeded = f"{int((shares > 1).any(axis=1).sum())} of {repeats}"
        table.add_row(name, f"{delta:g}", f"{exact:.3f}", *text[:2], exceeded)
    console.print(table)


def speed(console):
    """A million releases at n = 64, of the noise and of the engine; the counterexample."""
    for name, draw, empty in (
        ("secure noise", laplace(1.0), np.zeros(64)),
        ("the engine's own step", lambda b, k: EngineSetting(1.0).rows(b, k, 64), None),
    ):
        directions = canary_directions(64, 1.0, np.random.default_rng(0))
        pairs = [Pair(key, empty, v, v) for key, v in directions.items()]
        start = time.process_time()
        claim = EngineSetting(1.0).claim(64, 1e-5)
        audit_releases(draw, pairs, claimed_epsilon=claim, delta=1e-5, trials=1_000_000, scale=1.0)
        spent = time.process_time() - start
        console.print(f"1e6 releases at n = 64, {name}: {spent:.1f} s")
    for bound in ("published", "exact"):
        start = time.process_time()
        result = audit_claim(bound, rng=np.random.default_rng(1))
        console.print(
            f"{bound} bound: claims {result.claimed_epsilon:.3f}, epsilon is at least "
            f"{result.epsilon_lower:.2f} with confidence {result.confidence:g}: {result.verdict}, "
            f"{time.process_time() - start:.1f} s"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    levels = ["sampler", "mechanism", "run", "truths"]
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--levels", nargs="+", choices=levels, default=levels)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=110)
    tested = []
    for level in arguments.levels:
        if level in {"mechanism", "run"}:
            tested += [f"{level}, {release}" for release in RELEASES]
        elif level != "truths":
            tested.append(level)
    if tested:
        power(tested, arguments.repeats, console)
    if "truths" in arguments.levels:
        truths(arguments.repeats, console)
        speed(console)


if __name__ == "__main__":
    main()
