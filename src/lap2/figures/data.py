"""What the figures show, as numbers: no drawing, NumPy only."""

import csv
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lap2.accountant import Accountant, Answer
from lap2.bracket import lower_epsilon
from lap2.calibration import calibrate_noise
from lap2.clip_search import SingleGroup
from lap2.mechanism import (
    Gaussian,
    Laplace,
    LaplaceL1,
    MajorizedLaplace,
    NotAGuaranteeWarning,
    PublishedLaplace,
)

Floats = NDArray[np.float64]
Scale = Literal["full", "small"]

EXACT = "Laplace, exact"
GAUSSIAN = "Gaussian"
MAJORIZED = "Laplace, majorized"
PUBLISHED = "Laplace, published (not a guarantee)"
L1 = "Laplace, l1 clip"
LOWER = "lower bound (one gradient)"

_MECHANISMS: dict[str, Callable[[float, int], SingleGroup]] = {
    EXACT: Laplace,
    GAUSSIAN: lambda noise, _: Gaussian(noise),
    MAJORIZED: MajorizedLaplace,
    PUBLISHED: PublishedLaplace,
    L1: lambda noise, _: LaplaceL1(noise),
}


@dataclass(frozen=True)
class Curve:
    """Points of one curve in one panel, with further columns by name."""

    panel: str
    name: str
    x: Floats
    y: Floats
    more: Mapping[str, Floats] = field(default_factory=dict[str, Floats])


@dataclass(frozen=True)
class Sheet:
    """All curves of a figure, and the settings they share in words."""

    curves: Sequence[Curve]
    settings: str

    def panel(self, name: str) -> list[Curve]:
        """The curves of one panel."""
        return [curve for curve in self.curves if curve.panel == name]


def write_csv(curves: Iterable[Curve], path: Path) -> None:
    """Write all points in long form: panel, curve, x, y and the further columns, 9 digits."""
    rows = list(curves)
    columns = sorted({name for curve in rows for name in curve.more})
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["panel", "curve", "x", "y", *columns])
        for curve in rows:
            numbers = [curve.x, curve.y, *(curve.more.get(name) for name in columns)]
            for k in range(curve.x.size):
                cells = ["" if column is None else f"{column[k]:.9g}" for column in numbers]
                writer.writerow([curve.panel, curve.name, *cells])


@dataclass(frozen=True)
class Run:
    """A training run but for its noise; the default is the one of docs/theory.md, section 9."""

    dimension: int = 26_010
    sampling_prob: float = 0.0043
    steps: int = 5860
    delta: float = 1e-5

    @classmethod
    def of(cls, scale: Scale) -> "Run":
        """The default run; the small one has 100 coordinates, for which all bounds are quick."""
        return cls() if scale == "full" else cls(dimension=100)

    @property
    def settings(self) -> str:
        """The run in words, with the mathematics as matplotlib writes it."""
        power = round(math.log10(self.delta))
        return (
            f"n = {self.dimension:,} coordinates, sampling probability {self.sampling_prob:g}, "
            f"T = {self.steps:,} steps, $\\delta = 10^{{{power}}}$"
        )

    def accountant(self, name: str, noise: float) -> Accountant:
        """What the run spends, by the mechanism of that name."""
        with warnings.catch_warnings():
            # Every label of this curve says so.
            warnings.simplefilter("ignore", NotAGuaranteeWarning)
            step = _MECHANISMS[name](noise, self.dimension)
        return Accountant().compose(step, sampling_prob=self.sampling_prob, steps=self.steps)

    def answer(self, name: str, noise: float) -> Answer:
        """The epsilon at this run's delta."""
        return self.accountant(name, noise).answer(delta=self.delta)

    def noise(self, name: str, epsilon: float) -> float:
        """The least noise multiplier for epsilon at this run's delta."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotAGuaranteeWarning)
            return calibrate_noise(
                _MECHANISMS[name](1.0, self.dimension),
                epsilon=epsilon,
                delta=self.delta,
                sampling_prob=self.sampling_prob,
                steps=self.steps,
            ).noise_multiplier

    def trade_off(
        self, name: str, ends: tuple[float, float], points: int
    ) -> tuple[Floats, Floats, Floats]:
        """Epsilon, the noise multiplier it needs, and the best order, between two epsilons.

        Only the noise at the ends is calibrated; between them the noise is a geometric grid, whose
        epsilons are on the same curve and cost far less to find.
        """
        low, high = ends
        noise = np.geomspace(self.noise(name, high), self.noise(name, low), points)
        answers = [self.answer(name, b) for b in noise.tolist()]
        epsilon = np.array([answer.epsilon for answer in answers])
        return epsilon, noise, np.array([answer.order for answer in answers])


def kept_by_l1_clipping(dimension: int) -> float:
    """The l2 norm left of a random unit vector scaled down to the mean l1 norm 1.

    Exactly ``1 / E|u|_1 = sqrt(pi) Gamma((n + 1) / 2) / (n Gamma(n / 2))``, about
    ``sqrt(pi / (2 n))``.
    """
    n = dimension
    log_gain = math.lgamma((n + 1) / 2) - math.lgamma(n / 2)
    return math.sqrt(math.pi) / n * math.exp(log_gain)


def log_volumes(dimension: int) -> tuple[float, float]:
    """Logarithms of the volumes of the unit balls of l1, ``2^n / n!``, and l2."""
    n = dimension
    l1 = n * math.log(2) - math.lgamma(n + 1)
    return l1, n / 2 * math.log(math.pi) - math.lgamma(n / 2 + 1)


def volume(scale: Scale) -> Sheet:
    """The unit balls of l1 and l2: their volumes, and what l1 clipping leaves."""
    few = list(range(1, 101, 1 if scale == "full" else 20))
    many = _integers(1, 10**6, 61 if scale == "full" else 7)
    logs = np.array([log_volumes(n) for n in few]) / math.log(10)
    x, wide = np.array(few, dtype=float), np.array(many, dtype=float)
    radius = np.array([math.exp((l1 - l2) / n) for n in many for l1, l2 in [log_volumes(n)]])
    kept = np.array([kept_by_l1_clipping(n) for n in many])
    curves = [
        Curve("volume", "l2 ball", x, logs[:, 1]),
        Curve("volume", "l1 ball", x, logs[:, 0]),
        Curve("length", "l2 clip", wide, np.ones_like(wide)),
        Curve("length", "l1 clip", wide, kept),
        Curve("length", "radius at equal volume", wide, radius),
    ]
    return Sheet(curves, "both balls have radius 1")


def noise_vs_epsilon(scale: Scale) -> Sheet:
    """Calibrated noise multipliers against epsilon, with the best orders."""
    run, curves = Run.of(scale), list[Curve]()
    for panel, ends in (("tight", (0.01, 0.5)), ("moderate", (0.5, 10.0))):
        for name, points in _points(scale, fine=15, coarse=9):
            epsilon, noise, order = run.trade_off(name, ends, points)
            curves.append(Curve(panel, name, epsilon, noise, {"order": order}))
    return Sheet(curves, run.settings)


def privacy_walls(scale: Scale) -> Sheet:
    """How fast a larger budget saves noise, and delta against epsilon at noise multiplier 4."""
    run, curves = Run.of(scale), list[Curve]()
    for prob in (1e-3, 1e-2, 1e-1):
        run = replace(run, sampling_prob=prob)
        more = {"sampling_prob": prob}
        for name, points in _points(scale, fine=49, coarse=29):
            x, slope = _slope(run, name, points)
            curves.append(Curve("slope", name, x, slope, _constant(more, x)))
            accountant = run.accountant(name, 4.0)
            most = accountant.get_epsilon(1e-12)
            x = np.geomspace(max(accountant.get_epsilon(0.3), most / 50), most, points // 2)
            delta = np.array([accountant.get_delta(epsilon) for epsilon in x.tolist()])
            curves.append(Curve("delta", name, x, delta, _constant(more, x)))
    return Sheet(curves, f"n = {run.dimension:,} coordinates, T = {run.steps:,} steps")


def _slope(run: Run, name: str, points: int) -> tuple[Floats, Floats]:
    """``|d log noise / d log epsilon|`` by epsilon, each over a doubling of epsilon.

    The best order is nearly always an integer, so the curve has a kink wherever it changes; over
    less than a doubling the kinks are all one sees.
    """
    half = math.log(2) / 2
    epsilon, noise, _ = run.trade_off(name, (0.1 * math.exp(-half), 20.0 * math.exp(half)), points)
    log_epsilon, log_noise = np.log(epsilon[::-1]), np.log(noise[::-1])
    x = np.linspace(math.log(0.1), math.log(20.0), 24)
    below, above = (np.interp(x + side, log_epsilon, log_noise) for side in (-half, half))
    return np.exp(x), (below - above) / (2 * half)


def clip_vs_epsilon(scale: Scale) -> Sheet:
    """The largest clip that noise of scale 1 covers, and the dense gradients that fit in it."""
    run, curves = Run.of(scale), list[Curve]()
    for name, points in [*_points(scale, fine=15, coarse=15), (L1, 15 if scale == "full" else 5)]:
        epsilon, noise, _ = run.trade_off(name, (0.1, 10.0), points)
        fits = kept_by_l1_clipping(run.dimension) if name == L1 else 1.0
        curves.append(Curve("clip", name, epsilon, 1 / noise))
        curves.append(Curve("dense gradient", name, epsilon, fits / noise))
    return Sheet(curves, run.settings)


def bounds(scale: Scale) -> Sheet:
    """Four bounds on epsilon and the lower bound against the noise multiplier."""
    run = Run.of(scale)
    noise = np.geomspace(0.3, 16.0, 37 if scale == "full" else 5)
    grid = 2**19 if scale == "full" else 2**14
    found = {
        name: np.array([run.answer(name, b).epsilon for b in noise.tolist()])
        for name in (MAJORIZED, GAUSSIAN, EXACT, PUBLISHED)
    }
    found[LOWER] = np.array(
        [lower_epsilon(run.accountant(EXACT, b), run.delta, points=grid) for b in noise.tolist()]
    )
    curves = [
        Curve(panel, name, noise, epsilon / below)
        for panel, below in (("epsilon", np.ones_like(noise)), ("ratio", found[LOWER]))
        for name, epsilon in found.items()
    ]
    return Sheet(curves, run.settings)


def regimes(scale: Scale) -> Sheet:
    """Standard deviation of calibrated Laplace noise over Gaussian's: one curve per step count."""
    dimensions = _integers(1, 10**6, 25 if scale == "full" else 3)
    counts = _integers(1, 10**4, 17 if scale == "full" else 3)
    curves: list[Curve] = []
    for epsilon, prob in itertools.product((1.0, 4.0), (0.01, 1.0)):
        panel = f"epsilon = {epsilon:g}, sampling_prob = {prob:g}"
        for steps in counts:
            sigma = Run(1, prob, steps).noise(GAUSSIAN, epsilon)
            scales = [Run(n, prob, steps).noise(EXACT, epsilon) for n in dimensions]
            x, ratio = np.array(dimensions, dtype=float), math.sqrt(2) / sigma * np.array(scales)
            more = {"epsilon": epsilon, "sampling_prob": prob, "steps": float(steps)}
            curves.append(Curve(panel, f"T = {steps}", x, ratio, _constant(more, x)))
    return Sheet(curves, r"$\delta = 10^{-5}$, both calibrated to the same $(\varepsilon, \delta)$")


def _points(scale: Scale, *, fine: int, coarse: int) -> list[tuple[str, int]]:
    """Three bounds and how many points each gets: the published one is slow, and smooth."""
    if scale == "small":
        fine = coarse = 5
    return [(GAUSSIAN, fine), (EXACT, fine), (PUBLISHED, coarse)]


def _constant(more: Mapping[str, float], like: Floats) -> dict[str, Floats]:
    return {name: np.full_like(like, value) for name, value in more.items()}


def _integers(first: int, last: int, count: int) -> Sequence[int]:
    """About ``count`` distinct integers, geometrically spaced."""
    return sorted({round(value) for value in np.geomspace(first, last, count).tolist()})
