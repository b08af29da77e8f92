"""The kernel against arbitrary precision, quadrature and brute force."""

import math

import mpmath as mp
import numpy as np
import pytest
from scipy import integrate, optimize

import lap2
from lap2.divergence import Shift, log_f, log_moment, worst_shift

mp.mp.dps = 60


def mp_log_f(x, eta):
    x, eta = mp.mpf(x), mp.mpf(eta)
    return mp.log((eta * mp.exp((eta - 1) * x) + (eta - 1) * mp.exp(-eta * x)) / (2 * eta - 1))


def mp_group_moment(rho, n, eta):
    if n == math.inf:
        return mp.mpf(eta) * (eta - 1) * mp.mpf(rho) ** 2 / 2
    return n * mp_log_f(mp.mpf(rho) / mp.sqrt(n), eta)


@pytest.mark.parametrize("n", [1, 2, 7, 1000, 26010, 10**9, 10**12, math.inf])
@pytest.mark.parametrize("rho", [1e-6, 1e-3, 0.1, 0.5, 1.0, 3.0, 50.0])
def test_group_moment_agrees_with_mpmath(n, rho):
    orders = [2, 3, 5, 17, 100, 999, 20_000]
    ours = log_moment(worst_shift(lap2.Laplace(1 / rho, n)), orders)
    exact = [float(mp_group_moment(1 / mp.mpf(1 / rho), n, eta)) for eta in orders]
    np.testing.assert_allclose(ours, exact, rtol=1e-9)


@pytest.mark.parametrize("eta", [1.0001, 1.5, 2, 2.5, 40, 20_000])
def test_log_f_is_accurate_on_both_sides_of_every_switch(eta):
    switches = [1e-3 / eta, 1e-3 / (eta - 1), 1 / (eta - 1), 1e-12, 1e-6, 1e-2, 1.0, 50.0]
    x = np.array([s * (1 + e) for s in switches for e in (-1e-9, 0.0, 1e-9)])
    exact = [float(mp_log_f(value, eta)) for value in x]
    np.testing.assert_allclose(log_f(x, eta), exact, rtol=1e-14)


def test_log_f_edges_and_closed_form():
    assert log_f(1.0, 2) == pytest.approx(math.log((2 * math.e + math.exp(-2)) / 3), rel=1e-15)
    assert log_f(0.7, [0, 1]).tolist() == [0, 0]
    assert log_f(0.0, 5) == 0
    assert log_f(math.inf, 2) == math.inf
    assert log_f(1e300, 20_000) == pytest.approx(19_999e300)


@pytest.mark.parametrize("eta", [1.5, 2, 3, 10])
@pytest.mark.parametrize("x", [0.01, 0.5, 3.0])
def test_log_f_is_the_moment_by_quadrature(x, eta):
    def integrand(z):
        return 0.5 * math.exp(-abs(z) + eta * (abs(z) - abs(z - x)))

    pieces = [(-60, 0), (0, x), (x, x + 60)]
    moment = sum(integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-12)[0] for a, b in pieces)
    assert log_f(x, eta) == pytest.approx(math.log(moment), rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize(("rho", "zeta", "order"), [(0.3, 0.01, 3), (1.0, 0.2, 8), (4.0, 0.05, 2)])
def test_no_gradient_in_the_ball_beats_the_exact_worst_case(n, rho, zeta, order):
    """Numerical maximisation of the sampled moment over the l2 ball, from many starts."""
    eta = np.arange(order + 2)
    pmf = [math.comb(order + 1, k) * zeta**k * (1 - zeta) ** (order + 1 - k) for k in eta]

    def excess_moment(v):
        return np.dot(pmf, np.expm1(log_f(np.abs(v)[:, None], eta).sum(axis=0)))

    def on_sphere(z):
        return -excess_moment(rho * z / np.linalg.norm(z))

    rng = np.random.default_rng(n)
    scale = excess_moment(np.full(n, rho / math.sqrt(n)))
    best = max(
        -optimize.minimize(lambda z: on_sphere(z) / scale, rng.normal(size=n), tol=1e-9).fun
        for _ in range(20)
    )
    assert best <= 1 + 1e-12
    assert best >= 1 - 1e-9
    inside = max(excess_moment(v) for v in rho * _random_ball(rng, n, 2000))
    assert inside <= scale * (1 + 1e-12)


def _random_ball(rng, n, size):
    v = rng.normal(size=(size, n))
    return v / np.linalg.norm(v, axis=1, keepdims=True) * rng.random((size, 1)) ** (1 / n)


def test_exact_moment_by_simulation_at_fifty_coordinates():
    """Mean of the likelihood ratio's square over draws of the noise; a 5% wrong shift is seen."""
    rng = np.random.default_rng(7)
    x = 0.5 / math.sqrt(50)
    z = rng.laplace(size=(400_000, 50))
    squares = np.exp(2 * (np.abs(z) - np.abs(z - x)).sum(axis=1))
    error = squares.std() / math.sqrt(len(squares))
    exact = math.exp(log_moment(worst_shift(lap2.Laplace(2.0, 50)), 2))
    wrong = math.exp(log_moment(worst_shift(lap2.Laplace(2.0 / 1.05, 50)), 2))
    assert abs(squares.mean() - exact) < 4 * error
    assert abs(squares.mean() - wrong) > 6 * error


@pytest.mark.parametrize("eta", [1.2, 2, 7, 300])
def test_lemma_concave_in_the_square_convex_in_the_shift(eta):
    grid = np.linspace(0, 6, 4001)
    in_square = log_f(np.sqrt(grid), eta)
    assert np.all(np.diff(in_square, 2) < 1e-13 * in_square.max())
    in_shift = log_f(grid, eta)
    assert np.all(np.diff(in_shift, 2) > -1e-13 * in_shift.max())


def test_the_other_direction_is_never_larger():
    """Base against mixture, one and two coordinates, by quadrature (docs/theory.md, section 3)."""
    zeta, order = 0.2, 4
    for v in ([1.0], [0.8, 0.6], [1.0, 0.0]):
        axes = [np.linspace(-25, 25, 2001)] * len(v)
        grids = np.meshgrid(*axes, indexing="ij")
        log_base = sum(-np.abs(g) for g in grids) - len(v) * math.log(2)
        log_moved = sum(-np.abs(g - s) for g, s in zip(grids, v, strict=True)) - len(v) * math.log(
            2
        )
        log_mix = np.logaddexp(math.log1p(-zeta) + log_base, math.log(zeta) + log_moved)
        cell = (axes[0][1] - axes[0][0]) ** len(v)
        forward = np.exp((order + 1) * log_mix - order * log_base).sum() * cell
        backward = np.exp((order + 1) * log_base - order * log_mix).sum() * cell
        assert backward < forward


def test_shift_of_each_mechanism():
    assert worst_shift(lap2.Laplace(2.0, 16)).l1 == pytest.approx(2.0)
    assert worst_shift(lap2.LaplaceL1(4.0)).l1 == 0.25
    assert worst_shift(lap2.Gaussian(1.0)).l1 == math.inf
    joint = worst_shift(lap2.Joint([lap2.Laplace(1.0, 4), lap2.Gaussian(2.0)]))
    assert joint.quadratic == 0.25
    assert joint.values.tolist() == [0.5]
    assert log_moment(Shift(), [2, 3]).tolist() == [0, 0]


def test_unknown_mechanisms_are_refused():
    class Invented(lap2.Mechanism):
        pass

    with pytest.raises(TypeError, match="Invented"):
        worst_shift(Invented())
