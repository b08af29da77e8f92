"""Train a private classifier of handwritten digits with NumPy and lap2's accountant alone.

Multinomial logistic regression on scikit-learn's 8x8 digits: Poisson sampling, per-example l2
clipping, Laplace noise on the sum, a public divisor, and a ledger of every step. Leaves the
metrics, the ledger, the weights and a picture in ``runs/digits``.

The noise comes from NumPy's ordinary generator. Its epsilon is right for ideal Laplace noise, but
floating-point noise of this kind can be attacked: this is an experiment, not a release.
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from sklearn.datasets import load_digits

import lap2

CLASSES = 10


def per_example_gradients(weights, features, labels):
    """Gradients of the cross-entropy, one row per example."""
    logits = features @ weights
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    error = probs - np.eye(CLASSES)[labels]
    return np.einsum("bi,bc->bic", features, error).reshape(len(labels), weights.size)


def clipped_sum(gradients, clip):
    """The sum over examples, each scaled to l2 norm at most ``clip``."""
    norms = np.linalg.norm(gradients, axis=1)
    factors = np.minimum(1.0, clip * (1 - 2**-20) / np.maximum(norms, 1e-30))
    return factors @ gradients


def accuracy(weights, features, labels):
    return float(np.mean(np.argmax(features @ weights, axis=1) == labels))


def load(rng):
    """Pixels centred and scaled to unit norm, with a bias column, split in train and test."""
    digits = load_digits()
    pixels = digits.data - digits.data.mean(axis=1, keepdims=True)
    pixels /= np.linalg.norm(pixels, axis=1, keepdims=True)
    features = np.column_stack([pixels, np.full(len(pixels), 0.1)])
    order = rng.permutation(len(features))
    test, train = order[:360], order[360:]
    return (features[train], digits.target[train]), (features[test], digits.target[test])


def draw(history, folder, epsilon, delta):
    """Accuracy and epsilon against steps."""
    mpl.use("Agg")
    steps = [row["step"] for row in history]
    figure, left = plt.subplots(figsize=(7, 4.2), layout="constrained")
    left.plot(steps, [100 * row["test_accuracy"] for row in history], color="#0072B2")
    left.set(xlabel="step", ylabel="test accuracy (%)", ylim=(0, 100))
    left.yaxis.label.set_color("#0072B2")
    right = left.twinx()
    right.plot(steps, [row["epsilon"] for row in history], color="#D55E00", linestyle="--")
    right.set(ylabel=f"epsilon so far (delta = {delta:g})", ylim=(0, 1.05 * epsilon))
    right.yaxis.label.set_color("#D55E00")
    left.set_title(f"Private logistic regression on digits: epsilon = {epsilon:.2f}")
    figure.savefig(folder / "report.png", dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sampling-prob", type=float, default=0.1)
    parser.add_argument("--noise-multiplier", type=float, default=4.0, help="b / C")
    parser.add_argument("--learning-rate", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/digits"))
    args = parser.parse_args()

    rng = np.random.default_rng(args.seed)
    (features, labels), test = load(rng)
    clip, size = 1.0, len(features)
    weights = np.zeros((features.shape[1], CLASSES))
    step = lap2.Laplace(args.noise_multiplier, dimension=weights.size)
    accountant, history = lap2.Accountant(), []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=args.steps)
        for number in range(1, args.steps + 1):
            sample = rng.random(size) < args.sampling_prob
            gradients = per_example_gradients(weights, features[sample], labels[sample])
            noise = rng.laplace(scale=args.noise_multiplier * clip, size=weights.size)
            accountant.compose(step, sampling_prob=args.sampling_prob)
            release = (clipped_sum(gradients, clip) + noise) / (args.sampling_prob * size)
            weights -= args.learning_rate * release.reshape(weights.shape)
            epsilon = accountant.get_epsilon(args.delta)
            history.append(
                {
                    "step": number,
                    "epsilon": epsilon,
                    "test_accuracy": accuracy(weights, *test),
                }
            )
            bar.update(
                task,
                advance=1,
                description=f"accuracy {history[-1]['test_accuracy']:.1%} epsilon {epsilon:.3f}",
            )

    args.folder.mkdir(parents=True, exist_ok=True)
    accountant.save(args.folder / "ledger.json")
    np.save(args.folder / "weights.npy", weights)
    (args.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    draw(history, args.folder, epsilon, args.delta)
    print(f"test accuracy  {accuracy(weights, *test):.1%}")
    print(f"epsilon        {np.ceil(epsilon * 1e4) / 1e4} at delta {args.delta:g}")
    print(f"bound          {step.bound}, add/remove one record, Poisson sampling")
    print("noise          ordinary generator: an experiment, not safe against bit-level attacks")
    print(f"report         {args.folder / 'report.png'}")


if __name__ == "__main__":
    main()
