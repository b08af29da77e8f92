"""A private CNN for handwritten digits with Opacus: 28x28 images, as MNIST's.

The images are scikit-learn's digits, enlarged, so that nothing needs to be downloaded; put any
tensors of MNIST in their place.
"""

import argparse

import sklearn.datasets
import torch
from opacus import PrivacyEngine

DELTA = 1e-4


def load():
    digits = sklearn.datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = torch.nn.functional.interpolate(images, size=28, mode="bilinear")
    data = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
    return torch.utils.data.random_split(data, [1500, len(data) - 1500])


def make_model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 8, stride=2, padding=3),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2, 1),
        torch.nn.Conv2d(16, 32, 4, stride=2),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2, 1),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 10),
    )


def accuracy(model, data):
    images, labels = next(iter(torch.utils.data.DataLoader(data, batch_size=len(data))))
    model.eval()
    with torch.no_grad():
        share = (model(images).argmax(dim=1) == labels).float().mean()
    model.train()
    return float(share)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--epsilon", type=float, default=8.0)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    train, test = load()
    model = make_model()
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        data_loader=torch.utils.data.DataLoader(train, batch_size=100),
        target_epsilon=arguments.epsilon,
        target_delta=DELTA,
        epochs=arguments.epochs,
        max_grad_norm=1.0,
    )
    for epoch in range(1, arguments.epochs + 1):
        for images, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        epsilon = engine.get_epsilon(delta=DELTA)
        print(f"epoch {epoch}: test accuracy {accuracy(model, test):.3f}, epsilon {epsilon:.3f}")


if __name__ == "__main__":
    main()
