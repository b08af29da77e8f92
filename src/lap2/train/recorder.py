"""Book-keeping: one backward pass that leaves, for every layer, what per-example gradients need.

During a training forward pass the parameters do not require gradients, so that autograd computes
the gradients of layer outputs only. A tap on each output keeps that gradient, a hook the input.
"""

# pyright: basic

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lap2.train.arena import Arena
from lap2.train.gradients import PerExample, summed
from lap2.train.layers import UnsupportedModuleError, gradients_of, is_known, refuse_mixing

__all__ = ["BookkeepingError", "Recorded", "Recorder"]


class BookkeepingError(RuntimeError):
    """What was recorded are not the per-example gradients of the loss; nothing was released."""


@dataclass
class _Record:
    module: nn.Module
    args: tuple
    versions: tuple[int, ...]
    grad: Any = None


class Recorded(NamedTuple):
    """Per-example gradients of one batch.

    Attributes:
        batch: number of examples.
        scale: what the gradients must be multiplied with, because the loss was a mean.
        gradients: one entry for each parameter that took part.
    """

    batch: int
    scale: float
    gradients: list[PerExample]


class _Tap(torch.autograd.Function):
    """The identity, which also keeps the gradient that comes back through it."""

    @staticmethod
    def forward(ctx, output, anchor, record):  # noqa: ARG004 - the anchor only requires a gradient
        ctx.record = record
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        record = ctx.record
        record.grad = grad.detach() if record.grad is None else record.grad + grad.detach()
        return grad if ctx.needs_input_grad[0] else None, None, None


class Recorder:
    """Hooks on a model that record what one or more backward passes reveal.

    The model itself, its class and its state_dict stay the user's own.

    Args:
        model: in training mode its forward is recorded; otherwise nothing happens.
    """

    def __init__(self, model: nn.Module) -> None:
        """Check the model, mark what is trained, and hang up the hooks."""
        refuse_mixing(model)
        self.model = model
        self.params = [p for p in model.parameters() if p.requires_grad]
        if not self.params:
            raise UnsupportedModuleError("module must have a parameter with requires_grad=True")
        for param in self.params:
            param._lap2_trained = True  # pyright: ignore[reportAttributeAccessIssue]
        self.names = {id(p): name for name, p in model.named_parameters()}
        self._records: list[_Record] = []
        self._arena = Arena()
        self._checked = self._collecting = False
        self._anchor: Tensor | None = None
        self._handles = [model.register_forward_pre_hook(self._begin, prepend=True)]
        for module in _units(model):
            self._handles.append(module.register_forward_hook(self._record, with_kwargs=True))
        # Last, because the model itself may be a layer.
        self._handles.append(model.register_forward_hook(self._end, always_call=True))
        for module in model.modules():
            if getattr(module, "inplace", False):
                setattr(module, "inplace", False)  # noqa: B010 - a tapped output must not be overwritten

    def remove(self) -> None:
        """Take all hooks off; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        for param in self.params:
            del param._lap2_trained  # pyright: ignore[reportAttributeAccessIssue]

    def discard(self) -> None:
        """Forget what was recorded."""
        self._records.clear()

    @torch.no_grad()
    def collect(self, *, loss_reduction: str) -> Recorded:
        """What was recorded since the last time; valid until the next time.

        Raises:
            BookkeepingError: an activation was changed in place, or (on the first batch) the
                recorded gradients do not add up to autograd's own.
        """
        records, self._records = [r for r in self._records if r.grad is not None], []
        if not records:
            return Recorded(0, 1.0, [])
        batch = records[0].grad.shape[0]
        if batch == 0:
            return Recorded(0, 1.0, [])
        self._collecting = True  # modules without a rule are run again, unrecorded
        try:
            gradients = self._gradients(records, batch)
        finally:
            self._collecting = False
        if not self._checked:
            self._check(gradients, batch)
        return Recorded(batch, float(batch) if loss_reduction == "mean" else 1.0, gradients)

    def _gradients(self, records: list[_Record], batch: int) -> list[PerExample]:
        self._arena.reset()
        by_param: dict[int, list[PerExample]] = {}
        for record in records:
            if record.versions != _versions(record.args):
                raise BookkeepingError(
                    f"the input of a {type(record.module).__name__} was changed in place after it "
                    "was used: its gradient cannot be known. Avoid in-place operations on it"
                )
            if record.grad.shape[0] != batch:
                raise BookkeepingError(
                    f"every layer must see the batch of {batch} as its first dimension, got "
                    f"{record.grad.shape[0]} in a {type(record.module).__name__}"
                )
            for found in gradients_of(record.module, record.args, record.grad, arena=self._arena):
                by_param.setdefault(id(found.param), []).append(found)
        return [summed(uses) for uses in by_param.values()]

    def _check(self, gradients: list[PerExample], batch: int) -> None:
        """The first batch is also differentiated the ordinary way; both must agree."""
        found = {id(g.param): g for g in gradients}
        for param in self.params:
            truth = param.grad
            if truth is None:
                continue
            name = self.names[id(param)]
            if id(param) not in found:
                raise BookkeepingError(
                    f"parameter {name!r} has a gradient but is used outside a module's forward, "
                    "where per-example gradients cannot be seen: use it through its own module, "
                    "or freeze it"
                )
            ours = found[id(param)].weighted_sum(truth.new_ones(batch))
            scale = truth.abs().max()
            if scale.isfinite() and not (ours - truth).abs().max() <= 1e-2 * scale + 1e-6:
                raise BookkeepingError(
                    f"the recorded gradient of {name!r} differs from autograd's: it is used "
                    "outside its own module's forward, or a layer does not have the batch first"
                )
        for param in self.params:
            param.grad = None
        self._checked = True

    def _begin(self, *_: object) -> None:
        if not (self.model.training and torch.is_grad_enabled()) or self._collecting:
            return
        self._anchor = torch.zeros((), device=self.params[0].device, requires_grad=True)
        for param in self.params:
            param.grad = None
            # The first batch is differentiated the ordinary way too, to compare.
            param.requires_grad_(not self._checked)

    def _end(self, *_: object) -> None:
        if self._anchor is not None:
            self._anchor = None
            for param in self.params:
                param.requires_grad_(True)

    def _record(
        self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor
    ) -> Tensor | None:
        if self._anchor is None:
            return None
        if kwargs and not is_known(module):
            raise UnsupportedModuleError(
                f"{type(module).__name__} must be called with positional arguments, got "
                f"{list(kwargs)}"
            )
        args = args or tuple(kwargs.values())
        if not isinstance(output, Tensor):
            raise UnsupportedModuleError(
                f"{type(module).__name__} must return one tensor to have per-example gradients"
            )
        kept = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
        record = _Record(module, kept, _versions(kept))
        self._records.append(record)
        return _Tap.apply(output, self._anchor, record)


def _units(model: nn.Module) -> list[nn.Module]:
    """The modules to record: known layers, and the whole module that owns any other parameter."""
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if own:
            units.append(module)
            if not is_known(module):
                return
        for child in module.children():
            visit(child)

    visit(model)
    return list(dict.fromkeys(units))


def _versions(args: tuple) -> tuple[int, ...]:
    return tuple(a._version for a in args if isinstance(a, Tensor))
