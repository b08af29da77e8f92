"""The planner: which mechanism, with how much noise, for this model, data set and budget."""

import math
import warnings
from dataclasses import dataclass

from lap2 import _validate
from lap2.accountant import Accountant
from lap2.calibration import Target, calibrate_noise
from lap2.mechanism import (
    Gaussian,
    Laplace,
    LaplaceL1,
    NotAGuaranteeWarning,
    PublishedLaplace,
    SingleGroup,
)
from lap2.signal import copies, signal_to_noise, spread_size

__all__ = ["Option", "Plan", "plan", "steps_for"]

_ALIKE = 0.1
"""Relative difference of noise below which two mechanisms are called alike."""


@dataclass(frozen=True)
class Option:
    """One mechanism, calibrated to the target.

    Attributes:
        name: as on the command line.
        release: "bits" or "values".
        copies: of each coordinate, whose signs are released; 0 for values.
        noise_multiplier: b / C, or sigma / C.
        order: the moment's order that gave epsilon.
        noise_to_signal: standard deviation of the noise on a coordinate of the released mean
            gradient, over the root mean square of the mean clipped gradient's coordinates.
        effective_variance: of the noise on a coordinate of the released sum, in units of C^2.
        is_guarantee: False for the published bound, which is never recommended.
    """

    name: str
    release: str
    copies: int
    noise_multiplier: float
    order: float
    noise_to_signal: float
    effective_variance: float
    is_guarantee: bool


@dataclass(frozen=True)
class Plan:
    """All options for one run, and a recommendation with its reason."""

    sampling_prob: float
    steps: int
    epsilon: float
    delta: float
    dimension: int
    signal: float
    options: tuple[Option, ...]
    recommendation: str
    reason: str


def steps_for(*, dataset_size: int, batch_size: int, epochs: float) -> tuple[float, int]:
    """Sampling probability and number of steps of a run: the steps are rounded up to an integer."""
    size = _validate.integer("dataset_size", dataset_size, least=1)
    batch = _validate.integer("batch_size", batch_size, least=1)
    passes = _validate.positive("epochs", epochs)
    if not batch <= size:
        raise ValueError(f"batch_size must be at most dataset_size = {size}, got {batch_size!r}")
    return batch / size, math.ceil(passes * size / batch * (1 - 1e-12))


def plan(
    *,
    dataset_size: int,
    batch_size: int,
    epochs: float,
    dimension: int,
    epsilon: float,
    delta: float,
    signal: float = 0.1,
) -> Plan:
    """Calibrate every mechanism to the same target and compare what their noise leaves.

    Args:
        dataset_size: number of records.
        batch_size: expected number of records in a step.
        epochs: passes over the data.
        dimension: number of trained parameters.
        epsilon: the target.
        delta: the target.
        signal: l2 norm of the mean clipped gradient as a fraction of the clip, assumed; see
            :func:`lap2.signal.signal_to_noise`.
    """
    target = Target(epsilon, delta)
    n = _validate.finite_dimension("dimension", dimension)
    prob, steps = steps_for(dataset_size=dataset_size, batch_size=batch_size, epochs=epochs)
    with warnings.catch_warnings():
        # Its row says so itself.
        warnings.simplefilter("ignore", NotAGuaranteeWarning)
        run = _Run(target, prob, steps, n, batch_size, signal)
        options = [
            run.bits(),
            run.values("laplace", Laplace(1.0, n)),
            run.values("gaussian", Gaussian(1.0)),
            run.values("laplace-l1", LaplaceL1(1.0)),
            run.values("published", PublishedLaplace(1.0, n)),
        ]
    recommendation, reason = _recommend(options)
    return Plan(
        sampling_prob=prob,
        steps=steps,
        epsilon=target.epsilon,
        delta=target.delta,
        dimension=n,
        signal=signal,
        options=tuple(options),
        recommendation=recommendation,
        reason=reason,
    )


@dataclass(frozen=True)
class _Run:
    """What all options have in common."""

    target: Target
    prob: float
    steps: int
    dimension: int
    batch_size: int
    signal: float

    def bits(self) -> Option:
        """Laplace noise as training releases it: in another basis, several signs a coordinate."""
        size = spread_size(self.dimension)
        provisional = self._calibrated(Laplace(1.0, size)).noise_multiplier
        times = copies(size, batch_size=self.batch_size, noise_multiplier=provisional)
        return self._option("laplace", Laplace(1.0, size * times), copies=times)

    def values(self, name: str, template: SingleGroup) -> Option:
        """Noisy values, used linearly."""
        return self._option(name, template, copies=0)

    def _option(self, name: str, template: SingleGroup, *, copies: int) -> Option:
        step = self._calibrated(template)
        run = Accountant().compose(step, sampling_prob=self.prob, steps=self.steps)
        answer = run.answer(delta=self.target.delta)
        is_published = isinstance(step, PublishedLaplace)
        ratio = signal_to_noise(
            Laplace(step.noise_multiplier, self.dimension) if is_published else step,
            dimension=self.dimension,
            batch_size=self.batch_size,
            steps=self.steps,
            signal=self.signal,
            copies=copies,
        )
        return Option(
            name=name,
            release="bits" if copies else "values",
            copies=copies,
            noise_multiplier=step.noise_multiplier,
            order=answer.order,
            noise_to_signal=ratio.per_step**-0.5,
            effective_variance=ratio.variance,
            is_guarantee=answer.is_guarantee,
        )

    def _calibrated(self, template: SingleGroup) -> SingleGroup:
        return calibrate_noise(
            template,
            epsilon=self.target.epsilon,
            delta=self.target.delta,
            sampling_prob=self.prob,
            steps=self.steps,
        )


def _recommend(options: list[Option]) -> tuple[str, str]:
    """The sound option with the least noise, or "no difference" between Laplace and Gaussian."""
    bits, values, gaussian, l1, _ = options
    least = min((bits, values, l1), key=lambda option: option.noise_to_signal)
    ratio = least.noise_to_signal / gaussian.noise_to_signal
    released = "signs" if least.release == "bits" else "values"
    if ratio < 1 - _ALIKE:
        if least is l1:
            return "laplace-l1", f"l1 clipping leaves {ratio:.2f} times Gaussian's noise."
        return "laplace", (
            f"Laplace noise is {ratio:.2f} times Gaussian's if {released} are released: "
            "few coordinates or few steps favour it."
        )
    if ratio <= 1 + _ALIKE:
        return "no difference", (
            f"Laplace noise is {ratio:.2f} times Gaussian's if {released} are released."
        )
    return "gaussian", (
        f"Laplace noise is {ratio:.2f} times Gaussian's, also if {released} are released."
    )
