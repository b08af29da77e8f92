"""Which layer has which per-example gradients, from its input and the gradient of its output."""

# pyright: basic

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lap2.train.arena import Arena
from lap2.train.compiled import kernel
from lap2.train.convolution import conv2d_gradients, is_formed, padded
from lap2.train.gradients import Dense, Outer, PerExample, Rows

__all__ = [
    "UnsupportedModuleError",
    "best_at_once",
    "gradients_by_vmap",
    "gradients_of",
    "is_known",
    "mark",
    "mixing",
    "needs_input",
    "projection_gradients",
    "trains",
]


class UnsupportedModuleError(ValueError):
    """A module cannot be trained privately; the message says why and what to do instead."""


def is_known(module: nn.Module) -> bool:
    """Whether the module's gradients come from book-keeping; others go through ``torch.func``."""
    return _rule_of(module) is not None


def needs_input(module: nn.Module) -> bool:
    """Whether a known layer's gradients need its input: a bias alone does not."""
    weight: Any = getattr(module, "weight", None)
    return weight is None or trains(weight)


def best_at_once(module: nn.Module, grad: Tensor) -> bool:
    """Whether a known layer's gradients are best formed as soon as ``grad`` is known.

    So are vectors, and convolutions' that are to be formed: then ``grad`` need not be kept.
    """
    if isinstance(module, nn.Conv2d) and needs_input(module):
        return module.groups == 1 and is_formed(module, grad)
    return not needs_input(module) or _rule_of(module) in _SMALL


def gradients_of(
    module: nn.Module, inputs: Tensor | None, grad: Tensor, *, arena: Arena
) -> list[PerExample]:
    """Per-example gradients of a known layer's own trainable parameters, in float32 or wider.

    Args:
        module: the layer.
        inputs: what its forward was called with; None if :func:`needs_input` says so. If it was
            the same for all examples, it may lack the batch, or have one of size 1.
        grad: the gradient of the *sum* of the examples' losses with respect to its output.
        arena: scratch memory; what is returned is valid until it is reset.
    """
    grad, rule = _wide(grad), _rule_of(module)
    if rule is None:
        raise UnsupportedModuleError(f"{type(module).__name__} has no rule")
    if inputs is None:
        return _offset(module, grad, channels_last=rule not in (_conv, _group_norm))
    if isinstance(module, nn.Embedding):
        return _embedding(module, inputs.expand(grad.shape[:-1]), grad, arena)
    return rule(module, _wide(inputs).expand(grad.shape[0], *inputs.shape[1:]), grad, arena)


def mixing(module: nn.Module) -> str | None:
    """Why this module by itself rules out per-example gradients, and what to use; else None."""
    kind = type(module).__name__
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return (
            f"is a {kind}, which mixes the examples of a batch: no per-example gradient exists. "
            "Use nn.GroupNorm or nn.LayerNorm instead"
        )
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
        return "keeps running statistics of private data: make it with track_running_stats=False"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (
        module.max_norm is not None or module.scale_grad_by_freq
    ):
        return (
            f"is an {kind} that must be made with max_norm=None and scale_grad_by_freq=False: both "
            "depend on the other examples of the batch"
        )
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return (
            f"is a {kind}, whose fused kernels hide the per-example gradients: write it with "
            "nn.Linear layers"
        )
    if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return (
            "is compiled, and compiled code does not show what happens in its layers: pass the "
            "model as it was before torch.compile"
        )
    return None


def trains(param: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a parameter is trained, also while a recorder has switched its gradient off."""
    return param is not None and (param in _trained or param.requires_grad)


def mark(param: Tensor, *, trained: bool) -> None:
    """Say whether a recorder trains a parameter, which itself stays as it was."""
    if trained:
        _trained[param] = None
    else:
        _trained.pop(param, None)


_trained = WeakTensorKeyDictionary()
"""By identity: what is a parameter's own attribute would be pickled with it."""


_WORTH_THREADS = 1 << 18
"""Numbers that take much longer to add than to wake a thread."""


def _total(values: Tensor, drop: list[int]) -> Tensor:
    """Their sum over some dimensions, in float64.

    Where terms cancel, what float32 leaves depends on the order of additions, which may depend on
    where in memory, and so on how many examples, there are.
    """
    if not drop:
        return values
    if drop == [1] and values.dim() == 3 and (compiled := kernel("sum")) is not None:
        threads = torch.get_num_threads() if values.numel() > _WORTH_THREADS else 1
        total = compiled.over_positions(values, threads)
        if total is not None:
            return total
    wide = values.dtype if values.device.type == "mps" else torch.float64
    return values.sum(dim=drop, dtype=wide)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _rule_of(module: nn.Module) -> Callable[..., list[PerExample]] | None:
    kind = type(module)
    return _RULES.get(kind) or _FOREIGN.get(f"{kind.__module__}.{kind.__qualname__}")


def _offset(module: nn.Module, g: Tensor, *, channels_last: bool) -> list[PerExample]:
    """A bias that is trained alone: what is added everywhere, summed over where."""
    bias: Any = module.bias
    drop = list(range(1, g.dim() - bias.dim()) if channels_last else range(2, g.dim()))
    return [Dense(bias, _total(g, drop))]


def _linear(module: nn.Linear, a: Tensor, g: Tensor, arena: Arena) -> list[PerExample]:
    a, g = _positions(a), _positions(g)
    found: list[PerExample] = []
    if trains(module.weight):
        found.append(Outer(module.weight, a, g, arena=arena))
    if trains(module.bias):
        found.append(Dense(module.bias, _total(g, [1])))
    return found


def _transposed_linear(module: Any, a: Tensor, g: Tensor, arena: Arena) -> list[PerExample]:
    """A linear layer that stores (inputs, outputs), as GPT-2's: the factors trade places."""
    a, g = _positions(a), _positions(g)
    found: list[PerExample] = [Outer(module.weight, g, a, arena=arena)]
    if trains(module.bias):
        found.append(Dense(module.bias, _total(g, [1])))
    return found


def _positions(tensor: Tensor) -> Tensor:
    """From (batch, ..., width) to (batch, positions, width)."""
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor.flatten(1, -2)


def projection_gradients(
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor | None,
    grad: Tensor,
    *,
    start: int,
    arena: Arena,
) -> list[PerExample]:
    """Of a stacked projection of which only the rows from ``start`` were used on ``inputs``.

    Args:
        weight: the stacked weights; or only those used, if there are no more rows.
        bias: the stacked offsets, if any.
        inputs: what they were applied to, (batch or 1, positions, width); None if the weight is
            not trained.
        grad: the gradient of what came out.
        start: the first row used.
        arena: see :func:`gradients_of`.
    """
    g = _wide(grad)
    found: list[PerExample] = []
    if trains(weight) and inputs is not None:
        a = _wide(inputs).expand(len(g), -1, -1)
        rows = g if weight.shape[0] == g.shape[2] else _placed(g, start, weight.shape[0])
        found.append(Outer(weight, a, rows, arena=arena))
    if trains(bias):
        found.append(Dense(bias, _placed(_total(g, [1]), start, bias.shape[0])))
    return found


def _placed(g: Tensor, start: int, size: int) -> Tensor:
    return F.pad(g, (start, size - start - g.shape[-1]))


def _conv(module: nn.Conv1d | nn.Conv2d, a: Tensor, g: Tensor, arena: Arena) -> list[PerExample]:
    found: list[PerExample] = []
    if trains(module.bias):
        found.append(Dense(module.bias, _total(g.flatten(2).mT, [1])))
    if not trains(module.weight):
        return found
    if module.groups == 1 and isinstance(module, nn.Conv2d):
        return [conv2d_gradients(module, a, g, arena), *found]
    patches, grads = _patches(module, a), g.flatten(2)
    if module.groups == 1:
        return [Outer(module.weight, patches.mT, grads.mT, arena=arena), *found]
    # In float64, as all that is formed of terms that may cancel.
    wide = a.dtype if a.device.type == "mps" else torch.float64
    shape = (a.shape[0], module.groups, -1, grads.shape[2])
    out, into = grads.to(wide).reshape(shape), patches.to(wide).reshape(shape)
    values = torch.bmm(out.flatten(0, 1), into.flatten(0, 1).mT).unflatten(0, shape[:2])
    one, two = (
        torch.linalg.vector_norm(out, power, dim=2) * torch.linalg.vector_norm(into, power, dim=2)
        for power in (1, 2)
    )
    lengths = one.sum(dim=(1, 2)), two.square().sum(dim=1).sqrt().sum(dim=1)
    return [Dense(module.weight, values, lengths=lengths), *found]


def _patches(module: nn.Conv1d | nn.Conv2d, a: Tensor) -> Tensor:
    """The receptive field of every output position: (batch, inputs * kernel, positions)."""
    a = padded(module, a)
    if isinstance(module, nn.Conv1d):
        a = a.unsqueeze(2)
    settings = [
        fill + tuple(value) if isinstance(module, nn.Conv1d) else tuple(value)
        for fill, value in (
            ((1,), module.kernel_size),
            ((1,), module.dilation),
            ((1,), module.stride),
        )
    ]
    return F.unfold(a, settings[0], dilation=settings[1], stride=settings[2])


def _embedding(module: nn.Embedding, index: Tensor, g: Tensor, _: Arena) -> list[PerExample]:
    if not trains(module.weight):
        return []
    index = index.flatten(1) if index.dim() > 1 else index[:, None]
    g = g.reshape(*index.shape, g.shape[-1])
    if module.padding_idx is not None:
        g = g * (index != module.padding_idx)[:, :, None]
    return [Rows(module.weight, index, g)]


def _norm(module: nn.Module, normalised: Tensor, g: Tensor, keep: slice) -> list[PerExample]:
    """Gain and offset of a normalisation: elementwise products, summed over all but ``keep``."""
    found: list[PerExample] = []
    sizes = list(range(1, g.dim()))
    drop = [d for d in sizes if d not in sizes[keep]]
    weight: Any = module.weight
    offset: Any = getattr(module, "bias", None)
    for param, values in ((weight, g * normalised), (offset, g)):
        if trains(param):
            found.append(Dense(param, _total(values, drop)))
    return found


def _layer_norm(module: nn.LayerNorm, a: Tensor, g: Tensor, _: Arena) -> list[PerExample]:
    normalised = F.layer_norm(a, module.normalized_shape, eps=module.eps)
    return _norm(module, normalised, g, slice(-len(module.normalized_shape), None))


def _rms_norm(module: nn.RMSNorm, a: Tensor, g: Tensor, _: Arena) -> list[PerExample]:
    normalised = F.rms_norm(a, module.normalized_shape, eps=module.eps)
    return _norm(module, normalised, g, slice(-len(module.normalized_shape), None))


def _group_norm(module: nn.GroupNorm, a: Tensor, g: Tensor, _: Arena) -> list[PerExample]:
    normalised = F.group_norm(a, module.num_groups, eps=module.eps)
    return _norm(module, normalised, g, slice(0, 1))


def _layer_scale(module: nn.Module, a: Tensor, g: Tensor, _: Arena) -> list[PerExample]:
    """One gain for each channel of the last dimension, under whatever name."""
    (gain,) = module.parameters(recurse=False)
    return [Dense(gain, _total(_positions(a * g), [1]))]


_RULES: dict[type[nn.Module], Callable[..., list[PerExample]]] = {
    nn.Linear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
}

# By name, so that the libraries need not be installed, nor imported.
_FOREIGN: dict[str, Callable[..., list[PerExample]]] = {
    "transformers.pytorch_utils.Conv1D": _transposed_linear,
    "transformers.models.dinov2.modeling_dinov2.Dinov2LayerScale": _layer_scale,
    "timm.layers.layer_scale.LayerScale": _layer_scale,
    "timm.layers.norm.LayerNorm": _layer_norm,
}

_NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?")
"""In a message of others, where it may be a size or a value of private records."""

_SMALL = (_layer_norm, _rms_norm, _group_norm, _layer_scale)


def gradients_by_vmap(
    module: nn.Module, args: tuple, kwargs: Mapping[str, Any], grad: Tensor
) -> list[PerExample]:
    """The readable version, for every module without a rule: one example at a time, vectorised.

    Always right if the module treats the examples one by one, but it runs the module again and
    forms every gradient. Randomness is refused: another draw would have other gradients.
    """
    own = dict(module.named_parameters())
    trained = {name: p.detach() for name, p in own.items() if trains(p)}
    others = {name: p.detach() for name, p in own.items() if not trains(p)}
    buffers = dict(module.named_buffers())
    keys, values = list(kwargs), (*args, *kwargs.values())
    batched = [isinstance(t, Tensor) and t.dim() > 0 and t.shape[0] == len(grad) for t in values]
    for value, ok in zip(values, batched, strict=True):
        if isinstance(value, Tensor) and not ok and value.shape[:1] not in ((), (1,)):
            raise UnsupportedModuleError(
                f"{type(module).__name__} has no rule for per-example gradients: every tensor it "
                f"is called with must have the batch as first dimension, got one of {value.dim()} "
                "dimensions whose first is another"
            )

    def one(params: dict, example: tuple, g: Tensor) -> Tensor:
        inputs = [t.unsqueeze(0) if ok else t for t, ok in zip(example, batched, strict=True)]
        named = dict(zip(keys, inputs[len(args) :], strict=True))
        output = torch.func.functional_call(
            module, (params, others, buffers), tuple(inputs[: len(args)]), named
        )
        return (_wide(output) * g.unsqueeze(0)).sum()

    axes = tuple(0 if ok else None for ok in batched)
    compute = torch.func.vmap(torch.func.grad(one), in_dims=(None, axes, 0), randomness="error")
    try:
        found = compute(trained, values, _wide(grad))
    except RuntimeError as error:
        raise UnsupportedModuleError(
            f"{type(module).__name__} has no rule for per-example gradients, and computing them "
            f"one by one failed (numbers left out): {_NUMBER.sub('#', str(error))}"
        ) from error
    return [Dense(own[name], _wide(found[name])) for name in trained]
