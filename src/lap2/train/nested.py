"""Tensors in whatever structure a batch has."""

# pyright: basic

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["tensors"]


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in lists, tuples, mappings and dataclasses, also within each other."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors(list(vars(value).values()))
    elif isinstance(value, Mapping):
        yield from tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
