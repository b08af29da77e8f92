"""Learning-rate schedules, which rehearsals must not advance."""

# pyright: basic

import copy
import gc
import warnings
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = ["Schedules"]


class Schedules:
    """Holds what torch's schedulers have done to an optimizer, and puts it back.

    A loop that calls ``scheduler.step()`` for every batch does so in a rehearsal too.

    Args:
        optimizer: whose schedulers are found among all objects there are, once.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Look for nothing yet."""
        self._optimizer = optimizer
        self._found: list[Any] | None = None
        self._held: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None

    def hold(self) -> None:
        """Remember the state, unless one is held already."""
        if self._held is not None:
            return
        # Searching takes a while; a scheduler leaves this mark when it is made.
        marked = any("initial_lr" in group for group in self._optimizer.param_groups)
        if self._found is None or (marked and not self._found):
            self._found = _schedulers_of(self._optimizer)
        groups = [_settings(group) for group in self._optimizer.param_groups]
        self._held = groups, [copy.deepcopy(s.state_dict()) for s in self._found]

    def restore(self, *, keep: bool = False) -> None:
        """Put back what is held, and go on holding it if it is to be kept."""
        if self._held is None:
            return
        groups, states = self._held
        for group, settings in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(settings)
        for scheduler, state in zip(self._found or [], states, strict=True):
            scheduler.load_state_dict(copy.deepcopy(state))
        if not keep:
            self._held = None


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _schedulers_of(optimizer: Optimizer) -> list[Any]:
    """A scheduler knows its optimizer, but the optimizer does not know its schedulers."""
    referrers = gc.get_referrers(optimizer)
    # An object's attributes may be in a dict, which then is what refers to the optimizer.
    owners = [o for held in referrers if type(held) is dict for o in gc.get_referrers(held)]
    held = {id(o): o for o in (*referrers, *owners) if issubclass(type(o), LRScheduler)}
    found = [o for o in held.values() if getattr(o, "optimizer", None) is optimizer]
    if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in found):
        warnings.warn(
            "a ReduceLROnPlateau steers this optimizer: the epsilon holds only if what its step() "
            "is given is public, such as a loss on public data; a training loss is not",
            stacklevel=6,
        )
    return found
