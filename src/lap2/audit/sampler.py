"""The sampler audit: draws from the noise that is actually used.

Scale, shape, sign, independence between coordinates and between steps, reuse, tails, and the set of
possible outputs. Every p-value is exact or conservative at the sizes used here; together they share
one error probability.
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
    return judged(
        level="sampler",
        what=(
            f"{steps} steps of {size} coordinates at scale {b:g} in {dtype}; {2 * releases} "
            f"releases of {_ROW} coordinates for each attack on the support"
        ),
        delta=delta,
        confidence=confidence,
        claimed_epsilon=math.sqrt(_ROW) * norm / b,
        bounds=attack.bounds(releases // 2, delta, error / 4),
        checks=_checks(noise / b),
        check_error=0.75 * error,
        facts={"mean_abs_over_scale": float(np.abs(noise).mean() / b)},
    )


def _checks(x: Floats) -> tuple[Check, ...]:
    """All tests of noise in units of its claimed scale, (steps, coordinates)."""
    broken = int(np.count_nonzero(~np.isfinite(x)))
    finite = Check("finite", 0.0 if broken else 1.0, f"{broken} infinite or undefined", "none")
    if broken:
        return (finite,)
    size = np.abs(x)
    return (finite, *_marginal(x, size), *_dependence(x, size), _reuse(x))


def _marginal(x: Floats, size: Floats) -> list[Check]:
    """The law of one coordinate: |x| is exponential, its sign a fair coin."""
    count = x.size
    total, positive = float(size.sum()), int((x > 0).sum())
    in_positive = float(size[x > 0].sum())
    # Means of the two halves of the law have a ratio with an F distribution, given their numbers.
    halves = (in_positive / max(1, positive)) / max(
        (total - in_positive) / max(1, count - positive), 1e-300
    )
    bins = np.bincount(np.minimum((-np.expm1(-size) * 1000).astype(int), 999).ravel())
    largest = float(size.max())
    shape = stats.kstest(size.ravel(), "expon", method="asymp")
    log_below = count * math.log1p(-math.exp(-largest)) if largest > 0 else -math.inf
    return [
        Check(
            "scale",
            _two_sided(stats.gamma.cdf(total, count), stats.gamma.sf(total, count)),
            f"E|x| = {total / count:.5f} b",
            f"1 b within {1 / math.sqrt(count):.1e}",
        ),
        Check("shape", float(shape.pvalue), f"distance {shape.statistic:.1e}", "Laplace"),
        Check(
            "shape in 1000 bins",
            float(stats.chisquare(np.pad(bins, (0, 1000 - bins.size))).pvalue),
            "a chi-square of bins of equal probability",
            "999 on average",
        ),
        Check(
            "sign",
            float(stats.binomtest(positive, count).pvalue),
            f"{positive / count:.5f} positive",
            "1/2",
        ),
        Check(
            "symmetry",
            _two_sided(
                *(
                    law(halves, 2 * max(1, positive), 2 * max(1, count - positive))
                    for law in (stats.f.cdf, stats.f.sf)
                )
            ),
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


def _dependence(x: Floats, size: Floats) -> list[Check]:
    """Pairs that must be independent: neighbouring and distant coordinates, successive steps."""
    half = x.shape[1] // 2
    cuts = {
        "neighbouring coordinates": (np.s_[:, : 2 * half : 2], np.s_[:, 1 : 2 * half : 2]),
        "distant coordinates": (np.s_[:, :half], np.s_[:, half : 2 * half]),
        "successive steps": (np.s_[: x.shape[0] // 2 * 2 : 2], np.s_[1 : x.shape[0] // 2 * 2 : 2]),
    }
    uniform_size = 0.5 - np.exp(-size)
    uniform = np.sign(x) * (1 - np.exp(-size)) / 2
    checks: list[Check] = []
    for name, (first, second) in cuts.items():
        for what, u in (("size", uniform_size), ("value", uniform)):
            # Bounded variates and very many pairs: as good as normal.
            correlation = float(np.corrcoef(u[first].ravel(), u[second].ravel())[0, 1])
            z = correlation * math.sqrt(u[first].size)
            checks.append(
                Check(
                    f"{what} of {name}",
                    2 * float(special.ndtr(-abs(z))),
                    f"rank correlation {correlation:+.1e}",
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
        outputs = np.nan_to_num(rows.astype(np.float64), posinf=1e30, neginf=-1e30)
        return attack(outputs, self._secret, self._b)
