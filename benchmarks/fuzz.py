"""Damaged and crafted files for every reader: none may crash, hang, or half-load.

    python benchmarks/fuzz.py --inputs 100000

Input number i of a seed is always the same, but for the noise in checkpoints: a valid file of one
of the kinds in fuzz_cases.py, changed a few times (bits, cuts, splices, extreme numbers, nested
containers, other types), with its checksums made right again most of the time. A reader may accept
it, or raise the one error of its kind. An engine that refused a checkpoint must be what it was
before. One input that takes more than 10 seconds, or 4 GB more than the process had, is a failure
as well.

Workers are processes of their own, so that a crash is a failure with a number. It prints what was
accepted and refused of each kind, and of each failure where the input is kept and why it is one.
"""

import argparse
import faulthandler
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from fuzz_cases import KINDS

SECONDS, MEMORY = 10, 4 << 30


def work(numbers, seed, folder, keep):
    """Read the inputs of some numbers, and print what came of them as JSON."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ["LAP2_CACHE"] = str(folder / "cache")
    os.environ["LAP2_STATE"] = str(folder / "state")
    kinds = [kind(folder) for kind in KINDS]
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    counts, failures, slowest = Counter(), [], (0.0, 0)
    for number in numbers:
        kind = kinds[number % len(kinds)]
        content = kind.make(random.Random(f"{seed} {number}"))
        (folder / "last").write_bytes(b"%020d" % number + content)
        faulthandler.dump_traceback_later(6 * SECONDS, exit=True)
        start, fault = time.perf_counter(), ""
        try:
            kind.read(content)
            said = "accepted"
        except kind.error:
            said = "refused"
        except BaseException:  # noqa: BLE001 - the very thing that is looked for
            said, fault = "failed", traceback.format_exc(limit=-4)
        taken = time.perf_counter() - start
        slowest = max(slowest, (taken, number))
        if taken > SECONDS and not fault:
            said, fault = "failed", f"took {taken:.1f} s"
        if fault:
            (keep / f"{number}.bin").write_bytes(content)
            failures.append((number, fault))
        counts[f"{type(kind).__name__} {said}"] += 1
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"counts": counts, "failures": failures, "slowest": slowest}))


def supervised(start, stop, seed, keep):
    """What a worker finds; where it crashes, that is a failure, and others do the rest."""
    if start >= stop:
        return {"counts": {}, "failures": [], "slowest": (0.0, 0)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", folder, "--seed", str(seed)]
        command += ["--keep", str(keep), "--first", str(start), "--inputs", str(stop - start)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        last = Path(folder) / "last"
        if not last.exists():
            raise RuntimeError(f"a worker could not start:\n{done.stderr}")
        crashed = int(last.read_bytes()[:20])
        (keep / f"{crashed}.bin").write_bytes(last.read_bytes()[20:])
    crash = {
        "counts": {f"{KINDS[crashed % len(KINDS)].__name__} failed": 1},
        "failures": [(crashed, f"crash, {done.returncode}\n{done.stderr[-1500:]}")],
        "slowest": (0.0, 0),
    }
    before, after = (start, crashed), (crashed + 1, stop)
    return merged([crash, *(supervised(*numbers, seed, keep) for numbers in (before, after))])


def merged(found):
    return {
        "counts": sum((Counter(one["counts"]) for one in found), Counter()),
        "failures": sorted(tuple(f) for one in found for f in one["failures"]),
        "slowest": max(tuple(one["slowest"]) for one in found),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="for failing inputs")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    stop = options.first + options.inputs
    if options.worker:
        work(range(options.first, stop), options.seed, options.worker, options.keep)
        return
    options.keep.mkdir(parents=True, exist_ok=True)
    bounds = np.linspace(options.first, stop, options.workers + 1).astype(int).tolist()
    with ThreadPoolExecutor(options.workers) as pool:
        jobs = [
            pool.submit(supervised, start, end, options.seed, options.keep)
            for start, end in pairwise(bounds)
        ]
        found = merged([job.result() for job in jobs])
    print(f"{'kind':<12}{'accepted':>10}{'refused':>10}{'failed':>10}")
    for name in (kind.__name__ for kind in KINDS):
        columns = [found["counts"].get(f"{name} {w}", 0) for w in ("accepted", "refused", "failed")]
        print(f"{name:<12}" + "".join(f"{count:>10}" for count in columns))
    print(f"slowest: {found['slowest'][0]:.2f} s, input {found['slowest'][1]}")
    for number, fault in found["failures"][:20]:
        name = KINDS[number % len(KINDS)].__name__
        print(f"\n{name}, {options.keep / f'{number}.bin'}:\n{fault}")
    print(f"{options.inputs} inputs, {len(found['failures'])} failures")
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
