"""Under Opacus too, nothing private leaves in what a user saves or copies, nor after a refusal."""

import copy
import pickle
import types

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lap2.interop.opacus import PrivacyEngine
from lap2.train import BookkeepingError
from tests.train.test_side_doors import records_in, saved, shown_by

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

MODES = ["hooks", "functorch", "ew"]


class Run:
    """A small convolutional model, made private by the adapter."""

    def __init__(self, mode="hooks"):
        torch.manual_seed(0)
        self.x, self.y = torch.randn(40, 1, 8, 8), torch.randint(0, 3, (40,))
        self.plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        self.engine = PrivacyEngine()
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=self.plain,
            optimizer=torch.optim.SGD(self.plain.parameters(), lr=0.1, momentum=0.9),
            data_loader=DataLoader(TensorDataset(self.x, self.y), batch_size=20),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
        )

    def backward(self, x, y):
        cross_entropy(self.model(x), y).backward()

    def train(self):
        for x, y in self.loader:
            self.optimizer.zero_grad()
            self.backward(x, y)
            self.optimizer.step()
        return self


@pytest.mark.parametrize("mode", MODES)
def test_nothing_that_is_saved_holds_a_record(mode):
    run = Run(mode).train()
    holds_nothing(run)
    x, y = next(iter(run.loader))
    run.backward(x, y)
    assert all(len(p.grad_sample) == len(x) for p in run.plain.parameters())
    holds_nothing(run)
    if mode != "ew":  # which knows one forward at a time
        run.model(x)
        kept = pickle.dumps(
            [layer.activations for layer in run.plain if "activations" in vars(layer)]
        )
        assert len(records_in(kept, run.x)) == len(x)
        holds_nothing(run)


def holds_nothing(run):
    states = [run.model.state_dict(), run.model.state_dict(keep_vars=True)]
    for thing in (run.model, run.plain, run.plain[0], run.optimizer, *states):
        for taken in (
            saved(thing),
            pickle.dumps(thing),
            cloudpickle.dumps(thing),
            saved(copy.deepcopy(thing)),
        ):
            assert not records_in(taken, run.x)
            assert len(taken) < 20_000
            assert b"opacus" not in taken
            assert b"grad_sample" not in taken


@pytest.mark.parametrize("mode", MODES)
def test_copies_are_ordinary_and_release_nothing(mode):
    run = Run(mode).train()
    for model in (pickle.loads(pickle.dumps(run.model)), copy.deepcopy(run.model)):
        assert type(model) is nn.Sequential
        assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())
        torch.testing.assert_close(model(run.x), run.plain.eval()(run.x))
        run.plain.train()
    for other in (pickle.loads(pickle.dumps(run.optimizer)), copy.deepcopy(run.optimizer)):
        assert type(other) is torch.optim.SGD
    run.train()
    assert len(run.engine.accountant) == 4


@pytest.mark.parametrize("take", [pickle.dumps, copy.deepcopy])
def test_what_leads_to_records_is_not_pickled(take):
    run = Run().train()
    with pytest.raises(TypeError, match="save_checkpoint"):
        take(run.engine)
    with pytest.raises(TypeError, match="must not be pickled or copied"):
        take(run.loader)


def written(run):
    run.plain.register_buffer("memory", torch.zeros(1))
    run.optimizer.step()


def other_size(run):
    for p in run.plain.parameters():
        p.grad_sample = p.grad_sample[1:]
    run.optimizer.step()


def watched(run):
    run.plain[0].weight.register_hook(lambda _: None)
    run.optimizer.step()


def broken_noise(run):
    def fail(sums, scale):
        raise RuntimeError("no entropy")

    signs = types.SimpleNamespace(add=fail, is_secure=True)
    run.optimizer._readout.noise.times = lambda _: signs
    run.optimizer.step()


def fetched_twice(run):
    next(run.batches)


@pytest.mark.parametrize(
    "refusal",
    [written, other_size, watched, broken_noise, fetched_twice],
    ids=lambda f: f.__name__,
)
def test_a_refusal_leaves_no_gradient_and_shows_no_variable(refusal):
    run = Run()
    run.batches = iter(run.loader)
    run.backward(*next(run.batches))
    assert all(p.grad is not None for p in run.plain.parameters())
    with pytest.raises(RuntimeError) as caught:
        refusal(run)
    for p in run.plain.parameters():
        assert p.grad is None
        assert p.grad_sample is None
        assert p.summed_grad is None
    assert refusal is broken_noise or not any(letter.isdigit() for letter in str(caught.value))
    if refusal is not fetched_twice:
        assert not any("tensor(" in value for _, value in shown_by(caught.value))
        run.plain[0].weight._backward_hooks = None
        with pytest.raises(BookkeepingError, match="one step"):
            run.optimizer.step()


def test_hooks_on_parameters_are_refused_by_make_private():
    model = nn.Linear(4, 2)
    model.weight.register_hook(lambda _: None)
    with pytest.raises(BookkeepingError, match="must have no hooks of their own"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
