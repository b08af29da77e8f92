"""Speed of one private step, against the plain loop, Opacus, JAX, and its own targets.

The paper's CNN for MNIST at batch 256, or a transformer of 22 million parameters (the shape of
MiniLM, a BERT) at batch 32 with 64 tokens each. Everything of one thread count runs in one process.
Each round gives all contestants a turn, one after the other, so that a busy or throttled machine
slows them alike; a ratio is taken within a round, and the median over the rounds is reported. A
turn is a few steps in a row on the same batch, the private ones with their noise; making the batch
is not in it, and neither is a first step, which finds its neighbour's data in the caches and its
threads still waiting for work: in training, a step follows one of its own kind.

    python benchmarks/step.py --rounds 15 --threads 1 2
    python benchmarks/step.py --model transformer --rounds 5 --threads 1 2 --without-peers
    python benchmarks/step.py --model transformer --memory

``--memory`` prints the peak memory of a few steps instead, each contestant in a process of its own,
above what it has when everything is imported. Libraries that are not installed are left out:
``pip install lap2[bench]`` has all of them.
"""

import argparse
import importlib
import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lap2.experiments.models import mnist_cnn
from lap2.noise import SecureLaplace
from lap2.train import PoissonLoader, PrivacyEngine

RECORDS = 60_000
CLIP = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 1e-3
TOKENS, VOCABULARY = 64, 30_522

PLAIN, LAP2, LAP2_POISSON = "plain SGD", "lap2", "lap2, Poisson batches"
LAP2_VALUES = "lap2, release='values'"
SAMPLE, NEXT = "lap2, sample()", "lap2, sample and gather"
OPACUS_MODES = ("hooks", "functorch", "ew", "ghost")
JAX, JAX_PRIVACY = "jax vmap", "jax_privacy clipped_grad"

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is measured."""

    batch: int
    steps_per_turn: int
    warm_up_turns: int
    model: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Tensor]
    targets: tuple["Target", ...]

    def records(self, count: int) -> TensorDataset:
        """Random ones."""
        maker = torch.Generator().manual_seed(0)
        labels = torch.randint(0, 2, (count,), generator=maker)
        return TensorDataset(self.inputs(count, maker), labels)

    def new_model(self) -> nn.Module:
        """The same weights every time."""
        torch.manual_seed(0)
        return self.model()


class Classifier(nn.Module):
    """BERT with MiniLM's sizes, without dropout, and two classes from the mean of its outputs.

    Positions are given for each example, because Opacus cannot have them once for all.
    """

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel  # noqa: PLC0415 - may be missing

        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(384, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """The scores of both classes."""
        places = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
        outputs = self.bert(
            input_ids=tokens, position_ids=places, token_type_ids=torch.zeros_like(tokens)
        )
        return self.head(outputs.last_hidden_state.mean(dim=1))


@dataclass(frozen=True)
class Contestant:
    """A step, and where its batches come from; the time is of the step alone, for a whole batch."""

    step: Callable[[Tensor, Tensor], object]
    batches: Iterator[Batch] | None = None
    """None is the batch that all share."""

    def turn(self, shared: Batch, steps: int) -> float:
        """Mean time of a step after the first, in seconds."""
        spent = 0.0
        for number in range(steps + 1):
            x, y = next(self.batches) if self.batches else shared
            start = time.perf_counter()
            self.step(x, y)
            if number:
                spent += (time.perf_counter() - start) * len(shared[1]) / len(y)
        return spent / steps


@dataclass(frozen=True)
class Pause:
    """Something between two steps: what it takes, in seconds."""

    act: Callable[[], object]

    def turn(self, _: Batch, steps: int) -> float:
        """Mean time of one after the first."""
        self.act()
        start = time.perf_counter()
        for _ in range(steps):
            self.act()
        return (time.perf_counter() - start) / steps


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def loop_body(
    model: nn.Module, optimizer: torch.optim.Optimizer, criterion: Callable = F.cross_entropy
) -> Callable[[Tensor, Tensor], None]:
    """The loop as users write it."""

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def plain(case: Case, *, channels_last: bool = False) -> Contestant:
    model = case.new_model()
    if not channels_last:
        return Contestant(loop_body(model, sgd(model)))
    model = model.to(memory_format=torch.channels_last)
    body = loop_body(model, sgd(model))
    return Contestant(lambda x, y: body(x.contiguous(memory_format=torch.channels_last), y))


def endless(loader: PoissonLoader | DataLoader) -> Iterator[Batch]:
    """Every batch of every pass; a step on it is one that the loader handed out."""
    while True:
        yield from loader


def of_lap2(case: Case, dataset: TensorDataset, **settings: Any) -> Contestant:
    """The default step. A data set of one batch is sampled with probability 1: always the same."""
    model = case.new_model()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=sgd(model),
        data_loader=DataLoader(dataset, batch_size=case.batch),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP,
        **settings,
        rehearse=False,  # small batches now and then would count as steps; see rehearsals.py
    )
    return Contestant(loop_body(model, optimizer), endless(loader))


def of_opacus(case: Case, mode: str) -> Contestant:
    import opacus  # noqa: PLC0415 - may be missing

    model = case.new_model()
    private: Any = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=sgd(model),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(case.records(case.batch), batch_size=case.batch),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP,
        poisson_sampling=False,  # the batch is given to it
        grad_sample_mode=mode,
    )
    criterion = private[2] if mode == "ghost" else nn.CrossEntropyLoss()
    return Contestant(loop_body(private[0], private[1], criterion))


def of_jax(shared: Batch, *, library: bool) -> Contestant:
    """The same model and weights, compiled: by hand with vmap, or with jax_privacy."""
    import jax  # noqa: PLC0415 - may be missing, and reads its settings when imported
    import jax.numpy as jnp  # noqa: PLC0415
    from jax import lax  # noqa: PLC0415

    def convolve(x: Any, weight: Any, bias: Any, padding: int) -> Any:
        kinds = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(
            x, weight, (2, 2), [(padding, padding)] * 2, dimension_numbers=kinds
        )
        x = jax.nn.relu(x + bias)
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")

    def loss(params: list[Any], x: Any, y: Any) -> Any:
        """The mean over the batch."""
        x = convolve(convolve(x, params[0], params[1], 3), params[2], params[3], 0)
        x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)
        x = jax.nn.relu(x @ params[4] + params[5]) @ params[6] + params[7]
        return -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], axis=1).mean()

    size = len(shared[1])

    def by_vmap(params: list[Any], x: Any, y: Any) -> list[Any]:
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, x[:, None], y[:, None])
        squares = sum(jnp.square(g).reshape(size, -1).sum(axis=1) for g in grads)
        weights = jnp.minimum(1.0, CLIP / jnp.sqrt(squares))
        return [jnp.tensordot(weights, g, axes=1) / size for g in grads]

    torch_model = CASES["cnn"].new_model()
    orders = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}
    params = [
        jnp.array(p.detach().permute(orders[p.dim()]).numpy()) for p in torch_model.parameters()
    ]
    x, y = (jnp.array(t.numpy()) for t in (shared[0].permute(0, 2, 3, 1), shared[1]))
    difference = float(loss(params, x, y)) - F.cross_entropy(torch_model(shared[0]), shared[1])
    if not abs(difference.item()) < 1e-4:
        raise RuntimeError(f"the JAX model must have torch's loss, differs by {difference.item()}")

    if library:
        import jax_privacy  # noqa: PLC0415 - may be missing

        clipped = jax_privacy.clipped_grad(
            loss, l2_clip_norm=CLIP, normalize_by=size, batch_argnums=(1, 2)
        )
        privatizer = jax_privacy.noise_addition.gaussian_privatizer(
            stddev=clipped.sensitivity() * NOISE_MULTIPLIER, prng_key=jax.random.key(0)
        )
        add_noise, noise_state = privatizer.update, privatizer.init(params)
    else:
        clipped, noise_state = by_vmap, jax.random.key(0)

        def add_noise(grads: list[Any], key: Any) -> tuple[list[Any], Any]:
            key, *keys = jax.random.split(key, len(grads) + 1)
            scale = CLIP * NOISE_MULTIPLIER / size
            pairs = zip(grads, keys, strict=True)
            return [g + scale * jax.random.normal(k, g.shape) for g, k in pairs], key

    @jax.jit
    def update(params: list[Any], noise_state: Any, x: Any, y: Any) -> tuple[list[Any], Any]:
        noisy, noise_state = add_noise(clipped(params, x, y), noise_state)
        return [p - LEARNING_RATE * g for p, g in zip(params, noisy, strict=True)], noise_state

    state = (params, noise_state)

    def step(*_: Tensor) -> None:
        nonlocal state
        state = jax.block_until_ready(update(*state, x, y))

    return Contestant(step)


def makers(
    case: Case, shared: Batch, *, with_peers: bool = True
) -> dict[str, Callable[[], Contestant]]:
    """How to make the contestants, those whose library is there."""
    found: dict[str, Callable[[], Contestant]] = {
        PLAIN: lambda: plain(case),
        LAP2: lambda: of_lap2(case, case.records(case.batch)),
        LAP2_VALUES: lambda: of_lap2(case, case.records(case.batch), release="values"),
    }
    peers = [(f"Opacus {m}", "opacus", lambda m=m: of_opacus(case, m)) for m in OPACUS_MODES]
    if case is CASES["cnn"]:
        found["plain SGD, channels_last"] = lambda: plain(case, channels_last=True)
        found[LAP2_POISSON] = lambda: of_lap2(case, case.records(RECORDS))
        peers.append((JAX, "jax", lambda: of_jax(shared, library=False)))
        peers.append((JAX_PRIVACY, "jax_privacy", lambda: of_jax(shared, library=True)))
    for name, package, make in peers if with_peers else ():
        if importlib.util.find_spec(package) is None:
            print(f"{name} is left out: {package} is not installed")
        else:
            found[name] = make
    return found


def field(case: Case, shared: Batch, *, with_peers: bool) -> dict[str, Contestant | Pause]:
    """All contestants that can take a step."""
    found: dict[str, Contestant | Pause] = {}
    for name, make in makers(case, shared, with_peers=with_peers).items():
        try:
            contestant = make()
            contestant.turn(shared, 1)
        except Exception as error:  # noqa: BLE001 - whatever a peer raises, the others still run
            print(f"{name} is left out: {type(error).__name__}: {str(error)[:200]}")
        else:
            found[name] = contestant
    if case is CASES["cnn"]:
        records = case.records(RECORDS)
        loader = PoissonLoader(
            records, sampling_prob=case.batch / RECORDS, steps=-(-RECORDS // case.batch)
        )
        stream = endless(loader)
        found |= {SAMPLE: Pause(loader.sample), NEXT: Pause(lambda: next(stream))}
    return found


@dataclass(frozen=True)
class Target:
    """A claim about medians: a time in seconds, or a ratio of two contestants' times."""

    name: str
    of: str
    to: str | None = None
    at_least: float = 0.0
    at_most: float = float("inf")

    def row(self, rounds: Sequence[dict[str, float]]) -> str:
        """One line of the table."""
        if not {self.of, self.to or self.of} <= rounds[0].keys():
            return f"{self.name:<44} not measured"
        value = statistics.median(r[self.of] / (r[self.to] if self.to else 1.0) for r in rounds)
        unit, scale = ("x", 1.0) if self.to else (" ms", 1e3)
        low, high = self.at_least, self.at_most
        limit = f">= {low * scale:g}{unit}" if low else f"<= {high * scale:g}{unit}"
        verdict = "pass" if low <= value <= high else "FAIL"
        return f"{self.name:<44} {value * scale:>8.2f}{unit:<3}  {limit:<10}  {verdict}"


CASES = {
    "cnn": Case(
        batch=256,
        steps_per_turn=4,
        warm_up_turns=3,
        model=mnist_cnn,
        inputs=lambda count, maker: torch.rand(count, 1, 28, 28, generator=maker),
        targets=(
            Target("lap2 / plain SGD", LAP2, PLAIN, at_most=0.75),
            Target("lap2 on Poisson batches / plain SGD", LAP2_POISSON, PLAIN, at_most=0.75),
            *(Target(f"Opacus {m} / lap2", f"Opacus {m}", LAP2, at_least=2) for m in OPACUS_MODES),
            Target("jax_privacy / lap2", JAX_PRIVACY, LAP2, at_least=1),
            Target(f"sampling of {RECORDS:,}", SAMPLE, at_most=1e-3),
            Target("the same, with gathering the batch", NEXT, at_most=1e-3),
        ),
    ),
    "transformer": Case(
        batch=32,
        steps_per_turn=1,
        warm_up_turns=1,
        model=Classifier,
        inputs=lambda count, maker: torch.randint(0, VOCABULARY, (count, TOKENS), generator=maker),
        targets=(
            Target("lap2 / plain SGD", LAP2, PLAIN, at_most=1.6),
            *(Target(f"Opacus {m} / lap2", f"Opacus {m}", LAP2, at_least=1) for m in OPACUS_MODES),
        ),
    ),
}


def measure(case: Case, count: int, threads: int, *, with_peers: bool) -> None:
    torch.set_num_threads(threads)
    shared: Any = case.records(case.batch).tensors
    contestants = field(case, shared, with_peers=with_peers)
    names = list(contestants)
    for _ in range(case.warm_up_turns):
        for name in names:
            contestants[name].turn(shared, case.steps_per_turn)
    rounds: list[dict[str, float]] = []
    for number in range(count):
        first = number % len(names)  # no one always follows the same neighbour's cold caches
        order = names[first:] + names[:first]
        rounds.append({name: contestants[name].turn(shared, case.steps_per_turn) for name in order})

    plural = "" if threads == 1 else "s"
    print(f"\n{threads} thread{plural}, batch {case.batch}, median of {count} interleaved rounds\n")
    print(f"{'step':<44} {'median':>8}      {'least':>8}      / plain SGD")
    for name in names:
        times = [1e3 * r[name] for r in rounds]
        ratio = statistics.median(r[name] / r[PLAIN] for r in rounds)
        print(
            f"{name:<44} {statistics.median(times):>8.2f} ms   {min(times):>8.2f} ms   {ratio:.2f}"
        )
    print(f"\n{'claim':<44} {'measured':>8}     {'target':<10}  verdict")
    for target in case.targets:
        print(target.row(rounds))


def peak(case: Case, name: str) -> None:
    """Print how many bytes three steps of one contestant need at most, above the imports."""
    torch.set_num_threads(1)
    shared: Any = case.records(case.batch).tensors
    for package in ("opacus", "transformers.models.bert.modeling_bert"):  # no part of a step
        if importlib.util.find_spec(package.split(".")[0]) is not None:
            importlib.import_module(package)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports much
    SecureLaplace().add(torch.zeros(1), 1.0)  # so does its compiler
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    makers(case, shared)[name]().turn(shared, 3)
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def compare_memory(model: str) -> None:
    case = CASES[model]
    shared: Any = case.records(case.batch).tensors
    sizes: dict[str, float] = {}
    for name in makers(case, shared):
        again = [sys.executable, __file__, "--model", model, "--memory", "--only", name]
        done = subprocess.run(again, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            sizes[name] = float(done.stdout.split()[-1])
        else:
            print(f"{name} is left out: {done.stderr.strip().splitlines()[-1][:200]}")
    print(f"\n{'peak memory of three steps':<44} {'MB':>8}   / plain SGD")
    for name, size in sizes.items():
        print(f"{name:<44} {size / 1e6:>8.0f}   {size / sizes[PLAIN]:.2f}")


def settings(threads: int) -> dict[str, str]:
    """What every library in the process reads when it is imported."""
    count = str(threads)
    flags = f"--xla_cpu_multi_thread_eigen={str(threads > 1).lower()}"
    limits = dict.fromkeys(("NPROC", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), count)
    return {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **limits}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a private step of lap2 and of its peers.")
    parser.add_argument("--rounds", type=int, default=15, help="rounds to take the median of")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts")
    parser.add_argument("--model", choices=list(CASES), default="cnn", help="what is trained")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument(
        "--without-peers", action="store_true", help="measure lap2 and plain SGD alone"
    )
    parser.add_argument("--only", help="with --memory: one contestant, in this process")
    given = parser.parse_args()
    if not given.rounds >= 1:
        parser.error(f"--rounds must be at least 1, got {given.rounds}")
    if not min(given.threads) >= 1:
        parser.error(f"--threads must be at least 1, got {min(given.threads)}")
    warnings.filterwarnings("ignore", module="opacus")  # its advice on secure noise
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # Opacus's hooks
    if given.memory:
        peak(CASES[given.model], given.only) if given.only else compare_memory(given.model)
        return

    wanted = [settings(threads) for threads in given.threads]
    if len(wanted) == 1 and wanted[0].items() <= os.environ.items():
        with_peers = not given.without_peers
        measure(CASES[given.model], given.rounds, given.threads[0], with_peers=with_peers)
        return
    for threads, limits in zip(given.threads, wanted, strict=True):  # a process for each
        again = [__file__, "--rounds", str(given.rounds), "--threads", str(threads)]
        again += ["--model", given.model, *["--without-peers"] * given.without_peers]
        subprocess.run([sys.executable, *again], env=os.environ | limits, check=True)


if __name__ == "__main__":
    main()
