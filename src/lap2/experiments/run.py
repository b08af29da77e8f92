"""One private training run, from settings to a folder with everything about it."""

# pyright: basic

import json
import math
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lap2 import _validate
from lap2.experiments.data import DataError, Images, load_digits, load_fashion_mnist, load_mnist
from lap2.experiments.models import mnist_cnn
from lap2.ledger import write_text
from lap2.train import BudgetExhaustedError, PrivacyEngine, Statement

__all__ = ["Result", "Settings", "resume", "train"]


_SUITABLE = {"mnist": (1024, 5.0), "fashion-mnist": (1024, 5.0), "digits": (256, 1.0)}
"""Batch size and learning rate of each data set, chosen for epsilon 1."""


@dataclass(frozen=True)
class Settings:
    """What a run is made of. The defaults are the paper's CNN on MNIST at (1, 1e-5).

    Batch size, epochs, rate, clip and label smoothing were chosen among some thirty settings on
    training images that were left out for it.
    """

    dataset: str = "mnist"
    epsilon: float = 1.0
    delta: float = 1e-5
    epochs: int = 10
    batch_size: int = 0
    """Zero is one that suits the data set."""
    learning_rate: float = 0.0
    """Zero is one that suits the data set at epsilon 1."""
    momentum: float = 0.9
    max_grad_norm: float = 0.1
    label_smoothing: float = 0.15
    mechanism: str = "laplace"
    denoise: str | float = "auto"
    seed: int = 0
    """Of the model's initial weights only: sampling and noise take no seed."""

    def __post_init__(self) -> None:
        _validate.choice("dataset", self.dataset, ("mnist", "fashion-mnist", "digits"))
        _validate.integer("epochs", self.epochs, least=1)
        batch_size, rate = _SUITABLE[self.dataset]
        object.__setattr__(self, "batch_size", self.batch_size or batch_size)
        object.__setattr__(self, "learning_rate", self.learning_rate or rate)
        _validate.integer("batch_size", self.batch_size, least=1)
        _validate.positive("learning_rate", self.learning_rate)
        _validate.probability("label_smoothing", self.label_smoothing)


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    dataset: str
    test_accuracy: float
    statement: Statement
    seconds: float
    folder: Path
    steps: int
    """Of the model."""
    planned_steps: int
    lost_steps: int
    """Released before a crash, and so accounted, but not in the model."""


def train(settings: Settings, folder: Path, *, progress: bool = True) -> Result:
    """Train, and leave config, metrics, ledger, weights and a picture in ``folder``.

    The metrics are of the public test set: nothing of the training data is written but what the
    private steps released. An interrupted run is continued by :func:`resume`.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder must be a folder, got the file {os.fspath(folder)!r}")
    if (folder / "config.json").exists() or (folder / "ledger.json").exists():
        state = "finished" if (folder / "result.json").exists() else "interrupted"
        advice = "" if state == "finished" else "continue it with --resume, or "
        raise ValueError(
            f"folder must be a new one, got {os.fspath(folder)!r}, which holds a run that was "
            f"{state}: {advice}choose another with --folder"
        )
    data = _load(settings.dataset)
    if data.name != settings.dataset:
        settings = replace(settings, dataset=data.name, batch_size=0, learning_rate=0.0)
    run = _Run(settings, data, folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", asdict(settings))
    run.save()  # from here on, no step is forgotten
    return run.go(progress=progress)


def resume(folder: Path, *, progress: bool = True) -> Result:
    """Continue an interrupted :func:`train`, with the settings it had.

    Steps that were released but lost in a crash are counted; if they leave no budget for all the
    steps that were planned, the run ends earlier, never with a larger epsilon.

    Raises:
        ValueError: there is nothing to continue in ``folder``.
    """
    if not (folder / "checkpoint.pt").exists():
        raise ValueError(f"folder must hold an interrupted run, got {os.fspath(folder)!r}")
    if (folder / "result.json").exists():
        raise ValueError(f"folder must hold an interrupted run; {os.fspath(folder)!r} is finished")
    config = folder / "config.json"
    try:
        settings = Settings(**json.loads(config.read_text(encoding="utf-8")))
    except (TypeError, ValueError, OSError) as error:
        raise ValueError(f"{config} must hold the settings of the run: {error}") from error
    run = _Run(settings, _load(settings.dataset), folder)
    run.load()
    return run.go(progress=progress)


class _Run:
    """A run between its start, or its last checkpoint, and its end."""

    def __init__(self, settings: Settings, data: Images, folder: Path) -> None:
        self.settings, self.data, self.folder = settings, data, folder
        if settings.batch_size > len(data.train_labels):
            raise ValueError(
                f"batch_size must be at most {len(data.train_labels)}, the number of training "
                f"records, got {settings.batch_size}"
            )
        torch.manual_seed(settings.seed)
        model = mnist_cnn()
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=settings.learning_rate,
            momentum=settings.momentum,
        )
        records = TensorDataset(
            torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
        )
        self.engine = PrivacyEngine()
        self.model, self.optimizer, self.loader = self.engine.make_private_with_epsilon(
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
        self.total = settings.epochs * len(self.loader)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, 2 * (1 - step / self.total))
        )
        self.step, self.lost, self.seconds = 0, 0, 0.0
        self.history: list[dict[str, float]] = []

    def save(self) -> None:
        extra = {"history": self.history, "seconds": self.seconds, "lost": self.lost}
        self.engine.save(self.folder / "checkpoint.pt", scheduler=self.schedule, extra=extra)

    def load(self) -> None:
        path = self.folder / "checkpoint.pt"
        resumed = self.engine.load(path, scheduler=self.schedule, fall_back=True)
        self.step = resumed.steps
        self.history, self.seconds = resumed.extra["history"], resumed.extra["seconds"]
        self.lost = resumed.extra["lost"] + resumed.lost_steps

    def go(self, *, progress: bool) -> Result:
        with _bar(progress) as bar:
            task = bar.add_task("starting", total=self.total, completed=self.step)
            try:
                for _ in self._steps():
                    if self.step % max(1, self.total // 40) == 0 or self.step == self.total:
                        self._report()
                        line = _describe(self.history[-1])
                        bar.update(task, description=line)
                        if progress and not bar.console.is_terminal:
                            bar.console.print(f"step {self.step} of {self.total}  {line}")
                    bar.advance(task)
            except KeyboardInterrupt:
                self.save()
                raise
            except BudgetExhaustedError:  # steps lost in a crash have used it up
                if not self.step:
                    raise
                self._report()
        return self._finish()

    def _steps(self) -> Iterator[int]:
        """Take all steps that are left."""
        loss_of = nn.CrossEntropyLoss(label_smoothing=self.settings.label_smoothing)
        while self.step < self.total:
            for images, labels in self.loader:
                started = time.perf_counter()
                self.optimizer.zero_grad()
                loss_of(self.model(images), labels).backward()
                self.optimizer.step()
                self.schedule.step()
                self.step += 1
                self.seconds += time.perf_counter() - started
                yield self.step

    def _report(self) -> None:
        """Measure, write it down, and make a checkpoint."""
        row = {"step": self.step, **_evaluate(self.model, self.data)}
        self.history.append({**row, "epsilon": self.engine.get_epsilon(self.settings.delta)})
        lines = "".join(json.dumps(row) + "\n" for row in self.history)
        write_text(self.folder / "metrics.jsonl", lines)
        self.engine.accountant.save(self.folder / "ledger.json")
        self.save()

    def _finish(self) -> Result:
        result = Result(
            self.data.name,
            self.history[-1]["test_accuracy"],
            self.engine.statement(self.settings.delta),
            self.seconds,
            self.folder,
            self.step,
            self.total,
            self.lost,
        )
        torch.save(self.model.state_dict(), self.folder / "weights.pt")
        _draw(self.history, result, self.folder / "report.png")
        facts = {**asdict(result), "folder": str(self.folder)}
        _write_json(self.folder / "result.json", facts)
        return result


def _load(name: str) -> Images:
    """The data set; the one that needs no download if MNIST cannot be had."""
    if name == "digits":
        return load_digits()
    if name == "fashion-mnist":
        return load_fashion_mnist()
    try:
        return load_mnist()
    except DataError as error:
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
