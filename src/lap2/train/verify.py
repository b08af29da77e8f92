"""What was recorded is compared with ordinary autograd, until every parameter has been seen once.

Two comparisons. The *sum* of the recorded gradients must be the gradient that ``backward`` leaves;
that finds a weight used where nobody looked. And the sum under *random weights*, one per example,
must be what autograd finds when the gradient of each example's output is multiplied by its weight;
that finds gradients recorded under the wrong example, and models that mix examples. The second
needs one more backward pass through the model, from within the first.
"""

# pyright: basic

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lap2.train.gradients import PerExample
from lap2.train.layers import UnsupportedModuleError

__all__ = ["BookkeepingError", "Verifier", "map_tensors", "refuse_uneven_labels", "weigh"]


REENTRANT = (
    "gradient checkpointing must be used with use_reentrant=False: the other kind runs layers "
    "without a graph first, so that they cannot be recorded"
)


class BookkeepingError(RuntimeError):
    """What was recorded are not the per-example gradients of the loss; nothing was released."""


class Verifier:
    """Compares the first gradients of every parameter with autograd's.

    A parameter is settled by the first batch of two or more examples in which its gradient is
    finite and not zero: LoRA's first factor, say, by the second batch, because its second factor
    starts at zero. Until then, ordinary gradients are computed for it as well. Of each only a
    fingerprint is kept, so that the first batch needs hardly more memory than the others.

    Args:
        names: the trained parameters and what they are called.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        """Start with everything unsettled."""
        self._open = dict(names)
        self._sums: dict[Tensor, Tensor] = {}
        self._weighted: dict[Tensor, Tensor] = {}
        self._looked = self.running = self.watching = False
        self._handles = {p: p.register_post_accumulate_grad_hook(self._take) for p in names}

    def remove(self) -> None:
        """Leave the parameters alone from now on."""
        for handle in self._handles.values():
            handle.remove()

    def wants(self, param: Tensor) -> bool:
        """Whether the parameter still needs an ordinary gradient."""
        return param in self._open

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to compare."""
        return not self._open

    def restart(self) -> None:
        """Forget what was seen of a batch."""
        self._sums.clear()
        self._weighted.clear()
        self._looked = self.watching = False

    def _take(self, param: Tensor) -> None:
        """What backward would leave in a parameter."""
        if self.watching and param.grad is not None:
            _add(self._sums, param, _fingerprint(param.grad))
            param.grad = None

    def look(self, output: Tensor, others: Sequence[Tensor], batch: int, grad: Tensor) -> None:
        """Differentiate once more, each example's part of the gradient multiplied by its weight.

        A loss that the model computed itself has no part for each example. The weights then go in
        at whatever else it returned that the loss came from, such as logits; or else at the layers
        that the gradient comes to first.

        Args:
            output: what the model returned, before anything was done to it.
            others: everything it returned.
            batch: number of examples.
            grad: the loss's gradient with respect to ``output``.
        """
        if self.running:
            return
        weights, params = _weights(batch, grad), list(self._open)
        marked: list[Any] = []
        differentiate = partial(torch.autograd.grad, retain_graph=True)
        self.running = True
        try:
            outputs, grads = [output], [grad]
            if not _is_batched(output, batch):
                cuts = {t.grad_fn: t for t in others if _is_batched(t, batch)}
                outputs = [cuts[node] for node in _nearest(output, lambda node: node in cuts)]
                grads = differentiate(output, outputs, grad) if outputs else []
            if outputs:
                grads = [weigh(weights, g) for g in grads]
            else:
                outputs, grads, marked = [output], [grad], _nearest_taps(output)
            for tap in marked:
                tap.weights = weights
            found = differentiate(outputs, params, grads, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                raise BookkeepingError(REENTRANT) from error
            raise
        finally:
            self.running = False
            for tap in marked:
                tap.weights = None
        self._looked = True
        for param, value in zip(params, found, strict=True):
            if value is not None:
                _add(self._weighted, param, _fingerprint(value))

    def compare(self, gradients: Iterable[PerExample], batch: int) -> None:
        """Compare, settle what can be, and take ordinary gradients away.

        Raises:
            BookkeepingError: they differ.
        """
        found = {g.param: g for g in gradients}
        if self._sums and not self._looked:
            raise BookkeepingError(
                "the model must return tensors, or tuples, lists, dicts or dataclasses of them: "
                "what it returned could not be used to check which example a gradient belongs to"
            )
        largest = max((float(t.abs().max()) for t in self._sums.values()), default=0.0)
        for param, truth in self._sums.items():
            name = self._open[param]
            if param not in found:
                raise BookkeepingError(
                    f"parameter {name!r} has a gradient but is used outside a module's forward, "
                    "where per-example gradients cannot be seen: use it through its own module, "
                    "or freeze it"
                )
            ours, weights = found[param], _weights(batch, truth)
            rounding = torch.finfo(param.dtype).eps
            sums = _fingerprint(ours.weighted_sum(torch.ones_like(weights)))
            if _differ(sums, truth, largest, rounding):
                raise BookkeepingError(
                    f"the recorded gradient of {name!r} differs from autograd's: it is used "
                    "outside its own module's forward, or a layer does not have the batch first"
                )
            weighted = self._weighted.get(param, torch.zeros_like(truth))
            if _differ(_fingerprint(ours.weighted_sum(weights)), weighted, largest, rounding):
                raise BookkeepingError(
                    f"the recorded gradients of {name!r} belong to other examples: the model mixes "
                    "the examples of a batch, or a layer does not have the batch first"
                )
        for param, truth in self._sums.items():
            if batch > 1 and truth.any() and truth.isfinite().all():
                del self._open[param]
                self._handles.pop(param).remove()
        self.restart()


def _fingerprint(grad: Tensor) -> Tensor:
    """A random combination of a gradient's rows: different gradients have different ones."""
    grad = grad.to_dense() if grad.is_sparse else grad
    grad = grad if grad.dtype == torch.float64 else grad.float()
    if grad.dim() < 2:
        return grad.flatten()
    maker = torch.Generator().manual_seed(len(grad))
    return torch.randn(len(grad), generator=maker).to(grad) @ grad.reshape(len(grad), -1)


def _add(sums: dict[Tensor, Tensor], param: Tensor, value: Tensor) -> None:
    sums[param] = sums[param] + value if param in sums else value


def _differ(ours: Tensor, truth: Tensor, largest: float, rounding: float) -> bool:
    """Beyond rounding, of which a vanishing gradient has as much as the largest one has."""
    scale = truth.abs().max()
    allowed = max(1e-2, 4 * rounding) * scale + 16 * rounding * largest
    return bool(scale.isfinite()) and not bool((ours - truth).abs().max() <= allowed)


def _weights(batch: int, like: Tensor) -> Tensor:
    """The same for every look at a batch; nothing private depends on them."""
    maker = torch.Generator().manual_seed(batch)
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.rand(batch, generator=maker, dtype=torch.float64).to(like.device, wide)


def weigh(weights: Tensor, grad: Tensor) -> Tensor:
    """Each example's part of a gradient times its weight."""
    return grad * weights.reshape(-1, *[1] * (grad.dim() - 1)).to(grad.dtype)


def _is_batched(tensor: Tensor, batch: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == batch


def _nearest(output: Tensor, stops: Callable[[Any], bool]) -> list[Any]:
    """The nodes of that kind which a gradient of ``output`` comes to first, on every way back."""
    found, seen, waiting = [], set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if stops(node):
            found.append(node)
        else:
            waiting.extend(parent for parent, _ in node.next_functions)
    return found


def _nearest_taps(output: Tensor) -> list[Any]:
    taps = [node.record for node in _nearest(output, lambda node: hasattr(node, "record"))]
    if any(tap.copied for tap in taps):
        raise BookkeepingError(
            "the model returns nothing but its loss, so that it cannot be checked which example "
            f"a gradient in its {taps[0].name} belongs to: let it return its other outputs too"
        )
    return taps


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with ``change`` applied to every tensor in it that has a gradient."""
    if isinstance(value, Tensor):
        return change(value) if value.requires_grad else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, v) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(change, v) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: map_tensors(change, v) for name, v in held.items()}
        return dataclasses.replace(value, **changed)
    if isinstance(value, dict):
        copied = value.copy()
        copied.update({key: map_tensors(change, v) for key, v in value.items()})
        return copied
    return value


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
            "Leave labels out, and take the mean of the examples' own losses of the logits"
        )
