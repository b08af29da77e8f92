"""Trains with a framework's own save and resume, again and again until it is killed.

Run by test_frameworks.py: ``python frameworks_run.py FRAMEWORK FOLDER KILLS``. Imports once, then
forks a child for every life of the training. A child writes down what it has counted when it
begins, and every release after its noise; the parent kills it at a random point.
"""

import importlib
import json
import logging
import os
import pathlib
import random
import shutil
import signal
import sys
import time
import warnings

import torch
import torch._dynamo
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lap2.noise import SecureLaplace
from lap2.train import PrivacyEngine

SAVE_EVERY = 3
RELEASED, COUNTED, SAVED = pathlib.Path("released"), pathlib.Path("counted"), pathlib.Path("saved")


class Written(SecureLaplace):
    """Writes down every release, when its noise was added."""

    def __init__(self):
        super().__init__(compiled=False)
        self.log = RELEASED.open("a", buffering=1)

    def add(self, array, scale):
        added = super().add(array, scale)
        self.log.write("x")
        self.log.flush()
        return added


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Records(TensorDataset):
    def __getitem__(self, index):
        x, label = super().__getitem__(index)
        return {"x": x, "labels": label}


def made(model):
    torch.manual_seed(0)
    data = Records(torch.randn(40, 4), torch.randint(0, 2, (40,)))
    engine = PrivacyEngine(sampler=Written())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return engine, optimizer, loader


def latest(pattern, whole):
    """The newest save that was finished."""
    found = sorted(SAVED.glob(pattern), key=lambda path: int(path.stem.split("-")[-1]))
    return next((path for path in reversed(found) if whole(path)), None)


def holds_a_state(path):
    """Whether the Trainer came to the end of what it writes last."""
    try:
        return bool(json.loads((path / "trainer_state.json").read_text()))
    except (OSError, ValueError):
        return False


def count(engine):
    with COUNTED.open("a") as log:
        log.write(f"{engine.accountant.steps} {len(RELEASED.read_text())}\n")


def with_transformers():
    import transformers

    model = Classifier()
    engine, optimizer, loader = made(model)

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return loader

    class Began(transformers.TrainerCallback):
        def on_epoch_begin(self, *_, **__):
            if not self.began:
                count(engine)
            self.began = True

        began = False

    settings = transformers.TrainingArguments(
        output_dir=str(SAVED), max_steps=10_000, save_steps=SAVE_EVERY, use_cpu=True, report_to=[],
        disable_tqdm=True, max_grad_norm=0.0, ignore_data_skip=True, logging_strategy="no",
        save_total_limit=3,
    )  # fmt: skip
    trainer = Trainer(model=model, args=settings, optimizers=(optimizer, None), callbacks=[Began()])
    last = latest("checkpoint-*", holds_a_state)
    trainer.train(resume_from_checkpoint=None if last is None else str(last))


def with_lightning():
    import lightning

    model = Classifier()
    engine, optimizer, loader = made(model)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return optimizer

        def on_train_start(self):
            count(engine)

    class Saving(lightning.Callback):
        """As ModelCheckpoint does, but for a name that is there when the file is whole."""

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step % SAVE_EVERY == 0:
                path = SAVED / f"run-{trainer.global_step}"
                trainer.save_checkpoint(path.with_suffix(".partial"))
                path.with_suffix(".partial").replace(path.with_suffix(".ckpt"))

    SAVED.mkdir(exist_ok=True)
    trainer = lightning.Trainer(
        max_steps=10_000, max_epochs=-1, accelerator="cpu", logger=False, callbacks=[Saving()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    last = latest("run-*.ckpt", lambda _: True)
    trainer.fit(Module(), loader, ckpt_path=None if last is None else str(last))


def with_accelerate():
    import accelerate

    model = Classifier()
    engine, optimizer, loader = made(model)
    wrapper = accelerate.Accelerator(cpu=True)
    model, optimizer = wrapper.prepare(model, optimizer)
    last = latest("run-*", lambda _: True)
    if last is not None:
        wrapper.load_state(str(last))
    count(engine)
    step = 0 if last is None else int(last.name.split("-")[-1])
    while True:
        for batch in loader:
            optimizer.zero_grad()
            wrapper.backward(model(**batch)["loss"])
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0:
                wrapper.save_state(str(SAVED / "partial"))
                shutil.rmtree(SAVED / f"run-{step}", ignore_errors=True)
                (SAVED / "partial").replace(SAVED / f"run-{step}")


def main(framework, folder, kills):
    os.chdir(folder)
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    work = {
        "transformers": with_transformers,
        "lightning": with_lightning,
        "accelerate": with_accelerate,
    }[framework]
    importlib.import_module(framework)
    RELEASED.touch()
    COUNTED.touch()
    rng, lower = random.Random(3), 0
    for life in range(kills + 1):
        child = os.fork()
        if child == 0:
            work()
        while len(COUNTED.read_text().splitlines()) <= life:
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                raise SystemExit("the training ended by itself")
            time.sleep(0.001)
        wanted = lower + rng.randrange(4, 16)
        while life < kills and len(RELEASED.read_text()) < wanted:
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                raise SystemExit("the training ended by itself")
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lower = len(RELEASED.read_text())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
