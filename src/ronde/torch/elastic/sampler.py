"""`ElasticSampler`: which samples this rank takes, in worlds whose size changes within an epoch.

1. The order of an epoch follows from the seed and the epoch alone. Ranks take its samples in turn: the first `size`
   samples are the first ones of the ranks, and so on.
2. As long as all ranks record the same number of samples, what all of them have processed is a prefix of the order, and
   each rank knows it without a message about samples. Otherwise the ranks exchange their records.
3. Ranks exchange before each commit. So no record is lost with a rank, and a commit has exactly the samples whose
   gradients are in its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from ronde.comm.world import rank, size
from ronde.engine.objects import allgather_object
from ronde.engine.operations import allreduce
from ronde.errors import UsageError
from ronde.types import Max

__all__ = ["ElasticSampler", "batch_size_of"]


class ElasticSampler(Sampler[int]):  # type: ignore[misc]  # PyTorch's class is Any here
    """Deals the samples of a dataset to the ranks, and after a change of the ranks those that are left of the epoch.

        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = DataLoader(dataset, batch_size, sampler=sampler)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

        for number, (images, labels) in enumerate(loader):
            step(images, labels)
            sampler.record_batch(number, batch_size)
            state.commit()
        sampler.set_epoch(state.epoch + 1)

    Make it after `init`, with the same arguments on all ranks, and give it to a `TorchState`.

    Args:
        dataset: Something with a length, which does not change.
        shuffle: Whether each epoch has a random order (default: True).
        seed: Of the random orders (default: 0).
        pad: Whether the first samples that are left are dealt again, until all ranks have equally many, as in Horovod
            (default: True). With False each sample is dealt once, and ranks may differ by one sample.

    Attributes:
        epoch: The number of the epoch.
        rank, num_replicas: This process's rank, and the number of ranks, since the last `reset`.
        num_samples: How many samples this rank takes in the rest of the epoch.
        total_size: How many all ranks take.
        indices: The samples that this rank takes, in order.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, pad: bool = True) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.pad = pad
        self.epoch = 0
        self._order_of: tuple[int, int] | None = None  # the epoch and length of `_order`
        self._prefix = 0  # so many of the order were processed by all ranks at the last reset
        self._others: set[int] = set()  # further processed samples that this rank knows
        self._recorded = 0  # so many of `indices`, from the first on, are processed
        self._agreed = 0  # and so many on each rank
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples

    # Records

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record a batch as processed.

        Args:
            batch_idx: The number of the batch, from 0 since the loader's iteration began. One beyond the samples that
                are left, as in a loop that goes on after `state.restore()`, is the next batch, as with Horovod.
            batch_size: The number of samples in each batch.
        """
        begin, end = self._bounds(batch_idx, batch_size)
        if begin == len(self.indices):
            begin, end = self._recorded, min(self._recorded + batch_size, len(self.indices))
        if begin <= self._recorded:
            self._recorded = max(self._recorded, end)
        else:
            self.record_indices(self.indices[begin:end])

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record samples as processed, by their numbers in the dataset."""
        self._others.update(int(index) for index in indices)
        self._is_in_turn = False

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of a batch, by their numbers in the dataset."""
        begin, end = self._bounds(batch_idx, batch_size)
        return self.indices[begin:end]

    @property
    def processed_indices(self) -> set[int]:
        """The samples of this epoch that this rank, or at the last commit any rank, has recorded."""
        prefix, others = self._known()
        return {int(index) for index in self._order[:prefix]} | others

    @property
    def processed_num(self) -> int:
        """The number of processed samples of this epoch, of all ranks, if they have recorded as many as this one."""
        if self._others or not self._is_in_turn:
            return len(self.processed_indices)
        processed: int = min(self._prefix + self._recorded * self.num_replicas, len(self._order))
        return processed

    @property
    def remaining_indices(self) -> list[int]:
        """The samples that were left of the epoch at the last `reset`, in order."""
        found: list[int] = self._remaining.tolist()
        return found

    # Epochs and changes

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: no sample is processed, and the samples have another order.

        Call it at the end of an epoch with the next number. At the beginning it does no harm: with the number of an
        epoch of which samples are left it keeps the records, so that an interrupted epoch goes on.
        """
        if epoch == self.epoch and 0 < self.processed_num < len(self._order):
            return
        self.epoch = epoch
        self._forget()
        self.reset()

    def reset(self) -> None:
        """Deal the samples that are left of the epoch to the ranks of the present world.

        `ronde.elastic.run` calls it, through the state, after each change.
        """
        if self._order_of is not None:
            self._prefix, self._others = self._known()
        self.num_replicas, self.rank = size(), rank()
        self._order = self._make_order()
        self._remaining = self._order[self._prefix :]
        if self._others:
            self._remaining = self._remaining[~np.isin(self._remaining, list(self._others))]
        ranks, left = self.num_replicas, len(self._remaining)
        self.num_samples = -(-left // ranks) if self.pad else len(range(self.rank, left, ranks))
        self.total_size = self.num_samples * ranks if self.pad else left
        dealt = np.resize(self._remaining, self.total_size)  # from its beginning again
        self.indices: list[int] = dealt[self.rank :: ranks].tolist()
        self._recorded = self._agreed = 0
        self._is_in_turn = True  # whether nothing else is recorded since the last exchange

    def exchange(self, name: str = "sampler") -> None:
        """Learn which samples the other ranks have recorded. All ranks call it; `TorchState` does before each commit.

        `name`: the same on all ranks; different samplers of a process have different ones. Raises PeerLostError.
        """
        if size() == 1:
            return
        mine = np.array([self._recorded, -self._recorded, not self._is_in_turn], np.int64)
        most = allreduce(mine, op=Max, name=f"ronde.elastic.{name}")
        if most[2] == 0 and most[0] == -most[1]:
            self._agreed = self._recorded
            return
        records = allgather_object((self.epoch, *self._known()), f"ronde.elastic.{name}.records")
        of_epoch = [record[1:] for record in records if record[0] == self.epoch]
        prefix = max(prefix for prefix, _ in of_epoch)
        self._others |= {int(index) for index in self._order[self._prefix : prefix]}
        self._others |= set().union(*(others for _, others in of_epoch))
        self._is_in_turn = True

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank knows of the epoch: "epoch", "processed_num" (the first so many of the order) and
        "processed_indices" (further ones)."""
        prefix, others = self._known()
        return {"epoch": self.epoch, "processed_num": prefix, "processed_indices": sorted(others)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state, in the present world; also from one of Horovod's sampler without shuffling."""
        self.epoch = state_dict["epoch"]
        self._forget()
        self._prefix = state_dict.get("processed_num", 0)
        self._others = {int(index) for index in state_dict.get("processed_indices", ())}
        self.reset()

    def _forget(self) -> None:
        self._order_of, self._prefix, self._others = None, 0, set()

    def _bounds(self, batch_idx: int, batch_size: int) -> tuple[int, int]:
        if batch_idx < 0 or batch_size < 1:
            raise UsageError(f"batch {batch_idx} of {batch_size} samples is not a batch of an epoch")
        begin = min(batch_idx * batch_size, len(self.indices))
        return begin, min(begin + batch_size, len(self.indices))

    def _known(self) -> tuple[int, set[int]]:
        """Return how many of the order all ranks have processed, and which further samples are known to be."""
        done = min(self._agreed * self.num_replicas, len(self._remaining))
        others = {*self._others, *self.indices[self._agreed : self._recorded]}
        if len(self._remaining) == len(self._order) - self._prefix:
            prefix = self._prefix + done
        else:
            prefix = self._prefix
            others.update(self._remaining[:done].tolist())
        order = self._order
        while prefix < len(order) and int(order[prefix]) in others:
            others.discard(int(order[prefix]))
            prefix += 1
        return prefix, others

    def _make_order(self) -> Any:
        wanted = self.epoch, len(self.dataset)
        if self._order_of == wanted:
            return self._order
        self._order_of = wanted
        if not self.shuffle:
            return np.arange(wanted[1])
        return np.random.default_rng([self.seed, self.epoch]).permutation(wanted[1])


# Loaders

_LOADER = "DataLoader(data, batch_size=32, sampler=state.sampler)"


def batch_size_of(loader: Any, sampler: ElasticSampler) -> int:
    """Return the number of samples in a batch of a DataLoader, whose batches are consecutive samples of the sampler.

    Raises UsageError, which says what to do, for any other loader.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        raise UsageError(
            "the training loader reads an IterableDataset, in which fit cannot go on at the last commit: give it a "
            f"dataset with a length and an index, as in {_LOADER}, or write the loop with state.stream() or "
            "state.streams() in place of the Trainer"
        )
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"the training loader is a {type(loader).__name__}: give fit, or return from train_dataloader(), a single "
            f"{_LOADER}"
        )
    batches: Any = loader.batch_sampler
    if batches is None:
        raise UsageError(f"the training loader has batch_size=None: give it a number, as in {_LOADER}")
    if type(batches) is not BatchSampler:
        raise UsageError(
            f"the training loader has a batch_sampler of the class {type(batches).__name__}, whose batches may have "
            f"any samples: use {_LOADER}, or BatchSampler(state.sampler, 32, drop_last=False)"
        )
    if batches.sampler is not sampler:
        name = type(batches.sampler).__name__
        advice = "give the Trainer use_distributed_sampler=False, and " if "Distributed" in name else ""
        raise UsageError(
            f"a {name} deals the samples of the training loader, and not the sampler of the state: {advice}make the "
            f"loader as {_LOADER}"
        )
    return int(batches.batch_size)
