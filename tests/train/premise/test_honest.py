"""Ordinary training is not refused, and rehearsals leave no trace in it."""

import importlib.util
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
import transformers
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from lap2.train import PrivacyEngine

from .helpers import private, rows, train

WIDTH, CLASSES, RECORDS, VOCABULARY = 8, 3, 20, 30


@pytest.fixture(scope="module")
def zoo():
    """The models of the benchmark."""
    path = Path(__file__).parents[3] / "benchmarks" / "honest_zoo.py"
    spec = importlib.util.spec_from_file_location("honest_zoo", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(before)
    del sys.modules[spec.name]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "lora", "timm", "cnn", "encoder"])
def test_ordinary_models_train_in_every_precision(zoo, timm, name, precision):
    found = zoo.measure(zoo.CASES[name], zoo.PRECISIONS[precision], seeds=1)
    assert found.runs == 1
    assert not found.refused, found.reason


def vectors(count=RECORDS):
    maker = torch.Generator().manual_seed(1)
    return rows(torch.randn(count, WIDTH, generator=maker), torch.arange(count) % CLASSES)


def of_class(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - as users of it do
    random.seed(seed)


def assert_trains(make, data, loss, *, passes=5, seeds=2, optimizer=torch.optim.SGD, **options):
    """It trains, and as it would without rehearsals: releases, weights and random numbers."""
    for seed in range(seeds):
        runs, drawn = [], []
        for rehearse in (True, False):
            seed_all(seed)
            model = make()
            given = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.01)
            run = private(model, data(), optimizer=given, rehearse=rehearse, **options)
            run.train(loss, passes=passes)
            assert run.steps == len(run.sums) == passes * len(run.loader)
            runs.append(run)
            drawn.append((torch.rand(()), np.random.random(), random.random()))  # noqa: NPY002
        one, other = runs
        if one.loader.piece.total == len(one.loader.dataset):  # else the samples are others
            assert all(torch.equal(a, b) for a, b in zip(one.sums, other.sums, strict=True))
            torch.testing.assert_close(
                one.model.state_dict(), other.model.state_dict(), rtol=0, atol=0
            )
            assert drawn[0] == drawn[1]


class Residual(nn.Module):
    """A layer with some randomness in it."""

    def __init__(self, change):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.change = change

    def forward(self, x):
        return self.second(x + self.change(torch.tanh(self.first(x))))


def path_dropped(h):
    """Whole branches of some records, as in stochastic depth."""
    return h * torch.bernoulli(torch.full((len(h), 1), 0.7)) / 0.7


def noised(h):
    return h + 0.3 * torch.randn_like(h)


def noised_by_numpy(h):
    return h + torch.from_numpy(np.random.normal(size=tuple(h.shape))).float()  # noqa: NPY002


def layer_dropped(h):
    """The same branch for all records, by another library's random numbers."""
    return h * (random.random() < 0.7)


def gated(h):
    return h * F.gumbel_softmax(h, dim=1)


RANDOM = {
    "dropout": nn.Dropout(0.4),
    "alpha dropout": nn.AlphaDropout(0.4),
    "stochastic depth": path_dropped,
    "noise": noised,
    "noise of numpy": noised_by_numpy,
    "layer drop": layer_dropped,
    "gumbel": gated,
    "leaky": nn.RReLU(),
}


@pytest.mark.parametrize("pieces", [None, 4])
@pytest.mark.parametrize("name", RANDOM)
def test_randomness_in_the_model(name, pieces):
    assert_trains(lambda: Residual(RANDOM[name]), vectors, of_class, max_physical_batch_size=pieces)


def augmented_loss(model, batch):
    """Random flips and noise in the loop itself."""
    x = torch.where(torch.rand(len(batch[0]), 1) < 0.5, batch[0], batch[0].flip(1))
    return of_class(model, (x + 0.1 * torch.randn_like(x), batch[1]))


def test_randomness_in_the_loop():
    assert_trains(lambda: Residual(nn.Identity()), vectors, augmented_loss)


class Augmented(Dataset):
    """Each record is changed at random whenever it is read."""

    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        x, y = vectors()[i]
        if random.random() < 0.5:
            x = x.flip(0)
        return x + 0.1 * torch.randn(WIDTH) + float(np.random.normal()), y  # noqa: NPY002


@pytest.mark.parametrize("workers", [0, 1])
def test_randomness_in_the_data_set(workers):
    assert_trains(
        lambda: Residual(nn.Dropout(0.2)),
        Augmented,
        of_class,
        num_workers=workers,
        seeds=1 if workers else 4,
        passes=2 if workers else 5,
    )


class Texts(Dataset):
    """Token ids of different lengths."""

    def __init__(self):
        maker = torch.Generator().manual_seed(2)
        lengths = torch.randint(3, 10, (RECORDS,), generator=maker).tolist()
        self.items = [torch.randint(2, VOCABULARY, (n,), generator=maker) for n in lengths]

    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        return {"input_ids": self.items[i], "label": i % CLASSES}


@dataclass
class Pads:
    """To the longest of the batch, and masks some tokens at random."""

    masking: float = 0.0

    def __call__(self, items):
        ids = nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], batch_first=True)
        mask, labels = (ids > 0).long(), torch.tensor([item["label"] for item in items])
        found = {"input_ids": ids, "attention_mask": mask, "label": labels}
        if self.masking:
            chosen = torch.bernoulli(torch.full(ids.shape, self.masking)).bool() & (mask > 0)
            found["target"] = ids.masked_fill(~chosen, -100)
            found["input_ids"] = ids.masked_fill(chosen, 1)
        return transformers.BatchEncoding(found)


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": WIDTH,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
}


def bert(**more):
    config = transformers.BertConfig(**SMALL | more)
    return transformers.BertForSequenceClassification(config).train()


def masked_bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)).train()


def gpt2():
    settings = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 16}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings, **tokens)).train()


def checkpointed():
    model = gpt2()
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


def inputs(batch):
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def of_text(model, batch):
    logits = model(**inputs(batch)).logits
    return F.cross_entropy(logits, batch["label"], reduction="none")


def own_mean_of_text(model, batch):
    return model(**inputs(batch), labels=batch["label"]).loss


def of_masked_words(model, batch):
    each = F.cross_entropy(model(**inputs(batch)).logits.mT, batch["target"], reduction="none")
    return each.sum(1) / (batch["target"] != -100).sum(1).clamp(min=1)


def of_next_word(model, batch):
    each = F.cross_entropy(
        model(**inputs(batch)).logits[:, :-1].mT, batch["input_ids"][:, 1:], reduction="none"
    )
    counted = batch["attention_mask"][:, 1:]
    return (each * counted).sum(1) / counted.sum(1)


TEXTS = {
    "bert": (bert, of_text, 0.0),
    "bert, its own loss": (bert, own_mean_of_text, 0.0),
    "bert, masked words": (masked_bert, of_masked_words, 0.3),
    "gpt2": (gpt2, of_next_word, 0.0),
    "gpt2, checkpointed": (checkpointed, of_next_word, 0.0),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_are_padded_to_the_longest_and_masked(name):
    make, loss, masking = TEXTS[name]
    assert_trains(
        make, Texts, loss, collate_fn=Pads(masking), optimizer=torch.optim.AdamW, passes=3
    )


@pytest.mark.parametrize("pieces", [1, 4])
def test_texts_in_pieces(pieces):
    options = {"max_physical_batch_size": pieces, "seeds": 1, "passes": 3}
    assert_trains(bert, Texts, of_text, collate_fn=Pads(), **options)


def test_texts_from_a_worker():
    options = {"num_workers": 1, "seeds": 1, "passes": 2}
    assert_trains(masked_bert, Texts, of_masked_words, collate_fn=Pads(0.3), **options)


class Checkpointed(nn.Module):
    """Computes its middle twice, with the same dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh())

    def forward(self, x):
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=False))


class Tied(nn.Module):
    """Words in and out through one table."""

    def __init__(self):
        super().__init__()
        self.words, self.middle = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(torch.tanh(self.middle(x + self.words((x[:, 0] > 0).long()))))


class Token(nn.Module):
    """A parameter that is broadcast over the batch."""

    def __init__(self):
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.randn(1, WIDTH)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.layer(x + self.token)


class Own(nn.Module):
    """A parameter that no rule knows."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return (x * torch.sin(self.gain))[:, :CLASSES]


ARCHITECTURES = {
    "checkpointed": Checkpointed,
    "tied": Tied,
    "token": Token,
    "own": Own,
    "frozen below": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    ),
    "in evaluation mode within": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5).eval(), nn.Linear(WIDTH, CLASSES)
    ),
    "a part without a gradient": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Threshold(1e9, 0.0), nn.Linear(WIDTH, CLASSES)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name):
    assert_trains(ARCHITECTURES[name], vectors, of_class, optimizer=torch.optim.AdamW)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_as_it_always_was(reduction):
    assert_trains(
        lambda: Residual(nn.Dropout(0.2)),
        vectors,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction=reduction),
        loss_reduction=reduction,
    )


@pytest.mark.parametrize("pieces", [None, 1, 2, 4])
def test_pieces_release_what_the_whole_batch_does(pieces):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    run = private(model, vectors(), max_physical_batch_size=pieces).train(of_class, passes=3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    whole = private(model, vectors(), rehearse=False).train(of_class, passes=3)
    for one, other in zip(run.sums, whole.sums, strict=True):
        assert float((one - other).norm()) < 1e-4


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("batch_size", [1, None])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_data_sets_of_few_records(count, batch_size, reduction):
    for seed in range(2):
        torch.manual_seed(seed)
        run = private(nn.Linear(WIDTH, CLASSES), vectors(count), batch_size=batch_size)
        run.train(
            lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction=reduction),
            passes=6,
        )
        assert run.steps == len(run.sums) == 6 * len(run.loader)


class Places(nn.Module):
    """Positions are looked up once for all records."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, index):
        return self.head((self.words(index) + self.places(torch.arange(index.shape[1]))).mean(1))


@pytest.mark.parametrize("length", range(1, 10))
def test_texts_as_long_as_a_rehearsal_has_records(length):
    index = torch.randint(VOCABULARY, (RECORDS, length))
    assert_trains(Places, lambda: rows(index, torch.arange(RECORDS) % CLASSES), of_class, seeds=1)


def test_samples_of_all_sizes():
    """Ordinary Poisson batches, empty ones among them, over many steps and rehearsals."""
    for seed in range(3):
        torch.manual_seed(seed)
        run = private(Residual(nn.Dropout(0.3)), vectors(), batch_size=2, lr=0.05)
        run.train(of_class, passes=5)
        assert run.steps == len(run.sums) == 50


def test_records_that_are_all_the_same():
    x = torch.randn(1, WIDTH).expand(RECORDS, -1).contiguous()
    y = torch.zeros(RECORDS, dtype=torch.long)
    assert_trains(lambda: Residual(nn.Dropout(0.1)), lambda: rows(x, y), of_class)


@pytest.mark.parametrize("size", [1e-12, 1e-4, 1e4, 1e12])
def test_records_of_any_size(size):
    data = lambda: rows(size * vectors().tensors[0], vectors().tensors[1])  # noqa: E731
    assert_trains(lambda: nn.Linear(WIDTH, CLASSES), data, of_class, seeds=2)


def test_gradients_that_vanish():
    """Losses that cannot become smaller, for most records exactly."""

    def loss(model, batch):
        return (model(batch[0])[:, 0] - 2).clamp(min=0)

    assert_trains(lambda: nn.Linear(WIDTH, CLASSES), vectors, loss)


def evaluates(model, batch):
    """In between, and back to training."""
    model.eval()
    with torch.no_grad():
        model(batch[0][:1])
    model.train()
    return of_class(model, batch)


def calls_twice(model, batch):
    """Two views of each record."""
    return of_class(model, batch) + of_class(model, (batch[0].flip(1), batch[1]))


def calls_once_too_often(model, batch):
    """For a number to be shown, without a gradient being asked for."""
    losses = of_class(model, batch)
    assert model(batch[0]).requires_grad
    return losses


@pytest.mark.parametrize("loss", [evaluates, calls_twice, calls_once_too_often])
def test_models_that_are_called_more_than_once(loss):
    assert_trains(lambda: Residual(nn.Dropout(0.2)), vectors, loss)


def test_losses_in_two_parts():
    torch.manual_seed(0)
    run = private(Residual(nn.Dropout(0.2)), vectors())
    for batch in (batch for _ in range(5) for batch in run.loader):
        scores = run.model(batch[0])
        run.engine.backward(scores.square().sum(1))
        run.engine.backward(F.cross_entropy(run.model(batch[0]), batch[1], reduction="none"))
        run.optimizer.step()
    assert run.steps == len(run.sums) == 5


class OfWorkers(Dataset):
    """Opens its file in each worker, and can be read there only."""

    def __init__(self):
        self.file = None

    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        return self.file[i]


def opens(_worker):
    torch.utils.data.get_worker_info().dataset.file = vectors()


def test_a_data_set_that_only_workers_can_read():
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(OfWorkers(), RECORDS, num_workers=1, worker_init_fn=opens)
    run = private(nn.Linear(WIDTH, CLASSES), loader).train(of_class, passes=2)
    assert run.steps == len(run.sums) == 2


@pytest.mark.parametrize("length", [1, 2])
def test_a_loop_that_takes_as_many_batches_as_the_loader_is_long(length):
    """It makes progress, though a pass may end within a rehearsal."""
    run = private(nn.Linear(WIDTH, CLASSES), vectors(), batch_size=RECORDS // length)
    for _ in range(32):
        batches = iter(run.loader)
        for _ in range(len(run.loader)):
            batch = next(batches)
            run.engine.backward(of_class(run.model, batch))
            run.optimizer.step()
    assert run.steps == len(run.sums) > 1


def one_cycle(optimizer, steps):
    """It refuses to be stepped more often than it was told."""
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps + 1)


def warmed_up(optimizer, steps):
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    then = lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[3])


def chained(optimizer, _):
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.ConstantLR(optimizer, 0.5)]
    return lr_scheduler.ChainedScheduler(parts)


SCHEDULERS = {
    "step": lambda optimizer, _: lr_scheduler.StepLR(optimizer, 2),
    "lambda": lambda optimizer, _: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cyclic": lambda optimizer, _: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "restarts": lambda optimizer, _: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "one cycle": one_cycle,
    "warmed up": warmed_up,
    "chained": chained,
    "plateau": lambda optimizer, _: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "hugging face": lambda optimizer, steps: transformers.get_linear_schedule_with_warmup(
        optimizer, 2, steps
    ),
}


@pytest.mark.filterwarnings("ignore:a ReduceLROnPlateau:UserWarning")
@pytest.mark.parametrize(("before", "pieces"), [(True, None), (False, 8)])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_are_not_advanced_by_rehearsals(name, pieces, before):
    """Stepped after each optimizer step, and then only where there was one."""
    steps, rates, states = 10, [], []
    for rehearse in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, CLASSES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer, steps) if before else None
        run = private(
            model, vectors(), optimizer=optimizer, rehearse=rehearse, max_physical_batch_size=pieces
        )
        scheduler = scheduler or SCHEDULERS[name](optimizer, steps)
        seen = []
        for _ in range(steps):
            for batch in run.loader:
                optimizer.zero_grad()
                run.engine.backward(of_class(run.model, batch))
                optimizer.step()
                if run.loader.piece.rehearsal is not None or run.loader.ends_batch:
                    scheduler.step(*([1.0] if name == "plateau" else []))
                if run.loader.ends_batch:
                    seen.append([group["lr"] for group in optimizer.param_groups])
        rates.append(seen)
        states.append({k: v for k, v in scheduler.state_dict().items() if "lambda" not in k})
    assert rates[0] == rates[1]
    assert len({tuple(rate) for rate in rates[0]}) > 1
    if name not in {"warmed up", "chained"}:  # whose states hold the parts themselves
        assert states[0] == states[1]


def test_a_scheduler_made_after_some_epochs_is_not_advanced_either():
    torch.manual_seed(0)
    run = private(nn.Linear(WIDTH, CLASSES), vectors(), lr=0.1).train(of_class, passes=3)
    scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    for _ in range(6):
        for batch in run.loader:
            run.engine.backward(of_class(run.model, batch))
            run.optimizer.step()
            scheduler.step()
    assert run.steps == 9
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 2**6)


def test_a_run_with_secure_noise_is_a_guarantee():
    torch.manual_seed(0)
    model, engine = Residual(nn.Dropout(0.1)), PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(vectors(), 5),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    train(engine, model, optimizer, loader, of_class, passes=2)
    found = engine.statement(1e-5)
    assert found.is_guarantee
    assert not found.caveats
    assert 0 < found.rounding <= 1e-3
    assert found.steps == 8
