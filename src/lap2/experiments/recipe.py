"""Recipes: everything that defines a training run, as small typed TOML files.

A recipe in a file, an option of ``lap2 train``, a column of a table and the ``config.json`` of a
run all use the field names of :class:`Recipe`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, cast

from lap2 import _validate
from lap2.experiments.formats import content_of, parsed_json

__all__ = [
    "BACKBONES",
    "COLUMNS",
    "PARTS",
    "Recipe",
    "RecipeError",
    "load_recipe",
    "read_config",
    "recipe_names",
]

BACKBONES = ("dinov2-s", "efficientnet-lite0", "tiny-vit", "vit-b16")
PARTS = ("head", "block", "all")
"""What is trained of a backbone: see :mod:`lap2.experiments.backbones`."""

COLUMNS: dict[str, dict[str, str]] = {
    "gaussian": {"mechanism": "gaussian", "release": "values"},
    "laplace-l1": {"mechanism": "laplace-l1", "release": "values"},
    "published": {"mechanism": "laplace", "accounting": "published", "release": "values"},
    "exact": {"mechanism": "laplace", "release": "values"},
    "bits": {"mechanism": "laplace", "release": "bits"},
}
"""The columns of every comparison: Gaussian noise, l1-clipped Laplace, Lap2 with the published
accountant (no guarantee), Lap2 accounted exactly, and its bits instead of its values."""


_MOST_BYTES = 1 << 16
_MOST_DIGITS_OF_TWO = 63
_OF_BACKBONES = f"BACKBONE/PART with {', '.join(BACKBONES)} and {', '.join(PARTS)}"


class RecipeError(ValueError):
    """A recipe cannot be read, or a field of it is unknown or has a value it cannot have."""


def _about(default: Any, text: str) -> Any:
    return field(default=default, metadata={"about": text})


@dataclass(frozen=True)
class Recipe:
    """What a run is made of; each field's meaning is in its metadata, shown by ``lap2 train``."""

    dataset: str = _about("mnist", "mnist, fashion-mnist, cifar10 or digits.")
    model: str = _about("cnn", f"cnn, logistic, or {_OF_BACKBONES}.")
    epsilon: float = _about(1.0, "Target epsilon.")
    delta: float = _about(1e-5, "Target delta, strictly between 0 and 1.")
    steps: int = _about(590, "Number of private steps.")
    shortened: int = _about(
        1, "Steps are so many times fewer than the target's, noise is less by its root."
    )
    batch_size: int = _about(1024, "Expected number of records in a step.")
    max_physical_batch_size: int = _about(0, "Records in memory at a time; zero is all of a step.")
    optimizer: str = _about("sgd", "sgd or adamw.")
    learning_rate: float = _about(2.5, "Learning rate at its peak.")
    learning_rate_schedule: str = _about(
        "hold", "constant, linear (to zero), or hold (half way, then linear)."
    )
    momentum: float = _about(0.9, "Momentum of SGD.")
    weight_decay: float = _about(0.0, "Of the optimizer.")
    max_grad_norm: float = _about(0.1, "The clip C.")
    label_smoothing: float = _about(0.15, "Of the cross-entropy.")
    mechanism: str = _about("laplace", "laplace, gaussian or laplace-l1.")
    accounting: str = _about("exact", "What sets the noise: exact, or published (no guarantee).")
    noise_multiplier: float = _about(0.0, "b / C; zero is what meets the target.")
    release: str = _about(
        "", "bits (signs of noisy coordinates) or values; by default bits for laplace."
    )
    copies: int = _about(0, "How many bits of each coordinate; zero is as many as help.")
    tau: float = _about(0.0, "Clamp values at so many noise scales; zero leaves them.")
    holdout: int = _about(0, "Training records left out; if any, they are what is evaluated.")
    evaluations: int = _about(40, "How often to evaluate and write a checkpoint.")
    seed: int = _about(0, "Of the initial weights only: sampling and noise take no seed.")

    def __post_init__(self) -> None:
        _validate.choice("dataset", self.dataset, ("mnist", "fashion-mnist", "cifar10", "digits"))
        if self.dataset == "cifar10" or self.model not in {"cnn", "logistic"}:
            backbone, _, part = str(self.model).partition("/")
            if backbone not in BACKBONES or part not in PARTS:
                raise ValueError(
                    f"model must be cnn or logistic for 28x28 images, or {_OF_BACKBONES}; got "
                    f"{self.model!r} for {self.dataset}"
                )
        _validate.choice("optimizer", self.optimizer, ("sgd", "adamw"))
        _validate.choice(
            "learning_rate_schedule", self.learning_rate_schedule, ("constant", "linear", "hold")
        )
        _validate.choice("mechanism", self.mechanism, ("laplace", "gaussian", "laplace-l1"))
        _validate.choice("accounting", self.accounting, ("exact", "published"))
        if self.accounting == "published" and self.mechanism != "laplace":
            raise ValueError(
                f"accounting must be exact for mechanism {self.mechanism!r}: the published bound "
                "is of l2-clipped Laplace noise"
            )
        _validate.positive("epsilon", self.epsilon)
        _validate.open_probability("delta", self.delta)
        for name in ("steps", "shortened", "batch_size", "evaluations"):
            _validate.integer(name, getattr(self, name), least=1)
        for name in ("learning_rate", "max_grad_norm"):
            _validate.positive(name, getattr(self, name))
        for name in ("weight_decay", "noise_multiplier", "tau"):
            _validate.non_negative(name, getattr(self, name))
        for name in ("momentum", "label_smoothing"):
            _validate.probability(name, getattr(self, name))
        for name in ("holdout", "seed", "max_physical_batch_size", "copies"):
            _validate.integer(name, getattr(self, name), least=0)
        if self.shortened > 1 and self.noise_multiplier:
            raise ValueError(
                f"noise_multiplier must be 0 for a shortened run, got {self.noise_multiplier!r}"
            )
        self._check_release()

    def _check_release(self) -> None:
        """What :class:`lap2.train.readout.Readout` would refuse, before anything is loaded."""
        _validate.choice("release", self.release, ("", "bits", "values"))
        if self.release == "bits" and self.mechanism != "laplace":
            raise ValueError(f"release must be values for mechanism {self.mechanism!r}, got 'bits'")
        if self.tau and (self.release == "bits" or self.mechanism == "gaussian"):
            raise ValueError(
                f"tau must be 0 where bits are released and for Gaussian noise, got {self.tau!r}"
            )
        if self.copies and (self.release == "values" or self.mechanism != "laplace" or self.tau):
            raise ValueError(f"copies must be 0 where values are released, got {self.copies!r}")

    @classmethod
    def of(cls, values: Mapping[str, Any], *, where: str = "recipe") -> "Recipe":
        """The recipe with these fields; unknown names and wrong types are refused.

        Args:
            values: by field name; what is missing has its default.
            where: what to call the source of the values in an error.

        Raises:
            RecipeError: that is not a recipe; it names the field, the rule and the value.
        """
        known = {f.name: f.default for f in fields(cls)}
        if unknown := [name for name in values if name not in known]:
            raise RecipeError(
                f"{where} must have only the fields {', '.join(known)}: {unknown[0]!r:.80}"
            )
        try:
            return cls(**{name: _typed(name, known[name], values[name]) for name in values})
        except (TypeError, ValueError) as error:
            raise RecipeError(f"{where}: {error}") from error

    def asdict(self) -> dict[str, Any]:
        """Plain values by field name, as :meth:`of` takes them."""
        return asdict(self)


def _typed(name: str, default: Any, value: Any) -> Any:
    """The value, if a recipe can hold it there; a whole number where any number may be is one."""
    if type(value) not in (str, bool, int, float):
        raise TypeError(f"{name} must be a text or a number, got a {type(value).__name__}")
    if isinstance(default, str) and not isinstance(value, str):
        raise TypeError(f"{name} must be a text, got a {type(value).__name__}")
    if isinstance(value, int) and value.bit_length() > _MOST_DIGITS_OF_TWO:
        raise ValueError(f"{name} must be a number of 64 bits, got one of {value.bit_length()}")
    return float(value) if isinstance(default, float) and type(value) is int else value


def recipe_names() -> list[str]:
    """The recipes that come with lap2."""
    return sorted(p.name[: -len(".toml")] for p in _shipped().iterdir() if p.name.endswith(".toml"))


def load_recipe(name: str | Path, **changes: Any) -> Recipe:
    """A recipe that comes with lap2, by name, or any other by the path of its TOML file.

    Args:
        name: one of :func:`recipe_names`, or a path that ends in ``.toml``.
        changes: fields to set differently.

    Raises:
        RecipeError: there is none, or it is not a recipe.
    """
    if str(name).endswith(".toml"):
        source: Any = Path(name)
    elif str(name) in recipe_names():
        source = _shipped() / f"{name}.toml"
    else:
        raise RecipeError(
            f"recipe must be one of {', '.join(recipe_names())}, or the path of a .toml file; "
            f"got {str(name)!r}"
        )
    where = f"recipe {str(name)!r}"
    try:
        text = content_of(source, most=_MOST_BYTES).decode()
        values = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{where} cannot be read: {error}") from error
    except RecursionError:
        raise RecipeError(f"{where} cannot be read: it is nested too deep") from None
    return Recipe.of({**values, **changes}, where=where)


def read_config(path: Path) -> Recipe:
    """The recipe of a run, from its ``config.json``.

    Raises:
        RecipeError: it holds none.
    """
    try:
        values = parsed_json(content_of(path, most=_MOST_BYTES).decode(), str(path))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} must hold the fields of a recipe")
    return Recipe.of(cast("dict[str, Any]", values), where=str(path))


def _shipped() -> Any:
    return resources.files("lap2.experiments") / "recipes"
