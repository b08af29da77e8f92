"""What a step under Opacus is: its ledger, its sample, and a clipped sum with Laplace noise.

The engine that puts the parts together is :mod:`lap2.interop.opacus`.
"""

# pyright: basic, reportAttributeAccessIssue=false
# (Opacus hangs its results on parameters, as attributes torch does not know.)

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from opacus.accountants import IAccountant, register_accountant
from opacus.optimizers import DistributedDPOptimizer, DPOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lap2 import _validate
from lap2.accountant import Accountant
from lap2.mechanism import Laplace
from lap2.noise import SecureLaplace, accounted_noise_multiplier
from lap2.train import BookkeepingError, Denoiser, PoissonLoader
from lap2.train.precision import full_precision
from lap2.train.rotate import gather, spread, spread_size

__all__ = [
    "DistributedLaplaceDPOptimizer",
    "LaplaceAccountant",
    "LaplaceDPOptimizer",
    "Loader",
    "PoissonSampler",
    "released_size",
]

_CHUNK = 1024
_SHRINK = 1 - 2.0**-14
"""Clipping aims this far below the clip. Whatever the order of its additions, float32 errs by at
most ``_CHUNK`` 2^-24 = 2^-14 in a sum of ``_CHUNK`` squares, so by 2^-15 in its root; the sum over
chunks is in float64; the factor and its product with the gradient are rounded to 2^-24 each."""


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
        self.inner = Accountant()

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
        self.inner = inner


class PoissonSampler(UniformWithReplacementSampler):
    """This rank's share of each Poisson sample; an empty sample is a sample.

    Inclusion is decided by :class:`lap2.train.PoissonLoader` under fresh keys of the operating
    system: no seed can repeat it, on this rank or another.
    """

    def __init__(
        self, size: int, *, prob: float, steps: int, shard: tuple[int, int], prefetch: bool
    ) -> None:
        share = len(range(shard[0], size, shard[1]))
        super().__init__(num_samples=share, sample_rate=prob, steps=steps)
        self._source = PoissonLoader(range(size), sampling_prob=prob, steps=steps, shard=shard)  # pyright: ignore[reportArgumentType]
        self._prefetch, self._drawn, self.passes = prefetch, deque[int](), 0
        self.begin_batch: Callable[[int], None] = lambda _: None

    def __iter__(self) -> Iterator[list[int]]:
        self._drawn.clear()
        self.passes += 1
        this = self.passes
        for _ in range(self.steps):
            self.refuse_unless(this)
            index = self._source.sample()
            self._drawn.append(len(index))
            if not self._prefetch:
                self.hand_out()
            yield index.tolist()

    def hand_out(self) -> None:
        """Tell the optimizer of the batch that is about to be seen."""
        self.begin_batch(self._drawn.popleft())

    def refuse_unless(self, this: int) -> None:
        if self.passes != this:
            raise BookkeepingError("a pass over the loader ends where another one begins")


class Loader(DataLoader):
    """Knows which batch is handed out when workers have drawn others ahead."""

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sampler: Any = self.batch_sampler
        batches = super().__iter__()
        if not self.num_workers:
            yield from batches
            return
        this = sampler.passes
        for batch in batches:
            sampler.refuse_unless(this)
            sampler.hand_out()
            yield batch


class LaplaceDPOptimizer(DPOptimizer):
    """Opacus's optimizer with lap2's clipping, noise and ledger; :class:`PrivacyEngine` makes it.

    One sample of the loader allows one release. A step that cannot be accounted raises and leaves
    the ledger as it was. An example whose gradient is not finite, or too large for float32 to
    square, contributes nothing and is counted in ``skipped_examples``.

    Formal guarantee:
        Each step releases a sum of gradients of l2 norm at most ``max_grad_norm``, however float32
        rounds their norms, plus Laplace noise of scale ``noise_multiplier * max_grad_norm``. It is
        in the ledger before the noise is drawn, with what the noise's own rounding adds to the
        sensitivity. The sum over examples is assumed exact.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        accountant: LaplaceAccountant,
        sampling_prob: float,
        denoiser: Denoiser,
        prefetch: bool,
        **rest: Any,
    ) -> None:
        """Wrap ``optimizer``; ``rest`` are the arguments of Opacus's own."""
        super().__init__(optimizer, **rest)
        self.accountant, self.denoiser, self.skipped_examples = accountant, denoiser, 0
        self._prob, self._prefetch, self._noise = sampling_prob, prefetch, SecureLaplace()
        self._planned = [id(p) for p in self.params]
        self._dimension = sum(p.numel() for p in self.params)
        self._unseen = -1  # examples of the batch still to come; below 0, there is no batch
        self._split, self._clip = False, 0.0

    @property
    def accumulated_iterations(self) -> int:
        """One: a sample allows one release."""
        return 1

    def begin_batch(self, size: int) -> None:
        """Forget what is left of an earlier batch; the next step is for ``size`` new examples."""
        self._unseen, self._split, self._clip = size, False, 0.0
        self._step_skip_queue.clear()
        self._is_last_step_skipped = False
        for p in self.params:
            p.summed_grad = p.grad_sample = None

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Opacus's BatchMemoryManager announces the next piece of the batch."""
        self._split, self._step_skip_queue[:] = True, [do_skip]
        for p in self.params:
            p.grad_sample = None

    def pre_step(self, closure: Any = None) -> Any:
        """Refuse, or go on with Opacus's own: clip, add noise, divide."""
        _validate.positive("noise_multiplier", self.noise_multiplier)
        clip = _validate.positive("max_grad_norm", self.max_grad_norm)
        if [id(p) for p in self.params] != self._planned:
            raise ValueError(
                f"the optimizer must hold the {len(self._planned)} trainable parameters it was "
                f"made private with, got {len(self.params)}: the ledger counts on them"
            )
        if self._split and self._prefetch:
            raise ValueError(
                "num_workers must be 0 with BatchMemoryManager, got more: a piece that workers "
                "have drawn ahead cannot be told from the piece at hand"
            )
        if self._clip not in (0, clip):
            raise ValueError(
                f"max_grad_norm must stay {self._clip} within a batch, got {clip}: earlier pieces "
                "were clipped to that"
            )
        if self._unseen < 0 or (self._split and not self._step_skip_queue):
            raise BookkeepingError(
                "each batch that the loader yields allows one step: another would release the same "
                "sample again, while the ledger counts on a fresh one"
            )
        last = not any(self._step_skip_queue)
        found = sorted({_examples(p) for p in self.params})
        n = found[0]
        if len(found) > 1 or not (n == self._unseen if last else 0 < n < self._unseen):
            raise BookkeepingError(
                f"a step must be taken on {'all' if last else 'some'} of the {self._unseen} "
                f"examples that the loader yielded, got per-example gradients of {found}"
            )
        return super().pre_step(closure)

    def _get_flat_grad_sample(self, p: Any) -> Tensor:
        return p.new_zeros((0, *p.shape)) if p.grad_sample is None else p.grad_sample

    @torch.no_grad()
    @full_precision()
    def clip_and_accumulate(self) -> None:
        """Add each example's gradient to the sums, scaled to norm at most ``max_grad_norm``."""
        samples = self.grad_samples
        device = samples[0].device
        norms = torch.stack([_square_norms(g).to(device) for g in samples]).sum(dim=0).sqrt()
        norms += math.sqrt(self._dimension) * 2.0**-63  # what squares that underflow can hide
        finite = norms.isfinite()
        skipped = int((~finite).sum())
        self.skipped_examples += skipped
        factors = torch.where(finite, (self.max_grad_norm / norms).clamp(max=1.0) * _SHRINK, 0.0)
        for p, g in zip(self.params, samples, strict=True):
            if skipped:
                g[~finite.to(g.device)] = 0
            total = torch.einsum("b,b...->...", factors.to(g.device, p.dtype), g.to(p.dtype))
            p.summed_grad = total if p.summed_grad is None else p.summed_grad.add_(total)
            p.grad_sample = None
        self._unseen -= len(norms)
        self._clip = self.max_grad_norm

    @torch.no_grad()
    def add_noise(self) -> None:
        """Enter the step in the ledger; then add noise, once, to all coordinates."""
        scale = self.noise_multiplier * self.max_grad_norm
        size = released_size(self._dimension, self.denoiser)
        accounted = accounted_noise_multiplier(
            self._noise, scale=scale, max_grad_norm=self.max_grad_norm, size=size
        )
        step = Laplace(accounted, size)
        self.accountant.inner.compose(step, sampling_prob=self._prob)
        self._unseen = -1
        self._release(scale)

    def _release(self, scale: float) -> None:
        sums: list[Any] = [p.summed_grad for p in self.params]
        if self.denoiser.mode == "none":
            self._noise.add(sums, scale)
        else:
            flat = spread(sums)
            self._noise.add(flat, scale)
            self.denoiser([flat], scale)
            gather(flat, sums)
        for p, total in zip(self.params, sums, strict=True):
            p.grad, p.summed_grad = total.view_as(p), None

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


def released_size(dimension: int, denoiser: Denoiser) -> int:
    """How many coordinates get noise: what is denoised is released in a basis of its own."""
    return dimension if denoiser.mode == "none" else spread_size(dimension)


def _examples(p: Any) -> int:
    """How many per-example gradients a parameter has."""
    if isinstance(p.grad_sample, list):
        raise BookkeepingError(
            f"each step must follow one backward pass, got {len(p.grad_sample)}: an example would "
            "be clipped, and released, more than once"
        )
    return 0 if p.grad_sample is None else len(p.grad_sample)


def _square_norms(gradients: Tensor) -> Tensor:
    """Squared l2 norm of each example's gradient, in float64; relative error at most 2^-14."""
    flat = gradients.unsqueeze(-1).flatten(1)
    if flat.dtype not in (torch.float32, torch.float64):  # as autocast leaves them
        flat = flat.float()
    whole = flat.shape[1] // _CHUNK
    chunks = flat[:, : whole * _CHUNK].unflatten(1, (whole, _CHUNK))
    remainder = torch.linalg.vector_norm(flat[:, whole * _CHUNK :], dim=1).double()
    norms = torch.linalg.vector_norm(chunks, dim=2).double()
    return norms.square().sum(dim=1) + remainder.square()


register_accountant("lap2", LaplaceAccountant, force=True)  # force: a reload is no conflict
