"""What mixes the records of a batch, or those of one batch with the next, is found by value."""

import collections
import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
import transformers
from torch import nn

from lap2.train import BookkeepingError

from .helpers import DELTA, assert_bounded, assert_refused, private, rows

WIDTH, CLASSES, RECORDS, LOUD = 6, 3, 24, 5


def vectors(*, zero=()):
    """Ordinary records, and one that is large."""
    x = torch.randn(RECORDS, WIDTH, generator=torch.Generator().manual_seed(1))
    x[LOUD] *= 40
    x[list(zero)] = 0
    return x


def labels():
    return torch.arange(RECORDS) % CLASSES


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a loss, with a record that moves the release too far.

    Attributes:
        model: makes it.
        loss: makes it, and whatever it remembers.
        words: a regular expression that the refusal matches.
        record: which one.
        passes: steps, if each has all records.
        clip: chosen so that mixing shows.
        tensors: the records, if they are not the ordinary ones.
        options: of ``private``.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[], Callable[[nn.Module, Any], torch.Tensor]]
    words: str = "record"
    record: int = LOUD
    passes: int = 1
    clip: float = 1.0
    tensors: Callable[[], tuple[torch.Tensor, ...]] = lambda: (vectors(), labels())
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def data(self, drop=()):
        return rows(*self.tensors(), drop=drop)

    def run(self, drop=()):
        """Before training."""
        torch.manual_seed(0)
        return private(self.model(), self.data(drop), clip=self.clip, **self.options)


class Frozen(nn.Module):
    """A frozen layer, something done to the whole batch, and a trained layer."""

    def __init__(self, between):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head, self.between = nn.Linear(WIDTH, CLASSES), between

    def forward(self, x):
        return self.head(self.between(self.frozen(x)))


class Detached(nn.Module):
    """Two trained layers, and between them something without a gradient from other records."""

    def __init__(self, between):
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.between = between

    def forward(self, x):
        return self.head(self.between(self.first(x)))


class Early(nn.Module):
    """Something done to the inputs of the batch, before the first layer."""

    def __init__(self, before):
        super().__init__()
        self.before, self.head = before, nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.before(x))


def attended(x):
    return torch.softmax(x @ x.mT / WIDTH**0.5, dim=1) @ x


def routed(x):
    """Records beyond the capacity of their expert are left out, as mixtures of experts do."""
    expert = (x[:, :1] > 0).long()
    place = torch.where(expert == 1, expert.cumsum(0), (1 - expert).cumsum(0))
    return x * (place <= max(1, len(x) // 2 - 1))


BETWEEN = {
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "less the mean": lambda x: x - x.detach().mean(0),
    "less the median": lambda x: x - x.detach().median(0).values,
    "over the largest": lambda x: x / x.detach().abs().max(),
    "above the mean": lambda x: x * (x > x.mean(0)),
    "attention": attended,
    "ranks": lambda x: x.detach().argsort(0).argsort(0) / len(x) + 0 * x,
    "the first record": lambda x: x + x[:1].detach(),
    "the next record": lambda x: x + x.roll(-1, 0).detach(),
    "experts with a capacity": routed,
    "the number of records": lambda x: x * len(x) / 10,
}

HOLDERS = {"frozen": Frozen, "detached": Detached, "early": Early}


def of_class():
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def of_class_in_mean():
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])


def layer():
    return nn.Linear(WIDTH, CLASSES)


def mixing(holder, between, **more):
    return Case(lambda: HOLDERS[holder](BETWEEN[between]), of_class, **more)


MODELS = {
    f"{between}, {holder}": mixing(holder, between) for between in BETWEEN for holder in HOLDERS
}


SELDOM = ("over the largest", "above the mean", "the first record", "experts with a capacity")
"""Where most records are as they were without most others."""

SOON: dict[str, Any] = {"passes": 70, "steps": None}
"""Records are chosen at random: now and then, a later rehearsal is the first that shows it."""


def assert_found(name, loss):
    case = MODELS[name]
    options = SOON if name.startswith(SELDOM) else {}
    assert_refused(case.run(), loss, case.words, **options)


@pytest.mark.parametrize("name", MODELS)
def test_mixing_without_a_gradient_is_refused(name):
    assert_found(name, of_class())


@pytest.mark.parametrize("name", [name for name in MODELS if "frozen" in name])
def test_so_it_is_with_a_mean(name):
    assert_found(name, of_class_in_mean())


@pytest.mark.parametrize("pieces", [2, 5])
def test_so_it_is_in_pieces(pieces):
    case = mixing("frozen", "less the mean", options={"max_physical_batch_size": pieces})
    assert_refused(case.run(), case.loss(), case.words)


class Large(nn.Module):
    """Mixes in larger batches only."""

    def __init__(self, mix):
        super().__init__()
        self.head, self.mix = nn.Linear(WIDTH, CLASSES), mix

    def forward(self, x):
        return self.head(self.mix(x))


LARGE = {
    "from 14 records on": lambda x: x - x.mean(0) if len(x) >= 14 else x,
    "their number, from 14 on": lambda x: x * (1 + (len(x) >= 14)),
}


@pytest.mark.parametrize("pieces", [None, 14])
@pytest.mark.parametrize("name", LARGE)
def test_what_mixes_larger_batches_only_is_found_before_the_first_release(name, pieces):
    case = Case(lambda: Large(LARGE[name]), of_class, options={"max_physical_batch_size": pieces})
    assert_refused(case.run(), of_class(), case.words)


class CountsCalls(nn.Module):
    """Begins to mix after some calls."""

    def __init__(self, after):
        super().__init__()
        self.after, self.calls, self.layer = after, 0, Detached(lambda x: x)

    def forward(self, x):
        self.calls += 1
        self.layer.between = BETWEEN["less the mean"] if self.calls > self.after else lambda x: x
        return self.layer(x)


def centred(model, batch):
    return of_class()(model, (batch[0] - batch[0].mean(0), batch[1]))


def begins_to_mix(after, passes):
    """A loop that mixes when this many steps were released, and how many were when it ended."""
    run = Case(layer, of_class).run()

    def loss(model, batch):
        return (centred if run.steps >= after else of_class())(model, batch)

    assert_refused(run, loss, "record", passes=passes, steps=None)
    return run.steps


@pytest.mark.parametrize("after", [0, 1, 2, 4, 8])
def test_mixing_that_begins_later_is_refused_where_it_begins(after):
    """Just before the step of a rehearsal."""
    assert begins_to_mix(after, passes=12) == after


@pytest.mark.parametrize(("after", "rehearsed"), [(3, 4), (5, 8), (11, 16)])
def test_mixing_that_begins_between_rehearsals_is_refused_at_the_next(after, rehearsed):
    assert begins_to_mix(after, passes=20) == rehearsed


@pytest.mark.parametrize("after", [1, 2, 4, 30])
def test_mixing_after_some_calls_is_refused(after):
    case = Case(lambda: CountsCalls(after), of_class)
    run = case.run()
    with pytest.raises(RuntimeError, match=case.words):
        run.train(case.loss(), passes=70)
    assert run.steps == len(run.sums) < 2 * after


class Modes(nn.Module):
    """Mixes in one of its modes only."""

    def __init__(self):
        super().__init__()
        self.part, self.layer = nn.Identity(), Detached(lambda x: x)

    def forward(self, x):
        x = self.layer(x)
        return x if self.part.training else x - x.detach().mean(0)


def test_a_change_of_mode_is_rehearsed_before_the_next_release():
    run = Case(Modes, of_class).run()
    run.train(of_class(), passes=3)
    run.model.part.eval()
    assert_refused(run, of_class(), "record", steps=3)


def test_a_change_of_structure_is_rehearsed_before_the_next_release():
    run = Case(lambda: Early(nn.Identity()), of_class).run()
    run.train(of_class(), passes=3)
    run.model.before = nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False)
    assert_refused(run, of_class(), r"record|BatchNorm", steps=3)


class Lengths(torch.utils.data.Dataset):
    """Texts of different lengths."""

    def __init__(self, drop=()):
        maker = torch.Generator().manual_seed(2)
        sizes = [3 + i % 5 for i in range(RECORDS)]
        sizes[LOUD] = 400
        texts = [torch.randn(size, WIDTH, generator=maker) for size in sizes]
        self.texts = [text for i, text in enumerate(texts) if i not in drop]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return self.texts[i]


class Pools(nn.Module):
    """Means over the positions, of which padding is one or is none."""

    def __init__(self, *, masked):
        super().__init__()
        self.layer, self.head, self.masked = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), masked

    def forward(self, x, mask):
        counted = mask if self.masked else torch.ones_like(mask)
        h = torch.tanh(self.layer(x)) * counted[:, :, None]
        return self.head(h.sum(1) / counted.sum(1, keepdim=True))[:, 0]


def padded(texts):
    """To the longest in the batch."""
    mask = [torch.ones(len(text)) for text in texts]
    return [nn.utils.rnn.pad_sequence(part, batch_first=True) for part in (texts, mask)]


def of_texts(model, batch):
    return 10 * (model(*batch) - 3).square()


def texts(*, masked, drop=(), **options):
    torch.manual_seed(0)
    return private(Pools(masked=masked), Lengths(drop), collate_fn=padded, **options)


def test_padding_that_counts_is_refused():
    run = texts(masked=False)
    assert_refused(run, of_texts, r"record|padd", **SOON)


@pytest.mark.parametrize("pieces", [None, 1, 4])
def test_padding_that_does_not_count_is_bounded(pieces):
    def run(drop):
        options = {"max_physical_batch_size": pieces}
        return texts(masked=True, drop=drop, **options).train(of_texts, passes=3)

    assert assert_bounded(run, [], [LOUD]) > 0.5


class NotANumber(nn.Module):
    """A record of zeros has no gradient; the others are mixed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x):
        h = self.layer(x)
        return h - h.mean(0), h.square().sum(1).sqrt()


def of_both(model, batch):
    centred, size = model(batch[0])
    return centred.square().sum(1) + size


@pytest.mark.parametrize(("zeros", "steps"), [(1, 0), (4, 0), (18, None)])
def test_a_gradient_that_is_no_number_does_not_switch_the_check_off(zeros, steps):
    """Where most have none, a rehearsal may find too few to compare."""
    zero = [i for i in range(RECORDS) if i != LOUD][:zeros]
    case = Case(NotANumber, lambda: of_both, tensors=lambda: (vectors(zero=zero), labels()))
    assert_refused(case.run(), of_both, case.words, passes=70, steps=steps)


def spoilt(model, batch):
    """If one record's loss is not finite, nobody's is: so are sums, and checks for NaN."""
    losses = of_class()(model, (batch[0] / batch[0].norm(dim=1, keepdim=True), batch[1]))
    return losses * (1 + 0 * losses.detach().sum())


def left_out(model, batch):
    """If one record's loss is not finite, nobody learns anything."""
    losses = of_class()(model, (batch[0] / batch[0].norm(dim=1, keepdim=True), batch[1]))
    return losses * bool(losses.isfinite().all())


@pytest.mark.parametrize("loss", [spoilt, left_out])
def test_a_record_without_a_gradient_that_spoils_all_others_is_refused(loss):
    """Alone it moves the release by what all others together contribute."""
    case = Case(layer, of_class, tensors=lambda: (vectors(zero=[1]), labels()))
    assert_refused(case.run(), loss, "record", steps=None, passes=70)


def test_records_without_a_gradient_are_left_out_alone():
    """An honest model with such records trains, and they contribute nothing."""

    class Honest(NotANumber):
        def forward(self, x):
            h = self.layer(x)
            return h, h.square().sum(1).sqrt()

    def run(drop):
        torch.manual_seed(0)
        data = rows(vectors(zero=[0, 1]), labels(), drop=drop)
        return private(Honest(), data).train(of_both, passes=3)

    assert_bounded(run, [], [LOUD])
    assert run([]).engine.skipped_examples == 2 * 3
    assert float((run([]).sums[0] - run([0, 1]).sums[0]).norm()) < 1e-6


# What remembers


def remembering_loss():
    memory = [torch.zeros(CLASSES)]

    def loss(model, batch):
        scores = model(batch[0])
        losses = (scores - memory[0]).square().sum(1)
        memory[0] = scores.detach().mean(0)
        return losses

    return loss


def normalising_loss():
    """Divides by a running mean of the losses."""
    mean = [1.0]

    def loss(model, batch):
        losses = of_class()(model, batch)
        mean[0] = 0.5 * mean[0] + 0.5 * float(losses.detach().mean())
        return losses / mean[0]

    return loss


class Remembers(nn.Module):
    """Has the last batch in an attribute, which is no buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, CLASSES), torch.zeros(WIDTH)

    def forward(self, x):
        last, self.last = self.last, x.detach().mean(0)
        return self.layer(x - last)


class Queue(nn.Module):
    """Contrasts with the records of earlier batches."""

    def __init__(self):
        super().__init__()
        self.layer, self.queue = nn.Linear(WIDTH, CLASSES), collections.deque(maxlen=4)

    def forward(self, x):
        h = self.layer(x)
        for earlier in self.queue:
            h = h + 0.1 * earlier
        self.queue.append(h.detach().mean(0))
        return h


MEMORIES = {
    "in the loss": Case(lambda: nn.Linear(WIDTH, CLASSES), remembering_loss, passes=3),
    "of the loss": Case(lambda: nn.Linear(WIDTH, CLASSES), normalising_loss, passes=3),
    "in an attribute": Case(Remembers, of_class, passes=3),
    "in a queue": Case(Queue, of_class, passes=3),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_a_memory_of_earlier_batches_is_refused(name):
    case = MEMORIES[name]
    assert_refused(case.run(), case.loss(), case.words, passes=case.passes)


def test_a_learning_rate_that_follows_the_loss_is_warned_of():
    run = Case(layer, of_class).run()
    _scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer)
    with pytest.warns(UserWarning, match="ReduceLROnPlateau"):
        run.train(of_class())


def test_the_statement_says_what_no_check_sees():
    run = Case(lambda: nn.Linear(WIDTH, CLASSES), of_class).run().train(of_class())
    said = " ".join(run.engine.statement(DELTA).assumptions)
    assert re.search("released", said)
    assert re.search("record", said)
    assert "rounding of sums does not matter" not in said


# Losses

WEIGHT = torch.tensor([0.1, 100.0, 1.0])
"""Of the classes."""


def weighted():
    """Divided by the sum of the weights of all labels."""
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], WEIGHT)


def summed():
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def over_positives():
    """As detectors are trained: divided by the number of records of a class."""

    def loss(model, batch):
        found = F.binary_cross_entropy_with_logits(
            model(batch[0])[:, 0], (batch[1] == 0).float(), reduction="sum"
        )
        return found / (batch[1] == 0).sum().clamp(min=1)

    return loss


def hardest():
    """The mean of the larger half of the losses."""

    def loss(model, batch):
        losses = of_class()(model, batch)
        return losses.topk((len(losses) + 1) // 2).values.mean()

    return loss


def mixed_up():
    """Each record with the next one."""

    def loss(model, batch):
        x, y = batch
        scores = model(0.5 * x + 0.5 * x.roll(1, 0))
        return F.cross_entropy(scores, y) + F.cross_entropy(scores, y.roll(1, 0))

    return loss


def contrastive():
    def loss(model, batch):
        h = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(5 * h @ h.mT, torch.arange(len(h)))

    return loss


def variance():
    """The mean loss and how much the records' losses differ."""

    def loss(model, batch):
        losses = of_class()(model, batch)
        return losses.mean() + losses.var(correction=0)

    return loss


def alike():
    """Records of nearly the same gradient, and one of the opposite one."""
    x = 0.5 + 0.1 * torch.randn(RECORDS, WIDTH, generator=torch.Generator().manual_seed(4))
    y = torch.zeros(RECORDS, dtype=torch.long)
    y[::2] = 2
    x[LOUD], y[LOUD] = 20, 1
    return x, y


def unclipped(loss, clip, **more):
    return Case(layer, loss, clip=clip, tensors=alike, **more)


def over_halves(model, batch):
    """The mean of the means of two halves, which are not alike if the number is odd."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return torch.stack([half.mean() for half in losses.chunk(2)]).mean()


LOSSES = {
    "over halves": unclipped(lambda: over_halves, 1.0),
    "weights of classes": unclipped(weighted, 1.0),
    "over positives": unclipped(over_positives, 1.0),
    "sum as mean": unclipped(summed, 30.0, words="mean|record"),
    "mean as sum": unclipped(
        of_class_in_mean, 0.05, words="sum|record", options={"loss_reduction": "sum"}
    ),
    "hardest half": Case(layer, hardest),
    "mixed up": unclipped(mixed_up, 1.0),
    "contrastive": unclipped(contrastive, 1.0),
    "variance": unclipped(variance, 1.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_no_means_of_records_are_refused(name):
    case = LOSSES[name]
    assert_refused(case.run(), case.loss(), case.words, **SOON)


def each_mixed_up(model, batch):
    return of_class()(model, (batch[0] + batch[0].roll(1, 0), batch[1]))


def each_over_their_mean(model, batch):
    losses = of_class()(model, batch)
    return losses / losses.detach().mean()


def each_over_their_number(model, batch):
    return of_class()(model, batch) / len(batch[0])


def each_over_the_sum_of_weights(model, batch):
    losses = F.cross_entropy(model(batch[0]), batch[1], WEIGHT, reduction="none")
    return losses / WEIGHT[batch[1]].sum()


EACH = {
    "mixed up": unclipped(lambda: each_mixed_up, 1.0),
    "over their mean": unclipped(lambda: each_over_their_mean, 1.0),
    "over their number": unclipped(lambda: each_over_their_number, 0.05),
    "over the sum of weights": unclipped(lambda: each_over_the_sum_of_weights, 0.1),
}


@pytest.mark.parametrize("name", EACH)
def test_so_are_losses_of_records_that_depend_on_others(name):
    case = EACH[name]
    assert_refused(case.run(), case.loss(), case.words, **SOON)


CLIPPED = {
    f"{name}, {kind}": case
    for kind, cases in (("mean", LOSSES), ("each", EACH))
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CLIPPED)
def test_they_are_though_every_record_is_clipped(name):
    """Gradients shrink as training goes on: later they are not, with no rehearsal in between."""
    case = dataclasses.replace(CLIPPED[name], clip=1e-4)
    assert_refused(case.run(), case.loss(), case.words, **SOON)


def augmented(loss):
    """The same with random changes of the records in the loop."""

    def changed(model, batch):
        x, y = batch
        return loss(model, (x + 0.01 * torch.randn_like(x), y))

    return changed


RANDOM = {
    **{name: LOSSES[name] for name in ("weights of classes", "sum as mean", "variance")},
    **{name: EACH[name] for name in ("over their number", "over the sum of weights")},
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_in_the_loop_hide_nothing(name):
    case = RANDOM[name]
    assert_refused(case.run(), augmented(case.loss()), case.words, **SOON)


BRANCHES = {
    "often": lambda: torch.rand(1) < 0.9,
    "one in two": lambda: torch.rand(()) < 0.5,
    "the other half": lambda: torch.rand(1).item() >= 0.5,
    "one in ten": lambda: torch.rand(1) < 0.1,
    "the last tenth": lambda: torch.rand(()) > 0.9,
    "normal": lambda: torch.randn(()) > 0.5,
    "bernoulli": lambda: torch.bernoulli(torch.tensor(0.2)).bool(),
    "uniform": lambda: torch.empty(1).uniform_(-1, 1) < -0.8,
}


@pytest.mark.parametrize("mix", [lambda x: x + x.roll(1, 0), lambda x: x - x.mean(0)])
@pytest.mark.parametrize("name", BRANCHES)
def test_what_happens_to_the_batch_at_random_is_found_before_the_first_release(name, mix):
    """As augmentations of whole batches do: fixed values must not always be the same."""

    def loss(model, batch):
        x, y = batch
        return of_class()(model, (mix(x) if BRANCHES[name]() else x, y))

    assert_refused(Case(layer, of_class).run(), loss, "record")


@pytest.mark.parametrize("draw", [random.random, lambda: int(torch.randint(4, ())) / 4])
def test_so_it_is_sooner_or_later_where_values_cannot_be_fixed(draw):
    def loss(model, batch):
        x, y = batch
        return of_class()(model, (x - x.mean(0) if draw() < 0.75 else x, y))

    assert_refused(Case(layer, of_class).run(), loss, "record", steps=None, passes=1 << 9)


@pytest.mark.parametrize("case", [LOSSES["sum as mean"], EACH["over their number"]])
def test_what_random_numbers_of_numpy_hide_is_said(case):
    """They cannot be fixed, so that batches of other sizes cannot be compared."""
    loss = case.loss()

    def changed(model, batch):
        noise = np.random.normal(scale=0.01, size=tuple(batch[0].shape))  # noqa: NPY002
        return loss(model, (batch[0] + torch.from_numpy(noise).float(), batch[1]))

    run = case.run()
    try:
        run.train(changed, passes=3)
    except BookkeepingError:
        assert run.steps == len(run.sums)
    else:
        caveats = run.engine.statement(DELTA).caveats
        assert any(re.search("check|compare|rehears", caveat) for caveat in caveats)


@pytest.mark.parametrize("after", [1, 4])
def test_a_loop_that_goes_on_after_errors_releases_nothing_more(after):
    """As loops do that skip batches too large for the memory."""
    run, errors = Case(layer, of_class).run(), 0
    for batch in (batch for _ in range(12) for batch in run.loader):
        loss = centred if run.steps >= after else of_class()
        try:
            run.engine.backward(loss(run.model, batch))
            run.optimizer.step()
        except RuntimeError:
            errors += 1
    assert errors
    assert run.steps == len(run.sums) == after


def test_weights_of_classes_and_label_smoothing_are_each_records_own():
    def loss(model, batch):
        scores, y = model(batch[0]), batch[1]
        return F.cross_entropy(scores, y, WEIGHT, reduction="none", label_smoothing=0.1)

    def run(drop):
        torch.manual_seed(0)
        return private(layer(), rows(*alike(), drop=drop)).train(loss, passes=3)

    for record in (0, LOUD):
        assert assert_bounded(run, [], [record]) > 0.5


@pytest.mark.parametrize(
    "losses",
    [
        lambda x: x.mean(),
        lambda x: x[:, None],
        lambda x: x.repeat(2),
        lambda x: x[:-1],
        lambda x: x.tolist(),
        lambda x: x.detach(),
    ],
)
def test_losses_must_be_one_for_each_record(losses):
    run = Case(layer, of_class).run()
    batch = next(iter(run.loader))
    found = losses(of_class()(run.model, batch))
    with pytest.raises((TypeError, ValueError, RuntimeError), match="losses"):
        run.engine.backward(found)
    assert run.steps == 0


# Means over tokens

VOCABULARY, LENGTH = 11, 40


def language_model():
    settings = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": VOCABULARY}
    settings |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": LENGTH}
    config = transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def tokens():
    """Texts of which one to three tokens count, and one of which all do."""
    maker = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (1, LENGTH), generator=maker).repeat(RECORDS, 1)
    targets = ids.clone()
    for i in range(RECORDS):
        targets[i, 2 + i % 3 :] = -100
    targets[LOUD] = ids[LOUD]
    return ids, targets


def logits_of(model, batch):
    return model(input_ids=batch[0]).logits[:, :-1], batch[1][:, 1:]


def over_tokens():
    def loss(model, batch):
        logits, targets = logits_of(model, batch)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return loss


def over_smoothed_tokens():
    def loss(model, batch):
        logits, targets = logits_of(model, batch)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)

    return loss


def over_number_of_items():
    def loss(model, batch):
        logits, targets = logits_of(model, batch)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / (targets != -100).sum()

    return loss


def models_own():
    return lambda model, batch: model(input_ids=batch[0], labels=batch[1]).loss


def models_own_with_number():
    return lambda model, batch: (
        model(
            input_ids=batch[0], labels=batch[1], num_items_in_batch=(batch[1][:, 1:] != -100).sum()
        ).loss
    )


TOKENS = {
    "plain": over_tokens,
    "smoothed": over_smoothed_tokens,
    "number of items": over_number_of_items,
    "the model's own": models_own,
    "the model's own, with their number": models_own_with_number,
}


@pytest.mark.parametrize("clip", [4.0, 1e-4])
@pytest.mark.parametrize("name", TOKENS)
def test_means_over_the_tokens_of_a_batch_are_refused(name, clip):
    torch.manual_seed(0)
    run = private(language_model(), rows(*tokens()), clip=clip)
    with pytest.raises((RuntimeError, ValueError), match=r"record|label|example"):
        run.train(TOKENS[name]())
    assert run.steps == len(run.sums) == 0


class MasksWords:
    """As a collate function for masked language models does."""

    def __call__(self, items):
        ids = torch.stack([item[0] for item in items])
        chosen = torch.rand(ids.shape) < 0.3
        return ids.masked_fill(chosen, 0), ids.masked_fill(~chosen, -100)


@pytest.mark.parametrize("where", ["collate", "loop"])
def test_a_mean_over_words_masked_at_random_is_refused(where):
    torch.manual_seed(0)
    masks = MasksWords()
    options = {"collate_fn": masks} if where == "collate" else {}
    ids = torch.randint(1, VOCABULARY, (RECORDS, 8))

    def loss(model, batch):
        batch = batch if where == "collate" else masks([(row,) for row in batch[0]])
        return over_tokens()(model, batch)

    run = private(language_model(), rows(ids), clip=20.0, **options)
    assert_refused(run, loss, "record", **SOON)


def of_tokens(model, batch):
    logits, targets = logits_of(model, batch)
    each = F.cross_entropy(logits.mT, targets, reduction="none")
    return each.sum(1) / (targets != -100).sum(1).clamp(min=1)


def test_each_texts_own_mean_is_bounded():
    def run(drop):
        torch.manual_seed(0)
        return private(language_model(), rows(*tokens(), drop=drop)).train(of_tokens, passes=2)

    assert_bounded(run, [], [LOUD])


def test_the_models_own_mean_over_as_many_tokens_of_each_record_is_allowed():
    ids, _ = tokens()

    def run(drop):
        torch.manual_seed(0)
        return private(language_model(), rows(ids, ids, drop=drop)).train(models_own(), passes=2)

    assert_bounded(run, [], [LOUD])
