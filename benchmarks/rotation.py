"""What the basis of the noise is worth: how much of a denoised gradient is signal, by layer.

Trains the CNN privately, and looks at some of its true sums, as only a benchmark may. To each it
adds fresh Gaussian noise, Laplace noise clamped coordinate by coordinate, and Laplace noise clamped
in the rotated basis with its repeated coordinates, all of the same scale and so at the same
privacy. Printed is the share of signal, ``<s, f>^2 / (|s|^2 |f|^2)`` over all steps looked at, of
the last two over the first: 1 is as good as Gaussian noise. The clamp is the best of a grid, for
each tensor or, in the rotated basis, for all together, as the library has it.

    python benchmarks/rotation.py
    python benchmarks/rotation.py --noise 0.8 --rate 0.1
"""

import argparse

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lap2.experiments.data import load_fashion_mnist
from lap2.experiments.models import mnist_cnn
from lap2.noise import SecureLaplace
from lap2.train import PrivacyEngine
from lap2.train.rotate import gather

TAUS = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, float("inf"))
DRAWS = 100


class Watched(SecureLaplace):
    """Keeps some of the sums before their noise."""

    def __init__(self, every):
        super().__init__()
        self.every, self.calls, self.kept = every, 0, []

    def add(self, array, scale):
        """Keep it, and add noise."""
        if self.calls % self.every == self.every - 1:
            self.kept.append(array[0].clone() / scale)
        self.calls += 1
        return super().add(array, scale)


def record(noise, rate, steps, every):
    """The module, and true sums in noise scales, as they are released."""
    data = load_fashion_mnist()
    torch.manual_seed(0)
    module, sampler = mnist_cnn(), Watched(every)
    images = torch.from_numpy(data.train_images)
    loader = DataLoader(TensorDataset(images, torch.from_numpy(data.train_labels)), batch_size=258)
    module, optimizer, loader = PrivacyEngine(sampler=sampler).make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9),
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=1.0,
    )
    batches = (batch for _ in iter(int, 1) for batch in loader)
    for _, (x, y) in zip(track(range(steps), "training"), batches, strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return module, sampler.kept


def shares(module, sums):
    """For each tensor, the share of signal under Gaussian noise and the two ways to clamp."""
    laplace = torch.distributions.Laplace(0.0, 1.0)
    params = list(module.parameters())
    totals = torch.zeros(3, len(TAUS), len(params), 3, dtype=torch.float64)
    for flat in track(sums, "adding noise"):
        signal = [torch.empty_like(p, dtype=torch.float64) for p in params]
        gather(flat.clone(), signal)
        for _ in range(DRAWS):
            noise = [laplace.sample(s.shape).double() for s in signal]
            turned = flat + laplace.sample(flat.shape).double()
            normal = [s + torch.randn_like(s) for s in signal]
            for k, tau in enumerate(TAUS):
                plain = [(s + z).clamp(-tau, tau) for s, z in zip(signal, noise, strict=True)]
                back = [torch.empty_like(s) for s in signal]
                gather(turned.clamp(-tau, tau), back)
                for kind, found in enumerate((normal, plain, back)):
                    for i, (s, f) in enumerate(zip(signal, found, strict=True)):
                        products = [(s * f).sum(), (f * f).sum(), (s * s).sum()]
                        totals[kind, k, i] += torch.stack(products)
    gaussian, plain, rotated = _share(totals)
    best = int(_share(totals[2].sum(dim=1)).argmax())
    return gaussian[0], plain.amax(dim=0), rotated[best]


def _share(totals):
    cross, power, signal = totals.unbind(-1)
    return cross**2 / power / signal


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise", type=float, default=1.673, help="noise multiplier")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50)
    args = parser.parse_args()
    module, sums = record(args.noise, args.rate, args.steps, args.every)
    gaussian, plain, rotated = shares(module, sums)
    table = Table("tensor", "coordinates", "as it is", "rotated")
    for i, (name, p) in enumerate(module.named_parameters()):
        if p.numel() < 100:
            continue  # too few to tell
        ratios = (f"{float(kind[i] / gaussian[i]):.2f}" for kind in (plain, rotated))
        table.add_row(name, str(p.numel()), *ratios)
    level = sum(float((s**2).mean()) for s in sums) / len(sums)
    console = Console()
    console.print(f"signal of a released coordinate: {level**0.5:.3f} noise scales")
    console.print("share of signal, relative to Gaussian noise:", table)


if __name__ == "__main__":
    main()
