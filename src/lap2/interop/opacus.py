"""Laplace noise and lap2's accountant in code that stays on Opacus 1.6.

Needs the extra ``lap2[opacus]``. :class:`PrivacyEngine` takes the place of Opacus's own, with the
same calls. Opacus keeps the per-example gradients; sampling, clipping, noise and accounting are
lap2's. docs/opacus.md says what is refused, and why.
"""

# pyright: basic, reportAttributeAccessIssue=false
# (Opacus hangs its results on parameters, as attributes torch does not know.)

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from opacus import PrivacyEngine as OpacusPrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import AbstractGradSampleModule, GradSampleHooks
from opacus.grad_sample import GradSampleModuleExpandedWeights as ExpandedWeights
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lap2 import _validate
from lap2.calibration import calibrate_noise
from lap2.interop._opacus_copies import leave_ordinary
from lap2.interop._opacus_loader import Loader, PoissonSampler
from lap2.interop._opacus_step import (
    DistributedLaplaceDPOptimizer,
    LaplaceAccountant,
    LaplaceDPOptimizer,
    accounted,
    positive_clip,
    refuse_watched,
    released_size,
    world_size,
)
from lap2.mechanism import Laplace
from lap2.train.readout import Copies, Readout, ReleaseName
from lap2.train.source import check_source
from lap2.train.writes import Writes

__all__ = ["LaplaceAccountant", "LaplaceDPOptimizer", "PrivacyEngine"]


_MODES = ("hooks", "functorch", "ew")
_LARGEST = 2**20
"""Examples that samples may have on all ranks together: rounding of longer sums adds up."""
_REFUSED_MODULES = (DistributedDataParallel, FSDPModule, AbstractGradSampleModule)


class _Schedule(NamedTuple):
    """What follows from the loader's public numbers.

    Attributes:
        prob: of each record, in each sample.
        steps: of one pass.
        divisor: of released sums.
        largest: examples that the account of rounding allows in a sample.
    """

    prob: float = 0.0
    steps: int = 0
    divisor: int = 0
    largest: int = 0


class _ExpandedWeights(ExpandedWeights):
    """An empty batch takes the ordinary way through the model, which computes nothing."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (super().forward if len(x) else self._module)(x, *args, **kwargs)


class PrivacyEngine(OpacusPrivacyEngine):
    """Opacus's engine with Laplace noise, l2 clipping and lap2's exact accountant.

    Args:
        accountant: "lap2"; others account for Gaussian noise.
        secure_mode: either value: noise and sampling always come from the operating system.

    Formal guarantee:
        :meth:`get_epsilon` is an upper bound for exactly the steps taken, under adding or removing
        one record: lap2's Poisson sampling, the clip, the noise added, and what the rounding of
        norms, sums and noise adds to the sensitivity. It assumes that each example's gradient, as
        Opacus computes it, depends on that example and released values alone (nothing here checks
        it by value; docs/opacus.md says what this means for model, loss and data), that the
        rounding of a mean loss does not matter, and that N (or ``public_size``) is public.
    """

    def __init__(self, *, accountant: str = "lap2", secure_mode: bool = False) -> None:  # noqa: ARG002
        """Start an empty ledger."""
        if accountant != "lap2":
            raise ValueError(
                f"accountant must be 'lap2', got {accountant!r}: it would account for Gaussian "
                "noise, and this engine adds Laplace noise"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Secure RNG turned off")  # not true of this engine
            super().__init__(accountant=accountant)
        self._schedule = _Schedule()
        self._readout = Readout.of("laplace")
        self._writes = Writes(nn.Module())
        self._used = False
        self._close: Callable[[], None] | None = None

    @property
    def accountant(self) -> LaplaceAccountant:
        """The ledger. It cannot be replaced: what was released stays released."""
        return self._accountant

    @accountant.setter
    def accountant(self, value: LaplaceAccountant) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if hasattr(self, "_accountant"):
            raise AttributeError(
                "accountant must not be replaced: what was released stays released. Earlier "
                "releases are loaded with accountant.load_state_dict before the first step"
            )
        self._accountant = value

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,  # noqa: ARG002 - only ghost clipping uses it
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: float,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        release: ReleaseName | None = None,
        copies: Copies = "auto",
        tau: float | None = None,
        public_size: int | None = None,
    ) -> Any:
        """Opacus's ``make_private``. What is not described here means what it means there.

        Args:
            module: an ordinary model, or one in Opacus's own distributed wrapper.
            optimizer: an ordinary one, over exactly the model's trainable parameters.
            criterion: not used.
            data_loader: batch size B over N records gives the sampling probability B / N, ceil(N /
                B) steps a pass, and the divisor B (of all ranks together).
            noise_multiplier: b / C.
            max_grad_norm: C.
            batch_first: see Opacus.
            loss_reduction: see Opacus.
            poisson_sampling: must be True.
            clipping: must be "flat".
            noise_generator: must be None.
            grad_sample_mode: "hooks", "functorch" or "ew".
            wrap_model: see Opacus.
            rand_on_empty: must be False.
            release: "bits" or "values"; this and the next two as for
                :meth:`lap2.train.PrivacyEngine.make_private`.
            copies: see there.
            tau: see there.
            public_size: what to take for N where the true number is a secret.

        Returns:
            Model, optimizer and data loader, as Opacus does.
        """
        _refuse_unless(
            (not self._used, "engine must be a new one: make one for each model"),
            (poisson_sampling is True, f"poisson_sampling must be True, got {poisson_sampling!r}: "
             "no epsilon is known for other samples"),
            (clipping == "flat", f"clipping must be 'flat', got {clipping!r}: 'adaptive' releases "
             "a count too, under Gaussian noise; 'per_layer' is another release than accounted"),
            (noise_generator is None, f"noise_generator must be None, got {noise_generator!r}: "
             "secure noise takes no seed"),
            (grad_sample_mode in _MODES, f"grad_sample_mode must be one of {', '.join(_MODES)}; "
             f"got {grad_sample_mode!r}: only these sum the gradients whose norm they measure"),
            (wrap_model or grad_sample_mode != "ew", "wrap_model must be True for 'ew', got False"),
            (rand_on_empty is False, f"rand_on_empty must be False, got {rand_on_empty!r}: with a "
             "random example in an empty sample, one record can change the sum by 2 C"),
            (not isinstance(module, _REFUSED_MODULES),
             "module must be an ordinary one, or in DifferentiallyPrivateDistributedDataParallel, "
             f"got {type(module).__name__}: its gradients are hooked, mixed or sharded already"),
            (world_size() == 1 or isinstance(module, DifferentiallyPrivateDistributedDataParallel),
             "module must be in DifferentiallyPrivateDistributedDataParallel where there are "
             f"several processes, got {type(module).__name__}: each would release a sum of its "
             "own"),
            (not isinstance(optimizer, DPOptimizer), "optimizer must not be private already"),
        )  # fmt: skip
        _validate.positive("noise_multiplier", noise_multiplier)
        positive_clip(max_grad_norm)
        _dimension(module, optimizer)
        _refuse_mixing(module)
        refuse_watched(module.parameters())
        self._schedule = _schedule(data_loader, public_size)
        self._readout = Readout.of("laplace", release=release, copies=copies, tau=tau)
        self._writes = Writes(module)
        made: Any = super().make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            prefetch=data_loader.num_workers > 0,
        )
        _, private, loader = made
        loader.batch_sampler.begin_batch = private.begin_batch
        loader.batch_sampler.give_up = private.give_up
        self._used, self._close = True, private.close
        return made

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float,
        public_size: int | None = None,
        **options: Any,
    ) -> Any:
        """:meth:`make_private` with the least Laplace noise that meets a target after ``epochs``.

        The noise is that of :func:`lap2.calibrate_noise` for ``epochs * ceil(N / B)`` steps, not of
        Opacus's search, which knows Gaussian noise only. The other arguments, and ``options``, are
        those of :meth:`make_private`.
        """
        if len(self.accountant):
            raise RuntimeError(
                f"the ledger must be empty to aim at target_epsilon, got {len(self.accountant)} "
                "steps; give make_private a noise_multiplier"
            )
        clip = positive_clip(max_grad_norm)
        kept = {k: v for k, v in options.items() if k in {"release", "copies", "tau"}}
        readout, dimension = Readout.of("laplace", **kept), _dimension(module, optimizer)
        schedule = _schedule(data_loader, public_size)
        steps = schedule.steps * _validate.integer("epochs", epochs, least=1)

        def multiplier_for(copies: int) -> float:
            size = released_size(dimension, readout, copies)
            wanted = calibrate_noise(
                Laplace(1.0, size),
                epsilon=target_epsilon,
                delta=target_delta,
                sampling_prob=schedule.prob,
                steps=steps,
            ).noise_multiplier
            multiplier, reached = wanted, 0.0
            while reached < wanted:  # make up for what rounding adds to the sensitivity
                multiplier *= max(wanted / reached, 1 + 1e-15) if reached else 1.0
                reached = accounted(readout, multiplier * clip, clip, size, schedule.largest)
            return multiplier

        # Copies change the noise a little, and only where coordinates are few.
        copies = _copies(readout, dimension, schedule, multiplier_for(1))
        options["copies"] = copies if readout.release == "bits" else "auto"
        multiplier = multiplier_for(copies)
        return self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=multiplier,
            max_grad_norm=max_grad_norm,
            public_size=public_size,
            **options,
        )

    def close(self) -> None:
        """End the run in this process, so that another one may load what was saved of it."""
        if self._close is not None:
            self._close()

    def __reduce_ex__(self, _: Any) -> Any:
        """Refuse pickles and copies: the data set, and what was drawn of it, can be reached."""
        raise TypeError(
            "PrivacyEngine must not be pickled or copied, as it leads to private records: "
            "save_checkpoint keeps the ledger with model and optimizer"
        )

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Opacus's ``load_checkpoint``, without running code that the file may hold.

        Everything is loaded, or nothing. To go on with a run, give the optimizer here and to
        ``save_checkpoint``: its state knows where the run stands.

        Raises:
            LedgerError: the ledger was corrupted or edited.
            CheckpointError: another process holds the run, or its journal is not there.
            ValueError: the checkpoint, or the call, lacks something.
        """
        checkpoint = torch.load(path, weights_only=True, **(torch_load_kwargs or {}))
        parts: list[tuple[str, Any, dict[str, Any]]] = [
            ("module", module, module_load_dict_kwargs or {}),
            ("noise_scheduler", noise_scheduler, {}),
            ("grad_clip_scheduler", grad_clip_scheduler, {}),
        ]
        parts = [part for part in parts if part[1] is not None]
        _refuse_unless(
            (optimizer is not None or not self._used, "optimizer must be given to go on with a "
             "run, got none: its state knows where the run stands"),
            *((f"{name}_state_dict" in checkpoint, f"{path} must hold the state of the {name}, got "
               "none: was it given to save_checkpoint?")
              for name in [name for name, *_ in parts] + ["optimizer"] * (optimizer is not None)),
        )  # fmt: skip
        ledger = self.accountant.read_state_dict(checkpoint["privacy_accountant_state_dict"])
        before = [(part, copy.deepcopy(part.state_dict()), options) for _, part, options in parts]
        try:
            for name, part, options in parts:
                part.load_state_dict(checkpoint[f"{name}_state_dict"], **options)
            if optimizer is not None:
                optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        except BaseException:
            for part, state, options in before:
                part.load_state_dict(state, **options)
            raise
        self.accountant.inner.include(ledger)
        return checkpoint

    def _prepare_data_loader(
        self, data_loader: DataLoader, *, distributed: bool, **rest: Any
    ) -> DataLoader:
        """Opacus's collate function, which knows empty batches, with lap2's sampler."""
        theirs = super()._prepare_data_loader(data_loader, distributed=False, **rest)
        ranks = torch.distributed
        sampler = PoissonSampler(
            len(theirs.dataset),  # pyright: ignore[reportArgumentType]
            prob=self._schedule.prob,
            steps=self._schedule.steps,
            shard=(ranks.get_rank(), ranks.get_world_size()) if distributed else (0, 1),
            prefetch=theirs.num_workers > 0,
        )
        kept = (
            "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn",
            "multiprocessing_context", "prefetch_factor", "persistent_workers",
        )  # fmt: skip
        settings = {name: getattr(theirs, name) for name in kept}
        return Loader(theirs.dataset, batch_sampler=sampler, **settings)

    def _prepare_model(self, module: nn.Module, **rest: Any) -> Any:
        """Opacus's per-example gradients, with guards where it computes wrong ones, or crashes."""
        mode = rest["grad_sample_mode"]
        if mode == "ew":
            self.validate(module=module, optimizer=None, data_loader=None)
            kept = ("batch_first", "loss_reduction")
            wrapped = _ExpandedWeights(module, **{name: rest[name] for name in kept})
            return leave_ordinary(module, wrapped)
        hooks: Any = super()._prepare_model(module, **rest)
        handles = hooks.autograd_grad_sample_hooks  # Opacus removes them with its own
        mute = partial(_mute_when_empty, hooks)
        handles.append(module.register_forward_pre_hook(mute, with_kwargs=True))
        for layer in module.modules() if mode == "hooks" else ():
            if isinstance(layer, nn.Conv2d):
                handles.append(layer.register_forward_pre_hook(_refuse_other_layouts))
        return leave_ordinary(module, hooks)

    def _prepare_optimizer(
        self, *, optimizer: Optimizer, distributed: bool = False, prefetch: bool, **rest: Any
    ) -> LaplaceDPOptimizer:
        """The optimizer that adds Laplace noise; the divisor is the public batch size."""
        dimension = sum(
            p.numel()
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        )
        kept = ("noise_multiplier", "max_grad_norm", "loss_reduction")
        return (DistributedLaplaceDPOptimizer if distributed else LaplaceDPOptimizer)(
            optimizer,
            accountant=self.accountant,
            sampling_prob=self._schedule.prob,
            largest=self._schedule.largest,
            readout=self._readout,
            copies=_copies(self._readout, dimension, self._schedule, rest["noise_multiplier"]),
            prefetch=prefetch,
            writes=self._writes,
            expected_batch_size=self._schedule.divisor,
            **{name: rest[name] for name in kept},
        )


def _copies(readout: Readout, dimension: int, schedule: _Schedule, noise: float) -> int:
    """Of each coordinate that is released."""
    size = released_size(dimension, readout)
    return readout.copies_for(size, batch_size=schedule.divisor, noise_multiplier=noise)


def _refuse_unless(*rules: tuple[bool, str]) -> None:
    for holds, message in rules:
        if not holds:
            raise ValueError(message)


def _dimension(module: nn.Module, optimizer: Optimizer) -> int:
    """The number of trained coordinates, once the two are known to fit together."""
    trained = {id(p): p for p in module.parameters() if p.requires_grad}
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    types = {p.dtype for p in trained.values()} - {torch.float32, torch.float64}
    _refuse_unless(
        (trained.keys() == held, "optimizer must hold exactly the module's trainable parameters, "
         f"got {len(held)} of which {len(held & trained.keys())} are among its {len(trained)}"),
        (not types, f"trainable parameters must be of type float32 or float64, got {types}"),
    )  # fmt: skip
    return sum(p.numel() for p in trained.values())


def _refuse_mixing(module: nn.Module) -> None:
    """Refuse layers that Opacus does not look at because they have no trainable parameters."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise ValueError(
                f"module must not mix examples, got {name or 'a module'} of type "
                f"{type(layer).__name__}, which takes statistics of the batch: use GroupNorm "
                "(opacus.validators.ModuleValidator.fix), or freeze one that has running "
                "statistics with .eval(), after every .train()"
            )


def _schedule(loader: DataLoader, public_size: int | None) -> _Schedule:
    """The schedule, from public numbers, once the loader is known to choose no records."""
    check_source(loader)
    size = len(loader.dataset) if public_size is None else public_size  # pyright: ignore[reportArgumentType]
    size = _validate.integer("public_size", size, least=1)
    batch: Any = loader.batch_size
    if not 1 <= batch <= size:
        raise ValueError(f"data_loader must have a batch_size in [1, {size}], got {batch}")
    if not batch <= _LARGEST // 2:
        raise ValueError(f"data_loader must have a batch_size up to {_LARGEST // 2}, got {batch}")
    return _Schedule(batch / size, -(-size // batch), batch, min(max(size, 2**10), _LARGEST))


def _mute_when_empty(hooks: GradSampleHooks, _: nn.Module, args: Any, kwargs: Any) -> None:
    """An empty batch has no per-example gradients, and vmap cannot compute none."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    hooks.hooks_enabled = not tensors or tensors[0].numel() > 0


def _refuse_other_layouts(layer: nn.Module, inputs: Any) -> None:
    if torch.is_grad_enabled() and layer.training and not inputs[0].is_contiguous():
        raise ValueError(
            f"the input of {layer} must be contiguous, got another layout: Opacus "
            "computes wrong gradients from other layouts, such as channels_last; use "
            "grad_sample_mode='functorch', or .contiguous()"
        )
