"""Nothing private leaves in what a user saves, copies or prints, nor after a refusal."""

import contextlib
import copy
import io
import itertools
import pickle
import pickletools
import traceback
import types
import zipfile

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lap2.train import BookkeepingError, BudgetExhaustedError, PrivacyEngine
from lap2.train.engine import _store_channels_last

RECORDS, CLASSES = 48, 3
WEIGHTS = {"0.weight", "6.weight", "patches.weight", "head.weight"}


class Attending(nn.Module):
    """Patches, a class token, attention."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = self.norm(x + self.attention(x, x, x)[0])
        return self.head(x[:, 0])


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, CLASSES),
    )


MODELS = {"convolutional": convolutional, "attending": Attending}


class Run:
    """A model made private, with its data; and what the last batch was."""

    def __init__(
        self, kind="convolutional", *, by="engine", pieces=None, batch_size=12, **settings
    ):
        torch.manual_seed(0)
        self.kind, self.by = kind, by
        self.x = torch.randn(RECORDS, 1, 12, 12)
        self.y = torch.randint(0, CLASSES, (RECORDS,))
        self.engine = PrivacyEngine()
        model = MODELS[kind]()
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            data_loader=DataLoader(TensorDataset(self.x, self.y), batch_size=batch_size),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            max_physical_batch_size=pieces,
            **settings,
        )

    def backward(self, x, y):
        losses = cross_entropy(self.model(x), y, reduction="none")
        if self.by == "engine":
            self.engine.backward(losses)
        else:
            losses.mean().backward()

    def train(self):
        for x, y in self.loader:
            self.optimizer.zero_grad()
            self.last, self.weights = (x, y), copy.deepcopy(self.model.state_dict())
            self.backward(x, y)
            self.optimizer.step()
        return self

    def ordinary(self):
        """The model with these weights that was never made private."""
        plain = MODELS[self.kind]()
        _store_channels_last(plain)
        plain.load_state_dict(self.model.state_dict())
        return plain

    def gradients(self):
        """Each record's gradients in the last batch, by torch's own vmap, in any layout."""
        plain = MODELS[self.kind]()
        plain.load_state_dict(self.weights)
        params = {name: p.detach() for name, p in plain.named_parameters()}

        def loss(params, x, y):
            scores = torch.func.functional_call(plain, params, (x[None],))
            return cross_entropy(scores, y[None])

        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, *self.last)
        for grads in (found[name] for name in params if name in WEIGHTS):
            for order in itertools.permutations(range(1, grads.dim())):
                if order in {tuple(range(1, grads.dim())), (3, 4, 2, 1), (1, 3, 4, 2), (2, 1)}:
                    yield from grads.permute(0, *order).flatten(1).numpy()


def parts(blob):
    """The bytes of a file, and of what is packed in it."""
    yield blob
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(io.BytesIO(blob)) as archive:
        for name in archive.namelist():
            yield archive.read(name)


def records_in(blob, records):
    """Which records have 16 bytes in a row in a file, as numbers of either width."""
    owner = {}
    for number, record in enumerate(records.numpy()):
        for values in (record.astype(np.float32), record.astype(np.float64)):
            data, width = values.tobytes(), values.itemsize
            for start in range(0, len(data) - 15, width):
                owner[data[start : start + 16]] = number
    found = (owner.get(p[i : i + 16]) for p in parts(blob) for i in range(len(p) - 15))
    return {number for number in found if number is not None}


def resembles(blob, vectors):
    """How many vectors are in a file, up to rounding, as numbers of either width."""
    found = 0
    for part, width, start in itertools.product(parts(blob), ("<f4", "<f8"), range(8)):
        size = np.dtype(width).itemsize
        if start >= size or len(part) < start + 8 * size:
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            held = np.frombuffer(part, width, (len(part) - start) // size, start).astype(np.float64)
            for vector in vectors:
                head = np.flatnonzero(np.abs(vector) > 1e-4)[:4]
                if len(head) < 4 or head[3] >= len(held):
                    continue
                places = np.arange(len(held) - head[3])
                for place in head:
                    allowed = 1e-4 * abs(vector[place])
                    places = places[np.abs(held[places + place] - vector[place]) < allowed]
                found += bool(places.size)
    return found


def saved(thing):
    stream = io.BytesIO()
    torch.save(thing, stream)
    return stream.getvalue()


def everything(run, folder):
    """All that a user may keep: what it is, and its bytes."""
    model, optimizer = run.model, run.optimizer
    yield "torch.save(model)", saved(model)
    yield "pickle.dumps(model)", pickle.dumps(model)
    yield "cloudpickle.dumps(model)", cloudpickle.dumps(model)
    yield "a method of the model's", cloudpickle.dumps(model.forward)
    yield "a copy of the model", pickle.dumps(copy.deepcopy(model))
    yield "a layer", saved(next(iter(model.children())))
    yield "the model's state", saved(model.state_dict())
    yield "its parameters", saved(model.state_dict(keep_vars=True))
    yield "its attributes", pickle.dumps(model.__dict__)
    yield "torch.save(optimizer)", saved(optimizer)
    yield "a copy of the optimizer", pickle.dumps(copy.deepcopy(optimizer))
    yield "the optimizer's state", saved(optimizer.state_dict())
    yield "the loader's state", pickle.dumps(run.loader.state_dict())
    run.engine.save(folder / "run.pt")
    for path in sorted(folder.iterdir()):
        yield path.name, path.read_bytes()
    shown = [model, optimizer, run.loader, run.loader.piece, run.engine, run.engine._step]
    yield "what is printed", "".join(f"{thing!r}{thing!s}" for thing in shown).encode()


@pytest.mark.parametrize("by", ["engine", "loss"])
@pytest.mark.parametrize("pieces", [None, 5])
@pytest.mark.parametrize("kind", MODELS)
def test_nothing_that_is_saved_holds_a_record_or_its_gradient(kind, pieces, by, tmp_path):
    run = Run(kind, pieces=pieces, by=by).train()
    secret = list(run.gradients())
    for when in ("after training", "between backward and step"):
        for name, blob in everything(run, tmp_path):
            assert not records_in(blob, run.x), (name, when)
            assert not resembles(blob, secret), (name, when)
            assert len(blob) < 300_000, (name, when)
        run.loader.steps = 1
        x, y = next(batches := iter(run.loader))
        run.last, run.weights = (x, y), copy.deepcopy(run.model.state_dict())
        run.backward(x, y)
        secret = list(run.gradients())
    batches.close()


def test_the_search_finds_what_is_there():
    run = Run().train()
    secret = list(run.gradients())
    hidden = saved({"a": torch.ones(5), "b": run.x[3:5].double()})
    assert records_in(hidden, run.x) == {3, 4}
    arena = run.engine._step.recorder._arena
    assert not resembles(saved(torch.randn(4000)), secret)
    x, y = next(iter(run.loader))
    run.last, run.weights = (x, y), copy.deepcopy(run.model.state_dict())
    run.backward(x, y)
    assert resembles(saved([b.clone() for b in arena._buffers]), list(run.gradients())) >= len(x)


@pytest.mark.parametrize("kind", MODELS)
def test_a_pickled_model_is_to_the_bit_an_ordinary_one(kind):
    run = Run(kind).train()
    plain = run.ordinary()
    again = pickle.loads(pickle.dumps(run.model))
    assert content(run.model) == content(plain)
    for copied in (again, copy.deepcopy(run.model)):
        assert [vars(m).keys() for m in copied.modules()] == [
            vars(m).keys() for m in plain.modules()
        ]
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in copied.modules())
        assert [getattr(m, "inplace", None) for m in copied.modules()] == [
            getattr(m, "inplace", None) for m in plain.modules()
        ]
        assert not any(vars(p) for p in copied.parameters())
        assert b"lap2" not in pickle.dumps(copied)
    x = run.x[:4]
    torch.testing.assert_close(again(x), plain(x))


def content(thing):
    """What torch.save writes, but for what tells strings from each other that are equal."""
    with zipfile.ZipFile(io.BytesIO(saved(thing))) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if "/data/" in name}
        found = list(pickletools.genops(archive.read("archive/data.pkl")))
    return held, [
        (op.name, value) for op, value, _ in found if not op.name.endswith(("PUT", "GET"))
    ]


def test_hooks_of_the_users_own_stay_with_the_model():
    run = Run()
    run.model[0].register_forward_hook(users_hook)
    again = pickle.loads(pickle.dumps(run.model))
    assert list(again[0]._forward_hooks.values()) == [users_hook]
    run.train()
    assert run.engine.accountant.steps == 4


def users_hook(_module, _inputs, _output):
    """Sees nothing but what the user lets it see."""


def test_a_model_with_a_way_of_its_own_to_copy_is_copied_that_way():
    model = Copying()
    PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    copied = copy.deepcopy(model)
    assert copied.copies == 1
    assert b"lap2" not in pickle.dumps(vars(copied))


class Copying(nn.Linear):
    """Counts its copies."""

    copies = 0

    def __init__(self):
        super().__init__(4, 2)

    def __deepcopy__(self, memo):
        other = object.__new__(type(self))
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        other.copies = self.copies + 1
        return other


def test_two_engines_on_one_model_leave_no_trace_in_its_pickle():
    run = Run("attending")
    other = PrivacyEngine()
    other.make_private(
        module=run.model,
        optimizer=torch.optim.SGD(run.model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(run.x, run.y), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert b"lap2" not in pickle.dumps(run.model)
    other._step.recorder.remove()
    assert b"lap2" not in pickle.dumps(run.model)
    run.engine._step.recorder.remove()
    assert "__reduce_ex__" not in vars(run.model)


def test_a_copied_optimizer_is_an_ordinary_one_that_releases_nothing():
    run = Run().train()
    for other in (copy.deepcopy(run.optimizer), pickle.loads(pickle.dumps(run.optimizer))):
        assert type(other) is torch.optim.SGD
        steps = run.engine.accountant.steps
        for group in other.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        other.step()
        assert run.engine.accountant.steps == steps
    assert type(run.optimizer).__name__ == "PrivateSGD"


@pytest.mark.parametrize("take", [pickle.dumps, copy.deepcopy, copy.copy, saved])
def test_what_leads_to_records_is_not_pickled(take):
    run = Run().train()
    with pytest.raises(TypeError, match=r"engine\.save"):
        take(run.engine)
    step = run.engine._step
    for thing in (
        run.loader, run.loader.piece, step, step.recorder, step.recorder._arena, step.rehearsal
    ):  # fmt: skip
        with pytest.raises(TypeError, match="must not be pickled or copied"):
            take(thing)


def shown_by(error):
    """Local variables in frames that are not the user's, as error reporters show them."""
    waiting = [traceback.TracebackException.from_exception(error, capture_locals=True)]
    while waiting:
        this = waiting.pop()
        waiting += [e for e in (this.__cause__, this.__context__) if e is not None]
        for frame in this.stack:
            if "/lap2/" in frame.filename or "/torch/" in frame.filename:
                yield from (frame.locals or {}).items()


def raw(run):
    """Leave a gradient without noise, as a loop of two minds may."""
    run.model.eval()
    cross_entropy(run.model(run.x[:7]), run.y[:7]).backward()
    run.model.train()
    assert all(p.grad is not None for p in run.model.parameters())


def without_backward(run):
    next(batches := iter(run.loader))
    raw(run)
    try:
        run.optimizer.step()
    finally:
        batches.close()


def broken_closure(run):
    x, y = next(iter(run.loader))
    raw(run)

    def closure():
        run.backward(x, y)
        raise RuntimeError("the user's own")

    run.optimizer.step(closure)


def empty_closure(run):
    next(iter(run.loader))
    raw(run)
    run.optimizer.step(lambda: None)


def no_batch(run):
    raw(run)
    run.optimizer.step()


def fetched_twice(run):
    batches = iter(run.loader)
    x, y = next(batches)
    run.backward(x, y)
    raw(run)
    next(batches)


def other_batch(run):
    x, y = next(iter(run.loader))
    run.backward(x[1:], y[1:])
    run.optimizer.step()


def other_losses(run):
    x, _ = next(iter(run.loader))
    run.engine.backward(run.model(x).sum(dim=1)[1:])


def broken_inside(run):
    def fail(records, batch):
        raise RuntimeError("memory has run out")

    run.engine._step.recorder._gradients = fail
    run.train()


def broken_noise(run):
    def fail(sums, scale):
        raise RuntimeError("no entropy")

    signs = types.SimpleNamespace(add=fail, is_secure=True)
    run.engine._step._plan.readout.noise.times = lambda _: signs
    run.train()


def mixing(run):
    run.model[0].register_forward_hook(lambda _m, _a, output: output - output.detach().mean(0))
    run.train()


REFUSALS = {
    without_backward: BookkeepingError,
    broken_closure: RuntimeError,
    empty_closure: BookkeepingError,
    no_batch: BookkeepingError,
    fetched_twice: BookkeepingError,
    other_batch: BookkeepingError,
    other_losses: ValueError,
    broken_inside: RuntimeError,
    broken_noise: RuntimeError,
    mixing: BookkeepingError,
}


@pytest.mark.parametrize("by", ["engine", "loss"])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda f: f.__name__)
def test_a_refusal_leaves_no_gradient_and_shows_no_variable(refusal, by):
    run = Run(by=by)
    with pytest.raises(REFUSALS[refusal]) as caught:
        refusal(run)
    assert [p.grad for p in run.model.parameters()] == [None] * 6
    assert not run.engine._step.recorder._records
    assert not any(total.any() for total in run.engine._step._sums)
    for name, value in shown_by(caught.value):
        assert "tensor(" not in value or name == "losses", name  # which the user gave
        assert name not in {"piece", "drawn", "recorded", "records", "batch"}


def test_an_exhausted_budget_leaves_no_gradient():
    run = Run()
    run.train()
    epsilon = run.engine.get_epsilon(1e-5)
    run = Run()
    run.engine.set_budget(epsilon=epsilon, delta=1e-5)
    run.train()
    raw(run)
    with pytest.raises(BudgetExhaustedError) as caught:
        run.train()
    assert [p.grad for p in run.model.parameters()] == [None] * 6
    assert not any("tensor(" in value for _, value in shown_by(caught.value))


def test_frames_are_shown_where_nothing_empties_them():
    def deep(records):
        raise RuntimeError(len(records))

    error = None
    try:
        deep(torch.randn(3))
    except RuntimeError as caught:
        error = traceback.TracebackException.from_exception(caught, capture_locals=True)
    assert "tensor(" in "".join(error.format())


def test_an_error_in_the_data_set_shows_no_sample():
    run = Run(batch_size=47)
    broken = list(zip(run.x, run.y, strict=True))
    run.loader.dataset.tensors = (run.x[:3], run.y[:3])
    with pytest.raises(IndexError) as caught:
        next(iter(run.loader))
    names = {name for name, _ in shown_by(caught.value)}
    assert not names & {"drawn", "index", "data"}
    assert len(broken) == RECORDS


def test_the_rest_of_a_batch_is_not_released_once_a_piece_was_refused():
    run = Run(pieces=2, batch_size=40, rehearse=False)
    batches = iter(run.loader)
    x, y = next(batches)
    run.backward(x[1:], y[1:])
    with pytest.raises(BookkeepingError, match="number of records"):
        run.optimizer.step()
    x, y = next(batches)
    run.backward(x, y)
    with pytest.raises(BookkeepingError, match="released together, or none"):
        run.optimizer.step()
    assert run.engine.accountant.steps == 0


def test_no_scratch_memory_outlives_a_pass_and_no_sum_a_step():
    run = Run(rehearse=False)
    recorder = run.engine._step.recorder
    held = []
    for x, y in run.loader:
        run.backward(x, y)
        held.append(len(recorder._arena._buffers))
        run.optimizer.step()
        assert not any(total.any() for total in run.engine._step._sums)
        assert not recorder._records
        assert not recorder._batch
    assert min(held) > 0
    assert not recorder._arena._buffers
    assert not recorder._arena._wide
    for x, y in run.loader:
        run.backward(x, y)
        break
    run.optimizer.step()  # what was recorded is still whole
    assert run.engine.accountant.steps == 5


WATCHES = ["register_hook", "register_post_accumulate_grad_hook"]


@pytest.mark.parametrize("watch", WATCHES)
def test_hooks_on_parameters_are_refused_before_they_see_a_gradient(watch):
    run, seen = Run(), []
    handle = getattr(run.model[3].weight, watch)(lambda g: seen.append(g.clone()))
    with pytest.raises(BookkeepingError, match=r"'3\.weight' must have no hook.*wandb"):
        run.train()
    assert not seen
    handle.remove()
    run.train()
    assert run.engine.accountant.steps == 4


@pytest.mark.parametrize("watch", WATCHES)
def test_hooks_on_parameters_are_refused_by_make_private(watch):
    model = nn.Linear(4, 2)
    getattr(model.weight, watch)(lambda _: None)
    with pytest.raises(BookkeepingError, match="'weight' must have no hook of its own"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


@pytest.mark.parametrize("watch", WATCHES)
def test_a_hook_between_forward_and_backward_is_refused_in_the_step(watch):
    run = Run()
    x, y = next(iter(run.loader))
    losses = cross_entropy(run.model(x), y, reduction="none")
    getattr(run.model[3].weight, watch)(lambda _: None)
    run.engine.backward(losses)
    with pytest.raises(BookkeepingError, match="must have no hook"):
        run.optimizer.step()


@pytest.mark.parametrize("refusal", [other_batch, other_losses, mixing], ids=lambda f: f.__name__)
def test_messages_have_no_numbers_of_private_records(refusal):
    run = Run(rehearse=refusal is mixing)
    with pytest.raises((BookkeepingError, ValueError)) as caught:
        refusal(run)
    assert not any(letter.isdigit() for letter in str(caught.value))


def test_messages_of_other_layers_and_shapes_have_no_sample_size():
    run = Run(rehearse=False)
    x, y = next(iter(run.loader))
    with pytest.raises(ValueError, match="got 2 dimensions: take"):
        run.engine.backward(run.model(x))
    with pytest.raises(ValueError, match="got 1 dimensions and no gradient: take"):
        run.engine.backward(run.model(x)[:, 0].detach())
    run.engine._step.recorder.discard()
    run.model(x)[1:].sum().backward()
    cross_entropy(run.model(x[1:]), y[1:]).backward()
    with pytest.raises(BookkeepingError, match="must be of one batch, got two of different sizes"):
        run.optimizer.step()
