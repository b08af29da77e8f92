"""Many runs: in parallel, on one machine or several, and never twice.

Every finished run is one line of a JSON-lines file. A sweep that is started again takes the lines
that are there as done, continues the runs that were interrupted from their checkpoints, and does
the rest.
"""

# pyright: basic

import contextlib
import hashlib
import importlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lap2 import _validate
from lap2.experiments.formats import FormatError, content_of, parsed_json
from lap2.experiments.recipe import Recipe

__all__ = ["Job", "Row", "finish", "read_rows"]

_BACKENDS = ("loky", "multiprocessing", "threading", "sequential", "ray", "dask")

Row = dict[str, Any]
"""A finished run: its labels, recipe, accuracy, noise and cost."""


@dataclass(frozen=True)
class Job:
    """One run of a sweep: a recipe, and words that say what the run is for."""

    recipe: Recipe
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Tells the run from all others: the same recipe and labels, the same key.

        In which pieces a batch is worked on changes nothing of what comes out. Nor does the last
        bit of a noise that was calculated, in which processors differ.
        """
        recipe = {name: _nine_digits(value) for name, value in self.recipe.asdict().items()}
        del recipe["max_physical_batch_size"]
        content = {"recipe": recipe, "labels": dict(self.labels)}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _nine_digits(value: Any) -> Any:
    return float(f"{value:.9g}") if isinstance(value, float) else value


_MOST_BYTES = 1 << 26
_MOST_POINTS = 100_000
_WORD = re.compile(r"[\w.+-]{1,60}", re.ASCII)
"""Labels and versions: they get into pages and pictures."""
_NUMBERS = {"epsilon", "factor", "batch", "clip", "prob", "noise"}
"""Labels that are read as numbers."""
_WHOLE = {
    "experiment": {"scale", "dataset", "column", "epsilon", "phase", "factor"},
    "figure5": {"clip"},
    "figure6": {"prob", "noise"},
    "figure10": {"batch"},
    "figure11": {"batch"},
    "cifar10": {"recipe"},
    "cifar10-block": {"recipe"},
}
"""Other labels that a row has if it has this one, or this experiment."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file, in its order; none if there is no file.

    Raises:
        FormatError: a line is not a row; it names the line, the field and the rule.
    """
    if not path.exists():
        return []
    try:
        lines = content_of(path, most=_MOST_BYTES).decode().splitlines()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} must be text in UTF-8: {error}") from None
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}, must be a row of results"
        try:
            rows.append(_checked(parsed_json(line, "it")))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}: {error}") from error
    return rows


def _checked(row: Any) -> Row:
    if not isinstance(row, dict) or row.keys() != _RULES.keys():
        raise FormatError(f"it must be an object with exactly the fields {', '.join(_RULES)}")
    for name, (rule, holds) in _RULES.items():
        if not holds(row[name]):
            raise FormatError(f"{name} must be {rule}, got {repr(row[name])[:80]}")
    job = Job(Recipe.of(row["recipe"]), row["labels"])
    if row["key"] != job.key:
        raise FormatError(f"key must be that of the recipe and the labels, {job.key}")
    return row


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and bool(_WORD.fullmatch(value))


def _is_number(value: Any, most: float = math.inf) -> bool:
    return type(value) is float and 0 <= value <= most


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_labels(value: Any) -> bool:
    if not isinstance(value, dict) or not all(_is_word(w) for item in value.items() for w in item):
        return False
    needed = set[str]()
    if "experiment" in value:
        needed = _WHOLE["experiment"] | _WHOLE.get(value["experiment"], set())
    return needed <= value.keys() and all(_says_number(value[n]) for n in _NUMBERS & value.keys())


def _says_number(text: str) -> bool:
    return bool(re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII)) and float(text) > 0


def _is_curve(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_POINTS
        and all(isinstance(point, list) and len(point) == 2 for point in value)
        and all(_is_count(step) and _is_number(accuracy, 1) for step, accuracy in value)
    )


_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "key": ("16 hexadecimal digits", _is_word),
    "labels": ("short words by name, those of its experiment among them", _are_labels),
    "accuracy": ("a share, as a float", lambda value: _is_number(value, 1)),
    "evaluated_on": ("test or holdout", lambda value: value in ("test", "holdout")),
    "noise_multiplier": ("a float at least 0", _is_number),
    "exact_epsilon": ("a float at least 0", _is_number),
    "steps": ("an integer at least 0", _is_count),
    "lost_steps": ("an integer at least 0", _is_count),
    "seconds": ("a float at least 0", _is_number),
    "lap2": ("a version", _is_word),
    "curve": ("a list of steps, each with an accuracy", _is_curve),
    "recipe": ("an object", lambda value: isinstance(value, dict)),
}
"""What a row must hold: in words, and as a test."""


def finish(
    jobs: Sequence[Job],
    results: Path,
    *,
    folder: Path,
    workers: int | None = None,
    backend: str = "loky",
    progress: bool = True,
) -> list[Row]:
    """Do the jobs that are not done, and return the rows of all, in the order of ``jobs``.

    Args:
        jobs: each at most once.
        results: JSON lines; each row is added, and on the disk, as soon as its run ends.
        folder: for the runs while they last; a run that ends leaves nothing here.
        workers: runs at a time; by default one for each core.
        backend: of joblib. "loky" is processes of this machine; "ray" and "dask" spread the runs
            over the machines of a cluster, once that engine is installed and configured.
        progress: show a bar, or a line for each run where there is no terminal.
    """
    _validate.choice("backend", backend, _BACKENDS)
    count = _cores() if workers is None else _validate.integer("workers", workers, least=1)
    for job in jobs:
        if not _are_labels(dict(job.labels)):
            raise ValueError(f"labels must be {_RULES['labels'][0]}, got {dict(job.labels)!r}")
    done = {row["key"]: row for row in read_rows(results)}
    missing = [job for job in {job.key: job for job in jobs}.values() if job.key not in done]
    results.parent.mkdir(parents=True, exist_ok=True)
    with _bar(progress and bool(jobs)) as bar:
        task = bar.add_task("runs", total=len(jobs), completed=len(jobs) - len(missing))
        for row in _rows(missing, folder, count, backend):
            with results.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
            done[row["key"]] = row
            bar.advance(task)
            if progress and not bar.console.is_terminal:
                bar.console.print(_line(row), soft_wrap=True)
    return [done[job.key] for job in jobs]


def _rows(jobs: list[Job], folder: Path, workers: int, backend: str) -> Iterator[Row]:
    """The rows of the jobs, as they come."""
    if not jobs:
        return
    joblib = _engine("joblib", "lap2[experiments]")
    if backend == "ray":
        _engine("ray.util.joblib", "ray").register_ray()
    threads = max(1, _cores() // workers)
    with joblib.parallel_config(backend=backend, n_jobs=workers):
        tasks = [joblib.delayed(do)(job, folder, threads) for job in jobs]
        if joblib.parallel.get_active_backend()[0].supports_return_generator:
            yield from joblib.Parallel(return_as="generator_unordered")(tasks)
            return
        for start in range(0, len(tasks), workers):  # so that rows are written as they come
            yield from joblib.Parallel()(tasks[start : start + workers])


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _engine(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this sweep needs {module}: python -m pip install '{package}'"
        ) from error


def do(job: Job, folder: Path, threads: int) -> Row:
    """Do one job, from its last checkpoint if it was interrupted."""
    import torch  # noqa: PLC0415 - jobs can be made without it

    from lap2 import __version__  # noqa: PLC0415
    from lap2.experiments import run  # noqa: PLC0415

    torch.set_num_threads(threads)
    place = folder / job.key
    if (place / "result.json").exists():  # it ended, but its row did not reach the file
        shutil.rmtree(place)
    if (place / "checkpoint.pt").exists():
        result = run.resume(place, progress=False)
    else:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(place)  # interrupted before its first checkpoint
        result = run.train(job.recipe, place, progress=False)
    statement = result.statement
    row: Row = {
        "key": job.key,
        "labels": dict(job.labels),
        "accuracy": result.accuracy,
        "evaluated_on": result.evaluated_on,
        "noise_multiplier": result.noise_multiplier,
        "exact_epsilon": statement.epsilon,
        "steps": result.steps,
        "lost_steps": result.lost_steps,
        "seconds": round(result.seconds, 1),
        "lap2": __version__,
        "curve": [[step, round(accuracy, 4)] for step, accuracy in result.curve],
        "recipe": job.recipe.asdict(),
    }
    shutil.rmtree(place)
    return row


def _line(row: Row) -> str:
    words = " ".join(str(word) for word in row["labels"].values())
    return f"{words}: {row['accuracy']:.2%} ({row['evaluated_on']}, {row['seconds']:.0f} s)"


def _bar(visible: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), disable=not visible
    )


def select(rows: Iterable[Row], **labels: str) -> list[Row]:
    """The rows with all of these labels."""
    return [r for r in rows if all(r["labels"].get(name) == v for name, v in labels.items())]
