"""The files of benchmarks/fuzz.py: of each kind a valid one, how it is changed, what reads it."""

# ruff: noqa: D101, D102 - what the methods of a kind do is said once, by Kind.

import gzip
import hashlib
import io
import json
import pickle
import shutil
import struct
import tarfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch
from fuzz_changes import (
    NUMBERS,
    OTHERS,
    as_json,
    changed_bytes,
    changed_json,
    changed_ledger,
    changed_value,
    rezipped,
)
from safetensors.torch import save as safetensors
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lap2
from lap2 import ledger
from lap2.experiments import data, formats, sources, weights
from lap2.experiments.recipe import Recipe, RecipeError, load_recipe, read_config
from lap2.experiments.sweep import Job, read_rows
from lap2.train import CheckpointError, PrivacyEngine, checkpoint
from lap2.train.journal import Journal

# The kinds of files: each makes the content of input i, and reads it.


class Kind:
    """Files of one format: valid ones, how they are changed, what reads them, what it may raise."""

    error: type[Exception]

    def __init__(self, folder):
        self.path = folder / type(self).__name__.lower()

    def make(self, rng):
        return changed_bytes(rng, rng.choice(self.valid))

    def read(self, content):
        self.path.write_bytes(content)
        self.read_file(self.path)


class Ledger(Kind):
    error = ledger.LedgerError

    def __init__(self, folder):
        super().__init__(folder)
        self.steps = [lap2.Laplace(1.5, 100), lap2.Gaussian(2.0), lap2.LaplaceL1(3.0),
                      lap2.MajorizedLaplace(2.0, 50),
                      lap2.Joint([lap2.Laplace(4.0, 10), lap2.Gaussian(5.0)])]  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.steps.append(lap2.PublishedLaplace(1.5, 100))

    def make(self, rng):
        accountant = lap2.Accountant()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in rng.sample(self.steps, rng.randrange(1, 4)):
                accountant.compose(step, sampling_prob=rng.choice([1.0, 0.01]), steps=7)
        text = accountant.to_json()
        return (
            changed_bytes(rng, text.encode()) if rng.random() < 0.2 else changed_ledger(rng, text)
        )

    def read_file(self, path):
        entries = lap2.Accountant.load(path).ledger
        assert tuple(ledger.loads(ledger.dumps(entries))) == entries
        if len(entries) < 4:
            assert lap2.Accountant.load(path).get_epsilon(1e-5) >= 0


class Rows(Kind):
    error = formats.FormatError

    def make(self, rng):
        recipe = Recipe(steps=rng.randrange(1, 9))
        labels = {"experiment": "figure5", "scale": "full", "dataset": "mnist", "column": "exact",
                  "epsilon": "0.88", "phase": "final", "factor": "0.5", "clip": "10"}  # fmt: skip
        row = {"key": "", "labels": labels, "accuracy": 0.5, "evaluated_on": "test",
               "noise_multiplier": 1.0, "exact_epsilon": 1.5, "steps": 4, "lost_steps": 0,
               "seconds": 0.1, "lap2": "0.1.0", "curve": [[4, 0.5]],
               "recipe": recipe.asdict()}  # fmt: skip
        row["key"] = Job(recipe, labels).key
        return json.dumps(row).encode() + b"\n" + changed_json(rng, row)

    def read_file(self, path):
        for row in read_rows(path):
            assert Job(Recipe.of(row["recipe"]), row["labels"]).key == row["key"]


class RecipeFile(Kind):
    error = RecipeError

    def __init__(self, folder):
        super().__init__(folder)
        self.path = folder / "recipe.toml"

    def make(self, rng):
        lines = [f"{name} = {json.dumps(value)}" for name, value in Recipe().asdict().items()]
        at = rng.randrange(len(lines))
        if rng.random() < 0.6:
            value = rng.choice(
                [*NUMBERS, "0x" + "f" * 9000, "[" * 5000, "2020-01-01", "[[1]]", "{}"]
            )
            lines[at] = f"{lines[at].split()[0]} = {value}"
            return "\n".join(lines).encode()
        return changed_bytes(rng, "\n".join(lines).encode())

    def read_file(self, path):
        recipe = load_recipe(path)
        assert Recipe.of(recipe.asdict()) == recipe


class Config(Kind):
    error = RecipeError

    def make(self, rng):
        return changed_json(rng, Recipe().asdict())

    def read_file(self, path):
        read_config(path)


class Batch(Kind):
    error = formats.FormatError

    def __init__(self, folder):
        super().__init__(folder)
        batch = {b"labels": [1, 2], b"data": np.zeros((2, 3072), np.uint8), b"batch_label": b"a"}
        self.valid = [pickle.dumps(batch, protocol=protocol) for protocol in (3, 4)]
        self.path.mkdir()
        for name in data._BATCHES:
            (self.path / name).write_bytes(self.valid[0])

    def make(self, rng):
        content = rng.choice(self.valid)
        head, numbers, tail = content.partition(bytes(3072))  # the program, not the pixels
        if rng.random() < 0.5:
            return changed_bytes(rng, head) + numbers + tail
        return head + numbers + (changed_bytes(rng, tail) if rng.random() < 0.8 else tail[:-1])

    def read(self, content):
        (self.path / data._BATCHES[0]).write_bytes(content)
        for array in data._from_rows(data._from_pickles(self.path)):
            assert array.dtype == np.uint8


class Idx(Kind):
    error = formats.FormatError
    valid = (b"\0\0\x08\x03" + struct.pack(">3i", 2, 3, 4) + bytes(24),
             b"\0\0\x08\x01" + struct.pack(">i", 9) + bytes(9))  # fmt: skip

    def read(self, content):
        array = data._idx(content, "idx")
        assert array.size < len(content)


class Archive(Kind):
    error = formats.FormatError

    def make(self, rng):
        names = [rng.choice(["p/a", "a", "/a", "../a", "p/../a", "p/b", "c"]) for _ in range(2)]
        stream = io.BytesIO()
        if rng.random() < 0.4:
            with zipfile.ZipFile(stream, "w", rng.choice([0, 8])) as archive:
                for name in dict.fromkeys(names):
                    archive.writestr(name, bytes(99))
            return changed_bytes(rng, stream.getvalue())
        with tarfile.open(fileobj=stream, mode="w", format=rng.choice([1, 2])) as archive:
            for name in names:
                info = tarfile.TarInfo(rng.choice([name, name * 60]))
                info.size, info.linkname = rng.choice([99, 99, 0, 10**6, 2**33 - 1]), "/etc/passwd"
                info.type = rng.choice([tarfile.REGTYPE] * 9 + [b"1", b"2", b"5", b"S", b"L", b"x"])
                archive.addfile(info, io.BytesIO(bytes(99)) if info.size == 99 else None)
        content = changed_bytes(rng, stream.getvalue()) if rng.random() < 0.6 else stream.getvalue()
        return gzip.compress(content, 1) if rng.random() < 0.3 else content

    def read(self, content):
        assert list(formats.unpacked(content, ["a"])) == ["a"]


class Weights(Kind):
    error = sources.DataError

    def __init__(self, folder):
        super().__init__(folder)
        state = {
            "a": torch.ones(4, 4),
            "b": torch.arange(6.0).reshape(2, 3).T,
            "c": torch.tensor(3),
        }
        self.torch, self.safe = saved(state), safetensors({"a": torch.ones(4), "b": torch.ones(2)})

    def make(self, rng):
        match rng.randrange(4):
            case 0:
                return changed_bytes(rng, rng.choice([self.torch, self.safe, b"\x08\x07" * 20]))
            case 1:
                header = json.loads(self.safe[8 : 8 + struct.unpack("<Q", self.safe[:8])[0]])
                text = as_json(rng, changed_value(rng, header))
                return struct.pack("<Q", len(text)) + text + bytes(24)
            case _:
                return rezipped(rng, self.torch)

    def read_file(self, path):
        published = weights.Published("weights", "nowhere", lambda: Path("/nowhere").read_bytes())
        for tensor in weights.load(published, dict, path).values():
            assert tensor.isfinite().all()


class JournalFile(Kind):
    error = CheckpointError
    truth = 41

    def __init__(self, folder):
        super().__init__(folder)
        self.journal = Journal(folder, "0" * 16)
        self.journal.start(self.truth)
        self.valid, self.path = [self.journal.path.read_bytes()], self.journal.path

    def make(self, rng):
        if rng.random() < 0.5:
            return changed_bytes(rng, self.valid[0])
        at, content = rng.randrange(len(self.valid[0])), bytearray(self.valid[0])
        content[at] = rng.randrange(256)
        return bytes(content)

    def read_file(self, path):
        steps = self.journal.steps()
        differing = [a != b for a, b in zip(path.read_bytes(), self.valid[0], strict=True)]
        assert steps >= self.truth or sum(differing) > 1, "one changed byte hides a step"


def saved(state):
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def sealed(payload):
    return checkpoint._MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


def made_private():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    records = TensorDataset(torch.randn(20, 3), torch.randint(0, 2, (20,)))
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = engine.make_private(module=model, optimizer=optimizer,
                               data_loader=DataLoader(records, batch_size=5),
                               noise_multiplier=1.0, max_grad_norm=1.0)  # fmt: skip
    return engine, *made, torch.optim.lr_scheduler.StepLR(made[1], 3)


class Checkpoint(Kind):
    """A crafted one that the engine refuses must leave no trace, and one it loads must count."""

    error = CheckpointError

    def __init__(self, folder):
        super().__init__(folder)
        engine, model, optimizer, loader, scheduler = made_private()
        self.path = folder / "run" / "checkpoint.pt"
        self.path.parent.mkdir()
        engine.save(self.path, scheduler=scheduler)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if loader.ends_batch:
                scheduler.step()
        engine.save(self.path, scheduler=scheduler)
        engine.close()
        self.state, self.valid = checkpoint.read(self.path), [self.path.read_bytes()]
        shutil.copytree(self.path.parent, folder / "kept")
        self.kept, self.engine = folder / "kept", None

    def make(self, rng):
        match rng.randrange(5):
            case 0:
                return changed_bytes(rng, self.valid[0])
            case 1:
                return sealed(rezipped(rng, saved(self.state)))
            case 2:
                return sealed(changed_bytes(rng, saved(self.state)))
        state = dict(self.state)
        if rng.random() < 0.4:
            run = dict(state["lap2"])
            name = rng.choice(["ledger", "step"])
            run[name] = changed_ledger(rng, run[name]).decode()
            state["lap2"] = run
        tensors = [torch.ones(2), torch.ones(4, 3, dtype=torch.float64), torch.tensor(float("nan")),
                   torch.ones(4, 3).to_sparse(), torch.ones(4, 3, dtype=torch.complex64),
                   torch.empty(0), torch.ones(1).expand(4, 3), nn.Parameter(torch.ones(4, 3)),
                   torch.ones(4, 3, device="meta")]  # fmt: skip
        return sealed(saved(changed_value(rng, state, (*NUMBERS, *OTHERS, *tensors))))

    def read(self, content):
        shutil.rmtree(self.path.parent)
        shutil.copytree(self.kept, self.path.parent)
        self.path.write_bytes(content)
        if self.engine is None:
            self.engine, self.model, self.optimizer, self.loader, self.scheduler = made_private()
        before = self.standing()
        try:
            self.engine.load(self.path, scheduler=self.scheduler)
        except CheckpointError:
            assert self.standing() == before, "a refusal changed something"
            raise
        saved_steps = sum(
            e.steps for e in ledger.loads(checkpoint.read(self.path)["lap2"]["ledger"])
        )
        assert self.engine.accountant.steps >= saved_steps
        self.engine.close()
        self.engine = None

    def standing(self):
        step = self.engine._step
        return described([self.model.state_dict(), self.optimizer.state_dict(),
                          self.scheduler.state_dict(),
                          self.loader.state_dict(), self.engine.accountant.to_json(),
                          step.run.id, step.run.released, step.run.lost])  # fmt: skip


def described(value):
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes())
    if isinstance(value, dict):
        return [(key, described(inner)) for key, inner in value.items()]
    return [described(v) for v in value] if isinstance(value, list | tuple) else repr(value)


KINDS = [Ledger, Rows, RecipeFile, Config, Batch, Idx, Archive, Weights, JournalFile, Checkpoint]
