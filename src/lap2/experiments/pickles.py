"""Pickles, read without making what they describe.

A pickle is a program: it names functions, and says what to call them with and which state to give
to what they return. Here nothing is called. A function stays a :class:`Name`, a call of it a
:class:`Call`, and only numbers, texts, bytes and Python's containers are what they are; what a
:class:`Call` means is for the reader of a format to say, who knows the few it expects.
"""

# pyright: basic

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lap2.experiments.formats import FormatError

__all__ = ["Call", "Name", "read"]


@dataclass(frozen=True, eq=False, repr=False)
class Name:
    """A function or a class, as ``module name``."""

    text: str


@dataclass(eq=False, repr=False)
class Call:
    """A function called, and the state that what it returned was given."""

    function: str
    arguments: tuple[Any, ...]
    state: Any = None


class _Mark:
    """Where the items of a container begin."""


def read(content: bytes, where: str) -> Any:
    """What a pickle describes.

    Raises:
        FormatError: it is none, or does what pickles of plain data do not do.
    """
    machine = _Machine()
    try:
        for code, argument, _ in pickletools.genops(content):
            machine.do(code.name, argument)
        (value,) = machine.stack
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise FormatError(f"{where} must be a whole pickle: {error!r:.200}") from error
    return value


class _Machine:
    """The stack of a pickle, and what it remembers."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def do(self, code: str, argument: Any) -> None:
        if code in _VALUES:
            self.stack.append(_VALUES[code](argument))
        elif code in _MEMOIZE:
            self._memo[len(self._memo) if argument is None else argument] = self.stack[-1]
        elif code in _RECALL:
            self.stack.append(self._memo[argument])
        elif code in _TUPLES:
            count = _TUPLES[code]
            items = [self.stack.pop() for _ in range(count)]
            self.stack.append(tuple(reversed(items)))
        elif code in _CONTAINERS:
            items = self._since_mark()
            self.stack.append(_CONTAINERS[code](items))
        elif code in _STEPS:
            _STEPS[code](self)
        elif code not in _NOTHING:
            raise FormatError(f"a pickle of plain data has no {code}")

    def _since_mark(self) -> list[Any]:
        items: list[Any] = []
        while not isinstance(item := self.stack.pop(), _Mark):
            items.append(item)
        return items[::-1]

    def append(self) -> None:
        value = self.stack.pop()
        self._list().append(value)

    def appends(self) -> None:
        items = self._since_mark()
        self._list().extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._dict().update(_pairs([key, value]))

    def set_items(self) -> None:
        items = self._since_mark()
        self._dict().update(_pairs(items))

    def name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise FormatError("a function must be named by two texts")
        self.stack.append(Name(f"{module} {name}"))

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Name) or type(arguments) is not tuple:
            raise FormatError("what is called must be a name, with a tuple of arguments")
        ordered = function.text == "collections OrderedDict" and not arguments
        self.stack.append({} if ordered else Call(function.text, arguments))

    def give_state(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Call):
            self.stack[-1].state = state
        elif type(self.stack[-1]) is not dict:  # an OrderedDict has no state that matters
            raise FormatError("what has no state must be given none")

    def persistent(self) -> None:
        self.stack.append(Call("persistent id", (self.stack.pop(),)))

    def _list(self) -> list[Any]:
        if type(self.stack[-1]) is not list:
            raise FormatError("items must be added to a list")
        return self.stack[-1]

    def _dict(self) -> dict[Any, Any]:
        if type(self.stack[-1]) is not dict:
            raise FormatError("items must be set in a dictionary")
        return self.stack[-1]


def _pairs(items: list[Any]) -> dict[Any, Any]:
    """A dictionary of names, which alone have a hash that cannot be made to take long."""
    names = [_as_text(key) for key in items[::2]]
    return dict(zip(names, items[1::2], strict=True))


def _as_text(key: Any) -> str:
    if type(key) is bytes:
        return key.decode("latin-1")
    if type(key) is not str:
        raise FormatError(f"names in a dictionary must be texts, got {type(key).__name__}")
    return key


def _same(argument: Any) -> Any:
    return argument


_VALUES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        (
            "INT",
            "BININT",
            "BININT1",
            "BININT2",
            "LONG",
            "LONG1",
            "LONG4",
            "STRING",
            "BINSTRING",
            "SHORT_BINSTRING",
            "BINBYTES",
            "SHORT_BINBYTES",
            "BINBYTES8",
            "UNICODE",
            "SHORT_BINUNICODE",
            "BINUNICODE",
            "BINUNICODE8",
            "FLOAT",
            "BINFLOAT",
        ),
        _same,
    ),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
    "EMPTY_TUPLE": lambda _: (),
    "MARK": lambda _: _Mark(),
    "GLOBAL": Name,
}
_MEMOIZE = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_RECALL = ("GET", "BINGET", "LONG_BINGET")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"TUPLE": tuple, "LIST": list, "DICT": _pairs}
_STEPS: dict[str, Callable[[_Machine], None]] = {
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "STACK_GLOBAL": _Machine.name,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.give_state,
    "BINPERSID": _Machine.persistent,
}
_NOTHING = ("PROTO", "FRAME", "STOP")
