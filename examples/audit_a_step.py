"""Audit other people's private steps: anything that turns a batch into a released vector.

Four steps on two neighbouring batches, one record and the same record with a second one. The first
two are a few lines of NumPy, right and wrong; the other two are Opacus's optimizer as it is, and a
subclass with a classical mistake: it clips the sum of the batch instead of each example.

The audit knows nothing of how a step works, or of how its epsilon was computed. Opacus is optional.

Run: python examples/audit_a_step.py
"""

import warnings

import numpy as np
import torch

from lap2.audit import Pair, Result, audit_mechanism
from lap2.audit.statistics import gaussian_epsilon

CLIP, DELTA, DIMENSION = 1.0, 0.05, 8
CANARY = np.full(DIMENSION, 10 * CLIP / np.sqrt(DIMENSION))  # ten times too long before clipping
BATCHES = np.stack([-CANARY]), np.stack([-CANARY, 2 * CANARY])
"""Each row is the gradient that a record asks for; the second record pulls the other way."""


def clipped_sum(batch: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(batch, axis=1, keepdims=True)
    return (batch * np.minimum(1, CLIP / norms)).sum(axis=0)


def numpy_step(scale: float, rng: np.random.Generator):
    """Per-example clipping and Laplace noise of the given scale."""
    return lambda batch: clipped_sum(batch) + rng.laplace(scale=scale, size=DIMENSION)


def opacus_step(optimizer_class, noise_multiplier: float):
    """One step of an Opacus optimizer on a linear model, whose gradients are its inputs."""
    from opacus import GradSampleModule  # noqa: PLC0415 - optional

    module = GradSampleModule(torch.nn.Linear(DIMENSION, 1, bias=False), loss_reduction="sum")
    optimizer = optimizer_class(
        torch.optim.SGD(module.parameters(), lr=0.0),
        noise_multiplier=noise_multiplier,
        max_grad_norm=CLIP,
        expected_batch_size=1,
        loss_reduction="sum",
    )

    def step(batch: np.ndarray) -> np.ndarray:
        optimizer.zero_grad()
        module(torch.from_numpy(batch).float()).sum().backward()
        optimizer.step()
        return next(iter(module.parameters())).grad.detach().numpy().ravel().copy()

    return step


def show(name: str, result: Result) -> Result:
    print(
        f"{name:36} claims {result.claimed_epsilon:.2f}, is at least {result.epsilon_lower:.2f} "
        f"({100 * result.confidence:g}%): {result.verdict}"
    )
    return result


def audit(name: str, step, claimed_epsilon: float) -> Result:
    pair = Pair("second record", *BATCHES)
    result = audit_mechanism(
        step, [pair], claimed_epsilon=claimed_epsilon, delta=DELTA, trials=2000
    )
    return show(name, result)


def main() -> dict[str, Result]:
    """Print and return the verdicts."""
    torch.manual_seed(0)  # of Opacus's noise
    rng = np.random.default_rng(0)
    # No l2-clipped Laplace mechanism costs more than the Gaussian one with sigma = b.
    claim = gaussian_epsilon(1.0, DELTA)
    results = {
        "numpy": audit("NumPy, Laplace noise of scale C", numpy_step(CLIP, rng), claim),
        "numpy, broken": audit("NumPy, half of that noise", numpy_step(CLIP / 2, rng), claim),
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Opacus's own imports warn
            from opacus.optimizers import DPOptimizer  # noqa: PLC0415 - optional
    except ImportError:
        print("opacus is not installed (pip install opacus): its optimizer is not audited")
        return results

    class ClipsTheSum(DPOptimizer):
        """Clips the sum of the gradients, not each of them: a record can turn it around."""

        def clip_and_accumulate(self) -> None:
            for param in self.params:
                total = param.grad_sample.sum(dim=0)
                param.summed_grad = total * min(1.0, self.max_grad_norm / float(total.norm()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the noise generator, which this is not
        results["opacus"] = audit(
            "Opacus, noise multiplier 1", opacus_step(DPOptimizer, 1.0), claim
        )
        results["opacus, broken"] = audit(
            "Opacus, clipping the sum", opacus_step(ClipsTheSum, 1.0), claim
        )
    return results


if __name__ == "__main__":
    main()
