"""The other side of the answer: a lower bound on the epsilon of everything composed.

The accountant's upper bound holds for every gradient. Here one gradient that a record can have, of
full norm and with equal coordinates, is followed to the end: the distribution of its privacy
loss yields an epsilon that the mechanism does not beat. The truth lies between the two.

In the notation of docs/theory.md, section 1, Q is the law of a release without the record, P with
the record in the sample and ``R = (1 - zeta) Q + zeta P``. The loss is the logarithm of the
likelihood ratio of R to Q (adding the record) or of Q to R (removing it), distributed as under the
first of the two, and ``delta(epsilon) = E[(1 - exp(epsilon - loss))_+]``. Whatever is done to make
that computable can only lower it, before composition or after: merging outcomes, even at random
(post-processing); leaving out probability under both laws; once sampling is accounted for, lowering
a loss or the probability under the first law alone; subtracting a bound on a numerical error.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lap2 import _validate
from lap2.accountant import Accountant
from lap2.divergence import ratio
from lap2.mechanism import (
    Gaussian,
    Laplace,
    LaplaceL1,
    MajorizedLaplace,
    Mechanism,
    PublishedLaplace,
)

__all__ = ["Bracket", "bracket", "lower_epsilon"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_EPS = 2.0**-52
_MOST_COORDINATES = 2**20
"""A record's gradient may be confined to this many coordinates, whatever the dimension."""
_ATOMS = 4096
"""Of one unsampled release at most this many different losses are kept."""
_NEGLIGIBLE = 1e-36
"""Outcomes less probable than this under P and under Q are left out."""
_OUTSIDE = 1e-10
"""Tilted probability of a total loss outside the window, to choose the window by."""


@dataclass(frozen=True)
class Bracket:
    """At ``delta``, the epsilon of everything composed is between ``lower`` and ``upper``.

    Formal guarantee:
        ``upper`` is a proven bound for every gradient; ``is_guarantee`` speaks of it, and is
        always true because a release described by a looser or an unproven bound is accounted as
        :class:`~lap2.Laplace`. ``lower`` holds for one gradient, numerical errors included: no
        valid analysis can report less.
    """

    lower: float
    upper: float
    delta: float
    is_guarantee: bool = True


def bracket(accountant: Accountant, delta: float) -> Bracket:
    """A lower and an upper bound on the epsilon of everything ``accountant`` has composed.

    >>> import lap2
    >>> step = lap2.Laplace(noise_multiplier=1.0, dimension=26010)
    >>> accountant = lap2.Accountant().compose(step, sampling_prob=0.0043, steps=5860)
    >>> both = bracket(accountant, delta=1e-5)
    >>> round(both.lower, 2), round(both.upper, 2)
    (1.77, 1.97)
    """
    lower = lower_epsilon(accountant, delta)
    exact = Accountant()
    for entry in accountant.ledger:
        step = entry.mechanism
        if isinstance(step, (MajorizedLaplace, PublishedLaplace)):
            step = Laplace(step.noise_multiplier, step.dimension)
        exact.compose(step, sampling_prob=entry.sampling_prob, steps=entry.steps)
    upper = exact.get_epsilon(delta)
    if not lower <= upper:
        raise RuntimeError(
            f"internal error: the lower bound {lower!r} is above the upper bound {upper!r} "
            f"at delta={delta!r} for {accountant.ledger!r}"
        )
    return Bracket(lower, upper, float(delta))


def lower_epsilon(accountant: Accountant, delta: float, *, points: int = 2**18) -> float:
    """An epsilon that everything composed does not beat at ``delta``: a lower bound.

    Args:
        accountant: what was released; of its descriptions, :class:`~lap2.Joint` is refused.
        delta: strictly between 0 and 1.
        points: size of the grid of total losses, rounded up to a power of two. The more, the
            higher the bound; the default loses less than 0.1% in the regime of training.
    """
    delta = _validate.open_probability("delta", delta)
    size = 1 << (_validate.integer("points", points, least=2**12) - 1).bit_length()
    counts: dict[tuple[float, int | float, float], int] = {}
    for entry in accountant.ledger:
        key = (*_worst_gradient(entry.mechanism), entry.sampling_prob)
        counts[key] = counts.get(key, 0) + entry.steps
    log_hidden = 0.0
    adding: list[_Releases] = []
    for (longest, n, zeta), count in counts.items():
        if longest == math.inf:
            log_hidden += count * (math.log1p(-zeta) if zeta < 1 else -math.inf)
        elif zeta > 0 and longest > 1e-6:  # with more noise than that, the release is ignored
            # A gradient may be shorter than the clip, so that no loss leaves the range of floats.
            rho = min(longest, max(16.0, 300 / math.sqrt(n)))
            one = _gaussian(rho) if n == math.inf else _laplace(rho, min(int(n), _MOST_COORDINATES))
            adding.append(_sampled(one, zeta, count))
    if -math.expm1(log_hidden) > delta:  # that a record is seen without noise
        return math.inf
    removing = [_exchanged(releases) for releases in adding]
    # What leaves the range of floats makes the error infinite or undefined, and shows nothing.
    with np.errstate(over="ignore", invalid="ignore"):
        return max(_epsilon(r, delta, size) if r else 0.0 for r in (adding, removing))


def _worst_gradient(mechanism: Mechanism) -> tuple[float, int | float]:
    """``rho`` and over how many coordinates it is spread; infinity stands for normal noise.

    To its loss that of Laplace noise converges: some finite dimension comes arbitrarily close.
    """
    match mechanism:
        case Laplace() | MajorizedLaplace() | PublishedLaplace():
            return ratio(mechanism.noise_multiplier), mechanism.dimension
        case LaplaceL1():
            return ratio(mechanism.noise_multiplier), 1
        case Gaussian():
            return ratio(mechanism.noise_multiplier), math.inf
        case _:
            raise TypeError(
                "mechanism must be Laplace, MajorizedLaplace, PublishedLaplace, LaplaceL1 or "
                f"Gaussian to have a lower bound, got {mechanism!r}"
            )


@dataclass(frozen=True)
class _Releases:
    """``count`` releases alike: possible losses of one, increasing, and their probabilities.

    The rounding errors are at most ``loss_error``, and relatively at most ``mass_error``.
    """

    loss: Floats
    mass: Floats
    loss_error: float = 0.0
    mass_error: float = 0.0
    count: int = 1

    def log_moment(self, order: float) -> float:
        """``count * log E[exp(order * loss)]``."""
        exponent = order * self.loss
        top = float(exponent.max())
        return self.count * (top + math.log(float(self.mass @ np.exp(exponent - top))))


@lru_cache(maxsize=64)
def _gaussian(rho: float) -> _Releases:
    """The loss of N(rho, 1) against N(0, 1), seen through narrow bins: a lower bound."""
    edges = np.linspace(-13.0, rho + 13.0, _ATOMS + 1)

    def masses(z: Floats) -> Floats:
        above, below = (
            np.array([math.erfc(t) / 2 for t in (side * math.sqrt(0.5) * z).tolist()])
            for side in (1, -1)
        )
        return np.where(z[1:] > 0, -np.diff(above), np.diff(below))

    # Rounding of the edges and of the tails: the probability of a bin is good to 1e-12.
    mass = masses(edges - rho)
    return _Releases(np.log(mass / masses(edges)), mass, loss_error=4e-12, mass_error=4e-12)


@lru_cache(maxsize=64)
def _laplace(rho: float, n: int) -> _Releases:
    """The loss of n coordinates with the shift ``x = rho / sqrt(n)`` each: a lower bound.

    A coordinate z has the loss -x below 0, x above x, and ``2 z - x`` between, where it is seen
    through m bins of width w: the bin (a, a + w) has the loss ``2 a + w - x``, exactly. So all
    losses are on a lattice of spacing w, and so are their sums. Of n the leading six bits are used.
    """
    doublings = max(0, n.bit_length() - 6)
    first = n >> doublings
    x = rho / math.sqrt(first << doublings)
    m = math.ceil(64 * math.sqrt(x))
    w = x / m
    one = np.zeros(2 * m + 1)
    one[0], one[-1] = math.exp(-x) / 2, 1 / 2
    one[1::2] = np.exp(w * _upto(m) - x) * (math.expm1(w) / 2)
    mass = one
    for _ in range(first - 1):
        mass = np.convolve(mass, one)
    start, step, mass = _thin(-x * first, w, mass)
    for _ in range(doublings):
        start, step, mass = _thin(2 * start, step, np.convolve(mass, mass))
    loss, seen = start + step * _upto(mass.size), mass > 0
    # Sums of products of positive numbers: relative errors at most add up, over n factors.
    error = 256 * _EPS * float(np.abs(loss).max())
    return _Releases(loss[seen], mass[seen], loss_error=error, mass_error=16 * _EPS * m * n)


def _thin(start: float, step: float, mass: Floats) -> tuple[float, float, Floats]:
    """A lattice distribution without negligible outcomes, and coarser while it is too long."""
    while True:
        loss = start + step * _upto(mass.size)
        seen = np.flatnonzero(mass * np.exp(np.maximum(0.0, -loss)) > _NEGLIGIBLE)
        if seen[-1] - seen[0] < _ATOMS:
            return float(loss[seen[0]]), step, mass[seen[0] : seen[-1] + 1]
        step *= 2
        start, cells, merged = _merge(loss[seen], mass[seen], step)
        mass = _histogram(cells[:-1], merged[:-1])


def _sampled(release: _Releases, zeta: float, count: int) -> _Releases:
    """``count`` releases from Poisson samples: exact, ``R/Q = 1 + zeta (P/Q - 1)``."""
    loss = (
        np.log1p(zeta * np.expm1(release.loss))
        if zeta < 1 / 2
        else release.loss + np.log1p((1 - zeta) * np.expm1(-release.loss))
    )
    mass = release.mass * (zeta + (1 - zeta) * np.exp(-release.loss))
    error = release.loss_error + 64 * _EPS * float(np.abs(release.loss).max())
    return _Releases(loss, mass, error, release.mass_error + error + 8 * _EPS, count)


def _exchanged(r: _Releases) -> _Releases:
    """The same with the two laws exchanged: removing the record instead of adding it."""
    mass = r.mass * np.exp(-r.loss)
    return _Releases(-r.loss[::-1], mass[::-1], r.loss_error, r.mass_error + r.loss_error, r.count)


def _merge(loss: Floats, mass: Floats, step: float) -> tuple[float, Integers, Floats]:
    """Merge outcomes until all losses are ``start + step * cell``: a lower bound.

    Outcomes are split and merged in such proportions that the likelihood ratio of each mixture
    is *on* the grid. This costs second order in the step, while rounding down would cost first
    order, thousands of times over. The lowest cell, which holds almost everything if few records
    are sampled, is merged whole, and its loss is where the grid starts. The others are filled from
    both ends to where the least remains. That rest is rounded down: its mass is reduced.

    Returns:
        The start, the cells and their masses; the last is the rest, all others are exact.
    """
    low = int(np.searchsorted(loss, float(loss[0]) + step))
    least, bottom = float(loss[0]), float(mass[:low].sum())
    below = float(mass[:low] @ np.expm1(least - loss[:low])) / bottom
    start = least - math.log1p(below) if below > -1 else least  # by rounding, in a wide cell
    x, mass, top = loss[low:] - start, mass[low:], float(loss[-1]) - start
    base = mass * np.exp(top - x)  # under the second law, in units of exp(-start - top)
    up, up_mass, ends = _fill(x, mass, step)
    # Exchanging the laws changes the sign of the losses: downwards becomes upwards.
    down, down_base, begins = _fill(-x[::-1], base[::-1], step)
    begins, index, total = x.size - begins, _upto(x.size + 1), np.append(0.0, mass.cumsum())
    match = np.searchsorted(-begins, -ends - 1e-9, side="right") - 1
    between = np.interp(begins[match], index, total) - np.interp(ends, index, total)
    i = int(np.where(match < 0, math.inf, between).argmin())
    j = int(match[i])
    part = np.minimum(index[1:], begins[j]) - np.maximum(index[:-1], ends[i]) - 1e-11
    rest, rest_base = (float(m @ part.clip(0, 1)) for m in (mass, base))
    merged = math.log(rest / rest_base) + top if rest > 0 else 0.0
    cell = math.floor(min(merged, top) / step - 1e-6)  # above all others only by rounding
    kept = min(rest, rest_base * math.exp(step * cell - top))
    cells = [[0], up[:i], -down[:j], [max(0, cell)]]
    masses = [[bottom], up_mass[:i], down_base[:j] * np.exp(-step * down[:j] - top), [kept]]
    return start, np.concatenate(cells), np.concatenate(masses)


def _fill(x: Floats, mass: Floats, step: float) -> tuple[Integers, Floats, Floats]:
    """Merge outcomes of increasing loss x into cells of loss ``step * cell``, exactly.

    A cell opens just above an outcome, and takes from the next ones until the sum of
    ``mass * (exp(step * cell - x) - 1)``, what it lacks, is 0.

    Returns:
        Cells, their masses, and the positions between them in numbers of outcomes, 0 included.
    """
    cells: list[int] = []
    masses: list[float] = []
    ends = [0.0]
    cell, held, lack = 0, 0.0, 0.0
    for i, (loss, available) in enumerate(zip(x.tolist(), mass.tolist(), strict=True)):
        left = available
        while True:
            if held == 0:
                cell = math.floor(loss / step) + 1
                cell += step * cell <= loss  # by rounding
            gain = -math.expm1(step * cell - loss)
            if gain * left <= lack:
                held, lack = held + left, lack - gain * left
                break
            cells.append(cell)
            masses.append(held + lack / gain)
            left -= lack / gain
            ends.append(i + 1 - left / available)
            held = lack = 0.0
    return np.array(cells, dtype=np.int64), np.array(masses), np.array(ends)


def _upto(size: int) -> Floats:
    return np.arange(size, dtype=np.float64)


def _histogram(cells: Integers, mass: Floats, size: int = 0) -> Floats:
    return np.bincount(cells, mass, size).astype(np.float64, copy=False)


def _log_moment(releases: Iterable[_Releases], order: float) -> float:
    return math.fsum(release.log_moment(order) for release in releases)


def _epsilon(releases: Sequence[_Releases], delta: float, size: int) -> float:
    """The largest epsilon of a grid whose delta is at least the given one: a lower bound.

    With M the moment of some order, the law tilted by ``exp(order * loss) / M`` and
    ``d = loss - epsilon``,

        delta(epsilon) = M exp(-order * epsilon) * E_tilted[exp(-order * d) (1 - exp(-d))_+].

    The tilted law is centred where delta is decided. The function under the mean is at most
    ``c = order^order / (order + 1)^(order + 1)``, so an error e of the tilted law costs at most
    e times ``M c exp(-order * epsilon)``, the delta that the moment alone proves from above:
    a small *relative* error, however small delta is.
    """
    scale = max(1e-290, *(float(np.abs(release.loss).max()) for release in releases))
    orders = (np.geomspace(1e-3, 1e6, 120) / scale).tolist()

    def log_c(order: float) -> float:
        return -order * math.log1p(1 / order) - math.log1p(order)

    def proven_above(moment: float, order: float) -> float:
        return (moment + log_c(order) - math.log(delta)) / order

    above, order = min((proven_above(_log_moment(releases, t), t), t) for t in orders)
    rounding = _EPS * (_ATOMS + 32 * order * scale)
    lost = math.fsum(release.count * (release.mass_error + rounding) for release in releases)
    if above <= 0 or lost >= 1:
        return 0.0
    loss, mass, moment, error = _compose(releases, order, orders, size)
    above = proven_above(moment, order)
    shown = loss > max(0.0, above - 600 / (1 + order))
    loss, mass = loss[shown], mass[shown]
    d = loss - above
    weights = mass * np.exp(-order * d - log_c(order))
    under_1, under_2 = (np.cumsum(w[::-1])[::-1] for w in (weights, weights * np.exp(-d)))
    under_2 *= np.exp(np.minimum(0.0, d))
    slack = size * _EPS * (under_1 + under_2) + error * np.exp(-order * d)
    in_deltas = (under_1 - under_2 - slack) * (1 - lost)  # delta(loss) / delta, from below
    enough = loss[(in_deltas >= 1) & (d <= 0)]
    return float(enough[-1]) if enough.size else 0.0


def _compose(
    releases: Sequence[_Releases], order: float, orders: Iterable[float], size: int
) -> tuple[Floats, Floats, float, float]:
    """The tilted law of the sum of all losses, on a window of a grid.

    The Fourier transform adds up what lies a whole number of windows apart; how much comes from
    outside is bounded by Chernoff's inequality. Errors of at most e in the transforms change the
    product of their powers by at most what adding e to every modulus would.

    Returns:
        Losses; their tilted masses; the log-moment; a bound on the sum of all errors of the masses.
    """
    moment = _log_moment(releases, order)

    def edge(side: int) -> tuple[float, float]:
        return min(
            ((_log_moment(releases, order + side * t) - moment - math.log(_OUTSIDE)) / t, t)
            for t in orders
        )

    (depth, down), (height, up) = edge(-1), edge(1)
    step = (height + depth) / (size - 2)
    e = 16 * _EPS * math.log2(size)
    merged: list[_Releases] = []
    origin = 0.0
    log_modulus, phase, log_growth = np.zeros((3, size // 2 + 1))
    for release in releases:
        start, cells, mass = _merge(release.loss, release.mass, step)
        start -= release.loss_error
        part = _Releases(start + step * cells.astype(np.float64), mass, count=release.count)
        tilted = mass * np.exp(order * part.loss - part.log_moment(order) / part.count)
        transform = np.fft.rfft(_histogram(cells % size, tilted, size))
        modulus = np.maximum(np.abs(transform), e)
        log_modulus += part.count * np.log(modulus)
        log_growth += part.count * np.log1p(2 * e / modulus)
        phase += part.count * np.angle(transform)
        origin += part.count * start
        merged.append(part)
    error = np.exp(log_modulus + log_growth) * -np.expm1(-log_growth)
    total = np.fft.irfft(np.exp(log_modulus + 1j * phase), size)
    first = math.floor((-depth - origin) / step)
    loss = origin + step * (first + _upto(size))
    moment = _log_moment(merged, order)
    outside = math.fsum(
        math.exp(min(0.0, _log_moment(merged, order + t) - moment - t * end))
        for t, end in ((-down, float(loss[0])), (up, float(loss[-1])))
    )
    error = 2 * (float(error.sum()) + e * float(np.exp(log_modulus).sum()) + outside)
    return loss, np.maximum(0.0, np.roll(total, -(first % size))), moment, error
