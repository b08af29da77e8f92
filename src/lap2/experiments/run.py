"""One private training run, from a recipe to a folder with everything about it."""

# pyright: basic

import json
import math
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.utils.data import DataLoader

from lap2.calibration import calibrate_noise
from lap2.experiments.recipe import Recipe, RecipeError, read_config
from lap2.experiments.tasks import Task, load_task
from lap2.ledger import write_text
from lap2.mechanism import NotAGuaranteeWarning, PublishedLaplace
from lap2.train import BudgetExhaustedError, PoissonLoader, PrivacyEngine, Statement

__all__ = ["Result", "noise_of", "resume", "train"]

_HELD_OUT = (
    "losses and accuracies on held-out records were written as they are: those records are private "
    "too, and nothing protects them"
)


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    dataset: str
    accuracy: float
    evaluated_on: str
    """"test", or "holdout": training records that were left out."""
    statement: Statement
    noise_multiplier: float
    seconds: float
    folder: Path
    steps: int
    """Of the model."""
    planned_steps: int
    lost_steps: int
    """Released before a crash, and so accounted, but not in the model."""
    curve: tuple[tuple[int, float], ...]
    """Accuracy after some of the steps."""


def train(recipe: Recipe, folder: Path, *, progress: bool = True) -> Result:
    """Train, and leave config, metrics, ledger, weights and a picture in ``folder``.

    The metrics are of the public test set, unless the recipe holds records out: nothing of the
    training data is written but what the private steps released. An interrupted run is continued by
    :func:`resume`.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder must be a folder, got the file {os.fspath(folder)!r}")
    _refuse_used(folder)
    run = _Run(recipe, load_task(recipe), folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", recipe.asdict())
    with run.engine:
        run.save()  # from here on, no step is forgotten
        return run.go(progress=progress)


def resume(folder: Path, *, progress: bool = True) -> Result:
    """Continue an interrupted :func:`train`, with the recipe it had.

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
        recipe = read_config(config)
    except RecipeError as error:
        raise RecipeError(f"{config} must hold the recipe of the run: {error}") from error
    run = _Run(recipe, load_task(recipe), folder)
    with run.engine:
        run.load()
        return run.go(progress=progress)


class _Run:
    """A run between its start, or its last checkpoint, and its end."""

    def __init__(self, recipe: Recipe, task: Task, folder: Path) -> None:
        self.recipe, self.task, self.folder, self.total = recipe, task, folder, recipe.steps
        optimizer = _optimizer(recipe, task.model)
        self.engine = PrivacyEngine(caveats=[_HELD_OUT] if task.evaluated_on == "holdout" else [])
        self.model, self.optimizer, loader = _make_private(self.engine, recipe, task, optimizer)
        self.loader = cast("PoissonLoader", loader)  # no recipe samples in another way
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _factor(recipe))
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
        every = max(1, self.total // self.recipe.evaluations)
        with _bar(progress) as bar:
            task = bar.add_task("starting", total=self.total, completed=self.step)
            try:
                for _ in self._steps():
                    if self.step % every == 0 or self.step == self.total:
                        self._report()
                        line = _describe(self.history[-1], self.task.evaluated_on)
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
        smoothing = self.recipe.label_smoothing
        losses_of = nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="none")
        while self.step < self.total:
            for inputs, labels in self.loader:
                started = time.perf_counter()
                self.optimizer.zero_grad()
                self.engine.backward(losses_of(self.model(inputs), labels))
                self.optimizer.step()
                self.seconds += time.perf_counter() - started
                if not self.loader.ends_batch:  # only a piece of it, or a rehearsal
                    continue
                self.schedule.step()
                self.step += 1
                yield self.step
                if self.step == self.total:  # which need not be the end of a pass
                    return

    def _report(self) -> None:
        """Measure, write it down, and make a checkpoint."""
        row = {"step": self.step, **self.task.evaluate()}
        self.history.append({**row, "epsilon": self.engine.get_epsilon(self.recipe.delta)})
        lines = "".join(json.dumps(row) + "\n" for row in self.history)
        write_text(self.folder / "metrics.jsonl", lines)
        self.engine.accountant.save(self.folder / "ledger.json")
        self.save()

    def _finish(self) -> Result:
        result = Result(
            self.recipe.dataset,
            self.history[-1]["accuracy"],
            self.task.evaluated_on,
            self.engine.statement(self.recipe.delta),
            self.engine.noise_multiplier,
            self.seconds,
            self.folder,
            self.step,
            self.total,
            self.lost,
            tuple((int(row["step"]), row["accuracy"]) for row in self.history),
        )
        torch.save(self.model.state_dict(), self.folder / "weights.pt")
        _draw(self.history, result, self.folder / "report.png")
        facts = {**asdict(result), "folder": str(self.folder)}
        _write_json(self.folder / "result.json", facts)
        return result


def _refuse_used(folder: Path) -> None:
    """No file of an earlier run, or of anything else, is overwritten."""
    used = [name for name in ("config.json", "ledger.json") if (folder / name).exists()]
    if not used:
        return
    if (folder / "result.json").exists():
        holds = "a run that was finished: "
    elif (folder / "checkpoint.pt").exists():
        holds = "a run that was interrupted: continue it with --resume, or "
    else:
        holds = f"a {used[0]} already: "
    raise ValueError(
        f"folder must be a new one, got {os.fspath(folder)!r}, which holds {holds}choose another "
        "with --folder"
    )


def _make_private(engine: PrivacyEngine, recipe: Recipe, task: Task, optimizer):
    """The engine's three results: noise for the target, or as the recipe has it."""
    shared: dict[str, Any] = {
        "module": task.model,
        "optimizer": optimizer,
        "data_loader": DataLoader(task.records, batch_size=recipe.batch_size),
        "max_physical_batch_size": recipe.max_physical_batch_size or None,
        "max_grad_norm": recipe.max_grad_norm,
        "mechanism": recipe.mechanism,
        "release": recipe.release or None,
        "copies": recipe.copies or "auto",
        "tau": recipe.tau or None,
    }
    noise = recipe.noise_multiplier
    if recipe.shortened > 1:
        times = recipe.shortened
        whole = replace(recipe, steps=recipe.steps * times, shortened=1, holdout=0)
        noise = noise_of(whole) / math.sqrt(times)
    elif not noise and recipe.accounting == "published":
        noise = _published_noise(recipe, task)
    if noise:
        return engine.make_private(noise_multiplier=noise, **shared)
    return engine.make_private_with_epsilon(
        target_epsilon=recipe.epsilon, target_delta=recipe.delta, steps=recipe.steps, **shared
    )


def noise_of(recipe: Recipe) -> float:
    """The noise multiplier that a run of this recipe has."""
    task = load_task(recipe)
    engine = PrivacyEngine()
    _make_private(engine, recipe, task, _optimizer(recipe, task.model))
    return engine.noise_multiplier


def _published_noise(recipe: Recipe, task: Task) -> float:
    """The noise with which the paper's accountant would claim the target. Not a guarantee."""
    dimension = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    with warnings.catch_warnings():  # that it is none is said by whatever shows the run
        warnings.simplefilter("ignore", NotAGuaranteeWarning)
        return calibrate_noise(
            PublishedLaplace(1.0, dimension),
            epsilon=recipe.epsilon,
            delta=recipe.delta,
            sampling_prob=recipe.batch_size / len(task.records),
            steps=recipe.steps,
        ).noise_multiplier


def _optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    rate, decay = recipe.learning_rate, recipe.weight_decay
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(params, lr=rate, weight_decay=decay)
    return torch.optim.SGD(params, lr=rate, weight_decay=decay, momentum=recipe.momentum)


def _factor(recipe: Recipe):
    """What the learning rate is multiplied with after a number of steps."""
    return {
        "constant": lambda step: 1.0,  # noqa: ARG005
        "linear": lambda step: 1 - step / recipe.steps,
        "hold": lambda step: min(1.0, 2 * (1 - step / recipe.steps)),
    }[recipe.learning_rate_schedule]


def _describe(row: dict[str, float], evaluated_on: str) -> str:
    epsilon = math.ceil(row["epsilon"] * 1e3) / 1e3
    return (
        f"{evaluated_on} loss {row['loss']:.3f}  accuracy {row['accuracy']:.2%}  "
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
    left.plot(steps, [100 * row["accuracy"] for row in history], color="#0072B2", marker="o", ms=3)
    left.set_xlabel("step")
    left.set_ylabel(f"{result.evaluated_on} accuracy (%)", color="#0072B2")
    left.grid(alpha=0.3)
    right = left.twinx()
    right.plot(steps, [row["epsilon"] for row in history], color="#D55E00", linestyle="--")
    right.set_ylabel(f"epsilon so far (delta = {result.statement.delta:g})", color="#D55E00")
    right.set_ylim(bottom=0)
    left.set_title(
        f"{result.dataset}: {result.accuracy:.2%} at epsilon "
        f"{math.ceil(result.statement.epsilon * 1e3) / 1e3:.3f}"
    )
    figure.savefig(path, dpi=150)
