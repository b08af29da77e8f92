"""What basis and copies are worth to released signs: how much of a gradient is signal, by layer.

Trains the CNN privately, and looks at some of its true sums, as only a benchmark may. Of each it
makes fresh releases at the same scale and so at the same privacy: with Gaussian noise; by the signs
of its coordinates as they are, each given as often as ``copies="auto"`` says; and the same in the
rotated basis, as the library does it, once and that often. Printed is the share of signal,
``<s, f>^2 / (|s|^2 |f|^2)`` over all steps looked at, of the last three over the first: 1 is as
good as Gaussian noise.

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
from lap2.noise import SecureSigns
from lap2.signal import copies
from lap2.train import PrivacyEngine
from lap2.train.rotate import gather, spread

DRAWS = 100


class Watched(SecureSigns):
    """Keeps some of the sums before their noise."""

    def __init__(self, every, number=1):
        super().__init__(number)
        self.every, self.calls, self.kept = every, 0, []

    def times(self, number):
        """Goes on counting."""
        self.copies = number
        return self

    def add(self, array, scale):
        """Keep it, and draw bits."""
        if self.calls % self.every == self.every - 1:
            self.kept.append(array.clone() / scale)
        self.calls += 1
        return super().add(array, scale)


def record(noise, rate, steps, every):
    """The module, and true sums in noise scales, in the rotated basis."""
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
        rehearse=False,
    )
    batches = (batch for _ in iter(int, 1) for batch in loader)
    for _, (x, y) in zip(track(range(steps), "training"), batches, strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return module, sampler.kept


def shares(module, sums, number):
    """For each tensor, the share of signal under Gaussian noise and the three kinds of signs."""
    params = list(module.parameters())
    totals = torch.zeros(4, len(params), 3, dtype=torch.float64)
    once, several = SecureSigns(), SecureSigns(number)
    for flat in track(sums, "adding noise"):
        signal = [torch.empty_like(p, dtype=torch.float64) for p in params]
        gather(flat.clone(), signal)
        for _ in range(DRAWS):
            normal = [s + torch.randn_like(s) for s in signal]
            plain = [s.clone() for s in signal]
            several.add(plain, 1.0)
            found = [normal, plain]
            for signs in (once, several):
                turned, back = spread(signal), [torch.empty_like(s) for s in signal]
                signs.add(turned, 1.0)
                gather(turned, back)
                found.append(back)
            for kind, estimates in enumerate(found):
                for i, (s, f) in enumerate(zip(signal, estimates, strict=True)):
                    totals[kind, i] += torch.stack([(s * f).sum(), (f * f).sum(), (s * s).sum()])
    cross, power, true = totals.unbind(-1)
    return cross**2 / power / true


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise", type=float, default=1.673, help="noise multiplier")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50)
    args = parser.parse_args()
    module, sums = record(args.noise, args.rate, args.steps, args.every)
    number = copies(len(sums[0]), batch_size=258, noise_multiplier=args.noise)
    gaussian, *others = shares(module, sums, number)
    table = Table(
        "tensor", "coordinates", f"as it is, {number} copies", "rotated, one", f"rotated, {number}"
    )
    for i, (name, p) in enumerate(module.named_parameters()):
        if p.numel() < 100:
            continue  # too few to tell
        table.add_row(name, str(p.numel()), *(f"{float(k[i] / gaussian[i]):.2f}" for k in others))
    level = sum(float((s**2).mean()) for s in sums) / len(sums)
    console = Console()
    console.print(f"signal of a coordinate in the rotated basis: {level**0.5:.3f} noise scales")
    console.print("share of signal, relative to Gaussian noise:", table)


if __name__ == "__main__":
    main()
