"""What rehearsals cost: the share of a run's time that goes to the small batches which check it.

Trains as users do, and times every turn of the loop, from fetching a batch to the end of its
optimizer step. Rehearsals come before the steps 0, 1, 2, 4, 8 and so on; so a few dozen steps are
enough to know what one costs, and what all of a longer run cost.

    python benchmarks/rehearsals.py --model cnn --steps 260 --threads 1
    python benchmarks/rehearsals.py --model transformer --steps 9 --threads 1
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from step import CASES, CLIP, NOISE_MULTIPLIER, Case, sgd
from torch.utils.data import DataLoader

from lap2.train import PoissonLoader, PrivacyEngine

ASKED = 0.02


def timed(case: Case, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of each rehearsal with all its small batches."""
    model = case.new_model()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=sgd(model),
        data_loader=DataLoader(case.records(20 * case.batch), batch_size=case.batch),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP,
    )
    if not isinstance(loader, PoissonLoader):
        raise TypeError("the engine must sample by itself")
    real: list[float] = []
    rehearsed: list[float] = []
    while len(real) < steps:
        start = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            engine.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            spent, start = time.perf_counter() - start, time.perf_counter()
            rehearsal = loader.piece.rehearsal if loader.piece else None
            if rehearsal is None:
                real.append(spent)
            elif rehearsal.kind == "first":
                rehearsed.append(spent)
            else:
                rehearsed[-1] += spent
            if len(real) == steps:
                break
    return real, rehearsed


def main() -> None:
    parser = argparse.ArgumentParser(description="Time rehearsals beside the steps of a run.")
    parser.add_argument("--model", choices=list(CASES), default="cnn", help="what is trained")
    parser.add_argument("--steps", type=int, default=260, help="steps to take")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--run", type=int, default=1000, help="steps of the run that is asked for")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    timed(CASES[given.model], 1)  # compiled code is loaded by the first step of any kind
    real, rehearsed = timed(CASES[given.model], given.steps)
    step, one = statistics.median(real[1:]), statistics.median(rehearsed[1:])
    count = given.run.bit_length() + 1  # before steps 0, 1, 2, 4, ...
    share = (rehearsed[0] + (count - 1) * one) / (given.run * step)
    print(f"{given.model}, {given.threads} threads, {given.steps} steps")
    print(f"a step                            {1e3 * step:8.1f} ms")
    print(f"the first rehearsal, later ones   {1e3 * rehearsed[0]:8.1f} ms {1e3 * one:8.1f} ms")
    print(f"{count} of them in {given.run} steps: {share:.2%} (asked: {ASKED:.0%})")


if __name__ == "__main__":
    main()
