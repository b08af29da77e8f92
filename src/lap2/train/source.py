"""The user's own loader: what of it can be kept when lap2 draws the samples, and what cannot.

Every record of the data set is in every sample with the same probability, independently of all
others. A loader that chooses records in another way is refused, for what it chooses would be
dropped in silence: records that must not be trained on would be.
"""

# pyright: basic

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

__all__ = ["check_source", "is_plain_tensors"]


def check_source(loader: Any) -> None:
    """Check that samples of all records may take the place of what a loader yields.

    Raises:
        TypeError: it is no DataLoader over a map-style data set.
        ValueError: it chooses records, or has one of them several times.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"data_loader must be a torch DataLoader, got {type(loader).__name__}")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"data_loader's class must not have its own __iter__, got {type(loader).__name__}: "
            "what that does to batches would be skipped; do it in the data set or in collate_fn"
        )
    kind = type(loader.dataset)
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError("data_loader must be over a map-style data set, got an IterableDataset")
    if not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
        raise TypeError(
            "data_loader must be over a map-style data set, with __len__ and __getitem__, got "
            f"{kind.__name__}"
        )
    _check_batches(loader)
    _check_sampler(loader.sampler, len(loader.dataset))  # type: ignore[arg-type]
    _refuse_repeated(loader.dataset)


def is_plain_tensors(dataset: Dataset, loader: DataLoader | None) -> bool:
    """Whether a batch is nothing but rows of tensors, so that these may be indexed all at once.

    Args:
        dataset: of which class exactly matters: a subclass may do more.
        loader: the user's own, if there is one.
    """
    return type(dataset) is TensorDataset and (
        loader is None
        or (
            type(loader) is DataLoader
            and loader.collate_fn is default_collate
            and loader.num_workers == 0
        )
    )


def _check_batches(loader: DataLoader) -> None:
    batches = loader.batch_sampler
    if batches is not None and (type(batches) is not BatchSampler or loader.batch_size is None):
        raise ValueError(
            "data_loader must be made with a batch_size and torch's own batch_sampler, got "
            f"batch_sampler={type(batches).__name__}: batches are random samples of all records. "
            "Leave batch_sampler out; torch.utils.data.Subset chooses records"
        )
    if loader.batch_size is None:
        raise ValueError("data_loader must have a batch_size, got None")
    if loader.drop_last:
        raise ValueError(
            "data_loader must have drop_last=False, got True: there is no smaller last batch, and "
            "no record is left out. Leave drop_last out; torch.utils.data.Subset chooses records"
        )


def _check_sampler(sampler: Any, size: int) -> None:
    """Refuse all but every record once, in any order."""
    got = type(sampler).__name__
    if type(sampler) in {RandomSampler, SequentialSampler}:
        drawn, of = len(sampler), len(sampler.data_source)
        if getattr(sampler, "replacement", False):
            got += "(replacement=True)"
        elif drawn == of == size:
            return
        else:
            got += f" that draws {drawn} from {of} for a data set of {size}"
    share = (
        ", as each process samples its own share" if isinstance(sampler, DistributedSampler) else ""
    )
    raise ValueError(
        "data_loader's sampler must be torch's own SequentialSampler or RandomSampler, over every "
        f"record once, got {got}: it would have no effect, as every record is in every sample with "
        f"the same probability. Leave it out{share}, and choose records, if you must, with "
        "torch.utils.data.Subset"
    )


def _refuse_repeated(dataset: Dataset) -> None:
    """Each item of the data set must be another record, as far as torch's own classes tell."""
    if not isinstance(dataset, Subset | ConcatDataset):
        return
    found: dict[int, list[np.ndarray]] = {}
    for origin, index in _origins(dataset, np.arange(len(dataset))):  # type: ignore[arg-type]
        found.setdefault(id(origin), []).append(index)
    for parts in found.values():
        index, counts = np.unique(np.concatenate(parts), return_counts=True)
        if counts.max(initial=1) > 1:
            raise ValueError(
                "data_loader's data set must have each record once, got record "
                f"{index[counts.argmax()]} of an inner data set {counts.max()} times: it would "
                "count several times its clip. Leave repeated indices out of "
                "torch.utils.data.Subset, and repeated data sets out of ConcatDataset"
            )


def _origins(dataset: Any, index: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
    """The innermost data sets that items come from, and which of their records these are."""
    if isinstance(dataset, Subset):
        inner = np.asarray(dataset.indices)[index]
        if inner.dtype.kind in "iu":
            inner = np.where(inner < 0, inner + len(dataset.dataset), inner)  # type: ignore[arg-type]
        yield from _origins(dataset.dataset, inner)
    elif isinstance(dataset, ConcatDataset):
        ends = np.asarray(dataset.cumulative_sizes)
        which = np.searchsorted(ends, index, side="right")
        for number, part in enumerate(dataset.datasets):
            yield from _origins(part, index[which == number] - (ends[number] - len(part)))  # type: ignore[arg-type]
    else:
        yield dataset, index
