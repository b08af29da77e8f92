"""Which loaders may be made private, and which would do something else than they say."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from lap2.train import PrivacyEngine
from lap2.train.source import check_source, is_plain_tensors

SIZE = 40
DATA = TensorDataset(torch.randn(SIZE, 4), torch.randint(0, 2, (SIZE,)))


class Backwards(Sampler):
    def __iter__(self):
        return iter(range(SIZE - 1, -1, -1))

    def __len__(self):
        return SIZE


class Shuffled(RandomSampler):
    """Might choose records: nobody knows."""


class Pairs(BatchSampler):
    """Might make other batches."""


class Consenting(TensorDataset):
    """Replaces records without consent."""

    def __getitem__(self, index):
        return super().__getitem__(index if index % 2 else 1)


class Filtering(DataLoader):
    def __iter__(self):
        for x, y in super().__iter__():
            yield x[y > 0], y[y > 0]


def collate(batch):
    return default_collate(batch)


class Padding(DataLoader):
    """Like those that only choose a collate function."""

    def __init__(self, dataset, **settings):
        super().__init__(dataset, collate_fn=collate, **settings)


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


class Unsized(Dataset):
    def __getitem__(self, index):
        return index


def loader(**settings):
    return DataLoader(DATA, **{"batch_size": 8, **settings})


SAMPLERS = {
    "SubsetRandomSampler": SubsetRandomSampler(range(8)),
    "WeightedRandomSampler": WeightedRandomSampler([1.0] * SIZE, SIZE),
    "DistributedSampler": DistributedSampler(DATA, num_replicas=2, rank=0),
    "Backwards": Backwards(),
    "Shuffled": Shuffled(DATA),
    r"RandomSampler\(replacement=True\)": RandomSampler(DATA, replacement=True),
    "RandomSampler that draws 5 from 40": RandomSampler(DATA, num_samples=5),
    "RandomSampler that draws 80 from 40": RandomSampler(DATA, num_samples=2 * SIZE),
    "RandomSampler that draws 10 from 10": RandomSampler(range(10)),
    "RandomSampler that draws 40 from 10": RandomSampler(range(10), num_samples=SIZE),
    "SequentialSampler that draws 10 from 10 for a data set of 40": SequentialSampler(range(10)),
}

REPEATED = {
    "record 3 .* 5 times": lambda: Subset(DATA, [3] * 5 + [1]),
    "record 39 .* 2 times": lambda: Subset(DATA, [-1, 0, 39]),
    "record 7 .* 2 times": lambda: Subset(Subset(DATA, [7, 8, 7]), [0, 2]),
    "record 0 .* 2 times": lambda: ConcatDataset([DATA, DATA]),
    "record 1 .* 3 times": lambda: (
        ConcatDataset([Subset(DATA, [1, 2]), Subset(DATA, [1])])
        + Subset(DATA, torch.tensor([4, 1]))
    ),
    "record a .* 2 times": lambda: Subset({"a": 1, "b": 2}, ["a", "b", "a"]),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_that_choose_are_refused(name):
    sampler = SAMPLERS[name]
    with pytest.raises(ValueError, match=rf"data_loader's sampler must be .*got {name}") as error:
        check_source(loader(sampler=sampler))
    assert "torch.utils.data.Subset" in str(error.value)
    assert ("its own share" in str(error.value)) == isinstance(sampler, DistributedSampler)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: loader(drop_last=True), "drop_last=False, got True"),
        (lambda: loader(batch_size=None), "must have a batch_size, got None"),
        (
            lambda: DataLoader(DATA, batch_sampler=BatchSampler(range(8), 4, drop_last=False)),
            "batch_sampler=BatchSampler",
        ),
        (
            lambda: DataLoader(DATA, batch_sampler=Pairs(range(8), 4, drop_last=False)),
            "batch_sampler=Pairs",
        ),
    ],
)
def test_batches_that_are_made_otherwise_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        check_source(made())


@pytest.mark.parametrize("message", REPEATED)
def test_repeated_records_are_refused(message):
    with pytest.raises(ValueError, match=rf"each record once, got {message}.*utils\.data\.Subset"):
        check_source(DataLoader(REPEATED[message](), batch_size=2))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: [DATA.tensors], "must be a torch DataLoader, got list"),
        (lambda: DataLoader(Endless(), batch_size=2), "map-style data set, got an IterableDataset"),
        (lambda: DataLoader(Unsized(), batch_size=2), "with __len__ and __getitem__, got Unsized"),
        (lambda: Filtering(DATA, batch_size=2), "not have its own __iter__, got Filtering"),
    ],
)
def test_what_is_no_ordinary_loader_is_refused(made, message):
    with pytest.raises(TypeError, match=message):
        check_source(made())


@pytest.mark.parametrize(
    "made",
    [
        loader,
        lambda: loader(shuffle=True, generator=torch.Generator()),
        lambda: loader(sampler=RandomSampler(DATA, num_samples=SIZE)),
        lambda: loader(sampler=SequentialSampler(range(SIZE)), num_workers=2),
        lambda: Padding(DATA, batch_size=8),
        lambda: DataLoader([1, 2, 3], batch_size=2),
        lambda: DataLoader(Consenting(*DATA.tensors), batch_size=8),
        lambda: DataLoader(Subset(DATA, range(8)), batch_size=8),
        lambda: DataLoader(Subset(DATA, []), batch_size=8),
        lambda: DataLoader(Subset(DATA, np.arange(8)), batch_size=8),
        lambda: DataLoader(Subset(DATA, [torch.tensor(k) for k in (-1, 0)]), batch_size=8),
        lambda: DataLoader(Subset(Subset(DATA, [7, 8, 7]), [1, 2]), batch_size=2),
        lambda: DataLoader(random_split(DATA, [0.5, 0.5])[0], batch_size=8),
        lambda: DataLoader(ConcatDataset(random_split(DATA, [0.5, 0.5])), batch_size=8),
        lambda: DataLoader(ConcatDataset([DATA, TensorDataset(*DATA.tensors)]), batch_size=8),
        lambda: DataLoader(Subset({"a": 1, "b": 2}, ["a", "b"]), batch_size=2),
    ],
)
def test_loaders_of_every_record_once_are_accepted(made):
    check_source(made())


@pytest.mark.parametrize(
    "made",
    [
        lambda: loader(sampler=SAMPLERS["SubsetRandomSampler"]),
        lambda: loader(drop_last=True),
        lambda: DataLoader(Subset(DATA, [0] * 5 + list(range(1, 16))), batch_size=8),
        lambda: Filtering(DATA, batch_size=8),
    ],
)
def test_the_engine_refuses_them_before_it_changes_anything(made):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = PrivacyEngine()
    with pytest.raises((TypeError, ValueError), match="data_loader"):
        engine.make_private(
            module=model, optimizer=optimizer, data_loader=made(), noise_multiplier=1.0,
            max_grad_norm=1.0,
        )  # fmt: skip
    assert type(optimizer) is torch.optim.SGD
    assert not model._forward_hooks
    assert engine.accountant.steps == 0


def test_only_plain_tensors_are_indexed_all_at_once():
    assert is_plain_tensors(DATA, None)
    assert is_plain_tensors(DATA, loader(shuffle=True))
    for other in (
        loader(num_workers=1),
        loader(collate_fn=collate),
        Padding(DATA, batch_size=8),
    ):
        assert not is_plain_tensors(DATA, other)
    assert not is_plain_tensors(Consenting(*DATA.tensors), None)
    assert not is_plain_tensors(Subset(DATA, range(8)), None)
