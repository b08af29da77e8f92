"""Which parameter's per-example gradients come from where: the plan that a recorder follows.

A layer with a rule is covered by *book-keeping*, whatever surrounds it. The rest are parameters
that a module holds itself. If it has other modules inside, as a vision transformer has around its
class token, and they have a leading dimension of 1, every example is given a *copy*; the gradient
of the copy is the example's. That is right if the model broadcasts them over the batch and does
nothing else with them, which the recorder verifies with random weights on its first batch.
Everything else is run again under *vmap*, which is always right, but forms the gradients of the
whole module: it is refused where that is too large, and where the module draws random numbers.
"""

# pyright: basic

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeGuard

from torch import Tensor, nn

from lap2.train import attention
from lap2.train.layers import is_known, mixing, trains

__all__ = ["Coverage", "Entry", "How", "Unit", "coverage", "is_attention", "plan"]

How = Literal["book-keeping", "copies", "vmap", "refused"]

_VMAP_LIMIT = 1 << 22
"""Modules with more trained numbers than this are not run under vmap: it needs them per example."""


@dataclass(frozen=True)
class Unit:
    """A module to record, and how.

    Attributes:
        name: where it is in the model.
        module: the module.
        how: where its per-example gradients come from.
        params: the trained parameters that this covers, by their name in the module.
        reason: if refused, why, and what to do.
    """

    name: str
    module: nn.Module
    how: How
    params: dict[str, Tensor]
    reason: str = ""


@dataclass(frozen=True)
class Entry:
    """What becomes of one trained parameter, or of one module that is refused."""

    name: str
    module: str
    how: How
    size: int
    reason: str = ""


@dataclass(frozen=True)
class Coverage:
    """What private training will do with every trained parameter of a model.

    ``print`` it for a table; ``refused`` is empty if the model can be trained as it is.
    """

    entries: tuple[Entry, ...]

    @property
    def refused(self) -> tuple[Entry, ...]:
        """What stands in the way, each with its reason and what to do."""
        return tuple(entry for entry in self.entries if entry.how == "refused")

    def __str__(self) -> str:
        """One line for each kind of module and way, and one for each refusal."""
        groups: dict[tuple[str, str], list[int]] = {}
        for entry in self.entries:
            if entry.how != "refused":
                groups.setdefault((entry.how, entry.module), []).append(entry.size)
        lines = [f"{'how':<14}{'module':<28}{'parameters':>10}{'numbers':>14}"]
        lines += [
            f"{how:<14}{module:<28}{len(sizes):>10}{sum(sizes):>14,}"
            for (how, module), sizes in groups.items()
        ]
        lines += [f"refused       {e.name or 'the model'} {e.reason}" for e in self.refused]
        return "\n".join(lines)


def coverage(module: nn.Module) -> Coverage:
    """What private training will do with a model; needs no data, and changes nothing.

    Args:
        module: the model, with ``requires_grad`` set as it will be trained.
    """
    entries: dict[str, Entry] = {}
    names: dict[Tensor, str] = {param: name for name, param in module.named_parameters()}
    for unit in plan(module):
        kind = type(unit.module).__name__
        if unit.how == "refused":
            size = sum(p.numel() for p in unit.params.values())
            entries[unit.name] = Entry(unit.name, kind, unit.how, size, unit.reason)
            continue
        for param in unit.params.values():  # a tied one counts once
            name = names[param]
            entries.setdefault(name, Entry(name, kind, unit.how, param.numel()))
    return Coverage(tuple(entries.values()))


def plan(model: nn.Module) -> list[Unit]:
    """The units of a model, outer ones first; those refused are among them."""
    seen: set[nn.Module] = set()
    # What a layer with a rule holds is seen there, also if another module holds it under a name.
    layers = [m for m in model.modules() if is_known(m)]
    held: set[Tensor] = {p for layer in layers for p in layer.parameters(recurse=False)}

    def visit(name: str, module: nn.Module) -> Iterator[Unit]:
        if module in seen:
            return
        seen.add(module)
        unit = _unit(name, module, held)
        if unit is not None:
            yield unit
        if unit is None or unit.how == "copies":
            for child, inner in _children(module):
                yield from visit(f"{name}.{child}" if name else child, inner)

    return list(visit("", model))


def _unit(name: str, module: nn.Module, held: set[Tensor]) -> Unit | None:
    """What to do with one module; None if all there is to do is in its children."""
    reason = mixing(module)
    own: dict[str, Tensor] = dict(_own(module))
    if reason is not None:
        return Unit(name, module, "refused", own, reason)
    if is_attention(module):
        return _attention(name, module)
    if own and is_known(module):
        return Unit(name, module, "book-keeping", own)
    own = {inner: param for inner, param in own.items() if param not in held}
    if not own:
        return None
    whole = {inner: p for inner, p in module.named_parameters() if trains(p)}
    if any(_children(module)) and all(_broadcasts(inner, p) for inner, p in own.items()):
        return Unit(name, module, "copies", own)
    reason = _no_vmap(module, own, sum(p.numel() for p in whole.values()))
    return Unit(name, module, "vmap" if reason is None else "refused", whole, reason or "")


def _broadcasts(name: str, param: Tensor) -> bool:
    return "." not in name and param.dim() > 1 and param.shape[0] == 1


def is_attention(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Whether a module is torch's own attention; what a subclass computes is not known."""
    return type(module) is nn.MultiheadAttention


def _attention(name: str, module: nn.MultiheadAttention) -> Unit | None:
    trained = {inner: p for inner, p in module.named_parameters() if trains(p)}
    if not trained:
        return None
    reason = attention.refusal(module)
    if reason is not None:
        return Unit(name, module, "refused", trained, f"is a MultiheadAttention, which {reason}")
    return Unit(name, module, "book-keeping", trained)


def _no_vmap(module: nn.Module, own: dict[str, Tensor], size: int) -> str | None:
    kind, held = type(module).__name__, ", ".join(own)
    if size > _VMAP_LIMIT:
        return (
            f"is a {kind} with {size:,} trained numbers and no rule, because of its own {held}: "
            "move that into a small module of its own, give it a leading dimension of 1 that is "
            "broadcast over the batch, or freeze it"
        )
    for place, inner in module.named_modules():
        reason = mixing(inner) if place else None
        if reason is not None:
            return f"is a {kind} without a rule, because of its own {held}; its {place} {reason}"
        if isinstance(inner, nn.modules.dropout._DropoutNd) and inner.p > 0:
            return (
                f"is a {kind} without a rule, because of its own {held}, and has dropout inside, "
                "which cannot be run again with the same mask: set its p to 0, or move what it "
                "holds into a small module of its own"
            )
    return None


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules inside; those that only hold parameters belong to whoever holds them."""
    for name, child in module.named_children():
        if not isinstance(child, (nn.ParameterDict, nn.ParameterList)):
            yield name, child


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Trained parameters that the module holds itself, also in a dict or list of them."""
    for name, param in module.named_parameters(recurse=False):
        if trains(param):
            yield name, param
    for name, child in module.named_children():
        if isinstance(child, (nn.ParameterDict, nn.ParameterList)):
            yield from (
                (f"{name}.{inner}", p) for inner, p in child.named_parameters() if trains(p)
            )
