"""A device like a GPU for machines without one: memory of its own, which it is slow to read."""

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("lazy", 0)  # a kind that torch knows, and asks nobody about

_SYNCHRONISE = {"nonzero", "masked_select", "_unique2", "equal"}
"""Operations whose result's size, or value, the host waits for."""


_original = torch.tensor


def _tensor(data, *, device=None, **kinds):
    made = _original(data, **kinds)
    return made if device is None else made.to(device)


class FakeGpu(TorchDispatchMode):
    """While it is entered, there is such a device.

    Its numbers are in the CPU's memory, where no operation that is not the device's own gets at
    them. One that is given tensors of both devices is an error, as it is on a GPU.

    Args:
        lacks: types of numbers that it does not have.

    Attributes:
        reads: how many numbers the host got each time that it waited for the device.
        sent: how many it gave, each time.
    """

    def __init__(self, *, lacks=()):
        super().__init__()
        self.reads, self.sent, self._lacks = [], [], lacks

    def __enter__(self):
        torch.tensor = _tensor  # the original makes what it makes of lists unseen by dispatch
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor = _original
        return super().__exit__(*error)

    def __torch_dispatch__(self, op, _types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = op.overloadpacket._qualified_op_name.removeprefix("aten::")
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        here = [isinstance(t, _Remote) for t in tensors]
        asked = kwargs.get("device")
        lands_here = any(here) if asked is None else torch.device(asked).type == DEVICE.type
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        if name in ("_to_copy", "copy_"):
            if name == "copy_":
                lands_here = here[0]
            if here[-1] != lands_here:
                (self.sent if lands_here else self.reads).append(tensors[-1].numel())
        elif any(here):
            strangers = [t for t, is_here in zip(tensors, here, strict=True) if not is_here]
            if any(t.dim() > 0 for t in strangers):
                raise RuntimeError(f"all tensors should be on one device, in {name}")
            by_mask = name in ("index", "index_put_") and any(
                t is not None and t.dtype == torch.bool for t in args[1]
            )
            if name == "_local_scalar_dense" or name in _SYNCHRONISE or by_mask:
                self.reads.append(1)
        result = op(*pytree.tree_map(_unwrapped, args), **pytree.tree_map(_unwrapped, kwargs))
        known = {id(_unwrapped(t)): t for t in tensors}

        def wrapped(value):
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in known:
                return known[id(value)]
            if lands_here and value.dtype in self._lacks:
                raise TypeError(f"no {value.dtype} on this device, in {name}")
            return _Remote(value) if lands_here else value

        return pytree.tree_map(wrapped, result)


class _Remote(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
        )

    def __init__(self, raw):
        self.raw = raw

    @classmethod
    def __torch_dispatch__(cls, op, _types, _args=(), _kwargs=None):
        raise RuntimeError(f"there is no {DEVICE} here for {op}")


def _unwrapped(value):
    return value.raw if isinstance(value, _Remote) else value
