"""What is hung on modules while they are trained, and stays behind when they leave.

Hooks lead to what was recorded: the last batch, and gradients of single records. So whoever pickles
or copies a module that has them (``torch.save``, ``copy.deepcopy``, another process) gets an
ordinary one: without them, and with the attributes it had before.
"""

# pyright: basic

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from lap2.train.secrecy import StaysHere, forget_locals

__all__ = ["ABSENT", "Hooks", "Leaving", "is_ours"]

ABSENT = object()
"""What an attribute that was not there is before."""

_REGISTERS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
)
"""Where a module keeps its hooks by their numbers, and what is said of them."""


class Hooks(StaysHere):
    """All that a recorder changes about modules."""

    def __init__(self) -> None:
        """Nothing is changed yet."""
        self._handles: list[Any] = []
        self._before: dict[nn.Module, dict[str, Any]] = {}

    def before(self, module: nn.Module, call: Callable, **options: Any) -> None:
        """Call this before a module's forward; options are those of torch's registration."""
        self._leaving(module)
        self._handles.append(module.register_forward_pre_hook(_Hook(call), **options))

    def after(self, module: nn.Module, call: Callable, **options: Any) -> None:
        """Call this after a module's forward."""
        self._leaving(module)
        self._handles.append(module.register_forward_hook(_Hook(call), **options))

    def replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Give an attribute of the module's own another value; functions are called safely."""
        held = self._leaving(module)
        held.setdefault(name, module.__dict__.get(name, ABSENT))
        module.__dict__[name] = _Hook(value) if callable(value) else value

    def remove(self) -> None:
        """Take everything off; the modules are as they were."""
        for handle in self._handles:
            handle.remove()
        for module, held in self._before.items():
            _put_back(module.__dict__, held)
        self._handles.clear()
        self._before.clear()

    def _leaving(self, module: nn.Module) -> dict[str, Any]:
        """The attributes to put back when hooks are removed; first, all that pickling asks for."""
        if module not in self._before:
            names = ["__reduce_ex__"]
            names += ["__deepcopy__"] if hasattr(type(module), "__deepcopy__") else []
            held = {name: module.__dict__.get(name, ABSENT) for name in names}
            self._before[module] = held
            other = held["__reduce_ex__"]  # of another recorder on the same module
            other = other if isinstance(other, Leaving) else None
            leaving = Leaving(module, self._handles, held, other)
            module.__dict__["__reduce_ex__"] = leaving
            if "__deepcopy__" in names:
                module.__dict__["__deepcopy__"] = leaving.copied
        return self._before[module]


class Leaving:
    """Takes the place of a module's ``__reduce_ex__``, which pickling and copying ask.

    Args:
        module: the module.
        handles: of hooks that stay behind.
        before: attributes that leave with other values.
        other: what was in this place already.
    """

    def __init__(
        self,
        module: nn.Module,
        handles: list[Any],
        before: dict[str, Any],
        other: "Leaving | None" = None,
    ) -> None:
        """Keep the module, of which this becomes an attribute."""
        self._module, self._handles, self._before, self._other = module, handles, before, other

    def __call__(self, protocol: Any) -> Any:
        """What the module's class makes of the ordinary module."""
        return type(self._module).__reduce_ex__(self._ordinary(), protocol)

    def copied(self, memo: dict[int, Any]) -> nn.Module:
        """As the module's class copies."""
        return copy.deepcopy(self._ordinary(), memo)

    def _ordinary(self) -> nn.Module:
        """Shares everything with the module but what it must leave behind."""
        plain = object.__new__(type(self._module))
        state = dict(self._module.__dict__)
        this: Leaving | None = self
        while this is not None:
            numbers = {handle.id for handle in this._handles}
            for name in _REGISTERS:
                kept = ((n, hook) for n, hook in state[name].items() if n not in numbers)
                state[name] = type(state[name])(kept)
            _put_back(state, this._before)
            this = this._other
        for name in state["_parameters"]:
            state.pop(name, None)  # a copy for each record may hide it
        plain.__dict__.update(state)
        return plain

    def __reduce__(self) -> Any:
        """By itself it is nothing."""
        return _silence, ()


class _Hook:
    """Calls something that records; an error that comes out of it shows no record."""

    def __init__(self, call: Callable) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(*args, **kwargs)
        except Exception as error:
            del args, kwargs
            forget_locals(error)
            raise

    def __reduce__(self) -> Any:
        return _silence, ()


def is_ours(call: object) -> bool:
    """Whether this is something that :class:`Hooks` has hung up."""
    return isinstance(call, _Hook)


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is ABSENT:
            attributes.pop(name, None)
        else:
            attributes[name] = value


def _silence() -> Callable[..., None]:
    return _silent


def _silent(*_: Any, **__: Any) -> None:
    """What a hook is elsewhere."""
