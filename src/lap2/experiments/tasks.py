"""The task of a recipe: its data, its model, and what it is evaluated on."""

# pyright: basic

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lap2.experiments.data import (
    Images,
    load_cifar10,
    load_digits,
    load_fashion_mnist,
    load_mnist,
)
from lap2.experiments.models import logistic, mnist_cnn
from lap2.experiments.recipe import Recipe

__all__ = ["Task", "load_task"]

_CLASSES = 10
_LOADERS = {
    "mnist": load_mnist,
    "fashion-mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
    "digits": load_digits,
}
_STANDARD = {
    "mnist": (np.float32(0.1307), np.float32(0.3081)),
    "fashion-mnist": (np.float32(0.2860), np.float32(0.3530)),
    "digits": (np.float32(0.0), np.float32(1.0)),
}
"""Published mean and deviation of the pixels: constants, not computed from the records."""
_BATCH = 1000
"""Records evaluated at once."""


@dataclass(frozen=True)
class Task:
    """A model, the records it is trained on, and other records that tell how good it is."""

    model: nn.Module
    records: TensorDataset
    evaluated_on: str
    """"test", or "holdout": training records that were left out."""
    inputs: torch.Tensor
    labels: torch.Tensor

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy of the model as it is now."""
        self.model.eval()
        logits = torch.cat([self.model(part) for part in self.inputs.split(_BATCH)])
        self.model.train()
        return {
            "loss": float(nn.functional.cross_entropy(logits, self.labels)),
            "accuracy": float((logits.argmax(dim=1) == self.labels).double().mean()),
        }


def load_task(recipe: Recipe) -> Task:
    """Load the data and make the model, its new weights drawn from the recipe's seed.

    Raises:
        DataError: no source has the data or the weights.
        ValueError: the recipe does not fit the data.
    """
    images = _inputs(recipe.dataset, recipe.model)
    torch.manual_seed(recipe.seed)
    model = _model(recipe.model)
    inputs, labels = (torch.from_numpy(a) for a in (images.train_images, images.train_labels))
    kept, left_out = _split(len(labels), recipe.holdout)
    if recipe.batch_size > len(kept):
        raise ValueError(
            f"batch_size must be at most {len(kept)}, the number of training records, got "
            f"{recipe.batch_size}"
        )
    if recipe.holdout:
        records = TensorDataset(inputs[kept], labels[kept])
        return Task(model, records, "holdout", inputs[left_out], labels[left_out])
    test = [torch.from_numpy(a) for a in (images.test_images, images.test_labels)]
    return Task(model, TensorDataset(inputs, labels), "test", *test)


def _split(count: int, holdout: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Records to train on and records left out: always the same ones."""
    if not holdout < count:
        raise ValueError(
            f"holdout must be below {count}, the number of training records, got {holdout}"
        )
    order = torch.from_numpy(np.random.default_rng(0).permutation(count))
    return order[: count - holdout], order[count - holdout :]


@lru_cache(maxsize=2)
def _inputs(dataset: str, model: str) -> Images:
    """What the model sees: standardised images, or what a frozen backbone makes of them."""
    images = _LOADERS[dataset]()
    backbone, _, part = model.partition("/")
    if not part:
        mean, deviation = _STANDARD[dataset]
        inputs = [(a - mean) / deviation for a in (images.train_images, images.test_images)]
        return replace(images, train_images=inputs[0], test_images=inputs[1])
    from lap2.experiments.backbones import features  # noqa: PLC0415 - optional packages

    return features(backbone, part, images)


def _model(name: str) -> nn.Module:
    backbone, _, part = name.partition("/")
    if part:
        from lap2.experiments.backbones import trainable  # noqa: PLC0415 - optional packages

        return trainable(backbone, part, classes=_CLASSES)
    return {"cnn": mnist_cnn, "logistic": logistic}[name]()
