"""``lap2 audit``: try to prove an epsilon wrong.

Exit codes: 0 consistent with the claim, 1 the claim is violated, 2 bad input.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lap2 import _validate
from lap2._digits import as_given, rounded_down, rounded_up
from lap2.cli.options import AsJson, input_checked, integer, number
from lap2.cli.show import print_json

if TYPE_CHECKING:
    import numpy as np

    from lap2.audit.controls import Fault
    from lap2.audit.result import Result
    from lap2.train.readout import ReleaseName

app = typer.Typer(
    help="Try to prove an epsilon wrong. Exit code 1: it is; 0: not shown to be; 2: bad input.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_SAMPLERS = ("secure", "reproducible", "torch", "numpy")
_CONTROLS = (
    *("none", "noise", "clip", "layer", "sampling", "divisor", "float32", "repeat", "shared"),
    *("copies", "ledger", "whole", "twins"),
)

NoiseMultiplier = Annotated[float, number("b / C: Laplace scale over the clip.")]
Delta = Annotated[float, number("Of the claim, strictly between 0 and 1.")]
Confidence = Annotated[float, number("A true claim is called violated with at most 1 minus this.")]
Trials = Annotated[int, integer("Releases, of both neighbours together.")]
Control = Annotated[
    str,
    typer.Option(
        "--control",
        help=f"Negative control: break this on purpose; {', '.join(_CONTROLS)}. The last four are "
        "of bits alone.",
    ),
]
Release = Annotated[
    str,
    typer.Option(
        "--release",
        help="What to audit the release of: bits (the engine's default), values, or both, one "
        "after the other.",
    ),
]
Seed = Annotated[
    int | None, integer("Of the auditor's own choices; by default from the operating system.")
]


@app.command()
def sampler(
    *,
    noise: Annotated[
        str, typer.Option("--noise", help=f"One of {', '.join(_SAMPLERS)}.")
    ] = "secure",
    scale: Annotated[float, number("The Laplace scale b.")] = 1.0,
    size: Annotated[int, integer("Coordinates in a step.")] = 10_000,
    steps: Annotated[int, integer("Steps to draw.")] = 1000,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or float64.")] = "float32",
    delta: Delta = 1e-5,
    confidence: Confidence = 0.999,
    control: Control = "none",
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """The noise alone: scale, shape, independence, and the set of possible outputs."""
    from lap2.audit.controls import FAULTS  # noqa: PLC0415 - scipy is not always needed
    from lap2.audit.sampler import audit_sampler  # noqa: PLC0415

    fault = FAULTS[_one_of("--control", control, _CONTROLS)]
    source = input_checked(lambda: fault.sampler("values", _sampler(noise, seed)))
    with _progress("drawing", size * steps, as_json) as advance:
        result = input_checked(
            lambda: audit_sampler(
                source,
                scale=scale,
                size=size,
                steps=steps,
                delta=delta,
                confidence=confidence,
                dtype=dtype,
                progress=advance,
            )
        )
    _conclude(result, as_json)


@app.command()
def mechanism(
    *,
    noise_multiplier: NoiseMultiplier = 1.0,
    trials: Trials = 200_000,
    steps: Annotated[int, integer("Single steps in the setting with another record.")] = 4000,
    release: Release = "both",
    delta: Delta = 1e-5,
    confidence: Confidence = 0.999,
    control: Control = "none",
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """lap2's own step on neighbouring batches: real sampling, clipping, noise and readout."""
    from lap2.audit.controls import FAULTS  # noqa: PLC0415
    from lap2.audit.engine import audit_engine, releases_of_an_audit  # noqa: PLC0415 - needs torch

    fault = FAULTS[_one_of("--control", control, _CONTROLS)]
    releases = _releases(release, fault)
    work = [releases_of_an_audit(release=kind, trials=trials, steps=steps) for kind in releases]
    rng = _rng(seed)
    with _progress("releasing", sum(work), as_json) as advance:
        result = _audit_each(
            releases,
            confidence,
            lambda kind, share: audit_engine(
                noise_multiplier=noise_multiplier,
                release=kind,
                trials=trials,
                steps=steps,
                delta=delta,
                confidence=share,
                fault=fault,
                rng=rng,
                progress=advance,
            ),
        )
    _conclude(result, as_json)


@app.command()
def run(
    *,
    noise_multiplier: NoiseMultiplier = 1.0,
    canaries: Annotated[int, integer("Canaries, each in the data by a fair coin.")] = 1000,
    width: Annotated[int, integer("Coordinates of each canary.")] = 8,
    records: Annotated[int, integer("Real records beside the canaries (synthetic).")] = 500,
    batch_size: Annotated[int, integer("Expected number of records in a step.")] = 100,
    steps: Annotated[int, integer("Steps of the run.")] = 100,
    release: Release = "both",
    delta: Delta = 1e-5,
    confidence: Confidence = 0.999,
    control: Control = "none",
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Canaries in one training run, compared with what a correct run shows."""
    from lap2.audit.controls import FAULTS  # noqa: PLC0415
    from lap2.audit.demonstration import audit_demonstration_run  # noqa: PLC0415

    fault = FAULTS[_one_of("--control", control, _CONTROLS)]
    releases = _releases(release, fault)
    rng = _rng(seed)
    with _progress("training", len(releases) * steps, as_json) as advance:
        result = _audit_each(
            releases,
            confidence,
            lambda kind, share: audit_demonstration_run(
                noise_multiplier=noise_multiplier,
                canaries=canaries,
                width=width,
                records=records,
                batch_size=batch_size,
                steps=steps,
                release=kind,
                delta=delta,
                confidence=share,
                fault=fault,
                rng=rng,
                progress=advance,
            ),
        )
    _conclude(result, as_json)


@app.command()
def claim(
    *,
    bound: Annotated[
        str, typer.Option("--bound", help="exact, majorized or published.")
    ] = "published",
    dimension: Annotated[int, integer("Number of coordinates.")] = 100,
    noise_multiplier: NoiseMultiplier = 0.3,
    sampling_prob: Annotated[float, number("Poisson sampling probability of a record.")] = 0.01,
    steps: Annotated[int, integer("Number of steps.")] = 1,
    delta: Delta = 1e-5,
    trials: Trials = 1_000_000,
    confidence: Confidence = 0.999,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """A formula: simulate the mechanism and count what the formula says cannot happen."""
    from lap2.audit.claims import audit_claim  # noqa: PLC0415

    with _progress("simulating", trials, as_json) as advance:
        result = input_checked(
            lambda: audit_claim(
                bound,
                dimension=dimension,
                noise_multiplier=noise_multiplier,
                sampling_prob=sampling_prob,
                steps=steps,
                delta=delta,
                trials=trials,
                confidence=confidence,
                rng=_rng(seed),
                progress=advance,
            )
        )
    _conclude(result, as_json)


def _releases(release: str, fault: "Fault") -> tuple["ReleaseName", ...]:
    """The kinds of release to audit."""
    chosen = _one_of("--release", release, ("both", "bits", "values"))
    if fault.is_of_bits and chosen != "bits":
        raise typer.BadParameter(f"--release must be bits for a control of bits, got {chosen!r}")
    return tuple(kind for kind in ("bits", "values") if chosen in {kind, "both"})


def _audit_each(
    releases: tuple["ReleaseName", ...],
    confidence: float,
    audit: Callable[["ReleaseName", float], "Result"],
) -> "Result":
    """One verdict on several kinds of release, whose audits share the error probability."""
    from lap2.audit.result import combined  # noqa: PLC0415

    error = 1 - input_checked(lambda: _validate.open_probability("confidence", confidence))
    share = 1 - error / len(releases)
    results = {str(kind): input_checked(partial(audit, kind, share)) for kind in releases}
    if len(results) == 1:
        return next(iter(results.values()))
    return combined(results, what=f"{len(results)} kinds of release", confidence=confidence)


def _rng(seed: int | None) -> "np.random.Generator":
    import numpy as np  # noqa: PLC0415

    return np.random.default_rng(seed)


def _sampler(name: str, seed: int | None) -> Any:
    from lap2.audit.controls import NumpyLaplace, TorchLaplace  # noqa: PLC0415
    from lap2.noise import ReproducibleLaplace, SecureLaplace  # noqa: PLC0415

    makers: dict[str, Callable[[], Any]] = {
        "secure": SecureLaplace,
        "reproducible": lambda: ReproducibleLaplace(seed or 0),
        "torch": TorchLaplace,
        "numpy": lambda: NumpyLaplace(_rng(seed)),
    }
    return makers[_one_of("--noise", name, _SAMPLERS)]()


def _one_of(option: str, value: str, options: tuple[str, ...]) -> str:
    if value not in options:
        raise typer.BadParameter(f"{option} must be one of {', '.join(options)}; got {value!r}")
    return value


@contextmanager
def _progress(doing: str, total: int, as_json: bool) -> Generator[Callable[[int], None]]:
    """A bar on the error stream, which leaves the output to the result."""
    with Progress(console=Console(stderr=True), transient=True, disable=as_json) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda done: bar.advance(task, done)


def _conclude(result: "Result", as_json: bool) -> None:
    """Print, and exit with the verdict."""
    if as_json:
        print_json(asdict(result))
    else:
        _show(result, Console())
    raise typer.Exit(1 if result.violated else 0)


def _show(result: "Result", console: Console) -> None:
    colour = "red" if result.violated else "green"
    rows = Table.grid(padding=(0, 2))
    rows.add_row("[bold]verdict[/]", f"[bold {colour}]{result.verdict}[/]")
    rows.add_row("epsilon", f"at least {rounded_down(result.epsilon_lower)}")
    claimed, delta = rounded_up(result.claimed_epsilon), as_given(result.delta)
    rows.add_row("claimed", f"{claimed} at delta {delta}")
    percent = Decimal(repr(result.confidence)).scaleb(2).normalize()
    rows.add_row("confidence", f"{percent:f}%")
    rows.add_row("done", result.what)
    for bound in result.bounds:
        assumption = f", if {bound.assumption}" if bound.assumption else ""
        rows.add_row("bound", f"{rounded_down(bound.epsilon_lower)} by {bound.method}{assumption}")
    for name, value in result.facts.items():
        text = name.replace("_", " ")
        rows.add_row(text, rounded_down(value) if text.endswith("at least") else f"{value:.4g}")
    for evidence in result.evidence:
        rows.add_row("[red]evidence[/]", evidence)
    console.print(rows)
    if result.checks:
        table = Table("check", "p-value", "observed", "expected")
        for check in result.checks:
            table.add_row(check.name, f"{check.p_value:.2g}", check.observed, check.expected)
        console.print(table)
