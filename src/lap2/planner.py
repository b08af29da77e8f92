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
from lap2.signal import signal_to_noise

__all__ = ["Option", "Plan", "plan", "steps_for"]

_ALIKE = 0.1
"""Relative difference of noise below which two mechanisms are called alike."""


@dataclass(frozen=True)
class Option:
    """One mechanism, calibrated to the target.

    Attributes:
        name: as on the command line. noise_multiplier: b / C, or sigma / C. order: the moment's
        order that gave epsilon. noise_to_signal: standard deviation of the noise on a coordinate
        of the released mean gradient,
            over the root mean square of the mean clipped gradient's coordinates; noise used
            linearly.
        denoised_noise_to_signal: the same after the best clamp (unchanged for Gaussian noise).
        effective_variance: variance per coordinate of the released sum after it, in units of C^2.
        tau: that clamp in noise scales; None for Gaussian noise.
        is_guarantee: False for the published bound, which is never recommended.
    """

    name: str
    noise_multiplier: float
    order: float
    noise_to_signal: float
    denoised_noise_to_signal: float
    effective_variance: float
    tau: float | None
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
        templates: dict[str, SingleGroup] = {
            "laplace": Laplace(1.0, n),
            "gaussian": Gaussian(1.0),
            "laplace-l1": LaplaceL1(1.0),
            "published": PublishedLaplace(1.0, n),
        }
        options = {
            name: _option(
                name,
                template,
                target=target,
                prob=prob,
                steps=steps,
                dimension=n,
                batch_size=batch_size,
                signal=signal,
            )
            for name, template in templates.items()
        }
    recommendation, reason = _recommend(options)
    return Plan(
        sampling_prob=prob,
        steps=steps,
        epsilon=target.epsilon,
        delta=target.delta,
        dimension=n,
        signal=signal,
        options=tuple(options.values()),
        recommendation=recommendation,
        reason=reason,
    )


def _option(
    name: str,
    template: SingleGroup,
    *,
    target: Target,
    prob: float,
    steps: int,
    dimension: int,
    batch_size: int,
    signal: float,
) -> Option:
    step = calibrate_noise(
        template, epsilon=target.epsilon, delta=target.delta, sampling_prob=prob, steps=steps
    )
    answer = Accountant().compose(step, sampling_prob=prob, steps=steps).answer(delta=target.delta)
    released = Laplace(step.noise_multiplier, dimension) if name == "published" else step
    linear, denoised = (
        signal_to_noise(
            released,
            dimension=dimension,
            batch_size=batch_size,
            steps=steps,
            signal=signal,
            denoise=clamp,
        )
        for clamp in (False, True)
    )
    return Option(
        name=name,
        noise_multiplier=step.noise_multiplier,
        order=answer.order,
        noise_to_signal=linear.per_step**-0.5,
        denoised_noise_to_signal=denoised.per_step**-0.5,
        effective_variance=denoised.variance,
        tau=denoised.tau,
        is_guarantee=answer.is_guarantee,
    )


def _recommend(options: dict[str, Option]) -> tuple[str, str]:
    """The sound option with the least noise after free post-processing, or "no difference"."""
    laplace, gaussian, l1 = options["laplace"], options["gaussian"], options["laplace-l1"]
    linear = laplace.noise_to_signal / gaussian.noise_to_signal
    denoised = laplace.denoised_noise_to_signal / gaussian.denoised_noise_to_signal
    if l1.denoised_noise_to_signal < (1 - _ALIKE) * min(
        laplace.denoised_noise_to_signal, gaussian.denoised_noise_to_signal
    ):
        return "laplace-l1", (
            "l1 clipping leaves the least noise: "
            f"{l1.denoised_noise_to_signal / gaussian.denoised_noise_to_signal:.2f} times "
            "Gaussian's."
        )
    if linear < 1 - _ALIKE:
        return "laplace", (
            f"Laplace noise is {linear:.2f} times Gaussian's even when it is used linearly: few "
            "coordinates or few steps favour it."
        )
    if denoised < 1 - _ALIKE:
        return "laplace", (
            f"after denoising Laplace noise is {denoised:.2f} times Gaussian's "
            f"({linear:.2f} times when used linearly)."
        )
    if denoised <= 1 + _ALIKE:
        return "no difference", (
            f"after denoising Laplace noise is {denoised:.2f} times Gaussian's; used linearly it "
            f"is {linear:.2f} times, so Gaussian is the choice if you do not denoise."
        )
    return "gaussian", (
        f"Laplace noise is {denoised:.2f} times Gaussian's even after denoising "
        f"({linear:.2f} times when used linearly)."
    )
