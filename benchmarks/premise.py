"""Does one record ever move the released sum by more than the clip? A search for one that does.

Each trial makes a model, a batch and a record from a few numbers, its genes, trains one step on the
batch with and without the record, and takes the distance of the sums to which noise would have been
added. Random genes come first; then those that moved a sum the farthest are changed a little, again
and again. It ends with 1 if a distance exceeds C (1 + rho), and prints the genes that did it.

    python benchmarks/premise.py --trials 2000 --seconds 600
    python benchmarks/premise.py --genes '{"family": "linear", ...}'

A model may round the gradient of one record differently when the batch has another size, which is
an assumption of its own. So both sums are made of the same gradients: what every record gave to
every layer in the batch is given again without the record. How much farther the model's own
rounding moves the sum is in a column of its own.
"""

import argparse
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from premise_cases import FAMILIES, Case, Genes, case_of, mutated, random_genes
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lap2.train import BookkeepingError, PrivacyEngine, recorder

DELTA = 1e-5
UNCLIPPED = 1e150
CLIPS = (1e-22, 1e22)


class Nothing:
    """Noise that is none; keeps the sums it was to be added to."""

    is_secure = False

    def added_sensitivity(self, _scale: float, _size: int) -> float:
        """None."""
        return 0.0

    def add(self, array: list[Tensor], _scale: float) -> float:
        """Add nothing."""
        self.sums = torch.cat([t.detach().double().flatten() for t in array])
        return 0.0


class Given:
    """What every record of a batch gave to every layer, to be given again in another batch."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], list[Tensor]] = {}
        self.scale: float | None = None
        self.is_kept = False

    @contextlib.contextmanager
    def hold(self, engine: PrivacyEngine, records: list[int]) -> Iterator[None]:
        """Within it, a step keeps or gives again what these records give."""
        receive, held = recorder._receive, engine._step.recorder._records  # pyright: ignore

        def instead(record: Any, grad: Tensor) -> None:
            use = next(i for i, other in enumerate(held) if other is record)
            given = [grad, *(t for t in record.inputs if len(t) == len(records))]
            if not self.is_kept:
                for place, i in enumerate(records):
                    self.rows[use, i] = [t[place].clone() for t in given]
                receive(record, grad)
                return
            found = zip(*(self.rows[use, i] for i in records), strict=True)
            again = [
                torch.empty_like(t).copy_(torch.stack(r)) for t, r in zip(given, found, strict=True)
            ]
            record.rule = _swapped(record.rule, {id(t): new for t, new in zip(given, again)})  # noqa: B905
            receive(record, again[0])

        recorder._receive = instead
        try:
            yield
        finally:
            recorder._receive = receive


def _swapped(value: Any, found: dict[int, Tensor]) -> Any:
    """The same, with some tensors in place of others."""
    if isinstance(value, partial):
        arguments = {name: _swapped(v, found) for name, v in value.keywords.items()}
        return partial(value.func, *_swapped(value.args, found), **arguments)
    if type(value) is tuple:
        return tuple(_swapped(v, found) for v in value)
    return found.get(id(value), value)


class Release(NamedTuple):
    """The sum of each group of parameters, and rho."""

    sums: list[np.ndarray]
    rho: float


def release(
    genes: Genes, case: Case, records: list[int], clips: list[float], given: Given | None = None
) -> Release:
    """One step on these records, without noise."""
    model, noise = case.make(), Nothing()
    params = [p for p in model.parameters() if p.requires_grad]
    parts = [{"params": [p]} for p in params] if genes["each_its_clip"] else params
    clips = clips * (len(parts) // len(clips)) if genes["each_its_clip"] else clips
    data = TensorDataset(torch.tensor(records), *(t[records] for t in (*case.inputs, case.grads)))
    engine = PrivacyEngine(sampler=noise)
    kind = genes["reduction"]
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(parts, lr=0.0),
        data_loader=DataLoader(data, len(records)),
        noise_multiplier=1.0,
        max_grad_norm=clips if genes["each_its_clip"] else clips[0],
        mechanism=genes["mechanism"],
        tau=1e6 if genes["turned"] and genes["mechanism"] != "gaussian" else None,
        loss_reduction="sum" if kind == "sum" else "mean",
        max_physical_batch_size=None if kind == "mean" else round(2 ** genes["piece"]),
        rehearse=False,
    )
    step: Any = engine._step
    if given is not None and kind == "mean":
        _keep_scale(step.recorder, given)
    casts = genes["precision"] == "autocast"
    for ids, *batch, grads in loader:
        with given.hold(engine, ids.tolist()) if given else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                losses = (model(*batch) * grads).flatten(1).sum(1)
            if kind == "records":
                engine.backward(losses)
            else:
                (losses.mean() if kind == "mean" else losses.sum()).backward()
        optimizer.step()
    sums = np.split(noise.sums.numpy(), np.cumsum(step._plan.sizes)[:-1])
    return Release(sums, engine.statement(DELTA).rounding)


def _keep_scale(held: Any, given: Given) -> None:
    """Gradients that are given again have a mean over the batch they come from in them."""
    collect = held.collect

    def instead(**options: Any) -> Any:
        found = collect(**options)
        given.scale = given.scale or found.scale
        return found._replace(scale=given.scale)

    held.collect = instead


def distance(one: np.ndarray, other: np.ndarray, power: int) -> float:
    """In extended precision, where squares neither vanish nor overflow."""
    found = np.abs(one.astype(np.longdouble) - other)
    return float(found.sum() if power == 1 else np.sqrt((found * found).sum()))


class Trial(NamedTuple):
    """How far one record moved the release, in clips, and why.

    Attributes:
        moved: the sum, on the same gradients.
        own: what the record contributes by itself.
        rest: the others' contributions, by where they are in the batch and how many there are.
        model: the others, by the model's own rounding.
        rho: the share of the clip that is accounted for rounding.
        refused: why there was no step.
    """

    moved: float = 0.0
    own: float = 0.0
    rest: float = 0.0
    model: float = 0.0
    rho: float = 0.0
    refused: str = ""

    @property
    def is_violation(self) -> bool:
        """Three sums are in ``rest``, each of which may be wrong by half of rho.

        If it is more, a record of another direction would move the sum too far.
        """
        return not (self.moved <= 1 + self.rho and self.rest <= 1.5 * self.rho)


def clips_of(genes: Genes, norms: list[float]) -> list[float]:
    """A clip for each group, mostly with regard to the norm of the record."""
    u = genes["clip"]
    near = 1 + math.copysign(2.0 ** -(1 + 30 * abs(u)), u)
    factor = {"near": near, "relative": 10 ** (-8 * abs(u))}.get(genes["clip_is"])
    ordinary = [n if 0 < n < math.inf else 1.0 for n in norms]
    wanted = [10 ** (22 * u) if factor is None else n * factor for n in ordinary]
    return [min(CLIPS[1], max(CLIPS[0], clip)) for clip in wanted]


def trial(genes: Genes) -> Trial:
    """Train with and without the record, on the same gradients, and on the model's own."""
    case, given = case_of(genes), Given()
    everyone = list(range(len(case.grads)))
    without = [i for i in everyone if i != case.record]
    power = 1 if genes["mechanism"] == "laplace-l1" else 2
    try:
        norms = release(genes, case, [case.record], [UNCLIPPED]).sums
        clips = clips_of(genes, [distance(s, 0 * s, power) for s in norms])
        full = release(genes, case, everyone, clips, given)
        given.is_kept = True
        alone = release(genes, case, [case.record], clips, given).sums
        nothing = Release([0 * s for s in full.sums], 0.0)
        same = release(genes, case, without, clips, given) if without else nothing
        own = release(genes, case, without, clips) if without else nothing
    except (ValueError, BookkeepingError) as error:
        return Trial(refused=str(error))

    def farthest(one: list[np.ndarray], other: list[np.ndarray]) -> float:
        each = [distance(a, b, power) / c for a, b, c in zip(one, other, clips, strict=True)]
        return math.inf if any(math.isnan(d) for d in each) else max(each)

    return Trial(
        moved=farthest(full.sums, same.sums),
        own=farthest(alone, nothing.sums),
        rest=farthest([a - b for a, b in zip(full.sums, alone, strict=True)], same.sums),
        model=farthest(same.sums, own.sums),
        rho=max(full.rho, same.rho),
    )


class Found(NamedTuple):
    """A trial and its genes."""

    genes: Genes
    trial: Trial


def search(
    families: Sequence[str], *, trials: int, seconds: float, seed: int
) -> dict[str, list[Found]]:
    """All trials, by family: random ones first, then changes of the worst while there is time.

    The worst may be so by 1e-12 clips only, but that is how it climbs.
    """
    rng = random.Random(seed)
    found: dict[str, list[Found]] = {}
    kinds = [(f, m) for f in families for m in ("laplace", "laplace-l1")]

    def add(genes: Genes) -> Found:
        name = genes["family"] + (", l1" if genes["mechanism"] == "laplace-l1" else "")
        found.setdefault(name, []).append(Found(genes, trial(genes)))
        return found[name][-1]

    for number in range(trials):
        family, mechanism = kinds[number % len(kinds)]
        add(random_genes(rng, family=family, mechanism=mechanism))
    stop = time.monotonic() + seconds
    goals = (lambda f: f.trial.own, lambda f: f.trial.rest)
    worst = {
        (name, goal): sorted(tried, key=goal)[-2:]
        for name, tried in found.items()
        for goal in goals
    }
    while time.monotonic() < stop:
        name, goal = rng.choice(list(worst))
        place = rng.randrange(len(worst[name, goal]))
        parent = worst[name, goal][place]
        child = add(mutated(parent.genes, rng))
        if goal(child) >= goal(parent):
            worst[name, goal][place] = child
    return found


def report(found: dict[str, list[Found]]) -> bool:
    """Print the table, and the worst genes of each family that fails; whether none does."""
    print("How far one record moved the released sum, in clips; of that, how far the others moved;")
    print("and how far the model's own rounding moved them")
    print(f"{'family':<20}{'trials':>8}{'refused':>9}{'worst':>16}{'others':>10}{'model':>10}")
    for name, tried in found.items():
        moved, rest, model = (
            max(getattr(f.trial, part) for f in tried) for part in ("moved", "rest", "model")
        )
        refused = sum(bool(f.trial.refused) for f in tried)
        worst = f"1 {moved - 1:+.2e}" if 0.5 < moved < 1.5 else f"{moved:.3g}"
        mark = "  too far" if any(f.trial.is_violation for f in tried) else ""
        print(f"{name:<20}{len(tried):>8}{refused:>9}{worst:>16}{rest:>10.1e}{model:>10.1e}{mark}")
    every = [f.trial for tried in found.values() for f in tried]
    print(f"{len(every)} trials; rho is at most {max(t.rho for t in every):.3e}")
    for name, tried in found.items():
        failed = [f for f in tried if f.trial.is_violation]
        if failed:
            worst = max(failed, key=lambda f: max(f.trial.moved, 1 + f.trial.rest))
            print(f"{name}: {worst.trial}\n{json.dumps(worst.genes)}")
    return not any(t.is_violation for t in every)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=2200)
    parser.add_argument("--seconds", type=float, default=120, help="to climb from the worst")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=FAMILIES)
    parser.add_argument("--genes", type=json.loads, help="of one trial, to repeat it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.genes:
        only = trial(args.genes)
        print(only)
        return int(only.is_violation)
    found = search(args.family, trials=args.trials, seconds=args.seconds, seed=args.seed)
    return 0 if report(found) else 1


if __name__ == "__main__":
    sys.exit(main())
