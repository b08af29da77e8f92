"""Two processes that disagree, or that find each other too late; run with a folder for results.

They are one process that forks before it uses any thread: torch is loaded once.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lap2.noise import ReproducibleLaplace, SecureLaplace
from lap2.train import PrivacyEngine


def private(sampler):
    """A model made private with this noise."""
    torch.manual_seed(0)
    model, engine = nn.Linear(4, 2), PrivacyEngine(sampler=sampler)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        release="values",
    )
    return engine, *made


def one_pass(engine, model, optimizer, loader):
    """Ordinary steps."""
    for (x,) in loader:
        engine.backward(model(x).square().sum(1))
        optimizer.step()


def message(action):
    """What it raised."""
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def begin(folder):
    """Find the other process."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), 2),
        rank=RANK,
        world_size=2,
        timeout=timedelta(seconds=20),
    )


def main(folder):
    """Everything, with one start."""
    found = {}
    alone = private(SecureLaplace(compiled=False))
    begin(folder)
    found["afterwards"] = message(lambda: one_pass(*alone))
    found["steps afterwards"] = alone[0].accountant.steps
    kinds = (SecureLaplace(compiled=False), ReproducibleLaplace(0))
    found["one of them secure"] = message(lambda: private(kinds[RANK]))
    found["alike"] = message(lambda: one_pass(*private(kinds[0])))
    (folder / f"found-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    child = os.fork()
    RANK = 0 if child else 1
    status = 1
    try:
        main(Path(sys.argv[1]))
        status = 0
    finally:
        if child:
            status |= os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status & 255)
