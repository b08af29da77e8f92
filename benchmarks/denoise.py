"""What denoising buys: test accuracy of Gaussian, Laplace as it is, and Laplace denoised.

All at the same (epsilon, delta), on Fashion-MNIST, with the same learning rates tried for each. The
rate is chosen on the last 5,000 training images, which no run trains on; the table shows the test
accuracy at that rate, mean and standard error over seeds.

    python benchmarks/denoise.py --model logistic --epsilon 0.15 --seeds 12 --rates 0.07 0.1 0.14
    python benchmarks/denoise.py --model cnn --epsilon 0.15 --seeds 6 --rates 0.05 0.1 0.2
"""

import argparse
import math
import statistics

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lap2
from lap2.experiments.data import load_fashion_mnist
from lap2.experiments.models import logistic, mnist_cnn
from lap2.train import PrivacyEngine

COLUMNS = {
    "Gaussian": ("gaussian", "none"),
    "Laplace, none": ("laplace", "none"),
    "Laplace, tau 1": ("laplace", 1.0),
    "Laplace, tau 0.3": ("laplace", 0.3),
    "Laplace, auto": ("laplace", "auto"),
}
VALIDATION = 5000


def run(data, model, *, mechanism, denoise, rate, seed, noise, batch_size, steps):
    """Train once; accuracy on validation and on test."""
    torch.manual_seed(seed)
    images, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    kept = slice(0, len(images) - VALIDATION)
    module = mnist_cnn() if model == "cnn" else logistic()
    loader = DataLoader(TensorDataset(images[kept], labels[kept]), batch_size=batch_size)
    module, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9),
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=1.0,
        mechanism=mechanism,
        denoise=denoise,
    )
    done = 0
    while done < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
    module.eval()
    with torch.no_grad():
        held = slice(len(images) - VALIDATION, None)
        pairs = [(images[held], labels[held])]
        pairs.append((torch.from_numpy(data.test_images), torch.from_numpy(data.test_labels)))
        return [100 * float((module(x).argmax(1) == y).double().mean()) for x, y in pairs]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["logistic", "cnn"], default="logistic")
    parser.add_argument("--epsilon", type=float, default=0.5)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=258)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.3, 1.0])
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=list(COLUMNS))
    args = parser.parse_args()
    data = load_fashion_mnist()
    prob = args.batch_size / (len(data.train_images) - VALIDATION)
    size = 26010 if args.model == "cnn" else 7850
    table = Table("", "noise multiplier", "rate", "test accuracy %", "standard error")
    jobs = [
        (name, rate, seed)
        for name in args.columns
        for rate in args.rates
        for seed in range(args.seeds)
    ]
    scores = {}
    for name, rate, seed in track(jobs, "training"):
        mechanism, denoise = COLUMNS[name]
        template = lap2.Gaussian(1.0) if mechanism == "gaussian" else lap2.Laplace(1.0, size)
        noise = lap2.calibrate_noise(
            template,
            epsilon=args.epsilon,
            delta=args.delta,
            sampling_prob=prob,
            steps=args.steps,
        ).noise_multiplier
        result = run(
            data,
            args.model,
            mechanism=mechanism,
            denoise=denoise,
            rate=rate,
            seed=seed,
            noise=noise,
            batch_size=args.batch_size,
            steps=args.steps,
        )
        scores.setdefault((name, noise), {}).setdefault(rate, []).append(result)
    for (name, noise), rates in scores.items():
        best = max(rates, key=lambda r: statistics.mean(v for v, _ in rates[r]))
        tests = [test for _, test in rates[best]]
        error = statistics.stdev(tests) / math.sqrt(len(tests)) if len(tests) > 1 else math.nan
        table.add_row(
            name, f"{noise:.4f}", f"{best:g}", f"{statistics.mean(tests):.2f}", f"{error:.2f}"
        )
    console = Console()
    console.print(f"Fashion-MNIST, {args.model}, epsilon {args.epsilon}, {args.steps} steps")
    console.print(table)


if __name__ == "__main__":
    main()
