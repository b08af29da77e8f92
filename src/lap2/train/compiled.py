"""Which kernels are compiled; without numba, none are."""

import importlib
from functools import lru_cache
from types import ModuleType

__all__ = ["kernel"]


@lru_cache
def kernel(name: str) -> ModuleType | None:
    """The compiled module of this name.

    None where it cannot be had: without numba, or where its compiler does not load or has no folder
    to keep its work in.
    """
    try:
        return importlib.import_module(f"lap2.train._{name}_compiled")
    except (ImportError, OSError, RuntimeError):
        return None
