"""Log-moments of Poisson-sampled releases: the Binomial mean, for a whole ledger at once."""

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lap2 import _validate
from lap2.divergence import Shift, log_f, worst_shift
from lap2.mechanism import LaplaceL1

__all__ = ["SampledMoments", "univariate_log_moment"]

Floats = NDArray[np.float64]

_BLOCK = 2**14
"""Largest number of (coordinate value, order) pairs held in memory at once."""
_SMALL = 4096
"""Log-factorials below this come from a table."""
_FULL_SUM = 128
"""Up to this many terms the Binomial mean is summed whole."""


class SampledMoments:
    """The total log-moment ``alpha(lam)`` of sampled releases, as a function of the integer order.

    For one release with shift moments ``m(eta)`` and sampling probability ``zeta``

        alpha(lam) = log E[exp(m(eta))],  eta ~ Binomial(lam + 1, zeta),

    computed as ``log1p`` of the positive terms ``P(eta) (exp(m(eta)) - 1)``, so that it keeps its
    relative precision down to the smallest moments. Values are rounded up.

    Args:
        releases: triples (shift, sampling_prob, multiplicity), the latter two above 0.
    """

    def __init__(self, releases: Iterable[tuple[Shift, float, float]]) -> None:
        """Lay all releases out as rows of flat arrays, in blocks that fit the memory."""
        rows = [
            row
            for shift, prob, multiplicity in releases
            for row in (
                [(shift, prob, multiplicity)]
                if shift.shared_sample
                else _own_samples(shift, prob, multiplicity)
            )
        ]
        sampled, whole = ([row for row in rows if (row[1] < 1) is side] for side in (True, False))
        self._blocks = [_Rows(part) for side in (sampled, whole) for part in _parts(side)]
        self._memo: dict[int, float] = {0: 0.0}
        self.curvature = math.fsum(block.curvature for block in self._blocks)
        """``sum of zeta^2 |shift|^2``: small alpha is about ``curvature * lam (lam + 1) / 2``."""

    def __call__(self, order: int, /) -> float:
        """The total log-moment at an integer order ``lam >= 0``, rounded up."""
        if order not in self._memo:
            total = math.fsum(block.total(order + 1) for block in self._blocks)
            # Rounding of log-factorials (4 ulp of their size) and of the sums.
            slack = 1e-9 + 2.0**-50 * math.lgamma(order + 3)
            self._memo[order] = total * (1 + slack)
        return self._memo[order]


_Release = tuple[Shift, float, float]


def _own_samples(shift: Shift, prob: float, multiplicity: float) -> list[_Release]:
    """Each coordinate as a release of its own: what the published bound takes them for."""
    return [
        (Shift(values=shift.values[j : j + 1], counts=np.ones(1)), prob, multiplicity * count)
        for j, count in enumerate(shift.counts.tolist())
    ]


def _parts(rows: list[_Release]) -> Iterable[list[_Release]]:
    """Consecutive rows whose coordinate values leave room for some 64 orders in a block."""
    part: list[_Release] = []
    size = 0
    for row in rows:
        if part and size + row[0].values.size > _BLOCK // 64:
            yield part
            part, size = [], 0
        part.append(row)
        size += max(1, row[0].values.size)
    if part:
        yield part


class _Rows:
    """Some releases as flat arrays: all of them sampled, or none."""

    def __init__(self, rows: list[_Release]) -> None:
        # A row needs a coordinate; one that does not move contributes nothing.
        still = (np.zeros(1), np.zeros(1))
        shifts = [(s.values, s.counts) if s.values.size else still for s, _, _ in rows]
        self.values = np.concatenate([values for values, _ in shifts])[:, None]
        self.counts = np.concatenate([counts for _, counts in shifts])[:, None]
        self.starts = np.cumsum([0] + [values.size for values, _ in shifts])[:-1]
        self.quadratic = np.array([[shift.quadratic] for shift, _, _ in rows])
        self.weights = np.array([weight for _, _, weight in rows])
        prob = np.array([[prob] for _, prob, _ in rows])
        with np.errstate(over="ignore"):
            squares = self._per_release(self.counts * self.values**2) + self.quadratic
            self.curvature = float(self.weights @ (prob * (prob * squares))[:, 0])
        self.least = np.where(squares[:, 0] > 0, 1e-300, 0.0)
        self.table = np.empty((0, 0))
        self.sampled = rows[0][1] < 1
        if self.sampled:
            self.log_rest = np.log1p(-prob)
            self.log_odds = np.log(prob) - self.log_rest

    def total(self, trials: int) -> float:
        """``alpha`` at order ``trials - 1``, summed over the rows with their multiplicity."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if self.sampled:
                alpha = np.logaddexp(0.0, self._log_excess(trials))
            else:
                alpha = self._moments(np.array([float(trials)]))[:, 0]
            # What underflows is not free.
            total = float(self.weights @ np.maximum(alpha, self.least))
        return math.inf if math.isnan(total) else total

    def _per_release(self, per_value: Floats) -> Floats:
        if self.starts.size == per_value.shape[0]:
            return per_value
        return np.add.reduceat(per_value, self.starts, axis=0)

    def _moments(self, eta: Floats) -> Floats:
        """``m(eta)``, one row per release."""
        laplace = self._per_release(self.counts * log_f(self.values, eta))
        # Rounded up by what the kernel may err, because exp() turns relative into absolute.
        return (laplace + self.quadratic * (eta * (eta - 1) / 2)) * (1 + 2e-14)

    def _moments_between(self, first: int, end: int) -> Floats:
        """``m(eta)`` for eta = first, ..., end - 1, out of a table as long as that stays small."""
        size = max(64, 1 << end.bit_length())
        if self.values.size * size > _BLOCK:
            return self._moments(np.arange(first, end, dtype=np.float64))
        if self.table.shape[1] < end:
            self.table = self._moments(np.arange(size, dtype=np.float64))
        return self.table[:, first:end]

    def _log_excess(self, trials: int) -> Floats:
        """``log E[exp(m(eta)) - 1]``, eta ~ Binomial(trials, zeta), per row: an upper bound."""
        last, ratio = self._terms_needed(trials)
        width = max(1, _BLOCK // self.values.size)
        parts: list[Floats] = []
        for first in range(2, last + 1, width):
            end = min(last + 1, first + width)
            eta = np.arange(first, end, dtype=np.float64)
            moments = self._moments_between(first, end)
            log_pmf = (
                _log_binomials(trials, first, end) + eta * self.log_odds + trials * self.log_rest
            )
            parts.append(_log_sum_exp(log_pmf + moments + np.log(-np.expm1(-moments))))
            if end > last and last < trials:
                parts.append((log_pmf + moments)[:, -1] + np.log(ratio / (1 - ratio))[:, 0])
        return parts[0] if len(parts) == 1 else _log_sum_exp(np.stack(parts, axis=1))

    def _terms_needed(self, trials: int) -> tuple[int, Floats]:
        """How many terms to sum, and for each row the most that later terms grow by.

        Terms ``P(eta) exp(m(eta))`` grow by the factor ``(trials - eta) / (eta + 1) * odds *
        exp(m(eta + 1) - m(eta))``, and m is convex, so its last increment bounds them all. Past
        ``eta = 4 * trials * odds * exp(last increment)`` that factor is below 1/4 and falling: the
        rest is at most a geometric series.
        """
        if trials <= _FULL_SUM:
            return trials, self.log_odds
        ends = self._moments(np.array([trials - 1.0, trials]))
        growth = np.exp(self.log_odds + ends[:, 1:] - ends[:, :1])
        needed = float(np.max(np.ceil(4 * trials * growth))) + 60
        if not needed < trials:
            return trials, growth
        last = int(needed)
        return last, (trials - last) / (last + 1) * growth


def univariate_log_moment(order: int, *, noise_multiplier: float, sampling_prob: float) -> float:
    """The univariate moments accountant of the Lap2 paper (Theorem III.2), rounded up.

    ``log E[F(C / b, eta)]`` with eta ~ Binomial(order + 1, sampling_prob): exact for one coordinate
    clipped to C, and for any vector clipped to **l1** norm C.
    """
    order = _validate.integer("order", order, least=0)
    prob = _validate.probability("sampling_prob", sampling_prob)
    shift = worst_shift(LaplaceL1(noise_multiplier))
    return SampledMoments([(shift, prob, 1.0)])(order) if prob else 0.0


def _log_sum_exp(terms: Floats) -> Floats:
    """Row-wise ``log sum exp``; infinite terms give infinity."""
    top = terms.max(axis=1)
    top = np.where(np.isfinite(top), top, 0.0)
    return np.log(np.exp(terms - top[:, None]).sum(axis=1)) + top


def _log_binomials(trials: int, first: int, end: int) -> Floats:
    """``log binomial(trials, eta)`` for eta = first, ..., end - 1."""
    up, down = _log_factorials(first, end), _log_factorials(trials - end + 1, trials - first + 1)
    return _log_factorials(trials, trials + 1) - up - down[::-1]


def _log_factorials(first: int, end: int) -> Floats:
    """``log k!`` for k = first, ..., end - 1, within 4 ulp."""
    return _small_log_factorials()[first:end] if end <= _SMALL else _stirling(first, end)


@lru_cache(maxsize=1)
def _small_log_factorials() -> Floats:
    exact = [math.lgamma(k + 1.0) for k in range(32)]
    return np.append(exact, _stirling(32, _SMALL))


def _stirling(first: int, end: int) -> Floats:
    """``log k!`` by Stirling's series, to full precision for k >= 32."""
    if first < 32:
        return np.append(_small_log_factorials()[first:32], _stirling(32, end))
    k = np.arange(first, end, dtype=np.float64)
    series = (1 / 12 - (1 / 360 - 1 / 1260 / k**2) / k**2) / k
    return (k + 0.5) * np.log(k) - k + (0.5 * math.log(2 * math.pi) + series)
