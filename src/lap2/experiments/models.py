"""The models of the experiments."""

# pyright: basic

from torch import nn

__all__ = ["logistic", "mnist_cnn"]


def mnist_cnn() -> nn.Sequential:
    """The paper's CNN for 28x28 grey images: 26,010 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def logistic() -> nn.Sequential:
    """Multinomial logistic regression on 28x28 grey images: 7,850 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
