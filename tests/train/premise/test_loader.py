"""A step takes the sample that the accountant believes it takes, and nothing else."""

import collections
import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
import transformers
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lap2.interop.opacus import PrivacyEngine as OpacusEngine
from lap2.train import BookkeepingError, PoissonLoader, PrivacyEngine

from .helpers import moved, private, refusal, rows, train

WIDTH, RECORDS = 4, 12
AT_A_TIME = "one batch at a time"


def records(drop=()):
    return rows(torch.randn(RECORDS, WIDTH, generator=torch.Generator().manual_seed(0)), drop=drop)


def made(data=None, **options):
    torch.manual_seed(0)
    return private(nn.Linear(WIDTH, 2), data or records(), **options)


def of_squares(model, batch):
    return 10 * model(batch[0]).square().sum(1)


# Pieces and steps


@pytest.mark.parametrize("rehearse", [True, False])
@pytest.mark.parametrize("pieces", [None, 1, 4])
def test_two_pieces_for_one_step_are_refused(pieces, rehearse):
    run = made(batch_size=4, max_physical_batch_size=pieces, rehearse=rehearse)
    with refusal(run, AT_A_TIME):
        batches = iter(run.loader)
        for _ in range(10):
            for _ in range(2):
                run.engine.backward(of_squares(run.model, next(batches)))
            run.optimizer.step()


def ahead(loader):
    """As wrappers do that must know which batch is the last."""
    batches = iter(loader)
    current = next(batches)
    for following in batches:
        yield current
        current = following
    yield current


@pytest.mark.parametrize("rehearse", [True, False])
@pytest.mark.parametrize("pieces", [None, 1, 2, 4])
def test_a_wrapper_that_fetches_ahead_is_refused(pieces, rehearse):
    run = made(max_physical_batch_size=pieces, rehearse=rehearse, batch_size=4)
    with refusal(run, AT_A_TIME):
        train(run.engine, run.model, run.optimizer, ahead(run.loader), of_squares)


@pytest.mark.parametrize("pieces", [None, 1, 2, 4])
def test_accelerate_trains_on_what_is_accounted_or_not_at_all(pieces):
    def run(drop):
        found = made(records(drop), max_physical_batch_size=pieces)
        wrapper = accelerate.Accelerator(cpu=True)
        loader, optimizer = wrapper.prepare(found.loader, found.optimizer)
        train(found.engine, found.model, optimizer, loader, of_squares, passes=3)
        return found

    try:
        one, other = run([]), run([3])
    except (BookkeepingError, TypeError, ValueError) as error:
        assert re.search(f"{AT_A_TIME}|wrap|prepare", str(error))  # noqa: PT017 - either is right
        return
    assert one.steps == 3
    assert moved(one, other) <= 1 + one.rounding


@pytest.mark.parametrize("pieces", [None, 4])
def test_accumulating_over_batches_is_refused(pieces):
    """The sample of a step is one batch; the others would be lost."""
    run = made(batch_size=4, max_physical_batch_size=pieces)
    with refusal(run, AT_A_TIME):
        for number, batch in enumerate(batch for _ in range(5) for batch in run.loader):
            run.engine.backward(of_squares(run.model, batch) / 4)
            if number % 4 == 3:
                run.optimizer.step()


def test_accumulating_with_accelerate_is_refused():
    run = made(batch_size=4)
    wrapper = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    optimizer = wrapper.prepare(run.optimizer)
    with refusal(run, AT_A_TIME):
        for batch in (batch for _ in range(3) for batch in run.loader):
            with wrapper.accumulate(run.model):
                run.engine.backward(of_squares(run.model, batch))
                optimizer.step()
                optimizer.zero_grad()


class Trainer(transformers.Trainer):
    """Takes the private loader as it is."""

    def __init__(self, run, **more):
        self.run = run
        super().__init__(model=run.model, optimizers=(run.optimizer, None), **more)

    def get_train_dataloader(self):
        return self.run.loader

    def compute_loss(self, model, inputs, **_):
        return of_squares(model, inputs).mean()


@pytest.mark.parametrize(("accumulation", "pieces"), [(1, None), (2, None), (2, 2), (1, 2)])
def test_a_trainer_takes_the_steps_it_says_or_is_refused(tmp_path, accumulation, pieces):
    run = made(batch_size=4, max_physical_batch_size=pieces)
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=20,
        gradient_accumulation_steps=accumulation,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_grad_norm=0.0,
    )
    trainer = Trainer(run, args=settings)
    if accumulation > 1:
        with refusal(run, AT_A_TIME):
            trainer.train()
    else:
        trainer.train()
        assert run.steps > 0
    assert run.steps == len(run.sums)


def test_a_piece_allows_one_step():
    run = made(rehearse=False)
    batch = next(iter(run.loader))
    run.engine.backward(of_squares(run.model, batch))
    run.optimizer.step()
    run.engine.backward(of_squares(run.model, batch))
    with refusal(run, "step", steps=1):
        run.optimizer.step()


@pytest.mark.parametrize("rehearse", [True, False])
def test_a_step_before_any_piece_is_refused(rehearse):
    run = made(rehearse=rehearse)
    run.engine.backward(of_squares(run.model, [torch.randn(RECORDS, WIDTH)]))
    with refusal(run, "loader|batch|piece"):
        run.optimizer.step()


def test_another_batch_than_the_piece_is_refused():
    run = made(rehearse=False)
    (x,) = next(iter(run.loader))
    run.engine.backward(of_squares(run.model, [x[1:]]))
    with refusal(run, "records"):
        run.optimizer.step()


def test_a_batch_given_up_is_not_released():
    run = made(max_physical_batch_size=5, rehearse=False)
    for batch in run.loader:
        run.engine.backward(of_squares(run.model, batch))
        run.optimizer.step()
        break
    assert run.steps == 0
    run.train(of_squares)
    whole = made(rehearse=False).train(of_squares)
    assert run.steps == len(run.sums) == 1
    assert float((run.sums[0] - whole.sums[0]).norm()) < 1e-4


@pytest.mark.parametrize("used", [True, False])
def test_an_older_pass_is_dead_when_a_newer_one_begins(used):
    run = made(batch_size=4, rehearse=False)
    older = iter(run.loader)
    batch = next(older)
    if used:
        run.engine.backward(of_squares(run.model, batch))
        run.optimizer.step()
    newer = iter(run.loader)
    run.engine.backward(of_squares(run.model, next(newer)))
    run.optimizer.step()
    with refusal(run, "pass|iterat", steps=1 + used):
        next(older)


def test_a_loader_without_an_engine_may_be_read_freely():
    loader = PoissonLoader(records(), sampling_prob=0.3, steps=5)
    one, other = iter(loader), iter(loader)
    assert [len(next(batches)) for batches in (one, one, other, one)] == [1] * 4


def test_what_was_handed_out_says_what_it_is():
    run = made(max_physical_batch_size=5, rehearse=False)
    assert run.loader.piece is None
    seen = []
    for (x,) in run.loader:
        seen.append(run.loader.piece)
        assert run.loader.piece.size == len(x)
        run.engine.backward(of_squares(run.model, [x]))
        run.optimizer.step()
        assert run.loader.ends_batch == (len(seen) == 3)
    assert [piece.size for piece in seen] == [5, 5, 2]
    assert [piece.total for piece in seen] == [RECORDS] * 3
    assert [piece.is_first for piece in seen] == [True, False, False]
    assert [piece.is_last for piece in seen] == [False, False, True]
    assert {piece.rehearsal for piece in seen} == {None}
    assert len({piece.serial for piece in seen}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen[0].size = 1


def test_rehearsals_are_small_and_end_no_batch():
    run, seen = made(), []
    for batch in run.loader:
        seen.append(run.loader.piece)
        run.engine.backward(of_squares(run.model, batch))
        run.optimizer.step()
        assert run.loader.ends_batch == (seen[-1].rehearsal is None)
        assert run.steps == run.loader.ends_batch
    assert len(seen) > 2
    sizes = [piece.size for piece in seen[:-1]]
    assert all(1 <= size <= len(run.loader.dataset) for size in sizes)
    assert sum(size > 8 for size in sizes) <= 3 < len(sizes) / 2
    assert seen[-1].rehearsal is None


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"max_physical_batch_size": 1}])
def test_it_is_a_loader_to_frameworks(options):
    def collate(items):
        return torch.stack([item[0] for item in items])

    workers = {k: v for k, v in options.items() if k == "num_workers"}
    loader = DataLoader(
        records(),
        4,
        collate_fn=collate,
        **workers,
        **({"prefetch_factor": 3, "persistent_workers": True} if workers else {}),
    )
    run = made(loader, **{k: v for k, v in options.items() if k != "num_workers"})
    assert isinstance(run.loader, DataLoader)
    for name in ("dataset", "collate_fn", "num_workers", "pin_memory", "persistent_workers"):
        assert getattr(run.loader, name) == getattr(loader, name), name
    assert run.loader.prefetch_factor == loader.prefetch_factor
    assert len(run.loader) == 3
    assert run.loader.sampler is not None


# Which records


class Odd(Sampler):
    """Some rule of the user's own."""

    def __iter__(self):
        return iter(range(1, RECORDS, 2))

    def __len__(self):
        return RECORDS // 2


class Reversed(SequentialSampler):
    """A subclass is another sampler."""

    def __iter__(self):
        return iter(range(RECORDS // 2))


SAMPLERS = {
    "subset": lambda _: SubsetRandomSampler(range(6)),
    "weighted": lambda _: WeightedRandomSampler([0.0] * 6 + [1.0] * 6, RECORDS),
    "own": lambda _: Odd(),
    "a list": lambda _: [0, 1, 2, 3],
    "subclass": Reversed,
    "with replacement": lambda data: RandomSampler(data, replacement=True),
    "fewer": lambda data: RandomSampler(data, num_samples=5),
    "distributed": lambda data: DistributedSampler(data, num_replicas=2, rank=0),
    "of another data set": lambda _: SequentialSampler(range(6)),
}

CHOICES = {
    **{name: (lambda data, make=make: {"sampler": make(data), "batch_size": 4})
       for name, make in SAMPLERS.items()},
    "batches": lambda data: {"batch_sampler": BatchSampler(SequentialSampler(data), 4, True)},
    "lists of batches": lambda _: {"batch_sampler": [[0, 1], [2, 3]]},
    "without the last": lambda _: {"batch_size": 5, "drop_last": True},
}  # fmt: skip


@pytest.mark.parametrize("engine", [PrivacyEngine, OpacusEngine])
@pytest.mark.parametrize("name", CHOICES)
def test_samplers_of_the_users_own_are_refused(name, engine):
    """All records would be sampled, also those that were left out for a reason."""
    data, model = records(), nn.Linear(WIDTH, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fix = r"torch\.utils\.data\.Subset|each process samples|eave drop_last out"
    with pytest.raises(ValueError, match=fix):
        engine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(data, **CHOICES[name](data)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    assert type(optimizer) is torch.optim.SGD
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    "settings",
    [
        {"shuffle": True},
        {"shuffle": True, "generator": torch.Generator()},
        {"sampler": SequentialSampler(range(RECORDS))},
        {"sampler": RandomSampler(range(RECORDS))},
    ],
)
def test_plain_order_and_plain_shuffling_are_not(settings):
    loader = DataLoader(records(), RECORDS, **settings)
    assert made(loader).train(of_squares).steps == 1


@pytest.mark.parametrize("engine", [PrivacyEngine, OpacusEngine])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_record_that_comes_twice_is_refused(engine, depth):
    data = Subset(records(), [0, 0, 0, 0, 0, *range(1, 8)])
    for _ in range(depth - 1):
        data = Subset(data, list(range(10)))
    model = nn.Linear(WIDTH, 2)
    with pytest.raises(ValueError, match="Subset"):
        engine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, 4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


@pytest.mark.parametrize("kind", [list, torch.tensor, range])
def test_a_subset_without_repetitions_is_trained_on(kind):
    chosen = range(2, 8)
    data = Subset(records(), chosen if kind is range else kind(list(chosen)))
    expected = made(records([0, 1, *range(8, RECORDS)])).train(of_squares)
    assert torch.equal(made(data).train(of_squares).sums[0], expected.sums[0])


class Consenting(TensorDataset):
    """Records without consent are replaced by nothing much."""

    def __getitem__(self, i):
        (x,) = super().__getitem__(i)
        return (x if i % 2 else torch.zeros_like(x),)


class AtOnce(TensorDataset):
    """The same for many at a time, as loaders of torch ask for them."""

    def __getitems__(self, indices):
        return [(self.tensors[0][i] if i % 2 else torch.zeros(WIDTH),) for i in indices]


def doubled(items):
    return [2 * torch.stack([item[0] for item in items])]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Consenting, AtOnce])
def test_what_a_data_set_makes_of_its_records_is_trained_on(kind, workers):
    seen = []

    def loss(model, batch):
        seen.append(batch[0])
        return of_squares(model, batch)

    (x,) = records().tensors
    made(kind(x), num_workers=workers).train(loss)
    allowed = {tuple(row) for row in x[1::2].tolist()} | {(0.0,) * WIDTH}
    assert {tuple(row) for row in torch.cat(seen).tolist()} == allowed


@pytest.mark.parametrize("workers", [0, 1])
def test_the_users_own_collate_function_is_used(workers):
    sums = [
        made(data, num_workers=workers, collate_fn=collate).train(of_squares).sums[0]
        for data, collate in ((records(), doubled), (rows(2 * records().tensors[0]), None))
    ]
    assert torch.equal(sums[0], sums[1])


# Empty samples


class Plain:
    """A batch that is nothing that a library knows."""

    def __init__(self, x, y):
        self.x, self.y = x, y


@dataclass
class Data:
    """A batch as a dataclass."""

    x: torch.Tensor
    y: torch.Tensor
    name: str = "a batch"


Named = collections.namedtuple("Named", ["x", "y"])


FORMS: dict[str, tuple[Any, Any]] = {
    "list": (lambda x, y: [x, y], lambda b: b),
    "tuple": (lambda x, y: (x, y), lambda b: b),
    "named tuple": (Named, lambda b: b),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "nested": (lambda x, y: {"in": [x], "out": {"y": y}}, lambda b: (b["in"][0], b["out"]["y"])),
    "dataclass": (Data, lambda b: (b.x, b.y)),
    "user dict": (
        lambda x, y: collections.UserDict(x=x, y=y),
        lambda b: (b["x"], b["y"]),
    ),
    "batch encoding": (
        lambda x, y: transformers.BatchEncoding({"x": x, "y": y}),
        lambda b: (b.x, b.y),
    ),
    "plain object": (Plain, lambda b: (b.x, b.y)),
    "with lists": (
        lambda x, y: {"x": x, "y": y, "names": ["a"] * len(x)},
        lambda b: (b["x"][: len(b["names"])], b["y"]),
    ),
    "labels as a list": (
        lambda x, y: (x, y.tolist()),
        lambda b: (b[0], torch.tensor(b[1])),
    ),
}


@dataclass
class Collates:
    """Into one of the forms."""

    form: str

    def __call__(self, items):
        x, y = (torch.stack(part) for part in zip(*items, strict=True))
        return FORMS[self.form][0](x, y)


KINDS = [*((form, "none") for form in FORMS), ("list", "mean"), ("batch encoding", "mean")]


@pytest.mark.parametrize(("form", "reduction"), KINDS)
def test_empty_samples_cost_the_user_nothing(form, reduction):
    sizes = []

    def loss(model, batch):
        x, y = FORMS[form][1](batch)
        piece = run.loader.piece
        if piece.rehearsal is None:
            sizes.append(piece.size)
        assert len(x) == len(y) == max(1, piece.size)
        return F.cross_entropy(model(x), y, reduction=reduction)

    torch.manual_seed(0)
    x = torch.randn(40, WIDTH)
    run = private(
        nn.Linear(WIDTH, 2), rows(x, torch.arange(40) % 2), batch_size=1, collate_fn=Collates(form)
    )
    run.train(loss)
    assert run.steps == len(run.sums) == len(sizes) == len(run.loader) == 40
    assert sizes.count(0) > 5
    assert [bool(total.any()) for total in run.sums] == [size > 0 for size in sizes]
    assert run.engine.skipped_examples == 0


def test_a_model_need_not_be_called_for_an_empty_sample():
    run = made(records(), batch_size=1)
    for _ in range(5):
        for batch in run.loader:
            run.optimizer.zero_grad()
            if run.loader.piece.size:
                run.engine.backward(of_squares(run.model, batch))
            run.optimizer.step()
    assert run.steps == len(run.sums) == 5 * RECORDS
    assert sum(not total.any() for total in run.sums) > 5


def test_empty_samples_cannot_be_skipped():
    """That would condition the sampling on what the ledger does not know."""
    run = made(records(), batch_size=1, rehearse=False)
    with refusal(run, AT_A_TIME, steps=None):
        for batch in (batch for _ in range(20) for batch in run.loader):
            if run.loader.piece.size == 0:
                continue
            run.engine.backward(of_squares(run.model, batch))
            run.optimizer.step()


def test_a_step_is_released_for_every_batch_drawn():
    """The loop that used to skip what it could not use."""
    run = made(records(), batch_size=1)
    for _ in range(10):
        for batch in run.loader:
            if len(batch[0]) == 0:
                continue
            run.engine.backward(of_squares(run.model, batch))
            run.optimizer.step()
    assert run.steps == len(run.sums) == 10 * RECORDS


class Explodes(nn.Linear):
    """Has no finite gradient where there is nothing to learn from."""

    def forward(self, x):
        return super().forward(x) / 0


def test_a_stand_in_contributes_nothing_whatever_it_gives():
    run = private(Explodes(WIDTH, 2), records(), batch_size=1, rehearse=False)
    run.train(of_squares, passes=3)
    assert run.steps == len(run.sums) == 3 * RECORDS
    assert all(not total.any() for total in run.sums)


class Texts(Dataset):
    """Token ids of different lengths."""

    def __init__(self, count=30):
        maker = torch.Generator().manual_seed(1)
        self.items = [torch.randint(1, 20, (2 + i % 4,), generator=maker) for i in range(count)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return {"input_ids": self.items[i], "labels": i % 2}


def encoded(items):
    ids = nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], batch_first=True)
    return transformers.BatchEncoding(
        {
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "labels": torch.tensor([item["labels"] for item in items]),
        }
    )


def of_bert(model, batch):
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    return F.cross_entropy(logits, batch["labels"], reduction="none")


def bert():
    settings = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "max_position_embeddings": 8,
    }
    config = transformers.BertConfig(
        **settings, num_attention_heads=2, intermediate_size=8, num_labels=2
    )
    return transformers.BertForSequenceClassification(config)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transformer_is_never_given_an_empty_batch(workers):
    torch.manual_seed(0)
    run = private(bert().train(), Texts(), batch_size=1, collate_fn=encoded, num_workers=workers)
    run.train(of_bert)
    assert run.steps == len(run.sums) == 30
    assert sum(not total.any() for total in run.sums) > 2
