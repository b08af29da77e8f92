"""Book-keeping: one backward pass that leaves, for every layer, what per-example gradients need.

Inside a layer's training forward its parameters do not require gradients, so that autograd computes
the gradients of layer outputs only. A tap on each output keeps that gradient, a hook the input.
"""

# pyright: basic

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn

from lap2.train.arena import Arena
from lap2.train.attention import attend
from lap2.train.coverage import Unit, is_attention, plan
from lap2.train.errors import BookkeepingError
from lap2.train.gradients import Dense, PerExample, Probes, summed
from lap2.train.hooks import Hooks, is_ours
from lap2.train.layers import (
    UnsupportedModuleError,
    best_at_once,
    gradients_by_vmap,
    gradients_of,
    is_known,
    mark,
    needs_input,
    projection_gradients,
    trains,
)
from lap2.train.nested import tensors
from lap2.train.pooling import is_pooling, max_pool2d
from lap2.train.precision import full_precision
from lap2.train.records import Record, Tap, batch_size
from lap2.train.secrecy import StaysHere, forget_locals

__all__ = ["Recorded", "Recorder"]

_REENTRANT = (
    "gradient checkpointing must be used with use_reentrant=False: the other kind runs layers "
    "without a graph first, so that they cannot be recorded"
)

_OUTSIDE = (
    "parameter {!r} has a gradient but is used outside a module's forward, where per-example "
    "gradients cannot be seen: use it through its own module, or freeze it. If the loss has a "
    "penalty on parameters, take the penalty out: the optimizer's weight_decay does the same"
)


class Recorded(NamedTuple):
    """Per-example gradients of one batch.

    Attributes:
        batch: number of examples.
        scale: what the gradients must be multiplied with, because the loss was a mean.
        gradients: one entry for each parameter that took part.
        form: of the model, and how it was called: what has another form must be checked anew.
        precision: the largest relative rounding error of what was recorded.
        loss: "mean" or "sum", as the user said, or "records" for one loss for each.
    """

    batch: int
    scale: float
    gradients: list[PerExample]
    form: object = None
    precision: float = 0.0
    loss: str = "records"


class Recorder(StaysHere):
    """Hooks on a model that record what one or more backward passes reveal.

    The model itself, its class and its state_dict stay the user's own. What is recorded how is
    decided by :func:`lap2.train.coverage.plan`.

    Args:
        model: in training mode its forward is recorded; otherwise nothing happens.
        rehearses: whether the batch at hand is a rehearsal: then what is recorded is compared with
            autograd's own gradients.
    """

    def __init__(self, model: nn.Module, rehearses: Callable[[], bool] = lambda: False) -> None:
        """Check the model, mark what is trained, and hang up the hooks."""
        units = plan(model)
        for unit in units:
            if unit.how == "refused":
                raise UnsupportedModuleError(f"module {unit.name!r} {unit.reason}")
        self.model = model
        self.params = [p for p in model.parameters() if p.requires_grad]
        if not self.params:
            raise UnsupportedModuleError("module must have a parameter with requires_grad=True")
        self.names: dict[Tensor, str] = {
            p: name for name, p in model.named_parameters() if p.requires_grad
        }
        for param, name in self.names.items():
            if param.is_complex():
                raise UnsupportedModuleError(
                    f"parameter {name!r} must be real, got {param.dtype}: keep its real and "
                    "imaginary parts as two parameters"
                )
        self.refuse_watched()
        for param in self.params:
            mark(param, trained=True)
        self._rehearses = rehearses
        self._records: list[Record] = []
        self._arena = Arena()
        self._batch, self._losses = 0, False
        self._form: object = None
        self._precision = 0.0
        self._in_forward = self._collecting = self._compares = False
        self._anchor = torch.zeros((), device=self.params[0].device, requires_grad=True)
        self._seen: set[nn.Module] = set()
        self._shared: dict[nn.Module, bool] = {}
        self._entered: set[nn.Module] = set()
        self._hang(units)

    def _hang(self, units: list[Unit]) -> None:
        model = self.model
        hooks = self._hooks = Hooks()
        hooks.before(model, self._begin, prepend=True, with_kwargs=True)
        self._attentions = [unit.module for unit in units if is_attention(unit.module)]
        for unit in units:
            module, leave = unit.module, partial(self._leave, unit)
            hooks.before(module, partial(self._enter, unit))
            hooks.after(module, leave, with_kwargs=True, always_call=True)
            if is_attention(module):
                _refuse_replaced(unit)
                hooks.replace(module, "forward", partial(self._attend, module))
        for module in filter(is_pooling, model.modules()):
            hooks.replace(module, "forward", partial(self._pool, module))
        # Last, because the model itself may be a unit.
        hooks.after(model, self._end, with_kwargs=True, always_call=True)
        # A tapped output must not be overwritten.
        for module in model.modules():
            if getattr(module, "inplace", False):
                hooks.replace(module, "inplace", False)

    def remove(self) -> None:
        """Take all hooks off; the model is as it was."""
        self._hooks.remove()
        for param in self.params:
            mark(param, trained=False)

    def free(self) -> None:
        """Give back the memory in which gradients were formed."""
        self._arena.free()

    def discard(self) -> None:
        """Forget what was recorded."""
        for record in self._records:
            record.forget()
        self._records.clear()
        self._losses, self._batch = False, 0

    def backward(self, losses: Tensor) -> None:
        """Differentiate the sum of one loss for each example.

        Raises:
            ValueError: there is not one loss for each example.
        """
        try:
            self._differentiate(losses)
        except Exception as error:
            self.discard()
            self._clear_gradients()
            forget_locals(error)
            raise

    def _clear_gradients(self) -> None:
        for param in self.params:
            param.grad = None

    def _differentiate(self, losses: Tensor) -> None:
        if not isinstance(losses, Tensor) or losses.dim() != 1 or not losses.requires_grad:
            got = (
                f"{losses.dim()} dimensions"
                if isinstance(losses, Tensor)
                else type(losses).__name__
            )
            got += "" if getattr(losses, "requires_grad", True) else " and no gradient"
            raise ValueError(
                f"losses must be a tensor of one loss for each record, of shape (batch,), that has "
                f"a gradient; got {got}: take the loss with reduction='none', and sum or average "
                "it within each record only"
            )
        if self._records and len(losses) != self._batch:
            raise ValueError(
                "losses must have one loss for each record of the batch, got another number of them"
            )
        self._losses = True
        losses.backward(torch.ones_like(losses))

    @torch.no_grad()
    def collect(self, *, loss_reduction: str) -> Recorded:
        """What was recorded since the last time; valid until the next forward.

        Raises:
            BookkeepingError: an activation was changed in place, a parameter was used where it
                cannot be seen, or recorded gradients do not add up to autograd's own.
        """
        records, self._records = self._records, []
        records = [r for r in records if r.grad is not None or r.found]
        loss = "records" if self._losses else loss_reduction
        self._losses, self._batch = False, 0
        batch = records[0].batch if records else 0
        try:
            if batch == 0:
                return Recorded(0, 1.0, [])
            self.refuse_watched()
            self._collecting = True  # modules without a rule are run again, unrecorded
            gradients = self._gradients(records, batch)
            self._refuse_other_gradients(gradients)
        finally:
            self._collecting = False
            self._clear_gradients()
        scale = float(batch) if loss == "mean" else 1.0
        return Recorded(batch, scale, gradients, self._form, self._precision, loss)

    def _refuse_other_gradients(self, gradients: list[PerExample]) -> None:
        """Compare with what autograd left: in a rehearsal all, and otherwise nothing at all."""
        found = {g.param: g for g in gradients}
        for param, name in self.names.items():
            if param.grad is not None and (not self._compares or param not in found):
                raise BookkeepingError(_OUTSIDE.format(name))
        if not self._compares:
            return
        probes = {param: Probes.of(param, 4) for param in found}
        each = {param: g.project(probes[param]) for param, g in found.items()}
        sizes = {param: values.norm(dim=1).sum() for param, values in each.items()}
        largest = max(float(size) for size in sizes.values())
        for param, values in each.items():
            grad = param.grad
            if grad is None:
                truth = torch.zeros_like(values[0])
            else:
                grad = grad.to_dense() if grad.is_sparse else grad
                truth = probes[param].of_gradient(grad[None])[0].to(values)
            rounding = max(self._precision, torch.finfo(param.dtype).eps)
            allowed = max(1e-3, 16 * rounding) * sizes[param] + 16 * rounding * largest
            difference = (values.sum(dim=0) - truth).norm()
            if bool(difference.isfinite()) and bool(difference > allowed):
                raise BookkeepingError(
                    f"the recorded gradient of {self.names[param]!r} differs from autograd's: it "
                    "is used outside its own module's forward, a layer does not have the batch "
                    "first, or the loss has a penalty on it (the optimizer's weight_decay does "
                    "the same)"
                )

    def _gradients(self, records: list[Record], batch: int) -> list[PerExample]:
        by_param: dict[Tensor, list[PerExample]] = {}
        for record in records:
            if record.batch != batch:
                raise BookkeepingError(
                    "all forward passes before a step must be of one batch, got two of different "
                    "sizes"
                )
            for found in record.gradients():
                by_param.setdefault(found.param, []).append(found)
        return [summed(uses) for uses in by_param.values()]

    def _begin(self, _: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self._is_training():
            return
        batch = batch_size((args, kwargs))
        if batch is None:
            raise UnsupportedModuleError(
                "the model must be called with tensors that have the batch as first dimension"
            )
        if nn.parallel.DistributedDataParallel._active_ddp_module is not None:
            raise BookkeepingError(
                "the model must not be wrapped in DistributedDataParallel, which averages "
                "gradients before they are clipped: call the model itself, lap2 adds up its "
                "clipped sums"
            )
        self._refuse_frozen()
        self.refuse_watched()
        if not self._records:
            self._arena.reset()
            self._compares, self._precision, self._form = self._rehearses(), 0.0, ()
            self._clear_gradients()
        self._form = (self._form, self._current_form((args, kwargs)))
        self._batch = batch
        self._in_forward = True
        self._seen.clear()

    def _refuse_frozen(self) -> None:
        for param, name in self.names.items():
            if not param.requires_grad:
                raise BookkeepingError(
                    f"parameter {name!r} was frozen after the model was made private: noise is "
                    "still drawn for it. Set requires_grad before make_private"
                )

    def refuse_watched(self) -> None:
        """Refuse what would be shown gradients that autograd computes for a comparison."""
        for param, name in self.names.items():
            if param._backward_hooks or param._post_accumulate_grad_hooks:  # pyright: ignore[reportAttributeAccessIssue]
                raise BookkeepingError(
                    f"parameter {name!r} must have no hook of its own, got one (register_hook, or "
                    "register_post_accumulate_grad_hook; wandb.watch makes them): it would see "
                    "gradients of private records without noise. Remove it, and look at .grad "
                    "after the optimizer's step, where loader.ends_batch is True"
                )

    def _current_form(self, called: Any) -> object:
        """Whatever about the model and its call decides what is computed, but for values."""
        modes = tuple((id(module), module.training) for module in self.model.modules())
        device = self.params[0].device.type
        casting = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return modes, casting, tuple((t.dim(), t.dtype) for t in tensors(called))

    def _end(self, _: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:  # noqa: ARG002
        if not self._in_forward:
            return
        self._in_forward = False
        if output is not None and any(t.dim() == 0 for t in tensors(output)):
            refuse_uneven_labels(kwargs.get("labels"))

    def _is_training(self) -> bool:
        return self.model.training and torch.is_grad_enabled() and not self._collecting

    def _is_recorded(self) -> bool:
        """Within the model's forward, or when checkpointing runs part of it again in backward."""
        return self._is_training() and (self._in_forward or _in_backward())

    def _enter(self, unit: Unit, module: nn.Module, _: tuple) -> None:
        if not self._is_recorded():
            return
        self._entered.add(module)
        for name, param in unit.params.items():
            param.requires_grad_(self._compares)
            if unit.how == "copies":  # an attribute of the instance hides the parameter
                copies = self._for_each(param)
                rule = partial(_copy_gradient, param)
                module.__dict__[name] = self._tap(copies, module, rule, at_once=_always)

    def _leave(self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if module not in self._entered:
            return None
        self._entered.remove(module)
        for name, param in unit.params.items():
            param.requires_grad_(True)
            if unit.how == "copies":
                module.__dict__.pop(name, None)
        if output is None or unit.how == "copies" or module in self._attentions:
            return None
        if not isinstance(output, Tensor):
            raise UnsupportedModuleError(
                f"{type(module).__name__} must return one tensor to have per-example gradients"
            )
        if not is_known(module):
            return self._by_vmap(module, args, kwargs, output)
        return self._by_rule(module, args[0] if args else next(iter(kwargs.values())), output)

    def _by_rule(self, module: nn.Module, given: Tensor, output: Tensor) -> Tensor:
        """A known layer; what it gave to all examples at once is given to each."""
        output = self._for_each(output, shared=self._is_shared(module, given))
        held = given.detach() if needs_input(module) else None
        rule = partial(gradients_of, module, held, arena=self._arena)
        return self._tap(output, module, rule, (held,), at_once=partial(best_at_once, module))

    def _by_vmap(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        args = tuple(_detached(value) for value in args)
        kwargs = {name: _detached(value) for name, value in kwargs.items()}
        rule = partial(gradients_by_vmap, module, args, kwargs)
        return self._tap(output, module, rule, (*args, *kwargs.values()))

    def _attend(self, module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        """The forward of an attention module, in steps that can be recorded."""
        if not self._is_recorded():
            return type(module).forward(module, *args, **kwargs)
        return attend(module, partial(self._project, module), *args, **kwargs)

    def _pool(self, module: nn.MaxPool2d, *args: Any, **kwargs: Any) -> Any:
        """The forward of a pooling module, where only a training step sees it."""
        forward = max_pool2d if self._is_recorded() else nn.MaxPool2d.forward
        return forward(module, *args, **kwargs)

    def _project(
        self,
        module: nn.Module,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: slice,
    ) -> Tensor:
        def used(stacked: Tensor) -> Tensor:
            return stacked if len(stacked) == rows.stop - rows.start else stacked[rows]

        output = F.linear(x, used(weight), None if bias is None else used(bias))
        held = x.detach() if trains(weight) else None
        rule = partial(
            projection_gradients, weight, bias, held, start=rows.start, arena=self._arena
        )
        return self._tap(self._for_each(output), module, rule, (held,))

    def _is_shared(self, module: nn.Module, given: Tensor) -> bool:
        """Whether an embedding is looked up once for all examples, as positions 0, 1, ... are.

        Decided the first time, because the batch may later happen to be as long as the sequence.
        """
        if not isinstance(module, nn.Embedding) or given.dim() != 1:
            return False
        if len(given) == self._batch == 1:
            return False
        return self._shared.setdefault(module, len(given) != self._batch)

    def _for_each(self, output: Tensor, *, shared: bool = False) -> Tensor:
        """What is broadcast over the batch, one for each example, with a gradient of its own."""
        if shared:
            return output.expand(self._batch, *output.shape)
        if output.shape[0] == 1:
            return output.expand(self._batch, *output.shape[1:])
        return output

    def _tap(
        self,
        output: Tensor,
        module: nn.Module,
        rule: Callable[[Tensor], list[PerExample]],
        held: tuple = (),
        *,
        at_once: Callable[[Tensor], bool] | None = None,
    ) -> Tensor:
        if _in_backward():
            # Checkpointing computes again what backward needs. The first time was recorded; this
            # time only the graph must look the same.
            if module not in self._seen:
                raise BookkeepingError(_REENTRANT)
            return Tap.apply(output, self._anchor, _ignore)
        self._seen.add(module)
        inputs = tuple(value for value in held if isinstance(value, Tensor))
        record = Record(type(module).__name__, self._batch, rule, inputs, at_once)
        self._records.append(record)
        for tensor in (output, *inputs):
            if tensor.is_floating_point():
                self._precision = max(self._precision, torch.finfo(tensor.dtype).eps)
        return Tap.apply(output, self._anchor, partial(_receive, record))


def _receive(record: Record, grad: Tensor) -> None:
    with full_precision():
        record.keep(grad)


def _copy_gradient(param: Tensor, grad: Tensor) -> list[PerExample]:
    return [Dense(param, grad if grad.dtype == torch.float64 else grad.float())]


def _refuse_replaced(unit: Unit) -> None:
    forward = unit.module.__dict__.get("forward")
    if forward is not None and not is_ours(forward):
        raise UnsupportedModuleError(
            f"module {unit.name!r} must have its class's own forward, got a replaced one"
        )


def _ignore(_: Tensor) -> None:
    pass


def _always(_: Tensor) -> bool:
    return True


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def refuse_uneven_labels(labels: object) -> None:
    """Refuse a loss that the model averaged over labels of which examples have different numbers.

    A mean over the *tokens* of a batch divides every example's loss by a number that depends on
    the other examples.

    Args:
        labels: what the model was given under that name, while it returned a loss.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.numel() == 0:
        return
    if labels.dim() == 0:
        return
    counted = (labels != -100).reshape(len(labels), -1).long()
    counts = torch.stack([counted.sum(dim=1), counted[:, 1:].sum(dim=1)])  # all; after a shift
    if bool((counts != counts[:, :1]).any()):
        raise UnsupportedModuleError(
            "the model's own loss is a mean over the labels of the whole batch, and its examples "
            "have different numbers of them: each example's loss then depends on the others. "
            "Leave labels out, and give engine.backward the examples' own losses of the logits"
        )
