"""Which layer has which per-example gradients, from its input and the gradient of its output."""

# pyright: basic

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn

from lap2.train.arena import Arena
from lap2.train.gradients import Dense, Outer, PerExample, Rows

__all__ = ["UnsupportedModuleError", "gradients_of", "is_known", "refuse_mixing"]


class UnsupportedModuleError(ValueError):
    """A module cannot be trained privately; the message says why and what to do instead."""


def is_known(module: nn.Module) -> bool:
    """Whether the module's gradients come from book-keeping; others go through ``torch.func``."""
    return type(module) in _RULES


def gradients_of(module: nn.Module, args: tuple, grad: Tensor, *, arena: Arena) -> list[PerExample]:
    """Per-example gradients of the module's own trainable parameters, in float32 or wider.

    Args:
        module: the layer.
        args: what its forward was called with.
        grad: the gradient of the *sum* of the examples' losses with respect to its output.
        arena: scratch memory; what is returned is valid until it is reset.
    """
    grad = _wide(grad)
    if type(module) in _RULES:
        inputs = args[0] if isinstance(module, nn.Embedding) else _wide(args[0])
        return _RULES[type(module)](module, inputs, grad, arena)
    return _by_vmap(module, args, grad)


def refuse_mixing(root: nn.Module) -> None:
    """Refuse modules that mix the examples of a batch."""
    for name, module in root.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UnsupportedModuleError(
                f"module {name!r} is a {type(module).__name__}, which mixes the examples of a "
                "batch: no per-example gradient exists. Use nn.GroupNorm or nn.LayerNorm instead"
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            raise UnsupportedModuleError(
                f"module {name!r} keeps running statistics of private data: make it with "
                "track_running_stats=False"
            )
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            raise UnsupportedModuleError(
                f"module {name!r} is a {type(module).__name__}, whose fused kernels hide the "
                "per-example gradients: write it with nn.Linear layers"
            )


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _trains(param: Tensor | None) -> TypeGuard[Tensor]:
    return param is not None and getattr(param, "_lap2_trained", param.requires_grad)


def _linear(module: nn.Linear, a: Tensor, g: Tensor, arena: Arena) -> list[PerExample]:
    a, g = (t.unsqueeze(1) if t.dim() == 2 else t.flatten(1, -2) for t in (a, g))
    found: list[PerExample] = []
    if _trains(module.weight):
        found.append(Outer(module.weight, a, g, arena=arena))
    if _trains(module.bias):
        found.append(Dense(module.bias, g.sum(dim=1)))
    return found


def _conv(module: nn.Conv1d | nn.Conv2d, a: Tensor, g: Tensor, arena: Arena) -> list[PerExample]:
    found: list[PerExample] = []
    if _trains(module.bias):
        found.append(Dense(module.bias, g.flatten(2).sum(dim=2)))
    if not _trains(module.weight):
        return found
    if module.groups == 1 and isinstance(module, nn.Conv2d):
        grads = g.permute(0, 2, 3, 1).flatten(1, 2)
        patches = _patches_channels_last(module, a, g.shape[2:], arena)
        weight = Outer(module.weight, patches, grads, arena=arena, channels_last=True)
        return [weight, *found]
    patches, grads = _patches(module, a), g.flatten(2)
    if module.groups == 1:
        return [Outer(module.weight, patches.mT, grads.mT, arena=arena), *found]
    batch, groups = a.shape[0], module.groups
    values = torch.einsum(
        "bgol,bgil->bgoi",
        grads.reshape(batch, groups, -1, grads.shape[2]),
        patches.reshape(batch, groups, -1, grads.shape[2]),
    )
    return [Dense(module.weight, values), *found]


def _patches_channels_last(module: nn.Conv2d, a: Tensor, size: torch.Size, arena: Arena) -> Tensor:
    """The receptive field of every output position: (batch, positions, kernel * inputs).

    A strided view and one copy, several times faster than ``unfold`` for channels_last inputs.
    """
    a = _padded(module, a).contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    batch, down, right, channel = a.stride()
    (dy, dx), (sy, sx) = module.dilation, module.stride
    windows = a.as_strided(
        (a.shape[0], *size, *module.kernel_size, a.shape[3]),
        (batch, down * sy, right * sx, down * dy, right * dx, channel),
    )
    patches = arena.empty(tuple(windows.shape), a).copy_(windows)
    return patches.view(a.shape[0], size[0] * size[1], -1)


def _padded(module: nn.Conv1d | nn.Conv2d, a: Tensor) -> Tensor:
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(a, module._reversed_padding_repeated_twice, mode=mode)


def _patches(module: nn.Conv1d | nn.Conv2d, a: Tensor) -> Tensor:
    """The receptive field of every output position: (batch, inputs * kernel, positions)."""
    a = _padded(module, a)
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
    if not _trains(module.weight):
        return []
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise UnsupportedModuleError(
            "nn.Embedding must have max_norm=None and scale_grad_by_freq=False: both depend on the "
            "other examples of the batch"
        )
    index = index.reshape(index.shape[0], -1)
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
        if _trains(param):
            found.append(Dense(param, values.sum(dim=drop) if drop else values))
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


_RULES: dict[type[nn.Module], Callable[..., list[PerExample]]] = {
    nn.Linear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
}


def _by_vmap(module: nn.Module, args: tuple, grad: Tensor) -> list[PerExample]:
    """The readable version, for every module without a rule: one example at a time, vectorised."""
    trained = {name: p.detach() for name, p in module.named_parameters() if _trains(p)}
    others = {name: p.detach() for name, p in module.named_parameters() if not _trains(p)}
    buffers = dict(module.named_buffers())

    def one(params: dict, example: tuple, g: Tensor) -> Tensor:
        inputs = tuple(t.unsqueeze(0) if isinstance(t, Tensor) else t for t in example)
        output = torch.func.functional_call(module, (params, others, buffers), inputs)
        return (_wide(output) * g.unsqueeze(0)).sum()

    axes = tuple(0 if isinstance(t, Tensor) else None for t in args)
    compute = torch.func.vmap(torch.func.grad(one), in_dims=(None, axes, 0), randomness="error")
    try:
        values = compute(trained, tuple(_detached(t) for t in args), grad)
    except RuntimeError as error:
        raise UnsupportedModuleError(
            f"{type(module).__name__} has no rule for per-example gradients, and computing them "
            f"one by one failed: {error}"
        ) from error
    params = dict(module.named_parameters())
    return [Dense(params[name], values[name]) for name in trained]


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, Tensor) else value
