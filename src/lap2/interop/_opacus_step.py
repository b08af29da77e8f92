"""What a step under Opacus is: its ledger, and a clipped sum with Laplace noise.

The engine that puts the parts together is :mod:`lap2.interop.opacus`.
"""

# pyright: basic, reportAttributeAccessIssue=false
# (Opacus hangs its results on parameters, as attributes torch does not know.)

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from opacus.accountants import IAccountant, register_accountant
from opacus.optimizers import DistributedDPOptimizer, DPOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lap2 import _validate
from lap2.accountant import Accountant
from lap2.interop._opacus_loader import OVER
from lap2.ledger import Entry
from lap2.mechanism import Laplace
from lap2.noise import accounted_noise_multiplier
from lap2.signal import spread_size
from lap2.train import BookkeepingError
from lap2.train.distributed import World
from lap2.train.precision import full_precision
from lap2.train.readout import Readout
from lap2.train.rotate import gather, spread
from lap2.train.rounding import SHRINK, UNIT
from lap2.train.run import RUN, Run, load_with_run
from lap2.train.secrecy import forget_locals, reduced_as
from lap2.train.writes import Writes

__all__ = [
    "DistributedLaplaceDPOptimizer",
    "LaplaceAccountant",
    "LaplaceDPOptimizer",
    "accounted",
    "positive_clip",
    "refuse_watched",
    "released_size",
    "rounding",
    "world_size",
]

_CHUNK = 2**18
"""Numbers that are widened to float64 at a time."""
_LEAST_CLIP = 2.0**-900
"""Far below it, products that underflow in float64 would matter."""

_UNUSED = (
    "fetch one batch at a time, and take a step on each, also on an empty one: a batch was fetched "
    "while the one before was not used. Wrappers that read ahead (such as Accelerate's prepare) "
    "must be left out, and a batch cannot be skipped for what is in it"
)


class LaplaceAccountant(IAccountant):
    """lap2's ledger behind Opacus's accountant interface, registered there as "lap2".

    Only :class:`LaplaceDPOptimizer` writes to it, before it adds noise. Whatever else would
    (Opacus's own optimizers, whose noise is Gaussian, or its search for a noise multiplier) raises.

    Formal guarantee:
        :meth:`get_epsilon` is that of :class:`lap2.Accountant` for exactly the entries of
        ``inner.ledger``; ``history`` is derived from them.
    """

    def __init__(self) -> None:
        """Start an empty ledger."""
        self._inner = Accountant()

    @property
    def inner(self) -> Accountant:
        """The ledger. It cannot be replaced."""
        return self._inner

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """Noise multiplier b / C as accounted, sampling probability and steps of each entry."""
        entries = self.inner.ledger
        return [(e.mechanism.noise_multiplier, e.sampling_prob, e.steps) for e in entries]

    @history.setter
    def history(self, value: Any) -> None:
        raise RuntimeError(
            f"history must not be set, got {value!r}: it is what was released. Opacus's search for "
            "a noise multiplier knows Gaussian noise only; use lap2.calibrate_noise, or "
            "make_private_with_epsilon of lap2.interop.opacus.PrivacyEngine"
        )

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Refuse: nobody knows what noise the caller has added."""
        raise RuntimeError(
            f"the accountant 'lap2' cannot take a step of noise_multiplier={noise_multiplier!r} at "
            f"sample_rate={sample_rate!r}: only lap2.interop.opacus.PrivacyEngine adds the Laplace "
            "noise it accounts for"
        )

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[DPOptimizer], None]:
        """A hook that refuses every optimizer but those that write to this ledger themselves."""

        def hook(optimizer: DPOptimizer) -> None:
            if not (isinstance(optimizer, LaplaceDPOptimizer) and optimizer.accountant is self):
                self.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=sample_rate)

        return hook

    def get_epsilon(self, delta: float) -> float:
        """The epsilon spent so far at ``delta``, rounded up."""
        return self.inner.get_epsilon(delta)

    def __len__(self) -> int:
        """The number of steps taken."""
        return self.inner.steps

    @classmethod
    def mechanism(cls) -> str:
        """The name it is registered under."""
        return "lap2"

    def state_dict(self, destination: Any = None) -> Any:
        """What Opacus saves, and the ledger's text with its integrity check."""
        state = super().state_dict(destination)
        state["ledger"] = self.inner.to_json()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the ledger of :meth:`state_dict`; a saved ``history`` is not believed.

        Raises:
            LedgerError: the ledger was corrupted or edited.
        """
        self.inner.include(self.read_state_dict(state_dict))

    def read_state_dict(self, state_dict: Mapping[str, Any]) -> tuple[Entry, ...]:
        """What :meth:`load_state_dict` would take over; nothing is changed."""
        if len(self):
            raise RuntimeError(
                f"state_dict must be loaded before the first step, got it after {len(self)}: what "
                "was released stays released"
            )
        if not state_dict or state_dict.get("mechanism") != "lap2" or "ledger" not in state_dict:
            raise ValueError(f"state_dict must be one of the accountant 'lap2', got {state_dict!r}")
        inner = Accountant.from_json(state_dict["ledger"])
        for entry in inner.ledger:
            if not isinstance(entry.mechanism, Laplace):
                raise ValueError(f"ledger must hold Laplace steps only, got {entry.mechanism!r}")
        return inner.ledger


class LaplaceDPOptimizer(DPOptimizer):
    """Opacus's optimizer with lap2's clipping, noise and ledger; :class:`PrivacyEngine` makes it.

    One sample of the loader allows one release. A step that cannot be accounted raises and leaves
    the ledger as it was. An example whose gradient is not finite, or too large for its norm to be,
    contributes nothing and is counted in ``skipped_examples``.

    Formal guarantee:
        Each step releases a sum of per-example gradients, as Opacus left them, each scaled to an l2
        norm of at most ``max_grad_norm``, plus Laplace noise of scale ``noise_multiplier *
        max_grad_norm``. It is in the ledger before the noise is drawn, with what rounding adds to
        the sensitivity: of norms, sums and the noise itself (docs/theory.md, section 12).
    """

    world_size = 1

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        accountant: LaplaceAccountant,
        sampling_prob: float,
        readout: Readout,
        copies: int,
        largest: int,
        prefetch: bool,
        writes: Writes,
        **rest: Any,
    ) -> None:
        """Wrap ``optimizer``; ``rest`` are the arguments of Opacus's own."""
        super().__init__(optimizer, **rest)
        self._largest, self._writes, self._begun = largest, writes, 0
        self.accountant, self.skipped_examples = accountant, 0
        self._readout, self._copies = readout, copies
        self._prob, self._prefetch = sampling_prob, prefetch
        self._planned = [id(p) for p in self.params]
        self._dimension = sum(p.numel() for p in self.params)
        self._run = Run(accountant.inner, self._entry(), World.current())
        self._unseen = -1  # examples of the batch still to come; below 0, there is no batch
        self._split, self._clip, self._cutter, self._refused = False, 0.0, 0, False

    @property
    def accumulated_iterations(self) -> int:
        """One: a sample allows one release."""
        return 1

    def give_up(self) -> None:
        """Forget what is left of a batch: another pass over the loader begins."""
        self._unseen, self._split, self._clip, self._cutter = -1, False, 0.0, 0
        self._refused = False
        self._step_skip_queue.clear()
        self._is_last_step_skipped = False
        for p in self.params:
            p.summed_grad = p.grad_sample = None

    def _refuse(self, error: BaseException) -> None:
        """Leave no gradient of the batch at hand, of which nothing may be released any more."""
        self._refused = True
        for p in self.params:
            p.grad = p.summed_grad = p.grad_sample = None
        forget_locals(error)

    def begin_batch(self, size: int) -> None:
        """The next step is for ``size`` new examples."""
        if self._unseen >= 0:
            self._refuse(error := BookkeepingError(_UNUSED))
            raise error
        self.give_up()
        self._unseen = size
        self._begun += 1
        # Comparing contents too takes time: at the first batches, then at doubling distances.
        self._writes.begin(bits=self._begun & (self._begun - 1) == 0)

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Opacus's BatchMemoryManager announces the next piece of the batch."""
        if self._prefetch:
            raise ValueError(
                "num_workers must be 0 with BatchMemoryManager, got more: a piece that workers "
                "have drawn ahead cannot be told from the piece at hand"
            )
        if self._step_skip_queue:
            raise BookkeepingError(_UNUSED)
        cutter = id(sys._getframe(1))  # each pass has its own generator that cuts batches
        if self._cutter not in (0, cutter):
            raise BookkeepingError(OVER)
        self._split, self._cutter, self._step_skip_queue[:] = True, cutter, [do_skip]
        for p in self.params:
            p.grad_sample = None

    def pre_step(self, closure: Any = None) -> Any:
        """Refuse, or go on with Opacus's own: clip, add noise, divide."""
        try:
            return self._pre_step(closure)
        except BaseException as error:
            self._refuse(error)
            raise

    def _pre_step(self, closure: Any) -> Any:
        self._check_settings()
        self._check_examples()
        if names := self._writes.changed():
            raise BookkeepingError(
                "nothing may be written into the model between fetching a batch and the step on "
                f"it, got writes to {', '.join(map(repr, names))}: they may hold data of the "
                "batch, without noise. Freeze such layers with .eval(), leave out max_norm and "
                "running statistics"
            )
        return super().pre_step(closure)

    def _check_settings(self) -> None:
        """What the ledger counts on is as it was when the model was made private."""
        _validate.positive("noise_multiplier", self.noise_multiplier)
        clip = positive_clip(self.max_grad_norm)
        if self._clip not in (0, clip):
            raise ValueError(
                f"max_grad_norm must stay {self._clip} within a batch, got {clip}: earlier pieces "
                "were clipped to that"
            )
        if [id(p) for p in self.params] != self._planned:
            raise ValueError(
                f"the optimizer must hold the {len(self._planned)} trainable parameters it was "
                f"made private with, got {len(self.params)}: the ledger counts on them"
            )
        if world_size() != self.world_size:
            raise BookkeepingError(
                f"torch.distributed must stay as it was in make_private, with {self.world_size} "
                f"processes, got {world_size()}: each would release a sum of its own. Initialise "
                "it before, and use DifferentiallyPrivateDistributedDataParallel"
            )
        refuse_watched(self.params)

    def _check_examples(self) -> None:
        """The gradients at hand are those of the batch that was fetched, and can be clipped."""
        if self._refused or self._unseen < 0 or (self._split and not self._step_skip_queue):
            raise BookkeepingError(
                "each batch that the loader yields allows one step: another would release the same "
                "sample again, while the ledger counts on a fresh one"
            )
        last = not any(self._step_skip_queue)
        found = sorted({_examples(p) for p in self.params})
        n = found[0]
        if len(found) > 1 or not (n == self._unseen if last else 0 < n < self._unseen):
            raise BookkeepingError(
                f"a step must be taken on {'all' if last else 'some'} of the examples that the "
                "loader yielded, got per-example gradients of another number"
            )
        most = -(-self._largest // self.world_size)
        if self._unseen > most:
            raise BookkeepingError(
                f"a sample may have {most} examples on each rank, got more: what "
                "rounding does to longer sums is not accounted; use a smaller batch_size, or a "
                "public_size that is not smaller than the true one"
            )
        half = {p.grad_sample.dtype for p in self.params if p.grad_sample is not None}
        half -= {torch.float32, torch.float64}
        if self.loss_reduction == "mean" and half:
            raise BookkeepingError(
                "loss_reduction must be 'sum' where gradients are in half precision, got 'mean' "
                f"with {half}: 1 / B is rounded there, so that one more record moves the gradients "
                "of all others. Sum the losses, and divide the learning rate by the batch size"
            )

    def _get_flat_grad_sample(self, p: Any) -> Tensor:
        return p.new_zeros((0, *p.shape)) if p.grad_sample is None else p.grad_sample

    @torch.no_grad()
    @full_precision()
    def clip_and_accumulate(self) -> None:
        """Add each example's gradient to the sums, scaled to norm at most ``max_grad_norm``."""
        samples = self.grad_samples
        home = _home(samples[0])
        norms = torch.stack([_square_norms(g).to(home) for g in samples]).sum(dim=0).sqrt()
        norms += math.sqrt(self._dimension) * 2.0**-511  # what squares that underflow can hide
        finite = norms.isfinite()
        skipped = int((~finite).sum())
        self.skipped_examples += skipped
        factors = torch.where(finite, (self.max_grad_norm / norms).clamp(max=1.0) * SHRINK, 0.0)
        for p, g in zip(self.params, samples, strict=True):
            if skipped:
                g[~finite.to(g.device)] = 0
            if p.summed_grad is None:
                p.summed_grad = torch.zeros(p.shape, dtype=torch.float64, device=_home(p))
            _add(p.summed_grad.view(-1), factors.to(_home(p)), g)
            p.grad_sample = None
        self._unseen -= len(norms)
        self._clip = self.max_grad_norm

    @torch.no_grad()
    def add_noise(self) -> None:
        """Enter the step in the ledger; then add noise, once, to all coordinates."""
        self._run.describe(self._entry())
        self._run.enter()
        self._unseen = -1
        self._release(self.noise_multiplier * self.max_grad_norm)

    def _entry(self) -> Entry:
        """What a step adds to the ledger."""
        clip, size = self.max_grad_norm, released_size(self._dimension, self._readout, self._copies)
        scale = self.noise_multiplier * clip
        noise = accounted(self._readout, scale, clip, size, self._largest)
        return Entry(Laplace(noise, size), self._prob, 1, noise="secure")

    def close(self) -> None:
        """Take no more steps, so that another process may go on with the run."""
        self._run.close()

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer inside, with the ledger and where the run stands."""
        return {**super().state_dict(), RUN: asdict(self._run.state())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the run that the state is of.

        Raises:
            CheckpointError: another process holds the run, or its journal is not there.
            ValueError: the state has no ledger.
        """
        load_with_run(self._run, state_dict, super().load_state_dict)

    def _release(self, scale: float) -> None:
        sums: list[Any] = [p.summed_grad for p in self.params]
        if self._readout.spreads:
            flat = spread(sums)
            self._readout.release_from([flat], [self._copies], scale, World())
            gather(flat, sums)
        else:
            self._readout.release_from(sums, [1] * len(sums), scale, World())
        for p, total in zip(self.params, sums, strict=True):
            p.grad, p.summed_grad = total.view_as(p).to(p), None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle or copy is the ordinary optimizer inside."""
        inner = self.original_optimizer
        return reduced_as(type(inner), inner.__reduce_ex__(protocol), type(self))

    def register_step_pre_hook(self, hook: Any) -> Any:
        """On the optimizer inside, which steps when a batch is released."""
        return self.original_optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """On the optimizer inside, which steps when a batch is released."""
        return self.original_optimizer.register_step_post_hook(hook)


class DistributedLaplaceDPOptimizer(LaplaceDPOptimizer, DistributedDPOptimizer):
    """Sums over ranks first: noise on a safe grid must be the last thing that is added."""

    def _release(self, scale: float) -> None:
        for p in self.params:
            torch.distributed.reduce(p.summed_grad, dst=0)
        if self.rank == 0:
            super()._release(scale)
        for p in self.params:
            if self.rank:
                p.grad, p.summed_grad = torch.empty_like(p), None
            torch.distributed.broadcast(p.grad, src=0)  # pyright: ignore[reportArgumentType]

    def reduce_gradients(self) -> None:
        """Nothing is left to reduce."""


def released_size(dimension: int, readout: Readout, copies: int = 1) -> int:
    """How many coordinates get noise: more where they are spread, and every copy counts."""
    return (spread_size(dimension) if readout.spreads else dimension) * copies


def rounding(largest: int) -> float:
    """By which share of the clip, at most, rounding lets one record move a sum too far.

    A sum of ``n <= largest`` vectors of norm at most C, each of which takes part in at most n
    operations in float64, in any order, errs by at most ``n^2 2^-53 C``; adding up those of all
    ranks, by ``n 2^-53 C`` for each; and the change of basis by ``1e-12 n C``. Both neighbouring
    sums err (docs/theory.md, section 12).
    """
    return 2 * largest * ((largest + world_size()) * UNIT + 1e-12)


def accounted(readout: Readout, scale: float, clip: float, size: int, largest: int) -> float:
    """The noise multiplier to account for: ``b / C'``, where C' has what rounding adds to C."""
    # Rounding is overestimated by more than the product can miss.
    widened = clip * (1 + rounding(largest))
    return accounted_noise_multiplier(readout.noise, scale=scale, max_grad_norm=widened, size=size)


def positive_clip(clip: Any) -> float:
    """A clip that float64 can work with."""
    if not _validate.positive("max_grad_norm", clip) >= _LEAST_CLIP:
        raise ValueError(f"max_grad_norm must be at least 2^-900, got {clip!r}")
    return float(clip)


def world_size() -> int:
    """The number of processes that torch.distributed knows of."""
    ranks = torch.distributed
    return ranks.get_world_size() if ranks.is_available() and ranks.is_initialized() else 1


def _examples(p: Any) -> int:
    """How many per-example gradients a parameter has."""
    if isinstance(p.grad_sample, list):
        raise BookkeepingError(
            f"each step must follow one backward pass, got {len(p.grad_sample)}: an example would "
            "be clipped, and released, more than once"
        )
    return 0 if p.grad_sample is None else len(p.grad_sample)


def refuse_watched(params: Iterable[Any]) -> None:
    """Refuse hooks on parameters, which see gradients without noise."""
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params):
        raise BookkeepingError(
            "parameters must have no hooks of their own, got one (register_hook, or "
            "register_post_accumulate_grad_hook; wandb.watch makes them): it sees gradients of "
            "private records without noise. Remove it, and look at .grad after the optimizer's step"
        )


def _home(tensor: Tensor) -> torch.device:
    """Where to compute in float64: Apple's GPUs cannot."""
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device


def _wide(gradients: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Parts of per-example gradients in float64, and the examples and coordinates they are of."""
    examples, size = len(gradients), gradients[:1].numel()
    count = min(max(_CHUNK // max(1, size), 16), 1024)
    for first in range(0, examples, count):
        rows = slice(first, first + count)
        block = gradients[rows].unsqueeze(-1).flatten(1).to(_home(gradients))
        for start in range(0, size, _CHUNK // count):
            columns = slice(start, start + _CHUNK // count)
            yield rows, columns, block[:, columns].double()


def _square_norms(gradients: Tensor) -> Tensor:
    """Squared l2 norm of each example's gradient, in float64."""
    total = torch.zeros(len(gradients), dtype=torch.float64, device=_home(gradients))
    for rows, _, part in _wide(gradients):
        total[rows] += torch.linalg.vector_norm(part, dim=1).square()
    return total


def _add(total: Tensor, factors: Tensor, gradients: Tensor) -> None:
    """Add the examples' gradients times their factors to a sum, in float64."""
    for rows, columns, part in _wide(gradients):
        total[columns] += factors[rows] @ part


register_accountant("lap2", LaplaceAccountant, force=True)  # force: a reload is no conflict
