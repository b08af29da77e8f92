"""Pickles and copies of what Opacus has made private: the ordinary model inside.

Opacus keeps inputs on layers, and per-example gradients on parameters, as attributes of theirs.
"""

# pyright: basic

from functools import partial
from typing import Any

from torch import nn

from lap2.train.hooks import ABSENT, Leaving
from lap2.train.secrecy import reduced_as

__all__ = ["leave_ordinary"]

_OF_LAYERS = ("activations", "max_batch_len", "ft_compute_sample_grad")
_OF_MODELS = ("autograd_grad_sample_hooks", "__reduce_ex__")


def leave_ordinary(module: nn.Module, wrapper: Any) -> Any:
    """Have pickles and copies of a model, its layers and parameters be ordinary ones.

    Args:
        module: the model, once Opacus has hung its hooks on it.
        wrapper: what Opacus gives the user instead of it; returned.
    """
    handles = getattr(wrapper, "autograd_grad_sample_hooks", [])
    for layer in module.modules():
        before: dict[str, Any] = dict.fromkeys((*_OF_LAYERS, *_OF_MODELS), ABSENT)
        layer.__dict__["__reduce_ex__"] = Leaving(layer, handles, before)
    for param in module.parameters():
        vars(param)["__reduce_ex__"] = partial(_parameter, param)
    wrapper.__dict__["__reduce_ex__"] = partial(_inner, module)
    return wrapper


def _inner(module: nn.Module, protocol: Any) -> Any:
    return reduced_as(type(module), module.__reduce_ex__(protocol), type(module))


def _parameter(param: nn.Parameter, protocol: Any) -> Any:
    plain = nn.Parameter(param.data, param.requires_grad)
    return plain.__reduce_ex__(protocol)
