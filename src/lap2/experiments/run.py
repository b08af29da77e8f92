"""One private training run, from settings to a folder with everything about it."""

# pyright: basic

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lap2 import _validate
from lap2.experiments.data import DataError, Images, load_digits, load_mnist
from lap2.experiments.models import mnist_cnn
from lap2.ledger import write_text
from lap2.train import PrivacyEngine, Statement

__all__ = ["Result", "Settings", "train"]


@dataclass(frozen=True)
class Settings:
    """What a run is made of. The defaults are the paper's CNN on MNIST at (1, 1e-5).

    Batch size, rate and clip were chosen among nine settings on the last 5,000 training images.
    """

    dataset: str = "mnist"
    epsilon: float = 1.0
    delta: float = 1e-5
    epochs: int = 20
    batch_size: int = 1024
    learning_rate: float = 2.0
    momentum: float = 0.9
    max_grad_norm: float = 0.1
    mechanism: str = "laplace"
    denoise: str | float = "auto"
    seed: int = 0
    """Of the model's initial weights only: sampling and noise take no seed."""

    def __post_init__(self) -> None:
        _validate.choice("dataset", self.dataset, ("mnist", "digits"))
        _validate.integer("epochs", self.epochs, least=1)
        _validate.integer("batch_size", self.batch_size, least=1)
        _validate.positive("learning_rate", self.learning_rate)


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    dataset: str
    test_accuracy: float
    statement: Statement
    seconds: float
    folder: Path


def train(settings: Settings, folder: Path, *, progress: bool = True) -> Result:
    """Train, and leave config, metrics, ledger, weights and a picture in ``folder``.

    The metrics are of the public test set: nothing of the training data is written but what the
    private steps released.
    """
    if (folder / "ledger.json").exists():
        raise ValueError(
            f"folder must be a new one, got {str(folder)!r}: it holds the ledger of another run"
        )
    folder.mkdir(parents=True, exist_ok=True)
    data = _load(settings.dataset)
    if data.name != settings.dataset:
        settings = replace(settings, dataset=data.name, batch_size=min(settings.batch_size, 359))
    torch.manual_seed(settings.seed)
    model = mnist_cnn()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.learning_rate, momentum=settings.momentum
    )
    records = TensorDataset(
        torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    )
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(records, batch_size=settings.batch_size),
        target_epsilon=settings.epsilon,
        target_delta=settings.delta,
        epochs=settings.epochs,
        max_grad_norm=settings.max_grad_norm,
        mechanism=settings.mechanism,  # type: ignore[arg-type]
        denoise=settings.denoise,
    )
    total = settings.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 2 * (1 - step / total))
    )
    _write_json(folder / "config.json", asdict(settings))
    started = time.perf_counter()
    history: list[dict[str, float]] = []
    with (folder / "metrics.jsonl").open("w") as log, _bar(progress) as bar:
        task = bar.add_task("starting", total=total)
        step = 0
        while step < total:
            for images, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                schedule.step()
                step += 1
                if step % max(1, total // 40) == 0 or step == total:
                    history.append({"step": step, **_evaluate(model, data)})
                    history[-1]["epsilon"] = engine.get_epsilon(settings.delta)
                    log.write(json.dumps(history[-1]) + "\n")
                    log.flush()
                    engine.accountant.save(folder / "ledger.json")
                    bar.update(task, description=_describe(history[-1]))
                bar.advance(task)
    seconds = time.perf_counter() - started
    engine.accountant.save(folder / "ledger.json")
    torch.save(model.state_dict(), folder / "weights.pt")
    result = Result(
        data.name,
        history[-1]["test_accuracy"],
        engine.statement(settings.delta),
        seconds,
        folder,
    )
    _write_json(
        folder / "result.json",
        {**asdict(result), "folder": str(folder), "skipped_examples": engine.skipped_examples},
    )
    _draw(history, result, folder / "report.png")
    return result


def _load(name: str) -> Images:
    """The data set; the one that needs no download if MNIST cannot be had."""
    if name == "digits":
        return load_digits()
    try:
        return load_mnist()
    except DataError as error:
        import warnings  # noqa: PLC0415

        warnings.warn(f"{error}\nTraining on scikit-learn's digits instead.", stacklevel=3)
        return load_digits()


@torch.no_grad()
def _evaluate(model: nn.Module, data: Images) -> dict[str, float]:
    model.eval()
    logits = model(torch.from_numpy(data.test_images))
    labels = torch.from_numpy(data.test_labels)
    model.train()
    return {
        "test_loss": float(nn.functional.cross_entropy(logits, labels)),
        "test_accuracy": float((logits.argmax(dim=1) == labels).double().mean()),
    }


def _describe(row: dict[str, float]) -> str:
    epsilon = math.ceil(row["epsilon"] * 1e3) / 1e3
    return (
        f"test loss {row['test_loss']:.3f}  accuracy {row['test_accuracy']:.2%}  "
        f"epsilon {epsilon:.3f}"
    )


def _bar(visible: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), disable=not visible)


def _write_json(path: Path, content: dict[str, object]) -> None:
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def _draw(history: list[dict[str, float]], result: Result, path: Path) -> None:
    """Accuracy and epsilon against steps."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    steps = [row["step"] for row in history]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    left = figure.subplots()
    left.plot(
        steps, [100 * row["test_accuracy"] for row in history], color="#0072B2", marker="o", ms=3
    )
    left.set_xlabel("step")
    left.set_ylabel("test accuracy (%)", color="#0072B2")
    left.grid(alpha=0.3)
    right = left.twinx()
    right.plot(steps, [row["epsilon"] for row in history], color="#D55E00", linestyle="--")
    right.set_ylabel(f"epsilon so far (delta = {result.statement.delta:g})", color="#D55E00")
    right.set_ylim(bottom=0)
    left.set_title(
        f"{result.dataset}: {result.test_accuracy:.2%} at epsilon "
        f"{math.ceil(result.statement.epsilon * 1e3) / 1e3:.3f}"
    )
    figure.savefig(path, dpi=150)
