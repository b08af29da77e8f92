"""The engine: a PyTorch training loop made private, in the calling convention people know."""

# pyright: basic

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lap2 import _validate
from lap2.accountant import Accountant
from lap2.calibration import Target, calibrate_noise
from lap2.ledger import Entry
from lap2.noise import Sampler
from lap2.sense import caveats_of_target
from lap2.train.budget import Budget
from lap2.train.distributed import World
from lap2.train.plan import Clip, MechanismName, ReleasePlan
from lap2.train.poisson import PoissonLoader
from lap2.train.readout import Copies, Readout, ReleaseName
from lap2.train.rounding import rho
from lap2.train.run import Run
from lap2.train.saving import Resumed, Saver
from lap2.train.source import check_source
from lap2.train.step import PrivateStep, make_step_private

__all__ = ["PrivacyEngine", "Statement"]

Sums = Literal["float64", "float32"]
_TYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Statement:
    """What may be said of a run so far.

    Formal guarantee:
        If ``is_guarantee``, everything released by the optimizer's steps is (epsilon,
        delta)-differentially private under adding or removing one record, provided that the
        ``assumptions`` hold. ``caveats`` says why it is not a guarantee.

    Attributes:
        epsilon: spent so far, rounded up.
        delta: at which.
        steps: that were released.
        bound: by which theorem.
        is_guarantee: whether it is one.
        assumptions: all that is neither proven nor checked.
        caveats: why it is no guarantee.
        rounding: by which share of the clip rounding may let one record exceed it; epsilon counts
            with the clip made larger by that much.
        warnings: what these numbers, though proven, do not protect from.
    """

    epsilon: float
    delta: float
    steps: int
    bound: str
    is_guarantee: bool
    assumptions: tuple[str, ...]
    caveats: tuple[str, ...]
    rounding: float
    warnings: tuple[str, ...] = ()


class PrivacyEngine:
    """Makes a model, an optimizer and a data loader private.

    Each step releases the sum of per-example gradients, clipped to l2 norm ``max_grad_norm``, with
    noise on every coordinate, of which by default only the signs leave, divided by the public
    expected batch size. The step is in the ledger before it is released.

    Args:
        sampler: the noise, of the mechanism's law; by default a secure one. If it draws bits,
            ``copies`` of :meth:`make_private` says how many.
        accountant: what was released of the same data before, which counts too; it becomes the
            ledger of this run.
        journal: the folder for the journal that is kept once anything of the run is saved. By
            default that of the first checkpoint; or, where only the optimizer's state is saved,
            ``$LAP2_STATE``, or else ``lap2`` in ``$XDG_STATE_HOME`` or ``~/.local/state``.
        journal_lost: state that no step was taken after what will be loaded was saved; needed where
            an optimizer's state is loaded whose journal is not there. The ledger will say so.
        caveats: sentences that say why else the run is no guarantee; the ledger will have them.

    Formal guarantee:
        :meth:`get_epsilon` is an upper bound for exactly the steps taken: the Poisson sampling
        done, the noise added, and the sensitivity with all that rounding may add to it. What it
        rests on is in the ``assumptions`` of :meth:`statement`.
    """

    def __init__(
        self,
        *,
        sampler: Sampler | None = None,
        accountant: Accountant | None = None,
        journal: str | os.PathLike[str] | None = None,
        journal_lost: bool = False,
        caveats: Sequence[str] = (),
    ) -> None:
        """Start a ledger, or go on with one."""
        self._accountant = Accountant() if accountant is None else accountant
        self._sampler, self._given_caveats = sampler, tuple(caveats)
        self._folder = None if journal is None else Path(journal)
        self._journal_lost = journal_lost
        self._step: PrivateStep | None = None
        self._saver: Saver | None = None

    @property
    def accountant(self) -> Accountant:
        """The ledger: what was given at the start, and all steps since. It cannot be replaced."""
        return self._accountant

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: Clip,
        mechanism: MechanismName = "laplace",
        release: ReleaseName | None = None,
        copies: Copies = "auto",
        tau: float | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        max_physical_batch_size: int | None = None,
        poisson_sampling: bool = True,
        channels_last: bool = True,
        rehearse: bool = True,
        sums: Sums = "float64",
        public_state: Sequence[str] = (),
    ) -> tuple[nn.Module, Optimizer, PoissonLoader | DataLoader]:
        """Make all three private, with a given noise multiplier.

        Args:
            module: the model; stays the same object, with the same state_dict.
            optimizer: any torch optimizer over the model's trainable parameters; the same object.
            data_loader: over a map-style data set; its batch size over the data set's size is the
                sampling probability.
            noise_multiplier: b / C (sigma / C for Gaussian noise). With several clips, b over the
                root of the sum of their squares.
            max_grad_norm: the clip C; or a list of clips, one for each optimizer parameter group
                or one for each layer with trainable parameters, in the order of
                ``module.modules()``.
            mechanism: "laplace", "gaussian" or "laplace-l1" (clips l1 norms).
            release: "bits", the default for mechanism "laplace": only the signs of noisy
                coordinates leave. Or "values": the noisy sum itself.
            copies: how often the sign of each coordinate is released, at a size that makes up for
                it; "auto" is as often as helps, by public numbers: :func:`lap2.signal.copies`.
            tau: clamp released values at so many noise scales; by default they are left as they
                are. Laplace noise only.
            loss_reduction: how the loss that is given ``backward`` reduces over the batch. It must
                be a mean or sum of losses of single records. :meth:`backward` needs none.
            max_physical_batch_size: larger batches come in pieces with the same result.
            poisson_sampling: False keeps the loader as it is, and then no epsilon is ever claimed.
            channels_last: store the weights of 2-d convolutions that way, which makes them faster.
            rehearse: now and then have the loader yield a few records to the loop, nearly the same
                again and again, to see that no record's gradient depends on the others. Nothing is
                released of them. Without it no guarantee is claimed.
            sums: the precision of norms and sums. What float32 rounds is not accounted, so that no
                guarantee is claimed.
            public_state: buffers, or parameters that are not trained, that a step may write
                because nothing private is written there, such as a counter of steps.

        Returns:
            The module, the optimizer, and a loader that samples as accounted.
        """
        _validate.positive("noise_multiplier", noise_multiplier)
        readout = Readout.of(
            mechanism, release=release, copies=copies, tau=tau, noise=self._sampler
        )
        plan = ReleasePlan.of(module, optimizer, max_grad_norm, mechanism, readout)
        scale = plan.total_clip * noise_multiplier
        prob, _ = _schedule(data_loader, World.current())
        return self._attach(
            plan.with_copies(scale, prob * len(data_loader.dataset)),  # type: ignore[arg-type]
            data_loader,
            scale,
            loss_reduction=loss_reduction,
            max_physical_batch_size=max_physical_batch_size,
            poisson_sampling=poisson_sampling,
            channels_last=channels_last,
            rehearse=rehearse,
            sums=sums,
            public_state=public_state,
        )

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int | None = None,
        steps: int | None = None,
        max_grad_norm: Clip,
        mechanism: MechanismName = "laplace",
        release: ReleaseName | None = None,
        copies: Copies = "auto",
        tau: float | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        max_physical_batch_size: int | None = None,
        channels_last: bool = True,
        rehearse: bool = True,
        sums: Sums = "float64",
        public_state: Sequence[str] = (),
    ) -> tuple[nn.Module, Optimizer, PoissonLoader | DataLoader]:
        """Make all three private, with the least noise that meets a target at the end of training.

        Args:
            module: as in :meth:`make_private`; so are the arguments that say "as there".
            optimizer: as there.
            data_loader: as there.
            target_epsilon: epsilon after the last step.
            target_delta: its delta.
            epochs: passes over the loader; or give ``steps``.
            steps: of the optimizer; a loop that takes them need not end with a pass.
            max_grad_norm: as there.
            mechanism: as there.
            release: as there.
            copies: as there.
            tau: as there.
            loss_reduction: as there.
            max_physical_batch_size: as there.
            channels_last: as there.
            rehearse: as there.
            sums: as there.
            public_state: as there.
        """
        readout = Readout.of(
            mechanism, release=release, copies=copies, tau=tau, noise=self._sampler
        )
        plan = ReleasePlan.of(module, optimizer, max_grad_norm, mechanism, readout)
        world = World.current()
        prob, per_epoch = _schedule(data_loader, world)
        total = _total_steps(epochs, steps, per_epoch)
        target = Target(target_epsilon, target_delta)
        size = len(data_loader.dataset)  # type: ignore[arg-type]

        def scale_of(plan: ReleasePlan) -> float:
            template = plan.describe(1.0, 0.0, 0.0)
            wanted = calibrate_noise(
                template,
                epsilon=target.epsilon,
                delta=target.delta,
                sampling_prob=prob,
                steps=total,
            )
            rounding = rho(records=size, processes=world.size)
            return plan.scale_for(wanted, template, world, rounding)

        # Copies change the noise a little, and only where coordinates are few.
        plan = plan.with_copies(scale_of(plan), prob * size)
        scale = scale_of(plan)
        made = self._attach(
            plan,
            data_loader,
            scale,
            loss_reduction=loss_reduction,
            max_physical_batch_size=max_physical_batch_size,
            poisson_sampling=True,
            channels_last=channels_last,
            rehearse=rehearse,
            sums=sums,
            public_state=public_state,
        )
        self.set_budget(epsilon=target.epsilon, delta=target.delta)
        return made

    def _attach(
        self,
        plan: ReleasePlan,
        data_loader: DataLoader,
        scale: float,
        *,
        loss_reduction: str,
        max_physical_batch_size: int | None,
        poisson_sampling: bool,
        channels_last: bool,
        rehearse: bool,
        sums: Sums,
        public_state: Sequence[str],
    ) -> tuple[nn.Module, Optimizer, PoissonLoader | DataLoader]:
        if self._step is not None:
            raise RuntimeError("this engine already has a model; make another engine for another")
        _validate.choice("loss_reduction", loss_reduction, ("mean", "sum"))
        _validate.choice("sums", sums, tuple(_TYPES))
        world = World.current()
        prob, steps = _schedule(data_loader, world)
        noise = plan.readout.noise
        loader = (
            PoissonLoader(
                data_loader.dataset,
                sampling_prob=prob,
                steps=steps,
                max_physical_batch_size=max_physical_batch_size,
                loader=data_loader,
                shard=(world.rank, world.size),
            )
            if poisson_sampling
            else data_loader
        )
        if channels_last:
            _store_channels_last(plan.module)
        shapes = [(name, tuple(t.shape)) for name, t in plan.module.state_dict().items()]
        size = len(data_loader.dataset)  # type: ignore[arg-type]
        world.same("number of records", size)
        world.same("names and shapes of parameters", shapes)
        world.same("noise scale and clips", (scale, plan.clips))
        world.same("mechanism", plan.mechanism)
        world.same("release", plan.readout.describe(plan.copies))
        world.same("kind of noise", (type(noise).__name__, noise.is_secure))
        world.copy_from_first([*plan.module.parameters(), *plan.module.buffers()])
        rounding = rho(records=size, processes=world.size)
        mechanism = plan.describe(scale, plan.spacing(scale, world), rounding)
        entry = Entry(
            mechanism,
            prob,
            1,
            sampling="Poisson" if poisson_sampling else "unknown",
            noise="secure" if noise.is_secure else "ordinary",
        )
        self._step = PrivateStep(
            plan=plan,
            loader=loader if isinstance(loader, PoissonLoader) else None,
            scale=scale,
            divisor=prob * size,
            loss_reduction=loss_reduction,
            run=Run(
                self._accountant,
                entry,
                world,
                folder=self._folder,
                journal_lost=self._journal_lost,
            ),
            world=world,
            rounding=rounding,
            rehearse=rehearse,
            sums=_TYPES[sums],
            public_state=public_state,
            caveats=self._given_caveats,
        )
        self._records = size
        self._saver = Saver(plan, self._step)
        make_step_private(plan.optimizer, self._step)
        return plan.module, plan.optimizer, loader

    def backward(self, losses: Tensor) -> None:
        """Differentiate the losses of a batch: one for each record, so that none depends on others.

        Instead of ``loss.backward()``: take the loss with ``reduction="none"``, and sum or average
        it within each record only. The reduction over the batch is the engine's, and nothing is
        divided by the size of the batch.

        Args:
            losses: of shape (batch,), one for each record.
        """
        self._attached()[0].recorder.backward(losses)

    def get_epsilon(self, delta: float) -> float:
        """The epsilon spent so far at ``delta``, rounded up.

        Raises:
            RuntimeError: the run does not sample as accounted, so that no epsilon can be claimed.
        """
        if self._step is not None and self._step.loader is None:
            raise RuntimeError(
                "no epsilon can be claimed: poisson_sampling=False keeps a loader whose batches "
                "are not Poisson samples"
            )
        return self.accountant.get_epsilon(delta)

    def statement(self, delta: float) -> Statement:
        """Everything that may be said of the run so far."""
        step, _ = self._attached()
        epsilon = self.get_epsilon(delta)
        reasons = (*self.accountant.caveats, *step.run.step.reasons, *step.caveats())
        return Statement(
            epsilon=epsilon,
            delta=delta,
            steps=self.accountant.steps,
            bound=step.run.step.mechanism.bound,
            is_guarantee=not reasons,
            assumptions=_assumptions(step),
            caveats=tuple(dict.fromkeys(reasons)),
            rounding=step.rounding,
            warnings=caveats_of_target(epsilon, delta, records=self._records),
        )

    def set_budget(self, *, epsilon: float, delta: float) -> None:
        """Refuse from now on any step that would exceed this target, before its batch is drawn.

        :meth:`make_private_with_epsilon` sets its own target.

        Raises:
            BudgetExhaustedError: not even one step fits. Later, loader and optimizer raise it.
        """
        step, _ = self._attached()
        entry = step.run.step
        step.run.budget = Budget(
            Target(epsilon, delta), self.accountant, entry.mechanism, entry.sampling_prob
        )

    @property
    def remaining_steps(self) -> int | None:
        """How many more steps the budget allows; None without a budget."""
        budget = self._attached()[0].run.budget
        return None if budget is None else budget.remaining_steps

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        scheduler: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Write everything that is needed to go on: atomically, and without any random key.

        The checkpoint that was at ``path`` stays beside it, as ``path`` + ".previous". From the
        first call on, each step is also written to a journal in the same folder before its noise
        is drawn; call this once before the first step. Several processes call it together.

        Formal guarantee:
            After a crash at any moment, :meth:`load` enters in the ledger every step that was
            released, and at most one that was not.

        Args:
            path: a file; the first must not take the place of another run's.
            scheduler: anything with a ``state_dict``.
            extra: plain values of yours, given back by :meth:`load`.
        """
        self._attached()[1].save(Path(path), scheduler, extra or {})

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        scheduler: Any = None,
        fall_back: bool = False,
        journal_lost: bool = False,
    ) -> Resumed:
        """Go on from a checkpoint, into a model, optimizer and loader made private as before.

        Either everything is loaded or, if anything is refused, nothing is changed. The process that
        saved it must have ended, or have called :meth:`close`.

        Args:
            path: given to :meth:`save`.
            scheduler: the one given to :meth:`save`, made anew.
            fall_back: use the checkpoint before, if this one is corrupt. No step is forgotten.
            journal_lost: state that no step was taken after the checkpoint was written; needed
                when there is no journal beside it, or a corrupt one. The ledger will say so.

        Raises:
            CheckpointError: the file is corrupt, or of another model, optimizer or privacy setting.
        """
        saver = self._attached()[1]
        return saver.load(Path(path), scheduler, fall_back=fall_back, journal_lost=journal_lost)

    def close(self) -> None:
        """End the run in this process, so that another one may load what was saved of it.

        Until then, a run of which anything was saved is held: two processes that go on with one run
        would each count their own steps only. ``with PrivacyEngine() as engine`` closes it too.
        """
        if self._step is not None:
            self._step.run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse pickles and copies: private records can be reached from here."""
        raise TypeError(
            "PrivacyEngine must not be pickled or copied, as it may hold private records: "
            "engine.save(path) writes all that is needed to go on"
        )

    def _attached(self) -> tuple[PrivateStep, Saver]:
        if self._step is None or self._saver is None:
            raise RuntimeError("call make_private or make_private_with_epsilon first")
        return self._step, self._saver

    @property
    def noise_multiplier(self) -> float:
        """The noise in use: b / C, or sigma / C for Gaussian noise."""
        step, _ = self._attached()
        return step.scale / step.total_clip

    @property
    def skipped_examples(self) -> int:
        """How many examples had a gradient that was not finite, and so contributed nothing.

        Of this process, since it began. It is not private: for your eyes, not for a release.
        """
        return self._step.skipped if self._step else 0


def _schedule(loader: DataLoader, world: World) -> tuple[float, int]:
    """Sampling probability and steps of one pass, from the loader's public settings."""
    check_source(loader)
    size = len(loader.dataset)  # type: ignore[arg-type]
    batch = (loader.batch_size or 0) * world.size
    if not 1 <= batch <= size:
        raise ValueError(
            f"data_loader must have a batch_size between 1 and {size // world.size} in each of "
            f"{world.size} processes, got {loader.batch_size}"
        )
    return batch / size, -(-size // batch)


def _assumptions(step: PrivateStep) -> tuple[str, ...]:
    """All that a guarantee rests on, beside what is proven and what is checked."""
    assumptions = [
        "the number of records is public",
        "each item of the data set is one record, and depends on that record alone",
        "nothing but released values steers the training: no learning rate, stopping, skipping or "
        "change of the model depends on private records in another way",
        "nothing else is shown or kept of the training data, such as its loss",
        "a record's gradient depends on that record and released values alone: rehearsals compare "
        "this by value now and then, on small batches of a few records and up to the rounding of "
        "the model's precision, and cannot see what shows on others, or in larger batches, only",
        "arithmetic rounds one record's gradient alike, whatever other records are in the batch: "
        "where a gradient is a small rest of large terms, in modules without a rule above all, it "
        "may not",
        "the operating system's random numbers and AES-256 are sound",
    ]
    if step.losses & {"mean", "sum"}:
        kinds = " or ".join(sorted(step.losses & {"mean", "sum"}))
        assumptions.append(
            f"the loss given to backward was a {kinds} of losses of single records"
            + (
                ", and dividing it by the batch size, which rounds, moves no gradient much: it may "
                "where terms nearly cancel (engine.backward needs no such assumption)"
                if "mean" in step.losses
                else ""
            )
        )
    return tuple(assumptions)


def _total_steps(epochs: int | None, steps: int | None, per_epoch: int) -> int:
    if (epochs is None) == (steps is None):
        raise ValueError(
            f"one of epochs and steps must be given, got epochs={epochs!r} and steps={steps!r}"
        )
    if steps is not None:
        return _validate.integer("steps", steps, least=1)
    return _validate.integer("epochs", epochs, least=1) * per_epoch


def _store_channels_last(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.device.type == "cpu":
            layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last)
