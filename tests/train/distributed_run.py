"""What each process of the distributed tests does; torchrun starts it with a folder and tasks."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lap2.noise import SecureGaussian, SecureLaplace, SecureSigns
from lap2.train import BookkeepingError, PoissonLoader, PrivacyEngine


class Off:
    """Noise that is none, to look at the clipped sum."""

    is_secure = True

    def added_sensitivity(self, _scale, _size):
        return 0.0

    def add(self, _array, _scale):
        return 0.0


def make(*, records=60, batch_size=10, sampler=None, lr=0.1, **kwargs):
    """A small model, wrong on all ranks but the first until the engine copies it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    torch.manual_seed(99)
    data = TensorDataset(torch.randn(records, 5), torch.randint(0, 3, (records,)))
    engine = PrivacyEngine(sampler=sampler or SecureLaplace(compiled=False))
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        data_loader=DataLoader(data, batch_size=batch_size),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        **kwargs,
    )
    return engine, model, optimizer, loader


def backward(model, x, y):
    nn.functional.cross_entropy(model(x), y).backward()


def fixed_samples(loader):
    """The same records every time, whichever rank has them; rank 1 has none in every other step."""
    step = -1

    def sample():
        nonlocal step
        step += 1
        chosen = np.random.default_rng(step).choice(60, 20, replace=False)
        if step % 2:
            chosen = chosen[chosen % 2 == 0]
        return np.intersect1d(chosen, loader._records)

    loader.sample = sample


def equal(_folder):
    """The sum of two processes, noise off, with pieces of batches that differ between ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    _, model, optimizer, loader = make(
        sampler=Off(), release="values", batch_size=20 // world, max_physical_batch_size=4
    )
    fixed_samples(loader)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            backward(model, x, y)
            optimizer.step()
    return {"weights": flat(model.parameters())}


def noise(_folder, **kwargs):
    """Gradients of zero: what is left is the noise."""
    engine, model, optimizer, loader = make(release="values", lr=0.0, **kwargs)
    released = []
    for _ in range(60):
        for x, _ in loader:
            (0 * model(x)).sum().backward()
            optimizer.step()
            if loader.ends_batch:
                released.append([20 * value for value in flat(p.grad for p in model.parameters())])
    return {
        "released": released,
        "ledger": engine.accountant.to_json(),
        "is_guarantee": engine.statement(1e-5).is_guarantee,
    }


def gaussian(folder):
    """The same with Gaussian noise."""
    return noise(folder, mechanism="gaussian", sampler=SecureGaussian(compiled=False))


def empty(_folder):
    """Fifty steps of one expected record: most local batches are empty."""
    engine, model, optimizer, loader = make(records=100, batch_size=1)
    sizes, rehearsed = [], 0
    for x, y in loader:
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()
        if loader.ends_batch:
            sizes.append(loader.piece.size)
        else:
            rehearsed += 1
    assert isinstance(loader, PoissonLoader)
    return {
        "sizes": sizes,
        "rehearsed": rehearsed,
        "is_guarantee": engine.statement(1e-5).is_guarantee,
        "ledger": engine.accountant.to_json(),
        "weights": flat(model.parameters()),
        "prob": loader.sampling_prob,
    }


def killed(folder):
    """The second rank kills itself in the first attempt; the next attempt goes on."""
    engine, model, optimizer, loader = make()
    first = not (folder / "run.pt").exists()
    lost = 0 if first else engine.load(folder / "run.pt").lost_steps
    engine.save(folder / "run.pt")
    for x, y in loader:
        third = loader.ends_batch and engine.accountant.steps == 2
        if first and third and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()
    return {"lost": lost, "steps": engine.accountant.steps, "ledger": engine.accountant.to_json()}


class Centred(nn.Module):
    """What comes out for one record depends on the others."""

    def forward(self, x):
        """Less the mean over the batch."""
        return x - x.mean(0)


def mixing(_folder):
    """A model that mixes records is found by each rank by itself, before anything is released."""
    engine, model, optimizer, loader = make_around(nn.Sequential(nn.Linear(5, 3), Centred()))
    message = ""
    try:
        for x, y in loader:
            backward(model, x, y)
            optimizer.step()
    except BookkeepingError as error:
        message = str(error)
    return {"message": message, "steps": engine.accountant.steps}


def refused(_folder):
    """Ranks that disagree, and models that are wrapped."""
    rank = dist.get_rank()
    messages = []
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(5, 3))
    sharded = nn.Linear(5, 3)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    for attempt in (
        lambda: make(records=60 + rank),
        lambda: make(sampler=(SecureSigns, SecureLaplace)[rank](compiled=False)),
        lambda: make_around(wrapped),
        lambda: make_around(sharded),
    ):
        try:
            attempt()
        except ValueError as error:
            messages.append(str(error))
    return {"messages": messages}


def make_around(module):
    """Make a given module private."""
    data = TensorDataset(torch.randn(60, 5), torch.randint(0, 3, (60,)))
    engine = PrivacyEngine(sampler=SecureLaplace(compiled=False))
    return engine, *engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
    )


def flat(tensors):
    """All values in one list."""
    return torch.cat([t.detach().flatten() for t in tensors]).tolist()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    for task in sys.argv[2:]:
        result = globals()[task](folder)
        (folder / f"{task}-{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's threads now and then abort a process that ends in the ordinary way
