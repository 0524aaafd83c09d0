"""A loader whose samples the state does not deal is an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import ronde  # noqa: E402
import ronde.torch.elastic as elastic  # noqa: E402
from ronde.torch.elastic.sampler import batch_size_of  # noqa: E402

Loader, BatchSampler = torch.utils.data.DataLoader, torch.utils.data.BatchSampler


class Numbers(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_only_loaders_with_the_sampler_of_the_state_fit() -> None:
    ronde.init()
    data = list(range(10))
    sampler = elastic.ElasticSampler(data)
    assert batch_size_of(Loader(data, 4, sampler=sampler), sampler) == 4
    assert batch_size_of(Loader(data, batch_sampler=BatchSampler(sampler, 3, False)), sampler) == 3

    class Buckets(BatchSampler):  # type: ignore[misc, valid-type]
        pass

    distributed = torch.utils.data.DistributedSampler(data, 2, 0)
    for loader, message in (
        (Loader(data, 4), "a SequentialSampler deals the samples"),
        (Loader(data, 4, sampler=distributed), "use_distributed_sampler=False"),
        (Loader(data, 4, sampler=elastic.ElasticSampler(data)), "not the sampler of the state"),
        (Loader(data, batch_sampler=Buckets(sampler, 3, False)), "a batch_sampler of the class Buckets"),
        (Loader(data, None, sampler=sampler), "batch_size=None"),
        (Loader(Numbers(), 4), r"state\.stream\(\) or state\.streams\(\)"),
        ({"a": Loader(data, 4)}, "is a dict"),
    ):
        with pytest.raises(ronde.UsageError, match=message):
            batch_size_of(loader, sampler)
    ronde.shutdown()
