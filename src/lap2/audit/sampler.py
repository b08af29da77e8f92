"""The sampler audit: draws from the noise that is actually used.

Scale, shape, sign, independence between coordinates and between steps, reuse, tails, and the set of
possible outputs. Every p-value is exact or conservative at every size; together they share one
error probability.
"""

# pyright: basic

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from lap2 import _validate
from lap2.audit.result import Bound, Check, Result, judged
from lap2.audit.statistics import best_event, epsilon_bound
from lap2.audit.support import SUPPORT_ATTACKS
from lap2.noise import Sampler

__all__ = ["audit_sampler"]

Floats = NDArray[np.float64]

_ROW = 64
"""Coordinates of one release in the attack on the support."""
_PARTS, _LEAST_PART = 1024, 4
"""Parts of equal probability whose shares are looked at, and how many numbers each has at least."""
_FINEST = 2.0**-20
"""Of the scale: what is finer is not looked at."""


def audit_sampler(
    sampler: Sampler,
    *,
    scale: float = 1.0,
    size: int = 1000,
    steps: int = 1000,
    releases: int = 2000,
    sensitivity: float | None = None,
    delta: float = 1e-5,
    confidence: float = 0.999,
    dtype: str = "float32",
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Audit a source of Laplace noise of the given scale.

    Formal guarantee:
        If the sampler adds independent Laplace noise, on a grid finer than 2^-20 of the scale that
        is the same whatever the noise is added to, the verdict is "violated" with probability at
        most ``1 - confidence``: three quarters of the error belong to the checks, a quarter to
        the bound on epsilon.

    The bound on epsilon is for one release of 64 coordinates, of which a record moves each by
    ``sensitivity / 8``: epsilon is then at most ``8 sensitivity / scale``, the claim. It comes from
    the attacks on the support, which break naive noise whatever its scale.

    Args:
        sampler: anything with ``add(array, scale)``, which changes the array in place.
        scale: the Laplace scale b.
        size: coordinates in one step.
        steps: how many steps are drawn; each is one call of ``add``.
        releases: how many releases of each secret the attack on the support looks at.
        sensitivity: l2 norm of what a record contributes; a quarter of the scale by default.
        delta: of the bound.
        confidence: of the verdict.
        dtype: of the arrays handed to the sampler: "float32" or "float64".
        progress: called with the number of coordinates drawn since the last call.
    """
    b = _validate.positive("scale", scale)
    size = _validate.integer("size", size, least=4)
    steps = _validate.integer("steps", steps, least=4)
    releases = _validate.integer("releases", releases, least=200)
    norm = b / 4 if sensitivity is None else _validate.positive("sensitivity", sensitivity)
    delta = _validate.probability("delta", delta)
    error = 1 - _validate.open_probability("confidence", confidence)
    kind = np.dtype(_validate.choice("dtype", dtype, ("float32", "float64")))
    report = progress or (lambda _: None)
    noise = np.empty((steps, size))
    for row in noise:
        step = np.zeros(size, dtype=kind)
        sampler.add(step, b)
        row[:] = step
        report(size)
    attack = _SupportAttack(sampler, b, norm / math.sqrt(_ROW), kind, report)
    bounds = attack.bounds(releases // 2, delta, error / 4)
    return judged(
        level="sampler",
        what=(
            f"{steps} steps of {size} coordinates at scale {b:g} in {dtype}; {2 * releases} "
            f"releases of {_ROW} coordinates for each attack on the support"
        ),
        delta=delta,
        confidence=confidence,
        claimed_epsilon=math.sqrt(_ROW) * norm / b,
        bounds=bounds,
        checks=_checks(noise / b, attack.broken),
        check_error=0.75 * error,
        facts={"mean_abs_over_scale": float(np.abs(noise).mean() / b)},
    )


def _checks(x: Floats, broken: int) -> tuple[Check, ...]:
    """All tests of noise in units of its claimed scale, (steps, coordinates).

    Args:
        x: the noise.
        broken: how many numbers of other releases were infinite or undefined.
    """
    in_noise = int(np.count_nonzero(~np.isfinite(x)))
    broken += in_noise
    finite = Check("finite", 0.0 if broken else 1.0, f"{broken} infinite or undefined", "none")
    if in_noise:
        return (finite,)
    size = np.abs(x)
    return (finite, *_marginal(x, size), *_dependence(x, size), _reuse(x))


def _marginal(x: Floats, size: Floats) -> list[Check]:
    """The law of one coordinate: |x| is exponential, its sign a fair coin."""
    count = x.size
    total, positive = float(size.sum()), int((x > 0).sum())
    in_positive = float(size[x > 0].sum())
    # Means of the two halves of the law have a ratio with an F distribution, given their numbers.
    halves, freedom = 1.0, (2 * positive, 2 * (count - positive))
    if all(freedom):
        below = max((total - in_positive) / (count - positive), 1e-300)
        halves = in_positive / positive / below
    largest = float(size.max())
    uniform = np.sort(-np.expm1(-size), axis=None)
    place = np.arange(count)
    distance = float(max((uniform - place / count).max(), ((place + 1) / count - uniform).max()))
    parts, p_of_parts = _evenness(uniform)
    log_below = count * math.log1p(-math.exp(-largest)) if largest > 0 else -math.inf
    return [
        Check(
            "scale",
            _two_sided(stats.gamma.cdf(total, count), stats.gamma.sf(total, count)),
            f"E|x| = {total / count:.5f} b",
            f"1 b within {1 / math.sqrt(count):.1e}",
        ),
        Check(  # Dvoretzky, Kiefer and Wolfowitz, with the constant of Massart (1990)
            "shape",
            min(1.0, 2 * math.exp(-2 * count * distance**2)),
            f"distance {distance:.1e}",
            "Laplace",
        ),
        Check(
            "shape in parts",
            p_of_parts,
            f"{parts} parts, unevenly filled",
            "as even as chance has it",
        ),
        Check(
            "sign",
            float(stats.binomtest(positive, count).pvalue),
            f"{positive / count:.5f} positive",
            "1/2",
        ),
        Check(
            "symmetry",
            # Nothing is known of noise of one sign; that there is but one is the sign's business.
            _two_sided(*(law(halves, *freedom) for law in (stats.f.cdf, stats.f.sf)))
            if all(freedom)
            else 1.0,
            f"positive noise {halves:.5f} times as large",
            "once",
        ),
        Check(
            "largest",
            _two_sided(math.exp(log_below), -math.expm1(log_below)),
            f"max |x| = {largest:.2f} b",
            f"about {math.log(count):.1f} b",
        ),
    ]


def _evenness(uniform: Floats) -> tuple[int, float]:
    """Whether sorted numbers are as even in every part of [0, 1] as uniform ones.

    Between two of them, where the one half way in rank lies is a Beta variate, whatever the two
    are: so the median, the quartiles given the median, and so on, are independent p-values, put
    together as Fisher does. That is exact for any number of them.

    Returns:
        Into how many parts [0, 1] was cut, and the p-value.
    """
    ranks, values = np.array([0, uniform.size + 1]), np.concatenate([[0.0], uniform, [1.0]])
    extremes: list[Floats] = []
    while ranks.size - 1 < _PARTS and np.diff(ranks).min() >= 2 * _LEAST_PART:
        middle = (ranks[:-1] + ranks[1:]) // 2
        low, at, high = values[ranks[:-1]], values[middle], values[ranks[1:]]
        below, above = middle - ranks[:-1], ranks[1:] - middle
        with np.errstate(invalid="ignore"):
            share = (at - low) / (high - low)
        tails = (stats.beta.cdf(share, below, above), stats.beta.sf(share, below, above))
        # Where numbers repeat there is no share: noise on too coarse a grid, or no noise.
        extremes.append(np.nan_to_num(2 * np.minimum(*tails), nan=0.0))
        ranks = np.sort(np.concatenate([ranks, middle]))
    with np.errstate(divide="ignore"):
        far = -2 * float(np.log(np.concatenate(extremes)).sum())
    freedom = 2 * (ranks.size - 2)
    return ranks.size - 1, _two_sided(special.chdtr(freedom, far), special.chdtrc(freedom, far))


def _dependence(x: Floats, size: Floats) -> list[Check]:
    """Pairs that must be independent: neighbouring and distant coordinates, successive steps."""
    half = x.shape[1] // 2
    cuts = {
        "neighbouring coordinates": (np.s_[:, : 2 * half : 2], np.s_[:, 1 : 2 * half : 2]),
        "distant coordinates": (np.s_[:, :half], np.s_[:, half : 2 * half]),
        "successive steps": (np.s_[: x.shape[0] // 2 * 2 : 2], np.s_[1 : x.shape[0] // 2 * 2 : 2]),
    }
    # Normal scores, so that a correlation has Student's law; zero has none.
    tail = np.exp(-np.maximum(size, _FINEST))
    scores = {"size": -special.ndtri(tail), "value": -np.sign(x) * special.ndtri(tail / 2)}
    checks: list[Check] = []
    for name, (first, second) in cuts.items():
        for what, score in scores.items():
            r = float(np.corrcoef(score[first].ravel(), score[second].ravel())[0, 1])
            freedom = score[first].size - 2
            with np.errstate(divide="ignore"):
                t = np.sqrt(freedom) * np.abs(r) / np.sqrt(np.maximum(1 - r * r, 0.0))
            checks.append(
                Check(
                    f"{what} of {name}",
                    2 * float(special.stdtr(freedom, -t)),
                    f"correlation of normal scores {r:+.1e}",
                    "0",
                )
            )
    return checks


def _reuse(x: Floats) -> Check:
    """Whether any two steps begin with the same four numbers."""
    rows = x[:, :4]
    repeated = rows.shape[0] - np.unique(rows, axis=0).shape[0]
    pairs = rows.shape[0] ** 2 / 2
    # Two numbers on a grid of g agree with probability g / 4 at most; float32 is no coarser.
    p_value = min(1.0, pairs * 2.0 ** (-20 * 4)) if repeated else 1.0
    return Check("reuse", p_value, f"{repeated} steps repeated", "none")


def _two_sided(lower: Any, upper: Any) -> float:
    return min(1.0, 2 * min(float(lower), float(upper)))


class _SupportAttack:
    """Releases of two secrets, 0 and another, and what tells them apart."""

    def __init__(
        self,
        sampler: Sampler,
        b: float,
        secret: float,
        kind: np.dtype,
        report: Callable[[int], None],
    ) -> None:
        self._sampler, self._b, self._kind, self._report = sampler, b, kind, report
        self.broken = 0
        """How many numbers were infinite or undefined."""
        # Rounded to float32, so that the attacks know the secret as the sampler was given it.
        self._secret = float(np.float32(secret))

    def bounds(self, half: int, delta: float, error: float) -> tuple[Bound, ...]:
        """Lower bounds on epsilon; each attack's event is chosen on a half of its own."""
        share = error / len(SUPPORT_ATTACKS)
        found: list[Bound] = []
        for name, attack in SUPPORT_ATTACKS.items():
            event = best_event(
                *(self._scores(attack, secret, half) for secret in (0.0, self._secret)),
                delta=delta,
                error=share,
            )
            zero, moved = (
                event.count(self._scores(attack, secret, half)) for secret in (0.0, self._secret)
            )
            common, rare = (zero, moved) if event.added else (moved, zero)
            bound = epsilon_bound(common, half, rare, half, delta=delta, error=share)
            found.append(Bound(f"support: {name}", float(bound)))
        return tuple(found)

    def _scores(self, attack: Callable[..., Floats], secret: float, count: int) -> Floats:
        rows = np.full((count, _ROW), secret, dtype=self._kind)
        self._sampler.add(rows, self._b)
        self._report(rows.size)
        self.broken += int(np.count_nonzero(~np.isfinite(rows)))
        outputs = np.nan_to_num(rows.astype(np.float64), posinf=1e30, neginf=-1e30)
        return attack(outputs, self._secret, self._b)
